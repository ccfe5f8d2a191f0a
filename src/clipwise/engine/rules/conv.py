"""Convolutions in one to three dimensions, strided, dilated, grouped, transposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from clipwise.engine.grams import Doubts, Gram, doubt_cancelled, ghost_norms
from clipwise.engine.graph import NO_EDGE
from clipwise.engine.node import Node, saved
from clipwise.engine.rules.base import Finish, Operand, Samples, carries_batch
from clipwise.engine.uses import Dense, Outer, Pieces, Use, accurate, per_sample, squares

_INPUT, _WEIGHT, _BIAS = 0, 1, 2
_PIXELS = 1 << 18  # numbers that are squared at once
_LARGE_WEIGHT = 150_000  # elements beyond which a grouped convolution is slower than products of patches
_GRAM_ELEMENTS = 1 << 22  # inner products of pixels that are held at once
_KEPT = 3  # gradients are kept for the sum, rather than formed again, up to this many times what they replace


def usual_strides(tensor: Tensor) -> Tensor:
    """Those of axes of length one may be any, and torch takes such an image for one with its channels last."""
    return tensor.view(-1).view(tensor.shape) if tensor.is_contiguous() else tensor


@dataclass(frozen=True)
class Geometry:
    """The fixed numbers of a convolution."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @classmethod
    def of(cls, node: Node) -> Geometry:
        """Those of a node."""
        stride, padding, dilation, output_padding = (
            tuple(saved(node, name)) for name in ("stride", "padding", "dilation", "output_padding")
        )
        return cls(stride, padding, dilation, saved(node, "transposed"), output_padding, saved(node, "groups"))

    def input_gradient(self, gradient: Tensor, like: Tensor, weight: Tensor) -> Tensor:
        """torch's own input gradient of this convolution, for an input like the given one."""
        return self._backward(0, gradient, like, weight, self.groups)

    def weight_gradient(self, gradient: Tensor, inputs: Tensor, shape: Sequence[int], groups: int) -> Tensor:
        """torch's own weight gradient of this convolution, for a weight of the given shape."""
        gradient, inputs = usual_strides(gradient), usual_strides(inputs)
        return self._backward(1, gradient, inputs, inputs.new_empty(1).expand(*shape), groups)

    def _backward(self, wanted: int, gradient: Tensor, inputs: Tensor, weight: Tensor, groups: int) -> Tensor:
        found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            gradient, inputs, weight, [0], self.stride, self.padding, self.dilation, self.transposed,
            self.output_padding, groups, [wanted == 0, wanted == 1, False],
        )  # fmt: skip
        return found[wanted]


