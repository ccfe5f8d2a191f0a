"""What the two regression experiments share: the figure of the paper's section 5.5, and how monotone the curves are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.ticker import LogLocator, NullFormatter

from clipwise import plots
from clipwise.accounting.published import Published
from clipwise.report import Arm, arms_of
from papers.tables import Finding, epsilon, estimate, figure, findings_table, page, setting

NOTICED = 0.02
"""A climb of less cannot be seen in a figure."""
EARLY = 300
WITHOUT_NOISE = ", no noise"
"""How the name of an arm ends that clips and adds no noise."""

CHOSEN = {
    "wine_quality_red": "R = 2 with the learning rate 0.03, and 0.001 without privacy, are the paper's. The larger R "
    "are chosen here, with the learning rate 0.06 / R; the paper does not tell how it scales the inputs.",
    "california_housing": "R = 1 and the learning rate 0.0002, which all arms have, are the paper's. The larger R are "
    "chosen here; without privacy it is Adam too, where the paper speaks of GD, and the paper does not tell how it "
    "scales the inputs.",
}
"""What is the paper's and what is not, by data set."""


def climb(values: Iterable[float | None]) -> float:
    """How far a curve climbs above its lowest value so far, relative to that value: 0 when it never does."""
    lowest, worst = float("inf"), 0.0
    for value in values:
        if value is not None:
            lowest = min(lowest, value)
            worst = max(worst, value / lowest - 1)
    return worst


def climbs(arm: Arm) -> list[float]:
    """Of the single runs of an arm."""
    return [climb(row["test"]["mse"] for row in run.curves if row.get("test")) for run in arm.runs]


def findings(arms: Sequence[Arm], published: Published) -> list[Finding]:
    """The paper's claims; the first arm has its small R, the private ones after it larger ones."""
    private = [arm for arm in arms if arm.epsilon is not None]
    if len(private) < 2 or private[0].epsilon is None:
        return []
    small, larger = private[0], private[1:]
    error = small.estimates["mse"]
    good = [arm.name for arm in larger if arm.estimates["mse"].mean <= error.mean + (error.deviation or 0.0)]
    found = [
        Finding(
            f"a large R is as good as {small.name}",
            "; ".join(f"{arm.name}: {estimate('mse', arm.estimates['mse'])}" for arm in private),
            f"for {' and '.join(good)}" if good else False,
        ),
        _monotone(private, "the noise, which is the same in all, moves them alike"),
    ]
    noiseless = [arm for arm in arms if arm.name.endswith(WITHOUT_NOISE)]
    if len(noiseless) > 1:
        found.append(_monotone(noiseless, "clipping alone does not do it"))
    exact = f"exact: {epsilon(small)} at delta = {small.first.delta:.3g}"
    apart = small.epsilon - published.claim
    right = abs(apart) < 0.005 or f"no: an approximation, too {'low' if apart > 0 else 'high'}"
    return [*found, Finding(f"epsilon is {published.claim:.2f}", exact, right)]


def _monotone(arms: Sequence[Arm], otherwise: str) -> Finding:
    found = {arm.name: climbs(arm) for arm in arms}
    small, *larger = map(fmean, found.values())
    said = "; ".join(
        f"{name}: {100 * fmean(each):.1f} %, at most {100 * max(each):.1f} %" for name, each in found.items()
    )
    return Finding(
        f"{arms[0].name} may converge in a non-monotone way, a larger R less so",
        f"how far a run's test error climbs above its lowest value so far, on average: {said}",
        f"no: {otherwise}" if max(larger) > small / 2 else True if small > NOTICED else "yes, but by little",
    )


def write(title: str, published: Published, arms: Sequence[Arm], folder: Path) -> str:
    """The curves with one standard deviation to both sides, and the tables."""
    noiseless = [arm for arm in arms if arm.name.endswith(WITHOUT_NOISE)]
    drawn = _curves([arm for arm in arms if arm not in noiseless])
    figures = [figure(folder, "training", drawn, "Test error over training, mean and deviation")]
    if noiseless:
        early = _curves([arm for run in noiseless for arm in arms_of([run.first])])
        early.axes[0].set_xlim(0, EARLY)
        figures.append(figure(folder, "no_noise", early, "Clipped, without noise: test error early on, first seed"))
    first = arms[0].first
    said = f"{setting(first)} {CHOSEN[first.provenance['data']['name']]}\n"
    return page(folder, title, arms, (), figures, [findings_table(findings(arms, published)), said])


def _curves(arms: Sequence[Arm]) -> Any:
    drawn = plots.training_curves({arm.name: {"mse": curve} for arm in arms if (curve := arm.curve("test", "mse"))})
    axes = drawn.axes[0]
    axes.set_yscale("log")  # the first steps are far above all that follows
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    return drawn
