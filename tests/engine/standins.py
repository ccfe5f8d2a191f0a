"""Kernels of a GPU, played by the CPU: the nodes on the graph are torch's own, what computes behind them is not.

Autograd's nodes do not depend on a device. With a kernel for the CPU, `aten::_cudnn_rnn` and its relatives make the
very nodes that they make on a GPU, with everything that these save. The stack of layers is torch's own `lstm`, `gru`,
`rnn_tanh` and `rnn_relu`. The cells are written down as the kernels of a GPU have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

RELU, TANH, LSTM, GRU = range(4)
aten = torch.ops.aten


def _mode_of(layer: nn.RNNBase) -> int:
    return {"RNN_RELU": RELU, "RNN_TANH": TANH, "LSTM": LSTM, "GRU": GRU}[layer.mode]


def weights_of(layer: nn.RNNBase) -> list[Tensor]:
    """In the order in which torch gives them to a kernel."""
    return [weight for weights in layer.all_weights for weight in weights]


class Stacked(nn.Module):
    """A recurrent layer as it runs on a GPU: one node for all layers, directions and times."""

    def __init__(self, layer: nn.RNNBase, kernel: str = "_cudnn_rnn") -> None:
        super().__init__()
        self.layer, self.kernel = layer, kernel
        self.flat: Tensor | None = None

    def flatten(self) -> Stacked:
        """All weights in one piece of memory, as `flatten_parameters` puts them."""
        weights = weights_of(self.layer)
        self.flat = torch.cat([weight.detach().flatten() for weight in weights])
        at = 0
        for weight in weights:
            weight.data = self.flat[at : at + weight.numel()].view_as(weight)
            at += weight.numel()
        return self

    def forward(
        self, x: Tensor, states: tuple[Tensor, ...] | None = None, lengths: Sequence[int] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        layer, mode = self.layer, _mode_of(self.layer)
        if states is None:
            samples = lengths[0] if lengths else x.shape[0 if layer.batch_first else 1]
            shape = layer.num_layers * (1 + layer.bidirectional), samples
            widths = [layer.proj_size or layer.hidden_size, layer.hidden_size]
            states = tuple(x.new_zeros(*shape, width) for width in widths[: 1 + (mode == LSTM)])
        hidden, cell = states if mode == LSTM else (states[0], None)
        stride, size = len(layer.all_weights[0]), layer.hidden_size
        more: list[Any] = [layer.num_layers, layer.batch_first, layer.dropout, layer.training, layer.bidirectional]
        more += [list(lengths), None]
        weights = weights_of(layer)
        if self.kernel == "_cudnn_rnn":
            found = aten._cudnn_rnn(x, weights, stride, self.flat, hidden, cell, mode, size, layer.proj_size, *more)
        else:
            found = aten.miopen_rnn(x, weights, stride, hidden, cell, mode, size, *more)
        return found[0], tuple(found[1 : 3 if mode == LSTM else 2])


class Unrolled(nn.Module):
    """A recurrent layer of one direction as it runs on a GPU without cuDNN: two products and a cell for every time."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(N, T, I) -> (N, T, H), and the last states."""
        weight, recurrent, *biases = weights_of(self.layer)
        hidden = cell = x.new_zeros(len(x), self.layer.hidden_size)
        outputs = []
        for row in x.unbind(1):
            gates = row @ weight.t(), hidden @ recurrent.t()
            if _mode_of(self.layer) == LSTM:
                hidden, cell, _ = aten._thnn_fused_lstm_cell(*gates, cell, *biases)
            else:
                hidden, _ = aten._thnn_fused_gru_cell(*gates, hidden, *biases)
            outputs.append(hidden)
        return torch.stack(outputs, 1), (hidden, cell)


# The stack of layers.


def _run(mode: int, x: Tensor, lengths: Sequence[int], states: list[Tensor], weights: list[Tensor], rest: Any) -> Any:
    """torch's own layers. `rest`: has biases, layers, dropout, train, bidirectional, batch first."""
    run = {RELU: torch.rnn_relu, TANH: torch.rnn_tanh, LSTM: torch.lstm, GRU: torch.gru}[mode]
    given = states if mode == LSTM else states[0]
    with torch.backends.mkldnn.flags(enabled=False):  # type: ignore[no-untyped-call]
        if lengths:
            return run(x, torch.tensor(lengths), given, weights, *rest[:-1])
        return run(x, given, weights, *rest)


class _Stack:
    """What one call of the kernel was given."""

    def __init__(self, x: Tensor, weights: Sequence[Tensor], stride: int, states: Sequence[Tensor | None], rest: Any):
        mode, _, layers, batch_first, dropout, train, bidirectional, lengths, _ = rest
        self.inputs = [x, *(state for state in states if state is not None), *weights]
        self.mode, self.states, self.train, self.lengths = mode, 1 + (mode == LSTM), train, lengths
        self.rest = (stride in (4, 5), layers, dropout, train, bidirectional, batch_first)

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        torch.manual_seed(0)  # what is dropped
        at = 1 + self.states
        return list(_run(self.mode, inputs[0], self.lengths, inputs[1:at], inputs[at:], self.rest))

    def forward(self, flat: Tensor | None) -> tuple[Tensor, ...]:
        assert all(state.is_contiguous() for state in self.inputs[1 : 1 + self.states])
        output, *states = self.run(self.inputs)
        states += [output.new_empty(0)] * (2 - len(states))
        reserve = torch.zeros(output.numel() * output.itemsize, dtype=torch.uint8)
        weights = self.inputs[1 + self.states :]
        return output, *states, reserve, torch.cat([w.flatten() for w in weights]) if flat is None else flat

    def backward(self, arrived: Sequence[Tensor | None]) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        if not self.train:
            raise RuntimeError("cudnn RNN backward can only be called in training mode")
        with recorded():
            leaves = [tensor.detach().requires_grad_() for tensor in self.inputs]
            outputs = self.run(leaves)
            pairs = [(o, g) for o, g in zip(outputs, arrived, strict=False) if g is not None]
            if pairs:
                ends, given = zip(*pairs, strict=True)
                found = list(torch.autograd.grad(ends, leaves, given, materialize_grads=True))
            else:
                found = [torch.zeros_like(leaf) for leaf in leaves]
        cell = found[2] if self.states == 2 else found[1].new_empty(0)
        return found[0], found[1], cell, found[1 + self.states :]


