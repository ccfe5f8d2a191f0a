"""Plans, made once for each structure of a graph, checked now and then, and run.

The cache is the engine's only state: every call is a function of the losses.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from clipwise.engine.compiled import refuse_donated
from clipwise.engine.cost import Way, choose_way
from clipwise.engine.fold import folded
from clipwise.engine.graph import Graph, refuse_nested, unrecorded, walk
from clipwise.engine.history import History, Planning
from clipwise.engine.origin import Declared, Evidence, Origin
from clipwise.engine.owners import StalePlan
from clipwise.engine.parameters import Parameters
from clipwise.engine.plan import GraphPlan, NotFolded, Planner
from clipwise.engine.probing import AutogradProber
from clipwise.engine.room import Room
from clipwise.engine.run import Backward
from clipwise.engine.suspects import mixing
from clipwise.engine.verify import verify_against_autograd
from clipwise.errors import ClipwiseError, InvalidLosses

_VERIFY_EVERY = 100
_CACHE_SIZE = 256
NO_EVIDENCE = Declared()


class NothingFinite(Exception):
    """No loss is finite: there is nothing to learn a plan from. Never leaves the engine."""


@dataclass
class CachedPlan:
    """A cached plan, the parameters it was made for, and how often it has been used since it was checked."""

    plan: GraphPlan
    owners: tuple[weakref.ref[Tensor], ...]
    shapes: tuple[torch.Size, ...]
    checked: bool = False
    uses: int = 0

    def belongs_to(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the very parameters, not others that were given their addresses, and of the same shapes."""
        for owner, shape, tensor in zip(self.owners, self.shapes, tensors, strict=True):
            if owner() is not tensor or tensor.shape != shape:
                return False
        return True


class Engine:
    """Plans, checks and runs; the cache is its only state."""

    def __init__(self) -> None:
        self._cache: OrderedDict[tuple[object, ...], CachedPlan] = OrderedDict()
        self._not_folded: OrderedDict[tuple[object, ...], None] = OrderedDict()
        self._history = History()
        self.plans = 0
        """How many were made, for any parameters."""

    def planning(self, parameters: Parameters) -> Planning:
        """How many plans were made for these parameters, and what differed."""
        return self._history.of(parameters.identity)

    def graph(self, losses: Tensor, parameters: Parameters) -> Graph:
        """The graph of the losses; refused when it reaches none of the parameters."""
        whole = walk(losses, parameters.position, parameters.tensors)
        graph = folded(whole)
        if graph is not whole and (parameters.identity, graph.signature) in self._not_folded:
            graph = whole
        if max(graph.leaf_parameter.values(), default=-1) < 0:
            raise InvalidLosses(
                "no parameter is reached from the losses. Pass the parameters that the losses were computed from "
                "(model.parameters() of the very model that was called). torch.utils.checkpoint hides them with "
                "use_reentrant=True: give it use_reentrant=False."
            )
        return graph

    def entry(self, losses: Tensor, graph: Graph, parameters: Parameters, evidence: Evidence) -> CachedPlan:
        """The plan of this graph's structure, from the cache or made now."""
        refuse_donated(graph)
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
    ) -> CachedPlan:
        if not bool(torch.isfinite(losses).any()):
            raise NothingFinite
        refuse_nested(graph)
        planner = Planner(graph, losses.shape[0], parameters.describe, evidence)
        entry = CachedPlan(
            planner.plan(AutogradProber(losses, graph)),
            tuple(weakref.ref(p) for p in parameters.tensors),
            tuple(p.shape for p in parameters.tensors),
        )
        self._history.record(parameters.identity, graph, stale)
        self.plans += 1
        if entry.plan.cacheable:
            self._cache[parameters.identity, graph.signature, evidence.key] = entry
            while len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)
        return entry

    def _planned(
        self, losses: Tensor, graph: Graph, parameters: Parameters, evidence: Evidence, stale: bool = False
    ) -> tuple[Graph, CachedPlan]:
        """The graph and its plan, `stale`: a new one. Where a folded layer shows nothing, its nodes are planned."""
        try:
            find = partial(self._make, stale=True) if stale else self.entry
            return graph, find(losses, graph, parameters, evidence)
        except NotFolded:
            self._not_folded[parameters.identity, graph.signature] = None
        while len(self._not_folded) > _CACHE_SIZE:
            self._not_folded.popitem(last=False)
        graph = walk(losses, parameters.position, parameters.tensors)
        return graph, self.entry(losses, graph, parameters, evidence)

    def backward(
        self,
        losses: Tensor,
        parameters: Parameters,
        evidence: Evidence = NO_EVIDENCE,
        *,
        keep: bool,
        way: Way | None = "bookkeeping",
        room: Room | None = None,
    ) -> Backward:
        """Differentiate to the meetings, planning and checking where needed; `keep` leaves the graph alive.

        `way` says how the sum will be formed; None leaves it to the cost model. `room` is where gradients of single
        samples may be kept.
        """
        graph, entry = self._planned(losses, self.graph(losses, parameters), parameters, evidence)
        verify = not entry.checked or entry.uses % _VERIFY_EVERY == 0
        entry.uses += 1
        norms_only = (way or choose_way(graph, entry.plan, losses.device)) == "second_backward"
        keep = keep or verify or norms_only or entry.plan.must_keep
        room = None if norms_only else room  # gradients would be kept that are formed again
        try:
            backward = Backward(
                losses, graph, entry.plan, retain_graph=keep, norms_only=norms_only and not verify, room=room
            )
        except StalePlan:
            graph, entry = self._planned(losses, graph, parameters, evidence, stale=True)
            verify = True
            try:
                backward = Backward(losses, graph, entry.plan, retain_graph=True, room=room)
            except StalePlan:  # a fresh plan that this very batch contradicts
                raise mixing(graph, "some node", "no layout holds for all samples") from None
        if verify:
            entry.checked = verify_against_autograd(losses, backward, parameters)
            if norms_only:
                backward.let_go()
        return backward

    def norms(self, losses: Tensor, parameters: Parameters, evidence: Evidence) -> dict[int, Tensor]:
        """Squared norms alone, by a plan that is not compared with autograd. The graph stays alive."""
        graph, entry = self._planned(losses, self.graph(losses, parameters), parameters, evidence)
        try:
            backward = Backward(losses, graph, entry.plan, retain_graph=True, norms_only=True)
        except StalePlan:
            graph, entry = self._planned(losses, graph, parameters, evidence, stale=True)
            backward = Backward(losses, graph, entry.plan, retain_graph=True, norms_only=True)
        return backward.squared_norms()


def _demand_shared(graph: Graph, plan: GraphPlan, evidence: Evidence) -> None:
    """Refuse a cached plan whose shared values are computed from the batch this time."""
    origins = evidence.origins(graph)
    for k in plan.shared:
        if origins[k] is Origin.BATCH:
            raise mixing(graph, graph.names[k], "it was computed from parameters and constants alone at earlier steps")


ENGINE = Engine()
"""The one of the whole process, except where plans are better kept apart."""


_APART = Engine()  # its plans are not counted among those of the steps


@unrecorded()
def lengths_beforehand(losses: Tensor, parameters: Sequence[Tensor], evidence: Evidence) -> dict[int, Tensor] | None:
    """Of each sample's gradient, (B,) for every parameter that is reached: those by which a step will clip.

    None where there are none. The step meets the same cause, and says it.
    """
    try:
        squared = _APART.norms(losses, Parameters(parameters), evidence)
    except (ClipwiseError, NothingFinite, StalePlan, RuntimeError):
        return None
    return {place: values.double().sqrt() for place, values in squared.items()}
