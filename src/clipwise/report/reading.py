"""The page's first words, for a reader who has read nothing else: what the numbers say, and what to try then."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clipwise._show import percent
from clipwise.calibration import Difference, Estimate, difference
from clipwise.report.arms import ArmResults, differing
from clipwise.report.plans import parts_of
from clipwise.report.run import Run
from clipwise.report.wording import epsilon_text, points

__all__ = ["Advice", "Reading", "advice_of", "read"]

_EQUAL = 0.005  # relative difference of epsilons up to which two arms have the same privacy

CALIBRATION = (
    "A model is calibrated when its probabilities mean what they say: of all predictions made with 90 % confidence, "
    "nine in ten are right. The expected calibration error (ECE) is how far it is off, averaged over its predictions."
)
FREE_CHOICE = (
    "During private training every record's gradient is cut down to at most the clipping norm R before noise in "
    "proportion to R is added, so the privacy of a run does not depend on its R (trying several costs more). This page "
    "shows what R does to the probabilities."
)
UNKNOWN = "How these predictions were made is not known here: nothing is said about privacy."


@dataclass(frozen=True)
class Reading:
    """A title, paragraphs of explanation, one line per arm, and the verdict."""

    title: str
    paragraphs: tuple[str, ...]
    lines: tuple[tuple[int, str], ...]
    """(place of the arm, what it does)."""
    verdict: str


def read(arms: Sequence[ArmResults]) -> Reading:
    """The reading of a page, whatever the numbers say."""
    if arms[0].first.task == "regression":
        return _read_regression(arms)
    lines = tuple((place, _behaviour(arm)) for place, arm in enumerate(arms))
    pair = _pair(arms)
    if pair is not None:
        title, verdict = _verdict(*pair)
        return Reading(title, (CALIBRATION, f"{_privacy(arms)} {FREE_CHOICE}"), lines, verdict)
    title = _title(arms)
    return Reading(title, (CALIBRATION, f"{_privacy(arms)}{_more_than_norms(arms)}"), lines, "")


def _title(arms: Sequence[ArmResults]) -> str:
    whose = f"{len(arms)} models" if len(arms) > 1 else arms[0].name
    if arms[0].first.task == "regression":
        stated = any(_levels(arm) for arm in arms)
        words = ["error", *(["intervals"] if stated else [])]
    else:
        words = ["accuracy", "calibration"]
    if len(arms) > 1 or arms[0].first.is_known:
        words.append("privacy")
    return f"{whose}: {' and '.join(filter(None, (', '.join(words[:-1]), words[-1])))}"


def _privacy(arms: Sequence[ArmResults]) -> str:
    """One sentence on what the private arms cost."""
    private = [arm for arm in arms if arm.first.is_private]
    if not any(arm.first.is_known for arm in arms):
        return UNKNOWN
    if not private:
        return "None of this was trained with privacy: no epsilon holds for it."
    dearest_first = sorted(private, key=lambda arm: -(arm.epsilon or 0.0))
    costs = [(epsilon_text(arm.dearest.guarantees), arm.first.delta) for arm in dearest_first]
    printed = list(dict.fromkeys(f"{cost}{'' if delta is None else f' at delta {delta:g}'}" for cost, delta in costs))
    units = dict.fromkeys(_protected(arm)[0] for arm in dearest_first)
    whom = "one user, with all its records" if next(iter(units)) == "client" else "a single record"
    if len(private) == 1:
        return f"The privacy cost is epsilon = {printed[0]}: the smaller, the less anyone can learn about {whom}."
    if _same_privacy(private):
        which = "Both" if len(private) == 2 else f"All {len(private)}"
        return (
            f"{which} private models have the same privacy: epsilon = {printed[0]}. The smaller it is, "
            f"the less anyone can learn about {whom}."
        )
    who = f"; one {' against one '.join(units)} is protected" if len(units) > 1 else ""
    return (
        f"The private models do not have the same privacy (epsilon {', '.join(printed)}{who}): compare them with care."
    )


def _same_privacy(arms: Sequence[ArmResults]) -> bool:
    found = [arm.epsilon for arm in arms]
    values = [epsilon for epsilon in found if epsilon is not None]
    promises = {(arm.first.delta, *_protected(arm)) for arm in arms}
    return len(values) == len(found) and len(promises) == 1 and max(values) - min(values) <= _EQUAL * max(values)


def _protected(arm: ArmResults) -> tuple[str, str]:
    """What epsilon is about: one example or one client, added or replaced."""
    guarantee = next(iter(arm.dearest.guarantees.values()), None)
    return ("example", "") if guarantee is None else (guarantee.unit, guarantee.relation)


def _pair(arms: Sequence[ArmResults]) -> tuple[ArmResults, ArmResults] | None:
    """The private arms with the smallest and the largest R, if all have equal privacy and differ in R only."""
    placed = [(arm.clip_norm, arm) for arm in arms if arm.first.is_private and arm.clip_norm is not None]
    norms = [norm for norm, _ in placed]
    if len(set(norms)) < 2 or len(set(norms)) < len(norms) or not _same_privacy([arm for _, arm in placed]):
        return None
    if differing([arm.first for _, arm in placed]):
        return None
    ordered = sorted(placed, key=lambda each: each[0])
    return ordered[0][1], ordered[-1][1]


def _more_than_norms(arms: Sequence[ArmResults]) -> str:
    """Why a page on several clipping norms does not say what they do."""
    placed = [arm for arm in arms if arm.first.is_private and arm.clip_norm is not None]
    others = differing([arm.first for arm in placed])
    if not others or len({arm.clip_norm for arm in placed}) < 2:
        return ""
    return f" They differ in more than the clipping norm ({', '.join(others)}): what R does cannot be read from them."


def _behaviour(arm: ArmResults) -> str:
    """How often it is right, how sure it is, and what that means in mistakes."""
    accuracy, confidence = arm.estimates["accuracy"].mean, arm.estimates["confidence"].mean
    expected, made = round(1000 * (1 - confidence)), round(1000 * (1 - accuracy))
    gap = (made - expected) / 1000  # of the numbers as they are printed
    if gap == 0:
        tendency = "on the whole as sure as it should be"
    else:
        tendency = f"{'over' if gap > 0 else 'under'}-confident by {100 * abs(gap):.1f} points"
    return (
        f"right {percent(accuracy)} of the time, {percent(confidence)} sure on average: {tendency}. In 1,000 "
        f"predictions it expects {expected} mistakes and makes {made}. ECE {percent(arm.estimates['ece'].mean)}."
        f"{_as_saved(arm)}"
    )


def _as_saved(arm: ArmResults) -> str:
    """What recalibration has made of it, where the saved model has one."""
    if arm.saved is None:
        return ""
    method, after = arm.saved
    return f" The saved model is recalibrated ({method}): ECE {percent(after['ece'].mean)}."


def _verdict(small: ArmResults, large: ArmResults) -> tuple[str, str]:
    ece = difference(small.estimates["ece"], large.estimates["ece"])
    accuracy = difference(small.estimates["accuracy"], large.estimates["accuracy"])
    norms = f"R = {small.clip_norm:g} to R = {large.clip_norm:g}"
    rates = [f"{arm.learning_rate:g}" for arm in (small, large) if arm.learning_rate is not None]
    with_rates = f" (learning rate {' to '.join(rates)})" if len(set(rates)) == 2 else ""
    moves = [
        _move(small.estimates[name], large.estimates[name], d) for name, d in (("ece", ece), ("accuracy", accuracy))
    ]
    found = f"From {norms}{with_rates}: ECE {moves[0]}; accuracy {moves[1]}."
    if ece.low is None:
        return (
            f"Same privacy, two clipping norms: {norms.replace(' to ', ' and ')}",
            f"{found} Without intervals for both, it is not known how much of this is chance.",
        )
    about = f" The 95 % intervals are {ece.basis}; they hold for this data, model and learning rates."
    if not ece.is_clear:
        return (
            "At the same privacy, the clipping norms cannot be distinguished here",
            f"{found} The interval of the change in ECE holds zero: too close to call.{about}",
        )
    better, worse = (large, small) if ece.change < 0 else (small, large)
    size = "larger" if better is large else "smaller"
    names = [f"R = {arm.clip_norm:g}" for arm in (better, worse)]
    return (
        f"At the same privacy, {names[0]} gives more trustworthy probabilities than {names[1]}",
        f"{found} The {size} clipping norm is better calibrated, for the same epsilon.{about}",
    )


def _move(before: Estimate, after: Estimate, found: Difference) -> str:
    digits = _digits(before.mean, after.mean, found)
    means = f"from {percent(before.mean, digits)} to {percent(after.mean, digits)}"
    text = f"{means} ({points(round(after.mean, digits + 2) - round(before.mean, digits + 2), digits)} points"
    if found.low is None or found.high is None:
        return f"{text})"
    return f"{text}; interval {points(found.low, digits)} to {points(found.high, digits)})"


def _digits(before: float, after: float, found: Difference) -> int:
    """As few digits, 1 to 3, as print a change that is that of the printed numbers, and no end of an interval as zero.

    >>> _digits(0.9394, 0.9346, Difference(-0.0048, None, None, ""))
    2
    """
    for digits in (1, 2):
        printed = round(after, digits + 2) - round(before, digits + 2)
        ends = [end for end in (found.low, found.high) if end is not None]
        if points(printed, digits) == points(found.change, digits) and all(round(end, digits + 2) for end in ends):
            return digits
    return 3


def _read_regression(arms: Sequence[ArmResults]) -> Reading:
    meaning = (
        "A regression model is calibrated when its intervals mean what they say: nine in ten true values lie inside "
        "the 90 % intervals. Coverage is how many do."
    )
    return Reading(_title(arms), (meaning, _privacy(arms)), tuple(enumerate(map(_coverage, arms))), "")


def _levels(arm: ArmResults) -> list[str]:
    """Of the intervals that it states, the names of their metrics."""
    return [name for name in arm.estimates if name.startswith("coverage ")]


def _coverage(arm: ArmResults) -> str:
    error = f"off by {arm.estimates['rmse'].mean:.4g} (root mean square)"
    levels = _levels(arm)
    if not levels:
        return f"{error}. It states no intervals."
    shares = [f"{percent(arm.estimates[name].mean)} of its {100 * float(name.split()[1]):g} %" for name in levels]
    return f"{error}. The truth lies in {', '.join(shares)} intervals."


LARGE = 0.02
"""An ECE whose interval lies above this is worth doing something about."""
_FACTOR = 10.0
_NOISE = 5.0  # of private recalibration, as in the examples: it costs little beside training
_LONGER = 4
_PROPORTIONAL = ("ASGD", "SGD")
NORMALISED = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop"),
    "SparseAdam",
)
"""Optimizers whose steps do not grow with the gradients: with another R their learning rate stays."""
_RECALIBRATED = "recalibrated"
_OTHER_NORM = re.compile(r"-(R[0-9.e+-]+|mix-up|longer)$")
"""What advice on another norm or more steps has added to a name before."""
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
    return (*(_larger(arm) if over else (_longer(run), *_smaller(arm))), *_recalibration(run))


def _longer(run: Run) -> Advice:
    """More steps, where a model is not sure enough of what it has learnt."""
    values = _configured(run)
    name = "epochs" if "epochs" in values else "steps"
    count = values.get(name, run.plan.steps)
    same = "epsilon" in values.get("privacy", {}) or not values
    cost = "at the same epsilon: every step has more noise then" if same else "epsilon grows with them"
    more = f"{name}={_LONGER * count:g}" if isinstance(count, (int, float)) else f"{name}=..."
    own = f"cw.Plan(..., {more}).calibrate(epsilon, delta)"
    return Advice(
        f"The model is under-confident, as models are that were trained too briefly. Try {_LONGER} times as many "
        f"{name} ({cost}).",
        (_command(run, "longer", [more]) if values else None) or own,
    )


def _configured(run: Run) -> Mapping[str, Any]:
    """The configuration of a run, as far as it can be read."""
    try:
        values = tomllib.loads(run.config or "")
    except tomllib.TOMLDecodeError:
        return {}
    return values if isinstance(values.get("privacy", {}), dict) else {}


def _abadi(arm: ArmResults) -> float | None:
    """R, where there is a single norm of Abadi's rule."""
    rule = parts_of(arm.first.plan.clip)
    rule = parts_of(rule[1].get("rule")) if rule is not None and rule[0] == "Flat" else rule
    return None if rule is None or rule[0] != "Abadi" else arm.clip_norm


