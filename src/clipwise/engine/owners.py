"""Whose row is it? Read at every step where rows may move between samples by data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from clipwise.engine.grams import same_memory
from clipwise.engine.graph import NO_EDGE, Graph
from clipwise.engine.layout import Layout, Probe, Scattered, all_finite, owners_by_digits, peaks
from clipwise.engine.leaps import UNKNOWN, Shown, Told
from clipwise.engine.node import Node, Recurrence, output_meta, saved_floats, saved_or
from clipwise.engine.plan import GraphPlan
from clipwise.engine.probing import AutogradProber
from clipwise.engine.suspects import mixing


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
        shown = self._shown()
        nobody = int((~torch.isfinite(self.losses)).to(torch.uint8).argmax())  # whose rows are that show nothing
        owners: dict[int, Tensor] = {}
        known: dict[int, Tensor] = {}  # the same, of all meetings, as far as a gradient shows it
        for meeting in self.plan.meetings:
            if not meeting.layouts:
                continue
            layout, found = meeting.layouts[0], shown[meeting.node]
            if not isinstance(layout, Scattered):
                known[meeting.node] = self._expected(layout, found)
                continue
            read = found.owners if isinstance(found, Told) else _read(found, layout.axis)
            known[meeting.node] = read
            owners[meeting.node] = torch.where(read == UNKNOWN, nobody, read)
        self._refuse_two_samples_in_one_loss(known)
        return owners

    def _expected(self, layout: Layout, shown: Probe | Told) -> Tensor:
        """The owners that a layout says, if no gradient contradicts."""
        shape = shown.plain.shape
        if not layout.fits(shape, self.batch_size):
            raise StalePlan
        expected = layout.owners(shape, self.batch_size)
        if isinstance(shown, Told):
            told = shown.owners.to(expected.device)
            arrived = (peaks(shown.plain, 0)[0] > 0).to(expected.device)
            agrees = layout.axis == 0 and bool((~arrived | (told == expected)).all())
        else:
            agrees = shown.agrees(expected, layout.axis)
        if not agrees:
            raise StalePlan
        return expected

    def _shown(self) -> Shown:
        """What all meetings show; past what is not finite, which would hide whose it is."""
        prober, nodes = AutogradProber(self.losses, self.graph), [meeting.node for meeting in self.plan.meetings]
        shown = None if self.plan.leaps is None else prober.leaping(nodes, self.plan.leaps)
        if shown is not None and not any(isinstance(s, Probe) and self._hides_whose(k, s) for k, s in shown.items()):
            self.gradients.update((k, found.plain) for k, found in shown.items())
            return shown
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
        for node, owners, data in self._data(known):
            samples = owners[owners != UNKNOWN].unique().numel()
            for before, its_samples, its_data in seen:
                fewest = min(samples, its_samples)
                whole = fewest == self.batch_size and not self.plan.indexed  # all samples, and nothing reordered them
                if before.shape != owners.shape or not (whole or _same(data, its_data, copies=fewest > 1)):
                    continue
                both = (before != UNKNOWN) & (owners != UNKNOWN)
                if bool((both & (before != owners)).any()):
                    name = self.graph.names[node]
                    raise mixing(self.graph, name, "the same data is read for two different samples")
            seen.append((owners, samples, data))

    def _data(self, known: Mapping[int, Tensor]) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """Whose rows of data each meeting reads, and the data. A folded layer reads its rows, and its first state."""
        for k, owners in known.items():
            node = self.graph.nodes[k]
            if k not in self.plan.data_meetings:
                continue
            if not isinstance(node, Recurrence):
                yield k, owners, _data_of(node)
                continue
            yield k, owners[: output_meta(node.products[0]).shape[0]], None
            if self.graph.edges[k][0] == NO_EDGE:
                yield k, owners, _data_of(node.entry)


def _read(probe: Probe, axis: int) -> Tensor:
    """The owners of scattered rows, as far as a gradient shows them."""
    owners = owners_by_digits(probe, axis)
    if owners is None:
        raise StalePlan
    return torch.where(peaks(probe.plain, axis)[0] > 0, owners, UNKNOWN)


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
