"""The tables of docs/cli.md: every argument of every command, from its parser. `python -m docs.options` writes them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from clipwise.cli.main import COMMANDS, build_parser
from papers.pages import DOCS, put

PAGE = DOCS / "cli.md"


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {name: each for action in found for name, each in action.choices.items()}


def _written(action: argparse.Action) -> str:
    """As it is typed: `--seeds N`, `CONFIG.toml`, `--data {mnist,digits}`."""
    names = "{" + ",".join(map(str, action.choices)) + "}" if action.choices is not None else action.dest.upper()
    value = action.metavar if isinstance(action.metavar, str) else names
    value = f"{value} ..." if action.nargs in ("+", "*") else value
    if not action.option_strings:
        return value
    return ", ".join(action.option_strings) + ("" if action.nargs == 0 else f" {value}")


def _rows(parser: argparse.ArgumentParser, command: str = "") -> Iterator[str]:
    formatter = parser._get_formatter()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction | argparse._HelpAction):
            continue
        meaning = formatter._expand_help(action) if action.help else ""
        written = f"{command} {_written(action)}".strip().replace("|", r"\|")
        yield f"| `{written}` | {' '.join(meaning.split())} |"
    for name, each in _subcommands(parser).items():
        yield from _rows(each, f"{command} {name}".strip())


def table(name: str) -> str:
    """The arguments of one command as a table."""
    return "\n".join(["| argument | |", "| --- | --- |", *_rows(_subcommands(build_parser([name]))[name])]) + "\n"


if __name__ == "__main__":
    for command in COMMANDS:
        put(PAGE, f"options of {command}", table(command))
