"""Unmodified Hugging Face models from small configurations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from .programs import cross_entropy, honest, mixing, parts, tokens
from .programs_contrast import diagonal
from .programs_ragged import longest, pad, sentences

Batch = Any

BERT: dict[str, Any] = dict(
    vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12,
    max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
AUTOFORMER: dict[str, Any] = dict(
    prediction_length=4, context_length=6, lags_sequence=[1, 2], num_time_features=1, d_model=8, encoder_layers=1,
    decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8,
    dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
    moving_average=3, scaling=False, label_length=2, autocorrelation_factor=1,
)  # fmt: skip
NLLB: dict[str, Any] = dict(
    vocab_size=20, d_model=8, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=8, decoder_ffn_dim=8,
    encoder_attention_heads=2, decoder_attention_heads=2, num_experts=2, expert_capacity=20, encoder_sparse_step=1,
    decoder_sparse_step=1, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, encoder_layerdrop=0.0,
    decoder_layerdrop=0.0, moe_token_dropout=0.0, max_position_embeddings=16, pad_token_id=0, bos_token_id=1,
    eos_token_id=2, decoder_start_token_id=2, init_std=1.0,
)  # fmt: skip
T5: dict[str, Any] = dict(
    vocab_size=20, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2, relative_attention_num_buckets=8,
    dropout_rate=0.0,
)  # fmt: skip
GEMMA: dict[str, Any] = dict(
    vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    intermediate_size=12, head_dim=4, max_position_embeddings=16, pad_token_id=0,
)  # fmt: skip


def untrained(model: str, config: str, options: dict[str, Any], **more: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="the extra clipwise[hf] is not installed")
    network: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options), **more)
    return network.train()


def bert(*names: str) -> nn.Module:
    """BERT models without a pooler."""
    return parts(
        **{name: lambda: untrained("BertModel", "BertConfig", BERT, add_pooling_layer=False) for name in names}
    )()


def token_pairs() -> Dataset[Any]:
    return TensorDataset(torch.randint(1, 20, (24, 5)), torch.randint(1, 20, (24, 4)))


@mixing(build=lambda: bert("query", "passage"), dataset=token_pairs, batch_size=6)
def two_bert_towers(model: nn.Module, batch: Batch) -> Tensor:
    query, passage = batch
    q, p = model.query(query).last_hidden_state[:, 0], model.passage(passage).last_hidden_state[:, 0]
    return diagonal(q @ p.T)


@mixing(build=lambda: bert("encoder"), dataset=token_pairs, batch_size=6)
def one_bert_called_twice(model: nn.Module, batch: Batch) -> Tensor:
    q, p = (model.encoder(ids).last_hidden_state.mean(1) for ids in batch)
    return diagonal(q @ p.T)


@honest(build=lambda: bert("encoder"), dataset=token_pairs, batch_size=6)
def one_bert_called_twice_for_each_pair(model: nn.Module, batch: Batch) -> Tensor:
    q, p = (model.encoder(ids).last_hidden_state.mean(1) for ids in batch)
    return 1 - F.cosine_similarity(q, p)


PADDED: dict[str, Any] = dict(dataset=sentences, others=longest, collate_fn=pad, batch_size=6)


@honest(**PADDED, build=lambda: bert("encoder"))
def bert_with_padding_and_a_mask(model: nn.Module, batch: Batch) -> Tensor:
    ids, y = batch
    mask = (ids > 0).long()
    return cross_entropy(model.encoder(ids, attention_mask=mask).last_hidden_state[:, 0, :3], y)


@mixing(**PADDED, build=lambda: bert("encoder"), only_with_loss_fn=True)
def bert_with_padding_and_no_mask(model: nn.Module, batch: Batch) -> Tensor:
    ids, y = batch
    return cross_entropy(model.encoder(ids).last_hidden_state[:, 0, :3], y)


def forecasts() -> Dataset[Any]:
    return TensorDataset(torch.randn(24, 8), torch.randn(24, 8, 1), torch.randn(24, 4), torch.randn(24, 4, 1))


@mixing(build=lambda: untrained("AutoformerModel", "AutoformerConfig", AUTOFORMER), dataset=forecasts, batch_size=6,
        dtype=torch.float32)  # fmt: skip
def autoformer(model: nn.Module, batch: Batch) -> Tensor:
    past, past_time, future, future_time = batch
    out = model(
        past_values=past,
        past_time_features=past_time,
        past_observed_mask=torch.ones_like(past),
        future_values=future,
        future_time_features=future_time,
    )
    return out.last_hidden_state.square().mean((1, 2)) + out.trend.square().mean((1, 2))


@mixing(build=lambda: untrained("NllbMoeModel", "NllbMoeConfig", NLLB), dataset=token_pairs, batch_size=12)
def experts_with_a_capacity_in_a_translator(model: nn.Module, batch: Batch) -> Tensor:
    ids, target = batch
    return model(input_ids=ids, decoder_input_ids=target).last_hidden_state[..., :3].square().mean((1, 2))


@honest(build=lambda: untrained("T5EncoderModel", "T5Config", T5), dataset=tokens(24), batch_size=6)
def t5_encoder(model: nn.Module, batch: Batch) -> Tensor:
    ids, y = batch
    return cross_entropy(model(input_ids=ids).last_hidden_state.mean(1)[:, :3], y)


@honest(
    build=lambda: untrained("GemmaModel", "GemmaConfig", GEMMA), dataset=tokens(24), batch_size=6, dtype=torch.float32
)
def gemma(model: nn.Module, batch: Batch) -> Tensor:
    ids, y = batch
    return cross_entropy(model(input_ids=ids, use_cache=False).last_hidden_state[:, -1, :3], y)
