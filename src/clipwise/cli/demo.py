"""`clipwise demo`: what the clipping norm does to the probabilities of private models of one and the same epsilon.

Four arms on MNIST (not private, small R, large R, first small then large), several seeds each, one rule for the
learning rate. Every run is one that `clipwise train` could have made; whatever comes out is printed and reported.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from clipwise.cli.arguments import count
from clipwise.cli.table import table
from clipwise.cli.train import command_line
from clipwise.errors import DataError
from clipwise.progress import duration

if TYPE_CHECKING:
    from clipwise.data import DataSet
    from clipwise.report import ArmResults, Run

NAME = "demo"
HELP = "train small networks with a small and a large clipping norm at the same epsilon, and show what differs"

SMALL, LARGE = 1.0, 10.0
SHOWN = ("accuracy", "ece", "nll")


@dataclass(frozen=True)
class Setting:
    """The data and the numbers that all arms share. Learning rate: `rate` / R."""

    source: str
    scaling: str
    batch_size: int
    steps: int
    noise_multiplier: float
    rate: float


SETTINGS = {
    "mnist": Setting("mnist", "pool = 2\nmean = 0.1307\nstd = 0.3081", 512, 1500, 1.1, 2.0),
    "digits": Setting("digits", "mean = 0.3053\nstd = 0.3760", 128, 300, 2.0, 1.0),
}
TOO_SMALL = (
    "MNIST could not be had ({reason}) This uses scikit-learn's digits instead, where the effect is too small to see: "
    "with 500 test images it drowns in chance."
)

CHOSEN = (
    "A demonstration: the learning rate is {rate:g} / R in every arm (without clipping, that of R = {large:g}); this "
    "rule, the clipping norms and the switch of the mix-up were chosen by looking at these data."
)

CLIPS = {
    "small": f'rule = "Abadi"\nR = {SMALL}',
    "large": f'rule = "Abadi"\nR = {LARGE}',
    "mix-up": (
        f'schedule = "MixUp"\nswitch_at = 0.5\nsmall = {{ rule = "Abadi", R = {SMALL} }}\n'
        f'large = {{ rule = "Abadi", R = {LARGE} }}'
    ),
}
NAMES = {
    "non-private": "not private",
    "small": f"private, R = {SMALL:g}",
    "large": f"private, R = {LARGE:g}",
    "mix-up": f"private, mix-up (R = {SMALL:g}, then {LARGE:g})",
}


def configuration(setting: Setting, arm: str, seed: int, steps: int) -> str:
    """The configuration of one run. Without clipping there is no R: that arm has the learning rate of the largest."""
    private = arm in CLIPS
    rate = f'"{setting.rate:g} / R"' if private else f"{setting.rate / LARGE:g}"
    privacy = f"noise_multiplier = {setting.noise_multiplier}" if private else "private = false"
    clip = f"[clip]\n{CLIPS[arm]}\n" if private else ""
    return f"""\
name = "{NAMES[arm]}"
seed = {seed}
steps = {steps}
batch_size = {setting.batch_size}
checkpoint_every = {steps}

[data]
source = "{setting.source}"
{setting.scaling}

[model]
source = "mlp"
hidden = [64]
activation = "tanh"

{clip}
[optimizer]
name = "SGD"
learning_rate = {rate}

[privacy]
{privacy}

