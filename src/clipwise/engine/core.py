"""The engine: losses -> per-sample norms -> factors -> clipped sum, with its plans cached and checked.

Nothing is written on the model, its parameters or the graph; every call is a function of the losses.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from clipwise.clipping import Rule, Style
from clipwise.engine.cost import Way, choose_way, reduced_precision
from clipwise.engine.graph import Graph, differentiate, refuse_nested, walk
from clipwise.engine.history import History, Planning
from clipwise.engine.norms import bad_samples, negligible_norm, settled, working_dtype
from clipwise.engine.origin import Declared, Evidence, Origin
from clipwise.engine.owners import StalePlan
from clipwise.engine.parameters import Parameters
from clipwise.engine.plan import GraphPlan, Planner, mixing
from clipwise.engine.probing import AutogradProber
from clipwise.engine.run import Backward, by_second_backward
from clipwise.engine.uses import accurate
from clipwise.engine.verify import dense, verify_against_autograd
from clipwise.errors import InvalidLosses, UnsupportedNode

Key = TypeVar("Key", Tensor, str)
_VERIFY_EVERY = 100
_CACHE_SIZE = 256
NO_EVIDENCE = Declared()


@dataclass(frozen=True, eq=False)
class Clipped(Generic[Key]):
    """The sum over samples of factor_i * g_i, with what it was made from. No noise, no division.

    `norms` and `factors` are per sample; for a style with groups, `factors` maps each group to its own vector.
    `bad` marks samples whose gradient is not finite: their contribution is zero. `squared` holds the squared norms of
    each parameter's own part of the gradients.
    """

    gradients: dict[Key, Tensor]
    norms: Tensor
    factors: Tensor | dict[str, Tensor]
    bad: Tensor
    squared: dict[Key, Tensor]


class NothingFinite(Exception):
    """No loss is finite: there is nothing to learn a plan from. Never leaves the engine."""


@dataclass
class Entry:
    """A cached plan, the parameters it was made for, and how often it has been used since it was checked."""

    plan: GraphPlan
    owners: tuple[weakref.ref[Tensor], ...]
    shapes: tuple[torch.Size, ...]
    checked: bool = False
    uses: int = 0

    def belongs_to(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the very parameters, not others that were given their addresses, and of the same shapes."""
        same = zip(self.owners, self.shapes, tensors, strict=True)
        return all(owner() is tensor and tensor.shape == shape for owner, shape, tensor in same)


def validate(losses: Tensor, parameters: Parameters) -> None:
    """Refuse losses that are not a differentiable vector."""
    if not isinstance(losses, Tensor):
        raise InvalidLosses(f"losses must be a tensor of shape (B,), got {type(losses).__name__}.")
    if losses.dim() != 1:
        raise InvalidLosses(
            f"losses must have shape (B,), one loss per sample, got {tuple(losses.shape)}. Use reduction='none' and, "
            "if a sample has several terms, sum or average them per sample."
        )
    if not losses.is_floating_point():
        raise InvalidLosses(f"losses must be floating point, got {losses.dtype}.")
    if not parameters.tensors:
        raise InvalidLosses("params is empty: there is nothing to differentiate.")
    if not all(p.requires_grad for p in parameters.tensors):
        frozen = [parameters.describe(k) for k, p in enumerate(parameters.tensors) if not p.requires_grad]
        raise InvalidLosses(
            f"params holds frozen parameters (requires_grad=False): {', '.join(frozen[:3])}. Leave them out, so that "
            "they get no noise."
        )
    if any(p.is_complex() for p in parameters.tensors):
        raise UnsupportedNode("complex parameters have no per-sample rules; store their real and imaginary parts.")
    if any(p.layout != torch.strided for p in parameters.tensors):
        raise UnsupportedNode("sparse parameters have no per-sample rules: noise is dense. Store them with to_dense().")
    if losses.numel() and losses.grad_fn is None:
        raise InvalidLosses(
            "losses do not require grad: they were computed under no_grad, detached, or from frozen parameters."
        )


