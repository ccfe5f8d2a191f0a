"""Numbers, plans and ledgers in words, as the page and the card print them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from clipwise._show import number
from clipwise._validate import is_number
from clipwise.accounting import Event, GaussianSteps, Guarantee, ProjectedSteps
from clipwise.calibration import Estimate, metric_named
from clipwise.correlation import CORRELATIONS
from clipwise.report.plans import AnyPlan, Choices, items_of, parts_of
from clipwise.sampling import SAMPLINGS

__all__ = [
    "best_of",
    "clip_norm",
    "describe",
    "deviation_text",
    "epsilon_text",
    "event_row",
    "interval_text",
    "plan_rows",
    "points",
    "value_text",
]


def points(share: float, digits: int = 1) -> str:
    """A difference of shares in percentage points, with its sign.

    >>> points(-0.0241)
    '−2.4'
    """
    text = f"{100 * share:+.{digits}f}"
    return text.replace("-", "−") if float(text) else text[1:]


def value_text(metric: str, estimate: Estimate) -> str:
    """The mean as it is printed, in per cent where the metric is a share."""
    return metric_named(metric).text(estimate.mean)


def deviation_text(metric: str, estimate: Estimate) -> str:
    """The deviation over the seeds to the precision of the mean, or nothing.

    >>> deviation_text("brier", Estimate(0.063, 0.00077)), deviation_text("ece", Estimate(0.0296, 0.0016))
    ('0.001', '0.16')
    """
    spread = estimate.deviation
    if spread is None:
        return ""
    if metric_named(metric).share:
        return f"{100 * spread:.2f}"
    return f"{spread:.4f}" if spread < 0.0005 else number(spread) if spread >= 0.001 else "0.001"


def interval_text(metric: str, estimate: Estimate) -> str:
    """The interval as it is printed, or nothing.

    >>> interval_text("ece", Estimate(0.034, 0.001, 0.033, 0.035, 5))
    '3.30 – 3.50'
    """
    if estimate.low is None or estimate.high is None:
        return ""
    return metric_named(metric).span(estimate.low, estimate.high)


def best_of(guarantees: Mapping[str, Guarantee]) -> Guarantee | None:
    """The one to put forward: the exact one, else the smallest bound; never an approximation, nor an infinite one."""
    bounds = {name: g for name, g in guarantees.items() if g.is_bound and math.isfinite(g.epsilon)}
    return bounds.get("exact") or min(bounds.values(), key=lambda g: g.epsilon, default=None)


def epsilon_text(guarantees: Mapping[str, Guarantee]) -> str:
    """The epsilon to put forward.

    >>> epsilon_text({"gdp": Guarantee(1.4, 1e-5, "approximation", "gdp", "zero_out", "Poisson")})
    'unknown'
    """
    best = best_of(guarantees)
    return "unknown" if best is None else best.printed


_SAMPLINGS = {kind.__name__: kind for kind in SAMPLINGS.values()}
_CORRELATIONS = {kind.__name__: kind for kind in CORRELATIONS.values()}
_LABELS = {
    "sampling": "batches",
    "steps": "optimizer steps",
    "clip": "clipping",
    "correlation": "noise over steps",
    "noise_multiplier": "noise multiplier (sigma)",
    "learning_rate": "learning rate",
}


def clip_norm(plan: AnyPlan) -> float | None:
    """The clipping norm R of a flat rule that bounds each sample; None for schedules, groups and no clipping.

    So it is for a norm that adapts: its R is where it started.

    >>> from clipwise import Abadi, FullBatch, Plan
    >>> clip_norm(Plan(FullBatch(10), 5, Abadi(0.5), 1.0))
    0.5
    """
    parts = parts_of(plan.clip)
    if parts is not None and parts[0] == "Flat":
        parts = parts_of(parts[1].get("rule"))
    if parts is None or parts[0] in ("AdaptiveClip", "BatchClip"):
        return None
    norm = parts[1].get("R")
    return float(norm) if is_number(norm) else None


def describe(value: Any) -> str:
    """One chosen value in words.

    >>> import clipwise as cw
    >>> describe(cw.Flat(cw.Abadi(0.5)))
    'Abadi, R = 0.5'
    >>> describe(cw.Poisson(sample_size=60_000, batch_size=512))
    'Poisson: each of 60,000 records with probability 512/60,000'
    >>> describe(cw.Poisson(rate=0.004, batch_size=256))
    'Poisson: each of any number of records with probability 0.004, 256 expected'
    >>> describe(cw.Steps({0: 2.0, 500: 1.0}))
    '2 from step 0 on, 1 from step 500 on'
    """
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {describe(item)}" for key, item in value.items())
    parts = parts_of(value)
    if parts is None:
        return f"{value:g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    kind, values = parts
    try:
        words = _words(kind, values)
    except (KeyError, TypeError, ValueError):  # a file that is not as it was written
        words = None
    if words is not None:
        return words
    listed = _listed({name: item for name, item in values.items() if item is not None})
    return f"{kind}, {listed}" if listed else kind


def _words(kind: str, values: Mapping[str, Any]) -> str | None:
    """What has words of its own."""
    if kind in _SAMPLINGS:
        return _SAMPLINGS[kind](**values).description
    if kind in _CORRELATIONS:
        return f"{kind}: {_CORRELATIONS[kind](**values).describe()}"
    if kind == "Flat":
        return describe(values["rule"])
    if kind == "MixUp":
        at = values["switch_at"]
        when = f"{100 * at:g} % of the steps" if isinstance(at, float) and at < 1 else f"step {at:g}"
        return f"mix-up: {describe(values['small'])}, then {describe(values['large'])} from {when} on"
    if kind == "AdaptiveClip":
        R, quantile, floor = (values[name] for name in ("R", "quantile", "floor"))
        return f"adaptive norm, from {R:g} towards the {quantile:g}-quantile of the norms, not below {floor:g}"
    if kind == "Steps":
        return ", ".join(f"{noise:g} from step {step} on" for step, noise in values["noise"].items())
    if kind == "Unclipped":
        return f"no clipping, noise of standard deviation {values['noise_std']:g} on the sum of a batch: not private"
    return "no clipping" if kind == "NoClip" else None


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {describe(item)}" for name, item in values.items())


def plan_rows(plan: AnyPlan, choices: Choices) -> list[tuple[str, str]]:
    """A plan and what else was chosen, as labelled rows.

    >>> from clipwise import FullBatch, NoClip, Plan
    >>> plan_rows(Plan(FullBatch(10), 1500, NoClip(), 0.0), Choices(0.5))[1:3]
    [('optimizer steps', '1,500'), ('clipping', 'no clipping')]
    """
    rows = {name: describe(value) for name, value in {**items_of(plan), **choices.to_dict()}.items()}
    labels = _LABELS
    if choices.federated is not None:  # its batches are of users, and what its mechanism has is described there
        rows["federated"] = _listed(choices.federated)
        rows.pop("mechanism", None)
        rows["sampling"] = rows.get("sampling", "").replace("records", "users")
        labels = {**_LABELS, "sampling": "users in a round", "steps": "rounds", "learning_rate": "users' learning rate"}
    return [(labels.get(name, name.replace("_", " ")), text) for name, text in rows.items()]


def event_row(event: Event) -> tuple[str, str, str, str]:
    """An event of a ledger: what happened, how often, with which noise, on whom."""
    what = "steps" if isinstance(event, GaussianSteps) else type(event).__name__
    what = "rounds" if event.unit == "client" else what
    what = f"steps, norms from {event.projections} projections" if isinstance(event, ProjectedSteps) else what
    sampling = getattr(event, "sampling", None)
    drawn = "every record" if sampling is None else describe(sampling)
    if event.unit == "client":
        drawn = drawn.replace("records", "users")
    if getattr(event, "own_batches", False):
        drawn += "; drawn by the caller"
    return event.reason, f"{event.count:,} {what}", f"{event.noise_multiplier:g}", drawn
