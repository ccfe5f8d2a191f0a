"""What the two regression experiments share: the figure of the paper's section 5.5, and how monotone the curves are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.ticker import LogLocator, NullFormatter

from clipwise import plots
from clipwise.calibration import Estimate, RegressionResult
from clipwise.cli.published import Published
from clipwise.experiments import Arm
from clipwise.report import ArmResults, Run, arms_of
from papers.figures import figure
from papers.tables import Finding, epsilon, estimate, findings_table, page, seeds_of, setting

NOTICED = 0.02
"""A climb of less cannot be seen in a figure."""
NEARLY = 0.05
"""As good: an error that is so much larger at most."""
EARLY = 300
WITHOUT_NOISE = ", no noise"
"""How the name of an arm ends that clips and adds no noise."""

CHOSEN = {
    "wine_quality_red": "R = 2 with the learning rate 0.03, and 0.001 without privacy, are the paper's. The larger R "
    "are chosen here, with the learning rate 0.06 / R; the paper does not say how it scales the inputs. The error is "
    "in squared points of quality (0 to 10).",
    "california_housing": "R = 1 and the learning rate 0.0002, which all arms have, are the paper's. The larger R are "
    "chosen here; without privacy it is Adam too, where the paper says GD, and the paper does not say how it "
    "scales the inputs. The error is in squared units of 100,000 dollars. The file with all 20,640 records is needed; "
    "the package that `clipwise data` falls back to lacks 207 of them, which raises epsilon a little.",
}
"""What is the paper's and what is not, by data set."""


def ladder(small: float, *larger: float, plain: Sequence[str] = ()) -> tuple[Arm, ...]:
    """An arm with the R of the configuration, arms with larger ones, and one that is not private."""
    private = (Arm(f"R = {small:g}"), *(Arm(f"R = {R:g}", (f"clip.R={R}",)) for R in larger))
    return (*private, Arm("not private", ("privacy={private=false}", "clip={rule='NoClip'}", *plain)))


def climb(values: Iterable[float | None]) -> float:
    """How far a curve climbs above its lowest value so far, relative to that value: 0 when it never does."""
    lowest, worst = float("inf"), 0.0
    for value in values:
        if value is not None:
            lowest = min(lowest, value)
            worst = max(worst, value / lowest - 1)
    return worst


def climbs(arm: ArmResults, section: str = "test", metric: str = "mse") -> list[float]:
    """Of the single runs of an arm."""
    return [climb(row[section][metric] for row in run.curves if row.get(section)) for run in arm.runs]


def findings(arms: Sequence[ArmResults], published: Published) -> list[Finding]:
    """The paper's claims; the first arm has its small R, the private ones after it larger ones."""
    private = [arm for arm in arms if arm.epsilon is not None]
    if len(private) < 2 or private[0].epsilon is None:
        return []
    small, larger = private[0], private[1:]
    found = [_as_good(small, larger), _monotone(private, "the noise, which is the same in all, moves them alike")]
    noiseless = [arm for arm in arms if arm.name.endswith(WITHOUT_NOISE)]
    if len(noiseless) > 1:
        found.append(_monotone(noiseless, "clipping alone does not do it", " (asked here)"))
        found.append(_training_loss(noiseless))
    exact = f"exact: {epsilon(small)} at delta = {small.first.delta:.3g}"
    apart = small.epsilon - published.claim
    right = abs(apart) < 0.005 or f"no: an approximation, too {'low' if apart > 0 else 'high'}"
    return [*found, Finding(f"epsilon is {published.claim:.2f}", exact, right, seeds_of(small))]


