"""DP-SGD-JL: clipping by norms that are only estimated, for models whose exact norms need too much memory.

A step makes r forward passes with dual numbers, which keep nothing, then one ordinary forward and backward pass: the
peak is that of training without privacy. The estimates have a price in privacy, which the ledger charges
(`clipwise.accounting.ProjectedSteps`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from clipwise.clipping import Style
from clipwise.engine import Clipped, Constants, Evidence, negligible_norm
from clipwise.entropy import Entropy
from clipwise.errors import InvalidLosses, InvalidPlan
from clipwise.mechanisms import ProjectedNorms
from clipwise.noise import Normals
from clipwise.optim.projections import Projections, Replay, demand_same, sums_by_backward
from clipwise.optim.vacuous import refuse_vacuous
from clipwise.plan import Plan
from clipwise.private import Private
from clipwise.private.evidence.closure import LossFn, check_model, take

__all__ = ["ProjectedPrivate"]

_FEWEST_TO_CHECK = 3


def _finite(values: Tensor) -> bool:
    """Whether all numbers are, without a temporary of their size."""
    return not values.numel() or math.isfinite(float(torch.linalg.vector_norm(values, math.inf)))


class EstimatedClipper:
    """The clipped sum of a batch whose norms were estimated before: factors from these, one backward pass."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._params = dict(params)
        self.estimate: tuple[Tensor, Tensor] | None = None
        """Norms, and which samples are not finite, of the batch to come."""

    def __call__(self, losses: Tensor, style: Style, evidence: Evidence) -> Clipped[Any]:
        """The sum over samples of factor_i g_i; uses the estimate up."""
        rule = ProjectedNorms.rule_of(style)
        if not losses.numel():
            self.estimate = losses.detach().double(), torch.zeros_like(losses, dtype=torch.bool)
        if self.estimate is None:
            raise InvalidLosses("these losses have no estimated norms: give the batch to step or backward.")
        (norms, bad), self.estimate = self.estimate, None
        factors = rule(norms).masked_fill(bad | (norms <= negligible_norm(losses.dtype)), 0.0)
        sums = sums_by_backward(losses, list(self._params.values()), factors)
        if not all(_finite(s) for s in sums):
            raise InvalidLosses(
                "a gradient is not finite, though its estimated norm is. It cannot be left out without changing what "
                "the other samples contribute; leave the sample out of the data, or use clipwise.Private."
            )
        return Clipped(dict(zip(self._params, sums, strict=True)), norms, factors, bad, {}, style)