@contextmanager
def recorded() -> Iterator[None]:
    """Autograd inside a kernel, where it is off."""
    nothing = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, nothing), torch.enable_grad():
        yield


def _cudnn(x: Any, weights: Any, stride: Any, flat: Any, hidden: Any, cell: Any, mode: Any, size: Any, projected: Any,
           *rest: Any) -> Any:  # fmt: skip
    return _Stack(x, weights, stride, (hidden, cell), (mode, size, *rest)).forward(flat)


def _cudnn_backward(x: Any, weights: Any, stride: Any, flat: Any, hidden: Any, cell: Any, output: Any, of_output: Any,
                    of_hidden: Any, of_cell: Any, mode: Any, size: Any, projected: Any, *rest: Any) -> Any:  # fmt: skip
    called = _Stack(x, weights, stride, (hidden, cell), (mode, size, *rest[:-2]))
    return called.backward((of_output, of_hidden, of_cell))


def _miopen(x: Any, weights: Any, stride: Any, hidden: Any, cell: Any, *rest: Any) -> Any:
    return _Stack(x, weights, stride, (hidden, cell), rest).forward(None)


def _miopen_backward(x: Any, weights: Any, stride: Any, flat: Any, hidden: Any, cell: Any, output: Any, of_output: Any,
                     of_hidden: Any, of_cell: Any, *rest: Any) -> Any:  # fmt: skip
    return _Stack(x, weights, stride, (hidden, cell), rest[:-2]).backward((of_output, of_hidden, of_cell))


# The cells.


def _with_bias(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


def _lstm_cell(entering: Any, recurring: Any, cell: Any, bias: Any = None, other: Any = None) -> Any:
    gates = _with_bias(entering, bias) + _with_bias(recurring, other)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    after = f * cell + i * g
    return o * after.tanh(), after, torch.cat([i, f, g, o], 1)


def _lstm_cell_backward(of_hidden: Any, of_cell: Any, cell: Any, after: Any, gates: Any, has_bias: bool) -> Any:
    i, f, g, o = gates.chunk(4, 1)
    of_hidden = torch.zeros_like(cell) if of_hidden is None else of_hidden
    squashed = after.tanh()
    inner = of_hidden * o * (1 - squashed**2) + (0 if of_cell is None else of_cell)
    of_i, of_f, of_g = inner * g * i * (1 - i), inner * cell * f * (1 - f), inner * i * (1 - g**2)
    found = torch.cat([of_i, of_f, of_g, of_hidden * squashed * o * (1 - o)], 1)
    return found, inner * f, found.sum(0) if has_bias else found.new_empty(0)


def _gru_cell(entering: Any, recurring: Any, hidden: Any, bias: Any = None, other: Any = None) -> Any:
    entering, recurring = _with_bias(entering, bias).chunk(3, 1), _with_bias(recurring, other).chunk(3, 1)
    r, z = (entering[0] + recurring[0]).sigmoid(), (entering[1] + recurring[1]).sigmoid()
    n = (entering[2] + r * recurring[2]).tanh()
    return (1 - z) * n + z * hidden, torch.cat([r, z, n, hidden, recurring[2]], 1)


def _gru_cell_backward(of_hidden: Any, workspace: Any, has_bias: bool) -> Any:
    r, z, n, hidden, recurs = workspace.chunk(5, 1)
    of_n = of_hidden * (1 - z) * (1 - n**2)
    of_r, of_z = of_n * recurs * r * (1 - r), of_hidden * (hidden - n) * z * (1 - z)
    entering, recurring = torch.cat([of_r, of_z, of_n], 1), torch.cat([of_r, of_z, of_n * r], 1)
    nothing = of_hidden.new_empty(0)
    biases = (entering.sum(0), recurring.sum(0)) if has_bias else (nothing, nothing)
    return entering, recurring, of_hidden * z, *biases


KERNELS: dict[str, Callable[..., Any]] = {
    "_cudnn_rnn": _cudnn,
    "_cudnn_rnn_backward": _cudnn_backward,
    "miopen_rnn": _miopen,
    "miopen_rnn_backward": _miopen_backward,
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}


def _looked_up(name: str) -> Callable[..., Any]:
    return lambda *given: KERNELS[name](*given)


@contextmanager
def standing_in() -> Iterator[None]:
    """Kernels for the CPU: those of the table, at every call."""
    library = torch.library.Library("aten", "IMPL", "CPU")
    try:
        for name in KERNELS:
            library.impl(name, _looked_up(name))
        yield
    finally:
        library._destroy()
