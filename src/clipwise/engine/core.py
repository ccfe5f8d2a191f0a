"""The engine: losses -> per-sample norms -> factors -> clipped sum, with its plans cached and checked.

Nothing is written on the model, its parameters or the graph; every call is a function of the losses.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from clipwise.clipping import Rule, Style
from clipwise.engine.cost import Way, choose_way, reduced_precision
from clipwise.engine.graph import Graph, differentiate, walk
from clipwise.engine.layout import Probe, colours_of, owners_by_digits
from clipwise.engine.origin import Declared, Evidence, Origin
from clipwise.engine.plan import GraphPlan, Planner, mixing
from clipwise.engine.run import Backward, StalePlan, by_second_backward
from clipwise.engine.uses import accurate
from clipwise.errors import CheckFailed, InvalidLosses, UnsupportedNode

Key = TypeVar("Key", Tensor, str)
_PIECE = 1 << 20  # values that are compared at once
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


class Parameters:
    """The parameters of a call: distinct, in order, with their names and layers."""

    def __init__(self, params: Iterable[Tensor] | Mapping[str, Tensor]) -> None:
        named = isinstance(params, Mapping)
        pairs: list[tuple[str, Any]] = (
            list(params.items()) if isinstance(params, Mapping) else [("", p) for p in params]
        )
        for name, p in pairs:
            if not isinstance(p, Tensor):
                raise InvalidLosses(f"params must be tensors or a mapping name -> tensor, got {type(p).__name__}.")
            if not p.is_leaf:
                raise InvalidLosses(
                    f"params must be the parameters themselves, but {name or 'one'} of shape {tuple(p.shape)} is "
                    "computed from others. Pass those, or detach it and call requires_grad_() before it is used."
                )
        self.keys: list[list[Any]] = []
        self.tensors: list[Tensor] = []
        self.names: list[str] = []
        self.position: dict[int, int] = {}
        for name, p in pairs:
            place = self.position.get(id(p))
            if place is None:
                place = self.position[id(p)] = len(self.tensors)
                self.tensors.append(p)
                self.names.append(name)
                self.keys.append([])
            self.keys[place].append(name if named else p)
        self.identity = tuple(self.position)
        self._grouped: tuple[Style, dict[str, list[int]]] | None = None

    def describe(self, place: int) -> str:
        """A parameter as an error message names it."""
        return self.names[place] or f"#{place} of shape {tuple(self.tensors[place].shape)}"

    def layer(self, place: int) -> str:
        """The module that owns a parameter: its name before the last dot, or itself when it has no name."""
        name = self.names[place]
        return name.rpartition(".")[0] if name else f"#{place}"

    def keyed(self, values: Sequence[Tensor]) -> dict[Any, Tensor]:
        """Values in order of the parameters, keyed as the caller gave them."""
        return {key: value for keys, value in zip(self.keys, values, strict=True) for key in keys}

    def groups(self, style: Style) -> dict[str, list[int]]:
        """Clipping groups of a style and the places of their parameters."""
        if self._grouped is None or self._grouped[0] is not style:
            groups: dict[str, list[int]] = {}
            for place, name in enumerate(self.names):
                groups.setdefault(style.group_of(self.layer(place), name), []).append(place)
            self._grouped = style, groups
        return self._grouped[1]


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
    if losses.numel() and losses.grad_fn is None:
        raise InvalidLosses(
            "losses do not require grad: they were computed under no_grad, detached, or from frozen parameters."
        )


class Engine:
    """Plans, checks and runs; the cache is its only state."""

    def __init__(self) -> None:
        self._cache: OrderedDict[tuple[object, ...], Entry] = OrderedDict()

    def graph(self, losses: Tensor, parameters: Parameters) -> Graph:
        """The graph of the losses; refused when it reaches none of the parameters."""
        graph = walk(losses, parameters.position, parameters.tensors)
        if all(place < 0 for place in graph.leaf_parameter.values()):
            raise InvalidLosses(
                "no parameter is reached from the losses. Pass the parameters that the losses were computed from "
                "(model.parameters() of the very model that was called)."
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

    def _make(self, losses: Tensor, graph: Graph, parameters: Parameters, evidence: Evidence) -> Entry:
        if not bool(torch.isfinite(losses).any()):
            raise NothingFinite
        planner = Planner(graph, losses.shape[0], parameters.describe, evidence)
        entry = Entry(
            planner.plan(_AutogradProber(losses, graph)),
            tuple(weakref.ref(p) for p in parameters.tensors),
            tuple(p.shape for p in parameters.tensors),
        )
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
            entry = self._make(losses, graph, parameters, evidence)
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


class _AutogradProber:
    """Back-propagates colours to the outputs of nodes."""

    def __init__(self, losses: Tensor, graph: Graph) -> None:
        self._losses, self._graph = losses, graph
        self._bad = ~torch.isfinite(losses)

    def _gradients(self, nodes: Sequence[int], cotangent: Tensor) -> list[Tensor]:
        edges = [self._graph.gradient_edge((k, 0)) for k in nodes]
        found = differentiate(self._losses, edges, cotangent, keep=True)
        shapes = [self._graph.shape((k, 0)) for k in nodes]
        return [self._losses.new_zeros(s) if g is None else g for g, s in zip(found, shapes, strict=True)]

    def __call__(self, nodes: Sequence[int]) -> Mapping[int, Probe]:
        colours = colours_of(self._losses.shape[0], self._losses)
        plain = self._gradients(nodes, torch.ones_like(self._losses))
        coloured = zip(*(self._gradients(nodes, v) for v in colours), strict=True)
        return {k: Probe(p, c, colours, self._bad) for k, p, c in zip(nodes, plain, coloured, strict=True)}

    def scattered_axis(self, node: int) -> int | None:
        probe = self([node])[node]
        axes = (axis for axis in range(probe.plain.dim()) if owners_by_digits(probe, axis) is not None)
        return next(axes, None)


def verify_against_autograd(losses: Tensor, backward: Backward, parameters: Parameters) -> bool:
    """Compare a random combination of all samples with autograd, and norms with gradients. False: not possible now.

    With random weights, equality of sum_i w_i g_i can only hold if every per-sample gradient is right. The weights
    bring all gradients to one length, so that an error in a small one shows as well as in a large one.
    """
    squared = backward.squared_norms()
    norms = sum(squared.values(), losses.new_zeros(losses.shape, dtype=torch.float64)).sqrt()
    if not bool(torch.isfinite(norms + losses).all()):
        return False
    seen = norms > negligible_norm(losses.dtype)
    generator = torch.Generator().manual_seed(losses.shape[0])
    signs = torch.randn(losses.shape[0], generator=generator).to(losses.device)
    weights = torch.where(seen, signs / torch.where(seen, norms, 1), 0).to(losses.dtype)
    tolerance = 2e-2 if reduced_precision(backward.graph, backward.plan) else 2e-3
    ours = backward.weighted(lambda _: weights)
    theirs = list(differentiate(losses, parameters.tensors, weights, keep=True))
    scale = float((weights * norms).norm())
    for place in range(len(theirs)):
        expected, theirs[place] = theirs[place], None  # let go of each as soon as it was compared
        difference = _distance(ours.pop(place, None), expected)
        if difference > tolerance * scale:
            raise CheckFailed(
                f"the per-sample gradients of parameter {parameters.describe(place)} disagree with autograd (by "
                f"{difference:.3g} of {scale:.3g}). Nothing was released. {_cause(parameters.tensors[place])}"
            )
    largest = int(norms.argmax())
    gradients = backward.gradients(slice(largest, largest + 1))
    for place, gradient in gradients.items():
        want, got = _distance(gradient, None), float(squared[place][largest].sqrt())
        if seen[largest] and abs(want - got) > tolerance * float(norms[largest]):
            raise CheckFailed(
                f"the per-sample norm of parameter {parameters.describe(place)} is {got:.6g}, its gradient's is "
                f"{want:.6g}. Nothing was released. Please report the model."
            )
    return True


def _cause(parameter: Tensor) -> str:
    if getattr(parameter, "_backward_hooks", None):
        return "The parameter has a hook (register_hook), which may change its gradient: remove it."
    return "Please report the model."


def negligible_norm(dtype: torch.dtype) -> float:
    """Norms below this are not accurate, since their squares run out of exponents; they are taken for zero."""
    numbers = torch.finfo(torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype)
    return math.sqrt(numbers.tiny / numbers.eps)


def _distance(a: Tensor | None, b: Tensor | None) -> float:
    """The length of a - b, None being zero, in float64 and in pieces: no copy of a large embedding in double."""
    terms = [dense(term).reshape(-1).split(_PIECE) for term in (a, b) if term is not None]
    pieces = (pair[0].double() - (pair[1] if len(pair) == 2 else 0.0) for pair in zip(*terms, strict=True))
    return math.sqrt(sum(float(piece.square_().sum()) for piece in pieces))


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
    by_group = {name: _total(squared, members, losses) for name, members in groups.items()}
    norms = _added(list(by_group.values())).sqrt()
    bad = torch.zeros_like(losses, dtype=torch.bool)
    sum_tells = norms + losses
    any_bad = not math.isfinite(float(sum_tells.sum()))
    if any_bad:  # or the sum of finite numbers overflowed: look at each
        bad = ~torch.isfinite(sum_tells)
    factors = _all_factors(style, by_group, norms, bad if any_bad else None)
    of = {place: factors[name] for name, members in groups.items() for place in members}
    if backward.norms_only and any_bad:  # plain autograd would spread NaN: form the uses after all
        backward = engine.backward(losses, parameters, evidence, keep=True, way="bookkeeping", groups=len(groups))
    if backward.norms_only:
        sums = by_second_backward(losses, backward.graph, list(groups.values()), of.__getitem__, keep=keep)
    else:
        if any_bad:
            backward.discard(bad)
        sums = backward.weighted(of.__getitem__, consume=True)
    none = torch.zeros_like(losses)
    own = [squared.get(place, none) for place in range(len(parameters.tensors))]
    return Outcome(norms, factors, bad, _filled(sums, parameters), own)


def _all_factors(style: Style, squared: Mapping[str, Tensor], norms: Tensor, bad: Tensor | None) -> dict[str, Tensor]:
    """Factors by group; zero for bad samples, and for gradients that are zero up to rounding, which point anywhere."""
    floor = negligible_norm(norms.dtype)
    if len(squared) == 1:
        return {name: _factors(style.rule_of(name), norms, norms <= floor, bad) for name in squared}
    rounding = (norms * (8 * torch.finfo(norms.dtype).eps)).clamp_(min=floor)
    lengths = {name: total.sqrt() for name, total in squared.items()}
    return {name: _factors(style.rule_of(name), n, n <= rounding, bad) for name, n in lengths.items()}


def _added(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(list(parts)).sum(0)


def _total(squared: Mapping[int, Tensor], members: Sequence[int], losses: Tensor) -> Tensor:
    parts = [squared[place] for place in members if place in squared]
    return _added(parts) if parts else torch.zeros_like(losses)


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
    none = losses.new_zeros(1, dtype=torch.float64)
    factors: dict[str, Tensor] = {}
    sums = _filled({}, parameters)
    squared = [none if grad is None else grad.double().square().sum().view(1) for grad in grads]
    norms = _added(squared).sqrt()
    bad = ~(torch.isfinite(norms) & torch.isfinite(losses))
    rounding = (norms * (8 * torch.finfo(accurate(losses).dtype).eps)).clamp_(min=negligible_norm(norms.dtype))
    for name, members in groups.items():
        length = _added([squared[place] for place in members]).sqrt()
        factors[name] = _factors(style.rule_of(name), length, length <= rounding, bad).to(losses.dtype)
        for place in members:
            grad = grads[place]
            if grad is not None and not bool(bad):
                sums[place] = accurate(grad) * factors[name].to(accurate(grad).dtype)
    return Outcome(norms.to(losses.dtype), factors, bad, sums, squared)


def single_gradients(losses: Tensor, parameters: Parameters, engine: Engine, keep: bool) -> Sequence[Tensor | None]:
    """The gradients of a batch of one by plain autograd."""
    engine.graph(losses, parameters)
    found = differentiate(losses, parameters.tensors, torch.ones_like(losses), keep=keep)
    return [None if gradient is None else dense(gradient) for gradient in found]


def dense(gradient: Tensor) -> Tensor:
    """Embeddings may have sparse gradients, which would show the rows that a batch touched; noise goes on all."""
    return gradient.to_dense() if gradient.is_sparse else gradient
