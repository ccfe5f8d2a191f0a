"""`clipwise evaluate predictions.csv`: accuracy, losses and calibration of anybody's probabilities."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from clipwise._extras import need
from clipwise.cli.terminal import add_show_values, count, table
from clipwise.errors import DataError

if TYPE_CHECKING:
    from clipwise.calibration import CalibrationResult
    from clipwise.data import Predictions
    from clipwise.report import Run

NAME = "evaluate"
HELP = "judge the probabilities in a file: accuracy, losses and calibration with intervals, and a page with diagrams"

_EPILOG = """\
examples:
  clipwise evaluate predictions.csv --label income
  clipwise evaluate predictions.csv --labels test.csv --label income     the labels are in another file, row by row
  clipwise evaluate scores.csv --label y --classes cat dog bird          other columns are not used
  clipwise evaluate scores.csv --label y --prefix p_                     columns p_cat, p_dog and p_bird
  clipwise evaluate scores.csv --label y --positive yes                  a single column with the probability of yes

The file (CSV, Parquet or NPZ) has a column for each class, named as the labels name it; `clipwise predict` writes such
files. The page, its figures and result.json go into a folder. `clipwise report` compares such folders.

exit code: 0 success, 2 bad usage or input
"""

_NOTED = 1e-3
"""A sum of probabilities that is farther from 1 is mentioned."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("predictions", metavar="PREDICTIONS", help="file with a column of probabilities for each class")
    parser.add_argument("--label", default="label", metavar="COLUMN", help="the true class (default: %(default)s)")
    parser.add_argument("--labels", metavar="FILE", help="the file that has the labels, if it is another one")
    parser.add_argument("--classes", nargs="+", metavar="COLUMN", help="the columns to use (default: all others)")
    parser.add_argument("--prefix", default="", metavar="TEXT", help="before the class in the columns' names, as p_")
    parser.add_argument("--normalise", action="store_true", help="divide each row by its sum, whatever that is")
    parser.add_argument("--positive", metavar="CLASS", help="the class that a single column of probabilities is about")
    parser.add_argument("--delimiter", default=",", metavar="C", help="between the columns of a CSV file")
    parser.add_argument("--bins", type=count, default=15, help="of the calibration errors (default: %(default)s)")
    parser.add_argument("--resamples", type=int, default=1000, help="of the bootstrap; 0: no intervals (default: 1000)")
    parser.add_argument("--name", help="what the page calls the model (default: the file's name)")
    parser.add_argument("--output", metavar="FOLDER", help="where the page goes (default: beside the file)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    add_show_values(parser)


def run(args: argparse.Namespace) -> int:
    """Read, judge, print, write the page."""
    from clipwise.calibration import evaluate
    from clipwise.data import read_predictions
    from clipwise.report import Run, plain, write

    need("report", "the page")
    path = Path(args.predictions)
    folder = path.with_name(f"{path.stem}-evaluation") if args.output is None else Path(args.output)
    _check_folder(folder)
    found = read_predictions(
        path,
        args.label,
        classes=args.classes,
        positive=args.positive,
        prefix=args.prefix,
        normalise=args.normalise,
        labels_file=args.labels,
        delimiter=args.delimiter,
    )
    result = evaluate(
        found.probabilities, found.labels, classes=found.classes, bins=args.bins, resamples=args.resamples
    )
    data = (Path(args.labels) if args.labels else path).name
    made = Run.judged(args.name or path.stem, result, data=data, warnings=_notes(found, result))
    made.save(folder)
    page = write(made, folder)
    if args.json:
        body = {"report": str(page), "classes": found.classes, **result.to_dict(), "warnings": made.warnings}
        print(json.dumps(plain(body), indent=1, allow_nan=False))
    else:
        _print(made, page)
        for note in made.warnings:
            print(f"note: {note}", file=sys.stderr)
    return 0


def _notes(found: Predictions, result: CalibrationResult) -> Iterator[str]:
    """What a reader of the numbers has to know of the file."""
    if found.off > _NOTED:
        yield f"Rows added up to 1 within {found.off:.2g} and were divided by their sum."
    if math.isinf(result.nll):
        yield "NLL is infinite, since a true class got probability 0: give more decimals."


def _check_folder(folder: Path) -> None:
    """Refuse to replace the result of a training run, or to make one that is not finished look so."""
    from clipwise.report import Run, RunFolder, runs_below

    begun = RunFolder(folder).config.exists() or RunFolder(folder).checkpoint.exists()
    if begun or (runs_below(folder) == [folder] and Run.load(folder).is_known):
        raise DataError(f"{folder} is the folder of a training run; name another with --output.")


def _print(made: Run, page: Path) -> None:
    from clipwise.calibration import metric_named
    from clipwise.report import arms_of, interval_text, reading_of, value_text

    (arm,) = arms_of([made])
    rows = [
        [metric_named(name).heading, value_text(name, value), interval_text(name, value)]
        for name, value in arm.estimates.items()
    ]
    print(f"{made.name}: {made.test.count:,} predictions")
    print(table(["", "measured", "95 % interval"], rows))
    ((_, text),) = reading_of([arm]).lines
    print(f"\n{text[0].upper()}{text[1:]}\nreport: {page}")