class Convolved(Use):
    """A convolution's weight gradient; `inputs` and `outputs` are (B, t, channels, *space), t images per sample."""

    def __init__(self, inputs: Tensor, outputs: Tensor, shape: Sequence[int], geometry: Geometry) -> None:
        self.inputs, self.outputs = accurate(inputs), accurate(outputs)
        self.shape = tuple(shape)
        self.geometry = geometry
        self.batch_size = inputs.shape[0]

    @property
    def how(self) -> str:
        """From Gram matrices, or from gradients."""
        if not self._as_products:
            return "instantiated"
        return "ghost" if self._pixels_suffice else self._products().how

    @property
    def _as_products(self) -> bool:
        """Whether the gradient is better seen as a product of patches and outputs than as a convolution.

        A large weight makes torch's grouped kernel slow; few positions make Gram matrices small.
        """
        geometry = self.geometry
        plain = not geometry.transposed and geometry.groups == 1 and len(self.shape) == 4
        return plain and self.inputs.shape[1] == 1 and prod(self.shape) > _LARGE_WEIGHT

    def squared_norms(self, doubts: Doubts | None = None) -> Tensor:
        if self._as_products:
            return self._ghost(doubts) if self._pixels_suffice else self._products().squared_norms(doubts)
        squared = torch.cat([squares(self.gradients(chunk)) for chunk in self._chunks()])
        return doubt_cancelled(squared, self.terms(), self.precise_norms, doubts)

    def terms(self) -> Tensor:
        """From the lengths of pixels on one side and of the patches that they meet on the other."""
        geometry, groups = self.geometry, self.geometry.groups
        once, often = (self.inputs, self.outputs) if geometry.transposed else (self.outputs, self.inputs)
        pixels, seen = (_squared_pixels(tensor.flatten(0, 1), groups) for tensor in (once, often))
        fixed = (False, (0,) * len(geometry.stride), groups)
        kernel = seen.new_ones(1).expand(groups, 1, *self.shape[2:])
        patches = torch.convolution(seen, kernel, None, geometry.stride, geometry.padding, geometry.dilation, *fixed)
        return (pixels * patches.clamp_(min=0)).sqrt_().view(self.batch_size, -1).sum(1)

    def lasting(self) -> Use:
        held = self.inputs.numel() + self.outputs.numel()
        if self._as_products or self.batch_size * prod(self.shape) > _KEPT * held:
            return self
        return Pieces([Dense(self.gradients(chunk), self.shape) for chunk in self._chunks()])

    @property
    def _pixels_suffice(self) -> bool:
        """Whether inner products of patches, built from those of pixels, cost less than the gradients."""
        pixels, outputs = self.inputs.shape[3:].numel(), self.outputs.shape[3:].numel()
        passes = 24  # over the matrices of inner products, in units of a channel's arithmetic
        channels = self.shape[0] + self.shape[1] + passes
        return self.geometry.stride == (1, 1) and max(pixels, outputs) * channels <= prod(self.shape)

    def _ghost(self, doubts: Doubts | None = None) -> Tensor:
        size = max(1, _GRAM_ELEMENTS // self.inputs.shape[3:].numel() ** 2)
        if size >= self.batch_size:
            return self._ghost_of(slice(None), doubts)
        found, careful = list[Tensor](), torch.zeros(self.batch_size, dtype=torch.bool, device=self.inputs.device)
        for start in range(0, self.batch_size, size):
            own, samples = Doubts(at_once=True), slice(start, start + size)
            own.whose = (NO_EDGE,)
            found.append(self._ghost_of(samples, own))
            careful[samples] = own.careful.get(NO_EDGE, False)
        if doubts is not None and bool(careful.any()):
            doubts.note(careful)
        return torch.cat(found)

    def _ghost_of(self, samples: slice, doubts: Doubts | None = None) -> Tensor:
        pixels, outputs = self.inputs[samples, 0], self.outputs[samples, 0]

        def grams(pixels: Tensor, outputs: Tensor) -> tuple[Gram, Gram]:
            flat = outputs.flatten(2)
            patches = gram_of_patches(pixels, self.shape[2:], self.geometry, outputs.shape[2:])
            return Gram((patches,)), Gram((flat.mT @ flat,))

        return ghost_norms(
            lambda: grams(pixels, outputs), lambda some: grams(pixels[some].double(), outputs[some].double()), doubts
        )

    def _chunks(self) -> list[slice]:
        size = self._chunk
        return [slice(start, start + size) for start in range(0, self.batch_size, size)]

    @property
    def _chunk(self) -> int:
        """Samples whose gradients torch's grouped kernel forms in one call without running out of cache.

        A power of two: cores share an odd number of groups unevenly, and fewer of them would be left for the last call.
        """
        most = max(1, min(self.batch_size, (1 << 20) // prod(self.shape)))
        return 1 << (most.bit_length() - 1)

    def _products(self) -> Outer:
        """Patches (B, T, k*k*C) in channels-last order: the copy moves runs of k*C numbers."""
        (ky, kx), geometry = self.shape[2:], self.geometry
        (sy, sx), (py, px), (dy, dx) = geometry.stride, geometry.padding, geometry.dilation
        pixels = F.pad(self.inputs[:, 0].permute(0, 2, 3, 1), (0, 0, px, px, py, py)).contiguous()
        rows, columns = self.outputs.shape[3:]
        b, y, x, _ = pixels.stride()
        patches = pixels.as_strided(
            (self.batch_size, rows, columns, ky, kx, pixels.shape[3]), (b, sy * y, sx * x, dy * y, dx * x, 1)
        )
        right = patches.reshape(self.batch_size, rows * columns, -1)
        return Outer(self.outputs[:, 0].flatten(2).mT, right, (self.shape[0], right.shape[2]))

    def gradients(self, samples: slice = slice(None)) -> Tensor:
        """Many samples in one call of torch's kernel: the batch is folded into the groups."""
        inputs, outputs = (tensor[samples].transpose(0, 1) for tensor in (self.inputs, self.outputs))
        batch = inputs.shape[1]
        folded = self.geometry.weight_gradient(
            outputs.flatten(1, 2), inputs.flatten(1, 2), (batch * self.shape[0], *self.shape[1:]),
            batch * self.geometry.groups,
        )  # fmt: skip
        return folded.view(batch, *self.shape)

    def weighted(self, factors_B: Tensor) -> Tensor:
        inputs, outputs = self.inputs, self.outputs
        factors = per_sample(factors_B.to(inputs.dtype), inputs.dim())
        if inputs.numel() < outputs.numel():
            inputs = inputs * factors
        else:
            outputs = outputs * factors
        return self.geometry.weight_gradient(
            outputs.flatten(0, 1), inputs.flatten(0, 1), self.shape, self.geometry.groups
        )

    def precise(self, some_B: Tensor) -> Use:
        return Convolved(self.inputs[some_B].double(), self.outputs[some_B].double(), self.shape, self.geometry)

    def without(self, bad_B: Tensor) -> Use:
        mask = per_sample(bad_B, self.inputs.dim())
        return Convolved(self.inputs.masked_fill(mask, 0), self.outputs.masked_fill(mask, 0), self.shape, self.geometry)


def gram_of_patches(pixels: Tensor, kernel: Sequence[int], geometry: Geometry, outputs: Sequence[int]) -> Tensor:
    """Inner products of the patches that the outputs see, (B, T, T), from (B, C, *image): no patch is formed.

    <patch_t, patch_s> = sum over offsets d of the kernel of <pixel_(t+d), pixel_(s+d)>, one axis at a time.
    """
    flat = pixels.flatten(2)
    batch, (height, width), (rows, columns) = pixels.shape[0], pixels.shape[2:], outputs
    products = (flat.mT @ flat).view(batch, height, width, height, width)
    down = products.new_zeros(batch, rows, width, rows, width)
    for k in range(kernel[0]):
        seen, to = _window(height, rows, k * geometry.dilation[0] - geometry.padding[0])
        down[:, to, :, to] += products[:, seen, :, seen]
    across = products.new_zeros(batch, rows, columns, rows, columns)
    for k in range(kernel[1]):
        seen, to = _window(width, columns, k * geometry.dilation[1] - geometry.padding[1])
        across[:, :, to, :, to] += down[:, :, seen, :, seen]
    return across.view(batch, rows * columns, rows * columns)


def _squared_pixels(images: Tensor, groups: int) -> Tensor:
    """(N, C, *space) -> (N, groups, *space). A few images at a time, which stay in the cache."""
    few = max(1, _PIXELS // max(1, images[0].numel()))
    return torch.cat([part.square().unflatten(1, (groups, -1)).sum(2) for part in images.split(few)])


def _window(size: int, outputs: int, offset: int) -> tuple[slice, slice]:
    """The pixels that one offset of the kernel sees inside the image, and the outputs that see them."""
    first = max(0, -offset)
    last = max(first, min(outputs, size - offset))
    return slice(first + offset, last + offset), slice(first, last)


def convolution(operand: Operand, samples: Samples) -> Finish:
    """The batch is on the first axis; one sample may hold several images there."""
    node = operand.node
    if samples.axis != 0 or operand.position == _INPUT:
        raise carries_batch(operand, "the input of a convolution is computed from the batch and mixes samples before")
    if operand.position == _BIAS:
        return lambda gradient: Dense(_channel_sums(samples.split(gradient)), operand.shape)
    geometry = Geometry.of(node)
    inputs = samples.split(saved(node, "input"))
    return lambda gradient: Convolved(inputs, samples.split(gradient), operand.shape, geometry)


def _channel_sums(gradient: Tensor) -> Tensor:
    """(B, t, C, *space) -> (B, C)."""
    return gradient.flatten(3).sum((1, 3)) if gradient.dim() > 3 else gradient.sum(1)
