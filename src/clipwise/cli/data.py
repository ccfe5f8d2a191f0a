"""`clipwise data`: what data sets and weights there are, and whether the files are whole; a schema for one's own."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipwise.cli.terminal import table
from clipwise.errors import DataError
from clipwise.files import replacing

if TYPE_CHECKING:
    from clipwise.data import Entry

NAME = "data"
HELP = (
    "list, fetch and verify data sets and public weights (1 when verify finds a file missing or damaged); "
    "propose a configuration for a table of your own"
)


_ACTIONS = {
    "list": "what there is, where, its licence and size",
    "get": "fetch data sets or weights",
    "verify": "check the SHA-256 of every file (1 when one is missing or damaged)",
    "schema": "propose a configuration for a table of your own, with its columns described",
}
_EPILOG = """\
example:
  clipwise data schema people.csv --target member --output people.toml

Bounds and categories are read off the records, which epsilon does not cover: replace them by what is publicly known.
With --epsilon, --delta and --task they are found with noise, and what that costs is charged to a ledger.

exit code: 0 success, 2 bad usage or input
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions, each with its options."""
    actions = parser.add_subparsers(metavar="ACTION", required=True, dest="action")
    made = {name: actions.add_parser(name, help=text, description=text) for name, text in _ACTIONS.items()}
    for name in ("list", "get", "verify"):
        every = " (default: all of them)" if name != "get" else ""
        made[name].add_argument("names", nargs="*", metavar="NAME", help=f"of data sets or weights{every}")
        made[name].add_argument("--json", action="store_true", help="print the result as JSON")
    schema = made["schema"]
    schema.formatter_class = argparse.RawDescriptionHelpFormatter
    schema.epilog = _EPILOG
    schema.add_argument("file", metavar="FILE", help="a CSV, NPZ or Parquet file")
    schema.add_argument("--target", default="y", metavar="COLUMN", help="the column to predict (default: y)")
    schema.add_argument("--delimiter", default=",", metavar="C", help="between the columns of a CSV file")
    schema.add_argument(
        "--task",
        choices=("classification", "regression"),
        help="what the target is (default: classes if it is text or has few different numbers)",
    )
    schema.add_argument("--epsilon", type=float, help="spend this on finding bounds and categories with noise")
    schema.add_argument("--delta", type=float, help="with --epsilon")
    schema.add_argument("--ledger", metavar="FILE", help="the ledger of --epsilon (default: beside the output)")
    schema.add_argument("--output", metavar="FILE", help="write the configuration there; an existing one is kept")


def _describe(entry: Entry) -> dict[str, Any]:
    """An entry and what is there of it, files not checked."""
    from clipwise.data import find, folders

    shipped = not entry.forms
    found = None if shipped else find(entry, check=False)
    fetch = min((source.size for _, source in entry.attempts()), default=0)
    return {
        "name": entry.name,
        "title": entry.title,
        "kind": entry.kind,
        "licence": entry.licence,
        "present": shipped or found is not None,
        "folder": str(found.folder if found else folders()[0] / entry.name) if not shipped else "",
        "bytes": found.size if found else 0,
        "bytes_to_fetch": 0 if found else fetch,
        "source": found.source if found else ("scikit-learn" if shipped else ""),
        "sources": [source.label for _, source in entry.attempts()],
        "note": found.note if found else entry.note,
    }


def _print_list(rows: list[dict[str, Any]]) -> None:
    from clipwise.data import folders
    from clipwise.progress import size_text

    def size(row: dict[str, Any]) -> str:
        if row["bytes"]:
            return size_text(row["bytes"])
        return f"{size_text(row['bytes_to_fetch'])} to fetch" if row["bytes_to_fetch"] else "-"

    cells = [[row["name"], row["kind"], "yes" if row["present"] else "no", row["licence"], size(row)] for row in rows]
    print(table(["name", "kind", "there", "licence", "size"], cells, left=4))
    print()
    for row in rows:
        if row["bytes"]:
            print(f"  {row['name']} is in {row['folder']}, from {row['source']}")
        if row["note"]:
            print(f"  {row['name']}: {row['note']}")
    print(f"  looked for in {' and then '.join(map(str, folders()))}")


def _get(entries: list[Entry], as_json: bool) -> int:
    from clipwise.data import obtain
    from clipwise.progress import size_text

    rows = []
    for entry in entries:
        found = obtain(entry) if entry.forms else None
        rows.append(_describe(entry))
        if found and not as_json:
            print(f"{entry.name}: {size_text(found.size)} in {found.folder}, from {found.source}")
        elif not as_json:
            print(f"{entry.name}: {entry.note}")
    if as_json:
        print(json.dumps(rows, indent=2))
    return 0


def _verify(entries: list[Entry], named: bool, as_json: bool) -> int:
    """Check every file; an entry that is absent is a finding only when it was asked for by name."""
    from clipwise.data import find, problems

    rows: list[dict[str, Any]] = []
    for entry in entries:
        usable = not entry.forms or find(entry) is not None
        wrong = problems(entry)
        state = "damaged" if wrong else ("ok" if usable else "absent")
        rows.append({"name": entry.name, "state": state, "usable": usable, "wrong": wrong})
    findings = [row for row in rows if row["state"] == "damaged" or (named and row["state"] == "absent")]
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            print(f"{row['name']}: {row['state']}")
            for line in row["wrong"]:
                print(f"  {line}")
    return 1 if findings else 0


def _schema(args: argparse.Namespace) -> int:
    """Propose a configuration; what is read off the records is said beside it, or paid for."""
    from clipwise.data import PrivateSchema
    from clipwise.training import proposal

    if (args.epsilon is None) != (args.delta is None):
        raise DataError("give --epsilon and --delta together.")
    if args.epsilon is not None and args.output is None:
        raise DataError("--epsilon needs --output: what it costs is kept in a ledger beside that file.")
    if args.output is not None and os.path.exists(args.output):
        raise DataError(f"{args.output} exists and is kept; name another file with --output.")
    spend = None if args.epsilon is None else PrivateSchema.within(args.epsilon, args.delta)
    ledger = None if spend is None else args.ledger or f"{args.output.removesuffix('.toml')}.ledger.json"
    text = proposal(
        args.file,
        args.target,
        delimiter=args.delimiter,
        task=args.task,
        spend=spend,
        ledger=ledger,
        tell=lambda line: print(f"clipwise: {line}", file=sys.stderr),
    )
    if args.output is None:
        print(text, end="")
        return 0
    with replacing(Path(args.output), DataError) as file:
        file.write(text.encode())
    print(f"{args.output}: a configuration to start from; `clipwise train {args.output}` trains it.")
    if spend is None:
        print("note: its bounds, categories and classes were read off the records, which epsilon does not cover.")
        print("      Replace them by what is publicly known, then remove `columns_public = false`. With --epsilon")
        print("      bounds and categories are found with noise and paid for.")
    else:
        print(f"({args.epsilon:g}, {args.delta:g}) was spent on its bounds and categories; {ledger} keeps it.")
    return 0


def run(args: argparse.Namespace) -> int:
    """List, get, verify, or propose a schema."""
    from clipwise.data import CATALOG, entry

    if args.action == "schema":
        return _schema(args)

    if args.action == "get" and not args.names:
        raise DataError(f"say what to get: {', '.join(CATALOG)}.")
    entries = [entry(name) for name in args.names] or list(CATALOG.values())
    if args.action == "get":
        return _get(entries, args.json)
    if args.action == "verify":
        return _verify(entries, bool(args.names), args.json)
    rows = [_describe(value) for value in entries]
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        _print_list(rows)
    return 0
