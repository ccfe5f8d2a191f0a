"""Direct parameters that meet the batch by broadcasting, joining, choosing or routing."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, apply_x, floats, functional, simple


class ClassToken(nn.Module):
    """A class token, a position table and a per-head scale, as vision transformers keep them."""

    def __init__(self, position: tuple[int, ...]) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.position = nn.Parameter(torch.randn(position))
        self.mix = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        x = x + torch.tanh(self.mix(x)).mean(1, keepdim=True)
        return x[:, 0]


class Heads(nn.Module):
    """Attention with a temperature of shape () and a scale per head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 12, bias=False)
        self.temperature = nn.Parameter(torch.tensor(0.3))
        self.scale = nn.Parameter(torch.randn(2, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qkv(x).unflatten(-1, (2, 6)).transpose(1, 2).chunk(2, dim=-1)
        return torch.softmax(q @ k.transpose(-1, -2) * self.temperature.exp(), dim=-1) * self.scale


class Experts(nn.Module):
    """Mixture of experts with index-based routing: rows are picked, worked on and added back."""

    def __init__(self, boolean: bool, top: int) -> None:
        super().__init__()
        self.boolean, self.top = boolean, top
        self.gate = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 6)
        weights, chosen = torch.softmax(self.gate(rows), dim=-1).topk(self.top, dim=-1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            if self.boolean:
                picked = (chosen == number).any(-1)
                gain = (weights * (chosen == number)).sum(-1)[picked]
                out = out.masked_scatter(picked[:, None], (out[picked] + gain[:, None] * expert(rows[picked])))
            else:
                row, slot = torch.where(chosen == number)
                out = out.index_add(0, row, expert(rows[row]) * weights[row, slot, None])
        return out.view_as(x)


class ExpertsInPlace(Experts):
    """The same, written with in-place index_add_ and index_put as many models do."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 6)
        weights, chosen = torch.softmax(self.gate(rows), dim=-1).topk(self.top, dim=-1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == number)
            if self.boolean:
                out[row] = out[row] + expert(rows[row]) * weights[row, slot].unsqueeze(-1)
            else:
                out.index_add_(0, row, expert(rows[row]) * weights[row, slot].unsqueeze(-1))
        return out.view_as(x)


class TwoLayers(nn.Module):
    """Two layers, and a word that says how `forward` picks the rows for them."""

    def __init__(self, how: str, outputs: int) -> None:
        super().__init__()
        self.how = how
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, outputs)


class Sorted(TwoLayers):
    """Rows or samples are put in an order that the data decides, worked on, and put back (or left there)."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x if self.how == "samples" else x.reshape(-1, 6)
        order = rows.reshape(len(rows), -1)[:, 0].argsort()
        out = self.second(torch.tanh(self.first(rows[order])))
        if self.how == "scatter":
            return torch.zeros_like(rows).index_copy(0, order, out).view_as(x)
        if self.how == "gather":
            back = order.argsort().unsqueeze(1).expand(-1, 6)
            return out.gather(0, back).view_as(x)
        return out[order.argsort()].view_as(x)


class Ragged(TwoLayers):
    """Only the rows that a mask keeps are worked on: each sample has its own number of rows."""

    def forward(self, x: Tensor) -> Tensor:
        keep = x[..., 0] > -0.5
        out = self.second(torch.tanh(self.first(x[keep])))[:, 0]
        if self.how == "scatter":
            return torch.zeros_like(x[..., 0]).masked_scatter(keep, out)
        sample = keep.nonzero()[:, 0]
        return torch.zeros_like(x[:, 0, 0]).index_add(0, sample, out).unsqueeze(1)


class MaskedTokens(nn.Module):
    """Some positions are replaced by a learned token, chosen by the data."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.token = nn.Parameter(torch.randn(6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hide = x[..., 0] > 0
        if self.how == "where":
            x = torch.where(hide.unsqueeze(-1), self.token, x)
        elif self.how == "index_put":
            x = x.clone()
            x[hide] = self.token
        else:
            weight = hide.unsqueeze(-1).to(x.dtype)
            x = x * (1 - weight) + self.token.expand_as(x) * weight
        return self.head(x).tanh()


class AddedTwice(nn.Module):
    """One parameter used by broadcasting, as a matrix and as a table at once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.5 * torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight + x * self.weight[0] + self.weight[:, 1]) + F.linear(x, self.weight).relu()


def mixture(p: Any, x: Tensor) -> Tensor:
    components = torch.stack([x, x.sin(), x.cos()], dim=1)
    return (torch.softmax(p.w, dim=0).view(1, 3, 1) * components).sum(1)


BROADCASTING = [
    functional("scalar_scale", {"s": ()}, lambda p, x: (x * p.s).tanh()),
    functional("scalar_shift", {"s": ()}, lambda p, x: (x + p.s).tanh(), x=(4, 6)),
    functional("bias_vector", {"b": (6,)}, lambda p, x: (x + p.b).tanh(), batches=(1, 6, 3, 2)),
    functional("bias_table", {"b": (4, 6)}, lambda p, x: (x + p.b).tanh(), x=(4, 6), batches=(1, 4, 6, 3)),
    functional("bias_table_ones", {"b": (1, 4, 1)}, lambda p, x: (x + p.b).tanh(), x=(4, 6), batches=(1, 4, 6, 3)),
    functional("add_with_alpha", {"b": (6,)}, lambda p, x: torch.add(x, p.b, alpha=3.0).tanh()),
    functional("subtract", {"b": (6,)}, lambda p, x: (x - p.b).tanh()),
    functional("subtract_reversed", {"b": (6,)}, lambda p, x: torch.sub(p.b, x, alpha=2.0).tanh()),
    functional("rsub_scalar", {"b": (6,)}, lambda p, x: (1 - x * p.b).tanh()),
    functional("multiply", {"b": (4, 1)}, lambda p, x: (x * p.b).tanh(), x=(4, 6), batches=(1, 4, 6, 3)),
    functional("divide_by", {"b": (6,)}, lambda p, x: (x / (p.b.square() + 1)).tanh()),
    functional("divide_shared", {"b": (6,)}, lambda p, x: (p.b / (x.square() + 1)).tanh()),
    functional("power_exponent", {"b": (6,)}, lambda p, x: (x.square() + 1) ** p.b),
    functional("power_base", {"b": (6,)}, lambda p, x: (p.b.square() + 1) ** x),
    functional("maximum", {"b": (6,)}, lambda p, x: torch.maximum(x, p.b)),
    functional("minimum", {"b": (6,)}, lambda p, x: torch.minimum(p.b, x)),
    functional("lerp_shared", {"a": (6,), "w": (6,)}, lambda p, x: torch.lerp(x, p.a, p.w)),
    functional("addcmul", {"a": (6,), "w": (6,)}, lambda p, x: torch.addcmul(p.a, x, p.w)),
    functional("clamp_tensor", {"a": (6,)}, lambda p, x: torch.clamp(x, max=p.a)),
    functional("distances", {"c": (3, 6)}, lambda p, x: torch.cdist(x, p.c)),
    functional(
        "distances_by_hand", {"c": (3, 6)}, lambda p, x: (x.unsqueeze(1) - p.c).square().sum(-1), batches=(1, 3, 6, 4)
    ),
    functional("softmax_of_parameters", {"w": (3,)}, mixture, batches=(1, 3, 6, 2)),
    functional("softplus_scale", {"w": (6,)}, lambda p, x: x * F.softplus(p.w)),
    functional("in_place_add", {"b": (6,)}, lambda p, x: (2 * x).add_(p.b).tanh()),
    functional("in_place_multiply", {"b": (6,), "c": (6,)}, lambda p, x: (x + p.c).mul_(p.b).tanh()),
    functional("parameter_slices", {"b": (12,)}, lambda p, x: (x * p.b[:6] + p.b[6:]).tanh()),
    functional("parameter_row_in_two_shapes", {"t": (4, 6)}, lambda p, x: ((x + p.t[1]) * p.t[1:2] + p.t[2]).tanh()),
    functional("parameter_matrix_in_two_shapes", {"t": (2, 6, 6)}, lambda p, x: (x @ p.t[0]).tanh() @ p.t[0:1].mT[0]),
    functional("parameter_chunks", {"w": (6, 9)}, lambda p, x: torch.cat([x @ w for w in p.w.chunk(3, 1)], 1).tanh()),
    functional("parameter_reversed", {"b": (6,)}, lambda p, x: (x * p.b.flip(0)).tanh()),
    functional("parameter_padded", {"b": (4,)}, lambda p, x: (x * F.pad(p.b, (1, 1), value=1.0)).tanh()),
    functional("parameter_cumulative", {"b": (6,)}, lambda p, x: (x * p.b.cumsum(0)).tanh()),
    functional("triangular_weight", {"w": (6, 6)}, lambda p, x: (x @ p.w.tril()).tanh()),
    functional("symmetric_weight", {"w": (6, 6)}, lambda p, x: (x @ (p.w + p.w.T)).tanh(), batches=(1, 6, 3, 2)),
]

JOINING = [
    functional(
        "cat_expanded_token",
        {"t": (1, 6)},
        lambda p, x: torch.cat([p.t.expand(x.shape[0], 6), x], dim=1).square().tanh(),
    ),
    functional(
        "cat_along_time",
        {"t": (2, 6)},
        lambda p, x: torch.cat([p.t.expand(x.shape[0], 2, 6), x], dim=1).cumsum(1).tanh(),
        x=(4, 6),
        batches=(1, 2, 4, 6, 3),
    ),
    functional(
        "stack_expanded", {"t": (6,)}, lambda p, x: torch.stack([x, p.t.expand_as(x), x * x], dim=1).prod(1).tanh()
    ),
    functional("repeat_token", {"t": (1, 6)}, lambda p, x: (p.t.repeat(x.shape[0], 2) * torch.cat([x, x], 1)).tanh()),
    functional(
        "repeat_interleave_token",
        {"t": (2, 3)},
        lambda p, x: (p.t.repeat_interleave(2, dim=1).flatten()[:6] * x).tanh(),
    ),
    functional("broadcast_to", {"t": (6,)}, lambda p, x: torch.broadcast_to(p.t, x.shape) * x.sin()),
    functional("expand_contiguous", {"t": (1, 6)}, lambda p, x: (p.t.expand(x.shape[0], 6).contiguous() + x).tanh()),
    functional(
        "expand_then_flatten",
        {"t": (2, 6)},
        lambda p, x: (p.t.expand(x.shape[0], 2, 6).reshape(-1, 6) * x.repeat_interleave(2, 0)).view(-1, 12).tanh(),
        batches=(1, 2, 6, 3),
    ),
    functional(
        "expand_then_nonlinear", {"t": (1, 6)}, lambda p, x: torch.tanh(p.t.expand(x.shape[0], 6)).cumsum(1) * x
    ),
    functional(
        "expand_then_linear",
        {"t": (1, 6), "w": (6, 6)},
        lambda p, x: x * torch.tanh(p.t.expand(x.shape[0], 6) @ p.w),
        batches=(1, 6, 3, 4),
    ),
    functional("where_shared", {"a": (6,), "b": (6,)}, lambda p, x: torch.where(x > 0, p.a, p.b * x).tanh()),
    functional("where_scalar", {"a": ()}, lambda p, x: torch.where(x > 0, x, p.a).tanh()),
    functional(
        "masked_fill_parameter",
        {"a": ()},
        lambda p, x: x.masked_fill(x > 0, p.a).tanh(),
    ),
    functional("loss_with_penalty_per_sample", {"w": (6,)}, lambda p, x: (x * p.w).tanh() + p.w.square().sum()),
    functional("parameter_times_zero_batch", {"w": (6,)}, lambda p, x: (0 * x.sum(1, keepdim=True)) + p.w),
    functional("parameters_only", {"w": (6,)}, lambda p, x: p.w.tanh().expand(x.shape[0], 6), batches=(1, 6, 3, 2)),
]

CASES = [
    simple("class_token_position_3d", lambda: ClassToken((1, 5, 6)), 4, 6, batches=(1, 5, 4, 6, 3)),
    simple("class_token_position_2d", lambda: ClassToken((5, 6)), 4, 6, batches=(1, 5, 4, 6, 3)),
    simple("head_scales_and_temperature", Heads, 4, 6, batches=(1, 2, 4, 8, 3)),
    simple("experts_index_add", lambda: Experts(False, 2), 4, 6, batches=(1, 4, 2, 3)),
    simple("experts_boolean", lambda: Experts(True, 1), 4, 6, batches=(1, 4, 2, 3)),
    simple("experts_in_place", lambda: ExpertsInPlace(False, 2), 4, 6, batches=(1, 4, 2, 3)),
    simple("experts_index_put", lambda: ExpertsInPlace(True, 2), 4, 6, batches=(1, 4, 2, 3)),
    simple("samples_sorted", lambda: Sorted("samples", 6), 4, 6, batches=(1, 4, 2, 3)),
    simple("rows_sorted", lambda: Sorted("rows", 6), 4, 6, batches=(1, 4, 2, 3)),
    simple("rows_sorted_index_copy", lambda: Sorted("scatter", 6), 4, 6, batches=(1, 4, 2, 3)),
    simple("rows_sorted_gather", lambda: Sorted("gather", 6), 4, 6, batches=(1, 4, 2, 3)),
    simple("ragged_masked_scatter", lambda: Ragged("scatter", 1), 4, 6, batches=(1, 4, 2, 3)),
    simple("ragged_index_add", lambda: Ragged("add", 1), 4, 6, batches=(1, 4, 2, 3)),
    simple("mask_token_where", lambda: MaskedTokens("where"), 4, 6),
    simple("mask_token_index_put", lambda: MaskedTokens("index_put"), 4, 6),
    simple("mask_token_weighted", lambda: MaskedTokens("weighted"), 4, 6),
    Case("mixed_uses_of_one_parameter", AddedTwice, {"x": floats(6)}, apply_x, batches=(1, 6, 3, 4)),
    *BROADCASTING,
    *JOINING,
]
