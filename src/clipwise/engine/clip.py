"""Losses -> per-sample norms -> factors -> clipped sum."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from clipwise.clipping import Clip, Flat, Rule, Style, as_style, bounds_of
from clipwise.engine.cache import ENGINE, NO_EVIDENCE, NothingFinite
from clipwise.engine.chains import pull_back
from clipwise.engine.cost import Way
from clipwise.engine.graph import Edge, dense, differentiate, unrecorded
from clipwise.engine.history import Planning
from clipwise.engine.lengths import largest_norm
from clipwise.engine.node import at_hand
from clipwise.engine.norms import bad_samples, is_usual, negligible_norm, settled, usable, working_dtype
from clipwise.engine.origin import Evidence
from clipwise.engine.parameters import Parameters, Params, validate
from clipwise.engine.precision import in_dtype, widened
from clipwise.engine.room import Room
from clipwise.engine.rules import Finish
from clipwise.engine.run import Backward, Factors
from clipwise.engine.uses import accurate, joint_weighted
from clipwise.errors import CheckFailed, InvalidPlan

Key = TypeVar("Key", Tensor, str)
_SAME = 1e-4  # of a squared norm: what an order of additions that a device leaves open may change
_HANDFUL = 8  # plans: one for each structure that a loop really has


@dataclass(frozen=True, eq=False)
class Clipped(Generic[Key]):
    """The sum over samples of factor_i * g_i, with what it was made from. No noise, no division.

    `norms` and `factors` are per sample; for a style with groups, `factors` maps each group to its own vector.
    `bad` marks samples whose gradient is not finite: their contribution is zero. `squared` holds the squared norms of
    each parameter's own part of the gradients. `style` is how they were clipped.
    """

    gradients: dict[Key, Tensor]
    norms: Tensor
    factors: Tensor | dict[str, Tensor]
    bad: Tensor
    squared: dict[Key, Tensor]
    style: Style

    def without_gradients(self) -> Clipped[Key]:
        """The same, for statistics: the sum was taken over, and its memory is not held."""
        return replace(self, gradients={})


class Total:
    """A clipped sum that grows: one tensor for each parameter, in the order of the parameters.

    A product is added to it as it is formed, so a physical batch after the first needs neither memory for its own sum
    nor a pass to add it.

    Guarantees: from `begin` to `end` it is `torn`. An error in between leaves a part of a batch in it, which the
    next user of it can see.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # Never two that share memory: their noise must be independent.
        distinct = len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
        if not distinct or not all(tensor.is_contiguous() for tensor in tensors):
            tensors = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
        self.tensors = list(tensors)
        self.torn = False

    def begin(self) -> list[Tensor]:
        """What may be written to from here on."""
        self.torn = True
        return self.tensors

    def add(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """Add the sum of a batch that was formed elsewhere."""
        torch._foreach_add_(self.begin(), list(sums))
        return self.tensors

    def end(self) -> None:
        """The batch is in it, and was noted."""
        self.torn = False


class Clipper:
    """The clipped sum of one batch after the other, for parameters whose bookkeeping is done once.

    `memory` is how many bytes per-sample gradients may take beyond what is held anyway; None: a tenth of a plain step.
    """

    def __init__(self, params: Params, memory: int | None = None) -> None:
        self._parameters, self._room = Parameters(params), Room(memory)
        self._before = ENGINE.planning(self._parameters).plans  # by others, or for others at the same addresses
        self._plans = ENGINE.plans
        self._warned = False

    @property
    def planning(self) -> Planning:
        """How many plans were made for these parameters and what differed."""
        found = ENGINE.planning(self._parameters)
        plans = found.plans - self._before
        return Planning(plans, found.reasons[-plans:] if plans else ())

    def __call__(
        self,
        losses: Tensor,
        clip: Rule | Clip,
        evidence: Evidence = NO_EVIDENCE,
        *,
        onto: Total | None = None,
        retain_graph: bool = False,
        way: Way | None = None,
    ) -> Clipped[Any]:
        """Norms, factors, clipped sum; added to `onto`, where it is given, whose tensors are the gradients then.

        An error before the sum is begun leaves `onto` as it was; the caller ends it (`Total.end`).
        """
        if way not in (None, "bookkeeping", "second_backward"):
            raise InvalidPlan(f'way must be None, "bookkeeping" or "second_backward", got {way!r}.')
        parameters, style = self._parameters, as_style(clip)
        validate(losses, parameters)
        groups = parameters.groups(style)
        with unrecorded():
            if losses.shape[0] == 0:
                return _nothing(losses, parameters, style, groups, onto)
            if losses.shape[0] == 1:
                return _single(losses, parameters, style, groups, retain_graph, onto)
            try:
                clipped = _several(losses, parameters, style, groups, way, retain_graph, evidence, self._room, onto)
            except NothingFinite:
                clipped = _nothing(losses, parameters, style, groups, onto)
        if ENGINE.plans != self._plans:
            self._report()
        return clipped

    def _report(self) -> None:
        """Warn once when the graph keeps changing: every plan costs several backward passes."""
        self._plans, found = ENGINE.plans, self.planning
        if not self._warned and found.plans > _HANDFUL:
            self._warned = True
            differences = "; ".join(dict.fromkeys(found.reasons))
            warnings.warn(
                f"{found.plans} different graphs so far, and each was planned again, which costs several "
                f"backward passes. What differed: {differences}. Pad to a few lengths, or keep such values in tensors.",
                stacklevel=4,
            )


def _record(
    parameters: Parameters,
    style: Style,
    norms: Tensor,
    factors: dict[str, Tensor],
    bad: Tensor,
    sums: Sequence[Tensor],
    squared: Sequence[Tensor],
) -> Clipped[Any]:
    """Sums and squared norms in order of the parameters, keyed as the caller gave them."""
    alone = isinstance(style, Flat)
    return Clipped(
        parameters.keyed(sums), norms, factors[""] if alone else factors, bad, parameters.keyed(squared), style
    )


def _several(
    losses: Tensor,
    parameters: Parameters,
    style: Style,
    groups: Mapping[str, list[int]],
    way: Way | None,
    keep: bool,
    evidence: Evidence,
    room: Room,
    onto: Total | None,
) -> Clipped[Any]:
    """The walk for a batch: one backward pass gives the norms, the norms give factors, these weight the sum."""
    backward = ENGINE.backward(losses, parameters, evidence, keep=keep, way=way, room=room)
    squared = backward.unsettled_norms()
    dtype = working_dtype(losses, parameters.tensors)
    bad = None
    by_group, norms = _norms(squared, groups, losses)
    clear = _all_clear(norms, losses, dtype, backward.doubt)
    if not clear:
        backward.settle()
        by_group, norms = _norms(squared, groups, losses)
        clear = _all_clear(norms, losses, dtype)
    if not clear:  # or only their sum is beyond the bound: look at each
        if backward.norms_only:  # gradients of single samples are asked for: form the uses after all
            backward = ENGINE.backward(losses, parameters, evidence, keep=True, way="bookkeeping")
            squared = backward.squared_norms()
        squared = settled(backward, squared, losses)
        by_group, norms = _norms(squared, groups, losses)
        bad = bad_samples(norms, losses, dtype)
        backward.discard(bad)
    factors = _all_factors(style, by_group, norms, bad, dtype)
    if any(bound < 1 and not is_usual(bound) for _, bound in bounds_of(style)):  # float32 rows would be rounded up
        backward.take_care(torch.ones_like(losses, dtype=torch.bool))
    of = {place: factors[name] for name, members in groups.items() for place in members}
    at_once = None if onto is None else onto.begin()
    found = _by_second_backward(losses, backward, of.__getitem__, at_once, keep) if backward.norms_only else {}
    found |= backward.weighted(of.__getitem__, consume=True, onto=at_once)
    sums = _filled(found, parameters) if onto is None else _added_onto(onto, found)
    own = [squared[k] if k in squared else torch.zeros_like(losses) for k in range(len(parameters.tensors))]
    if bad is None:
        bad = torch.zeros_like(losses, dtype=torch.bool)
    return _record(parameters, style, norms.to(dtype), factors, bad, sums, own)


def _all_clear(norms: Tensor, losses: Tensor, dtype: torch.dtype, doubt: Tensor | None = None) -> bool:
    """Whether no sample is bad and no norm in doubt: one question, so that a device is waited for once.

    Guarantees: no norm that is in doubt is used, and no sample that is bad in other company.
    """
    total = (norms + losses.abs()).sum()  # a bound of each
    return float(total if doubt is None else total.masked_fill(doubt, torch.nan)) <= largest_norm(dtype)


class _SecondPass(Backward):
    """A second pass to the meetings, where there is no memory to keep uses from the first; `sums` as `weighted` gives.

    A use is formed again, from the same numbers and by the same rule, and added to the sum at once. So a sample
    contributes what its norm was found from: autograd, with the factors as cotangents, would add its terms in another
    order and round them otherwise, and where huge terms cancel that is more than the bound.

    Guarantees: where the numbers may be others (made again by a checkpoint, or by a device that leaves the order of
    additions open), no sample contributes more than the norm of the first pass says.
    """

    def __init__(
        self,
        losses: Tensor,
        first: Backward,
        factors: Factors,
        onto: Sequence[Tensor] | None = None,
        *,
        retain_graph: bool,
    ) -> None:
        self._first, self._factors, self._onto = first, factors, onto
        self._parameter = {edges[0]: p for p, edges in first.plan.roots.items() if edges[0] in first.plan.solo}
        self._operands: dict[Edge, Tensor] = {}
        self._again = losses.device.type != "cpu" or not all(map(at_hand, first.graph.nodes))
        self._squared: dict[int, tuple[Tensor, Tensor]] = {}  # of those with the same factors: then, and now
        self.sums: dict[int, Tensor] = {}
        super().__init__(losses, first.graph, first.plan, retain_graph=retain_graph)
        self._refuse_longer()
        parameters = sorted({self._parameter[edge] for edge in self._operands})
        pull_back(self.graph, self._operands, parameters, self.sums)

    def receive(self, finishers: list[tuple[Edge, Finish]], gradient: Tensor) -> None:
        """Add what a meeting gives; uses of tensors that are used more than once were kept."""
        for edge, finish in finishers:
            parameter = self._parameter.get(edge)
            if parameter is None:
                continue
            factors, chain, careful = self._factors(parameter), self.plan.chains[edge], self._first.careful([edge])
            use = finish(gradient).lasting()
            if self._again:
                then, now = self._squared.get(id(factors), (0.0, 0.0))
                self._squared[id(factors)] = then + self._first.squared_norm(edge), now + use.squared_norms().double()
            if not chain.direct:
                self._operands[edge] = joint_weighted([use], factors, None, careful)
                continue
            self.uses[edge] = [use]
            (use,) = self.in_frame(edge)
            del self.uses[edge]
            if self._onto is not None:
                joint_weighted([use], factors, self._onto[parameter], careful)
            else:
                total = joint_weighted([use], factors, None, careful)
                self.sums[parameter] = total.view(self.graph.parameters[parameter].shape)

    def _refuse_longer(self) -> None:
        pairs = list(self._squared.values())
        if pairs and not bool(torch.stack([(now <= then * (1 + _SAME)).all() for then, now in pairs]).all()):
            raise CheckFailed(
                "a second backward pass gave longer gradients than the first. Nothing was released. "
                "torch.utils.checkpoint draws dropout again with preserve_rng_state=False: leave it True."
            )


def _by_second_backward(
    losses: Tensor, first: Backward, factors: Factors, onto: Sequence[Tensor] | None, keep: bool
) -> dict[int, Tensor]:
    """The sums of the uses that the first pass let go."""
    return _SecondPass(losses, first, factors, onto, retain_graph=keep or first.plan.must_keep).sums


def _norms(
    squared: Mapping[int, Tensor], groups: Mapping[str, list[int]], losses: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Squared norms by group, and norms of the whole gradients, in float64."""
    by_group = {name: _total(squared, members, losses) for name, members in groups.items()}
    return by_group, _added(list(by_group.values())).sqrt()


def _all_factors(
    style: Style, squared: Mapping[str, Tensor], norms: Tensor, bad: Tensor | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Factors by group; zero for bad samples, and for gradients that are zero up to rounding, which point anywhere."""
    floor = negligible_norm(dtype)
    if len(squared) == 1:
        return {name: _factors(style.rule_of(name), norms, norms <= floor, bad, dtype) for name in squared}
    rounding = (norms * (8 * torch.finfo(dtype).eps)).clamp_(min=floor)
    lengths = {name: total.sqrt() for name, total in squared.items()}
    return {name: _factors(style.rule_of(name), n, n <= rounding, bad, dtype) for name, n in lengths.items()}


def _added(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(list(parts)).sum(0)


def _total(squared: Mapping[int, Tensor], members: Sequence[int], losses: Tensor) -> Tensor:
    parts = [squared[place] for place in members if place in squared]
    return in_dtype(_added(parts), torch.float64) if parts else torch.zeros_like(losses, dtype=torch.float64)


def _factors(rule: Rule, norms: Tensor, negligible: Tensor, bad: Tensor | None, dtype: torch.dtype) -> Tensor:
    factors = rule(norms)
    if not is_usual(rule.sensitivity):
        factors = usable(factors, dtype)
    if bad is not None:
        negligible = negligible | bad
    return factors.masked_fill(negligible, 0).to(dtype)


def _filled(sums: Mapping[int, Tensor], parameters: Parameters) -> list[Tensor]:
    """One sum per parameter; zero where no sample reached it. In float32 for half precision: rounding it would add."""
    filled = []
    for place, p in enumerate(parameters.tensors):
        dtype = widened(p.dtype)
        part = sums.get(place)
        filled.append(torch.zeros_like(p, dtype=dtype) if part is None else in_dtype(dense(part), dtype))
    return filled


def _added_onto(onto: Total, sums: Mapping[int, Tensor]) -> list[Tensor]:
    """A running sum with the sums of some parameters added."""
    totals = onto.begin()
    for place, part in sums.items():
        totals[place].add_(dense(part))
    return totals


def _nothing(
    losses: Tensor, parameters: Parameters, style: Style, groups: Mapping[str, Sequence[int]], onto: Total | None
) -> Clipped[Any]:
    """No sample, or none with a finite loss: every contribution is zero."""
    zeros = [torch.zeros_like(p) for p in parameters.tensors] if onto is None else onto.tensors
    factors = dict.fromkeys(groups, torch.zeros_like(losses))
    unknown = torch.full_like(losses, torch.nan)
    bad = torch.ones_like(losses, dtype=torch.bool)
    return _record(parameters, style, unknown, factors, bad, zeros, [unknown] * len(zeros))


def _single(
    losses: Tensor,
    parameters: Parameters,
    style: Style,
    groups: Mapping[str, list[int]],
    keep: bool,
    onto: Total | None,
) -> Clipped[Any]:
    """A batch of one: its gradient is the per-sample gradient, and plain autograd is exact."""
    grads = single_gradients(losses, parameters, keep)
    dtype = working_dtype(losses, parameters.tensors)
    sums: dict[int, Tensor] = {}
    found = {k: grad.double().square().sum().view(1) for k, grad in enumerate(grads) if grad is not None}
    by_group, norms = _norms(found, groups, losses)
    bad = bad_samples(norms, losses, dtype)
    factors = _all_factors(style, by_group, norms, bad, dtype)
    for name, members in groups.items():
        for place in members:
            grad = grads[place]
            if grad is not None and not bool(bad):
                sums[place] = accurate(grad) * factors[name].to(accurate(grad).dtype).view(())
    none = losses.new_zeros(1, dtype=torch.float64)
    own = [found.get(k, none) for k in range(len(grads))]
    total = _filled(sums, parameters) if onto is None else _added_onto(onto, sums)
    return _record(parameters, style, norms.to(dtype), factors, bad, total, own)


def single_gradients(losses: Tensor, parameters: Parameters, keep: bool) -> Sequence[Tensor | None]:
    """The gradients of a batch of one by plain autograd."""
    ENGINE.graph(losses, parameters)
    found = differentiate(losses, parameters.tensors, torch.ones_like(losses), keep=keep)
    return [None if gradient is None else dense(gradient) for gradient in found]