def _as_good(small: ArmResults, larger: Sequence[ArmResults]) -> Finding:
    """The error of a larger R over that of the small one, less 1, of runs with the same seed."""
    errors = [{run.seed: error_of(run) for run in arm.runs} for arm in (small, *larger)]
    more = {
        arm.name: Estimate.over_seeds([each[seed] / errors[0][seed] - 1 for seed in each if seed in errors[0]])
        for arm, each in zip(larger, errors[1:], strict=True)
    }
    said = (
        f"{arm.name}: {estimate('mse', arm.estimates['mse'])}"
        + (f" ({100 * more[arm.name].mean:+.1f} % with the same seed)" if arm.name in more else "")
        for arm in (small, *larger)
    )
    equal = [name for name, each in more.items() if each.low is None or each.low <= 0]
    nearly = [name for name, each in more.items() if name not in equal and each.mean < NEARLY]
    verdict = [f"for {' and '.join(equal)}"] * bool(equal) + [f"nearly for {' and '.join(nearly)}"] * bool(nearly)
    return Finding(
        f"a large R is as good as {small.name}", "; ".join(said), ", ".join(verdict) or False, seeds_of(small, *larger)
    )


def error_of(run: Run) -> float:
    """The mean squared error on the test records."""
    assert isinstance(run.test, RegressionResult)
    return run.test.mse


def _monotone(arms: Sequence[ArmResults], otherwise: str, asked: str = "") -> Finding:
    found = {arm.name: climbs(arm) for arm in arms}
    small, *larger = map(fmean, found.values())
    said = "; ".join(
        f"{name}: mean over the runs {100 * fmean(each):.1f} %, largest {100 * max(each):.1f} %"
        for name, each in found.items()
    )
    return Finding(
        f"{arms[0].name} may converge in a non-monotone way, a larger R less so{asked}",
        f"how far the test error of a run climbs above its lowest value so far; {said}",
        f"no: {otherwise}" if max(larger) > small / 2 else True if small > NOTICED else "yes, but by little",
        seeds_of(*arms),
    )


def _training_loss(arms: Sequence[ArmResults]) -> Finding:
    """What the paper's theorem is about; it can be read where every batch is the whole data set."""
    found = {arm.name: climbs(arm, "private", "loss") for arm in arms}
    said = "; ".join(f"{name}: largest {100 * max(each):.1f} %" for name, each in found.items())
    return Finding(
        f"with {arms[0].name} the training loss climbs too (asked here)",
        f"how far the training loss of a run climbs above its lowest value so far, where it was measured; {said}",
        max(found[arms[0].name]) > 0,
        seeds_of(*arms),
    )


def write(title: str, published: Published, arms: Sequence[ArmResults], folder: Path) -> str:
    """The curves with one standard deviation to both sides, and the tables."""
    noiseless = [arm for arm in arms if arm.name.endswith(WITHOUT_NOISE)]
    drawn = _curves([arm for arm in arms if arm not in noiseless])
    caption = "Test error over training, mean and deviation over the seeds"
    if noiseless:
        worst = climbs(noiseless[0])
        seed = noiseless[0].runs[worst.index(max(worst))].seed
        early = _curves(arms_of(run for arm in noiseless for run in arm.runs if run.seed == seed))
        early.axes[0].set_xlim(0, EARLY)
        drawn = [(drawn, early)]
        early_on = f"Clipped, without noise: test error early on, of the one run in {len(worst)} that climbs most"
        caption = f"(a) {caption}. (b) {early_on}"
    figures = [figure(folder, "training", drawn, caption)]
    first = arms[0].first
    said = f"{setting(first)} {CHOSEN[first.provenance['data']['name']]}\n"
    return page(folder, title, arms, (), figures, [findings_table(findings(arms, published)), said])


def _curves(arms: Sequence[ArmResults]) -> Any:
    drawn = plots.training_curves({arm.name: {"mse": curve} for arm in arms if (curve := arm.curve("test", "mse"))})
    axes = drawn.axes[0]
    axes.set_title("Test error (MSE)", loc="left", fontsize=11, fontweight="bold")
    axes.set_yscale("log")  # the first steps are far above all that follows
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    return drawn
