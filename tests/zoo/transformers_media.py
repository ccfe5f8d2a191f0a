"""Unmodified Hugging Face vision and audio models, and peft adapters, from small configurations."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from .case import Case, class_loss, floats, ids, mask, regress, token_loss
from .transformers_text import CLASSIFY, GPT, PREDICT, SMALL, T, V, build, classify, hf, jitter, predict_uncached

VIT: dict[str, Any] = dict(
    image_size=8, patch_size=4, num_channels=3, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
    intermediate_size=12,
)  # fmt: skip
IMAGES = {"x": floats(3, 8, 8), "y": ids(2)}
LARGE_IMAGES = {"x": floats(3, 32, 32), "y": ids(2)}
SPEECH: dict[str, Any] = dict(
    vocab_size=V, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12,
    conv_dim=(6, 6), conv_stride=(4, 2), conv_kernel=(6, 3), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2, classifier_proj_size=6, layerdrop=0.0, apply_spec_augment=False,
)  # fmt: skip
PROMPT = 3
SWIN: dict[str, Any] = dict(
    image_size=16, patch_size=2, num_channels=3, embed_dim=4, depths=[2, 1], num_heads=[1, 2], window_size=4,
    drop_path_rate=0.0,
)  # fmt: skip


def see(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return class_loss(model(pixel_values=x).logits, y)


def see_features(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return regress(model(pixel_values=x).pooler_output)


def hear(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return class_loss(model(input_values=x).logits, y)


def transcribe(model: nn.Module, x: Tensor, target: Tensor, y: Tensor) -> Tensor:
    return token_loss(model(input_features=x, decoder_input_ids=target, use_cache=False).logits, y)


def read_features(model: nn.Module, tokens: Tensor, keep: Tensor, y: Tensor) -> Tensor:
    return regress(model(input_ids=tokens, attention_mask=keep).last_hidden_state)


def match(model: nn.Module, tokens: Tensor, keep: Tensor, x: Tensor) -> Tensor:
    """Each sample's own image against its own text: no other sample of the batch takes part."""
    out = model(input_ids=tokens, attention_mask=keep, pixel_values=x)
    return -(out.text_embeds * out.image_embeds).sum(-1) * model.logit_scale.exp()


def predict_after_prompt(model: nn.Module, tokens: Tensor, y: Tensor) -> Tensor:
    return token_loss(model(input_ids=tokens, use_cache=False).logits[:, PROMPT:], y)


def vision(name: str, family: str, options: dict[str, Any], data: dict[str, Any] = IMAGES, **rest: Any) -> Case:
    rest = {"batches": (1, 4, 5, 2), **rest}
    return hf(name, f"{family}ForImageClassification", f"{family}Config", data, see, options, **rest)


def shallow(network: Any) -> nn.Module:
    """One transformer layer where MobileViT has 2, 4 and 3: a depth that its configuration does not offer."""
    found: nn.Module = network
    for module in found.modules():
        if type(module).__name__ == "MobileViTTransformer":
            module.layer = module.layer[:1]
    return found


def adapter(
    name: str, model: str, config: str, data: Any, loss: Any, options: dict[str, Any], kind: str, **settings: Any
) -> Case:
    def make() -> nn.Module:
        peft = pytest.importorskip("peft", reason="the extra clipwise[hf] is not installed")
        base = build(model, config, options)
        return jitter(peft.get_peft_model(base, getattr(peft, kind)(**settings)).eval())

    return Case(name, make, data, loss, batches=(1, 6, 2, 3), tags=frozenset({"transformers"}))


CLIP_TEXT = SMALL | {"projection_dim": 6}
CLIP_VISION = VIT | {"projection_dim": 6}

