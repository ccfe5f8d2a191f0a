"""transformers: text models from small configurations, most of which the zoo does not hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.case import class_loss, ids, mask, token_loss

from .row import Records, Row, columns, thing

V, T = 20, 8
SMALL: dict[str, Any] = dict(
    vocab_size=V, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12,
    max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
BART: dict[str, Any] = dict(
    vocab_size=V, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=12, decoder_ffn_dim=12, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    decoder_start_token_id=2, forced_eos_token_id=2,
)  # fmt: skip
T5: dict[str, Any] = dict(
    vocab_size=V, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2, relative_attention_num_buckets=8,
    relative_attention_max_distance=16, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
)  # fmt: skip
ROTARY: dict[str, Any] = {"num_key_value_heads": 1, "head_dim": 4, "tie_word_embeddings": False}
MAMBA: dict[str, Any] = {"state_size": 4, "expand": 2, "conv_kernel": 3, "time_step_rank": 2}


def classify(model: nn.Module, batch: Any) -> Tensor:
    return class_loss(model(input_ids=batch["ids"], attention_mask=batch["keep"]).logits, batch["y"])


def predict(model: nn.Module, batch: Any) -> Tensor:
    return token_loss(model(input_ids=batch["ids"], use_cache=False).logits, batch["ids"])


def fill(model: nn.Module, batch: Any) -> Tensor:
    return token_loss(model(input_ids=batch["ids"]).logits, batch["ids"])


def translate(model: nn.Module, batch: Any) -> Tensor:
    out = model(
        input_ids=batch["ids"], attention_mask=batch["keep"], decoder_input_ids=batch["target"], use_cache=False
    )
    return token_loss(out.logits, batch["target"])


def translate_all(model: nn.Module, batch: Any) -> Tensor:
    out = model(input_ids=batch["ids"], decoder_input_ids=batch["target"], use_cache=False)
    return token_loss(out.logits, batch["target"])


def on_page(model: nn.Module, batch: Any) -> Tensor:
    out = model(input_ids=batch["ids"], bbox=batch["box"], attention_mask=batch["keep"])
    return class_loss(out.logits, batch["y"])


def boxes(batch: int, g: torch.Generator) -> Tensor:
    """Corners (B, T, 4) of rectangles on a page of 10 x 10."""
    corners = torch.randint(0, 10, (2, batch, T, 2), generator=g).sort(dim=0).values
    return torch.cat([corners[0], corners[1]], -1)


SENTENCES = columns(ids=ids(V, T, low=3), keep=mask(T), y=ids(2))
PAIRS = columns(ids=ids(V, T, low=3), keep=mask(T), target=ids(V, 5, low=3))
PAGES = columns(ids=ids(V, T, low=3), keep=mask(T), y=ids(2), box=boxes)


def hf(
    name: str,
    model: str,
    config: dict[str, Any],
    records: Records,
    losses: Callable[[nn.Module, Any], Tensor],
    *,
    family: str | None = None,
    prepare: Callable[[Any], Any] | None = None,
    train: bool = False,
    **fields: Any,
) -> Row:
    """`transformers.<model>(transformers.<family>Config(**config))`; the family is the name before `For` or `Model`."""
    kind = family or model.split("For")[0].removesuffix("LMHeadModel").removesuffix("Model")

    def build() -> nn.Module:
        made = thing(f"transformers.{model}")(thing(f"transformers.{kind}Config")(**config))
        return (prepare(made) if prepare else made).train(train)

    return Row(name, "transformers", build, records, losses, **fields)


def encoder(name: str, family: str, **changes: Any) -> Row:
    fields = {key: changes.pop(key) for key in ("mixes", "single", "train") if key in changes}
    return hf(name, f"{family}ForSequenceClassification", SMALL | changes, SENTENCES, classify, **fields)


def decoder(
    name: str, family: str, head: str = "ForCausalLM", base: dict[str, Any] | None = None, **changes: Any
) -> Row:
    fields = {key: changes.pop(key) for key in ("mixes", "single", "train") if key in changes}
    options = (SMALL if base is None else base) | changes
    return hf(name, f"{family}{head}", options, SENTENCES, predict, family=family, **fields)


def seq2seq(name: str, family: str, base: dict[str, Any], **changes: Any) -> Row:
    fields = {key: changes.pop(key) for key in ("mixes", "single", "train") if key in changes}
    losses = changes.pop("losses", translate)
    return hf(name, f"{family}ForConditionalGeneration", base | changes, PAIRS, losses, **fields)


MOE: dict[str, Any] = ROTARY | {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
FLAT = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 32, "n_ctx": 32, "vocab_size": V, "dff": 12}

ENCODERS = [
    encoder(
        "deberta_v2", "DebertaV2", relative_attention=True, max_relative_positions=8, position_buckets=4,
        pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm", position_biased_input=False, share_att_key=True,
    ),
    encoder("deberta", "Deberta", relative_attention=True, max_relative_positions=8, pos_att_type=["c2p", "p2c"]),
    hf(
        "xlnet", "XLNetForSequenceClassification",
        dict(vocab_size=V, d_model=8, n_layer=2, n_head=2, d_inner=12, use_mems_train=False), SENTENCES, classify,
    ),
    encoder("big_bird_full", "BigBird", attention_type="original_full"),
    hf("big_bird_block_sparse", "BigBirdForMaskedLM",
       SMALL | {"attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1},
       columns(ids=ids(V, 24, low=3)), fill),
    hf("longformer", "LongformerForMaskedLM", SMALL | {"attention_window": 4, "max_position_embeddings": 40},
       SENTENCES, fill),
    hf(
        "reformer", "ReformerForMaskedLM",
        dict(vocab_size=V, hidden_size=8, num_attention_heads=2, attention_head_size=4, feed_forward_size=12,
             attn_layers=["local", "local"], local_attn_chunk_length=4, axial_pos_shape=[2, 4],
             axial_pos_embds_dim=[4, 4], is_decoder=False, max_position_embeddings=8, hidden_dropout_prob=0.0,
             local_attention_probs_dropout_prob=0.0),
        SENTENCES, fill, train=True,
    ),
    hf(
        "funnel", "FunnelForSequenceClassification",
        dict(vocab_size=V, d_model=8, n_head=2, d_head=4, d_inner=12, block_sizes=[1, 1], num_decoder_layers=1),
        SENTENCES, classify,
    ),
    hf("layout_lm", "LayoutLMForSequenceClassification", SMALL | {"max_2d_position_embeddings": 10}, PAGES, on_page),
    hf("lilt", "LiltForSequenceClassification",
       SMALL | {"max_2d_position_embeddings": 10, "channel_shrink_ratio": 2, "hidden_size": 12}, PAGES, on_page),
    hf("bros", "BrosForTokenClassification", SMALL | {"hidden_size": 64}, PAGES,
       lambda model, batch: class_loss(
           model(input_ids=batch["ids"], bbox=batch["box"] / 10).logits[:, 0], batch["y"])),
    encoder("nystromformer", "Nystromformer", num_landmarks=8, segment_means_seq_len=8),
    encoder("ernie", "Ernie"),
    hf("esm", "EsmForMaskedLM", SMALL | {"mask_token_id": 3, "position_embedding_type": "rotary"}, SENTENCES, fill),
    encoder("megatron_bert", "MegatronBert"),
    encoder("mobile_bert", "MobileBert", embedding_size=6, intra_bottleneck_size=8, num_feedforward_networks=2),
    encoder("modern_bert", "ModernBert", global_attn_every_n_layers=2, local_attention=4, cls_token_id=1,
            sep_token_id=2),
    encoder("rem_bert", "RemBert", input_embedding_size=6, output_embedding_size=6),
    encoder("squeeze_bert", "SqueezeBert", embedding_size=8, q_groups=2, k_groups=2, v_groups=2,
            post_attention_groups=1, intermediate_groups=2, output_groups=2),
    hf("xlm", "XLMForSequenceClassification",
       dict(vocab_size=V, n_words=V, emb_dim=8, n_layers=2, n_heads=2, max_position_embeddings=32, pad_index=0,
            pad_token_id=0, use_lang_emb=False, n_langs=1),
       SENTENCES, classify),
    hf("flaubert", "FlaubertForSequenceClassification",
       dict(vocab_size=V, n_words=V, emb_dim=8, n_layers=2, n_heads=2, max_position_embeddings=32, pad_index=0,
            pad_token_id=0, n_langs=1),
       SENTENCES, classify),
    encoder("ibert", "IBert", quant_mode=False),
    encoder("roberta_prelayernorm", "RobertaPreLayerNorm"),
    hf("tapas", "TapasForSequenceClassification", SMALL | {"type_vocab_sizes": [3, 8, 8, 2, 8, 8, 4]},
       SENTENCES, classify),
]  # fmt: skip

DECODERS = [
    hf("gemma3_text", "Gemma3ForCausalLM", SMALL | ROTARY | {"sliding_window": 4, "query_pre_attn_scalar": 4},
       SENTENCES, predict, family="Gemma3Text"),
    decoder("mamba2", "Mamba2", base=dict(
        vocab_size=V, hidden_size=8, num_hidden_layers=2, state_size=4, expand=2, conv_kernel=3, head_dim=4,
        num_heads=4, n_groups=1, chunk_size=4, pad_token_id=0, bos_token_id=1, eos_token_id=2)),
    decoder("falcon_mamba", "FalconMamba", **MAMBA),
    decoder("jamba", "Jamba", single=True, **ROTARY, num_experts=2, num_experts_per_tok=1, attn_layer_period=2,
            attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, mamba_d_state=4, mamba_d_conv=3,
            mamba_dt_rank=2, use_mamba_kernels=False),
    decoder("recurrent_gemma", "RecurrentGemma", **ROTARY, lru_width=8, attention_window_size=4,
            block_types=["recurrent", "attention"], conv1d_width=3),
    decoder("ctrl", "CTRL", head="LMHeadModel", base=FLAT),
    decoder("codegen", "CodeGen", base=FLAT | {"rotary_dim": 4, "n_inner": 12, "n_head": 4, "n_embd": 16}),
    decoder("xglm", "XGLM", single=True, base=dict(
        vocab_size=V, d_model=8, ffn_dim=12, num_layers=2, attention_heads=2, max_position_embeddings=32)),
    decoder("biogpt", "BioGpt"),
    decoder("gpt_bigcode", "GPTBigCode", base=FLAT | {"multi_query": True}),
    decoder("stable_lm", "StableLm", **ROTARY | {"num_key_value_heads": 2}),
    decoder("starcoder2", "Starcoder2", **ROTARY),
    decoder("phi3", "Phi3", **ROTARY | {"num_key_value_heads": 2}),
    decoder("granite", "Granite", **ROTARY),
    decoder("nemotron", "Nemotron", **ROTARY),
    decoder("persimmon", "Persimmon", partial_rotary_factor=1.0),
    decoder("glm4", "Glm4", **ROTARY),
    decoder("helium", "Helium", **ROTARY),
    decoder("diff_llama", "DiffLlama", **ROTARY | {"num_key_value_heads": 2}),
    decoder("smollm3", "SmolLM3", **ROTARY),
    decoder("qwen2_moe", "Qwen2Moe", single=True, **MOE, num_experts=4, shared_expert_intermediate_size=8),
    decoder("deepseek_v3", "DeepseekV3", single=True, **MOE | {"num_key_value_heads": 2}, n_routed_experts=4, n_group=2,
            topk_group=1, n_shared_experts=1, q_lora_rank=4, kv_lora_rank=4, qk_rope_head_dim=4, qk_nope_head_dim=4,
            v_head_dim=4, first_k_dense_replace=1),
    decoder("gpt_oss", "GptOss", single=True, **ROTARY, num_local_experts=4, num_experts_per_tok=2, sliding_window=4),
    decoder("lfm2", "Lfm2", **ROTARY, layer_types=["conv", "full_attention"], conv_L_cache=3, block_ff_dim=12,
            block_multiple_of=4),
    decoder("apertus", "Apertus", **ROTARY),
]  # fmt: skip

SEQ2SEQ = [
    seq2seq("t5", "T5", T5),
    seq2seq("t5_gated", "T5", T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    seq2seq("umt5", "UMT5", T5),
    seq2seq("long_t5_local", "LongT5", T5, local_radius=2, encoder_attention_type="local"),
    seq2seq("long_t5_global", "LongT5", T5, local_radius=2, global_block_size=2,
            encoder_attention_type="transient-global"),
    seq2seq("mbart", "MBart", BART),
    seq2seq("m2m100", "M2M100", BART),
    seq2seq("blenderbot", "Blenderbot", BART),
    seq2seq("led", "LED", BART, losses=translate_all, attention_window=4, max_encoder_position_embeddings=32,
            max_decoder_position_embeddings=32),
    seq2seq("pegasus_x", "PegasusX", BART, block_size=4, num_global_tokens=2, stagger_local_blocks=False),
    seq2seq("prophet_net", "ProphetNet", dict(
        vocab_size=V, hidden_size=8, encoder_ffn_dim=12, decoder_ffn_dim=12, num_encoder_layers=1,
        num_decoder_layers=1, num_encoder_attention_heads=2, num_decoder_attention_heads=2,
        max_position_embeddings=32, ngram=2, num_buckets=8, relative_max_distance=16), losses=translate_all),
    seq2seq("big_bird_pegasus", "BigBirdPegasus", BART, attention_type="original_full"),
    seq2seq("switch_transformers", "SwitchTransformers", T5, num_experts=2, expert_capacity=64,
            num_sparse_encoder_layers=1, num_sparse_decoder_layers=1),
    seq2seq("switch_transformers_small_capacity", "SwitchTransformers", T5, num_experts=2, expert_capacity=3,
            num_sparse_encoder_layers=1, num_sparse_decoder_layers=1),
    seq2seq("nllb_moe", "NllbMoe", BART, num_experts=2, expert_capacity=3, encoder_sparse_step=1,
            decoder_sparse_step=1, moe_eval_capacity_token_fraction=0.2,
            mixes="an expert takes only so many tokens of the batch"),
]  # fmt: skip

ROWS: list[Row] = [*ENCODERS, *DECODERS, *SEQ2SEQ]
