"""Embeddings, embedding bags and other tables."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, Draw, Functional, floats, ids, mask, regress, token_loss

VOCABULARY = 7


class Tokens(nn.Module):
    """Embedding, optional tied head."""

    def __init__(self, embedding: nn.Embedding, tied: bool = False, sequence_first: bool = False) -> None:
        super().__init__()
        self.embedding = embedding
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, VOCABULARY, bias=False)
        self.sequence_first = sequence_first
        if tied:
            self.head.weight = embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.T if self.sequence_first else tokens
        logits: Tensor = self.head(torch.tanh(self.body(self.embedding(tokens))))
        return logits.transpose(0, 1) if self.sequence_first else logits


def tokens_loss(model: nn.Module, tokens: Tensor, y: Tensor) -> Tensor:
    return token_loss(model(tokens), y)


def tokens_case(
    name: str, tied: bool = False, first: bool = False, batches: tuple[int, ...] = (1, 4, 7, 3), **options: Any
) -> Case:
    return Case(
        name,
        lambda: Tokens(nn.Embedding(VOCABULARY, 6, **options), tied, first),
        {"tokens": ids(VOCABULARY, 4), "y": ids(VOCABULARY, 4)},
        tokens_loss,
        batches=batches,
    )


class Bag(nn.Module):
    """An embedding bag fed with 2-D indices, or with a flat list and offsets."""

    def __init__(self, style: str, **options: Any) -> None:
        super().__init__()
        self.style = style
        self.bag = nn.EmbeddingBag(VOCABULARY, 6, **options)
        self.out = nn.Linear(6, 3)

    def forward(self, tokens: Tensor, lengths: Tensor, weights: Tensor) -> Tensor:
        if self.style == "2d":
            return self.out(self.bag(tokens)).tanh()
        if self.style == "weighted":
            return self.out(self.bag(tokens, per_sample_weights=weights)).tanh()
        keep = lengths.bool()
        counts = keep.sum(1)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        if not self.bag.include_last_offset:
            offsets = offsets[:-1]
        extra = {"per_sample_weights": weights[keep]} if self.style == "offsets_weighted" else {}
        return self.out(self.bag(tokens[keep], offsets, **extra)).tanh()


def bag_case(name: str, style: str, length: int = 5, **options: Any) -> Case:
    data: dict[str, Draw] = {"tokens": ids(VOCABULARY, length), "lengths": mask(length), "weights": floats(length)}

    def loss(model: nn.Module, tokens: Tensor, lengths: Tensor, weights: Tensor) -> Tensor:
        return regress(model(tokens, lengths, weights))

    return Case(name, lambda: Bag(style, **options), data, loss, batches=(1, 5, 7, 3))


def table_case(
    name: str, shapes: dict[str, tuple[int, ...]], function: Any, data: dict[str, Draw], **options: Any
) -> Case:
    def loss(model: nn.Module, **batch: Tensor) -> Tensor:
        return regress(model(**batch))

    return Case(name, lambda: Functional(shapes, function), data, loss, **options)


def relative_bias(p: Any, x: Tensor) -> Tensor:
    """Attention-like scores plus a table read by constant relative positions, as Swin and T5 do."""
    T = x.shape[1]
    index = torch.arange(T)[:, None] - torch.arange(T)[None, :] + T - 1
    bias = p.table[index.flatten()].view(T, T, -1).permute(2, 0, 1)
    return torch.softmax(torch.einsum("bid,bjd->bij", x, x).unsqueeze(1) + bias, dim=-1)


TABLES = [
    table_case(
        "index_table_by_sample",
        {"table": (7, 4)},
        lambda p, k: p.table[k].tanh(),
        {"k": ids(7, 3)},
        batches=(1, 7, 3, 4),
    ),
    table_case(
        "index_table_one_each", {"table": (7, 4)}, lambda p, k: p.table[k].tanh(), {"k": ids(7)}, batches=(1, 7, 3, 4)
    ),
    table_case(
        "index_table_two_indices",
        {"table": (5, 4, 3)},
        lambda p, k, j: p.table[k, j].tanh(),
        {"k": ids(5, 2), "j": ids(4, 2)},
        batches=(1, 5, 4, 2),
    ),
    table_case(
        "index_select_by_sample",
        {"table": (7, 4)},
        lambda p, k: p.table.index_select(0, k.flatten()).view(*k.shape, 4).tanh(),
        {"k": ids(7, 3)},
        batches=(1, 7, 3, 4),
    ),
    table_case(
        "gather_from_parameter",
        {"table": (6,)},
        lambda p, k: p.table.expand(k.shape[0], 6).gather(1, k).tanh(),
        {"k": ids(6, 3)},
        batches=(1, 6, 3, 4),
    ),
    table_case(
        "take_from_parameter",
        {"table": (3, 4)},
        lambda p, k: torch.take(p.table, k).tanh(),
        {"k": ids(12, 5)},
        batches=(1, 4, 3, 5),
    ),
    table_case(
        "one_hot_lookup",
        {"table": (7, 4)},
        lambda p, k: (F.one_hot(k, 7).to(p.table.dtype) @ p.table).tanh(),
        {"k": ids(7, 3)},
        batches=(1, 7, 3, 4),
    ),
    table_case(
        "embedding_functional",
        {"table": (7, 4)},
        lambda p, k: F.embedding(k, p.table.tanh()),
        {"k": ids(7, 3)},
        batches=(1, 7, 3, 4),
    ),
    table_case(
        "index_constant_positions",
        {"table": (8, 6)},
        lambda p, x: (x + p.table[torch.arange(4)]).tanh(),
        {"x": floats(4, 6)},
        batches=(1, 4, 8, 2, 3),
    ),
    table_case(
        "index_transposed_table",
        {"table": (4, 7)},
        lambda p, k: p.table.t()[k].tanh(),
        {"k": ids(7, 3)},
        batches=(1, 7, 3, 4),
    ),
    table_case(
        "embedding_transposed_table",
        {"table": (7, 7)},
        lambda p, k: (F.embedding(k, p.table.t()) + F.embedding(k, p.table)).tanh(),
        {"k": ids(7, 3)},
        batches=(1, 7, 3, 4),
    ),
    table_case("relative_bias_table", {"table": (7, 2)}, relative_bias, {"x": floats(4, 3)}, batches=(1, 7, 4, 2)),
    table_case(
        "embedding_positions",
        {"table": (8, 6)},
        lambda p, x: (x + F.embedding(torch.arange(4), p.table)).tanh(),
        {"x": floats(4, 6)},
        batches=(1, 4, 8, 2, 3),
    ),
    table_case(
        "embedding_positions_by_sample",
        {"table": (8, 6)},
        lambda p, x: (x + F.embedding(torch.arange(4).expand(x.shape[0], 4), p.table)).tanh(),
        {"x": floats(4, 6)},
        batches=(1, 4, 8, 2, 3),
    ),
]

CASES = [
    tokens_case("embedding"),
    tokens_case("embedding_padding_idx", padding_idx=2),
    tokens_case("embedding_sparse", sparse=True),
    tokens_case("embedding_tied_head", tied=True),
    tokens_case("embedding_tied_padding_idx", tied=True, padding_idx=0),
    tokens_case("embedding_sequence_first", first=True, batches=(1, 4, 2, 3)),
    bag_case("embedding_bag_sum", "2d", mode="sum"),
    bag_case("embedding_bag_mean", "2d", mode="mean"),
    bag_case("embedding_bag_max", "2d", mode="max"),
    bag_case("embedding_bag_of_one", "2d", length=1, mode="mean"),
    bag_case("embedding_bag_padding_idx", "2d", mode="mean", padding_idx=1),
    bag_case("embedding_bag_sum_padding_idx", "2d", mode="sum", padding_idx=1),
    bag_case("embedding_bag_max_padding_idx", "2d", mode="max", padding_idx=1),
    bag_case("embedding_bag_weighted", "weighted", mode="sum"),
    bag_case("embedding_bag_offsets_sum", "offsets", mode="sum"),
    bag_case("embedding_bag_offsets_mean", "offsets", mode="mean"),
    bag_case("embedding_bag_offsets_max", "offsets", mode="max"),
    bag_case("embedding_bag_offsets_weighted", "offsets_weighted", mode="sum"),
    bag_case("embedding_bag_last_offset", "offsets", mode="mean", include_last_offset=True),
    *TABLES,
]
