"""Asking autograd which sample each element of a value belongs to.

What a value's gradient shows depends on the numbers: a saturated activation, a closed gate or a weight that starts at
zero lets nothing through, a NaN hides everything behind it. Layouts do not depend on them. Where the gradient itself
does not tell, a second probe passes such places (`passing.py`). It is never part of a gradient that is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import TypeAlias

import torch
from torch import Tensor

from clipwise.engine.graph import Edge, Graph
from clipwise.engine.layout import NARROW, WIDE, Layout, Probe, Scattered, all_finite, drawn, owners_by_digits, peaks
from clipwise.engine.leaps import Leaps, Shown
from clipwise.engine.node import LEAF, Node
from clipwise.engine.ops import Gradients, as_one, gradients_at, op_of
from clipwise.engine.passing import Passing
from clipwise.engine.precision import HALF
from clipwise.engine.routes import Routing, Site, along_axes, class_loss
from clipwise.engine.stages import Stages


class AutogradProber:
    """Back-propagates colours to the outputs of nodes."""

    def __init__(self, losses: Tensor, graph: Graph) -> None:
        self._losses, self._graph = losses, graph
        self._bad = ~torch.isfinite(losses)
        self._colours = drawn(losses.shape[0], losses, NARROW if any(map(graph.computes_in, HALF)) else WIDE)

    def __call__(self, nodes: Sequence[int]) -> Mapping[int, Probe]:
        """The probes of the outputs of nodes."""
        return self.beside(nodes, self.gradients(nodes))

    def gradients(self, nodes: Sequence[int]) -> list[Tensor | None]:
        """The gradients of nodes themselves; None where nothing arrives."""
        return self._each(nodes, torch.ones_like(self._losses))

    def beside(self, nodes: Sequence[int], gradients: Sequence[Tensor | None]) -> Mapping[int, Probe]:
        """The probes of nodes whose gradients are known."""
        plain = self._filled(nodes, gradients)
        coloured = zip(*(self._gradients(nodes, v) for v in self._colours.each), strict=True)
        each = zip(nodes, plain, coloured, strict=True)
        return {k: Probe(p, c, self._colours, self._bad) for k, p, c in each}

    def passing(self, nodes: Sequence[int]) -> Mapping[int, Probe]:
        """The same, past everything that lets no gradient through."""
        with ExitStack() as stack:
            for node, name in self._graph.kernels():
                if name != LEAF:
                    stack.callback(node.register_hook(_Passing(node, op_of(name).passing)).remove)
            return self(nodes)

    def leaping(self, nodes: Sequence[int], when: Stages) -> Shown | None:
        """What nodes show to colours that leap over folded layers; None where they must go all the way."""
        return Leaps(self._losses, self._graph, when, self._colours).run(nodes)

    def _gradients(self, nodes: Sequence[int], cotangent: Tensor) -> list[Tensor]:
        return self._filled(nodes, self._each(nodes, cotangent))

    def _each(self, nodes: Sequence[int], cotangent: Tensor) -> list[Tensor | None]:
        each = gradients_at([self._losses], [cotangent], self._graph, nodes, keep=True)
        return [as_one(self._graph, k, gradients) for k, gradients in zip(nodes, each, strict=True)]

    def _filled(self, nodes: Sequence[int], gradients: Sequence[Tensor | None]) -> list[Tensor]:
        shapes = (self._graph.shape((k, 0)) for k in nodes)
        return [self._losses.new_zeros(s) if g is None else g for g, s in zip(gradients, shapes, strict=True)]


class _Passing:
    """Called after a node's backward: gives its inputs a gradient where it gave zero or NaN."""

    def __init__(self, node: Node, passing: Passing) -> None:
        self._node, self._passing = node, passing

    def __call__(self, inputs: Gradients, outputs: Gradients) -> Gradients:
        arrived = outputs[0]
        if arrived is None or arrived.is_sparse or arrived.is_nested:
            return inputs
        return tuple(
            gradient
            if gradient is None or gradient.is_sparse or not gradient.is_floating_point()
            else self._passing(self._node, position, gradient, arrived)
            for position, gradient in enumerate(inputs)
        )


def layouts_of(probe: Probe, batch_size: int) -> tuple[Layout | Scattered, ...]:
    """All regular layouts that agree with a probe, or the axis along which every position is some sample's own."""
    if probe.blank:
        return ()
    regular = probe.layouts(batch_size)
    if regular:
        return regular
    axes = (axis for axis in range(probe.plain.dim()) if owners_by_digits(probe, axis) is not None)
    return tuple(Scattered(axis) for axis in islice(axes, 1))


def in_their_order(
    layouts: tuple[Layout | Scattered, ...], probe: Probe, axis: int | None
) -> tuple[Layout | Scattered, ...]:
    """The layouts of a node that has samples along an axis in an order of its own: what looks regular is chance."""
    if axis is None or not layouts or owners_by_digits(probe, axis) is None:
        return layouts
    return (Scattered(axis),)