TWO_STAGES: dict[str, Any] = {"hidden_sizes": [4, 8], "depths": [1, 1]}
TWO_BLOCKS = TWO_STAGES | {"num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2]}
VISION = [
    vision("vit", "ViT", VIT),
    vision("vit_eager", "ViT", VIT | {"attn_implementation": "eager"}),
    vision("deit", "DeiT", VIT),
    hf("deit_distilled", "DeiTForImageClassificationWithTeacher", "DeiTConfig", IMAGES, see, VIT, batches=(1, 6, 4, 2)),
    vision(
        "beit",
        "Beit",
        VIT
        | {
            "use_relative_position_bias": True,
            "use_shared_relative_position_bias": False,
            "layer_scale_init_value": 0.1,
            "drop_path_rate": 0.0,
        },
    ),
    vision("dinov2", "Dinov2", VIT | {"layerscale_value": 0.1, "mlp_ratio": 2}),
    vision("swin", "Swin", SWIN, {"x": floats(3, 16, 16), "y": ids(2)}, batches=(1, 4, 2, 3)),
    vision("swinv2", "Swinv2", SWIN, {"x": floats(3, 16, 16), "y": ids(2)}, batches=(1, 4, 2, 3)),
    vision(
        "convnext",
        "ConvNext",
        TWO_STAGES | {"num_stages": 2, "patch_size": 4, "drop_path_rate": 0.0, "layer_scale_init_value": 0.1},
        LARGE_IMAGES,
    ),
    vision(
        "convnext_v2",
        "ConvNextV2",
        TWO_STAGES | {"num_stages": 2, "patch_size": 4, "drop_path_rate": 0.0},
        LARGE_IMAGES,
    ),
    vision(
        "resnet",
        "ResNet",
        TWO_STAGES | {"embedding_size": 4, "layer_type": "basic"},
        LARGE_IMAGES,
    ),
    vision(
        "regnet",
        "RegNet",
        TWO_STAGES | {"embedding_size": 4, "groups_width": 2},
        LARGE_IMAGES,
    ),
    vision(
        "segformer",
        "Segformer",
        TWO_BLOCKS | {"sr_ratios": [2, 1], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]},
        LARGE_IMAGES,
    ),
    vision(
        "poolformer",
        "PoolFormer",
        TWO_BLOCKS | {"padding": [2, 1], "mlp_ratio": 2.0},
        LARGE_IMAGES,
    ),
    vision(
        "mobilevit",
        "MobileViT",
        {
            "image_size": 32,
            "hidden_sizes": [4, 6, 8],
            "neck_hidden_sizes": [4, 4, 4, 4, 4, 4, 8],
            "num_attention_heads": 2,
            "mlp_ratio": 1.0,
        },
        LARGE_IMAGES,
        batches=(1, 4, 3),
        prepare=shallow,
    ),
    hf("clip_vision", "CLIPVisionModel", "CLIPVisionConfig", IMAGES, see_features, VIT, batches=(1, 5, 4, 2)),
    hf("clip_text", "CLIPTextModel", "CLIPTextConfig", CLASSIFY, read_features, CLIP_TEXT),
    hf(
        "clip_pairs",
        "CLIPModel",
        "CLIPConfig",
        {"tokens": ids(V, T, low=3), "keep": mask(T), "x": floats(3, 8, 8)},
        match,
        {"text_config": CLIP_TEXT, "vision_config": CLIP_VISION, "projection_dim": 6},
    ),
    hf("siglip_vision", "SiglipVisionModel", "SiglipVisionConfig", IMAGES, see_features, VIT, batches=(1, 4, 5, 2)),
    hf(
        "vilt",
        "ViltForQuestionAnswering",
        "ViltConfig",
        {"tokens": ids(V, T, low=3), "keep": mask(T), "x": floats(3, 8, 8), "y": ids(2)},
        lambda model, tokens, keep, x, y: class_loss(
            model(input_ids=tokens, attention_mask=keep, pixel_values=x).logits, y
        ),
        SMALL | VIT | {"max_image_length": 4},
    ),
]


def speech(name: str, prefix: str, **more: Any) -> Case:
    names = f"{prefix}ForSequenceClassification", f"{prefix}Config"
    return hf(name, *names, {"x": floats(120), "y": ids(2)}, hear, SPEECH | more, batches=(1, 2, 6, 3))


AUDIO = [
    speech("wav2vec2", "Wav2Vec2"),
    speech("hubert", "Hubert"),
    speech("wavlm", "WavLM", num_buckets=8, max_bucket_distance=16),
    hf(
        "whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {"x": floats(4, 16), "target": ids(V, 4, low=3), "y": ids(V, 4)},
        transcribe,
        dict(
            vocab_size=V,
            d_model=8,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=12,
            decoder_ffn_dim=12,
            num_mel_bins=4,
            max_source_positions=8,
            max_target_positions=8,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        batches=(1, 8, 4, 2, 3),
    ),
    hf(
        "audio_spectrogram",
        "ASTForAudioClassification",
        "ASTConfig",
        {"x": floats(12, 8), "y": ids(2)},
        hear,
        VIT | {"max_length": 12, "num_mel_bins": 8, "frequency_stride": 4, "time_stride": 4},
        batches=(1, 2, 6, 3),
    ),
]

LORA = {"r": 2, "lora_alpha": 4, "lora_dropout": 0.0}
GPT_LORA = LORA | {"target_modules": ["c_attn"], "fan_in_fan_out": True}
BERT_LORA = LORA | {"target_modules": ["query", "value"]}

BERT: tuple[Any, ...] = ("BertForSequenceClassification", "BertConfig", CLASSIFY, classify, SMALL)

ADAPTERS = [
    adapter("lora_bert", *BERT, "LoraConfig", task_type="SEQ_CLS", **BERT_LORA),
    adapter("lora_gpt2", "GPT2LMHeadModel", "GPT2Config", PREDICT, predict_uncached, GPT, "LoraConfig", **GPT_LORA),
    adapter("dora_bert", *BERT, "LoraConfig", use_dora=True, **BERT_LORA),
    adapter(
        "lora_embedding_gpt2",
        "GPT2LMHeadModel",
        "GPT2Config",
        PREDICT,
        predict_uncached,
        GPT,
        "LoraConfig",
        **LORA,
        target_modules=["wte", "c_fc"],
        fan_in_fan_out=True,
    ),
    adapter(
        "ia3_bert",
        "BertForSequenceClassification",
        "BertConfig",
        CLASSIFY,
        classify,
        SMALL,
        "IA3Config",
        target_modules=["key", "value", "output.dense"],
        feedforward_modules=["output.dense"],
    ),
    adapter(
        "prompt_gpt2",
        "GPT2LMHeadModel",
        "GPT2Config",
        PREDICT,
        predict_after_prompt,
        GPT,
        "PromptTuningConfig",
        task_type="CAUSAL_LM",
        num_virtual_tokens=PROMPT,
    ),
]

CASES = [*VISION, *AUDIO, *ADAPTERS]
