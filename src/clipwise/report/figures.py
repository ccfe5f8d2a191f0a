"""The figures of a page, each with its title, its caption and the values it is drawn from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clipwise import plots
from clipwise.accounting import Event, noise_multiplier, privacy_curve
from clipwise.calibration import CalibrationResult, metrics_of
from clipwise.correlation import Banded, Independent, SquareRoot
from clipwise.errors import AccountingError, InvalidPlan
from clipwise.plan import Plan
from clipwise.plots import Curve
from clipwise.plots.style import svg
from clipwise.report.arms import BIN_CHOICES, ArmResults, pooled, rebinned, same_data
from clipwise.sampling import CyclicPoisson, Poisson, Shuffled

__all__ = ["CAPTIONS", "Drawing", "Panel", "kind_of", "private_drawings", "public_drawings"]

CAPTIONS = {
    "reliability": (
        "When it says it is sure, is it right?",
        "Each line is a group of predictions made with similar confidence; its height is the share of them that was "
        "right. On the dotted diagonal confidence and accuracy agree; with the line below it, the model is "
        "over-confident. The narrow bars are the gap between the two, strong where it is more than chance: where the "
        "confidence is outside the band, the 95 % interval of the accuracy. The small panel shows where the "
        "predictions are.",
    ),
    "confidence": (
        "How sure is it?",
        "The share of predictions by confidence, on a logarithmic scale. Where the dashed line (mean confidence) is to "
        "the right of the solid one (accuracy), the model is over-confident on the whole.",
    ),
    "true-class": (
        "What probability did the truth get?",
        "The share of samples by the probability that the model gave to their true class, on a logarithmic scale. What "
        "piles up at the left end was sure and wrong.",
    ),
    "coverage": (
        "Do the intervals hold the truth?",
        "The share of true values inside the model's intervals, against the share that the intervals promise. On the "
        "diagonal they agree; below it the intervals are too narrow.",
    ),
    "clipping-norm": (
        "What the clipping norm R does",
        "Whiskers are 95 % intervals; a dashed level is a model without a single R. In the right panel the best corner "
        "is the upper left: accurate and calibrated.",
    ),
    "heat-map": (
        "Clipping norm and learning rate",
        "In per cent where the metric is a share; yellow cells are better.",
    ),
    "training": (
        "Over training",
        "Measured on held-out data during training.",
    ),
    "privacy": (
        "What the privacy is worth",
        "Left: the pairs of epsilon and delta that hold together; the level is the delta of this page. Right: the most "
        "that an attacker who knows all records (in federated training, all users) but one can find out about that "
        "one, for each rate of false alarms. GDP is Gaussian differential privacy with this mu: the tight one bounds "
        "the exact curve; that of the central limit theorem (CLT) is an approximation, not a bound.",
    ),
    "correlation": (
        "What is left of the noise",
        "A model is the sum of its steps. Left: the deviation of the noise in that sum, for plain SGD and in units of "
        "a step's sensitivity R; all lines have the same epsilon. Right, for bands: the coefficients of the matrix C "
        "that is charged, and of its inverse, by which the noise of a step depends on that of the steps before.",
    ),
    "private-training": (
        "Inside private training",
        "Exact statistics of the private training samples at each step.",
    ),
}


def kind_of(name: str) -> str:
    """The figure's kind, where a page has several of it.

    >>> kind_of("privacy-2"), kind_of("heat-map")
    ('privacy', 'heat-map')
    """
    return name.rstrip("-0123456789")


_MANY = 8  # arms; with more of them a choice of bins would take longer to draw than anyone waits
_CURVES = 6  # of privacy, which take half a second each
_MOST_STEPS, _MOST_WORK = 100_000, 2_000_000  # of correlated noise; steps times bands, which take seconds
_DRAWN = 12  # arms; of more of them those are drawn that differ most, and the tables have all


@dataclass(frozen=True)
class Panel:
    """A part of a drawing: of one arm or of all (None), at one number of bins or at any (None)."""

    svg: str
    arm: int | None = None
    bins: int | None = None


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure of the page: its name, the values it shows, its panels, and the whole as one matplotlib figure."""

    name: str
    values: Any
    panels: tuple[Panel, ...]
    whole: Any
    about: str = ""
    """What the caption begins with."""
    further: str = ""
    """What the caption ends with."""
    of: str = ""
    """The arms that it is about, where a page has several of its kind."""

    @property
    def title(self) -> str:
        """What stands above it."""
        return CAPTIONS[kind_of(self.name)][0] + (f": {self.of}" if self.of else "")

    @property
    def caption(self) -> str:
        """What stands below it."""
        return " ".join(filter(None, (self.about, CAPTIONS[kind_of(self.name)][1], self.further)))

    def as_svg(self) -> str:
        """The whole as an SVG file."""
        return self.panels[0].svg if self.wide else svg(self.whole, self.name)

    @property
    def wide(self) -> bool:
        """Whether it is one picture of all arms."""
        return self.panels[0].arm is None


