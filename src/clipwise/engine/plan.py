"""From a graph to a plan: which values are shared, where they meet the batch, and how each parameter is reached.

A value is *shared* when it is computed from parameters and constants alone. A *meeting* is a node where a shared
operand meets the batch. The plan depends on the graph's structure only, so it is made once and cached; sizes such as
the batch size or the sequence length may change from step to step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Protocol

import torch

from clipwise.engine.chains import Chain, chain_of, is_simple
from clipwise.engine.compiled import may_hold
from clipwise.engine.graph import Edge, Graph
from clipwise.engine.layout import Layout, Probe, Scattered, all_finite
from clipwise.engine.leaps import Shown, confirmed, stages_between_layers
from clipwise.engine.node import COMPILED, LEAF, RECURRENCE, REENTRANT, at_hand
from clipwise.engine.ops import BatchEntry, is_live, lacks_rule, op_of
from clipwise.engine.origin import Evidence, Origin
from clipwise.engine.probing import in_their_order, infer_layouts, layouts_in, layouts_of, pass_dead_ends
from clipwise.engine.routes import CompiledRegion, Routing, Site, in_place, keeps_sizes, region
from clipwise.engine.sizes import Sizes, SizesOf, pattern
from clipwise.engine.stages import Stages, is_stop, stages
from clipwise.engine.suspects import Suspects, mixing, no_rule
from clipwise.errors import NotSeparable, UnsupportedNode


class Prober(Protocol):
    """Asks autograd about the outputs of nodes."""

    def __call__(self, nodes: Sequence[int]) -> Mapping[int, Probe]:
        """Probe the outputs of nodes."""
        ...

    def passing(self, nodes: Sequence[int]) -> Mapping[int, Probe]:
        """The same, past everything that lets no gradient through."""
        ...

    def leaping(self, nodes: Sequence[int], when: Stages) -> Shown | None:
        """What nodes show to colours that leap over folded layers."""
        ...


_SMALL = 1 << 20  # elements: gradients that may all be held at once, which saves the calls of hooks


class _State(Enum):
    NEUTRAL = 0  # no parameter below: data or constants
    SHARED = 1  # parameters and constants only
    BATCH = 2  # parameters met the batch at or below this node


class _Entry(Enum):
    """Whether the batch can enter at a node through an operand that is not differentiated."""

    NO = 0
    WEAK = 1  # an index, a broadcast: as often a position or a constant
    STRONG = 2  # the data side of a matrix product or convolution


@dataclass(frozen=True)
class Meeting:
    """A node where shared operands meet the batch."""

    node: int
    operands: tuple[int, ...]  # positions among the node's inputs, one per distinct edge
    layouts: tuple[Layout | Scattered, ...]  # all that agree with what was seen; none when nothing was seen
    end: bool  # nothing below it is computed from the batch: backward stops here


@dataclass(frozen=True)
class GraphPlan:
    """How to get every parameter's per-sample gradient out of one graph structure."""

    meetings: tuple[Meeting, ...]
    chains: Mapping[Edge, Chain]  # shared operands that are views of one parameter
    shapes: Mapping[Edge, torch.Size]  # of operands that are a whole parameter, so that they never change
    roots: Mapping[int, tuple[Edge, ...]]  # parameter -> the shared operands that reach it
    solo: frozenset[Edge]  # operands that are their parameter's only use: its norm is known as soon as they are
    derived: frozenset[int]  # parameters that need instantiated gradients pulled back by autograd
    parted: tuple[tuple[Edge, ...], ...]  # operands that are parts of one parameter, which must not overlap
    at_hand: bool  # saved tensors are there, and not made again when they are read (checkpointing)
    streaming: bool  # uses are formed while backward runs; not for small graphs, nor where tensors are not at hand
    live: bool  # some rule needs the graph to stay alive
    decided: bool  # every layout is known beyond doubt
    cacheable: bool  # nothing was taken from numbers that may tell something else at the next step
    identities: tuple[int, ...]  # nodes whose leading index must be the identity at every step
    regions: tuple[CompiledRegion, ...]  # compiled ones, whose code must keep the samples apart at every step
    sizes: Sizes | None  # what shapes must be for samples to lie as seen; None: layouts are probed at every step
    entries: tuple[
        tuple[int, tuple[bool, ...]], ...
    ]  # nodes that the batch may enter by, and which axes are longer than 1
    shared: tuple[int, ...]  # nodes taken for shared, which must stay free of the batch
    unseen: Mapping[int, frozenset[int]]  # shared nodes with an operand of unseen origin -> parameters below
    data_meetings: frozenset[int]  # meetings with data that is not computed from parameters
    indexed: bool  # some node moves values computed from the batch by an index
    stages: Stages  # the parts of the backward pass between meetings whose rule goes on by itself
    leaps: Stages | None  # the parts of a pass with colours between folded layers; None where it goes through them

    @property
    def routed(self) -> bool:
        """Whether rows may be moved between samples, by data or by sizes: layouts are probed at every step."""
        return self.sizes is None

    @property
    def must_keep(self) -> bool:
        """Whether the graph is needed again after the backward pass to the meetings."""
        return self.live or self.routed or not self.decided or not self.at_hand