def _rate(arm: ArmResults, factor: float) -> tuple[str, list[str]]:
    """What to say of the learning rate when R is multiplied by `factor`, and the settings that it takes."""
    rate, optimizer = arm.learning_rate, arm.first.choices.optimizer or _PROPORTIONAL[-1]
    name = optimizer.split("(")[0]
    if name in NORMALISED:
        kept = [] if rate is None or "/ R" not in optimizer else [f"optimizer.learning_rate={rate:g}"]
        return f", with the learning rate as it is: steps of {name} do not grow with the gradients", kept
    if rate is None or name not in _PROPORTIONAL:
        return "", []
    other = f"{rate / factor:g}"
    return f", with a learning rate of {other} instead of {rate:g}", [f"optimizer.learning_rate={other}"]


def _smaller(arm: ArmResults) -> list[Advice]:
    """A smaller norm, where there may be one that still lets gradients through as they are."""
    R = _abadi(arm)
    if R is None or R < 1:
        return []
    small = R / _FACTOR
    said, settings = _rate(arm, 1 / _FACTOR)
    return [
        Advice(
            f"Noise grows with the clipping norm, and gradients that are smaller than it do not: try R = "
            f"{small:g}{said}.",
            _command(arm.first, f"R{small:g}", [f"clip.R={small:g}", *settings]) or f"clip=cw.Abadi({small:g})",
        )
    ]


