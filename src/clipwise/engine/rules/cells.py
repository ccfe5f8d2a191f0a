"""Recurrent cells computed again from what a kernel saved: the one home of their arithmetic.

A fused kernel keeps its gates to itself. They follow from inputs and hidden states by one product over all times, and
the gradients of the gates by one pass back through time. A cell is known by torch's number for it. Its gates have two
shares: what enters (of the inputs) and what recurs (of the hidden states). They differ in a GRU, whose reset gate
multiplies the second alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from clipwise.engine.matrices import product

RELU, TANH, LSTM, GRU = range(4)  # torch's numbers

_sigmoid_backward, _tanh_backward = torch.ops.aten.sigmoid_backward, torch.ops.aten.tanh_backward

Pull = Callable[[Tensor], Tensor]  # the gradient of a row of gates -> that of the hidden state before


class GateGradients(NamedTuple):
    """Gradients, of times in the order in which they are read."""

    entering: Tensor  # of what enters the gates, (T, N, K H)
    recurring: Tensor  # of what recurs; the same but for a GRU
    hidden: Tensor  # of the first hidden state
    cell: Tensor | None  # of the first cell, if there are cells


class Times(ABC):
    """A cell at all times; what enters and what recurs are (T, N, K, H), states those before each time, (T, N, H).

    `alive`, (T, N, 1), tells when sequences of several lengths are read; else their states stay as they are.
    """

    @abstractmethod
    def back(self, arrived: Tensor, hidden: Tensor, cell: Tensor | None, pull: Pull) -> GateGradients:
        """One pass back through time, from the gradients of all outputs (T, N, H) and of the last states."""


def _where(alive: Tensor | None, tensor: Tensor, otherwise: float | Tensor = 0) -> Tensor:
    return tensor if alive is None else torch.where(alive, tensor, otherwise)


class LstmTimes(Times):
    """Input, forget, cell and output gate, before they are squashed. Their gradients are written over them, once."""

    def __init__(self, gates: Tensor, first: Tensor, alive: Tensor | None = None) -> None:
        candidate = gates[:, :, 2].contiguous().tanh_()
        into, kept = gates[:, :, :2].sigmoid_().unbind(2)
        into, kept, out = _where(alive, into), _where(alive, kept, 1), gates[:, :, 3].sigmoid_()
        cells = gates.new_empty(len(gates) + 1, *first.shape)
        cells[0] = first
        before, after = cells[:-1], cells[1:]
        for each in zip((into * candidate).unbind(), kept.unbind(), before.unbind(), after.unbind(), strict=True):
            torch.addcmul(*each[:3], out=each[3])
        squashed = after.tanh()
        out = _where(alive, out)
        self._room, self._kept, self._left = gates, kept, None if alive is None else (~alive).to(gates.dtype)
        self._of_cell = torch.empty_like(gates[:, :, :3])
        _sigmoid_backward(candidate, into, grad_input=self._of_cell[:, :, 0])
        _sigmoid_backward(before, kept, grad_input=self._of_cell[:, :, 1])
        _tanh_backward(into, candidate, grad_input=self._of_cell[:, :, 2])
        self._of_hidden, self._through = _sigmoid_backward(squashed, out), _tanh_backward(out, squashed)

    def back(self, arrived: Tensor, hidden: Tensor, cell: Tensor | None, pull: Pull) -> GateGradients:
        assert cell is not None
        found = self._room
        known = (self._through, self._of_cell, self._of_hidden, self._kept)
        each = [t.unbind()[::-1] for t in (found.flatten(2), found[:, :, :3], found[:, :, 3], arrived, *known)]
        unread = [None] * len(arrived) if self._left is None else self._left.unbind()[::-1]
        for row, three, last, here, onward, inner, outer, share, left in zip(*each, unread, strict=True):
            hidden = hidden + here
            cell = torch.addcmul(cell, hidden, onward)
            after = cell * share  # which may lie where the gradients go
            torch.mul(cell.unsqueeze(1), inner, out=three)
            torch.mul(hidden, outer, out=last)
            pulled = pull(row)
            hidden, cell = pulled if left is None else torch.addcmul(pulled, hidden, left), after
        gates = found.flatten(2)
        return GateGradients(gates, gates, hidden, cell)


def _through(arrived: Tensor, hidden: Tensor, pull: Pull, of_gates: Tensor, kept: Tensor | None) -> list[Tensor]:
    """The gradients of what recurs (T, N, K, H), of all outputs (T, N, H), and of the first hidden state.

    `of_gates` are the derivatives of an output by what recurs, `kept` the share of a state that is kept as it is.
    """
    found, whole = torch.empty_like(of_gates), torch.empty_like(arrived)
    for k in reversed(range(arrived.shape[0])):
        hidden = torch.add(hidden, arrived[k], out=whole[k])
        torch.mul(hidden.unsqueeze(1), of_gates[k], out=found[k])
        pulled = pull(found[k].flatten(1))
        hidden = pulled if kept is None else torch.addcmul(pulled, hidden, kept[k])
    return [found, whole, hidden]


class GruTimes(Times):
    """Reset, update and new gate; the reset gate multiplies what recurs in the new one."""

    def __init__(self, entering: Tensor, recurring: Tensor, states: Tensor, alive: Tensor | None = None) -> None:
        reset, update = (entering[:, :, :2] + recurring[:, :, :2]).sigmoid_().unbind(2)
        recurs = recurring[:, :, 2]
        new = torch.addcmul(entering[:, :, 2], reset, recurs).tanh_()
        update = _where(alive, update, 1)  # of which everything below follows
        self._of_new, self._kept = (1 - update) * (1 - new.square()), update
        self._of_gates = torch.stack(
            [
                self._of_new * recurs * reset * (1 - reset),
                (states - new) * update * (1 - update),
                self._of_new * reset,
            ],
            2,
        )

    def back(self, arrived: Tensor, hidden: Tensor, cell: Tensor | None, pull: Pull) -> GateGradients:
        recurring, whole, hidden = _through(arrived, hidden, pull, self._of_gates, self._kept)
        entering = recurring.clone()
        torch.mul(whole, self._of_new, out=entering[:, :, 2])
        return GateGradients(entering.flatten(2), recurring.flatten(2), hidden, None)


class PlainTimes(Times):
    """One gate, which is the next state; given are all outputs (T, N, H)."""

    def __init__(self, outputs: Tensor, rectified: bool, alive: Tensor | None = None) -> None:
        of_gate = (outputs > 0).to(outputs.dtype) if rectified else 1 - outputs.square()
        self._of_gate = _where(alive, of_gate).unsqueeze(2)
        self._left = None if alive is None else (~alive).to(outputs.dtype)

    def back(self, arrived: Tensor, hidden: Tensor, cell: Tensor | None, pull: Pull) -> GateGradients:
        found, _, hidden = _through(arrived, hidden, pull, self._of_gate, self._left)
        gates = found.flatten(2)
        return GateGradients(gates, gates, hidden, None)


def _next(
    mode: int, entering: Tensor, recurring: Tensor, hidden: Tensor, cell: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The states after one time, from both shares of its gates (N, K, H)."""
    if mode == LSTM:
        assert cell is not None
        gates = entering + recurring
        into, kept, _, out = gates.sigmoid().unbind(1)
        cell = kept * cell + into * gates[:, 2].tanh()
        return out * cell.tanh(), cell
    if mode == GRU:
        reset, update = (entering[:, :2] + recurring[:, :2]).sigmoid().unbind(1)
        new = torch.addcmul(entering[:, 2], reset, recurring[:, 2]).tanh()
        return torch.lerp(new, hidden, update), None
    gate = (entering + recurring).squeeze(1)
    return gate.tanh() if mode == TANH else gate.relu(), None


