"""`clipwise predict RUN DATA`: the trained model of a run on new rows, as CSV."""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from clipwise._validate import is_line
from clipwise.cli.terminal import add_show_values
from clipwise.errors import DataError

if TYPE_CHECKING:
    from clipwise.data import Table
    from clipwise.training import Predictor

NAME = "predict"
HELP = "apply the trained model of a run to new rows, and write probabilities under the names of the classes"

_EPILOG = """\
examples:
  clipwise predict runs/adult new.csv --output predictions.csv
  clipwise predict runs/adult new.csv --keep id | head
  clipwise predict runs/adult new.csv --recalibration none

DATA is a CSV, NPZ or Parquet file with the columns that the model was trained with, in any order; other columns are
not looked at. Rows are read and predicted a part at a time, in their order. A name that a spreadsheet would take for a
formula is written with an apostrophe before it.

exit code: 0 success, 2 bad usage or input
"""

ROWS = 50_000
"""Of the file that are in memory at a time."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("folder", metavar="RUN", help="the folder of a finished run")
    parser.add_argument("data", metavar="DATA", help="a CSV, NPZ or Parquet file")
    parser.add_argument("--output", metavar="FILE", help="the CSV file to write (default: standard output)")
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="COLUMN",
        help="copy a column, such as an id (repeatable)",
    )
    parser.add_argument(
        "--recalibration",
        choices=("saved", "none"),
        default="saved",
        help="none: switch off the recalibration that the run has saved",
    )
    parser.add_argument("--delimiter", default=",", help="between the columns of a CSV file (default: a comma)")
    parser.add_argument("--trust-code", action="store_true", help="run the module:function that builds the model")
    add_show_values(parser)


def run(args: argparse.Namespace) -> int:
    """Predict, and say with what."""
    from clipwise.data import read_parts
    from clipwise.training import load

    model = load(args.folder, recalibration=args.recalibration != "none", trust_code=args.trust_code)
    header = header_of(model.classes or ("prediction",), args.keep)
    count = 0
    with _output(args.output) as file:
        writer = csv.writer(file, lineterminator="\n")
        for table in read_parts(Path(args.data), args.delimiter, ROWS):
            where = args.data if not count else f"{args.data}, rows counted from {count + 1:,}"
            rows = _predicted(model, table, args.keep, where)
            writer.writerows(rows if count else [header, *rows])  # rows that are refused leave no header behind
            count += len(rows)
    print(f"clipwise: {count:,} rows; {_said(model)}", file=sys.stderr)
    return 0


def _predicted(model: Predictor, table: Table, keep: Sequence[str], where: str) -> list[list[str]]:
    """The rows of the output for some of the input."""
    from clipwise.data import no_column

    absent = [name for name in keep if name not in table]
    if absent:
        raise no_column(where, absent, table, "to keep")
    values = model.predict(table, where) if model.task == "regression" else model.predict_proba(table, where)
    numbers = values.reshape(len(values), -1).astype(str).tolist()
    kept: list[Any] = [table[name] for name in keep]
    return [[*(cell(str(column[k])) for column in kept), *row] for k, row in enumerate(numbers)]


def header_of(names: Sequence[str], keep: Sequence[str]) -> list[str]:
    """The names of the output's columns; names that no header can hold apart are refused.

    >>> header_of(("<=50K", "=1+2", "-1"), ["id"])
    ['id', '<=50K', "'=1+2", '-1']
    """
    header = [cell(name) for name in (*keep, *names)]
    twice = sorted(name for name, times in Counter(header).items() if times > 1)
    if twice:
        raise DataError(f"the output would have two columns {', '.join(map(repr, twice))}: do not --keep that name.")
    if not all(name and name == name.strip() and is_line(name) for name in header):
        raise DataError(
            "a class's name is empty, or has control characters or blanks at its ends, which no header keeps. Use "
            "clipwise.load in a program, or train with other names (data.classes)."
        )
    return header


def cell(text: str) -> str:
    """A text for a cell, which no spreadsheet takes for a formula; `clipwise.data` reads the rest as it is.

    >>> [cell(text) for text in ("cat", "a,b", "=cmd|'/c calc'!A1", "'=x", "-1", "-x")]
    ['cat', 'a,b', "'=cmd|'/c calc'!A1", "''=x", '-1', "'-x"]
    """
    if not text.lstrip("'").startswith(_FORMULA):
        return text
    with contextlib.suppress(ValueError):
        float(text)
        return text
    return f"'{text}"


def _said(model: Predictor) -> str:
    what = f"probabilities of {len(model.classes)} classes" if model.classes else "predictions"
    return what if model.method is None else f"{what}, recalibrated ({model.method})"


@contextlib.contextmanager
def _output(path: str | None) -> Iterator[TextIO]:
    """Standard output, or a file that its owner alone can read and that is there whole or not at all."""
    if path is None:
        yield sys.stdout
        return
    from clipwise.files import replacing

    with replacing(path, DataError) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
        yield text
        text.detach()
