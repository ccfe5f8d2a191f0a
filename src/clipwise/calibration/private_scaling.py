"""Recalibration on private data: a temperature under differential privacy, charged to the ledger.

The temperature is the one at which the mean confidence equals the accuracy ("expectation consistency", Clarté et al.
2023, who find it as good as the temperature of smallest NLL). Unlike the NLL, each record's part in this statistic is
bounded by itself, so that clipping takes nothing away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy import optimize
from torch import Tensor

from clipwise.accounting import Guarantee, Ledger, PrivateCalibration, Relation, noise_scale
from clipwise.calibration.inputs import ArrayLike, checked_labels, matrix
from clipwise.calibration.scaling import Temperature, limited
from clipwise.entropy import Entropy
from clipwise.errors import InvalidPlan
from clipwise.noise import GaussianNoise, Normals

__all__ = ["PrivateTemperature", "PrivateTemperatureScaling"]

QUERIES = 8
"""Noisy sums of one fit. Fewer end too early, and more make each noisier."""


@dataclass(frozen=True)
class PrivateTemperature(Temperature):
    """A temperature that was paid for; `epsilon` and `guarantee` answer for the whole ledger, training included."""

    noise_multiplier: float = 0.0
    disjoint: bool = False
    ledger: Ledger = field(default_factory=Ledger, repr=False, compare=False)

    def epsilon(self, delta: float, accountant: str = "exact", *, relation: Relation | None = None) -> float:
        """The combined epsilon of the ledger."""
        return self.ledger.epsilon(delta, accountant, relation=relation)

    def guarantee(self, delta: float, accountant: str = "exact", *, relation: Relation | None = None) -> Guarantee:
        """The combined guarantee of the ledger, with all it assumes."""
        return self.ledger.guarantee(delta, accountant, relation=relation)


@dataclass(frozen=True)
class PrivateTemperatureScaling:
    """Temperature scaling on private data: the Gaussian mechanism with `noise_multiplier` for the whole fit.

    The statistic of temperature T is the sum over records of c_i(T) - h_i, with c_i(T) = max softmax(z_i / T), the
    confidence, and h_i = 1 if record i is classified right, else 0. It falls as T grows. The fit asks for it with noise
    at 8 temperatures, each chosen from the noisy answers before (first T = sqrt(low * high), then where their best
    falling fit crosses zero), and uses nothing else of the data, not even the number of records.

    Guarantees: c_i(T) is in [1/K, 1] and h_i is 0 or 1, so one record more or less changes the sum by at most 1,
    whatever its logits (records with logits that are not finite count 0). Noise of standard deviation
    sqrt(8) * noise_multiplier on each of 8 adaptive sums is 1/noise_multiplier-GDP by composition (Dong, Roth & Su
    2022), the same as one Gaussian mechanism with `noise_multiplier`. The event is on the ledger before any noise is
    drawn.

    `disjoint=True` states that no calibration record was trained on, so that the two sets compose in parallel: the
    combined epsilon is then the larger of the two. The split must not depend on the records. `seed` makes the noise
    reproducible, for experiments only: anyone who knows it can remove the noise.

    >>> logits, labels = torch.tensor([[4.0, 0.0]] * 400), torch.tensor([0, 0, 0, 1] * 100)
    >>> ledger = Ledger()
    >>> fitted = PrivateTemperatureScaling(noise_multiplier=2.0, seed=1).fit(logits, labels, ledger)
    >>> fitted.predict(logits[:1]).round(decimals=1)  # three out of four were right
    tensor([[0.7000, 0.3000]])
    >>> ledger.events
    (PrivateCalibration(noise_multiplier=5.656854249492381, releases=8, disjoint=False, reason='calibration'),)
    """

    noise_multiplier: float
    disjoint: bool = False
    low: float = 0.05
    high: float = 20.0
    seed: int | None = field(default=None, repr=False)
    noise: Normals | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        limited(self.low, self.high)
        if not PrivateCalibration(self.noise_multiplier, disjoint=self.disjoint).noise_multiplier > 0:
            raise InvalidPlan("noise_multiplier must be positive; on public data use TemperatureScaling instead.")

    @classmethod
    def within(
        cls,
        epsilon: float,
        delta: float,
        ledger: Ledger,
        *,
        disjoint: bool = False,
        accountant: str = "exact",
        relation: Relation | None = None,
    ) -> PrivateTemperatureScaling:
        """With the least noise that keeps the combined epsilon, of this ledger and the fit to come, at the target."""
        shape = [PrivateCalibration(1.0, disjoint=disjoint)]
        scale = noise_scale(shape, epsilon, delta, accountant, relation=relation, fixed=ledger.events)
        return cls(noise_multiplier=scale, disjoint=disjoint)

    @property
    def event(self) -> PrivateCalibration:
        """What a fit writes on the ledger: facts, that is `QUERIES` sums with sqrt(QUERIES) times the noise."""
        return PrivateCalibration(
            noise_multiplier=self.noise_multiplier * math.sqrt(QUERIES), releases=QUERIES, disjoint=self.disjoint
        )

    def fit(self, logits: ArrayLike, labels: ArrayLike, ledger: Ledger) -> PrivateTemperature:
        """Charge the ledger (`private.ledger` of the training), then find the temperature."""
        z_BK = matrix("logits", logits).to("cpu", torch.float64)
        hit_B = z_BK.argmax(dim=1) == checked_labels(labels, *z_BK.shape)
        entropy = Entropy(self.seed).child("calibration")
        noise = GaussianNoise([torch.zeros(1)], entropy, self.noise)
        # Another number for every release of this ledger: a seed must not repeat the noise of an earlier fit.
        first = sum(event.count for event in ledger.events if isinstance(event, PrivateCalibration))
        ledger.record(self.event)
        asked: list[tuple[float, float]] = []
        for query in range(QUERIES):
            point, _ = self._next(asked)
            total = statistic(z_BK, hit_B, math.exp(point)).reshape(1)
            (noisy,) = noise.release([total], [self.event.noise_multiplier], 1.0, first + query, repr(self).encode())
            asked.append((point, float(noisy)))
        point, crossed = self._next(asked)
        return PrivateTemperature(
            temperature=math.exp(point),
            at_limit=not crossed,
            noise_multiplier=self.noise_multiplier,
            disjoint=self.disjoint,
            ledger=ledger,
        )

    def _next(self, asked: list[tuple[float, float]]) -> tuple[float, bool]:
        """Where the falling fit to (log T, noisy sum) crosses zero, and whether it does; sees noisy sums only."""
        low, high = math.log(self.low), math.log(self.high)
        if not asked:
            return 0.5 * (low + high), False
        points, sums = np.array(sorted(asked)).T
        level = optimize.isotonic_regression(sums, increasing=False).x
        if level[0] <= 0:
            return 0.5 * (low + points[0]), False
        if level[-1] >= 0:
            return 0.5 * (high + points[-1]), False
        below = int(np.argmax(level < 0))
        before, after = (float(points[level == level[k]].mean()) for k in (below - 1, below))
        share = level[below - 1] / (level[below - 1] - level[below])
        return before + (after - before) * float(share), True


def statistic(z_BK: Tensor, hit_B: Tensor, temperature: float) -> Tensor:
    """The sum over records of confidence minus hit, each within [-1, 1].

    Guarantees: adding or removing a record changes it by at most 1.

    >>> statistic(torch.tensor([[0.0, 0.0], [9e9, 0.0]]), torch.tensor([True, False]), 1.0)
    tensor(0.5000)
    """
    gap_B = torch.softmax(z_BK / temperature, dim=1).amax(dim=1) - hit_B.to(z_BK.dtype)
    return torch.where(torch.isfinite(gap_B), gap_B, 0.0).clamp(-1.0, 1.0).sum()