class NotFolded(Exception):
    """A folded layer shows no samples: its nodes are to be looked at one by one. Never leaves the engine."""


class Planner:
    """Builds the plan of one graph for one batch."""

    def __init__(self, graph: Graph, batch_size: int, describe: Callable[[int], str], evidence: Evidence) -> None:
        self.graph, self.batch_size, self.describe = graph, batch_size, describe
        self.reaches = self._reached_parameters()
        self.origins, self.strict = evidence.origins(graph), evidence.strict
        self.entries = {k: self._entry(k) for k in graph.leaves_first if self.reaches[k] and graph.names[k] != LEAF}

    def _reached_parameters(self) -> list[frozenset[int]]:
        """Parameters below each node, as far as they stay few (only shared nodes are asked)."""
        reaches: list[frozenset[int]] = [frozenset()] * len(self.graph.nodes)
        for k in self.graph.leaves_first:
            if self.graph.names[k] == LEAF:
                place = self.graph.leaf_parameter[k]
                reaches[k] = frozenset((place,)) if place >= 0 else frozenset()
            else:
                below = {reaches[child] for child, _ in self.graph.edges[k] if child >= 0 and reaches[child]}
                reaches[k] = next(iter(below)) if len(below) == 1 else frozenset().union(*below)
        return reaches

    def _entry(self, k: int) -> _Entry:
        graph, op, edges = self.graph, op_of(self.graph.names[k]), self.graph.edges[k]
        if op.data is not None:
            inputs = [edges[i][0] for i in op.data.operands if i < len(edges)]
            return _Entry.STRONG if any(i < 0 or not self.reaches[i] for i in inputs) else _Entry.NO
        if op.entry in (BatchEntry.INDEX, BatchEntry.LOOKUP):
            return _Entry.WEAK
        if op.entry is BatchEntry.NEVER:
            return _Entry.NO
        below = [graph.shape(edge) for edge in edges if edge[0] >= 0 and self.reaches[edge[0]]]
        if len(below) < len(edges) and op.entry is BatchEntry.OPEN:
            return _Entry.WEAK
        try:
            known = prod(torch.broadcast_shapes(*below))
        except RuntimeError:
            known = sum(prod(shape) for shape in below)
        return _Entry.WEAK if prod(graph.shape((k, 0))) > known else _Entry.NO

    def _states(self, is_batch: Callable[[int], bool]) -> list[_State]:
        """States of all nodes, when `is_batch` tells whether the batch enters at a node."""
        states = [_State.NEUTRAL] * len(self.graph.nodes)
        for k in self.graph.leaves_first:
            if not self.reaches[k]:
                continue
            if self.graph.names[k] == LEAF:
                states[k] = _State.SHARED
                continue
            met = any(child >= 0 and states[child] is _State.BATCH for child, _ in self.graph.edges[k])
            met = met or self.origins[k] is Origin.BATCH  # whatever its numbers look like
            states[k] = _State.BATCH if met or (self.entries[k] is not _Entry.NO and is_batch(k)) else _State.SHARED
        return states

    def _meetings(self, states: Sequence[_State]) -> list[int]:
        return [
            k
            for k in self.graph.leaves_first
            if states[k] is _State.BATCH
            and any(child >= 0 and states[child] is _State.SHARED for child, _ in self.graph.edges[k])
        ]

    def plan(self, probe: Prober) -> GraphPlan:
        """Probe, classify, and say how each parameter is reached."""
        if REENTRANT in self.graph.names:
            raise UnsupportedNode(
                f"{REENTRANT}: reentrant activation checkpointing hides the parameters inside it. Use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
            )
        optimistic = self._states(lambda k: True)
        cautious = self._states(lambda k: self.entries[k] is _Entry.STRONG)
        self._refuse_compiled(optimistic, cautious)
        wanted = {k for k, entry in self.entries.items() if entry is not _Entry.NO}
        wanted.update(self._meetings(optimistic), self._meetings(cautious), self._after_meetings(optimistic))
        probes: dict[int, Probe] = {}
        layouts: dict[int, tuple[Layout | Scattered, ...]] = {}
        states, meetings = optimistic, list[int]()  # where nothing is wanted, all is shared
        while wanted:
            found = probe(sorted(wanted))
            probes.update(found)
            layouts.update((k, layouts_of(found[k], self.batch_size)) for k in wanted)
            pass_dead_ends(sorted(wanted), probe.passing, probes, layouts, self.batch_size)
            states = self._states(lambda k: self._is_batch(k, probes[k], layouts[k]))
            meetings = self._meetings(states)
            wanted = {k for k in meetings if k not in probes}
        if any(name == RECURRENCE and states[k] is _State.SHARED for k, name in enumerate(self.graph.names)):
            raise NotFolded
        if states[0] is _State.SHARED:  # the losses themselves show no layout
            raise self._mixing(0)
        self._refine(layouts, probe)
        infer_layouts(self.graph, layouts, self._is_batch_in(states))
        self._refuse_unseen(states)
        self._refuse_hidden_batch(states)
        self.finite = all(all_finite(found.plain) for found in probes.values())
        self._refuse_unknown(meetings, states)
        met = [self._meeting(k, states, probes[k], layouts[k]) for k in meetings]
        shared = tuple(k for k in self.entries if states[k] is _State.SHARED)
        moves, is_batch = self._moves(states, layouts), self._is_batch_in(states)
        lie = SizesOf(self.graph, self.batch_size, layouts_in(self.graph, layouts), is_batch)
        seen = (meeting.node for meeting in met if meeting.layouts)
        sizes = None if self._is_routed(met, moves) else lie.find(moves, seen)
        trusted = () if sizes is None else met  # else probes give the gradients of all meetings
        inner = (meeting.node for meeting in trusted if meeting.layouts and not meeting.end)
        when = stages(self.graph, {k for k in inner if is_stop(self.graph, k, is_batch)}, is_batch)
        return self._bind(met, moves, shared, sizes, when, self._leaps(met, probe, probes, is_batch))

    def _leaps(
        self, met: Sequence[Meeting], probe: Prober, probes: Mapping[int, Probe], is_batch: Callable[[int], bool]
    ) -> Stages | None:
        """The stages of colours that leap over folded layers, if they tell what others tell."""
        when = stages_between_layers(self.graph, {meeting.node for meeting in met if meeting.layouts}, is_batch)
        shown = None if when is None else probe.leaping([meeting.node for meeting in met], when)
        return when if shown is not None and confirmed(shown, probes) else None

    def _is_batch_in(self, states: Sequence[_State]) -> Callable[[int], bool]:
        return lambda k: states[k] is _State.BATCH

    def _refuse_compiled(self, optimistic: Sequence[_State], cautious: Sequence[_State]) -> None:
        """Refuse compiled regions with parameters inside, before any backward pass through them.

        Weights that are computed from parameters and constants alone may be compiled. What is not a parameter is taken
        for the batch here where the region's output, or what it saved, could hold it; any other is judged by what it
        shows.
        """
        refused = []
        for k in (k for k, name in enumerate(self.graph.names) if name == COMPILED and self.reaches[k]):
            shared = self._shared_operands(k, optimistic)
            unseen = self.origins[k] is not Origin.CONSTANT and may_hold(self.graph, k, self.batch_size)
            holds = any(size and size % self.batch_size == 0 for size in self.graph.shape((k, 0)))
            if shared and (unseen or (holds and cautious[k] is _State.BATCH)):
                refused.append(no_rule(self.graph, k, self._parameters(shared)))
        if refused:
            raise UnsupportedNode("\n".join(dict.fromkeys(refused)))

    def _is_unseen(self, k: int) -> bool:
        """Whether a node has an operand that is not differentiated, and nobody saw where it comes from."""
        open_operand = self.entries[k] is not _Entry.NO or any(child < 0 for child, _ in self.graph.edges[k])
        return open_operand and self.origins[k] is Origin.UNSEEN

    def _refine(self, layouts: dict[int, tuple[Layout | Scattered, ...]], probe: Prober) -> None:
        """Settle layouts that this batch leaves open, such as when only one token per sample has a gradient.

        A view keeps the order of elements, so the layout before it must be the layout after it.
        """
        open_nodes = {k for k, found in layouts.items() if len(found) > 1}
        if not open_nodes:
            return
        joined = {k for k in open_nodes if op_of(self.graph.names[k]).joined is not None}  # of another shape
        views = {
            k: self.graph.edges[k][0][0]
            for k in self.entries
            if self._keeps_order(k) and self.graph.edges[k][0][0] in open_nodes - joined
        }
        for view, found in probe(sorted(views)).items() if views else ():
            k = views[view]
            after = found.layouts(self.batch_size)
            if len(after) == 1:
                expected = after[0].elements(found.plain.shape, self.batch_size)
                shape = self.graph.shape((k, 0))
                layouts[k] = tuple(
                    layout
                    for layout in layouts[k]
                    if isinstance(layout, Layout) and torch.equal(layout.elements(shape, self.batch_size), expected)
                )

    def _keeps_order(self, k: int) -> bool:
        view = op_of(self.graph.names[k]).view
        return view is not None and view.keeps_order

    def _is_batch(self, k: int, found: Probe, layouts: tuple[Layout | Scattered, ...]) -> bool:
        """Whether the batch entered at a node; in doubt yes, but a value that one bad sample fills is shared by all."""
        if found.blank and not layouts and not all_finite(found.plain):
            return bool(found.layouts(self.batch_size))  # where NaN lies tells as much
        return found.blank or bool(layouts)

    def _after_meetings(self, states: Sequence[_State]) -> set[int]:
        """Nodes whose layout tells whether a node after a meeting keeps the samples apart."""
        is_batch = self._is_batch_in(states)
        nodes = (k for k in self.entries if is_batch(k) and self._has_batch_below(k, states))
        return {needed for k in nodes for needed in self._layouts_needed(k, is_batch)}

    def _layouts_needed(self, k: int, is_batch: Callable[[int], bool]) -> Iterable[int]:
        """The nodes whose layout must be known to tell whether node k keeps samples apart."""
        site = Site(self.graph, k, lambda edge: None, is_batch)
        if op_of(self.graph.names[k]).routing is in_place and keeps_sizes(site):
            return ()
        return (k, *(child for child, _ in site.inputs))

    def _has_batch_below(self, k: int, states: Sequence[_State]) -> bool:
        return any(child >= 0 and states[child] is _State.BATCH for child, _ in self.graph.edges[k])

    def _moves(
        self, states: Sequence[_State], layouts: Mapping[int, tuple[Layout | Scattered, ...]]
    ) -> dict[int, Routing | CompiledRegion]:
        """How far each node after a meeting can be trusted to keep the samples apart."""
        is_batch, layout_of = self._is_batch_in(states), layouts_in(self.graph, layouts)
        after = (k for k in self.entries if is_batch(k) and self._has_batch_below(k, states))
        moves: dict[int, Routing | CompiledRegion] = {}
        for k in after:
            site = Site(self.graph, k, layout_of, is_batch)
            move = op_of(self.graph.names[k]).routing(site)
            found = region(site) if move is Routing.COMPILED else None
            moves[k] = move if found is None else found
        return moves

    def _refuse_unseen(self, states: Sequence[_State]) -> None:
        """Where passes are watched, a value that may hold the batch and that nobody saw being made is not shared."""
        if not self.strict:
            return
        for k in self.entries:
            if states[k] is _State.SHARED and self._is_unseen(k):
                raise NotSeparable(
                    f"{self.graph.names[k]} (parameters {self._parameters([(k, 0)])}) was not on the graph of any "
                    "forward pass that was watched, so it is not known whether it reads the batch. Nothing was "
                    "released. The next forward pass is watched: continue with the next batch."
                )

    def _refuse_hidden_batch(self, states: Sequence[_State]) -> None:
        """Data met parameters in a shape that could hold the batch, but shows no layout: samples may mix after it."""
        suspects = Suspects(self.graph, self.reaches, self.batch_size)
        doubtful = (k for k in self.entries if states[k] is _State.SHARED and self.origins[k] is Origin.UNSEEN)
        mixed = suspects.mixed({k for k in doubtful if self.entries[k] is not _Entry.NO}, self._is_shared(states))
        if mixed is not None:
            raise self._mixing(mixed)

    def _is_shared(self, states: Sequence[_State]) -> Callable[[int], bool]:
        return lambda k: states[k] is _State.SHARED

    def _mixing(self, k: int) -> NotSeparable:
        reached = ", ".join(self.describe(p) for p in sorted(self.reaches[k])[:3])
        return mixing(self.graph, self.graph.names[k], f"parameters {reached}")

    def _meeting(
        self, k: int, states: Sequence[_State], probe: Probe, layouts: tuple[Layout | Scattered, ...]
    ) -> Meeting:
        name, distinct = self.graph.names[k], self._shared_operands(k, states)
        repeated = len(distinct) < sum(edge in distinct for edge in self.graph.edges[k])
        if repeated and not is_live(self.graph, k):
            raise UnsupportedNode(
                f"{name} uses the same shared value twice ({self._parameters(distinct)}); compute it apart."
            )
        if not layouts and not probe.blank:
            raise self._mixing(k)
        end = not any(child >= 0 and states[child] is _State.BATCH for child, _ in self.graph.edges[k])
        layouts = in_their_order(layouts, probe, op_of(name).reorders(self.graph.nodes[k]))
        return Meeting(k, tuple(distinct.values()), layouts, end)

    def _shared_operands(self, k: int, states: Sequence[_State]) -> dict[Edge, int]:
        """The distinct shared operands of a node, and where each is first among its inputs."""
        distinct: dict[Edge, int] = {}
        for position, edge in enumerate(self.graph.edges[k]):
            if edge[0] >= 0 and states[edge[0]] is _State.SHARED:
                distinct.setdefault(edge, position)
        return distinct

    def _refuse_unknown(self, meetings: Sequence[int], states: Sequence[_State]) -> None:
        """Name every node without a rule at once, not one after the other."""
        unknown = [k for k in meetings if lacks_rule(self.graph, k)]
        if unknown:
            reasons = [no_rule(self.graph, k, self._parameters(self._shared_operands(k, states))) for k in unknown]
            raise UnsupportedNode("\n".join(dict.fromkeys(reasons)))

    def _parameters(self, edges: Iterable[Edge]) -> str:
        reached = frozenset().union(*(self.reaches[child] for child, _ in edges))
        return ", ".join(self.describe(p) for p in sorted(reached)[:3])

    def _is_routed(self, meetings: Sequence[Meeting], moves: Mapping[int, Routing | CompiledRegion]) -> bool:
        """Whether rows may be moved between samples by data.

        In a folded layer always: the lengths and the cell are no part of its structure, so one plan serves equal
        lengths, where the rows look regular, and others.
        """
        if RECURRENCE in self.graph.names or any(move is Routing.MAYBE for move in moves.values()):
            return True
        return any(_read_each_step(layout) for meeting in meetings for layout in meeting.layouts)

    def _bind(
        self,
        meetings: list[Meeting],
        moves: Mapping[int, Routing | CompiledRegion],
        shared: tuple[int, ...],
        sizes: Sizes | None,
        when: Stages,
        leaps: Stages | None,
    ) -> GraphPlan:
        roots: dict[int, dict[Edge, None]] = {}
        chains: dict[Edge, Chain] = {}
        met: Counter[Edge] = Counter()
        for meeting in meetings:
            for position in meeting.operands:
                edge = self.graph.edges[meeting.node][position]
                met[edge] += 1
                for parameter in self.reaches[edge[0]]:
                    roots.setdefault(parameter, {})[edge] = None
                chain = chain_of(self.graph, edge)
                if chain is not None:
                    chains[edge] = chain
        derived = {parameter for parameter, edges in roots.items() if not is_simple(self.graph, edges, chains)}
        whole = all(at_hand(self.graph.nodes[meeting.node]) for meeting in meetings)
        return GraphPlan(
            tuple(meetings),
            chains,
            {edge: self.graph.shape(edge) for edge, chain in chains.items() if chain.direct},
            {p: tuple(edges) for p, edges in roots.items()},
            solo=frozenset(
                next(iter(edges))
                for parameter, edges in roots.items()
                if len(edges) == 1 and parameter not in derived and met[next(iter(edges))] == 1
            ),
            derived=frozenset(derived),
            parted=tuple(
                tuple(edges)
                for parameter, edges in roots.items()
                if parameter not in derived and len(edges) > 1 and any(chains[edge].region for edge in edges)
            ),
            at_hand=whole,
            streaming=whole and sum(prod(self.graph.shape((meeting.node, 0))) for meeting in meetings) > _SMALL,
            live=any(is_live(self.graph, meeting.node) for meeting in meetings),
            decided=self.finite and all(len(meeting.layouts) == 1 for meeting in meetings),
            cacheable=self.finite and self.batch_size > 1 and all(len(meeting.layouts) <= 1 for meeting in meetings),
            identities=tuple(k for k, move in moves.items() if move is Routing.IDENTITY),
            regions=tuple(move for move in moves.values() if isinstance(move, CompiledRegion)),
            sizes=sizes,
            shared=shared,
            unseen={k: self.reaches[k] for k in shared if self._is_unseen(k)},
            data_meetings=frozenset(m.node for m in meetings if self.entries[m.node] is not _Entry.NO),
            indexed=any(op_of(self.graph.names[k]).by_index for k in moves),
            stages=when,
            leaps=leaps,
            entries=tuple(
                (k, pattern(self.graph, k))
                for k, entry in self.entries.items()
                if entry is not _Entry.NO or (self._keeps_order(k) and (sizes is None or k not in moves))
            ),
        )


def _read_each_step(layout: Layout | Scattered) -> bool:
    """Whether a layout was taken from numbers that may be others at the next step."""
    return isinstance(layout, Scattered) or layout.rest is not None
