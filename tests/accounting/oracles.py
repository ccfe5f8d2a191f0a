"""Privacy worked out a second time, from its definition: nothing here is clipwise's.

- `hockey_stick` and `two_steps`: delta of one and of two steps in 30 digits, by closed forms of the threshold.
- `bracket`: a lower and an upper end of delta after any number of steps. Outputs are put into bins of the loss; what is
  seen of a bin only can not tell more than the output (lower), and splitting a bin between its two ends such that
  both data sets keep its probability can not tell less (upper).
- `outputs_*` and `told_apart`: a mechanism on three or four records as the mixture over all its batches, and a lower
  end of what many of its outputs tell. Here the worst case is not assumed but looked for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import fft, special

Array = NDArray[Any]
Mixture = Sequence[tuple[float, float]]
Outputs = dict[tuple[float, ...], float]

FAR = 10.0  # deviations: what lies farther out has a probability of 1e-23
ROUND_OFF = 1e-17  # of a transform in extended precision, per step
_CELLS = 1 << 16


@dataclass(frozen=True)
class Step:
    """One sampled step in units of the noise, written so that the loss rises with the output."""

    kind: Literal["remove", "add", "replace"]
    rate: float
    mu: float

    @property
    def p(self) -> Mixture:
        return [(1.0, 0.0)] if self.kind == "add" else [(1.0 - self.rate, 0.0), (self.rate, self.mu)]

    @property
    def q(self) -> Mixture:
        return [(1.0, 0.0)] if self.kind == "remove" else [(1.0 - self.rate, 0.0), (self.rate, -self.mu)]

    def place(self, epsilon: Any, use: Any) -> Any:
        """Where the loss is epsilon: e^(mu x) solves a linear or a quadratic equation. `use` is mpmath."""
        rate, mu = use.mpf(self.rate), use.mpf(self.mu)
        rest, share, gain = 1 - rate, rate * use.exp(-(mu**2) / 2), use.expm1(epsilon)
        if self.kind == "remove":
            power = (gain + rate) / share
        elif self.kind == "add":
            left = use.expm1(-epsilon) + rate
            power = share / left if left > 0 else use.inf
        else:
            half, odds = rest * gain / 2, gain + 1
            root = use.sqrt(half**2 + odds * share**2)
            power = (half + root) / share if half > 0 else odds * share / (root - half)
        return -use.inf if power <= 0 else use.log(power) / mu

    def places(self, epsilon: Array) -> Array:
        """The same for many epsilons, in extended precision."""
        rate, mu = np.longdouble(self.rate), np.longdouble(self.mu)
        gain, log_share = np.expm1(epsilon), np.log(rate) - mu**2 / 2
        with np.errstate(all="ignore"):
            if self.kind == "remove":
                x = (np.log(np.maximum(gain + rate, 0)) - log_share) / mu
            elif self.kind == "add":
                x = (log_share - np.log(np.maximum(np.expm1(-epsilon) + rate, 0))) / mu
            else:
                half = (1 - rate) * gain / 2
                root = np.sqrt(half**2 + np.exp(epsilon + 2 * log_share))
                up = np.log(half + root) - log_share
                x = np.where(half > 0, up, epsilon + log_share - np.log(root - half)) / mu
        return np.asarray(x, dtype=float)

    def loss(self, x: Any, use: Any) -> Any:
        """The log of the densities' ratio; `use` is mpmath, or numpy."""

        def density(mixture: Mixture) -> Any:
            return sum(w * use.exp(m * x - m * m / 2) for w, m in mixture)

        return use.log(density(self.p) / density(self.q))


def hockey_stick(step: Step, epsilon: Any, use: Any) -> Any:
    """P(L > eps) - e^eps Q(L > eps) of one step; `use` is mpmath, at the precision that it is set to."""
    x = step.place(epsilon, use)

    def above(mixture: Mixture) -> Any:
        return sum(w * use.erfc((x - m) / use.sqrt(2)) / 2 for w, m in mixture)

    return above(step.p) - use.exp(epsilon) * above(step.q)


