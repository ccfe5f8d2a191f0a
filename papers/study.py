"""An experiment of the paper: a `Study` that is trained, packed and written as a page.

In the end all finished runs are packed into two files, which count as the folders of the runs do; the folders are not
committed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from clipwise.cli.terminal import count
from clipwise.errors import ClipwiseError
from clipwise.experiments import Show, Standing, Study, pack, run_all
from clipwise.report import ArmResults

METRICS = ("accuracy", "nll", "ece", "mce", "mse")


@contextmanager
def told() -> Iterator[None]:
    """What is wrong with data, a run or a disk ends the command with a sentence, as it does in `clipwise` itself."""
    try:
        yield
    except (ClipwiseError, OSError) as error:
        raise SystemExit(f"clipwise: error: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit("stopped; --resume continues.") from None


def parser_of(name: str, seeds: int) -> argparse.ArgumentParser:
    """The command line that every recipe has, to which it may add."""
    parser = argparse.ArgumentParser(prog=f"clipwise reproduce {name}")
    parser.add_argument("--quick", action="store_true", help="a scaled-down form: shows that it works, nothing else")
    parser.add_argument("--seeds", type=count, default=None, help=f"runs of each arm (default {seeds})")
    parser.add_argument("--only", nargs="+", metavar="ARM", help="only these arms")
    parser.add_argument("--resume", action="store_true", help="continue an unfinished set; finished runs are kept")
    parser.add_argument("--again", action="store_true", help="train packed runs again; the new ones take their place")
    parser.add_argument("--jobs", type=count, default=None, help="runs at a time (default: one per core)")
    parser.add_argument("--draw", action="store_true", help="train nothing: tables and figures of the runs there are")
    return parser


def chosen(study: Study, args: argparse.Namespace) -> Study:
    """The part of a study that the command line asks for."""
    known = {arm.name: arm for arm in study.arms}
    unknown = [name for name in args.only or () if name not in known]
    if unknown:
        raise SystemExit(f"no arm is called {unknown[0]!r}; there are {', '.join(map(repr, known))}.")
    arms = tuple(known[name] for name in dict.fromkeys(args.only)) if args.only else study.arms
    return replace(study, arms=arms, seeds=args.seeds or (1 if args.quick else study.seeds))


@contextmanager
def placed(study: Study, quick: Sequence[str] | None) -> Iterator[Study]:
    """The study with its figures and tables in its own folder; scaled down, in one that is gone afterwards.

    `quick` are the settings of the scaled-down form, which shows that everything works and nothing else.
    """
    if quick is None:
        yield study
        return
    with tempfile.TemporaryDirectory() as scratch:
        alone = Path(scratch, study.folder.name)  # of the same name, with no other recipe beside it
        alone.mkdir()
        yield replace(study, folder=alone, overrides=(*study.overrides, *quick))


def complete(study: Study, args: argparse.Namespace) -> tuple[ArmResults, ...]:
    """Train the runs that are missing, and pack all that are there; their arms."""
    if not args.draw:
        wanted = chosen(study, args)
        begun = [trial for trial in wanted.trials if trial.begun]
        if begun and args.again and not args.resume:
            raise SystemExit(
                f"{study.folder} holds {len(begun)} runs of this set in runs/: --resume keeps them and continues; to "
                "start again, remove runs/."
            )
        with Show(told=_tell) as show:
            run_all(wanted, jobs=args.jobs, resume=args.resume, force=args.again, watch=show)
    return pack(study)


def _tell(standing: Standing) -> None:
    """Print a line on a run that has ended."""
    test = standing.result.test.to_dict()
    numbers = ", ".join(f"{m} {test[m]:.4g}" for m in METRICS if test.get(m) is not None)
    print(f"[{standing.done:.0f}/{standing.total}] {standing.ended}: {numbers}", flush=True)


@told()
def main(
    study: Study,
    quick: Sequence[str],
    write: Callable[[Sequence[ArmResults], Path], str],
    arguments: Sequence[str] | None = None,
) -> None:
    """Train what is missing, then `write(arms, folder)` tables and figures; its text is printed."""
    args = parser_of(study.folder.name, study.seeds).parse_args(arguments)
    with placed(study, quick if args.quick else None) as here:
        print(write(complete(here, args), here.folder))
