"""What a reader must know before believing or publishing a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clipwise.report.arms import ArmResults
from clipwise.report.joint import Joint
from clipwise.report.likeness import same_data
from clipwise.report.run import SEEDED, Run
from clipwise.report.saved import trained_steps

__all__ = ["Warned", "warnings_of"]

HELD_OUT = (
    "The metrics are exact numbers of the held-out records. Epsilon protects the records that were trained on, not the "
    "held-out ones: if those are private too, the metrics must not be published."
)

NOT_PRIVATE = "no epsilon holds for it. If its training data are private, nothing of it may be published."
NOT_KNOWN = "These predictions were only judged: on what they were trained, and whether privately, is not known here."
OTHER_DATA = (
    "The models were not judged on the same held-out data: the difference of two numbers may be one of the data."
)


def without_noise(run: Run) -> str:
    """Why a run is not private, as the beginning of a sentence."""
    events = () if run.ledger is None else run.ledger.events
    reasons = dict.fromkeys(event.reason for event in events if event.noise_multiplier == 0)
    if not reasons or all(event.noise_multiplier == 0 and event.reason == "training" for event in events):
        return "Trained without noise"
    return f"Not all updates had noise ({', '.join(reasons)})"


def ended_early(run: Run) -> tuple[str, ...]:
    """What to say of a run whose ledger has fewer steps than its plan, or than its curves."""
    if run.ledger is None or not run.is_private:
        return ()
    found, made = [], trained_steps(run.ledger.events)
    if run.plan.steps is not None and made < run.plan.steps:
        found.append(f"The plan has {run.plan.steps:,} steps, the ledger has {made:,}: epsilon is that of the ledger.")
    last = max((row["step"] for row in run.curves), default=0)
    if last > run.ledger.steps:
        found.append(
            f"The curves go on to step {last:,.10g}, but the ledger has {run.ledger.steps:,}: unless the curves count "
            "otherwise, the ledger is not that of this run, and epsilon is not that of this model."
        )
    return tuple(found)


@dataclass(frozen=True)
class Warned:
    """A warning and the arms it is about; none when it is about all of them."""

    text: str
    arms: tuple[str, ...] = ()


def warnings_of(arms: Sequence[ArmResults], joint: Joint | None = None) -> list[Warned]:
    """The runs' own warnings, the accountants', and what the page itself knows; each once, with its arms.

    `joint` is what the private runs of a page cost together.
    """
    found: dict[str, dict[str, None]] = {}
    for arm in arms:
        for text in _of_arm(arm):
            found.setdefault(text, {})[arm.name] = None
    warned = [Warned(text, () if len(names) == len(arms) > 1 else tuple(names)) for text, names in found.items()]
    if joint is not None:
        warned.append(Warned(_of_all(joint)))
    if not same_data([arm.first for arm in arms]):
        warned.append(Warned(OTHER_DATA))
    return [*warned, Warned(HELD_OUT)]


def _of_all(joint: Joint) -> str:
    page = f"This page rests on {joint.runs} private runs. Each has the epsilon of its row"
    if joint.guarantee is None:
        return f"{page}; together they have {joint} Publish one run of a seed at most."
    return (
        f"{page}; if they used the same records, publishing something of all of them costs epsilon = "
        f"{joint.guarantee.printed} at delta {joint.guarantee.delta:g}."
    )


def _of_arm(arm: ArmResults) -> list[str]:
    found = []
    if not arm.first.is_known:
        found.append(NOT_KNOWN)
    elif not arm.first.is_private:
        found.append(f"{without_noise(arm.first)}: {NOT_PRIVATE}")
    elif any(run.seed is not None for run in arm.runs):
        found.append(SEEDED)
    for run in arm.runs:
        found += [*ended_early(run), *run.warnings]
        for guarantee in run.guarantees.values():
            found += guarantee.warnings
    return found
