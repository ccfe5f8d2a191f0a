"""What a reader must know before believing or publishing a page, and what all its private runs cost together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from clipwise.accounting import EARLIER, Event, Guarantee, Relation, account
from clipwise.errors import AccountingError
from clipwise.report.arms import ArmResults, same_data
from clipwise.report.plans import has_rule
from clipwise.report.run import SEEDED, Run
from clipwise.report.saved import lost_steps, trained_steps

__all__ = ["Joint", "Warned", "cost_of", "joint_of", "warnings_of"]


@dataclass(frozen=True)
class Joint:
    """The private runs of a page: how many they are, and their joint guarantee.

    None holds for runs that draw from one seed: they may share coins and noise, which then cancel. `shared` are their
    names.
    """

    runs: int
    guarantee: Guarantee | None
    shared: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.guarantee is not None:
            return self.guarantee.statement()
        named = ", ".join(repr(name) for name in self.shared)
        return f"no joint epsilon, since runs of {named} draw from one and the same seed and may share their noise."


def joint_of(runs: Iterable[Run]) -> Joint | None:
    """What the private ones of these runs cost together; None if there are fewer than two, or nothing joint to say.

    The runs are taken to use the same records; where they do not, this is an upper bound.
    """
    private = [run for run in runs if run.is_private]
    if len(private) < 2 or any(run.delta is None for run in private):
        return None
    drawn = Counter(run.draws_from for run in private)
    shared = [run.name for run in private if run.draws_from is not None and drawn[run.draws_from] > 1]
    if shared:
        return Joint(len(private), None, tuple(dict.fromkeys(shared)))
    try:
        together = _together(private)
    except AccountingError:
        return None  # runs that protect different things, clients and examples, have no joint epsilon
    if together.kind == "numerically exact" and any(event.reason.startswith(EARLIER) for event in _events(private)):
        together = replace(together, kind="upper bound")  # the earlier run may be one of these
    return Joint(len(private), together)


def _together(runs: Sequence[Run]) -> Guarantee:
    """Shuffled runs are accounted apart, since a ledger is one sequence of epochs, and added up; all others compose."""
    apart = [run for run in runs if _is_shuffled(run)]
    rest = [run for run in runs if not _is_shuffled(run)]
    groups = [[run] for run in apart] + ([rest] if rest else [])
    parts = [account(_composed(group), _least_delta(group)) for group in groups]
    relations: set[str] = {part.relation for part in parts}
    if len(relations) > 1:
        common: Relation = "replace_one" if "replace_one" in relations else "zero_out"
        parts = [account(_composed(group), _least_delta(group), relation=common) for group in groups]
    if len(parts) == 1:
        return parts[0]
    epsilon, delta = (math.fsum(getattr(part, name) for part in parts) for name in ("epsilon", "delta"))
    sampling = " and ".join(dict.fromkeys(part.sampling for part in parts))
    return replace(parts[0], epsilon=epsilon, delta=delta, kind="upper bound", sampling=sampling, lower=None)


def _events(runs: Sequence[Run]) -> tuple[Event, ...]:
    return tuple(event for run in runs if run.ledger is not None for event in run.ledger.events)


def _composed(runs: Sequence[Run]) -> tuple[Event, ...]:
    """Records on which one run was calibrated, and not trained, may be those that another was trained on."""
    events = _events(runs)
    if len(runs) == 1:
        return events
    return tuple(event.changed(disjoint=False) if event.disjoint else event for event in events)


def _least_delta(runs: Sequence[Run]) -> float:
    return min(run.delta for run in runs if run.delta is not None)


def _is_shuffled(run: Run) -> bool:
    return any(event.sampling is not None and event.sampling.keeps_order for event in _events([run]))


HELD_OUT = (
    "The metrics are exact numbers of the held-out records. Epsilon protects the records that were trained on, not the "
    "held-out ones: if those are private too, the metrics must not be published."
)

JUDGED = "The metrics are exact numbers of these records: if they are private, the metrics must not be published."
NOT_PRIVATE = "no epsilon holds for it. If its training data are private, nothing of it may be published."
NOT_KNOWN = "These predictions were only judged: on what they were trained, and whether privately, is not known here."
WORSE_THAN_MEAN = (
    "R² is below 0: the mean of the targets would be a better prediction for all of them, so this model is of no use. "
    "Give the public range of the target (data.target_bounds) if it has none, train longer, or spend more."
)
OTHER_DATA = (
    "The models were not judged on the same held-out data: the difference of two numbers may be one of the data."
)


def without_noise(run: Run) -> str:
    """Why a run is not private, as the beginning of a sentence."""
    events = () if run.ledger is None else run.ledger.events
    reasons = dict.fromkeys(event.reason for event in events if event.noise_multiplier == 0)
    if not reasons or all(event.noise_multiplier == 0 and event.reason == "training" for event in events):
        unclipped = has_rule(run.plan.clip, ("Unclipped",))
        return "Trained with noise on gradients that nothing clips" if unclipped else "Trained without noise"
    return f"Not all updates had noise ({', '.join(reasons)})"


def ended_early(run: Run) -> tuple[str, ...]:
    """What to say of a run whose ledger has fewer steps than its plan, or than its curves."""
    if run.ledger is None or not run.is_private:
        return ()
    found, made = [], trained_steps(run.ledger.events)
    if run.plan.steps is not None and made < run.plan.steps:
        found.append(f"The plan has {run.plan.steps:,} steps, the ledger has {made:,}: epsilon is that of the ledger.")
    lost = lost_steps(run.ledger.events)
    if lost:
        found.append(
            f"{lost:,} of the steps were interrupted: they are charged, and the weights have {made - lost:,} steps."
        )
    last = max((row["step"] for row in run.curves), default=0)
    if last > run.ledger.steps:
        found.append(
            f"The curves continue to step {last:,.10g}, but the ledger has {run.ledger.steps:,}: unless the curves "
            "count otherwise, the ledger is not that of this run, and epsilon is not that of this model."
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
        warned.append(Warned(cost_of(joint)))
    if not same_data([arm.first for arm in arms]):
        warned.append(Warned(OTHER_DATA))
    return [*warned, Warned(HELD_OUT if any(arm.first.is_known for arm in arms) else JUDGED)]


def cost_of(joint: Joint) -> str:
    """What it costs to publish something of all runs of a page."""
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
    if "r2" in arm.estimates and arm.estimates["r2"].mean < 0:
        found.append(WORSE_THAN_MEAN)
    for run in arm.runs:
        found += [*ended_early(run), *run.warnings]
        for guarantee in run.guarantees.values():
            found += guarantee.warnings
    return found