def public_drawings(arms: Sequence[ArmResults]) -> list[Drawing]:
    """Everything that held-out data and the ledger show."""
    drawn = _drawn(arms)
    judged = _calibration(arms, drawn) if arms[0].first.task == "classification" else _coverage(drawn)
    return [*judged, *_sweep(arms), *_training(drawn, _about(arms)), *_correlations(arms), *_privacy(arms)]


def private_drawings(arms: Sequence[ArmResults]) -> list[Drawing]:
    """Curves of the private training data, without noise: not covered by epsilon."""
    curves = _curves(_drawn(arms), "private", None)
    if not curves:
        return []
    metrics, further = list(dict.fromkeys(name for each in curves.values() for name in each)), _spread(arms)
    if not any(value for each in curves.values() if "bad_samples" in each for value in each["bad_samples"].mean):
        metrics = [name for name in metrics if name != "bad_samples"]
        further = f"{further} No sample was left out.".strip()
    drawn = plots.training_curves(curves, metrics) if metrics else None
    return [] if drawn is None else [_wide("private-training", _plain(curves), drawn, _about(arms), further)]


def _drawn(arms: Sequence[ArmResults]) -> Sequence[ArmResults]:
    """The arms that have a panel or a line of their own, in their order: all, or the best and the worst."""
    if len(arms) <= _DRAWN:
        return arms
    metric = "ece" if arms[0].first.task == "classification" else "rmse"
    order = sorted(arms, key=lambda arm: arm.estimates[metric].mean)
    kept = {arm.name for arm in (*order[: _DRAWN // 2], *order[-_DRAWN // 2 :])}
    return [arm for arm in arms if arm.name in kept]


def _about(arms: Sequence[ArmResults]) -> str:
    if len(arms) <= _DRAWN:
        return ""
    what = "calibration error" if arms[0].first.task == "classification" else "error"
    half = _DRAWN // 2
    return f"Of the {len(arms)} models, the {half} with the smallest and the {half} with the largest {what}."


def _spread(arms: Sequence[ArmResults]) -> str:
    """What a line shows where there are several seeds."""
    if all(len(arm.runs) == 1 for arm in arms):
        return ""
    return "Lines are means over the seeds, with one standard deviation to both sides."


def _wide(name: str, values: Any, whole: Any, about: str = "", further: str = "", of: str = "") -> Drawing:
    return Drawing(name, values, (Panel(svg(whole, name)),), whole, about, further, of)


def _calibration(arms: Sequence[ArmResults], drawn_arms: Sequence[ArmResults]) -> list[Drawing]:
    results = {arm.name: _results(arm) for arm in arms}
    every = {name: pooled(each) for name, each in results.items()}
    shown = {arm.name: every[arm.name] for arm in drawn_arms}
    places, about = {arm.name: place for place, arm in enumerate(arms)}, _about(arms)
    tables = {len(next(iter(shown.values())).bins): shown}
    if {len(result.bins) for result in shown.values()} <= set(BIN_CHOICES) and len(arms) <= _MANY:
        tables = {bins: {name: rebinned(each, bins) for name, each in results.items()} for bins in BIN_CHOICES}
    drawn = []
    for name, draw in (("reliability", plots.reliability_diagram), ("confidence", plots.confidence_histogram)):
        panels = [panel for bins, table in tables.items() for panel in _panels(name, draw, table, places, bins)]
        values = {arm: _values(name, result) for arm, result in every.items()}
        drawn.append(Drawing(name, values, tuple(panels), draw(shown), about))
    panels = _panels("true-class", plots.true_class_histogram, shown, places, None)
    values = {arm: _values("true-class", result) for arm, result in every.items()}
    return [*drawn, Drawing("true-class", values, tuple(panels), plots.true_class_histogram(shown), about)]


def _values(name: str, result: CalibrationResult) -> dict[str, Any]:
    """What a calibration figure shows of one arm."""
    if name == "reliability":
        return {"bins": result.bins.to_dict(), "ece": result.ece, "mce": result.mce}
    edges = list(result.bins.edges)
    if name == "true-class":
        return {"edges": edges, "count": list(result.true_class_histogram)}
    means = {"confidence": result.confidence, "accuracy": result.accuracy}
    return {"edges": edges, "count": list(result.bins.count), **means}


def _results(arm: ArmResults) -> list[CalibrationResult]:
    return [run.test for run in arm.runs if isinstance(run.test, CalibrationResult)]


def _panels(
    name: str,
    draw: Callable[..., Any],
    results: Mapping[str, CalibrationResult],
    places: Mapping[str, int],
    bins: int | None,
) -> list[Panel]:
    """One panel per arm; its title stands above it on the page, where it can be of any length."""
    made = []
    scale = {"share": max(max(r.bins.count) / sum(r.bins.count) for r in results.values())}
    for arm, result in results.items():
        place = places[arm]
        drawn = draw(result, first=place, **(scale if name == "reliability" else {}))
        made.append(Panel(svg(drawn, f"{name}-{place}-{bins or 0}"), place, bins))
    return made


def _coverage(arms: Sequence[ArmResults]) -> list[Drawing]:
    shares = {}
    for arm in arms:
        levels = [name for name in arm.estimates if name.startswith("coverage ")]
        shares[arm.name] = {float(name.split()[1]): arm.estimates[name].mean for name in levels}
    if not all(shares.values()):
        return []
    values = {name: {f"{level:g}": share for level, share in each.items()} for name, each in shares.items()}
    return [_wide("coverage", values, plots.coverage_diagram(shares))]


def _sweep(arms: Sequence[ArmResults]) -> list[Drawing]:
    """Accuracy against calibration where R differs, and a heat map where R and the learning rate form a grid."""
    if not same_data([arm.first for arm in arms]):
        return []
    points = [arm.point for arm in arms]
    norms = {point.clip_norm for point in points} - {None}
    found = []
    classes = arms[0].first.task == "classification"
    if classes and len(norms) > 1:
        found.append(_wide("clipping-norm", [p.to_dict() for p in points], plots.accuracy_calibration(points)))
    grid = [point for point in points if point.clip_norm is not None and point.learning_rate is not None]
    rates = {point.learning_rate for point in grid}
    pairs = {(point.clip_norm, point.learning_rate) for point in grid}
    if len(norms) > 1 and len(rates) > 1 and len(grid) == len(pairs) > max(len(norms), len(rates)):
        drawn = plots.heat_map(grid, ("accuracy", "ece") if classes else ("rmse",))
        means = "Numbers are means over the seeds." if any(len(arm.runs) > 1 for arm in arms) else ""
        found.append(_wide("heat-map", [point.to_dict() for point in grid], drawn, further=means))
    return found


def _training(arms: Sequence[ArmResults], about: str) -> list[Drawing]:
    task = arms[0].first.task
    followed = [metric.name for metric in metrics_of(task) if metric.followed]
    metrics = ("nll", "accuracy", "ece") if task == "classification" else followed
    curves, norms = _curves(arms, "test", metrics), _curves(arms, "released", ("clipping_norm",))
    curves = {name: {**each, **norms.get(name, {})} for name, each in (curves or norms).items()}
    about = f"{about} The clipping norm is what the run learnt with noise.".strip() if norms else about
    drawn = plots.training_curves(curves) if curves else None
    return [] if drawn is None else [_wide("training", _plain(curves), drawn, about, _spread(arms))]


def _curves(arms: Sequence[ArmResults], section: str, metrics: Sequence[str] | None) -> dict[str, dict[str, Curve]]:
    found = {}
    for arm in arms:
        names = arm.metrics_in(section) if metrics is None else metrics
        each = {name: arm.curve(section, name) for name in names}
        found[arm.name] = {name: curve for name, curve in each.items() if curve is not None}
    return found if any(found.values()) else {}


def _plain(curves: Mapping[str, Mapping[str, Curve]]) -> dict[str, Any]:
    return {name: {metric: curve.to_dict() for metric, curve in each.items()} for name, each in curves.items()}


def _privacy(arms: Sequence[ArmResults]) -> list[Drawing]:
    """A privacy curve for every different ledger; of many, for those with the smallest and the largest epsilon."""
    ledgers: dict[tuple[Event, ...], list[ArmResults]] = {}
    for arm in arms:
        if arm.dearest.ledger is not None and arm.first.is_private:
            ledgers.setdefault(arm.dearest.ledger.events, []).append(arm)
    if len(ledgers) > _CURVES:
        by_cost = sorted(ledgers, key=lambda events: math.inf if (cost := ledgers[events][0].epsilon) is None else cost)
        ledgers = {events: ledgers[events] for events in (by_cost[0], by_cost[-1])}
    found = []
    for k, (events, sharing) in enumerate(ledgers.items()):
        try:
            curve = privacy_curve(events, count=25)
        except AccountingError:
            continue  # shuffled and fixed-size batches have an interval, not a curve
        name = "privacy" if len(ledgers) == 1 else f"privacy-{k + 1}"
        drawn = plots.privacy_curves(curve, delta=sharing[0].first.delta, titled=False)
        named = _named(sharing)
        of = named if len(ledgers) > 1 else ""
        found.append(_wide(name, curve.to_dict(), drawn, f"For {named}: {curve.about}.", of=of))
    return found


def _correlations(arms: Sequence[ArmResults]) -> list[Drawing]:
    """What is left of noise that is correlated over steps: a figure for every different plan of it."""
    plans: dict[tuple[Any, ...], list[ArmResults]] = {}
    for arm in arms:
        plan = arm.first.plan
        if isinstance(plan, Plan) and plan.correlation != Independent() and arm.first.is_private:
            plans.setdefault((plan.correlation, plan.sampling, plan.steps, plan.noise_multiplier), []).append(arm)
    found = []
    for k, sharing in enumerate(list(plans.values())[:_CURVES]):
        name = "correlation" if len(plans) == 1 else f"correlation-{k + 1}"
        try:
            drawn = _correlation(name, sharing, _named(sharing) if len(plans) > 1 else "")
        except (AccountingError, InvalidPlan):
            continue  # a file whose plan cannot be followed
        found += [] if drawn is None else [drawn]
    return found


def _named(arms: Sequence[ArmResults]) -> str:
    return " · ".join(arm.name for arm in arms)


def _correlation(name: str, sharing: Sequence[ArmResults], of: str) -> Drawing | None:
    plan, delta = sharing[0].first.plan, sharing[0].first.delta
    assert isinstance(plan, Plan)
    correlation = plan.correlation
    if plan.steps > _MOST_STEPS or plan.steps * correlation.bands > _MOST_WORK:
        return None
    left = _left(plan, delta)
    column = correlation.coefficients(plan.steps).tolist() if isinstance(correlation, (Banded, SquareRoot)) else []
    own, *others = (f"{each[-1]:.3g} R" for each in left.values())
    where = ("in the same batches", "in Poisson batches")
    usual = " and ".join(f"{end} {batches}" for end, batches in zip(others, where, strict=False))
    about = (
        f"For {_named(sharing)}. {correlation.describe()} In the end the deviation is {own}; "
        f"with independent noise it would be {usual}."
    )
    values = {"left": {label: _thinned(each) for label, each in left.items()}, "column": column}
    return _wide(name, values, plots.correlated_noise(left, column), about, of=of)


def _left(plan: Plan, delta: float | None) -> dict[str, list[float]]:
    """The noise in the sum after each step, and what independent noise would leave at the same epsilon."""
    noise, steps, sampling = plan.noise_multiplier, plan.steps, plan.sampling
    assert isinstance(noise, float)  # a schedule of noise is not correlated, and a private plan has noise
    alone = Independent().left(steps)
    found = {
        "this noise": (noise * plan.correlation.left(steps, sampling)).tolist(),
        "independent, same batches": (noise * alone).tolist(),
    }
    if isinstance(sampling, (CyclicPoisson, Shuffled)) and delta is not None:  # usual batches, which need less noise
        usual = Poisson(sampling.sample_size, sampling.batch_size)
        needed = noise_multiplier(plan.epsilon(delta), delta, usual, steps)
        found["independent, Poisson batches"] = (needed * alone).tolist()
    return found


def _thinned(values: Sequence[float], most: int = 200) -> dict[str, Any]:
    """At most so many of the steps, the last one among them."""
    every = -(-len(values) // most)
    steps = list(range(len(values), 0, -every))[::-1]
    return {"step": steps, "deviation": [values[step - 1] for step in steps]}