class Engine:
    """Plans, checks and runs; the cache is its only state."""

    def __init__(self) -> None:
        self._cache: OrderedDict[tuple[object, ...], Entry] = OrderedDict()
        self._history = History()

    def planning(self, parameters: Parameters) -> Planning:
        """How many plans were made for these parameters, and what differed."""
        return self._history.of(parameters.identity)

    def graph(self, losses: Tensor, parameters: Parameters) -> Graph:
        """The graph of the losses; refused when it reaches none of the parameters."""
        graph = walk(losses, parameters.position, parameters.tensors)
        if all(place < 0 for place in graph.leaf_parameter.values()):
            raise InvalidLosses(
                "no parameter is reached from the losses. Pass the parameters that the losses were computed from "
                "(model.parameters() of the very model that was called). torch.utils.checkpoint hides them with "
                "use_reentrant=True: give it use_reentrant=False."
            )
        return graph

    def entry(self, losses: Tensor, graph: Graph, parameters: Parameters, evidence: Evidence) -> Entry:
        """The plan of this graph's structure, from the cache or made now."""
        key = (parameters.identity, graph.signature, evidence.key)
        entry = self._cache.get(key)
        if entry is None or not entry.belongs_to(parameters.tensors):
            return self._make(losses, graph, parameters, evidence)
        self._cache.move_to_end(key)
        if evidence.watched:
            _demand_shared(graph, entry.plan, evidence)
        return entry

    def _make(
        self, losses: Tensor, graph: Graph, parameters: Parameters, evidence: Evidence, stale: bool = False
    ) -> Entry:
        if not bool(torch.isfinite(losses).any()):
            raise NothingFinite
        refuse_nested(graph)
        planner = Planner(graph, losses.shape[0], parameters.describe, evidence)
        entry = Entry(
            planner.plan(AutogradProber(losses, graph)),
            tuple(weakref.ref(p) for p in parameters.tensors),
            tuple(p.shape for p in parameters.tensors),
        )
        self._history.record(parameters.identity, graph, stale)
        if entry.plan.cacheable:
            self._cache[parameters.identity, graph.signature, evidence.key] = entry
            while len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)
        return entry

    def backward(
        self,
        losses: Tensor,
        parameters: Parameters,
        evidence: Evidence = NO_EVIDENCE,
        *,
        keep: bool,
        way: Way | None = "bookkeeping",
        groups: int = 1,
    ) -> Backward:
        """Differentiate to the meetings, planning and checking where needed; `keep` leaves the graph alive.

        `way` says how the sum over `groups` clipping groups will be formed; None leaves it to the cost model.
        """
        graph = self.graph(losses, parameters)
        entry = self.entry(losses, graph, parameters, evidence)
        verify = not entry.checked or entry.uses % _VERIFY_EVERY == 0
        entry.uses += 1
        chosen = way or choose_way(graph, entry.plan, groups, losses.device)
        # Autograd would round the sum in half precision, beyond what one sample may move it.
        norms_only = chosen == "second_backward" and not reduced_precision(graph, entry.plan)
        keep = keep or verify or norms_only or entry.plan.must_keep
        try:
            backward = Backward(losses, graph, entry.plan, retain_graph=keep, norms_only=norms_only and not verify)
        except StalePlan:
            entry = self._make(losses, graph, parameters, evidence, stale=True)
            verify = True
            try:
                backward = Backward(losses, graph, entry.plan, retain_graph=True)
            except StalePlan:  # a fresh plan that this very batch contradicts
                raise mixing(graph, "some node", "no layout holds for all samples") from None
        if verify:
            entry.checked = verify_against_autograd(losses, backward, parameters)
            backward.norms_only = norms_only
        return backward


def _demand_shared(graph: Graph, plan: GraphPlan, evidence: Evidence) -> None:
    """Refuse a cached plan whose shared values are computed from the batch this time."""
    origins = evidence.origins(graph)
    for k in plan.shared:
        if origins[k] is Origin.BATCH:
            raise mixing(graph, graph.names[k], "it was computed from parameters and constants alone at earlier steps")


@dataclass
class Outcome:
    """Norms, factors and sums in order of the parameters."""

    norms: Tensor
    factors: dict[str, Tensor]
    bad: Tensor
    sums: list[Tensor]
    squared: list[Tensor]


def clip_sum(
    losses: Tensor,
    parameters: Parameters,
    style: Style,
    engine: Engine,
    way: Way | None,
    keep: bool,
    evidence: Evidence = NO_EVIDENCE,
) -> Outcome:
    """The whole walk: norms, factors, clipped sum."""
    groups = parameters.groups(style)
    if losses.shape[0] == 0:
        return _nothing(losses, parameters, groups)
    if losses.shape[0] == 1:
        return _single(losses, parameters, style, groups, engine, keep)
    try:
        return _several(losses, parameters, style, groups, engine, way, keep, evidence)
    except NothingFinite:
        return _nothing(losses, parameters, groups)


