"""`clipwise train config.toml`: one configuration, one run, one folder with everything about it."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from clipwise.cli.terminal import add_show_values, table
from clipwise.progress import Bar

if TYPE_CHECKING:
    from clipwise.report import Run
    from clipwise.training import Progress

NAME = "train"
HELP = "train privately as a TOML configuration says, and write the run's folder with its report"

_EPILOG = """\
examples:
  clipwise train examples/digits.toml
  clipwise train examples/digits.toml --set clip.R=5 --set seed=1 --output runs/digits-R5
  clipwise train examples/digits.toml --resume      after a crash or Ctrl-C: continue from the checkpoint
  clipwise train examples/digits.toml --continue-from runs/digits --set name=more --set privacy.epsilon=4
                                                    more steps; privacy.epsilon is the total of both runs

The folder gets config.toml, metrics.jsonl, ledger.json, result.json, figures/, model.safetensors, model.json,
report.html and card.md; clipwise predict uses the model. Paths in a configuration count from the current folder.
docs/configuration.md explains every key.

exit code: 0 success, 2 bad usage or input, 130 interrupted (--resume continues)
"""

_GLANCE = ("accuracy", "ece", "rmse")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("config", metavar="CONFIG.toml", help="the configuration")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="replace a value, as in clip.R=0.5 (repeatable)"
    )
    parser.add_argument("--output", metavar="FOLDER", help="where the run goes (default: the configuration's)")
    parser.add_argument("--resume", action="store_true", help="continue the interrupted run in the folder")
    parser.add_argument(
        "--changed-data",
        action="store_true",
        help="with --resume or --continue-from: continue on other records, and say so on the ledger",
    )
    parser.add_argument(
        "--allow-large-delta", action="store_true", help="accept a delta over 1/n, which promises next to nothing"
    )
    parser.add_argument("--force", action="store_true", help="replace the run in the folder")
    parser.add_argument(
        "--continue-from",
        metavar="RUN",
        help="begin with the weights and the ledger of this finished run: privacy.epsilon is the total of both",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_show_values(parser)


def run(args: argparse.Namespace) -> int:
    """Train, and say what came out and where it is."""
    from clipwise.report import plain
    from clipwise.training import Config, train

    large = ["privacy.allow_large_delta=true"] if args.allow_large_delta else []
    earlier = [] if args.continue_from is None else [f"continue_from={json.dumps(args.continue_from)}"]
    config = Config.load(args.config, [*args.set, *large, *earlier])
    bar = Bar(config.name, "steps")
    try:
        made, folder = train(
            config,
            output=_folder(args),
            resume=args.resume,
            force=args.force,
            changed_data=args.changed_data,
            command=command_line(),
            watch=watching(bar),
            tell=lambda line: print(f"clipwise: {line}", file=sys.stderr),
        )
    except KeyboardInterrupt:
        bar.close()
        print("clipwise: --resume continues from the last checkpoint", file=sys.stderr)
        raise
    finally:
        bar.close()
    if args.json:
        print(json.dumps(plain({"folder": str(folder), **_summary(made)}), indent=1, allow_nan=False))
    else:
        _print(made, folder, config.recalibration.methods)
    return 0


def _folder(args: argparse.Namespace) -> str | Path | None:
    """Where the run goes; None: where the configuration says. The configuration of a cut run resumes in its folder."""
    from clipwise.report import RunFolder

    if args.output is not None or not args.resume or any(each.partition("=")[0] == "output" for each in args.set):
        return cast("str | None", args.output)
    own = RunFolder(Path(args.config).parent)
    return own.path if Path(args.config).name == own.config.name and own.checkpoint.exists() else None


def watching(bar: Bar) -> Callable[[Progress], None]:
    """What a bar shows of a run: steps, the epsilon spent, and what was measured last."""
    last = ""

    def watch(at: Progress) -> None:
        nonlocal last
        last = last if at.test is None else measured(at.test)
        bar.show(at.step, at.steps, lambda: filter(None, (_spent(at.epsilon()), last)))

    return watch


def _spent(epsilon: float | None) -> str:
    """Rounded up: less must not be shown than was spent."""
    return "not private" if epsilon is None else f"epsilon {math.ceil(epsilon * 1000) / 1000:.3f}"


def measured(test: Mapping[str, float]) -> str:
    """The first few metrics in a short line.

    >>> measured({"accuracy": 0.934, "nll": 0.25, "ece": 0.031}), measured({"mse": 0.5, "rmse": 0.707, "r2": 0.4})
    ('accuracy 93.4 %  ECE 3.1 %', 'RMSE 0.707')
    """
    from clipwise.calibration import metric_named

    shown = [(metric_named(name), test[name]) for name in _GLANCE if name in test]
    return "  ".join(f"{m.label} {100 * value:.1f} %" if m.share else f"{m.label} {value:.4g}" for m, value in shown)


def command_line() -> str:
    """What was typed, to be kept with a run."""
    return shlex.join(["clipwise", *sys.argv[1:]])


def _summary(run: Run) -> dict[str, Any]:
    from clipwise.report import arms_of

    (arm,) = arms_of([run])
    return {
        "name": run.name,
        "seed": run.seed,
        "test": {name: estimate.to_dict() for name, estimate in arm.estimates.items()},
        "recalibrated": {method: result.metrics for method, result in run.recalibrated.items()},
        "noise_multiplier": run.plan.to_dict().get("noise_multiplier"),
        "steps": run.plan.steps,
        "delta": run.delta,
        "guarantees": {name: guarantee.to_dict() for name, guarantee in run.guarantees.items()},
        "seconds": run.provenance["seconds"],
        "warnings": run.warnings,
    }


def _print(run: Run, folder: Path, methods: Collection[str]) -> None:
    from clipwise.calibration import metrics_of
    from clipwise.report import advice_of, arms_of, interval_text, lost_steps, value_text, warnings_of

    (arm,) = arms_of([run])
    data = run.provenance["data"]
    records = f"{data['records']:,} records" if "records" in data else "records"
    lost = lost_steps(() if run.ledger is None else run.ledger.events)
    steps = f"{run.plan.steps} steps{f' ({lost:,} of them interrupted, in vain)' if lost else ''}"
    print(f"{run.name}: {steps} on {records} of {data['name']}, measured on {data['held_out']:,} others")
    followed = sorted((m for m in metrics_of(run.task) if m.followed), key=lambda m: m.place or math.inf)
    shown = [(m.name, m.heading, arm.estimates[m.name]) for m in followed if m.name in arm.estimates]
    rows = [[heading, value_text(name, value), interval_text(name, value)] for name, heading, value in shown]
    print(table(["", "measured", "95 % interval"], rows))
    for method, result in run.recalibrated.items():
        what = f"recalibrated ({method})" if method in methods else method
        what += ", as the saved model predicts" if method == run.provenance.get("recalibration") else ""
        print(f"  {what}: ECE {100 * result.ece:.2f} %, NLL {result.nll:.3f}")
    print()
    if run.guarantees:
        print(run.guarantees["exact"].statement())
    for warned in warnings_of([arm]):
        print(f"note: {warned.text}")
    for each in advice_of([arm]):
        print(f"try: {each.text}\n     {each.how}")
    print(f"report: {folder / 'report.html'}")
    print(f"use it: clipwise predict {shlex.quote(str(folder))} DATA")
