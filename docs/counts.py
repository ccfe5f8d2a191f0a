"""What the repository holds at each of some revisions, as a table: `python -m docs.counts 54aa3db 7c2ada4 HEAD`.

The tables of docs/decisions/0019 and 0022 have these numbers.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import subprocess
from collections import Counter
from collections.abc import Sequence

from papers.pages import ROOT

KINDS = {
    "files of runs": r"papers/.*/runs/",
    "figures": r".*\.(png|svg)$",
    "doors of packages (`__init__.py`)": r"src/.*/__init__\.py$",
    "modules of the package": r"src/.*\.py$",
    "other files of the package": r"src/",
    "tests": r"tests/",
    "recipes of the experiments": r"papers/.*\.py$",
    "their numbers, settings and pages": r"papers/",
    "documents": r"docs/",
    "benchmarks and their results": r"benchmarks/",
    "all others": r"",
}
"""A file is of the first kind whose pattern its path begins with."""

INTERNALS = re.compile(r"_saved_|_raw_saved|_input_metadata|Backward\d")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True, text=True).stdout


def kind_of(path: str) -> str:
    """What a tracked file is there for."""
    return next(kind for kind, pattern in KINDS.items() if re.match(pattern, path))


def code_of(text: str) -> str:
    """A module without its comments and docstrings."""
    parsed = ast.parse(text)
    for node in ast.walk(parsed):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    return ast.unparse(parsed)


def counts(revision: str) -> dict[str, str]:
    """The numbers of one revision, by what they count."""
    paths = _git("ls-tree", "-r", "--name-only", revision).splitlines()
    kinds = Counter(map(kind_of, paths))
    texts = [_git("show", f"{revision}:{path}") for path in paths if re.match(r"src/.*\.py$", path)]
    lengths = sorted(sum(bool(line.strip()) for line in text.splitlines()) for text in texts)
    return {
        **{kind: f"{kinds[kind]:,}" for kind in KINDS},
        "**tracked files**": f"**{len(paths):,}**",
        "median and largest module, lines that are not blank": f"{statistics.median(lengths):.0f} and {lengths[-1]}",
        "files that name torch's internals": str(sum(bool(INTERNALS.search(code_of(text))) for text in texts)),
        "`type: ignore` in the package": str(sum(text.count("type: ignore") for text in texts)),
    }


def table(revisions: Sequence[str]) -> str:
    """One column for each revision."""
    columns = [counts(revision) for revision in revisions]
    names = [_git("rev-parse", "--short", revision).strip() for revision in revisions]
    lines = ["| | " + " | ".join(names) + " |", "| --- " * (len(names) + 1) + "|"]
    lines += [f"| {row} | " + " | ".join(column[row] for column in columns) + " |" for row in columns[0]]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revisions", nargs="+", metavar="REVISION", help="a commit of this repository")
    print(table(parser.parse_args().revisions))
