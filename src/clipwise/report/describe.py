"""Plans and ledgers in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clipwise.accounting import Event, GaussianSteps, ProjectedSteps
from clipwise.sampling import arguments

__all__ = ["clip_norm", "describe", "event_row", "plan_rows"]

_SAMPLING = {
    "Poisson": "Poisson: each of {sample_size:,} records with probability {batch_size}/{sample_size:,}",
    "FullBatch": "all {sample_size:,} records in every step",
    "Shuffled": "shuffled batches of {batch_size} from {sample_size:,} records",
    "FixedSize": "batches of exactly {batch_size} from {sample_size:,} records",
}
_AT_A_RATE = "Poisson: each of any number of records with probability {rate:g}, {batch_size} expected"
_LABELS = {
    "sampling": "batches",
    "steps": "optimizer steps",
    "clip": "clipping",
    "noise_multiplier": "noise multiplier (sigma)",
    "learning_rate": "learning rate",
}


def clip_norm(plan: Mapping[str, Any]) -> float | None:
    """The clipping norm R of a flat rule that bounds each sample; None for schedules, groups and no clipping.

    >>> clip_norm({"clip": {"kind": "Flat", "rule": {"kind": "Abadi", "R": 0.5}}})
    0.5
    """
    clip = plan.get("clip")
    if isinstance(clip, Mapping) and clip.get("kind") == "Flat":
        clip = clip.get("rule")
    if not isinstance(clip, Mapping) or clip.get("kind") == "BatchClip":
        return None
    norm = clip.get("R")
    return float(norm) if isinstance(norm, (int, float)) else None


def describe(value: Any) -> str:
    """One value of a plan in words.

    >>> describe({"kind": "Flat", "rule": {"kind": "Abadi", "R": 0.5}})
    'Abadi, R = 0.5'
    >>> describe({"kind": "Poisson", "sample_size": 60_000, "batch_size": 512, "max_batch_size": None})
    'Poisson: each of 60,000 records with probability 512/60,000'
    >>> describe({"kind": "Poisson", "rate": 0.004, "batch_size": 256})
    'Poisson: each of any number of records with probability 0.004, 256 expected'
    """
    if not isinstance(value, Mapping):
        return f"{value:g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    kind = str(value.get("kind", ""))
    rest = {key: item for key, item in value.items() if key != "kind" and item is not None}
    if kind in _SAMPLING:
        cap = f", at most {value['max_batch_size']} of them" if value.get("max_batch_size") else ""
        words = _AT_A_RATE if "rate" in value else _SAMPLING[kind]
        return words.format(**value) + cap
    if kind == "Flat":
        return describe(value["rule"])
    if kind == "MixUp":
        at = value["switch_at"]
        when = f"{100 * at:g} % of the steps" if isinstance(at, float) and at < 1 else f"step {at:g}"
        return f"mix-up: {describe(value['small'])}, then {describe(value['large'])} from {when} on"
    if kind == "NoClip":
        return "no clipping"
    if kind == "mapping":
        return "; ".join(f"{key}: {describe(item)}" for key, item in value["items"])
    listed = ", ".join(f"{key} = {describe(item)}" for key, item in rest.items())
    return f"{kind}, {listed}" if kind and listed else kind or listed


def plan_rows(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A plan as labelled rows.

    >>> plan_rows({"version": 1, "steps": 1500, "noise_multiplier": 1.1})
    [('optimizer steps', '1,500'), ('noise multiplier (sigma)', '1.1')]
    """
    rows = {name: describe(value) for name, value in plan.items() if name != "version"}
    labels = _LABELS
    if "federated" in plan:  # its batches are of users
        rows["sampling"] = rows["sampling"].replace("records", "users")
        labels = {**_LABELS, "sampling": "users in a round", "steps": "rounds", "learning_rate": "users' learning rate"}
    return [(labels.get(name, name.replace("_", " ")), text) for name, text in rows.items()]


def event_row(event: Event) -> tuple[str, str, str, str]:
    """An event of a ledger: what happened, how often, with which noise, on whom."""
    what = "steps" if isinstance(event, GaussianSteps) else type(event).__name__
    what = "rounds" if event.unit == "client" else what
    what = f"steps, norms from {event.projections} projections" if isinstance(event, ProjectedSteps) else what
    sampling = getattr(event, "sampling", None)
    drawn = "every record" if sampling is None else describe({"kind": type(sampling).__name__, **arguments(sampling)})
    if event.unit == "client":
        drawn = drawn.replace("records", "users")
    if getattr(event, "own_batches", False):
        drawn += "; drawn by the caller"
    return event.reason, f"{event.count:,} {what}", f"{event.noise_multiplier:g}", drawn
