"""transformers: images, video, sound, time series and adapters by peft."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.case import class_loss, floats, ids, mask, regress, token_loss

from .models_transformers_text import BART, ROTARY, SENTENCES, SMALL, T5, V, classify, hf, translate
from .row import Row, columns, first, thing, uniform

IMAGES = columns(x=floats(3, 32, 32), y=ids(2))
VIT: dict[str, Any] = dict(
    image_size=32, patch_size=8, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12,
)  # fmt: skip
SWIN: dict[str, Any] = dict(
    image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4, drop_path_rate=0.0,
)  # fmt: skip
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "out_features": ["stage2"]}
SPEECH: dict[str, Any] = dict(
    vocab_size=V, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12, conv_dim=(4, 4),
    conv_kernel=(4, 3), conv_stride=(3, 2), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2, feat_extract_norm="layer", do_stable_layer_norm=True, classifier_proj_size=6,
    mask_time_prob=0.0, layerdrop=0.0,
)  # fmt: skip


def see(model: nn.Module, batch: Any) -> Tensor:
    return class_loss(model(pixel_values=batch["x"]).logits, batch["y"])


def see_first(model: nn.Module, batch: Any) -> Tensor:
    return regress(first(model(pixel_values=batch["x"])))


def segment(model: nn.Module, batch: Any) -> Tensor:
    return regress(model(pixel_values=batch["x"]).logits)


def detect(model: nn.Module, batch: Any) -> Tensor:
    out = model(pixel_values=batch["x"])
    return regress(out.logits) + regress(out.pred_boxes)


def masks(model: nn.Module, batch: Any) -> Tensor:
    out = model(pixel_values=batch["x"])
    return regress(out.class_queries_logits) + regress(out.masks_queries_logits)


def hear(model: nn.Module, batch: Any) -> Tensor:
    return class_loss(model(input_values=batch["x"]).logits, batch["y"])


def contrast(model: nn.Module, batch: Any) -> Tensor:
    out = model(input_ids=batch["ids"], attention_mask=batch["keep"], pixel_values=batch["x"])
    return class_loss(out.logits_per_text, torch.arange(len(batch["ids"])))


def pair(model: nn.Module, batch: Any) -> Tensor:
    out = model(input_ids=batch["ids"], attention_mask=batch["keep"], pixel_values=batch["x"])
    return -(out.text_embeds * out.image_embeds).sum(-1) * model.logit_scale.exp()


def freeze_text(model: Any) -> Any:
    for part in (model.text_model, model.text_projection):
        part.requires_grad_(False)
    return model


def forecast(model: nn.Module, batch: Any) -> Tensor:
    """The negative log-likelihood of the package's own distribution, per series."""
    out = model(**batch, return_dict=True)
    distribution = model.output_distribution(out.params, loc=out.loc, scale=out.scale)
    return -distribution.log_prob(batch["future_values"]).mean(1)


def forecast_auto(model: nn.Module, batch: Any) -> Tensor:
    out = model(**batch, return_dict=True)
    return regress(out.params[0]) + regress(out.params[1])


def patch_forecast(model: nn.Module, batch: Any) -> Tensor:
    return regress(first(model(past_values=batch["past"]).prediction_outputs))


def autoencode(model: nn.Module, batch: Any) -> Tensor:
    """The loss of each picture's hidden patches, which the package averages over the batch."""
    out = model(pixel_values=batch["x"], noise=batch["noise"])
    target = model.patchify(batch["x"])
    return ((out.logits - target).square().mean(-1) * out.mask).sum(1) / out.mask.sum(1)


def decide(model: nn.Module, batch: Any) -> Tensor:
    out = model(
        states=batch["states"], actions=batch["actions"], rewards=batch["rewards"], returns_to_go=batch["returns"],
        timesteps=batch["time"], attention_mask=torch.ones_like(batch["time"]),
    )  # fmt: skip
    return regress(out.action_preds)


def transcribe(model: nn.Module, batch: Any) -> Tensor:
    out = model(input_features=batch["x"], decoder_input_ids=batch["target"], use_cache=False)
    return token_loss(out.logits, batch["target"])


