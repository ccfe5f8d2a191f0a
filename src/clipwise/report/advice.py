"""What to try when the probabilities of a single run are far off, with the commands."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from clipwise.report.arms import ArmResults
from clipwise.report.plans import parts_of
from clipwise.report.run import Run

__all__ = ["Advice", "advice_of"]

LARGE = 0.02
"""An ECE whose interval lies above this is worth doing something about."""
_FACTOR = 10.0
_NOISE = 5.0  # of private recalibration, as in the examples: it costs little beside training
_ONCE = {"--output": 1, "--resume": 0, "--force": 0, "--json": 0, "--changed-data": 0, "--show-values": 0}


@dataclass(frozen=True)
class Advice:
    """Something to try: why it may help, and how to do it."""

    text: str
    how: str


def advice_of(arms: Sequence[ArmResults]) -> tuple[Advice, ...]:
    """What to try next for the single private run of a page; nothing where the error may be chance, or is small."""
    if len(arms) != 1 or arms[0].first.task != "classification" or not arms[0].first.is_private:
        return ()
    (arm,) = arms
    ece, run = arm.estimates["ece"], arm.first
    if (ece.mean if ece.low is None else ece.low) < LARGE or run.choices.algorithm not in (None, "dp-sgd"):
        return ()
    over = arm.estimates["confidence"].mean > arm.estimates["accuracy"].mean
    return (*(_norms(arm) if over else ()), *_recalibration(run))


def _norms(arm: ArmResults) -> list[Advice]:
    """A larger norm, and mix-up training, where there is a single norm of Abadi's rule."""
    run, R = arm.first, arm.clip_norm
    rule = parts_of(run.plan.clip)
    rule = parts_of(rule[1].get("rule")) if rule is not None and rule[0] == "Flat" else rule
    if R is None or rule is None or rule[0] != "Abadi":
        return []
    large, rate = _FACTOR * R, arm.learning_rate
    slower = "" if rate is None else f", with a learning rate of {rate / _FACTOR:g} instead of {rate:g}"
    settings = [f"clip.R={large:g}", *([] if rate is None else [f"optimizer.learning_rate={rate / _FACTOR:g}"])]
    two = [f'{{rule="Abadi",R={norm:g}}}' for norm in (R, large)]
    mixed = f'clip={{schedule="MixUp",switch_at=0.5,small={two[0]},large={two[1]}}}'
    return [
        Advice(
            f"The model is over-confident. A larger clipping norm often mends that, at the same noise and epsilon: try "
            f"R = {large:g}{slower}.",
            _command(run, f"R{large:g}", settings) or f"clip=cw.Abadi({large:g})",
        ),
        Advice(
            f"Mix-up training, first with R = {R:g} and then with R = {large:g}, often keeps the accuracy of the small "
            "norm and the calibration of the large one.",
            _command(run, "mix-up", [mixed]) or f"clip=cw.MixUp(cw.Abadi({R:g}), cw.Abadi({large:g}), switch_at=0.5)",
        ),
    ]


def _recalibration(run: Run) -> list[Advice]:
    if run.recalibrated:
        return []
    choice = f'recalibration={{methods=["private-temperature"],noise_multiplier={_NOISE:g}}}'
    return [
        Advice(
            "Recalibration with a private temperature divides the logits by one number, which is learnt with noise on "
            "the training records and is on the ledger. The accuracy stays as it is.",
            _command(run, "recalibrated", [choice])
            or f"cw.calibration.PrivateTemperatureScaling(noise_multiplier={_NOISE:g})",
        )
    ]


def _command(run: Run, suffix: str, settings: Sequence[str]) -> str | None:
    """The command of the run, with other settings and a name of its own; None where no command made it."""
    given = run.provenance.get("command")
    try:
        words = shlex.split(given) if isinstance(given, str) else [str(word) for word in given or ()]
    except (TypeError, ValueError):  # a file that is not as it was written
        return None
    if words[:2] != ["clipwise", "train"]:
        return None
    kept, skip = [], 0
    for word in words:
        option = word.split("=")[0]
        if skip or option in _ONCE:
            skip = skip - 1 if skip else _ONCE[option] * ("=" not in word)
            continue
        kept.append(word)
    named = [f"name={run.name}-{suffix}", *settings]
    return shlex.join([*kept, *(part for setting in named for part in ("--set", setting))])
