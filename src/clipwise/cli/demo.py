"""`clipwise demo`: what the clipping norm does to the probabilities of private models of one and the same epsilon.

Four arms on MNIST (not private, small R, large R, first small then large), several seeds each, one rule for the
learning rate. Every run is one that `clipwise train` could have made; whatever comes out is printed and reported.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from clipwise._extras import need
from clipwise.cli.terminal import count, table
from clipwise.cli.train import command_line
from clipwise.errors import DataError
from clipwise.files import private_folder

if TYPE_CHECKING:
    from clipwise.experiments import Study
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
    "MNIST is not available ({reason}) This uses scikit-learn's digits instead, where the effect is too small to see: "
    "with 500 test images it drowns in chance."
)

CHOSEN = (
    "A demonstration: the learning rate is {rate:g} / R in every arm (without clipping, that of R = {large:g}); this "
    "rule, the clipping norms and the switch of the mix-up were chosen by looking at these data."
)

NAMES = {
    "non-private": "not private",
    "small": f"private, R = {SMALL:g}",
    "large": f"private, R = {LARGE:g}",
    "mix-up": f"private, mix-up (R = {SMALL:g}, then {LARGE:g})",
}


def configuration(setting: Setting, steps: int) -> str:
    """The configuration that all arms share: that of the small clipping norm."""
    return f"""\
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

[clip]
rule = "Abadi"
R = {SMALL}

[optimizer]
name = "SGD"
learning_rate = "{setting.rate:g} / R"

[privacy]
noise_multiplier = {setting.noise_multiplier}

[evaluation]
resamples = 0
"""


def _overrides(setting: Setting) -> dict[str, tuple[str, ...]]:
    """What every arm sets. Without clipping there is no R: that arm has the learning rate of the largest."""
    small, large = (f'{{rule="Abadi",R={R}}}' for R in (SMALL, LARGE))
    rate = f"optimizer.learning_rate={setting.rate / LARGE:g}"
    return {
        "non-private": ("privacy={private=false}", 'clip={rule="NoClip"}', rate),
        "small": (),
        "large": (f"clip.R={LARGE}",),
        "mix-up": (f'clip={{schedule="MixUp",switch_at=0.5,small={small},large={large}}}',),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--seeds", type=count, default=5, help="runs of each arm (default: %(default)s)")
    parser.add_argument("--steps", type=count, help="optimizer steps of a run (default: 1500 on MNIST, 300 on digits)")
    parser.add_argument("--data", choices=tuple(SETTINGS), help="(default: mnist, or digits if it is not available)")
    parser.add_argument("--output", default="runs/demo", metavar="FOLDER", help="(default: %(default)s)")
    parser.add_argument("--jobs", type=count, help="processes (default: one per core)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")


def _fetch(name: str) -> None:
    """Have the records in the cache folder.

    Raises: DataError if they are not available.
    """
    from clipwise.data import load

    load(SETTINGS[name].source)


def _choose_data(wanted: str | None) -> tuple[str, str]:
    """The name of the data to use, and what to say when they are not those one would want."""
    try:
        _fetch(wanted or "mnist")
    except DataError as error:
        if wanted is not None:
            raise
        _fetch("digits")
        return "digits", TOO_SMALL.format(reason=error)
    return wanted or "mnist", ""


def _study(name: str, args: argparse.Namespace) -> Study:
    """All arms with all seeds; the configuration that they share is written into the folder."""
    from clipwise.experiments import Arm, Study
    from clipwise.report import write_text

    setting, folder = SETTINGS[name], Path(args.output)
    config = folder / "config.toml"
    try:
        private_folder(folder)
        write_text(config, configuration(setting, args.steps or setting.steps))
    except OSError as error:
        raise DataError(f"{folder} cannot be the folder of the demo: {error}. Name another with --output.") from error
    note = CHOSEN.format(rate=setting.rate, large=LARGE)
    arms = tuple(Arm(NAMES[key], overrides) for key, overrides in _overrides(setting).items())
    return Study(config, arms, args.seeds, folder, note=note)


def _experiment(name: str, args: argparse.Namespace) -> tuple[Run, ...]:
    """The runs of all arms with all seeds, arm by arm."""
    from clipwise.experiments import Show, run_all

    study = _study(name, args)
    print(f"{len(study.trials)} runs on {name}", file=sys.stderr)
    with Show() as show:
        return run_all(study, jobs=args.jobs, force=True, command=command_line(), watch=show)


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
    from clipwise.report import reading_of

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

{fill(reading_of(arms).verdict, 110)}

Every private run has epsilon = {exact.printed} at delta = {first.delta:g}, whatever R: {exact.kind}, under
{neighbours(exact.relation, "image")}.
The central limit theorem would have claimed {gdp.printed}: an approximation, no bound.
The settings were chosen by looking at this data, and the runs are seeded: this shows an effect and is not a release.

report: {page}  ({seconds:.0f} s)"""
    )


def run(args: argparse.Namespace) -> int:
    """Train, measure, print, report."""
    from clipwise import report

    need("demo", "the demo")
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
