"""A layer of an LSTM in one fused node: what the kernel hides is computed again from what it saved.

The kernel keeps its gates to itself. They follow from the inputs and the hidden states by one product over all times,
and the gradients of the gates by one more pass through time. From then on it is a linear map with a row for every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from clipwise.engine.grams import same_memory
from clipwise.engine.layout import Layout
from clipwise.engine.node import Node, output_meta, output_metas, saved
from clipwise.engine.rules.base import Finish, Operand, Samples, carries_batch, unsupported
from clipwise.engine.uses import Dense, Outer, Use, accurate

_LSTM = 2  # torch's number for this kind of cell
_WEIGHTS, _INPUT_WEIGHT, _BIASES = (1, 2, 3, 4), 1, (3, 4)  # positions among the inputs of the node


class Joined(Protocol):
    """Several outputs of a node that receive gradients, as one."""

    def join(self, node: Node, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """Their gradients as one; None where nothing reached any."""
        ...

    def layout(self, joined: Layout, output: int) -> Layout | None:
        """The layout of one output, where it follows from that of all."""
        ...


class States:
    """The outputs of a fused layer as one: (T, N, H) of all times, then the last hidden state and the last cell."""

    def join(self, node: Node, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """The gradients of all outputs, one below the other; None where nothing reached any."""
        known = next((gradient for gradient in gradients if gradient is not None), None)
        if known is None:
            return None
        shapes = [torch.Size(meta.shape) for meta in output_metas(node)]
        parts = [known.new_zeros(s) if g is None else g for g, s in zip(gradients, shapes, strict=True)]
        return torch.cat([parts[0], *(part.unsqueeze(0) for part in parts[1:])])

    def layout(self, joined: Layout, output: int) -> Layout | None:
        """The layout of one output; the states have no axis of times."""
        if output == 0 or joined.axis == 0:
            return joined if output == 0 else None
        return replace(joined, axis=joined.axis - 1)


STATES = States()


class PackedRows:
    """The products of all times of a folded layer, one below the other, and beside them the rows that it reads."""

    def join(self, node: Node, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """The gradients of all rows; None where nothing reached any. Where both sides are the same, one of them."""
        known = next((gradient for gradient in gradients if gradient is not None), None)
        if known is None:
            return None
        shapes = [torch.Size(output_meta(product).shape) for product in node.products] * 2
        parts = [known.new_zeros(s) if g is None else g for g, s in zip(gradients, shapes, strict=True)]
        states, read = parts[: len(node.products)], parts[len(node.products) :]
        rows = torch.cat(states)
        same = all(same_memory(a, b) for a, b in zip(states, read, strict=True))
        return rows if same else torch.cat([rows, torch.cat(read)], 1)

    def layout(self, joined: Layout, output: int) -> Layout | None:
        """The values that leave the layer have other rows."""
        return None


PACKED_ROWS = PackedRows()


class _Layer:
    """One direction of one layer, in the order in which it reads the times."""

    def __init__(self, node: Node) -> None:
        self._turned = saved(node, "reverse")
        self.inputs = self._in_order(accurate(saved(node, "input")))
        outputs = self._in_order(accurate(saved(node, "result0")))
        first = accurate(saved(node, "hx_")).unsqueeze(0)
        self.states = torch.cat([first, outputs[:-1]])
        self._found: tuple[Tensor, Tensor, Tensor] | None = None
        self._first_cell = accurate(saved(node, "cx_"))
        self._weights = [accurate(saved(node, f"weight{k}")) for k in range(4 if saved(node, "has_biases") else 2)]

    def _in_order(self, times: Tensor) -> Tensor:
        return times.flip(0) if self._turned else times

    def _gates(self) -> Tensor:
        """Input, forget, cell and output gate of every time, before they are squashed: (T, N, 4, H)."""
        weight, recurrent, *biases = self._weights
        rows = self.inputs.flatten(0, 1)
        gates = torch.addmm(biases[0] + biases[1], rows, weight.T) if biases else rows @ weight.T
        gates.addmm_(self.states.flatten(0, 1), recurrent.T)
        return gates.view(*self.inputs.shape[:2], 4, -1)

    def gate_gradients(self, joined: Tensor) -> Tensor:
        """The gradients of the gates, (T, N, 4 H), from those of all outputs."""
        return self._gradients(joined)[0]

    def input_gradients(self, joined: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of the inputs, (T, N, I), of the first hidden state and of the first cell."""
        gates, hidden, cell = self._gradients(joined)
        return self._in_order(gates @ self._weights[0]), hidden, cell

    def _gradients(self, joined: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Those of the gates, in the order in which times are read, and of both first states; computed once."""
        if self._found is None:
            self._found = self._through_time(joined)
        return self._found

    def _through_time(self, joined: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        times = self.inputs.shape[0]
        arrived, hidden, cell = self._in_order(accurate(joined[:times])), accurate(joined[-2]), accurate(joined[-1])
        gates = self._gates()
        candidate = gates[:, :, 2].tanh()
        opened = gates.sigmoid_()  # the third is not looked at
        into, kept, out = opened[:, :, 0], opened[:, :, 1], opened[:, :, 3]
        cells = [self._first_cell]
        for added, share in zip((into * candidate).unbind(), kept.unbind(), strict=True):
            cells.append(torch.addcmul(added, share, cells[-1]))
        before, squashed = torch.stack(cells[:-1]), torch.stack(cells[1:]).tanh_()
        of_cell = torch.stack(
            [candidate * into * (1 - into), before * kept * (1 - kept), into * (1 - candidate.square())], 2
        )
        of_hidden, through = squashed * out * (1 - out), out * (1 - squashed.square())
        found, recurrent = torch.empty_like(gates), self._weights[1]
        each = (found.flatten(2), found[:, :, :3], found[:, :, 3], arrived, through, of_cell, of_hidden, kept)
        for row, three, last, here, onward, inner, outer, share in zip(*(t.unbind()[::-1] for t in each), strict=True):
            hidden = hidden + here
            cell = torch.addcmul(cell, hidden, onward)
            torch.mul(cell.unsqueeze(1), inner, out=three)
            torch.mul(hidden, outer, out=last)
            hidden, cell = row @ recurrent, cell * share
        return found.flatten(2), hidden, cell


class Pulled(Protocol):
    """The gradients of some inputs of a node, from those of its outputs."""

    positions: tuple[int, ...]

    def __call__(self, node: Node, samples: Samples, joined: Tensor) -> dict[int, Tensor]:
        """By position among the inputs of the node."""
        ...


class PulledStates:
    """The gradients of the inputs of a fused layer, from those of its outputs."""

    positions: tuple[int, ...] = (0, 5, 6)  # what it reads, and its first states

    def __call__(self, node: Node, samples: Samples, joined: Tensor) -> dict[int, Tensor]:
        """By position among the inputs of the node."""
        found = _layer(node, samples).input_gradients(joined)
        names = ("input", "hx_", "cx_")
        return {
            position: gradient.to(saved(node, name).dtype)
            for position, name, gradient in zip(self.positions, names, found, strict=True)
        }


PULLED_STATES = PulledStates()


class PulledRows:
    """The gradients of the rows that a folded layer reads, from those of its products."""

    positions: tuple[int, ...] = (0,)

    def __call__(self, node: Node, samples: Samples, joined: Tensor) -> dict[int, Tensor]:
        """Those of the product of all rows that are read are on the right."""
        weight: Tensor = saved(node.entry, "mat2")
        return {0: joined[:, -weight.shape[1] :] @ weight.t()}


PULLED_ROWS = PulledRows()


def _layer(node: Node, samples: Samples) -> _Layer:
    found: _Layer = samples.once("layer", lambda: _Layer(node))
    return found


def lstm(operand: Operand, samples: Samples) -> Finish:
    """Gates = W x_t + b + V h_(t-1) + d for every time t: the gradients of W, V, b and d from those of the gates."""
    if samples.axis != 1:
        raise carries_batch(operand, "samples lie along the times of a recurrent layer (batch_first?)")
    if operand.position not in _WEIGHTS or saved(operand.node, "mode") != _LSTM:
        raise unsupported(operand, "only weights and biases of an LSTM have a rule in a fused layer")
    layer = _layer(operand.node, samples)

    def rows(name: str, make: Callable[[], Tensor]) -> Tensor:
        """From (T, N, K) to (B, T * N / B, K)."""
        found: Tensor = samples.once(name, lambda: samples.split(make(), 1).flatten(1, 2))
        return found

    def finish(gradient: Tensor) -> Use:
        gates = rows("gates", lambda: layer.gate_gradients(gradient))
        if operand.position in _BIASES:
            return Dense(gates.sum(1), operand.shape)
        if operand.position == _INPUT_WEIGHT:
            return Outer(gates, rows("inputs", lambda: layer.inputs), operand.shape)
        return Outer(gates, rows("states", lambda: layer.states), operand.shape)

    return finish


def steps(operand: Operand, samples: Samples) -> Finish:
    """Z_t = H_t V^T + d and Y = X W^T + b, of which Y_t is read at time t: products with the rows of all times."""
    node, position = operand.node, operand.position
    kinds = 2 if len(operand.graph.edges[operand.k]) == 5 else 1  # bias and weight, or weight
    if samples.axis != 0:
        raise carries_batch(operand, "samples lie along the columns of a product of rows")
    if position == 0:
        raise unsupported(operand, "only weights and biases of a recurrent layer over packed sequences have a rule")
    of_entry, of_weight = position > kinds, position % kinds == 0
    width, name = output_meta(node).shape[1], "mat1" if kinds == 2 else "self"

    def rows() -> Tensor:
        products = [node.entry] if of_entry else node.products
        return samples.split(torch.cat([accurate(saved(product, name)) for product in products]))

    read = rows() if of_weight else None

    def finish(gradient: Tensor) -> Use:
        left: Tensor = samples.once("left", lambda: samples.split(accurate(gradient)))
        if left.shape[-1] > width:
            left = left[..., width:] if of_entry else left[..., :width]
        if read is None:
            return Dense(left.sum(1), operand.shape)
        return Outer(left, read, operand.shape)

    return finish