class Layer:
    """One direction of one layer, of whatever cells. Times (T, N, ...) are in the order in which it reads them."""

    def __init__(
        self,
        mode: int,
        weights: Sequence[Tensor],
        inputs: Tensor,
        first: tuple[Tensor, Tensor | None],
        outputs: Tensor | None = None,
        alive: Tensor | None = None,
    ) -> None:
        """The weights of inputs and of states, and both biases or none; outputs where they are known."""
        self._mode, self._first, self.inputs, self._alive = mode, first, inputs, alive
        self._weight, self._recurrent, *self._biases = weights
        self.outputs = self._run() if outputs is None else _where(alive, outputs, first[0])
        self.states = torch.cat([first[0].unsqueeze(0), self.outputs[:-1]])
        self._found: GateGradients | None = None

    def _share(self, rows: Tensor, weight: Tensor, bias: int) -> Tensor:
        """From (..., I) to (..., K, H)."""
        gates = F.linear(rows, weight, self._biases[bias] if self._biases else None)
        found: Tensor = gates.unflatten(-1, (-1, self._first[0].shape[-1]))
        return found

    def _gates(self) -> Tensor:
        """Both shares added."""
        read = torch.cat([self.inputs.flatten(0, 1), self.states.flatten(0, 1)], 1)
        gates = product(read, torch.cat([self._weight, self._recurrent], 1).t())
        if self._biases:
            gates += self._biases[0] + self._biases[1]
        return gates.view(*self.states.shape[:2], -1, self.states.shape[2])

    def _run(self) -> Tensor:
        hidden, cell = self._first
        outputs = []
        for time, entering in enumerate(self._share(self.inputs, self._weight, 0).unbind()):
            alive = None if self._alive is None else self._alive[time]
            after, inner = _next(self._mode, entering, self._share(hidden, self._recurrent, 1), hidden, cell)
            cell = None if cell is None or inner is None else _where(alive, inner, cell)
            hidden = _where(alive, after, hidden)
            outputs.append(hidden)
        return torch.stack(outputs)

    def _times(self) -> Times:
        if self._mode in (TANH, RELU):
            return PlainTimes(self.outputs, self._mode == RELU, self._alive)
        if self._mode == GRU:
            entering = self._share(self.inputs, self._weight, 0)
            return GruTimes(entering, self._share(self.states, self._recurrent, 1), self.states, self._alive)
        assert self._first[1] is not None
        return LstmTimes(self._gates(), self._first[1], self._alive)

    def gradients(self, arrived: Tensor, hidden: Tensor, cell: Tensor | None) -> GateGradients:
        """From the gradients of all outputs, (T, N, H), and of the last states; computed once."""
        if self._found is None:
            self._found = self._times().back(arrived, hidden, cell, lambda row: product(row, self._recurrent))
        return self._found

    def input_gradients(self) -> Tensor:
        """Those of the inputs, (T, N, I), after those of the gates."""
        assert self._found is not None
        entering = self._found.entering
        return product(entering.flatten(0, 1), self._weight).view(*entering.shape[:2], -1)