def two_steps(step: Step, epsilon: Any, use: Any) -> Any:
    """Delta of two steps: the mean of one step's delta at what the other one's loss leaves of epsilon."""
    epsilon, least = use.mpf(epsilon), use.log1p(-use.mpf(step.rate))
    low, high = -FAR, max(0.0, *(m for _, m in step.p)) + FAR
    ends = set(np.linspace(low, high, 1 + math.ceil((high - low) * max(1.0, step.mu / 4))))
    # One step's delta bends where no loss is left that could be smaller, or larger.
    if step.kind == "add":  # no loss exceeds -log(1 - rate)
        low = max(low, float(step.place(epsilon + least, use)))
    for bend in (step.place(epsilon - least, use), step.place(epsilon + least, use)):
        if low <= bend < high:
            ends |= {float(bend), *(float(bend) + sign * 2.0**-j for j in range(8) for sign in (-1, 1))}
    marks = sorted({low, high, *(x for x in ends if low < x < high)}) if low < high else []
    nodes, weights = np.polynomial.legendre.leggauss(12)
    total = use.mpf(0)
    for begin, end in itertools.pairwise(marks):
        for node, weight in zip(nodes, weights, strict=True):
            x = use.mpf(begin) + (end - begin) * (1 + node) / 2
            density = sum(w * use.exp(-((x - m) ** 2) / 2) for w, m in step.p)
            total += weight * (end - begin) / 2 * density * hockey_stick(step, epsilon - step.loss(x, use), use)
    return total / use.sqrt(2 * use.pi)


# Many steps ------------------------------------------------------------------------------------------------------

Law = Sequence[tuple[float, Step]]
"""With each share's probability this step, and which one it is, is seen."""


def bracket(phases: Sequence[tuple[Law, int]], epsilon: float) -> tuple[float, float]:
    """A lower and an upper end of delta at `epsilon` after all phases."""
    width = sum((high - low) * count for (low, high), count in ((_reach(law), count) for law, count in phases)) / _CELLS
    ends = []
    for upper in (False, True):
        pieces = [(*_on_grid(law, width, upper), count) for law, count in phases]
        losses, mass = _composed(pieces, width)
        error = ROUND_OFF * sum(count for _, count in phases)
        lost = sum(count * 4e-23 * len(law) for law, count in phases)
        found = _excess(losses, mass, epsilon)
        ends.append(found + error + lost if upper else found - error)
    return max(0.0, ends[0]), min(1.0, ends[1])


def _span(step: Step) -> tuple[float, float]:
    means = [m for side in (step.p, step.q) for _, m in side]
    low, high = (float(step.loss(np.longdouble(x), np)) for x in (min(means) - FAR, max(means) + FAR))
    return low, high


def _reach(law: Law) -> tuple[float, float]:
    spans = [_span(step) for _, step in law]
    return min(low for low, _ in spans), max(high for _, high in spans)


def _on_grid(law: Law, width: float, upper: bool) -> tuple[int, Array]:
    low, high = _reach(law)
    first, last = math.floor(low / width) - 2, math.ceil(high / width) + 2
    mass = np.zeros(last - first + 2, dtype=np.longdouble)
    # Binned for the lower end, a loss stands for its whole bin: a little above the grid, so that it is rounded little.
    edges = width * (np.arange(first, last + 1) + (0.0 if upper else -0.48))
    for share, step in law:
        x = step.places(edges.astype(np.longdouble))
        p, q = (_between(side, x) for side in (step.p, step.q))
        k = np.arange(first, last)
        with np.errstate(all="ignore"):
            if upper:
                up = np.clip((p - q * np.exp(k * np.longdouble(width))) / -np.expm1(-np.longdouble(width)), 0.0, p)
                mass[:-2] += share * (p - up)
                mass[1:-1] += share * up
                mass[0] += share * _below(step.p, x[0])
                continue
            place = np.floor(np.log(p / q) / width + 1e-9)
        seen = np.isfinite(place)
        kept = np.minimum(place[seen], k[seen]).astype(int) - first
        np.add.at(mass, kept[kept >= 0], share * p[seen][kept >= 0])
    return first, mass


def _below(mixture: Mixture, x: float) -> float:
    return sum(w * float(special.ndtr(x - m)) for w, m in mixture)


def _between(mixture: Mixture, x: Array) -> Array:
    """The probabilities between neighbouring x, each from the tail that it lies in."""
    total = np.zeros(len(x) - 1, dtype=np.longdouble)
    for w, m in mixture:
        low, high = x[:-1] - m, x[1:] - m
        both = np.where(low > 0, special.ndtr(-low) - special.ndtr(-high), special.ndtr(high) - special.ndtr(low))
        total += w * both
    return total


