"""Quadrature of one step: the privacy loss at a lattice of outputs, with its probabilities.

The trapezoidal rule converges exponentially for an analytic integrand with Gaussian tails: the error is
exp(-2 pi d / h) times the integrand's growth on the lines Im x = +-d, and a mixture has no zero for
|Im x| < pi / gap, gap the distance of neighbouring means: its components are two, or binomial (Gaussian factors leave
all roots of a polynomial in exp(gap x) real and negative, as binomial weights have them).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import special

from clipwise.accounting._numerics.allocation import allocation_losses
from clipwise.accounting._numerics.laws import Allocation, Law, Mixture, Pair

__all__ = [
    "WINDOW_WIDTH",
    "Floats",
    "Points",
    "count_points",
    "log_density_ratio",
    "points",
    "points_cut",
    "points_fine",
    "points_whole",
]

Floats = NDArray[np.float64]

WINDOW_WIDTH = 1.0 / 6.0  # width of the smooth step that parts small from large losses, over its place

_NEAR = 30.0  # nats: a density so many times the normal one is not near it
_ACCURACY = 40.0  # nats: e^-40 is below double precision
_FEWEST_FINE = 8_000  # points of each pair of a fine lattice
_GAUSS_NODES, _GAUSS_WEIGHTS = np.polynomial.legendre.leggauss(16)


@dataclass(frozen=True)
class Points:
    """Losses, their probabilities under the first data set, and the probability that was left out.

    `weight` is exp(log_weight), which underflows to zero far out.
    """

    loss: Floats
    log_weight: Floats
    lost: float
    weight: Floats = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", np.exp(self.log_weight))


def log_density_ratio(mixture: Mixture, x: Floats) -> Floats:
    """Log of the mixture's density over the standard normal one, accurate where the two nearly agree."""
    if len(mixture) == 1:
        mean = mixture[0][1]
        return np.asarray(mean * x - 0.5 * mean**2)
    exponents = np.array([mean * x - 0.5 * mean**2 for _, mean in mixture])
    weights = np.array([weight for weight, _ in mixture])[:, None]
    excess = np.sum(weights * np.expm1(np.minimum(exponents, _NEAR)), axis=0)
    near = (excess > -0.5) & (exponents.max(axis=0) < _NEAR)
    if np.all(near):
        return np.asarray(np.log1p(excess))
    far: Floats = special.logsumexp(exponents + np.log(weights), axis=0)
    return np.asarray(np.where(near, np.log1p(np.maximum(excess, -0.5)), far))


def _posterior_moments(mixture: Mixture, x: Floats) -> tuple[Floats, Floats]:
    exponents = np.array([math.log(weight) + mean * x - 0.5 * mean**2 for weight, mean in mixture])
    posterior = special.softmax(exponents, axis=0)
    means = np.array([mean for _, mean in mixture])[:, None]
    first = np.sum(posterior * means, axis=0)
    return first, np.sum(posterior * means**2, axis=0) - first**2


@lru_cache(maxsize=4096)
def _extent(pair: Pair, tail: float) -> tuple[float, float]:
    # Each component is followed until its own share of the discarded mass is reached: in all, `tail` on each side.
    own = tail / len(pair.p)
    reach = [(mean, -float(special.ndtri(min(0.4, max(own / weight, 1e-300))))) for weight, mean in pair.p]
    return min(mean - z for mean, z in reach), max(mean + z for mean, z in reach)


@lru_cache(maxsize=4096)
def _smoothness(pair: Pair, low: float, high: float, window: float = 0.0) -> tuple[float, float, float, float]:
    """The zero-free strip's half width, the loss's largest slope and curvature, and its slope near `window`."""
    x = np.linspace(low, high, 257)
    mean_p, var_p = _posterior_moments(pair.p, x)
    mean_q, var_q = _posterior_moments(pair.q, x)
    strip = 0.8 * math.pi / pair.gap if pair.gap > 0 else 6.0
    slope, curvature = np.abs(mean_p - mean_q), np.maximum(var_q - var_p, 0.0)
    steep = 0.0
    if window > 0.0:
        loss = log_density_ratio(pair.p, x) - log_density_ratio(pair.q, x)
        steep = float(slope[max(0, int(np.argmin(np.abs(loss - 2.0 * window))) - 1)])
    return min(strip, 6.0), float(slope.max()), float(curvature.max()), steep


def _spacing(pair: Pair, low: float, high: float, tilt: float, frequency: float, taper: float, window: float) -> float:
    strip, slope, curvature, steep = _smoothness(pair, low, high, window)
    growth = 1.0 + tilt * curvature + (2.0 / taper**2 if taper else 0.0)
    if window:
        growth += 2.0 * (steep / (WINDOW_WIDTH * window)) ** 2
    width = min(strip, math.sqrt(2.0 * _ACCURACY / growth))
    return 2.0 * math.pi / (_ACCURACY / width + 0.5 * width * growth + frequency * slope)


def _gauss(low: float, high: float, width: float) -> tuple[Floats, Floats]:
    panels = max(1, math.ceil((high - low) / width))
    edges = np.linspace(low, high, panels + 1)
    half = 0.5 * (edges[1] - edges[0])
    x = (edges[:-1, None] + half * (1.0 + _GAUSS_NODES)).ravel()
    return x, np.tile(half * _GAUSS_WEIGHTS, panels)


@dataclass(frozen=True)
class _Span:
    """Where the outputs are sampled: from low to high, and faded out beyond over a length of about `taper`."""

    low: float
    high: float
    taper: float = 0.0
    margin: float = 0.0


def _tails(law: Law, tail: float) -> list[tuple[Pair, float]]:
    """The pairs, and the probability that each of them may leave out for a total of `tail`."""
    return [(pair, tail / (share * len(law.parts))) for share, pair in law.parts]


