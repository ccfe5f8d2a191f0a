"""Asking autograd which sample each element of a value belongs to.

What a value's gradient shows depends on the numbers: a saturated activation, a closed gate or a weight that starts at
zero lets nothing through, a NaN hides everything behind it. Layouts do not depend on them. Where the gradient itself
does not tell, a second probe passes such places: an element-wise operation hands its output's gradient on as it came,
a product by zero weights uses others. Nothing of that is ever part of a gradient that is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from clipwise.engine.chains import signed
from clipwise.engine.graph import LEAF, Graph, Node, differentiate
from clipwise.engine.layout import Layout, Probe, Scattered, all_finite, colours_of, owners_by_digits, rows_along
from clipwise.engine.routing import POINTWISE, kind_of

Gradients = tuple[Tensor | None, ...]
_FACTORS = {"Mm": (0, 1), "Bmm": (0, 1), "Addmm": (1, 2), "Baddbmm": (1, 2), "Linear": (0, None)}
_SOFTMAX = ("LogSoftmax", "SafeSoftmax", "Softmax")


class AutogradProber:
    """Back-propagates colours to the outputs of nodes."""

    def __init__(self, losses: Tensor, graph: Graph) -> None:
        self._losses, self._graph = losses, graph
        self._bad = ~torch.isfinite(losses)
        self._colours = colours_of(losses.shape[0], losses)

    def __call__(self, nodes: Sequence[int]) -> Mapping[int, Probe]:
        """The probes of the outputs of nodes."""
        plain = self._gradients(nodes, torch.ones_like(self._losses))
        coloured = zip(*(self._gradients(nodes, v) for v in self._colours), strict=True)
        return {k: Probe(p, c, self._colours, self._bad) for k, p, c in zip(nodes, plain, coloured, strict=True)}

    def passing(self, nodes: Sequence[int]) -> Mapping[int, Probe]:
        """The same, past everything that lets no gradient through."""
        with ExitStack() as stack:
            for node, name in zip(self._graph.nodes, self._graph.names, strict=True):
                if name != LEAF:
                    stack.callback(node.register_hook(_Passing(node, kind_of(name))).remove)
            return self(nodes)

    def _gradients(self, nodes: Sequence[int], cotangent: Tensor) -> list[Tensor]:
        edges = [self._graph.gradient_edge((k, 0)) for k in nodes]
        found = differentiate(self._losses, edges, cotangent, keep=True)
        shapes = [self._graph.shape((k, 0)) for k in nodes]
        return [self._losses.new_zeros(s) if g is None else g for g, s in zip(found, shapes, strict=True)]


class _Passing:
    """Called after a node's backward: gives its inputs a gradient where it gave zero or NaN."""

    def __init__(self, node: Node, kind: str) -> None:
        self._node, self._kind = node, kind

    def __call__(self, inputs: Gradients, outputs: Gradients) -> Gradients:
        arrived = outputs[0]
        if arrived is None or arrived.is_sparse or arrived.is_nested:
            return inputs
        pointwise = self._kind in POINTWISE
        result = []
        for position, gradient in enumerate(inputs):
            if gradient is None or gradient.is_sparse or not gradient.is_floating_point():
                result.append(gradient)
            elif pointwise:
                result.append(_pointwise(gradient, arrived))
            else:
                axes = self._axes(gradient, arrived) if position == 0 else None
                if axes is not None:
                    result.append(_alive(gradient, _spread(arrived, axes)))
                elif bool(gradient.any()) and all_finite(gradient):
                    result.append(gradient)
                else:
                    instead = self._other_weights(position, gradient, arrived)
                    result.append(gradient.nan_to_num(0, 0, 0) if instead is None else _alive(gradient, instead))
        return tuple(result)

    def _axes(self, gradient: Tensor, arrived: Tensor) -> list[int] | None:
        """The axes within which the node brings the elements of its input together; None where that is not known."""
        if gradient.shape != arrived.shape:
            return None
        if self._kind in _SOFTMAX:
            return [signed(self._node._saved_dim)]
        if self._kind == "NativeLayerNorm":
            return list(range(-len(self._node._saved_normalized_shape), 0))
        if self._kind == "NativeGroupNorm":
            return list(range(1, gradient.dim()))
        return [] if self._kind == "NativeBatchNorm" and not self._node._saved_training else None

    def _other_weights(self, position: int, gradient: Tensor, arrived: Tensor) -> Tensor | None:
        """The gradient of an input with other weights, where its own are all zero or not finite; None: not known."""
        if self._kind in _FACTORS and position in _FACTORS[self._kind]:
            return _times_random(arrived, gradient, left=position == _FACTORS[self._kind][0])
        if self._kind == "Convolution" and position == 0:
            return _convolved(self._node, gradient, arrived)
        return None


def _pointwise(gradient: Tensor, arrived: Tensor) -> Tensor:
    """The gradient of an element-wise operation's input, where it is of use, else the output's as it came."""
    try:
        instead = arrived.sum_to_size(gradient.shape)
    except RuntimeError:
        return gradient.nan_to_num(0, 0, 0)
    return _alive(gradient, instead)


def _alive(gradient: Tensor, instead: Tensor) -> Tensor:
    return torch.where((gradient != 0) & torch.isfinite(gradient), gradient, instead.to(gradient.dtype))


def _spread(arrived: Tensor, axes: Sequence[int]) -> Tensor:
    """What comes together along some axes comes together here too, so that samples which mix there still show."""
    if not axes:
        return arrived
    return arrived + (arrived * _random(arrived.shape, arrived)).sum(list(axes), keepdim=True)


def _random(shape: Sequence[int], like: Tensor) -> Tensor:
    """Numbers in [0.5, 1.5), the same at every call: colours must only scale."""
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(*shape, generator=generator) + 0.5).to(like)


def _times_random(arrived: Tensor, gradient: Tensor, left: bool) -> Tensor:
    if left:
        return arrived @ _random((*arrived.shape[:-2], arrived.shape[-1], gradient.shape[-1]), arrived)
    return _random((*arrived.shape[:-2], gradient.shape[-2], arrived.shape[-2]), arrived) @ arrived


def _convolved(node: Any, gradient: Tensor, arrived: Tensor) -> Tensor:
    weight = _random(node._saved_weight.shape, arrived)
    found, _, _ = torch.ops.aten.convolution_backward(
        arrived, gradient, weight, [0], node._saved_stride, node._saved_padding, node._saved_dilation,
        node._saved_transposed, node._saved_output_padding, node._saved_groups, [True, False, False],
    )  # fmt: skip
    return found  # type: ignore[no-any-return]


def layouts_of(probe: Probe, batch_size: int) -> tuple[Layout | Scattered, ...]:
    """All regular layouts that agree with a probe, or the axis along which every position is some sample's own."""
    if probe.blank:
        return ()
    regular = probe.layouts(batch_size)
    if regular:
        return regular
    axes = (axis for axis in range(probe.plain.dim()) if owners_by_digits(probe, axis) is not None)
    return tuple(Scattered(axis) for axis in islice(axes, 1))


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
    if owners[rows_along(probe.plain, axis).any(1)].unique().numel() == batch_size:
        return True
    spoilt = owners[~torch.isfinite(before.plain).movedim(axis, 0).reshape(len(owners), -1).all(1)]
    return bool(spoilt.numel()) and bool(probe.bad[spoilt].all())  # what is not finite lies with losses that are not
