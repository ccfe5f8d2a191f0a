"""What happened in a step. None of this is covered by epsilon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clipwise.clipping import by_layer
from clipwise.engine import Clipped

__all__ = ["LayerStatistics", "StepStatistics"]

_QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
_NOTHING = torch.empty(0, device="cpu")


@dataclass(frozen=True)
class LayerStatistics:
    """The part of one layer in the gradients of a step. **Not covered by epsilon**."""

    fraction_clipped: float
    norm_quantiles: tuple[float, ...]


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
    norm_quantiles: tuple[float, ...]
    """Minimum, quartiles and maximum of the finite per-sample gradient norms (NaN when there are none)."""
    layers: Mapping[str, LayerStatistics]
    """The same for each layer's own part of the gradients; empty when the step had no sample."""

    @classmethod
    def of(cls, step: int, parts: Sequence[Clipped[str]]) -> StepStatistics:
        """Summarise the physical batches of a step."""
        norms = _joined([p.norms for p in parts])
        factors = [f for p in parts for f in ([p.factors] if isinstance(p.factors, Tensor) else p.factors.values())]
        names = by_layer(parts[0].squared) if parts else {}
        layers = {layer: _layer_statistics(layer, own, parts) for layer, own in names.items()}
        bad = sum(int(p.bad.sum()) for p in parts)
        return cls(step, norms.numel(), bad, _share_below_one(factors), _quantiles(norms), layers)


def _factors_of(part: Clipped[str], layer: str, name: str) -> Tensor:
    """The factors that one parameter of a layer was scaled by."""
    return part.factors if isinstance(part.factors, Tensor) else part.factors[part.style.group_of(layer, name)]


def _layer_statistics(layer: str, names: Sequence[str], parts: Sequence[Clipped[str]]) -> LayerStatistics:
    norms = [torch.stack([p.squared[name] for name in names]).sum(0).sqrt() for p in parts]
    factors = [_factors_of(p, layer, name) for p in parts for name in names]
    return LayerStatistics(_share_below_one(factors), _quantiles(_joined(norms)))


def _joined(norms: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(norms)).double() if norms else _NOTHING.double()


def _share_below_one(factors: Sequence[Tensor]) -> float:
    shortened = torch.cat([f < 1 for f in factors]) if factors else _NOTHING
    return float(shortened.double().mean()) if shortened.numel() else 0.0


def _quantiles(norms: Tensor) -> tuple[float, ...]:
    finite = norms[torch.isfinite(norms)]
    if not finite.numel():
        return (float("nan"),) * len(_QUANTILES)
    levels = torch.tensor(_QUANTILES, dtype=torch.float64, device=finite.device)
    return tuple(torch.quantile(finite, levels).tolist())
