"""What a reader must know before believing or publishing a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clipwise.accounting import Guarantee, account
from clipwise.errors import AccountingError
from clipwise.report.arms import Arm
from clipwise.report.likeness import same_data
from clipwise.report.run import SEEDED, Run

__all__ = ["Warned", "together", "warnings_of"]

HELD_OUT = (
    "The metrics are exact numbers of the held-out records. Epsilon protects the records that were trained on, not the "
    "held-out ones: if those are private too, the metrics must not be published."
)

NOT_PRIVATE = "no epsilon holds for it. If its training data are private, nothing of it may be published."
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


def together(arms: Sequence[Arm]) -> tuple[int, Guarantee] | None:
    """How many private runs a page rests on, and what they cost together; None for a single one.

    The runs are taken to use the same records; where they do not, this is an upper bound.
    """
    runs = [run for arm in arms for run in arm.runs if run.is_private]
    deltas = [run.delta for run in runs if run.delta is not None]
    if len(runs) < 2 or not deltas:
        return None
    events = tuple(event for run in runs if run.ledger is not None for event in run.ledger.events)
    try:
        return len(runs), account(events, min(deltas))
    except AccountingError:
        return None  # runs that protect different things, clients and examples, have no joint epsilon


@dataclass(frozen=True)
class Warned:
    """A warning and the arms it is about; none when it is about all of them."""

    text: str
    arms: tuple[str, ...] = ()


def warnings_of(arms: Sequence[Arm]) -> list[Warned]:
    """The runs' own warnings, the accountants', and what the page itself knows; each once, with its arms."""
    found: dict[str, dict[str, None]] = {}
    for arm in arms:
        for text in _of_arm(arm):
            found.setdefault(text, {})[arm.name] = None
    warned = [Warned(text, () if len(names) == len(arms) > 1 else tuple(names)) for text, names in found.items()]
    joint = together(arms)
    if joint is not None:
        count, guarantee = joint
        warned.append(
            Warned(
                f"This page rests on {count} private runs. Each has the epsilon of its row; if they used the same "
                f"records, publishing something of all of them costs epsilon = {guarantee.printed} at delta "
                f"{guarantee.delta:g}."
            )
        )
    if not same_data([arm.first for arm in arms]):
        warned.append(Warned(OTHER_DATA))
    return [*warned, Warned(HELD_OUT)]


def _of_arm(arm: Arm) -> list[str]:
    found = []
    if not arm.first.is_private:
        found.append(f"{without_noise(arm.first)}: {NOT_PRIVATE}")
    elif any(run.seed is not None for run in arm.runs):
        found.append(SEEDED)
    for run in arm.runs:
        found += run.warnings
        for guarantee in run.guarantees.values():
            found += guarantee.get("warnings", ())
    return found
