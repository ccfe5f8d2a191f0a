"""The command `clipwise`: finds the sub-command, runs it, and turns errors into one line and an exit code.

Exit codes: 0 success, 1 a finding (what that is, the command's help says), 2 bad usage or input, 130 interrupted,
141 the reader of the output went away.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from clipwise.errors import ClipwiseError, DataError

__all__ = ["COMMANDS", "Command", "build_parser", "main"]

COMMANDS = ("demo", "train", "predict", "report", "evaluate", "check", "epsilon", "noise", "data", "ntk", "reproduce")


class Command(Protocol):
    """What a command module has. It imports what is heavy (torch, say) inside `run`, so that help is instant."""

    NAME: str
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do it; the result is the exit code."""
        ...


def _load(name: str) -> Command:
    return cast(Command, importlib.import_module(f"clipwise.cli.{name}"))


class _Version(argparse.Action):
    """`--version`, with what a bug report needs; read from metadata so that torch is not imported."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version
        from platform import python_version

        import clipwise

        print(f"clipwise {clipwise.__version__} (torch {version('torch')}, Python {python_version()})")
        parser.exit()


def build_parser(names: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """The parser with the named commands; with one name only that command's module is imported."""
    parser = argparse.ArgumentParser(
        prog="clipwise", description="Differentially private deep learning that stays calibrated."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the versions and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for name in names:
        command = _load(name)
        sub = commands.add_parser(command.NAME, help=command.HELP, description=command.HELP)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return parser


def _fail(message: str) -> int:
    said = "\n  ".join(" ".join(line.split()) for line in message.split("\n  "))  # listed problems keep their lines
    print(f"clipwise: error: {said}", file=sys.stderr)
    return 2


def _reader_gone() -> int:
    """`clipwise ... | head` is not an error; point stdout elsewhere so that the interpreter's last flush is silent."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141


def _run(argv: list[str]) -> int:
    known = argv[:1] if argv and argv[0] in COMMANDS else COMMANDS
    try:
        args = build_parser(known).parse_args(argv)
    except SystemExit as stop:  # argparse: 0 after --help and --version, 2 after bad usage
        return stop.code if isinstance(stop.code, int) else 0
    try:
        return int(args.run(args))
    except DataError as error:
        if not error.found or not hasattr(args, "show_values"):
            raise
        return _fail(f"{error} {f'There is {error.found}.' if args.show_values else '--show-values shows it.'}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    >>> main(["--version"])
    clipwise ...
    0
    """
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except ClipwiseError as error:
        return _fail(str(error))
    except BrokenPipeError:
        return _reader_gone()
    except KeyboardInterrupt:
        print("clipwise: interrupted", file=sys.stderr)
        return 130
