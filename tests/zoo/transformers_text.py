"""Unmodified Hugging Face text models from small configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .case import Case, Draw, class_loss, ids, mask, token_loss

V, T = 20, 6
SMALL: dict[str, Any] = dict(
    vocab_size=V, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12,
    max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
BATCHES = (1, 6, 2, 3)


def build(model: str, config: str, options: dict[str, Any], prepare: Callable[[Any], Any] | None = None) -> nn.Module:
    """`transformers.<model>(transformers.<config>(**options))` in evaluation mode, weights spread a little."""
    transformers = pytest.importorskip("transformers", reason="the extra clipwise[hf] is not installed")
    network = jitter(getattr(transformers, model)(getattr(transformers, config)(**options)).eval())
    return prepare(network) if prepare else network


def classify(model: nn.Module, tokens: Tensor, keep: Tensor, y: Tensor) -> Tensor:
    return class_loss(model(input_ids=tokens, attention_mask=keep).logits, y)


def predict(model: nn.Module, tokens: Tensor, y: Tensor) -> Tensor:
    return token_loss(model(input_ids=tokens).logits, y)


def predict_masked(model: nn.Module, tokens: Tensor, keep: Tensor, y: Tensor) -> Tensor:
    return token_loss(model(input_ids=tokens, attention_mask=keep).logits, y)


def predict_uncached(model: nn.Module, tokens: Tensor, y: Tensor) -> Tensor:
    return token_loss(model(input_ids=tokens, use_cache=False).logits, y)


def translate(model: nn.Module, tokens: Tensor, keep: Tensor, target: Tensor, y: Tensor) -> Tensor:
    out = model(input_ids=tokens, attention_mask=keep, decoder_input_ids=target, use_cache=False)
    return token_loss(out.logits, y)


CLASSIFY: dict[str, Draw] = {"tokens": ids(V, T, low=3), "keep": mask(T), "y": ids(2)}
PREDICT: dict[str, Draw] = {"tokens": ids(V, T, low=3), "y": ids(V, T)}
PREDICT_MASKED: dict[str, Draw] = PREDICT | {"keep": mask(T)}
TRANSLATE: dict[str, Draw] = {
    "tokens": ids(V, T, low=3), "keep": mask(T), "target": ids(V, 4, low=3), "y": ids(V, 4),
}  # fmt: skip


def hf(
    name: str,
    model: str,
    config: str,
    data: dict[str, Draw],
    loss: Callable[..., Tensor],
    options: dict[str, Any],
    **rest: Any,
) -> Case:
    prepare = rest.pop("prepare", None)
    rest = {"batches": BATCHES, **rest}
    tags = frozenset({"transformers"}) | rest.pop("tags", frozenset())
    return Case(name, lambda: build(model, config, options, prepare), data, loss, tags=tags, **rest)


def encoder(name: str, family: str, *, changes: dict[str, Any] | None = None, **rest: Any) -> Case:
    options = SMALL | (changes or {})
    return hf(name, f"{family}ForSequenceClassification", f"{family}Config", CLASSIFY, classify, options, **rest)


def decoder(
    name: str, family: str, *, changes: dict[str, Any] | None = None, head: str = "ForCausalLM", **rest: Any
) -> Case:
    options = SMALL | (changes or {})
    return hf(name, f"{family}{head}", f"{family}Config", PREDICT, predict_uncached, options, **rest)


def seq2seq(name: str, model: str, config: str, options: dict[str, Any], **rest: Any) -> Case:
    return hf(name, model, config, TRANSLATE, translate, options, **rest)


def jitter(network: nn.Module) -> nn.Module:
    """Move trainable weights off their first values: near zero (std 0.02, LoRA's B) gradients vanish, hiding errors."""
    with torch.no_grad():
        for p in network.parameters():
            if p.requires_grad:
                p.add_(0.2 * torch.randn_like(p))
    return network


SINGLE = frozenset({"float32_only"})  # its kernel takes no float64
ROTARY = {"num_key_value_heads": 1, "tie_word_embeddings": False}
GPT = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": V, "bos_token_id": 1, "eos_token_id": 2}
BART: dict[str, Any] = dict(
    vocab_size=V, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=12, decoder_ffn_dim=12, max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    decoder_start_token_id=2, forced_eos_token_id=2,
)  # fmt: skip
T5: dict[str, Any] = dict(
    vocab_size=V, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2, relative_attention_num_buckets=8,
    relative_attention_max_distance=16, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
)  # fmt: skip
MOE = ROTARY | {"num_experts_per_tok": 2, "moe_intermediate_size": 6}

ENCODERS = [
    encoder("bert", "Bert"),
    encoder("bert_eager", "Bert", changes={"attn_implementation": "eager"}),
    hf("bert_masked_lm", "BertForMaskedLM", "BertConfig", PREDICT_MASKED, predict_masked, SMALL),
    encoder("roberta", "Roberta"),
    encoder("albert", "Albert", changes={"num_hidden_layers": 3, "embedding_size": 4}),
    encoder("distilbert", "DistilBert", changes={"dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 12}),
    encoder("electra", "Electra", changes={"embedding_size": 4}),
    encoder(
        "deberta_v2",
        "DebertaV2",
        changes={
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 4,
            "share_att_key": False,
        },
    ),
    encoder("mpnet", "MPNet", changes={"relative_attention_num_buckets": 32, "pad_token_id": 1}),
    encoder("roformer", "RoFormer"),
    encoder("convbert", "ConvBert", changes={"embedding_size": 8, "conv_kernel_size": 3, "head_ratio": 1}),
    encoder("fnet", "FNet"),
    hf(
        "funnel",
        "FunnelForSequenceClassification",
        "FunnelConfig",
        CLASSIFY,
        classify,
        dict(
            vocab_size=V,
            block_sizes=[1, 1],
            d_model=8,
            n_head=2,
            d_head=4,
            d_inner=12,
            num_decoder_layers=1,
            pad_token_id=0,
        ),
        batches=(1, 5, 3, 7),
    ),
    encoder(
        "squeezebert",
        "SqueezeBert",
        changes={
            "embedding_size": 8,
            "q_groups": 2,
            "k_groups": 2,
            "v_groups": 2,
            "intermediate_groups": 2,
            "output_groups": 2,
        },
    ),
    encoder(
        "modernbert", "ModernBert", changes={"global_attn_every_n_layers": 1, "cls_token_id": 1, "sep_token_id": 2}
    ),
    hf(
        "xlnet",
        "XLNetForSequenceClassification",
        "XLNetConfig",
        CLASSIFY,
        classify,
        dict(vocab_size=V, d_model=8, n_layer=1, n_head=2, d_inner=12, pad_token_id=0, bos_token_id=1, eos_token_id=2),
    ),
]

DECODERS = [
    hf("gpt2", "GPT2LMHeadModel", "GPT2Config", PREDICT, predict_uncached, GPT),
    hf(
        "gpt2_checkpointed",
        "GPT2LMHeadModel",
        "GPT2Config",
        PREDICT,
        predict_uncached,
        GPT,
        prepare=lambda m: checkpointing(m),
    ),
    decoder("gpt_neo", "GPTNeo", changes={"num_hidden_layers": 2, "attention_types": [[["global", "local"], 1]]}),
    decoder("gptj", "GPTJ", changes=GPT | {"rotary_dim": 2}),
    decoder("opt", "OPT", changes={"ffn_dim": 12, "word_embed_proj_dim": 8}),
    decoder("llama", "Llama", changes=ROTARY),
    decoder("llama_tied_eager", "Llama", changes={"tie_word_embeddings": True, "attn_implementation": "eager"}),
    decoder("qwen2", "Qwen2", changes=ROTARY),
    decoder("qwen3", "Qwen3", changes=ROTARY | {"head_dim": 4}),
    decoder("mistral", "Mistral", changes=ROTARY),
    decoder("gemma", "Gemma", changes={"num_key_value_heads": 1, "head_dim": 4}),
    decoder("gemma2", "Gemma2", changes={"num_key_value_heads": 1, "head_dim": 4, "num_hidden_layers": 2}),
    decoder("phi", "Phi", changes={"num_key_value_heads": 2}),
    decoder("gpt_neox", "GPTNeoX"),
    decoder("bloom", "Bloom", changes={"n_layer": 1, "n_head": 2}),
    decoder("falcon", "Falcon", changes={"alibi": False, "new_decoder_architecture": False}),
    decoder("mpt", "Mpt", changes={"d_model": 8, "n_heads": 2, "n_layers": 1, "max_seq_len": 16, "expansion_ratio": 2}),
    decoder("olmo2", "Olmo2", changes=ROTARY),
    decoder("cohere", "Cohere", changes={"num_key_value_heads": 1}),
    decoder("mamba", "Mamba", changes={"state_size": 3, "conv_kernel": 3, "expand": 2, "time_step_rank": 2}),
    decoder(
        "mamba2",
        "Mamba2",
        changes={
            "state_size": 4,
            "conv_kernel": 3,
            "expand": 2,
            "num_heads": 4,
            "head_dim": 4,
            "n_groups": 1,
            "chunk_size": 4,
        },
    ),
    decoder("rwkv", "Rwkv", changes={"attention_hidden_size": 8, "context_length": 16, "num_hidden_layers": 2}),
    decoder(
        "recurrent_gemma",
        "RecurrentGemma",
        changes={
            "num_hidden_layers": 2,
            "block_types": ["recurrent", "attention"],
            "lru_width": 8,
            "num_key_value_heads": 1,
            "attention_window_size": 8,
        },
    ),
    decoder("xlstm", "xLSTM", changes={"num_heads": 2, "num_blocks": 1, "chunk_size": 4}),
]

EXPERTS = [
    decoder("mixtral", "Mixtral", changes=ROTARY | {"num_local_experts": 3, "num_experts_per_tok": 2}, tags=SINGLE),
    decoder("mixtral_eager", "Mixtral", changes=ROTARY | {"num_local_experts": 3, "experts_implementation": "eager"}),
    decoder(
        "mixtral_batched", "Mixtral", changes=ROTARY | {"num_local_experts": 3, "experts_implementation": "batched_mm"}
    ),
    decoder(
        "mixtral_grouped",
        "Mixtral",
        changes=ROTARY | {"num_local_experts": 3, "experts_implementation": "grouped_mm"},
        tags=SINGLE,
    ),
    decoder(
        "qwen2_moe",
        "Qwen2Moe",
        changes=MOE | {"num_experts": 3, "shared_expert_intermediate_size": 6, "experts_implementation": "eager"},
    ),
    decoder("olmoe", "Olmoe", changes=MOE | {"num_experts": 3, "experts_implementation": "eager"}),
    seq2seq(
        "switch_transformers",
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        T5
        | {
            "num_experts": 2,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "expert_capacity": 64,
            "num_decoder_layers": 2,
        },
    ),
]

SEQ2SEQ = [
    seq2seq("t5", "T5ForConditionalGeneration", "T5Config", T5),
    seq2seq(
        "t5_gated", "T5ForConditionalGeneration", "T5Config", T5 | {"feed_forward_proj": "gated-gelu", "num_layers": 2}
    ),
    seq2seq("bart", "BartForConditionalGeneration", "BartConfig", BART),
    seq2seq("pegasus", "PegasusForConditionalGeneration", "PegasusConfig", BART),
    seq2seq("marian", "MarianMTModel", "MarianConfig", BART),
]


def checkpointing(network: Any) -> nn.Module:
    """Non-reentrant activation checkpointing, which works in training mode only; dropout is set to zero."""
    network.activation_checkpointing_enable({"use_reentrant": False})
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    trained: nn.Module = network.train()
    return trained


CASES = [*ENCODERS, *DECODERS, *EXPERTS, *SEQ2SEQ]