CLIP = {
    "text_config": SMALL | {"projection_dim": 6, "eos_token_id": 2},
    "vision_config": VIT | {"projection_dim": 6},
    "projection_dim": 6,
}
PAIRS = columns(ids=ids(V, 6, low=3), keep=mask(6), x=floats(3, 32, 32))
SERIES: dict[str, Any] = dict(
    prediction_length=4, context_length=8, lags_sequence=[1, 2], num_time_features=2, d_model=8, encoder_layers=1,
    decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=12, decoder_ffn_dim=12,
    num_static_real_features=0, input_size=1,
)  # fmt: skip
WINDOWS = columns(
    past_values=uniform(0.5, 3.0, 10), past_time_features=floats(10, 2), future_time_features=floats(4, 2),
    past_observed_mask=lambda batch, g: torch.ones(batch, 10), future_values=uniform(0.5, 3.0, 4),
)  # fmt: skip
PATCHES = columns(past=floats(32, 2))
DETR: dict[str, Any] = dict(
    use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, num_queries=5, d_model=8, encoder_layers=1,
    decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=12, decoder_ffn_dim=12,
)  # fmt: skip


def detr(name: str, family: str, **changes: Any) -> Row:
    """A detector on a small ResNet of the package, made when the row is built."""

    def build() -> nn.Module:
        backbone = thing("transformers.ResNetConfig")(**RESNET)
        config = thing(f"transformers.{family}Config")(**DETR | changes, backbone_config=backbone)
        return thing(f"transformers.{family}ForObjectDetection")(config).eval()

    return Row(name, "transformers", build, IMAGES, detect)


