"""Whose row is it? Read at every step where rows may move between samples by data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from clipwise.engine.grams import same_memory
from clipwise.engine.graph import NO_EDGE, Graph
from clipwise.engine.layout import Probe, Scattered, all_finite, owners_by_digits, peaks
from clipwise.engine.node import Node, Recurrence, output_meta, saved_floats, saved_or
from clipwise.engine.plan import GraphPlan
from clipwise.engine.probing import AutogradProber
from clipwise.engine.refusals import mixing

_UNKNOWN = -1


class StalePlan(Exception):
    """A cached plan does not fit this step's sizes; it is made again. Never leaves the engine."""


class Owners:
    """The samples of the rows of one step."""

    def __init__(self, losses: Tensor, graph: Graph, plan: GraphPlan) -> None:
        self.losses, self.graph, self.plan, self.batch_size = losses, graph, plan, losses.shape[0]
        self.gradients: dict[int, Tensor | None] = {}
        """Of the meetings, as they are: the backward pass to them need not run again."""

    def moved_rows(self) -> dict[int, Tensor]:
        """Rows may move between samples by data: read the owners of scattered ones, test every other layout."""
        probes = self._probes()
        owners: dict[int, Tensor] = {}
        known: dict[int, Tensor] = {}  # the same, of all meetings, as far as a gradient shows it
        for meeting in self.plan.meetings:
            if not meeting.layouts:
                continue
            probe, gradient = probes[meeting.node], probes[meeting.node].plain
            layout, shape = meeting.layouts[0], gradient.shape
            if isinstance(layout, Scattered):
                read = owners_by_digits(probe, layout.axis)
                if read is None:
                    raise StalePlan
                owners[meeting.node] = read
                arrived = peaks(gradient, layout.axis)[0] > 0
                known[meeting.node] = torch.where(arrived, read, _UNKNOWN)
                continue
            if not layout.fits(shape, self.batch_size):
                raise StalePlan
            expected = layout.owners(shape, self.batch_size)
            if not probe.agrees(expected, layout.axis):
                raise StalePlan
            known[meeting.node] = expected
        self._refuse_two_samples_in_one_loss(known)
        return owners

    def _probes(self) -> Mapping[int, Probe]:
        """Probes of all meetings; past what is not finite, which would hide whose it is."""
        prober, nodes = AutogradProber(self.losses, self.graph), [meeting.node for meeting in self.plan.meetings]
        gradients = prober.gradients(nodes)
        self.gradients.update(zip(nodes, gradients, strict=True))
        found = dict(prober.beside(nodes, gradients))
        spoilt = [k for k, probe in found.items() if self._hides_whose(k, probe)]
        if spoilt:
            found.update(prober.passing(spoilt))
        return found

    def _hides_whose(self, k: int, probe: Probe) -> bool:
        """Whether a node's gradient does not tell whose the numbers are that are not finite there."""
        node = self.graph.nodes[k]
        return not all_finite(probe.plain) or (probe.blank and not all(map(all_finite, saved_floats(node))))

    def _refuse_two_samples_in_one_loss(self, known: Mapping[int, Tensor]) -> None:
        """The same data met twice must belong to the same samples, else a loss is computed from two of them."""
        seen: list[tuple[Tensor, int, Tensor | None]] = []
        for node, owners, data in self._read(known):
            samples = owners[owners != _UNKNOWN].unique().numel()
            for before, its_samples, its_data in seen:
                fewest = min(samples, its_samples)
                whole = fewest == self.batch_size and not self.plan.indexed  # all samples, and nothing reordered them
                if before.shape != owners.shape or not (whole or _same(data, its_data, copies=fewest > 1)):
                    continue
                both = (before != _UNKNOWN) & (owners != _UNKNOWN)
                if bool((both & (before != owners)).any()):
                    name = self.graph.names[node]
                    raise mixing(self.graph, name, "the same data is read for two different samples")
            seen.append((owners, samples, data))

    def _read(self, known: Mapping[int, Tensor]) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """Whose rows of data each meeting reads, and the data. A folded layer reads its rows, and its first state."""
        for k, owners in known.items():
            node = self.graph.nodes[k]
            if k not in self.plan.data_meetings:
                continue
            if not isinstance(node, Recurrence):
                yield k, owners, _data_of(node)
                continue
            yield k, owners[: output_meta(node.products[0]).shape[0]], None
            if self.graph.edges[k][-1] == NO_EDGE:
                yield k, owners, _data_of(node.entry)


def _data_of(node: Node) -> Tensor | None:
    """The tensor of data that a node works on; None where its rows are all alike, which tell nothing of samples."""
    for name in ("self", "mat1", "input", "indices", "batch1"):
        tensor = saved_or(node, name, None)
        if isinstance(tensor, Tensor):
            return None if bool((tensor == tensor[:1]).all()) else tensor
    return None


def _same(a: Tensor | None, b: Tensor | None, copies: bool) -> bool:
    """Whether two nodes read the same rows; equal ones count as such, but not where each is a single sample's."""
    if a is None or b is None:
        return False
    return same_memory(a, b) or (copies and torch.equal(a, b))
