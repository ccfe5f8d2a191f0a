"""`clipwise report`: one page on a run, or on any number of runs beside each other."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clipwise.cli.terminal import table
from clipwise.errors import DataError

if TYPE_CHECKING:
    from clipwise.calibration import Estimate
    from clipwise.report import ArmResults, Run

NAME = "report"
HELP = "write one self-contained page on a run, or compare any number of runs"

_EPILOG = """\
examples:
  clipwise report runs/small runs/large --output comparison
  clipwise report runs/mnist --publishable

A RUN is a folder that `clipwise train` wrote, or a folder of such folders. Runs with the same name are seeds of one
model: means and intervals are over them. With --publishable the page leaves out what epsilon does not cover: the
statistics of the private training data, the seeds of private runs, and runs without privacy.

exit code: 0 success, 2 bad usage or input
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, or of several")
    parser.add_argument(
        "--output",
        metavar="PATH",
        help="the page, or its folder (default: RUN; of several, report/ in the folder that has them all; with "
        "--publishable, publishable/ there)",
    )
    parser.add_argument("--publishable", action="store_true", help="leave out everything that epsilon does not cover")
    parser.add_argument("--json", action="store_true", help="print the numbers and the page's path as JSON")


def load(given: Sequence[str]) -> list[Run]:
    """The runs that were named, in that order; those below a named folder not private first, then by R."""
    from clipwise.report import Run, RunFolder, runs_below

    found: dict[Path, Run] = {}
    for name in given:
        path = Path(name)
        folders = [each.resolve() for each in runs_below(path)]
        if not folders:
            RunFolder(path).refuse_interrupted("result")
            raise DataError(f"{path} is neither a finished run nor a folder of such: no run's result.json is in it.")
        loaded = {folder: Run.load(folder) for folder in folders}
        found.update(sorted(loaded.items(), key=lambda item: _order(item[1])))
    return list(found.values())


def _order(run: Run) -> tuple[bool, float, str, int]:
    from clipwise.report import clip_norm

    return run.is_private, clip_norm(run.plan) or math.inf, run.name, run.seed or 0


def _place(args: argparse.Namespace) -> Path:
    if args.output is not None:
        return Path(args.output)
    home, several = Path(args.runs[0]), len({Path(name).absolute() for name in args.runs}) > 1
    if several:
        home = Path(os.path.commonpath([Path(name).absolute() for name in args.runs]))
        if home == Path(home.anchor):
            raise DataError("these runs have no folder in common; say with --output where the page goes.")
    if args.publishable:
        return home / "publishable"
    return home / "report" if several else home


def _rows(arms: Sequence[ArmResults]) -> tuple[list[str], list[list[str]]]:
    from clipwise.calibration import metric_named
    from clipwise.report import headline, table_rows, value_text

    shown = headline(arms)

    def cells(estimates: Mapping[str, Estimate]) -> list[str]:
        return [value_text(name, estimates[name]) if name in estimates else "–" for name in shown]

    rows = [
        [label, str(len(arm.runs)), arm.epsilon_text, *cells(estimates)]
        for arm in arms
        for label, estimates in table_rows(arm)
    ]
    return ["model", "runs", "epsilon", *(metric_named(name).heading for name in shown)], rows


def run(args: argparse.Namespace) -> int:
    """Read the runs, write the page, say where it is."""
    from clipwise.report import arms_of, cost_of, joint_of, plain, reading_of, write

    loaded = load(args.runs)
    page = write(loaded, _place(args), publishable=args.publishable)
    shown = [each for each in loaded if each.is_private] if args.publishable else loaded
    arms = arms_of(shown)
    if args.json:
        estimates = {arm.name: {name: e.to_dict() for name, e in arm.estimates.items()} for arm in arms}
        epsilons = {arm.name: arm.epsilon for arm in arms}
        body = {"report": str(page), "epsilon": epsilons, "estimates": estimates}
        print(json.dumps(plain(body), indent=1, allow_nan=False))
        return 0
    print(table(*_rows(arms)))
    verdict = reading_of(arms).verdict
    joint = joint_of(shown)
    said = [verdict, "" if joint is None else f"note: {cost_of(joint)}", str(page)]
    print("\n" + "\n\n".join(filter(None, said)))
    return 0
