"""What a way of finding norms has to answer, and which one a plan asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from clipwise.clipping import Style
from clipwise.engine import Clipped, Clipper, Evidence, Total
from clipwise.errors import InvalidPlan
from clipwise.mechanisms import ProjectedNorms
from clipwise.noise import Normals
from clipwise.plan import Plan
from clipwise.private.batch import Batch
from clipwise.private.evidence import Checks
from clipwise.private.evidence.closure import LossFn
from clipwise.private.fit import Fit
from clipwise.private.position import Position

__all__ = ["Clipping", "ExactNorms", "Given", "Norms", "norms_of"]


class Clipping(Protocol):
    """Losses -> norms -> clipped sum."""

    def __call__(self, losses: Tensor, style: Style, evidence: Evidence, /, *, onto: Total | None) -> Clipped[Any]:
        """The clipped sum of a batch, added to `onto` where there is one."""
        ...


@dataclass(frozen=True)
class Given:
    """What a run gives to those who find its norms."""

    plan: Plan
    model: nn.Module
    loss_fn: LossFn | None
    source: Normals | None
    position: Position
    batch: Batch
    checks: Checks
    memory: int | None


class Norms(Protocol):
    """How the norms of a batch are found."""

    def bind(self, fit: Fit) -> Clipping:
        """What clips the losses of these parameters."""
        ...

    def losses(self, batch: Any) -> Tensor:
        """The losses of a batch, in the form that what `bind` gave can clip."""
        ...


class ExactNorms:
    """Norms from the graph of the losses, wherever these were computed."""

    def __init__(self, model: nn.Module, loss_fn: LossFn | None, memory: int | None) -> None:
        self._model, self._loss_fn, self._memory = model, loss_fn, memory

    def bind(self, fit: Fit) -> Clipping:
        """The engine, for these parameters."""
        return Clipper(fit.named, self._memory)

    def losses(self, batch: Any) -> Tensor:
        """`loss_fn(model, batch)`."""
        if self._loss_fn is None:
            raise InvalidPlan("private.losses(batch) calls loss_fn(model, batch): give Private(..., loss_fn=...).")
        return self._loss_fn(self._model, batch)


def norms_of(given: Given) -> Norms:
    """What the plan's mechanism asks for."""
    if not isinstance(given.plan.mechanism, ProjectedNorms):
        return ExactNorms(given.model, given.loss_fn, given.memory)
    from clipwise.private.norms.estimated import EstimatedNorms  # forward-mode derivatives: few need them

    return EstimatedNorms(given)