class ProjectedPrivate(Private):
    """`clipwise.Private` with estimated norms: `step` takes the batch, and calls `loss_fn(model, batch)` itself.

    Everything else is as there: the loader, the ledger, `epsilon`, `save` and `resume`. `loss_fn` returns one loss per
    sample; it is called once more than there are projections, each time with the same random numbers, and the first
    batch is checked for losses that depend on other samples (`clipwise.check_model`). Norms in `last` are estimates.

    Guarantees: as `clipwise.Private`, except samples whose norm was under-estimated, which are on the ledger as such.

    >>> import clipwise as cw
    >>> from torch.utils.data import TensorDataset
    >>> model = nn.Linear(3, 1)
    >>> plan = cw.Plan(cw.Poisson(100, 10), 5, cw.Abadi(1.0), 2.0, mechanism=ProjectedNorms(100))
    >>> def loss_fn(model, batch):
    ...     x, y = batch
    ...     return (model(x).squeeze(1) - y).square()
    >>> private = ProjectedPrivate(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=loss_fn, seed=0)
    >>> for batch in private.loader(TensorDataset(torch.randn(100, 3), torch.randn(100))):
    ...     done = private.step(batch)
    >>> private.ledger.events
    (ProjectedSteps(sampling=Poisson(sample_size=100, batch_size=10, max_batch_size=None), noise_multiplier=2.0,
    projections=100, steps=5, reason='training', own_batches=False),)
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        loss_fn: LossFn,
        seed: int | None = None,
        noise: Normals | None = None,
        constants: Constants = (),
        own_batches: bool = False,
    ) -> None:
        if not isinstance(plan, Plan) or not isinstance(plan.mechanism, ProjectedNorms):
            raise InvalidPlan(
                "estimated norms are accounted differently: give a clipwise.Plan with "
                f"mechanism=cw.mechanisms.ProjectedNorms(projections), got {getattr(plan, 'mechanism', plan)!r}."
            )
        if not callable(loss_fn):
            raise InvalidPlan("ProjectedPrivate needs loss_fn=..., a function of (model, batch) to differentiate.")
        self._count, self._function, self._checked = plan.mechanism.projections, loss_fn, False
        self._drawn: tuple[int, Entropy] | None = None
        self._normals = noise
        super().__init__(plan, model, optimizer, seed=seed, noise=noise, constants=constants, own_batches=own_batches)
        self._checks.watches = False  # twins would need more memory than a step may; loss_fn is checked instead
        if plan.noise_multiplier:
            refuse_vacuous(
                plan.events,
                f"{plan.mechanism.projections} projections at noise multiplier {plan.noise_multiplier:.3g}",
                "Use more projections, more noise, or clipwise.Private with exact norms.",
            )

    def _bind(self) -> None:
        super()._bind()
        fit = self._fit
        narrow = [name for name, p in zip(fit.names, fit.tensors, strict=True) if p.dtype.itemsize < 4]
        if narrow:
            raise InvalidPlan(
                f"{narrow[0]!r} is in half precision, where estimated norms would be off by more than their random "
                "error. Use float32, or clipwise.Private."
            )
        named = dict(zip(fit.names, fit.tensors, strict=True))
        self._projections = Projections(self._model, self._function, named, self._normals)
        self._clip = self._clipper = EstimatedClipper(named)

    def backward(self, batch: Any) -> None:
        """Add the clipped gradients of a physical batch to the sum of the logical one. Nothing is released."""
        self._checks.abandon()
        self._check_ready()
        if isinstance(batch, Tensor) and batch.requires_grad:
            raise InvalidLosses(
                "ProjectedPrivate takes the batch, not its losses: loss_fn is called on it several times."
            )
        offered = self._batch.offered
        if offered is not None and not offered.size:
            super().backward(torch.zeros(0, dtype=self._fit.tensors[0].dtype))
            return
        replay = Replay(self._model)
        norms, seen = self._projections.norms(batch, self._count, self._directions(), replay)
        bad = ~(torch.isfinite(norms) & torch.isfinite(seen))
        self._check_once(batch, bad)
        replay.rewind()
        losses = self._losses_without(bad, batch)
        demand_same(losses.detach(), seen.masked_fill(bad, 0.0))
        self._clipper.estimate = norms, bad
        super().backward(losses)

    def step(self, batch: Any = None) -> bool:
        """`backward`, and at the end of the logical batch record, add noise, step the optimizer. True if it did so."""
        return super().step(batch)

    def _directions(self) -> Entropy:
        """Where the directions of this logical batch come from; no two of a run share one.

        All its physical batches do: with other directions for each, a record that moves to the next one, because
        another record was added before it, would contribute something else.
        """
        if not self._batch.parts or self._drawn is None or self._drawn[0] != self.steps_done:
            labelled = self._position.entropy.labelled(self._position.label())
            key = int.from_bytes(labelled.take(16, "projections", self.steps_done), "little")
            self._drawn = self.steps_done, Entropy(key)
        return self._drawn[1]

    def _check_once(self, batch: Any, bad: Tensor) -> None:
        """`check_model`, on the finite samples of the first batch that has enough of them."""
        good = torch.nonzero(~bad).squeeze(1)
        if not self._checked and good.numel() >= _FEWEST_TO_CHECK:
            check_model(self._model, self._function, take(batch, good) if bool(bad.any()) else batch)
            self._checked = True
            self._checks.note_clean(self.steps_done)

    def _losses_without(self, bad: Tensor, batch: Any) -> Tensor:
        """The losses with their graph, where a finite sample stands in for each that is not, as 0 * NaN is NaN.

        Leaving these out instead would give the others another dropout mask than their norms were measured with.
        """
        if not bool(bad.any()):
            return self._function(self._model, batch)
        places = torch.arange(bad.shape[0], device=bad.device)
        if bool(bad.all()):
            return torch.zeros(bad.shape[0], device=bad.device, dtype=self._fit.tensors[0].dtype)
        stands_in = places.masked_fill(bad, int(places[~bad][0]))
        return self._function(self._model, take(batch, stands_in)).masked_fill(bad, 0.0)

    @classmethod
    def resume(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module,
        optimizer: Optimizer,
        *,
        plan: Plan | None = None,
        loss_fn: LossFn | None = None,
        noise: Normals | None = None,
        constants: Constants = (),
    ) -> ProjectedPrivate:
        """Go on from `save`, as `Private.resume` does; `loss_fn` is needed here too."""
        resumed = super().resume(path, model, optimizer, plan=plan, loss_fn=loss_fn, noise=noise, constants=constants)
        assert isinstance(resumed, cls)
        return resumed
