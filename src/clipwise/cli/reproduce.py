"""`clipwise reproduce NAME`: run a recipe of the paper's experiments from a checkout of the repository.

The recipes are the folders of `papers/`, which use the package and are not part of it: each has a `__main__.py` and
runs with `python -m papers.NAME` in the checkout. This command finds them without importing anything.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from clipwise.cli.terminal import table
from clipwise.errors import DataError

NAME = "reproduce"
HELP = "run a recipe of the paper's experiments, or list them; needs a checkout of the repository"

_EPILOG = """\
examples:
  clipwise reproduce                     what there is
  clipwise reproduce theory --quick      what comes after the name is the recipe's own; --help shows its options

The recipes are looked for in papers/ of the current folder and of the folders above it, then of the checkout that
clipwise was installed from (pip install --editable).

exit code: that of the recipe; 2 when there is no such recipe
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("--json", action="store_true", help="print the list, or the outcome, as JSON (before NAME)")
    parser.add_argument("name", metavar="NAME", nargs="?", help="the recipe; without it, list them")
    parser.add_argument("options", metavar="...", nargs=argparse.REMAINDER, help="options of the recipe")


def checkout() -> Path:
    """The folder that holds `papers/`."""
    here = Path.cwd()
    places = [here, *here.parents, Path(__file__).resolve().parents[3]]
    for place in places:
        if any(place.glob("papers/*/__main__.py")):
            return place
    raise DataError(
        "there is no papers/ folder here or above, nor where clipwise was installed from: the recipes come with a "
        "checkout of the repository, not with the installed package. Change into a checkout."
    )


def recipes(root: Path) -> dict[str, str]:
    """Name and first line of every recipe, read from the files."""
    found = {}
    for main in sorted(root.glob("papers/*/__main__.py")):
        said = [_docstring(path) for path in (main.with_name("__init__.py"), main) if path.is_file()]
        found[main.parent.name] = next((text.splitlines()[0] for text in said if text), "")
    return found


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def _finding(root: Path) -> dict[str, str]:
    """The environment in which Python finds the recipes from any folder: files in the options are the user's own."""
    places = [str(root), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}


def run(args: argparse.Namespace) -> int:
    """Run the recipe, or list all."""
    root = checkout()
    known = recipes(root)
    if args.name is None:
        if args.json:
            print(json.dumps(known, indent=1))
        else:
            print(table(["recipe", "what it reproduces"], [[name, text] for name, text in known.items()], left=2))
        return 0
    if args.name not in known:
        raise DataError(f"there is no recipe {args.name!r} in {root / 'papers'}; there are: {', '.join(known)}.")
    start = time.perf_counter()
    command = [sys.executable, "-m", f"papers.{args.name}", *args.options]
    # With --json standard output is the outcome alone; what the recipe says goes to standard error.
    done = subprocess.run(command, env=_finding(root), stdout=sys.stderr.fileno() if args.json else None, check=False)
    if args.json:
        outcome = {"recipe": args.name, "exit_code": done.returncode, "seconds": round(time.perf_counter() - start, 1)}
        print(json.dumps(outcome))
    return done.returncode