def _faded(pair: Pair, tail: float, tilt: float) -> _Span:
    low, high = _extent(pair, tail)
    # The fade must fall faster than the tilt exp(t L) rises, or the tail would come back.
    steep = tilt * _smoothness(pair, low, high)[1]
    taper = 1.0 / math.sqrt(4.0 + steep)
    return _Span(low, high, taper, 4.5 * taper + steep * taper**2)


def _nodes(
    pair: Pair, span: _Span, tilt: float, frequency: float = 0.0, scale: float = 1.0, window: float = 0.0
) -> tuple[Floats, Floats, Floats]:
    """Outputs, their quadrature weights, and the share that is kept of each."""
    begin, end = span.low - span.margin, span.high + span.margin
    spacing = scale * _spacing(pair, begin, end, tilt, frequency, span.taper, window)
    if pair.symmetrised:
        x, dx = _gauss(0.5 * (pair.p[0][1] + pair.p[-1][1]), end, 8.0 * spacing)
    else:
        count = int((end - begin) / spacing) + 2
        x, dx = begin + spacing * np.arange(count, dtype=np.float64), np.full(count, spacing, dtype=np.float64)
    if not span.taper:
        return x, dx, np.ones_like(x)
    kept = 0.25 * special.erfc((x - span.high) / span.taper) * special.erfc((span.low - x) / span.taper)
    return x, dx, np.asarray(kept)


def _pair_points(pair: Pair, nodes: tuple[Floats, Floats, Floats]) -> Points:
    x, dx, kept = nodes
    log_p = log_density_ratio(pair.p, x)
    loss = log_p - log_density_ratio(pair.q, x) if pair.q != ((1.0, 0.0),) else log_p
    log_whole = np.log(dx) + log_p - 0.5 * x**2 - 0.5 * math.log(2.0 * math.pi)
    lost = float(np.exp(log_whole) @ (1.0 - kept))
    with np.errstate(divide="ignore"):
        log_weight = log_whole + np.log(kept)
    if not pair.symmetrised:
        return Points(loss, log_weight, lost)
    # Losses above zero are the pair's own, those below their mirror image, and the rest of the mass sits at zero.
    log_mirror = log_weight - loss
    rest = 1.0 - float(np.exp(log_weight).sum()) - float(np.exp(log_mirror).sum())
    log_weight = np.concatenate([log_weight, log_mirror, [math.log(max(rest, 1e-300))]])
    return Points(np.concatenate([loss, -loss, [0.0]]), log_weight, lost)


def points(
    law: Law, tail: float, tilt: float = 0.0, frequency: float = 0.0, scale: float = 1.0, window: float = 0.0
) -> Points:
    """Losses and probabilities such that sums of exp(z * loss), |Re z| <= tilt, |Im z| <= frequency, are accurate.

    The law is faded out where a probability of about `tail` is left. `scale` < 1 refines; with `window`, a smooth step
    of the loss there is resolved too.
    """
    nodes = [_nodes(pair, _faded(pair, own, tilt), tilt, frequency, scale, window) for pair, own in _tails(law, tail)]
    return _join(law, nodes)


def count_points(law: Law, tail: float, tilt: float, frequency: float, scale: float, window: float) -> int:
    """How many points `points` would return."""
    total = 0
    for pair, own in _tails(law, tail):
        span = _faded(pair, own, tilt)
        begin, end = span.low - span.margin, span.high + span.margin
        total += int((end - begin) / (scale * _spacing(pair, begin, end, tilt, frequency, span.taper, window))) + 2
    # A symmetrised pair has about twice as many on half the length, and their mirror images.
    return 2 * total if law.parts[0][1].symmetrised else total


def points_cut(law: Law | Allocation, tail: float, tilt: float = 8.0) -> Points:
    """A quick lattice for real exponents up to `tilt`, simply cut off where a probability of `tail` is left."""
    if isinstance(law, Allocation):
        return Points(*allocation_losses(law, tail))
    return _join(law, [_nodes(pair, _Span(*_extent(pair, own)), tilt) for pair, own in _tails(law, tail)])


@lru_cache(maxsize=8)
def points_fine(law: Law | Allocation, tail: float, count: int) -> Points:
    """At least `count` points, and thousands per pair, cut off where a probability of `tail` is left.

    An epoch of balls in bins has those of its own grid, which dominate it as they are.
    """
    if isinstance(law, Allocation):
        return Points(*allocation_losses(law, tail))
    each, nodes = max(count // len(law.parts), _FEWEST_FINE), []
    for pair, own in _tails(law, tail):
        span = _Span(*_extent(pair, own))
        coarse = (span.high - span.low) / _spacing(pair, span.low, span.high, 8.0, 0.0, 0.0, 0.0)
        nodes.append(_nodes(pair, span, 8.0, scale=min(1.0, coarse / each)))
    return _join(law, nodes)


def points_whole(law: Law, high: float, tilt: float) -> Points:
    """The law on [-high, high], nothing faded out."""
    return _join(law, [_nodes(pair, _Span(-high, high), tilt) for _, pair in law.parts])


def _join(law: Law, nodes: list[tuple[Floats, Floats, Floats]]) -> Points:
    parts = [_pair_points(pair, own) for (_, pair), own in zip(law.parts, nodes, strict=True)]
    if len(parts) == 1:
        return parts[0]
    shares = [share for share, _ in law.parts]
    return Points(
        np.concatenate([part.loss for part in parts]),
        np.concatenate([math.log(share) + part.log_weight for share, part in zip(shares, parts, strict=True)]),
        sum(share * part.lost for share, part in zip(shares, parts, strict=True)),
    )
