"""Embeddings, embedding bags and other tables.

Recurrent networks with the unfused kernels, and attention layers of torch.nn.
"""

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


class Recurrent(nn.Module):
    """An RNN, LSTM or GRU and a linear head; the fused CPU kernel is switched off, as the engine asks for."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(3, 4, **options)
        self.head = nn.Linear(4 * (2 if self.rnn.bidirectional else 1), 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.rnn.batch_first else x.transpose(0, 1)
        with torch.backends.mkldnn.flags(enabled=False):
            out, _ = self.rnn(x)
        out = out if self.rnn.batch_first else out.transpose(0, 1)
        result: Tensor = self.head(out)
        return result


class LearnedState(nn.Module):
    """A GRU whose first state is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 4, batch_first=True)
        self.state = nn.Parameter(torch.randn(1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.backends.mkldnn.flags(enabled=False):
            out, _ = self.rnn(x, self.state.expand(1, x.shape[0], 4).contiguous())
        result: Tensor = out
        return result


class PackedSequences(nn.Module):
    """A GRU on packed sequences: sample lengths differ, rows are sorted and cut."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        with torch.backends.mkldnn.flags(enabled=False):
            _, state = self.rnn(packed)
        result: Tensor = state[-1]
        return result


class CellLoop(nn.Module):
    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell = kind(3, 4)  # type: ignore[call-arg]

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        out: Tensor = state[0] if isinstance(state, tuple) else state
        return out


def recurrent(name: str, kind: type[nn.RNNBase], **options: Any) -> Case:
    return Case(name, lambda: Recurrent(kind, **options), {"x": floats(5, 3)}, _loss, batches=(1, 5, 4, 3))


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return regress(model(x))


def _packed_loss(model: nn.Module, x: Tensor, keep: Tensor) -> Tensor:
    return regress(model(x, keep.sum(1)))


def cell(name: str, kind: type[nn.RNNCellBase]) -> Case:
    return Case(name, lambda: CellLoop(kind), {"x": floats(5, 3)}, _loss, batches=(1, 5, 4, 3))


class SelfAttention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.attention.batch_first else x.transpose(0, 1)
        out, _ = self.attention(x, x, x, need_weights=False)
        out = out if self.attention.batch_first else out.transpose(0, 1)
        return out.tanh()


class CrossAttention(nn.Module):
    """Keys and values of their own widths, or a learned query that all samples share."""

    def __init__(self, learned_query: bool = False, need_weights: bool = True) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, kdim=5, vdim=3, batch_first=True)
        self.query = nn.Parameter(torch.randn(1, 2, 8)) if learned_query else None
        self.need_weights = need_weights

    def forward(self, x: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query = x if self.query is None else self.query.expand(x.shape[0], -1, -1)
        out, _ = self.attention(query, key, value, need_weights=self.need_weights)
        return out.tanh()


class EncoderDecoder(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, **options)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        if not self.model.batch_first:
            x, z = x.transpose(0, 1), z.transpose(0, 1)
        causal = nn.Transformer.generate_square_subsequent_mask(3, dtype=x.dtype)
        out: Tensor = self.model(x, z, tgt_mask=causal)
        return out if self.model.batch_first else out.transpose(0, 1)


class Encoder(nn.Module):
    """nn.TransformerEncoder with a learned position embedding and class token, and optional padding mask."""

    def __init__(self, padded: bool = False, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.position = nn.Parameter(0.1 * torch.randn(1, 5, 8))
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.first = not options.get("batch_first", False)
        self.padded = padded

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        padding = torch.cat([torch.ones_like(keep[:, :1]), keep], dim=1) == 0 if self.padded else None
        out: Tensor = self.encoder(x.transpose(0, 1) if self.first else x, src_key_padding_mask=padding)
        return out[0] if self.first else out[:, 0]


def attention(name: str, **options: Any) -> Case:
    return Case(name, lambda: SelfAttention(**options), {"x": floats(4, 8)}, _loss, batches=(1, 4, 8, 2, 3))


def cross(name: str, **options: Any) -> Case:
    data = {"x": floats(4, 8), "key": floats(3, 5), "value": floats(3, 3)}
    return Case(
        name,
        lambda: CrossAttention(**options),
        data,
        lambda model, x, key, value: regress(model(x, key, value)),
        batches=(1, 4, 8, 2, 3),
    )


def encoder_decoder(name: str, **options: Any) -> Case:
    return Case(
        name,
        lambda: EncoderDecoder(**options),
        {"x": floats(4, 8), "z": floats(3, 8)},
        lambda model, x, z: regress(model(x, z)),
        batches=(1, 4, 8, 2, 3),
    )


def encoder(name: str, **options: Any) -> Case:
    return Case(
        name,
        lambda: Encoder(**options),
        {"x": floats(4, 8), "keep": mask(4)},
        lambda model, x, keep: regress(model(x, keep)),
        batches=(1, 5, 8, 2, 3),
    )


CASES += [
    recurrent("lstm", nn.LSTM, batch_first=True),
    recurrent("lstm_sequence_first", nn.LSTM),
    recurrent("lstm_two_layers_bidirectional", nn.LSTM, batch_first=True, num_layers=2, bidirectional=True),
    recurrent("lstm_no_bias", nn.LSTM, batch_first=True, bias=False),
    recurrent("gru", nn.GRU, batch_first=True),
    recurrent("gru_sequence_first_bidirectional", nn.GRU, bidirectional=True),
    recurrent("gru_two_layers", nn.GRU, batch_first=True, num_layers=2),
    recurrent("rnn_tanh", nn.RNN, batch_first=True),
    recurrent("rnn_relu_two_layers", nn.RNN, num_layers=2, nonlinearity="relu"),
    Case("gru_learned_state", LearnedState, {"x": floats(5, 3)}, _loss, batches=(1, 5, 4, 3)),
    Case("gru_packed", PackedSequences, {"x": floats(5, 3), "keep": mask(5)}, _packed_loss, batches=(1, 5, 4, 3)),
    cell("rnn_cell_loop", nn.RNNCell),
    cell("lstm_cell_loop", nn.LSTMCell),
    cell("gru_cell_loop", nn.GRUCell),
    attention("attention_batch_first", batch_first=True),
    attention("attention_sequence_first"),
    attention("attention_no_bias", batch_first=True, bias=False),
    attention("attention_bias_kv", batch_first=True, add_bias_kv=True),
    attention("attention_bias_kv_sequence_first", add_bias_kv=True, add_zero_attn=True),
    cross("attention_cross"),
    cross("attention_learned_query", learned_query=True, need_weights=False),
    encoder("transformer_encoder", batch_first=True),
    encoder("transformer_encoder_padded", batch_first=True, padded=True),
    encoder("transformer_encoder_sequence_first", norm_first=True),
    encoder("transformer_encoder_norm_first", batch_first=True, norm_first=True, activation="gelu"),
    encoder_decoder("transformer_decoder", batch_first=True),
    encoder_decoder("transformer_decoder_sequence_first", norm_first=True),
]