def mask2former(name: str, family: str, **changes: Any) -> Row:
    def build() -> nn.Module:
        swin = SWIN | {"depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2], "window_size": 2, "patch_size": 2}
        backbone = thing("transformers.SwinConfig")(**swin, out_features=["stage1", "stage2", "stage3", "stage4"])
        config = thing(f"transformers.{family}Config")(**changes, backbone_config=backbone)
        return thing(f"transformers.{family}ForUniversalSegmentation")(config).eval()

    return Row(name, "transformers", build, IMAGES, masks)


def adapter(name: str, kind: str, base: str = "Bert", **settings: Any) -> Row:
    """A small BERT or T5 with an adapter of peft."""

    def build() -> nn.Module:
        if base == "T5":
            model = thing("transformers.T5ForConditionalGeneration")(thing("transformers.T5Config")(**T5))
        else:
            model = thing(f"transformers.{base}ForSequenceClassification")(
                thing(f"transformers.{base}Config")(**SMALL | (ROTARY if base == "Llama" else {}))
            )
        return thing("peft.get_peft_model")(model, thing(f"peft.{kind}")(**settings)).eval()

    if base == "T5":
        records = columns(ids=ids(V, 8, low=3), keep=mask(8), target=ids(V, 5, low=3))
        return Row(name, "peft", build, records, translate)
    return Row(name, "peft", build, SENTENCES, classify)


VISION = [
    hf("swin", "SwinForImageClassification", SWIN, IMAGES, see),
    hf("swinv2", "Swinv2ForImageClassification", SWIN, IMAGES, see),
    hf("donut_swin", "DonutSwinModel", SWIN, IMAGES, see_first),
    hf("swin2sr", "Swin2SRForImageSuperResolution",
       dict(image_size=16, patch_size=1, embed_dim=8, depths=[1], num_heads=[2], window_size=4, upscale=2),
       columns(x=floats(3, 16, 16)), lambda model, batch: regress(model(pixel_values=batch["x"]).reconstruction)),
    hf("perceiver", "PerceiverForImageClassificationLearned",
       dict(num_latents=6, d_latents=8, num_blocks=1, num_self_attends_per_block=1, num_self_attention_heads=2,
            num_cross_attention_heads=2, image_size=8, num_labels=3),
       columns(x=floats(3, 8, 8), y=ids(2)), see),
    detr("detr", "Detr"),
    detr("conditional_detr", "ConditionalDetr"),
    detr("table_transformer", "TableTransformer"),
    detr("deformable_detr", "DeformableDetr", decoder_layers=2, d_model=32, num_feature_levels=1, encoder_n_points=2,
         decoder_n_points=2),
    hf("yolos", "YolosForObjectDetection", VIT | {"image_size": [32, 32], "num_detection_tokens": 4}, IMAGES, detect),
    mask2former("mask2former", "Mask2Former", feature_size=32, mask_feature_size=32, hidden_dim=32,
                encoder_feedforward_dim=12, dim_feedforward=12, encoder_layers=1, decoder_layers=1,
                num_attention_heads=2, num_queries=5),
    hf("segformer_segmentation", "SegformerForSemanticSegmentation",
       dict(num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 8], patch_sizes=[7, 3],
            strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=8, drop_path_rate=0.0),
       IMAGES, segment),
    hf("vit_mae", "ViTMAEForPreTraining",
       VIT | {"decoder_hidden_size": 8, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2,
              "decoder_intermediate_size": 12},
       columns(x=floats(3, 32, 32), noise=uniform(0, 1, 16)), autoencode),
    hf("videomae", "VideoMAEForVideoClassification", VIT | {"num_frames": 4, "tubelet_size": 2},
       columns(x=floats(4, 3, 32, 32), y=ids(2)), see),
    hf("vivit", "VivitForVideoClassification", VIT | {"num_frames": 4, "tubelet_size": [2, 8, 8]},
       columns(x=floats(4, 3, 32, 32), y=ids(2)), see),
    hf("timesformer", "TimesformerForVideoClassification", VIT | {"num_frames": 4},
       columns(x=floats(4, 3, 32, 32), y=ids(2)), see),
    hf("pvt", "PvtForImageClassification",
       dict(image_size=32, num_encoder_blocks=2, depths=[1, 1], sequence_reduction_ratios=[2, 1], hidden_sizes=[8, 8],
            patch_sizes=[4, 2], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], drop_path_rate=0.0),
       IMAGES, see),
    hf("focalnet", "FocalNetForImageClassification",
       dict(image_size=32, embed_dim=8, depths=[1, 1], hidden_sizes=[8, 16], focal_levels=[2, 2],
            focal_windows=[3, 3], drop_path_rate=0.0),
       IMAGES, see),
    hf("mobilenet_v2", "MobileNetV2ForImageClassification", dict(depth_multiplier=0.25, image_size=32, min_depth=4),
       IMAGES, see),
    hf("efficientnet", "EfficientNetForImageClassification",
       dict(image_size=32, width_coefficient=0.25, depth_coefficient=0.3, hidden_dim=320,
            drop_connect_rate=0.0),
       IMAGES, see),
    hf("mobilenet_v1_training", "MobileNetV1ForImageClassification",
       dict(depth_multiplier=0.25, image_size=32, classifier_dropout_prob=0.0),
       IMAGES, see, train=True, mixes="BatchNorm in training mode"),
    hf("imagegpt", "ImageGPTForImageClassification",
       dict(vocab_size=V, n_positions=16, n_embd=8, n_layer=2, n_head=2), columns(x=ids(V, 16), y=ids(2)),
       lambda model, batch: class_loss(model(input_ids=batch["x"]).logits, batch["y"])),
    hf("data2vec_vision", "Data2VecVisionForImageClassification",
       VIT | {"drop_path_rate": 0.0, "use_relative_position_bias": True}, IMAGES, see),
    hf("dinov3_vit", "DINOv3ViTModel", VIT | {"num_register_tokens": 2}, IMAGES, see_first),
    hf("hiera", "HieraForImageClassification",
       dict(embed_dim=8, image_size=[32, 32], patch_size=[7, 7], patch_stride=[4, 4], patch_padding=[3, 3],
            depths=[1, 1], num_heads=[1, 2], query_stride=[2, 2], masked_unit_size=[2, 2],
            masked_unit_attention=[True, False], num_query_pool=1, drop_path_rate=0.0, mlp_ratio=2.0),
       IMAGES, see),
    hf("clip_own_pairs", "CLIPModel", CLIP, PAIRS, pair),
    hf("clip_contrastive", "CLIPModel", CLIP, PAIRS, contrast, mixes="in-batch negatives"),
    hf("clip_contrastive_frozen_text", "CLIPModel", CLIP, PAIRS, contrast, prepare=freeze_text,
       mixes="in-batch negatives of a frozen tower"),
    hf("siglip_contrastive", "SiglipModel", {"text_config": SMALL, "vision_config": VIT}, PAIRS, contrast,
       mixes="in-batch negatives"),
]  # fmt: skip