def _composed(pieces: Iterable[tuple[int, Array, int]], width: float) -> tuple[Array, Array]:
    pieces = list(pieces)
    length = sum(count * (len(mass) - 1) for _, mass, count in pieces) + 1
    size = fft.next_fast_len(length, real=True)
    spectrum, start = np.ones(size // 2 + 1, dtype=np.clongdouble), 0
    for first, mass, count in pieces:
        spectrum, start = spectrum * fft.rfft(mass, size) ** count, start + count * first
    return width * (start + np.arange(length)), fft.irfft(spectrum, size)[:length]


def _excess(losses: Array, mass: Array, epsilon: float) -> float:
    above = losses > epsilon
    return float(np.maximum(mass[above], 0) @ -np.expm1(epsilon - losses[above]))


# Mechanisms ------------------------------------------------------------------------------------------------------


def outputs_of(batches: Iterable[tuple[float, Sequence[float]]]) -> Outputs:
    """The sums of batches, each with its probability."""
    found: Outputs = {}
    for chance, batch in batches:
        total = (round(math.fsum(batch), 12),)
        found[total] = found.get(total, 0.0) + chance
    return found


def poisson_batches(values: Sequence[float], rate: float, cap: int | None = None) -> Iterable[tuple[float, Any]]:
    """Every batch that Poisson sampling can draw; one over the cap is any subset of it of that size, equally likely."""
    for chosen in itertools.product((False, True), repeat=len(values)):
        batch = list(itertools.compress(values, chosen))
        chance = math.prod(rate if taken else 1.0 - rate for taken in chosen)
        kept = [tuple(batch)] if cap is None or len(batch) <= cap else list(itertools.combinations(batch, cap))
        yield from ((chance / len(kept), subset) for subset in kept if chance)


def fixed_batches(values: Sequence[float], size: int) -> Iterable[tuple[float, Any]]:
    """Every subset of this size."""
    kept = list(itertools.combinations(values, size))
    return [(1.0 / len(kept), subset) for subset in kept]


def shuffled_outputs(values: Sequence[float], size: int, batches: int) -> Outputs:
    """The sums of an epoch's first `batches` batches, over all orders of the records."""
    orders = list(itertools.permutations(values))
    found: Outputs = {}
    for order in orders:
        sums = tuple(math.fsum(order[size * i : size * (i + 1)]) for i in range(batches))
        found[sums] = found.get(sums, 0.0) + 1.0 / len(orders)
    return found


def told_apart(releases: Sequence[tuple[Outputs, Outputs, int]], sigma: float, epsilon: float) -> float:
    """A lower end of delta: what cells of the outputs tell, the number of times that each release is made."""
    cells = [(*_cells(one, other, sigma), count) for one, other, count in releases]
    width = sum(count * float(loss.max() - loss.min() + 1e-3) for _, loss, count in cells) / (1 << 16)
    pieces = []
    for p, loss, count in cells:
        place = np.floor(loss / width).astype(int)
        first = int(place.min())
        pieces.append((first, np.bincount(place - first, weights=p.astype(float)).astype(np.longdouble), count))
    losses, mass = _composed(pieces, width)
    return max(0.0, _excess(losses, mass, epsilon) - ROUND_OFF * sum(count for *_, count in releases))


def _cells(one: Outputs, other: Outputs, sigma: float) -> tuple[Array, Array]:
    """The probabilities of the cells on the first data set, and their losses."""
    dimension = len(next(iter(one)))
    means = np.array([*one, *other])
    each = {1: 4_000, 2: 240, 3: 60}[dimension]
    ends = [(float(col.min()), float(col.max())) for col in means.T]
    p, q = (_chances(tuple(outputs.items()), tuple(ends), each, sigma) for outputs in (one, other))
    seen = (p > 1e-30) & (q > 0.0)
    return p[seen], np.log(p[seen] / q[seen]).astype(float)


@lru_cache(64)
def _chances(outputs: tuple[Any, ...], ends: tuple[tuple[float, float], ...], each: int, sigma: float) -> Array:
    """The probability of each cell. It is asked for in both directions, and for runs of several lengths."""
    axes = [np.linspace(low / sigma - 8.0, high / sigma + 8.0, each + 1) for low, high in ends]
    total = np.zeros([each] * len(ends), dtype=np.longdouble)
    for mean, weight in outputs:
        block: Array = np.array(weight, dtype=np.longdouble)
        for edges, m in zip(axes, mean, strict=True):
            block = np.multiply.outer(block, _between([(1.0, m / sigma)], edges))
        total += block
    return total.ravel()


def largest_epsilon(delta_at: Callable[[float], float], delta: float) -> float:
    """The epsilon at which a falling delta meets `delta`, from below."""
    low, high = 0.0, 1.0
    if delta_at(0.0) <= delta:
        return 0.0
    while delta_at(high) > delta:
        low, high = high, 2.0 * high
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if delta_at(middle) > delta else (low, middle)
    return low
