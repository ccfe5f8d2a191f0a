"""Quadrature of one step: the privacy loss at a lattice of outputs, with its probabilities.

The trapezoidal rule converges exponentially for an analytic integrand with Gaussian tails: the error is
exp(-2 pi d / h) times the integrand's growth on the lines Im x = +-d, and a mixture has no zero for |Im x| < pi / spread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import special

from clipwise.accounting.laws import Law, Mixture, Pair

__all__ = ["Floats", "Points", "log_density_ratio", "points"]

Floats = NDArray[np.float64]

_ACCURACY = 40.0  # nats: e^-40 is below double precision
_GAUSS_NODES, _GAUSS_WEIGHTS = np.polynomial.legendre.leggauss(16)


@dataclass(frozen=True)
class Points:
    """Losses and their probabilities under the first data set."""

    loss: Floats
    weight: Floats


def log_density_ratio(mixture: Mixture, x: Floats) -> Floats:
    """log of the mixture's density over the standard normal one, accurate where the two nearly agree."""
    if len(mixture) == 1:
        mean = mixture[0][1]
        return np.asarray(mean * x - 0.5 * mean**2)
    exponents = np.array([mean * x - 0.5 * mean**2 for _, mean in mixture])
    weights = np.array([weight for weight, _ in mixture])[:, None]
    near = np.log1p(np.sum(weights * np.expm1(np.minimum(exponents, 600.0)), axis=0))
    if float(exponents.max()) < 30.0:
        return np.asarray(near)
    far = special.logsumexp(exponents + np.log(weights), axis=0)
    return np.where(exponents.max(axis=0) < 30.0, near, far)


def _posterior_moments(mixture: Mixture, x: Floats) -> tuple[Floats, Floats]:
    exponents = np.array([math.log(weight) + mean * x - 0.5 * mean**2 for weight, mean in mixture])
    posterior = special.softmax(exponents, axis=0)
    means = np.array([mean for _, mean in mixture])[:, None]
    first = np.sum(posterior * means, axis=0)
    return first, np.sum(posterior * means**2, axis=0) - first**2


@lru_cache(maxsize=4096)
def _extent(pair: Pair, tail: float) -> tuple[float, float]:
    # Each component is followed until its own share of the discarded mass is reached.
    reach = [(mean, -float(special.ndtri(min(0.4, max(tail / weight, 1e-300))))) for weight, mean in pair.p]
    return min(mean - z for mean, z in reach), max(mean + z for mean, z in reach)


@lru_cache(maxsize=4096)
def _smoothness(pair: Pair, low: float, high: float) -> tuple[float, float, float]:
    """The zero-free strip's half width, and the largest first and second derivative of the loss."""
    x = np.linspace(low, high, 257)
    mean_p, var_p = _posterior_moments(pair.p, x)
    mean_q, var_q = _posterior_moments(pair.q, x)
    spread = max(max(m for _, m in side) - min(m for _, m in side) for side in (pair.p, pair.q))
    strip = 0.8 * math.pi / spread if spread > 0 else 6.0
    return min(strip, 6.0), float(np.max(np.abs(mean_p - mean_q))), float(np.max(np.maximum(var_q - var_p, 0.0)))


def _lattice(pair: Pair, low: float, high: float, tilt: float, frequency: float, scale: float) -> tuple[Floats, Floats]:
    strip, slope, curvature = _smoothness(pair, low, high)
    growth = 1.0 + tilt * curvature
    width = min(strip, math.sqrt(2.0 * _ACCURACY / growth))
    spacing = scale * 2.0 * math.pi / (_ACCURACY / width + 0.5 * width * growth + frequency * slope)
    if pair.symmetrised:
        return _gauss(0.5 * (pair.p[0][1] + pair.p[-1][1]), high, 8.0 * spacing)
    count = int((high - low) / spacing) + 2
    return low + spacing * np.arange(count), np.full(count, spacing)


def _gauss(low: float, high: float, width: float) -> tuple[Floats, Floats]:
    panels = max(1, math.ceil((high - low) / width))
    edges = np.linspace(low, high, panels + 1)
    half = 0.5 * (edges[1] - edges[0])
    x = (edges[:-1, None] + half * (1.0 + _GAUSS_NODES)).ravel()
    return x, np.tile(half * _GAUSS_WEIGHTS, panels)


def _pair_points(
    pair: Pair, tail: float, tilt: float, frequency: float, scale: float, high: float | None
) -> tuple[Floats, Floats]:
    low, top = _extent(pair, tail)
    x, dx = _lattice(pair, low, top if high is None else max(top, high), tilt, frequency, scale)
    log_p = log_density_ratio(pair.p, x)
    loss = log_p - log_density_ratio(pair.q, x) if pair.q != ((1.0, 0.0),) else log_p
    weight = dx * np.exp(log_p - 0.5 * x**2) / math.sqrt(2.0 * math.pi)
    if not pair.symmetrised:
        return loss, weight
    # Losses above zero are the pair's own, those below their mirror image, and the rest of the mass sits at zero.
    mirror = weight * np.exp(-loss)
    rest = 1.0 - float(weight.sum()) - float(mirror.sum())
    return np.concatenate([loss, -loss, [0.0]]), np.concatenate([weight, mirror, [rest]])


def points(
    law: Law,
    tail: float,
    tilt: float = 0.0,
    frequency: float = 0.0,
    scale: float = 1.0,
    high: float | None = None,
) -> Points:
    """Losses and probabilities such that sums of exp(z * loss), |Re z| <= tilt, |Im z| <= frequency, are accurate.

    At most a probability of about `tail` is left out at each end; `high` extends the upper end. `scale` < 1 refines.
    """
    parts = [(w, _pair_points(pair, tail, tilt, frequency, scale, high)) for w, pair in law.parts]
    if len(parts) == 1:
        return Points(*parts[0][1])
    return Points(np.concatenate([loss for _, (loss, _) in parts]), np.concatenate([w * p for w, (_, p) in parts]))
