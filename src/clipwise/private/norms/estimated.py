"""DP-SGD-JL: clipping by norms that are only estimated, for models whose exact norms need too much memory.

A step makes r forward passes with dual numbers, which keep nothing, then one ordinary forward and backward pass: the
peak is that of training without privacy. The estimates have a price in privacy, which the ledger charges
(`clipwise.accounting.accountants.projected`).
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clipwise.accounting import refuse_vacuous
from clipwise.clipping import Style
from clipwise.engine import Clipped, Evidence, Total, negligible_norm
from clipwise.entropy import Entropy
from clipwise.errors import InvalidLosses, InvalidPlan
from clipwise.mechanisms import ProjectedNorms
from clipwise.private.evidence.closure import batch_size, check_losses, take
from clipwise.private.fit import Fit
from clipwise.private.norms.choice import Given
from clipwise.private.norms.projections import Projections, Replay, demand_same, sums_by_backward

__all__ = ["EstimatedNorms"]

_FEWEST_TO_CHECK = 3


@dataclass(frozen=True)
class _Estimate:
    """Norms of the very losses that were returned, and which samples are not finite."""

    losses: weakref.ref[Tensor]
    version: int
    step: int
    norms: Tensor
    bad: Tensor
    slopes: Tensor
    """Of the losses along the first direction."""
    directions: Entropy


class EstimatedNorms:
    """Estimates the norms of a batch before its losses are differentiated, and clips by them.

    `losses(batch)` calls `loss_fn` once more than there are projections, each time with the same random numbers, and
    remembers what it measured for the tensor that it returns. Its first batches, and others now and then, are checked
    for losses that depend on other samples or on earlier batches; the forward passes of the loop are not watched, as
    twins would need more memory than a step may.

    Guarantees: losses without an estimate of their own, from directions of this step, are refused, and so is a sum
    whose slope along one of them is not the one that was measured; no two steps share a direction, and the physical
    batches of one step share all of them.
    """

    def __init__(self, given: Given) -> None:
        plan, loss_fn = given.plan, given.loss_fn
        assert isinstance(plan.mechanism, ProjectedNorms)
        if not callable(loss_fn):
            raise InvalidPlan(f"{plan.mechanism!r} needs loss_fn=..., a function of (model, batch) to differentiate.")
        count = plan.mechanism.projections
        if plan.noise_multiplier:
            refuse_vacuous(
                plan.events,
                f"{count} projections at noise multiplier {plan.noise_multiplier}",
                "Use more projections, more noise, or exact norms.",
            )
        self._count, self._model, self._function, self._source = count, given.model, loss_fn, given.source
        self._position, self._batch, self._checks = given.position, given.batch, given.checks
        self._checks.watches = False
        self._drawn: tuple[int, Entropy] | None = None
        self._estimate: _Estimate | None = None

    def bind(self, fit: Fit) -> EstimatedNorms:
        """Itself, for these parameters."""
        narrow = [name for name, p in fit.named.items() if p.dtype.itemsize < 4]
        if narrow:
            raise InvalidPlan(
                f"{narrow[0]!r} is in half precision, where estimated norms would be off by more than their random "
                "error. Use float32, or exact norms."
            )
        self._params = fit.named
        self._projections = Projections(self._model, self._function, self._params, self._source)
        return self

    # Before the losses are given

    def losses(self, batch: Any) -> Tensor:
        """The losses of a batch, whose norms were estimated; those of samples that are not finite are 0."""
        was_checked = self._check(batch)
        replay = Replay(self._model)
        directions = self._directions()
        norms, seen, slopes = self._projections.norms(batch, self._count, directions, replay)
        bad = ~(torch.isfinite(norms) & torch.isfinite(seen))
        if not was_checked:
            self._check(take(batch, torch.nonzero(~bad).squeeze(1)))
        replay.rewind()
        losses = self._losses_without(bad, batch)
        demand_same(losses.detach(), seen.masked_fill(bad, 0.0))
        self._estimate = _Estimate(
            weakref.ref(losses), losses._version, self._position.done, norms, bad, slopes, directions
        )
        return losses

    def _directions(self) -> Entropy:
        """Where the directions of this logical batch come from; no two of a run share one.

        All its physical batches do: with other directions for each, a record that moves to the next one, because
        another record was added before it, would contribute something else.
        """
        step = self._position.done
        if not self._batch.parts or self._drawn is None or self._drawn[0] != step:
            labelled = self._position.entropy.labelled(self._position.label())
            self._drawn = step, Entropy(int.from_bytes(labelled.take(16, "projections", step), "little"))
        return self._drawn[1]

    def _check(self, batch: Any) -> bool:
        """Check the losses of a batch where it is due; false if some are not finite, so that others must be left out.

        What is made without the batch while they are checked is constant from then on, as in passes that are watched.
        """
        step, size = self._position.done, batch_size(batch)
        if size < _FEWEST_TO_CHECK or not self._checks.is_due(step):
            return True
        self._checks.look_around(step)
        try:
            check_losses(self._checks.memory, self._function, batch, size, None, step)
        except InvalidLosses:
            return False
        self._checks.note_checked(step)
        return True

    def _losses_without(self, bad: Tensor, batch: Any) -> Tensor:
        """The losses with their graph, where a finite sample stands in for each that is not, as 0 * NaN is NaN.

        Leaving these out instead would give the others another dropout mask than their norms were measured with.
        """
        if not bool(bad.any()):
            return self._function(self._model, batch)
        places = torch.arange(bad.shape[0], device=bad.device)
        if bool(bad.all()):
            return torch.zeros(bad.shape[0], device=bad.device, dtype=next(iter(self._params.values())).dtype)
        stands_in = places.masked_fill(bad, int(places[~bad][0]))
        return self._function(self._model, take(batch, stands_in)).masked_fill(bad, 0.0)

    # When they are given

    def __call__(self, losses: Tensor, style: Style, evidence: Evidence, *, onto: Total | None) -> Clipped[Any]:
        """The sum over samples of factor_i g_i, with factors of the estimates; one backward pass."""
        rule = ProjectedNorms.rule_of(style)
        found = self._estimated(losses) if losses.numel() else None
        if found is None:
            norms, bad = losses.detach().double(), torch.zeros_like(losses, dtype=torch.bool)
        else:
            norms, bad = found.norms, found.bad
        factors = rule(norms).masked_fill(bad | (norms <= negligible_norm(losses.dtype)), 0.0)
        sums = sums_by_backward(losses, list(self._params.values()), factors)
        if not all(_finite(s) for s in sums):
            raise InvalidLosses(
                "a gradient is not finite, though its estimated norm is. It cannot be left out without changing what "
                "the other samples contribute; leave the sample out of the data, or use exact norms."
            )
        if found is not None:
            lengths, slopes = ((factors * each).masked_fill(factors == 0.0, 0.0) for each in (norms, found.slopes))
            self._projections.demand_slope(sums, slopes, lengths, found.directions)
        self._estimate = None  # it serves once
        sums = sums if onto is None else onto.add(sums)
        return Clipped(dict(zip(self._params, sums, strict=True)), norms, factors, bad, {}, style)

    def _estimated(self, losses: Tensor) -> _Estimate:
        found = self._estimate
        if (
            found is None
            or found.losses() is not losses
            or found.version != losses._version
            or found.step != self._position.done
        ):
            raise InvalidLosses(
                "these losses have no estimated norms. Give private.step what private.losses(batch) returned, as it "
                "is, before the losses of the next batch are computed."
            )
        return found


def _finite(values: Tensor) -> bool:
    """Whether all numbers are, without a temporary of their size."""
    return not values.numel() or math.isfinite(float(torch.linalg.vector_norm(values, math.inf)))