def _tells_little(probe: Probe, layouts: Sequence[object]) -> bool:
    return len(layouts) > 1 or probe.blank or not all_finite(probe.plain)


def pass_dead_ends(
    nodes: Sequence[int],
    passing: Callable[[Sequence[int]], Mapping[int, Probe]],
    probes: dict[int, Probe],
    layouts: dict[int, tuple[Layout | Scattered, ...]],
    batch_size: int,
) -> None:
    """Settle the layouts of nodes whose own gradient leaves them open: blank, not finite, or fitting several."""
    unclear = [k for k in nodes if len(layouts[k]) != 1 and _tells_little(probes[k], layouts[k])]
    if not unclear:
        return
    for k, probe in passing(unclear).items():
        if probe.blank:
            continue
        seen = layouts_of(probe, batch_size)
        kept = tuple(layout for layout in layouts[k] if layout in seen) if layouts[k] else seen
        if len(kept) == 1 and _shows_everybody(kept[0], probe, probes[k]):
            layouts[k] = kept


def _shows_everybody(layout: Layout | Scattered, probe: Probe, before: Probe) -> bool:
    """Whether no sample is hidden, beside which another's part of a sum would pass for a layout."""
    axis, batch_size = layout.axis, probe.bad.numel()
    if isinstance(layout, Scattered):
        owners = owners_by_digits(probe, axis)
        assert owners is not None
    else:
        owners = layout.owners(probe.plain.shape, batch_size).to(probe.plain.device)
    if owners[peaks(probe.plain, axis)[0] > 0].unique().numel() == batch_size:
        return True
    spoilt = owners[~torch.isfinite(before.plain).movedim(axis, 0).reshape(len(owners), -1).all(1)]
    return bool(spoilt.numel()) and bool(probe.bad[spoilt].all())  # what is not finite lies with losses that are not


Layouts: TypeAlias = Mapping[int, tuple[Layout | Scattered, ...]]


def layouts_in(graph: Graph, layouts: Layouts) -> Callable[[Edge], Layout | None]:
    """The one layout of an output of a node, where it is known."""

    def layout_of(edge: Edge) -> Layout | None:
        known, joined = layouts.get(edge[0], ()), op_of(graph.names[edge[0]]).joined
        layout = known[0] if len(known) == 1 and isinstance(known[0], Layout) else None
        return layout if joined is None or layout is None else joined.layout(graph.nodes[edge[0]], layout, edge[1])

    return layout_of


def infer_layouts(
    graph: Graph, layouts: dict[int, tuple[Layout | Scattered, ...]], is_batch: Callable[[int], bool]
) -> None:
    """Settle the layouts of scores by class that a few losses leave open: from the losses down.

    The loss of a class is read from one element of each row. Those of two samples may lie in two halves of the columns
    as well as in two rows. Rows they are where all that read the scores give rows to rows whatever the numbers, and
    where the scores were made, along other axes, of values that show the same rows by themselves. Nothing else is
    inferred: a value whose rows were moved on the way looks like columns by chance.
    """
    readers: dict[int, list[int]] = {}
    for k in reversed(graph.leaves_first):
        if len(layouts.get(k, ())) > 1 and k in readers:
            found = _as_its_inputs(graph, k, layouts, is_batch)
            if found is not None and all(
                _reads_rows(graph, reader, k, found, layouts, is_batch) for reader in readers[k]
            ):
                layouts[k] = (found,)
        if is_batch(k):
            for child in {child for child, _ in graph.edges[k] if child >= 0}:
                readers.setdefault(child, []).append(k)


def _as_its_inputs(graph: Graph, k: int, layouts: Layouts, is_batch: Callable[[int], bool]) -> Layout | None:
    """The one layout of all inputs of an operation that keeps shapes and works along other axes, if it may have it."""
    site = Site(graph, k, layouts_in(graph, layouts), is_batch)
    shape, known = graph.shape((k, 0)), {site.layout_of(edge) for edge in site.inputs}
    same = op_of(graph.names[k]).routing is along_axes and all(graph.shape(edge) == shape for edge in site.inputs)
    found = known.pop() if same and len(known) == 1 else None
    if found is None or found not in layouts[k]:
        return None
    return found if _keeps_apart(site._replace(layout_of=layouts_in(graph, {**layouts, k: (found,)}))) else None


def _reads_rows(
    graph: Graph, reader: int, k: int, layout: Layout, layouts: Layouts, is_batch: Callable[[int], bool]
) -> bool:
    """Whether an operation gives what lies along this axis to the same places of its output, whatever the numbers."""
    site = Site(graph, reader, layouts_in(graph, {**layouts, k: (layout,)}), is_batch)
    route, rank = op_of(graph.names[reader]).routing, len(graph.shape((k, 0)))
    straight = route is along_axes and site.rank == rank and site.own == layout
    return (route is class_loss or straight) and _keeps_apart(site)


def _keeps_apart(site: Site) -> bool:
    return op_of(site.graph.names[site.k]).routing(site) is Routing.NEVER