def _larger(arm: ArmResults) -> list[Advice]:
    """A larger norm, and mix-up training, where there is a single norm of Abadi's rule."""
    run, R = arm.first, _abadi(arm)
    if R is None:
        return []
    large = _FACTOR * R
    said, further = _rate(arm, _FACTOR)
    settings = [f"clip.R={large:g}", *further]
    two = [f'{{rule="Abadi",R={norm:g}}}' for norm in (R, large)]
    mixed = f'clip={{schedule="MixUp",switch_at=0.5,small={two[0]},large={two[1]}}}'
    return [
        Advice(
            f"The model is over-confident. A larger clipping norm often mends that, at the same noise and epsilon: try "
            f"R = {large:g}{said}.",
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
            _command(run, _RECALIBRATED, [choice])
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
    base = run.name if suffix == _RECALIBRATED else _OTHER_NORM.sub("", run.name)
    named = [f"name={base}-{suffix}", *settings]
    replaced = {setting.partition("=")[0] for setting in named}
    kept, rest = [], iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if option in _ONCE:
            for _ in range(_ONCE[option] * (not equals)):
                next(rest, None)
        elif option == "--set":
            setting = value if equals else next(rest, "")
            if not _is_replaced(setting.partition("=")[0].strip(), replaced):
                kept += ["--set", setting]
        else:
            kept.append(word)
    return shlex.join([*kept, *(part for setting in named for part in ("--set", setting))])


def _is_replaced(key: str, by: Collection[str]) -> bool:
    """Whether a setting has no effect before others: the same key, or one of the table that is replaced.

    >>> [_is_replaced(key, {"clip", "name"}) for key in ("name", "clip.R", "clipping", "seed")]
    [True, True, False, False]
    """
    return any(key == each or key.startswith(f"{each}.") for each in by)
