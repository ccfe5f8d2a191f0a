"""What happened in a step. None of this is covered by epsilon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["StepStatistics"]

_QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class StepStatistics:
    """Exact statistics of the private samples of one step, for debugging by those who may see the data.

    **Not covered by epsilon**: they are computed from the data without noise. Publishing them, or choosing
    hyper-parameters by them, leaks beyond what the ledger says.
    """

    step: int
    batch_size: int
    bad_samples: int
    fraction_clipped: float
    norm_quantiles: tuple[float, float, float, float, float]
    """Minimum, quartiles and maximum of the finite per-sample gradient norms (NaN when there are none)."""

    @classmethod
    def of(cls, step: int, parts: Sequence[Part]) -> StepStatistics:
        """Summarise the physical batches of a step."""
        norms = torch.cat([p.norms for p in parts]).double() if parts else torch.empty(0, dtype=torch.float64)
        bad = sum(int(p.bad.sum()) for p in parts)
        factors = [f for p in parts for f in _vectors(p.factors)]
        shortened = torch.cat([f < 1 for f in factors]) if factors else torch.empty(0, dtype=torch.bool)
        finite = norms[torch.isfinite(norms)]
        nothing = (float("nan"),) * len(_QUANTILES)
        levels = torch.tensor(_QUANTILES, dtype=torch.float64, device=finite.device)
        quantiles = tuple(torch.quantile(finite, levels).tolist()) if finite.numel() else nothing
        clipped = float(shortened.double().mean()) if shortened.numel() else 0.0
        return cls(step, norms.numel(), bad, clipped, quantiles)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Part:
    """Norms, factors and bad samples of one physical batch."""

    norms: Tensor
    factors: Tensor | Mapping[str, Tensor]
    bad: Tensor


def _vectors(factors: Tensor | Mapping[str, Tensor]) -> list[Tensor]:
    return [factors] if isinstance(factors, Tensor) else list(factors.values())