def _several(
    losses: Tensor,
    parameters: Parameters,
    style: Style,
    groups: Mapping[str, list[int]],
    engine: Engine,
    way: Way | None,
    keep: bool,
    evidence: Evidence,
) -> Outcome:
    backward = engine.backward(losses, parameters, evidence, keep=keep, way=way, groups=len(groups))
    squared = backward.squared_norms()
    dtype = working_dtype(losses, parameters.tensors)
    bad = None
    by_group, norms = _norms(squared, groups, losses)
    if not math.isfinite(float((norms + losses).sum())):  # or the sum of finite numbers overflowed: look at each
        if backward.norms_only:  # plain autograd would spread NaN: form the uses after all
            backward = engine.backward(losses, parameters, keep=True, way="bookkeeping", groups=len(groups))
        squared = settled(backward, squared, losses)
        by_group, norms = _norms(squared, groups, losses)
        bad = bad_samples(norms, losses, dtype)
        backward.discard(bad)
    factors = _all_factors(style, by_group, norms, bad, dtype)
    of = {place: factors[name] for name, members in groups.items() for place in members}
    if backward.norms_only:
        sums = by_second_backward(losses, backward.graph, list(groups.values()), of.__getitem__, keep=keep)
    else:
        sums = backward.weighted(of.__getitem__, consume=True)
    none = torch.zeros_like(losses)
    own = [squared.get(place, none) for place in range(len(parameters.tensors))]
    if bad is None:
        bad = torch.zeros_like(losses, dtype=torch.bool)
    return Outcome(norms.to(dtype), factors, bad, _filled(sums, parameters), own)


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
        return {name: _factors(style.rule_of(name), norms, norms <= floor, bad).to(dtype) for name in squared}
    rounding = (norms * (8 * torch.finfo(dtype).eps)).clamp_(min=floor)
    lengths = {name: total.sqrt() for name, total in squared.items()}
    return {name: _factors(style.rule_of(name), n, n <= rounding, bad).to(dtype) for name, n in lengths.items()}


def _added(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(list(parts)).sum(0)


def _total(squared: Mapping[int, Tensor], members: Sequence[int], losses: Tensor) -> Tensor:
    parts = [squared[place] for place in members if place in squared]
    return _added(parts).double() if parts else torch.zeros_like(losses, dtype=torch.float64)


def _factors(rule: Rule, norms: Tensor, negligible: Tensor, bad: Tensor | None) -> Tensor:
    factors = rule(norms)
    if bad is not None:
        negligible = negligible | bad
    return factors.masked_fill(negligible, 0)


def _filled(sums: Mapping[int, Tensor], parameters: Parameters) -> list[Tensor]:
    """One sum per parameter; zero where no sample reached it. In float32 for half precision: rounding it would add."""
    filled = []
    for place, p in enumerate(parameters.tensors):
        dtype = torch.float32 if p.dtype in (torch.float16, torch.bfloat16) else p.dtype
        part = sums.get(place)
        filled.append(torch.zeros_like(p, dtype=dtype) if part is None else dense(part).to(dtype))
    return filled


def _nothing(losses: Tensor, parameters: Parameters, groups: Mapping[str, Sequence[int]]) -> Outcome:
    """No sample, or none with a finite loss: every contribution is zero."""
    zeros = [torch.zeros_like(p) for p in parameters.tensors]
    factors = dict.fromkeys(groups, torch.zeros_like(losses))
    unknown = torch.full_like(losses, torch.nan)
    bad = torch.ones_like(losses, dtype=torch.bool)
    return Outcome(unknown, factors, bad, zeros, [unknown] * len(zeros))


def _single(
    losses: Tensor, parameters: Parameters, style: Style, groups: Mapping[str, list[int]], engine: Engine, keep: bool
) -> Outcome:
    """A batch of one: its gradient is the per-sample gradient, and plain autograd is exact."""
    grads = single_gradients(losses, parameters, engine, keep)
    dtype = working_dtype(losses, parameters.tensors)
    sums = _filled({}, parameters)
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
    return Outcome(norms.to(dtype), factors, bad, sums, [found.get(k, none) for k in range(len(grads))])


def single_gradients(losses: Tensor, parameters: Parameters, engine: Engine, keep: bool) -> Sequence[Tensor | None]:
    """The gradients of a batch of one by plain autograd."""
    engine.graph(losses, parameters)
    found = differentiate(losses, parameters.tensors, torch.ones_like(losses), keep=keep)
    return [None if gradient is None else dense(gradient) for gradient in found]
