"""The claims of the paper's section in words, and what the runs say of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from clipwise.calibration import Estimate, metric_named
from clipwise.plots import Point
from clipwise.report import ArmResults
from papers.cifar10.grid import accuracies, best, whole
from papers.cifar10.study import LARGE, NOISE_RATES, SIGMAS, SMALL, TUNED, TUNED_LARGE, TUNED_SMALL, arm, noise_arm
from papers.tables import against, estimate
from papers.verdicts import Finding, seeds_of, smaller, smaller_mce

PAPERS_RATE = NOISE_RATES[0]
LITTLE = 0.02
"""A difference of loss, relative, or of accuracy, that is called little."""


def findings(by_name: Mapping[str, ArmResults], rows: Sequence[Any]) -> list[Finding]:
    """All claims for which there are runs."""
    found = [_noise(by_name, rate) for rate in NOISE_RATES]
    for kind, small, large in (("", SMALL, LARGE), ("15 epochs", SMALL, LARGE), (TUNED, TUNED_SMALL, TUNED_LARGE)):
        found += _calibration(by_name, kind, small, large)
    return [each for each in [*found, *_grid(rows)] if each is not None]


def _noise(by_name: Mapping[str, ArmResults], rate: float) -> Finding | None:
    """The test loss at the end, for every level of noise."""
    sigmas = [sigma for sigma in SIGMAS if noise_arm(sigma, rate) in by_name]
    losses = {sigma: by_name[noise_arm(sigma, rate)].estimates["nll"].mean for sigma in sigmas}
    if len(losses) < 2:
        return None
    spread = max(losses.values()) / min(losses.values()) - 1
    return Finding(
        f"the noise does not change the loss (learning rate {rate:g}{'' if rate == PAPERS_RATE else ', asked here'})",
        f"NLL by noise multiplier: {'; '.join(f'{sigma:g}: {loss:.4f}' for sigma, loss in losses.items())}",
        True if spread < LITTLE else f"no: they differ by {100 * spread:.0f} %",
        seeds_of(*(by_name[noise_arm(sigma, rate)] for sigma in sigmas)),
    )


def _calibration(by_name: Mapping[str, ArmResults], kind: str, small: float, large: float) -> list[Finding]:
    """A large R against a small one."""
    if not {arm(small, kind), arm(large, kind)} <= set(by_name):
        return []
    arms = by_name[arm(large, kind)], by_name[arm(small, kind)]
    ours, theirs = (each.estimates for each in arms)
    said = {m: f"{metric_named(m).label} {against(m, ours, theirs)}" for m in ("accuracy", "nll", "ece", "mce")}
    verdicts = {m: smaller(ours[m], theirs[m]) for m in ("nll", "ece")} | {"mce": smaller_mce(*arms)}
    better = " and ".join(metric_named(m).label for m, verdict in verdicts.items() if verdict is True)
    unclear = [
        f"{' and '.join(metric_named(m).label for m, each in verdicts.items() if each == verdict)} {verdict}"
        for verdict in dict.fromkeys(verdicts.values())
        if isinstance(verdict, str)
    ]
    partly = "; ".join([f"for {better}"] * bool(better) + unclear)
    label = f"R = {large:g} against {small:g}, {kind or 'one epoch'}"
    return [
        Finding(
            f"a large R is about as accurate ({label})", said["accuracy"],
            ours["accuracy"].mean > theirs["accuracy"].mean - LITTLE, seeds_of(*arms),
        ),
        Finding(
            f"a large R is better calibrated ({label})", "; ".join(said[m] for m in ("nll", "ece", "mce")),
            all(verdict is True for verdict in verdicts.values()) or partly or False, seeds_of(*arms),
        ),
    ]  # fmt: skip


def _grid(rows: Sequence[Any]) -> list[Finding]:
    """The diagonal of the heat map, and layerwise clipping."""
    if not whole(rows):
        return []
    chosen, layerwise = (best(rows, style, rows[0]["steps"]) for style in ("flat", "layerwise"))
    flat = {R: each.metrics["accuracy"] for R, each in chosen.items()}
    both = [R for R in flat if R in layerwise]
    top = max(flat, key=lambda R: flat[R].mean)
    rivals = [f"R = {R:g}" for R in flat if R > SMALL and smaller(flat[R], flat[top]) is not True]
    apart = {R: _apart(rows, chosen[R], layerwise[R]) for R in both}
    slower = [f"{R:g}" for R, each in apart.items() if each.high is not None and each.high < 0]
    seeds = (len({row["seed"] for row in rows}),)
    rates = [point.learning_rate for point in chosen.values()]
    return [
        Finding(
            "the best learning rate falls as R grows",
            "; ".join(f"R = {R:g}: {point.learning_rate:g}" for R, point in chosen.items()),
            rates == sorted(rates, reverse=True) and rates[0] > rates[-1],
            seeds,
        ),
        Finding(
            "the best accuracy is that of a small R with a large learning rate",
            "; ".join(f"R = {R:g}: {estimate('accuracy', value)}" for R, value in flat.items()),
            f"not clear: {' and '.join(rivals)} cannot be distinguished from the best" if rivals else True,
            seeds,
        ),
        Finding(
            "layerwise clipping learns more slowly",
            f"layerwise minus flat accuracy after {rows[0]['steps']} steps, same seed, in points: "
            + "; ".join(f"R = {R:g}: {estimate('accuracy', each).removesuffix(' %')}" for R, each in apart.items()),
            True if len(slower) == len(flat) else f"for R = {', '.join(slower)}" if slower else False,
            seeds,
        ),
    ]


def _apart(rows: Sequence[Any], flat: Point, layered: Point) -> Estimate:
    """How much more accurate layerwise clipping is, over pairs of runs that begin with the same weights."""
    ours, theirs = accuracies(rows, "layerwise", layered), accuracies(rows, "flat", flat)
    return Estimate.over_seeds([ours[seed] - theirs[seed] for seed in ours if seed in theirs])
