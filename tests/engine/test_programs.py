"""Random separable programs: parameters meet the batch in random roles and layouts; the engine is exact or refuses.

Every program works on a value (B, T, D) whose samples never mix, so the per-sample loop is right by construction.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.clipping import Abadi, Flat, Layerwise
from clipwise.engine import clipped_gradients, per_sample_gradients, per_sample_norms
from clipwise.errors import NotSeparable, UnsupportedNode

from .reference import clipped_loop, flat, flat_sum, loop_gradients, norms_of, relative_errors

Step = Callable[[Tensor], Tensor]


class Program:
    """A random sequence of steps and the parameters they share."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.T, self.D = self.random.choice([2, 3, 4, 6]), self.random.choice([2, 4, 6])
        self.generator = torch.Generator().manual_seed(seed)
        self.params: dict[str, nn.Parameter] = {}
        self.steps = [self._step() for _ in range(self.random.randint(2, 5))]
        self.steps.insert(0, self._linear())  # at least one parameter

    def parameter(self, *shape: int) -> Tensor:
        """A parameter of this shape: new, or one that was used before."""
        known = [p for p in self.params.values() if p.shape == shape]
        if known and self.random.random() < 0.4:
            return self.random.choice(known)
        value = 0.5 * torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return self.params.setdefault(f"p{len(self.params)}", nn.Parameter(value))

    def weight(self, *shape: int) -> Callable[[], Tensor]:
        """A value made from parameters alone."""
        kind = self.random.choice(["bare", "bare", "bare", "transposed", "derived", "slice", "sum"])
        if kind == "transposed" and len(shape) == 2:
            p = self.parameter(*shape[::-1])
            return lambda: p.t()
        if kind == "derived":
            p = self.parameter(*shape)
            return lambda: torch.tanh(p) * 1.5
        if kind == "slice":
            p = self.parameter(shape[0] + 1, *shape[1:])
            return lambda: p[1:]
        if kind == "sum":
            p, q = self.parameter(*shape), self.parameter(*shape)
            return lambda: p + q * p
        p = self.parameter(*shape)
        return lambda: p

    def laid_out(self, rowwise: Step) -> Step:
        """A step on the last axis, with the rows put in some order and shape before, and back afterwards."""
        kind = self.random.choice(["plain", "first", "flat", "flat_first", "sorted", "grid"])

        def flat_rows(h: Tensor) -> Tensor:
            return rowwise(h.reshape(-1, h.shape[2])).view(h.shape)

        def step(h: Tensor) -> Tensor:
            if kind == "first":
                return rowwise(h.transpose(0, 1)).transpose(0, 1)
            if kind == "flat":
                return flat_rows(h)
            if kind == "flat_first":
                return flat_rows(h.transpose(0, 1)).transpose(0, 1)
            if kind == "grid":
                return rowwise(h.unsqueeze(1).expand(-1, 2, -1, -1)).sum(1)
            if kind == "sorted":
                rows = h.reshape(-1, h.shape[2])
                order = rows.detach()[:, 0].argsort()
                return rowwise(rows[order])[order.argsort()].view(h.shape)
            return rowwise(h)

        return step

    def _linear(self) -> Step:
        w, b = self.weight(self.D, self.D), self.weight(self.D)
        kind = self.random.choice(["linear", "matmul", "addmm_like"])
        if kind == "linear":
            return self.laid_out(lambda h: F.linear(h, w(), b()).tanh())
        if kind == "matmul":
            return self.laid_out(lambda h: (h @ w()).tanh())
        return self.laid_out(lambda h: (b() + h @ w()).tanh())

    def _step(self) -> Step:
        makers = [self._linear, self._linear, self._rowwise, self._tables, self._products, self._choices]
        return self.random.choice(makers)()

    def _rowwise(self) -> Step:
        scale, shift, D = self.weight(self.D), self.weight(self.D), self.D
        steps: list[Step] = [
            lambda h: h * scale(),
            lambda h: F.layer_norm(h, (D,), scale(), shift()),
            lambda h: torch.where(h > 0, h * scale(), shift()),
            lambda h: h / (1 + scale().square()) - shift(),
        ]
        return self.laid_out(self.random.choice(steps))

    def _tables(self) -> Step:
        table, gain, T, D = self.weight(self.T, self.D), self.weight(1), self.T, self.D
        return self.random.choice([
            lambda h: h + table(),
            lambda h: (h - table()) * gain(),
            lambda h: torch.cat([table().expand(h.shape[0], T, D), h], dim=1).cumsum(1)[:, T:].tanh(),
            lambda h: (h.transpose(0, 1) * table().unsqueeze(1)).transpose(0, 1),
        ])  # fmt: skip

    def _products(self) -> Step:
        T, D = self.T, self.D
        mix, heads, kernel = self.weight(T, T), self.weight(2, D // 2, D // 2), self.weight(D, D, 3)
        return self.random.choice([
            lambda h: mix() @ h,
            lambda h: torch.einsum("ts,bsd->btd", mix(), h),
            lambda h: torch.einsum("bthi,hij->bthj", h.unflatten(2, (2, D // 2)), heads()).flatten(2).tanh(),
            lambda h: F.conv1d(h.transpose(1, 2), kernel(), padding=1).transpose(1, 2).tanh(),
        ])  # fmt: skip

    def _choices(self) -> Step:
        """Attention inside a sample, and lookups by the sample's own values."""
        T, table = self.T, self.weight(self.T, self.D)

        def index(h: Tensor) -> Tensor:
            return (h.detach()[..., 0] > 0).long().clamp(max=T - 1)

        return self.random.choice([
            lambda h: torch.softmax(h @ h.transpose(1, 2), dim=-1) @ h,
            lambda h: torch.softmax(table() @ h.transpose(1, 2), dim=-1) @ h,
            lambda h: h + F.embedding(index(h), table()),
            lambda h: h + table()[index(h)],
            lambda h: torch.tanh(h).flip(1) + h.roll(1, 1),
        ])  # fmt: skip

    def losses(self, batch: int) -> Tensor:
        h = torch.randn(batch, self.T, self.D, generator=self.generator, dtype=torch.float64)
        for step in self.steps:
            h = step(h)
        return (h - torch.sin(torch.arange(self.D, dtype=torch.float64))).square().mean((1, 2))


def disagreements(seed: int) -> list[str]:
    """What differs from the loop over several batch sizes, with one plan cache."""
    program, found = Program(seed), []
    params = program.params
    for batch in (4, 1, program.T, 3, program.T * 2):
        losses = program.losses(batch)
        loop = loop_gradients(losses, params)
        size = norms_of(loop)
        norms = per_sample_norms(losses, params, retain_graph=True)
        gradients = per_sample_gradients(losses, params, retain_graph=True)
        errors = {
            "norms": relative_errors(norms, size, size, torch.float64).max(),
            "gradients": relative_errors(flat(gradients), flat(loop), size, torch.float64).max(),
        }
        for style in (Flat(Abadi(0.1)), Layerwise(Abadi(0.1))):
            expected = flat(clipped_loop(loop, style))
            got = flat_sum(clipped_gradients(losses, params, style, retain_graph=True).gradients)
            errors[type(style).__name__] = (got - expected.sum(0)).norm() / expected.norm(dim=1).sum().clamp(min=1e-12)
        found += [f"B={batch} {what}: off by {error:.1e}" for what, error in errors.items() if not error <= 1e-9]
    return found


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_are_exact_or_refused(seed: int) -> None:
    """The one refusal among them: a layer norm whose weight and bias are the same value."""
    try:
        found = disagreements(seed)
    except UnsupportedNode as refusal:
        if "same shared value twice" not in str(refusal):
            raise
        return
    assert not found


def across_attention(h: Tensor) -> Tensor:
    rows = h.flatten(1)
    return (torch.softmax(rows @ rows.T, dim=1) @ rows).view(h.shape)


def batch_norm(h: Tensor) -> Tensor:
    return F.batch_norm(h.transpose(1, 2), None, None, training=True).transpose(1, 2)


MIXING: dict[str, Step] = {
    "mean": lambda h: h - h.mean(0),
    "neighbour": lambda h: h.tanh() + h.roll(1, 0),
    "softmax": lambda h: torch.softmax(h, dim=0),
    "running_sum": lambda h: h.cumsum(0),
    "attention": across_attention,
    "batch_norm": batch_norm,
    "common_scale": lambda h: h * h.flatten(1).norm(dim=1).mean(),
    "largest": lambda h: h - h.amax(0),
    "sorted": lambda h: h.sort(dim=0).values + h,
    "product": lambda h: torch.einsum("bij,cij->bij", h, h),
    "first_sample": lambda h: h + h[:1],
    "pairs": lambda h: torch.cat([h[:1] + h[1:2], h[1:]]),
}


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("seed", range(5))
def test_random_programs_that_mix_samples_are_refused(seed: int, name: str) -> None:
    program = Program(seed)
    place = program.random.randint(1, len(program.steps))
    program.steps.insert(place, MIXING[name])
    for batch in (3, program.T, 4):
        losses = program.losses(batch)
        if mixes(losses, batch):
            with pytest.raises((NotSeparable, UnsupportedNode)):
                per_sample_norms(losses, program.params)


def mixes(losses: Tensor, batch: int) -> bool:
    """Whether samples mix in this very batch: a dead branch or a saturated softmax may hide it, in all its numbers.

    Asked of the node just after the data enters: does the gradient of one loss reach another sample's rows there?
    """
    entries = [node for node in nodes(losses.grad_fn) if node.name() in ("MmBackward0", "AddmmBackward0")]
    entries = [node for node in entries if any(child is None for child, _ in node.next_functions)]
    reached = []
    for one in torch.eye(batch, dtype=losses.dtype):
        edges = [torch.autograd.graph.GradientEdge(node, 0) for node in entries]
        grads = torch.autograd.grad(losses, edges, one, retain_graph=True, allow_unused=True)
        reached.append([torch.zeros(0) if g is None else g.abs().sum(1) for g in grads])
    sizes = [torch.stack(rows) for rows in zip(*reached, strict=True) if rows[0].numel()]
    return any(((size > 1e-12 * size.max()).sum(0) > 1).any() for size in sizes)


def nodes(root: object) -> list[object]:
    found = [root]
    for node in found:
        found.extend(child for child, _ in node.next_functions if child is not None and child not in found)  # type: ignore[attr-defined]
    return found