[evaluation]
resamples = 0
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--seeds", type=count, default=5, help="runs of each arm (default: %(default)s)")
    parser.add_argument("--steps", type=count, help="optimizer steps of a run (default: 1500 on MNIST, 300 on digits)")
    parser.add_argument("--data", choices=tuple(SETTINGS), help="(default: mnist, or digits if it is not available)")
    parser.add_argument("--output", default="runs/demo", metavar="FOLDER", help="(default: %(default)s)")
    parser.add_argument("--jobs", type=count, default=_cores(), help="processes (default: one per core, %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache(maxsize=1)
def _data(name: str) -> DataSet:
    """The records as the arms use them; loaded once in every process."""
    from clipwise.training import Config

    text = configuration(SETTINGS[name], "small", 0, 1)
    return Config.parse(text, "demo.toml").data.load()


def _choose_data(wanted: str | None) -> tuple[str, str]:
    """The name of the data to use, and what to say when they are not those one would want."""
    try:
        _data(wanted or "mnist")
    except DataError as error:
        if wanted is not None:
            raise
        _data("digits")
        return "digits", TOO_SMALL.format(reason=error)
    return wanted or "mnist", ""


def _train(name: str, command: str, text: str, folder: str) -> str:
    """One run, in whatever process."""
    import torch

    from clipwise.training import Config, train

    torch.set_num_threads(1)  # the network is tiny: threads only wait for each other
    config = Config.parse(text, "demo.toml")
    made, path = train(config, output=folder, force=True, command=command, data=_data(name), page=False)
    note = CHOSEN.format(rate=SETTINGS[name].rate, large=LARGE)
    replace(made, warnings=(*made.warnings, note)).save(path)  # with the run, for every later page on it
    return folder


def _quiet_worker() -> None:
    """Ctrl-C reaches every process of a terminal; the parent alone says something about it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _finished(tasks: Sequence[tuple[str, str]], work: Callable[[str, str], str], jobs: int) -> Iterator[str]:
    """The folders of the runs as they get ready, made by `jobs` processes (by this one when it is one)."""
    if min(jobs, len(tasks)) == 1:
        yield from (work(*task) for task in tasks)
        return
    # Started afresh rather than forked: a forked process must not use the threads that torch may have begun.
    pool = ProcessPoolExecutor(min(jobs, len(tasks)), get_context("spawn"), _quiet_worker)
    try:
        for future in as_completed([pool.submit(work, *task) for task in tasks]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _progress(done: int, total: int, seconds: float) -> None:
    if sys.stderr.isatty():
        left = f"  {duration(seconds * (total - done) / done)} left" if done else ""
        end = "" if done < total else "\r\033[K"
        print(f"\r\033[K{done} of {total} runs{left}{end}", end="", file=sys.stderr, flush=True)


def _experiment(name: str, args: argparse.Namespace) -> list[Run]:
    """All arms with all seeds, arm by arm."""
    from clipwise.report import Run

    setting = SETTINGS[name]
    folders = {
        (arm, seed): str(Path(args.output, "runs", f"{arm}-{seed}")) for seed in range(args.seeds) for arm in NAMES
    }
    tasks = [
        (configuration(setting, arm, seed, args.steps or setting.steps), folder)
        for (arm, seed), folder in folders.items()
    ]
    begun = time.monotonic()
    print(f"{len(tasks)} runs on {name}, {min(args.jobs, len(tasks))} at a time", file=sys.stderr)
    _progress(0, len(tasks), 0.0)
    for done, _ in enumerate(_finished(tasks, partial(_train, name, command_line()), args.jobs), start=1):
        _progress(done, len(tasks), time.monotonic() - begun)
    return [Run.load(folders[arm, seed]) for arm in NAMES for seed in range(args.seeds)]


def _cell(arm: ArmResults, metric: str) -> str:
    """The mean over the seeds, and the interval around it."""
    from clipwise.calibration import metric_named

    estimate = arm.estimates[metric]
    scale, digits = (100.0, 2) if metric_named(metric).share else (1.0, 3)
    if estimate.low is None or estimate.high is None:
        return f"{scale * estimate.mean:.{digits}f}"
    mean, low, high = (f"{scale * value:.{digits}f}" for value in (estimate.mean, estimate.low, estimate.high))
    return f"{mean} ({low} to {high})"


def _print(name: str, arms: Sequence[ArmResults], page: Path, seconds: float) -> None:
    from clipwise.accounting import neighbours
    from clipwise.calibration import metric_named
    from clipwise.report.reading import read

    setting, first = SETTINGS[name], next(arm.first for arm in arms if arm.first.is_private)
    data, exact, gdp = first.provenance["data"], first.guarantees["exact"], first.guarantees["gdp"]
    seeds = len(arms[0].runs)
    basis = f"means and 95 % intervals over {seeds} seeds" if seeds > 1 else "one seed: no intervals"
    header = [f"{m.label} %" if m.share else m.label for m in map(metric_named, SHOWN)]
    rows = [[arm.name, *(_cell(arm, metric) for metric in SHOWN)] for arm in arms]
    print(
        f"""\
{len(arms)} arms x {seeds} seeds on {name}: {data["records"]:,} images to train on, {data["held_out"]:,} held out;
{first.provenance["parameters"]:,} parameters, {first.plan.steps:,} steps, Poisson batches of expected size \
{setting.batch_size}, noise multiplier {setting.noise_multiplier:g};
learning rate {setting.rate:g} / R in every arm (not private: {setting.rate / LARGE:g}, as for R = {LARGE:g}).

{table(["", *header], rows)}
  {basis}; ECE: how far confidence is from accuracy, on average; NLL: log-loss

{fill(read(arms).verdict, 110)}

Every private run has epsilon = {exact.printed} at delta = {first.delta:g}, whatever R: {exact.kind}, under
{neighbours(exact.relation, "image")}.
The central limit theorem would have claimed {gdp.printed}: an approximation, no bound.
The settings were chosen by looking at this data, and the runs are seeded: this shows an effect and is not a release.

report: {page}  ({seconds:.0f} s)"""
    )


def run(args: argparse.Namespace) -> int:
    """Train, measure, print, report."""
    from clipwise import report

    begun = time.monotonic()
    name, note = _choose_data(args.data)
    if note:
        print(f"clipwise: {note}", file=sys.stderr)
    runs = _experiment(name, args)
    page = report.write(runs, args.output)
    arms, seconds = report.arms_of(runs), time.monotonic() - begun
    if args.json:
        print(json.dumps(_result(name, note, arms, page, seconds), indent=1))
    else:
        _print(name, arms, page, seconds)
    return 0


def _result(name: str, note: str, arms: Sequence[ArmResults], page: Path, seconds: float) -> dict[str, Any]:
    private = next(arm.first for arm in arms if arm.first.is_private)
    return {
        "data": name,
        "note": note,
        "arms": {arm.name: {metric: arm.estimates[metric].to_dict() for metric in SHOWN} for arm in arms},
        "epsilon": {arm.name: arm.epsilon for arm in arms},
        "accountants": {accountant: g.epsilon for accountant, g in private.guarantees.items()},
        "delta": private.delta,
        "noise_multiplier": private.plan.noise_multiplier,
        "steps": private.plan.steps,
        "seeds": len(arms[0].runs),
        "report": str(page),
        "seconds": round(seconds, 1),
    }
