"""A backward pass with colours beside it that leap over folded layers.

Rows of such a layer keep their slots (`slots.py`), so whose they are is read where they leave it. Autograd runs through
the layer once, without colours, and only down to its rows. What the layer hands on is computed from these, in every
colour. Where anything does not fit, nothing is said, and colours go all the way (`probing.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from clipwise.engine.graph import Edge, Graph, differentiate
from clipwise.engine.layout import Colours, Layout, Probe, all_finite, owners_by_digits, peaks
from clipwise.engine.node import LEAF, RECURRENCE, Node, output_meta
from clipwise.engine.ops import Gradients, as_one, edges_of
from clipwise.engine.rules import Samples
from clipwise.engine.rules.recurrent import PULLED_ROWS
from clipwise.engine.stages import Handed, Stages, is_stop, stages

UNKNOWN = -1
_SAME = 0.01  # of the largest number: roundings differ, and half precision has few digits


class Told(NamedTuple):
    """The rows of a folded layer: their gradients, and whose they are; `UNKNOWN` where none of a slot has any."""

    plain: Tensor
    owners: Tensor


Shown: TypeAlias = Mapping[int, Probe | Told]


def stages_between_layers(graph: Graph, seen: Iterable[int], is_batch: Callable[[int], bool]) -> Stages | None:
    """The stages of passes that leap over all folded layers; None where there is none, or one that is not seen."""
    layers = {k for k, name in enumerate(graph.names) if name == RECURRENCE}
    possible = layers.issubset(seen) and all(is_stop(graph, k, is_batch) for k in layers)
    return stages(graph, layers, is_batch) if layers and possible else None


def confirmed(shown: Shown, probes: Mapping[int, Probe]) -> bool:
    """Whether colours that went all the way tell the same. They do not where a hook inside a layer moves rows."""
    return all(_near(leapt.plain, probes[k].plain) for k, leapt in shown.items()) and all(
        probes[k].agrees(told.owners.clamp(min=0), 0) for k, told in shown.items() if isinstance(told, Told)
    )


def _near(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a - b).abs() <= _SAME * b.abs().max()).all())


class Leaps:
    """The passes of one step, stage after stage: with the cotangent of ones, and with each colouring."""

    def __init__(self, losses: Tensor, graph: Graph, when: Stages, colours: Colours) -> None:
        self._losses, self._graph, self._when = losses, graph, when
        self._colours, self._bad = colours, ~torch.isfinite(losses)
        self._cotangents = [torch.ones_like(losses), *colours.each]
        self._handed = [Handed(graph, when) for _ in self._cotangents]

    def run(self, nodes: Sequence[int]) -> Shown | None:
        """What nodes show, among them all folded layers; None where colours must go all the way."""
        if any(self._graph.nodes[k].slots is None for k in self._when.stops) or self._is_opaque():
            return None
        found: dict[int, Probe | Told] = {}
        for stage in range(self._when.count):
            due = [k for k in nodes if self._when.of[k] == stage]
            plain, *coloured = [self._pass(stage, due, number) for number in range(len(self._cotangents))]
            for k in due:
                each = [gradients[k] for gradients in coloured]
                shown = self._told(k, plain[k], each) if k in self._when.stops else self._probe(k, plain[k], each)
                if shown is None or not all_finite(shown.plain):
                    return None
                found[k] = shown
        return found

    def _is_opaque(self) -> bool:
        """Whether the backward of what reads a joint is the user's own, which is not called as autograd calls it."""
        above = (self._graph.nodes[k] for joint in self._when.joints for k in self._graph.readers[joint])
        return any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in above)

    def _pass(self, stage: int, due: Sequence[int], number: int) -> dict[int, Gradients]:
        """The gradients of nodes with one cotangent: of layers those of what leaves them, with ones also of all rows.

        Joints of later stages are not asked for, since autograd would go through the layers to them: what reads them
        in this stage is, and its own backward is called.
        """
        graph, stops, handed = self._graph, self._when.stops, self._handed[number]
        edges = {k: edges_of(graph, k) if number == 0 or k not in stops else [] for k in due}
        for k in stops.intersection(due):
            edges[k] += [GradientEdge(node, 0) for node in graph.nodes[k].left]
        joints = {k for k, later in self._when.joints.items() if later > stage}
        above = {k for joint in joints for k in graph.readers[joint] if self._when.of.get(k) == stage} - stops
        starts, cotangents = handed.starts(self._losses, stage, self._cotangents[number])
        whole = [edges_of(graph, k, whole=True) for k in above]
        inputs = list(chain(*edges.values(), *whole))
        none = [None] * len(inputs)
        found = iter(differentiate(starts, inputs, cotangents, keep=True) if starts and inputs else none)
        own = {k: tuple(islice(found, len(some))) for k, some in edges.items()}
        for k, some in zip(above, whole, strict=True):
            for edge, part in _through(graph, k, tuple(islice(found, len(some)))):
                if edge[0] in joints:
                    handed.hold(edge, part)
        return own

    def _probe(self, k: int, plain: Gradients, coloured: Sequence[Gradients]) -> Probe:
        first, *others = [as_one(self._graph, k, gradients) for gradients in (plain, *coloured)]
        return self._filled(self._graph.shape((k, 0)), first, others)

    def _filled(self, shape: Sequence[int], plain: Tensor | None, coloured: Sequence[Tensor | None]) -> Probe:
        first, *others = [self._losses.new_zeros(shape) if g is None else g for g in (plain, *coloured)]
        return Probe(first, others, self._colours, self._bad)

    def _told(self, k: int, plain: Gradients, coloured: Sequence[Gradients]) -> Told | None:
        """Whose the rows of a layer are, from those that leave it; what it hands on is handed on in all colours."""
        node = self._graph.nodes[k]
        rows = as_one(self._graph, k, plain[: -len(node.left)])
        of_slot = self._owners_of_slots(node, plain[-len(node.left) :], coloured)
        if rows is None or of_slot is None:
            return None
        owners = of_slot[node.slots.rows.to(of_slot.device)]
        if self._graph.edges[k][0][0] in self._when.of:
            pulled = PULLED_ROWS(node, Samples(self._losses.shape[0], Layout(0)), rows)[0]
            self._handed[0].hold(self._graph.edges[k][0], pulled)
            for handed, colours in zip(self._handed[1:], self._colours.each, strict=True):
                handed.hold(self._graph.edges[k][0], pulled * colours.to(pulled.dtype)[owners].unsqueeze(1))
        return Told(rows, owners)

    def _owners_of_slots(self, node: Node, plain: Gradients, coloured: Sequence[Gradients]) -> Tensor | None:
        """Read off the colours of what leaves a layer; None where a slot has several owners, or all have none."""
        seen, slots = list[Tensor](), list[Tensor]()
        each = node.slots.left.split([output_meta(left).shape[0] for left in node.left])
        for left, numbers, first, *others in zip(node.left, each, plain, *coloured, strict=True):
            probe = self._filled(output_meta(left).shape, first, others)
            read = owners_by_digits(probe, 0) if all_finite(probe.plain) else None
            if read is None:
                return None
            arrived = peaks(probe.plain, 0)[0] > 0
            seen.append(read[arrived])
            slots.append(numbers.to(read.device)[arrived])
        samples, slot = torch.cat(seen), torch.cat(slots)
        owners = samples.new_full((1 + int(node.slots.rows.max()),), UNKNOWN)
        owners[slot] = samples
        return owners if samples.numel() and torch.equal(owners[slot], samples) else None


def _through(graph: Graph, k: int, gradients: Gradients) -> Iterator[tuple[Edge, Tensor]]:
    """The gradients of what a node reads, by its own backward alone."""
    parts: tuple[Tensor | None, ...] | Tensor | None = ()
    if any(gradient is not None for gradient in gradients):
        parts = graph.nodes[k](*gradients)
    for edge, part in zip(graph.edges[k], parts if isinstance(parts, tuple) else (parts,), strict=False):
        if part is not None and edge[0] >= 0:
            whole = output_meta(graph.nodes[edge[0]], edge[1]) if graph.names[edge[0]] != LEAF else part
            yield edge, part.sum_to_size(tuple(whole.shape)).to(whole.dtype)  # as autograd does between nodes