OTHERS = [
    hf("time_series_transformer", "TimeSeriesTransformerForPrediction", SERIES, WINDOWS, forecast),
    hf("informer", "InformerForPrediction", SERIES | {"sampling_factor": 2}, WINDOWS, forecast),
    hf("autoformer", "AutoformerForPrediction", SERIES | {"label_length": 4, "moving_average": 3}, WINDOWS,
       forecast_auto, mixes="delays are chosen by the mean correlation of the batch", train=True, single=True),
    hf("patch_tst", "PatchTSTForPrediction",
       dict(num_input_channels=2, context_length=32, patch_length=4, patch_stride=4, prediction_length=4, d_model=8,
            num_attention_heads=2, num_hidden_layers=2, ffn_dim=12, norm_type="layernorm", loss="mse"),
       PATCHES, patch_forecast),
    hf("patch_tsmixer", "PatchTSMixerForPrediction",
       dict(num_input_channels=2, context_length=32, patch_length=4, patch_stride=4, prediction_length=4, d_model=8,
            num_layers=2, norm_mlp="LayerNorm", loss="mse"),
       PATCHES, patch_forecast),
    hf("decision_transformer", "DecisionTransformerModel",
       dict(state_dim=3, act_dim=2, hidden_size=8, max_ep_len=16, n_layer=1, n_head=2, n_positions=64),
       columns(states=floats(5, 3), actions=floats(5, 2), rewards=floats(5, 1), returns=floats(5, 1),
               time=ids(16, 5)), decide),
    hf("whisper", "WhisperForConditionalGeneration",
       BART | {"num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 8, "suppress_tokens": None,
               "begin_suppress_tokens": None},
       columns(x=floats(4, 16), target=ids(V, 4, low=3)), transcribe),
    hf("speech_to_text", "Speech2TextForConditionalGeneration",
       BART | {"input_feat_per_channel": 4, "input_channels": 1, "conv_channels": 8, "num_conv_layers": 1,
               "conv_kernel_sizes": [3], "max_source_positions": 32, "max_target_positions": 16},
       columns(x=floats(16, 4), target=ids(V, 4, low=3)), transcribe),
    hf("unispeech", "UniSpeechForSequenceClassification", SPEECH, columns(x=floats(120), y=ids(2)), hear),
    hf("sew", "SEWForSequenceClassification", SPEECH | {"squeeze_factor": 2, "do_stable_layer_norm": False},
       columns(x=floats(120), y=ids(2)), hear),
    hf("wav2vec2_conformer", "Wav2Vec2ConformerForSequenceClassification",
       SPEECH | {"position_embeddings_type": "relative", "conv_depthwise_kernel_size": 3},
       columns(x=floats(120), y=ids(2)), hear),
    hf("encodec", "EncodecModel",
       dict(num_filters=4, hidden_size=8, codebook_size=8, num_lstm_layers=1, upsampling_ratios=[2, 2],
            num_residual_layers=1, codebook_dim=8),
       columns(x=floats(1, 64)), lambda model, batch: regress(model.decoder(model.encoder(batch["x"])))),
]  # fmt: skip

ADAPTERS = [
    adapter("lora", "LoraConfig", r=2, target_modules=["query", "value"], task_type="SEQ_CLS"),
    adapter("dora", "LoraConfig", r=2, target_modules=["query", "value"], use_dora=True),
    adapter("ia3", "IA3Config", target_modules=["key", "value", "output.dense"], feedforward_modules=["output.dense"]),
    adapter("prompt_tuning", "PromptTuningConfig", task_type="SEQ_CLS", num_virtual_tokens=3),
    adapter("p_tuning", "PromptEncoderConfig", task_type="SEQ_CLS", num_virtual_tokens=3, encoder_hidden_size=6),
    adapter("prefix_tuning", "PrefixTuningConfig", task_type="SEQ_CLS", num_virtual_tokens=3, base="Llama"),
    adapter("adalora", "AdaLoraConfig", init_r=3, target_r=2, total_step=10, target_modules=["query", "value"]),
    adapter("loha", "LoHaConfig", r=2, target_modules=["query", "value"]),
    adapter("lokr", "LoKrConfig", r=2, target_modules=["query", "value"]),
    adapter("oft", "OFTConfig", r=0, oft_block_size=4, target_modules=["query", "value"]),
    adapter("boft", "BOFTConfig", boft_block_size=4, target_modules=["query", "value"]),
    adapter("vera", "VeraConfig", r=2, target_modules=["query", "value"], projection_prng_key=1),
    adapter("fourier_ft", "FourierFTConfig", n_frequency=10, target_modules=["query", "value"]),
    adapter("ln_tuning", "LNTuningConfig", task_type="SEQ_CLS", target_modules=["LayerNorm"]),
    adapter("lora_t5", "LoraConfig", base="T5", r=2, target_modules=["q", "v"]),
    adapter("lora_llama", "LoraConfig", base="Llama", r=2, target_modules=["q_proj", "v_proj"], use_rslora=True),
]

ROWS: list[Row] = [*VISION, *OTHERS, *ADAPTERS]
