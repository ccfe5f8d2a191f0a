"""Recurrent layers in one node: what a fused kernel hides is computed again from what it saved (`cells.py`).

The kernel of the CPU is one direction of one layer of an LSTM. Those of a GPU are a whole stack of layers, or one cell
at one time. With the gradients of its gates a layer is a linear map with a row for every time. So is a layer over
packed sequences without a kernel, which is many nodes of torch, folded to one (`fold.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from clipwise.engine.grams import same_memory
from clipwise.engine.layout import Layout
from clipwise.engine.node import Node, output_meta, output_metas, saved, saved_or
from clipwise.engine.rules.base import Finish, Operand, Samples, carries_batch, unsupported
from clipwise.engine.rules.cells import LSTM, GateGradients, GruTimes, Layer, LstmTimes, Times
from clipwise.engine.uses import Dense, Outer, Use, accurate
from clipwise.errors import UnsupportedNode

_OF_INPUTS, _OF_STATES, _BIAS = range(3)  # of the weights of a layer, in their order; the bias of states is the last
_TIMES = "samples lie along the times of a recurrent layer (batch_first?)"


class Joined(Protocol):
    """Several outputs of a node that receive gradients, as one."""

    def join(self, node: Node, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """Their gradients as one; None where nothing reached any."""
        ...

    def layout(self, node: Node, joined: Layout, output: int) -> Layout | None:
        """The layout of one output, where it follows from that of all."""
        ...


class Pulled(Protocol):
    """The gradients of some inputs of a node, from those of its outputs."""

    positions: tuple[int, ...]  # negative ones count from the end

    def __call__(self, node: Node, samples: Samples, joined: Tensor) -> dict[int, Tensor]:
        """By position among the inputs of the node."""
        ...


def _filled(node: Node, gradients: Sequence[Tensor | None]) -> list[Tensor] | None:
    """The gradients of all outputs, zeros where nothing arrived; None where nothing reached any."""
    known = next((gradient for gradient in gradients if gradient is not None), None)
    if known is None:
        return None
    shapes = [torch.Size(meta.shape) for meta in output_metas(node)]
    return [known.new_zeros(s) if g is None else g for g, s in zip(gradients, shapes, strict=True)]


class States:
    """The outputs of a fused layer as one: (T, N, H) of all times, then the last hidden state and the last cell."""

    def join(self, node: Node, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """The gradients of all outputs, one below the other; None where nothing reached any."""
        parts = _filled(node, gradients)
        return None if parts is None else torch.cat([parts[0], *(part.unsqueeze(0) for part in parts[1:])])

    def layout(self, node: Node, joined: Layout, output: int) -> Layout | None:
        """The layout of one output; the states have no axis of times."""
        if output == 0 or joined.axis == 0:
            return joined if output == 0 else None
        return replace(joined, axis=joined.axis - 1)


STATES = States()


def is_packed(node: Node) -> bool:
    """Whether a stack of layers reads packed sequences: one row for every time of each, in an order of their own."""
    return bool(saved(node, "batch_sizes"))


def slots_axis(node: Node) -> int | None:
    """The axis of packed sequences, which have an order of their own; None where there are none."""
    return 1 if is_packed(node) else None


def batch_axis(node: Node) -> int:
    """Where a stack of layers has its samples; packed ones once their rows are taken apart."""
    return 0 if saved(node, "batch_first") and not is_packed(node) else 1


def _taken_apart(node: Node, rows: Tensor) -> Tensor:
    """(T, N, ...) of packed rows, zeros where a sequence has ended; others as they are."""
    if not is_packed(node):
        return rows
    sizes = torch.tensor(saved(node, "batch_sizes"), device="cpu")
    number = torch.arange(int(sizes[0]), device="cpu")
    place = torch.where(number < sizes.unsqueeze(1), (sizes.cumsum(0) - sizes).unsqueeze(1) + number, len(rows))
    return torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])[place.to(rows.device)]


class StackedStates:
    """The outputs of a stack of layers as one: (T D + L D + L D, N, H), those of the D directions among each other.

    Outputs of all times are followed by the last hidden states and the last cells of the L layers, if there are cells.
    With `batch_first` samples are on the first axis here too. Packed rows are taken apart.
    """

    def join(self, node: Node, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """The gradients of all outputs, one below the other; None where nothing reached any."""
        parts = _filled(node, gradients)
        if parts is None or saved_or(node, "proj_size", 0):
            return gradients[0]  # of such a node more is never asked: it has no rule
        outputs, *states = parts
        rows = _taken_apart(node, outputs).unflatten(-1, (1 + saved(node, "bidirectional"), -1))
        states = [state for state in states if state.dim() == 3]
        if batch_axis(node) == 0:
            return torch.cat([rows.flatten(1, 2), *(state.transpose(0, 1) for state in states)], 1)
        return torch.cat([rows.transpose(1, 2).flatten(0, 1), *states])

    def layout(self, node: Node, joined: Layout, output: int) -> Layout | None:
        """The layout of one output; states have their samples on the second axis. Packed ones are in no order."""
        if is_packed(node) or joined.axis != batch_axis(node):
            return None
        return joined if output == 0 else replace(joined, axis=1)


STACKED_STATES = StackedStates()


class CellStates:
    """The next hidden state and the next cell beside each other, (N, 2 H)."""

    def join(self, node: Node, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """Their gradients; None where nothing reached any."""
        parts = _filled(node, gradients)
        return None if parts is None else torch.cat(parts, 1)

    def layout(self, node: Node, joined: Layout, output: int) -> Layout | None:
        """Rows are the same."""
        return joined if joined.axis == 0 else None


CELL_STATES = CellStates()


class _Layers(Protocol):
    """The layers behind a fused node. Gradients are those of the first call, whatever is given later."""

    @property
    def first(self) -> tuple[Tensor | None, ...]:
        """What they read, and their first states, as the node saved them."""
        ...

    @property
    def layers(self) -> Sequence[Layer]:
        """One for each direction."""
        ...

    def gradients(self, joined: Tensor) -> Sequence[GateGradients]:
        """Those of the gates of every layer, from those of all outputs."""
        ...

    def input_gradients(self, joined: Tensor) -> tuple[Tensor | None, ...]:
        """Those of what they read, and of their first states."""
        ...


class _Single:
    """The kernel of the CPU."""

    def __init__(self, node: Node) -> None:
        self._turned: bool = saved(node, "reverse")
        weights = [accurate(saved(node, f"weight{k}")) for k in range(4 if saved(node, "has_biases") else 2)]
        self.first: tuple[Tensor, ...] = (saved(node, "input"), saved(node, "hx_"), saved(node, "cx_"))
        rows, hidden, cell = map(accurate, self.first)
        outputs = _turned(accurate(saved(node, "result0")), self._turned)
        self.layers = [Layer(LSTM, weights, _turned(rows, self._turned), (hidden, cell), outputs)]

    def gradients(self, joined: Tensor) -> Sequence[GateGradients]:
        """The last states lie below the outputs of all times."""
        arrived = _turned(accurate(joined[:-2]), self._turned)
        return [self.layers[0].gradients(arrived, accurate(joined[-2]), accurate(joined[-1]))]

    def input_gradients(self, joined: Tensor) -> tuple[Tensor | None, ...]:
        """(T, N, I), and those of the states."""
        (found,) = self.gradients(joined)
        return _turned(self.layers[0].input_gradients(), self._turned), found.hidden, found.cell


class _Stack:
    """The kernel of a GPU: all layers, each in one direction or in both. Only the outputs of the last were saved."""

    def __init__(self, node: Node) -> None:
        self._mode: int = saved(node, "mode")
        self._directions = 1 + saved(node, "bidirectional")
        self._batch_axis = batch_axis(node)
        self.first: tuple[Tensor | None, ...] = (saved(node, "input"), saved(node, "hx"), saved(node, "cx"))
        read = [_taken_apart(node, accurate(saved(node, name))) for name in ("input", "result0")]
        self._rows, self._outputs = map(self._times, read)
        ones = self._rows.new_ones(len(saved(node, "input")), 1)
        self._alive = _taken_apart(node, ones) > 0 if is_packed(node) else None
        self._hidden, self._cells = (None if state is None else accurate(state) for state in self.first[1:])
        weights, kinds = [accurate(weight) for weight in saved(node, "weight")], saved(node, "weight_stride0")
        self._weights = [weights[k : k + kinds] for k in range(0, len(weights), kinds)]
        self._found: list[GateGradients] = []

    def _times(self, rows: Tensor) -> Tensor:
        return rows.movedim(self._batch_axis, 1)

    @cached_property
    def layers(self) -> Sequence[Layer]:
        """Both directions of one layer, then those of the next; outputs of all but the last are computed again."""
        found: list[Layer] = []
        rows, known = self._rows, self._outputs.chunk(self._directions, -1)
        for number, weights in enumerate(self._weights):
            direction, left = number % self._directions, len(self._weights) - number
            if number and direction == 0:
                both = found[-self._directions :]
                rows = torch.cat([_turned(layer.outputs, bool(d)) for d, layer in enumerate(both)], -1)
            assert self._hidden is not None
            first = self._hidden[number], None if self._cells is None else self._cells[number]
            outputs = _turned(known[direction], bool(direction)) if left <= self._directions else None
            alive = None if self._alive is None else _turned(self._alive, bool(direction))
            found.append(Layer(self._mode, weights, _turned(rows, bool(direction)), first, outputs, alive))
        return found

    def gradients(self, joined: Tensor) -> Sequence[GateGradients]:
        """In the order of the layers, found from the last to the first."""
        if not self._found:
            self._found = self._back(self._times(accurate(joined)))
        return self._found

    def _back(self, rows: Tensor) -> list[GateGradients]:
        count, at = len(self._weights), self._rows.shape[0] * self._directions
        arrived = rows[:at].unflatten(0, (-1, self._directions)).unbind(1)
        found: list[GateGradients] = []
        for number in reversed(range(count)):
            direction = number % self._directions
            if found and direction == self._directions - 1:
                arrived = self._below(number + 1).chunk(self._directions, -1)
            cell = None if self._cells is None else rows[at + count + number]
            turned = _turned(arrived[direction], bool(direction))
            found.append(self.layers[number].gradients(turned, rows[at + number], cell))
        return found[::-1]

    def _below(self, number: int) -> Tensor:
        """The gradients of what all directions of a layer read, the number of whose first is given."""
        parts = [layer.input_gradients() for layer in self.layers[number : number + self._directions]]
        return parts[0] if len(parts) == 1 else parts[0] + _turned(parts[1], True)

    def input_gradients(self, joined: Tensor) -> tuple[Tensor | None, ...]:
        """Of what is read, and of the first states of all layers. Never asked of packed ones, which are no stops."""
        found = self.gradients(joined)
        cells = [each.cell for each in found if each.cell is not None]
        hidden = torch.stack([each.hidden for each in found])
        return self._below(0).movedim(1, self._batch_axis), hidden, torch.stack(cells) if cells else None


def _turned(times: Tensor, turned: bool) -> Tensor:
    return times.flip(0) if turned else times


def _layers(node: Node, samples: Samples) -> _Layers:
    kind = _Single if saved_or(node, "weight0", None) is not None else _Stack
    found: _Layers = samples.once("layers", lambda: kind(node))
    return found


class PulledStates:
    """The gradients of the inputs of fused layers, from those of their outputs."""

    positions: tuple[int, ...] = (0, -2, -1)  # what they read, and their first states

    def __call__(self, node: Node, samples: Samples, joined: Tensor) -> dict[int, Tensor]:
        """By position among the inputs of the node, from either end."""
        layers = _layers(node, samples)
        found = zip(self.positions, layers.first, layers.input_gradients(joined), strict=True)
        return {
            position: gradient.to(like.dtype)
            for position, like, gradient in found
            if like is not None and gradient is not None
        }


PULLED_STATES = PulledStates()


def _weight(operand: Operand, samples: Samples, number: int, kind: int) -> Finish:
    """Gates = W x_t + b + V h_(t-1) + d for every time t: the gradients of W, V, b and d from those of the gates."""
    layers = _layers(operand.node, samples)

    def rows(name: str, make: Callable[[], Tensor]) -> Tensor:
        """From (T, N, K) to (B, T * N / B, K)."""
        found: Tensor = samples.once(f"{name} {number}", lambda: samples.split(make(), 1).flatten(1, 2))
        return found

    def finish(gradient: Tensor) -> Use:
        found = layers.gradients(gradient)[number]
        if kind in (_OF_INPUTS, _BIAS) or found.recurring is found.entering:
            gates = rows("gates", lambda: found.entering)
        else:
            gates = rows("recurring gates", lambda: found.recurring)
        if kind >= _BIAS:
            return Dense(gates.sum(1), operand.shape)
        layer = layers.layers[number]
        if kind == _OF_INPUTS:
            return Outer(gates, rows("inputs", lambda: layer.inputs), operand.shape)
        return Outer(gates, rows("states", lambda: layer.states), operand.shape)

    return finish


def lstm(operand: Operand, samples: Samples) -> Finish:
    """One direction of one layer, of the CPU."""
    if samples.axis != 1:
        raise carries_batch(operand, _TIMES)
    if not 1 <= operand.position <= 4 or saved(operand.node, "mode") != LSTM:
        raise unsupported(operand, "only weights and biases of an LSTM have a rule in a fused layer")
    return _weight(operand, samples, 0, operand.position - 1)


_UNFUSED = "Run the forward pass unfused: `with torch.backends.cudnn.flags(enabled=False): ...`."


def hidden_inside(node: Node) -> str:
    """What a stack of layers does that cannot be computed again, and what to do; nothing where all can be."""
    if saved_or(node, "proj_size", 0):
        return f"is a fused recurrent kernel with projections (proj_size), for which there is no rule. {_UNFUSED}"
    if not saved(node, "train"):
        return (
            "is a fused recurrent kernel in evaluation mode, in which it has no backward pass. Call .train() on the "
            "recurrent layer (with dropout=0, if nothing should be dropped)."
        )
    if saved(node, "dropout") > 0 and saved(node, "num_layers") > 1:
        return (
            "is a fused recurrent kernel with dropout between its layers, and keeps to itself what it dropped. Take "
            f"dropout=0, or several recurrent layers with nn.Dropout between them. Or this: {_UNFUSED}"
        )
    return ""


def stack(operand: Operand, samples: Samples) -> Finish:
    """All layers and directions, of a GPU."""
    node = operand.node
    reason = hidden_inside(node)
    if reason:
        raise UnsupportedNode(f"{operand.name} {reason}")
    if samples.axis != batch_axis(node):
        raise carries_batch(operand, _TIMES)
    if not 1 <= operand.position <= len(saved(node, "weight")):
        raise unsupported(operand, "only weights and biases have a rule in a fused layer")
    number, kind = divmod(operand.position - 1, saved(node, "weight_stride0"))
    return _weight(operand, samples, number, kind)


# One cell at one time, of a GPU without those kernels: the biases meet the batch here, the weights in products.


def _cell(operand: Operand, samples: Samples, make: Callable[[], Times], has_cell: bool) -> Finish:
    if samples.axis != 0:
        raise carries_batch(operand, "samples lie along the columns of a recurrent cell")
    if operand.position not in (3, 4):
        raise unsupported(operand, "only the biases of a recurrent cell have a rule where it is fused")
    times: Times = samples.once("times", make)

    def back(gradient: Tensor) -> GateGradients:
        hidden, cell = gradient.chunk(2, 1) if has_cell else (gradient, None)
        zero = hidden.new_zeros(())  # nothing is pulled to a time before
        return times.back(hidden.unsqueeze(0), zero, cell, lambda row: zero)

    def finish(gradient: Tensor) -> Use:
        found: GateGradients = samples.once("found", lambda: back(accurate(gradient)))
        gates = found.entering if operand.position == 3 else found.recurring
        return Dense(samples.split(gates.squeeze(0)).sum(1), operand.shape)

    return finish


def _shares(node: Node) -> tuple[Tensor, Tensor]:
    """What enters the gates of a cell, and what recurs: (1, N, K, H)."""
    width = output_meta(node).shape[1]
    found = []
    for name in ("input", "hidden"):
        gates, bias = accurate(saved(node, f"{name}_gates")), saved(node, f"{name}_bias")
        found.append((gates if bias is None else gates + accurate(bias)).unflatten(1, (-1, width)).unsqueeze(0))
    return found[0], found[1]


def lstm_cell(operand: Operand, samples: Samples) -> Finish:
    """The biases of an LSTM."""
    node = operand.node
    return _cell(
        operand, samples, lambda: LstmTimes(torch.add(*_shares(node)), accurate(saved(node, "cx"))), has_cell=True
    )


def gru_cell(operand: Operand, samples: Samples) -> Finish:
    """The biases of a GRU."""
    node = operand.node
    return _cell(
        operand, samples, lambda: GruTimes(*_shares(node), accurate(saved(node, "hx")).unsqueeze(0)), has_cell=False
    )


# A layer over packed sequences without a kernel.


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

    def layout(self, node: Node, joined: Layout, output: int) -> Layout | None:
        """The values that leave the layer have other rows."""
        return None


PACKED_ROWS = PackedRows()


class PulledRows:
    """The gradients of the rows that a folded layer reads, from those of its products."""

    positions: tuple[int, ...] = (0,)

    def __call__(self, node: Node, samples: Samples, joined: Tensor) -> dict[int, Tensor]:
        """Those of the product of all rows that are read are on the right."""
        weight: Tensor = saved(node.entry, "mat2")
        return {0: joined[:, -weight.shape[1] :] @ weight.t()}


PULLED_ROWS = PulledRows()


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
