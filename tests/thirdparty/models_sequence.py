"""Sequences and sound: x-transformers, the smaller transformer packages, state spaces, recurrent and audio packages."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.zoo.case import class_loss, floats, ids, regress, token_loss

from .row import Row, columns, first, plain, thing

V, T = 20, 8
TEXT = columns(x=ids(V, T))
SERIES = columns(x=floats(T, 6))
IMAGES = columns(x=floats(16, 16, 3), y=ids(2))
NOISY = columns(x=floats(3, 8, 8), t=ids(1000))


def tokens(model: nn.Module, batch: Any) -> Tensor:
    return token_loss(first(model(batch["x"])), batch["x"])


def tokens_without_memory(model: nn.Module, batch: Any) -> Tensor:
    return token_loss(model(batch["x"])[0], batch["x"])


def translated(model: nn.Module, batch: Any) -> Tensor:
    out = model.decoder.net(batch["y"], context=model.encoder(batch["x"], return_embeddings=True))
    return token_loss(out, batch["y"])


def denoise(model: nn.Module, batch: Any) -> Tensor:
    return regress(model(batch["x"], batch["t"]))


def denoise_karras(model: nn.Module, batch: Any) -> Tensor:
    return regress(model(batch["x"], time=batch["t"].to(batch["x"].dtype) / 1000))


def logits(model: nn.Module, batch: Any) -> Tensor:
    return class_loss(first(model(batch["x"])), batch["y"])


def forecast(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch["x"])
    return regress(next(iter(out.values())) if isinstance(out, dict) else first(out))


def x_transformer(name: str, layers: str = "Decoder", records: Any = TEXT, wrapper: Any = None, **options: Any) -> Row:
    """`TransformerWrapper` of x-transformers around two small layers with the given features."""
    fields = {key: options.pop(key) for key in ("mixes", "single") if key in options}

    def build() -> nn.Module:
        stack = thing(f"x_transformers.{layers}")(dim=16, depth=2, heads=2, attn_dim_head=8, **options)
        outer = thing("x_transformers.TransformerWrapper")
        made: nn.Module = outer(num_tokens=V, max_seq_len=T, attn_layers=stack, **(wrapper or {}))
        return made.eval()

    return Row(f"x_transformers_{name}", "x_transformers", build, records, tokens, **fields)


def mamba() -> nn.Module:
    config = thing("mambapy.mamba.MambaConfig")(d_model=8, n_layers=2, d_state=4, pscan=True)
    made: nn.Module = thing("mambapy.mamba.Mamba")(config)
    return made


def ncp() -> nn.Module:
    wiring = thing("ncps.wirings.AutoNCP")(12, 3)
    made: nn.Module = thing("ncps.torch.LTC")(6, wiring)
    return made


class Spiking(nn.Module):
    """Two layers of leaky neurons of snntorch over a few time steps."""

    def __init__(self) -> None:
        super().__init__()
        surrogate = thing("snntorch.surrogate.fast_sigmoid")()
        leaky = thing("snntorch.Leaky")
        self.first, self.second = nn.Linear(6, 12), nn.Linear(12, 3)
        self.inner = leaky(beta=0.9, spike_grad=surrogate, learn_beta=True)
        self.outer = leaky(beta=0.8, spike_grad=surrogate)

    def forward(self, x: Tensor) -> Tensor:
        inner, outer = self.inner.init_leaky(), self.outer.init_leaky()
        for step in x.unbind(1):
            spikes, inner = self.inner(self.first(step), inner)
            _, outer = self.outer(self.second(spikes), outer)
        return outer


def quantized(decay: float) -> nn.Module:
    """A linear encoder before vector-quantize-pytorch's layer, whose codes follow the batch in training mode."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(6, 8), nn.Linear(8, 6)
            self.quantize = thing("vector_quantize_pytorch.VectorQuantize")(8, 12, decay=decay)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.decode(self.quantize(self.encode(x))[0])
            return out

    return Network()


class QuantizedTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = quantized(0.8)

    def train(self, mode: bool = True) -> Any:
        return super().train(True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.network(x)
        return out


def local(path: str) -> str:
    return f"{__name__}.{path}"


XT = [
    x_transformer("plain"),
    x_transformer("encoder", "Encoder"),
    x_transformer("rotary_rmsnorm_glu", rotary_pos_emb=True, use_rmsnorm=True, ff_glu=True, ff_swish=True),
    x_transformer("alibi", alibi_pos_bias=True, alibi_num_heads=1),
    x_transformer("t5_bias", rel_pos_bias=True),
    x_transformer("dynamic_position", dynamic_pos_bias=True, dynamic_pos_bias_log_distance=False, single=True),
    x_transformer("memory_tokens", wrapper={"num_memory_tokens": 3}),
    x_transformer("persistent_key_values", attn_num_mem_kv=3),
    x_transformer("talking_heads", attn_pre_talking_heads=True),
    x_transformer("sandwich_gate", gate_residual=True, sandwich_norm=True),
    x_transformer("qk_norm", attn_qk_norm=True, attn_qk_norm_dim_scale=True),
    x_transformer("one_key_value_head", attn_one_kv_head=True),
    x_transformer("shift_tokens", shift_tokens=1),
    x_transformer("sparse_top_k", attn_sparse_topk=3),
    x_transformer("hyper_connections", num_residual_streams=2),
    x_transformer("macaron_scalenorm", macaron=True, use_scalenorm=True),
    plain("x_transformers_encoder_decoder", "x_transformers.XTransformer", records=columns(x=ids(V, T), y=ids(V, 5)),
          losses=translated, dim=16, enc_num_tokens=V, enc_depth=1, enc_heads=2, enc_max_seq_len=T, dec_num_tokens=V,
          dec_depth=1, dec_heads=2, dec_max_seq_len=T),
]  # fmt: skip

LUCID = [
    plain("performer", "performer_pytorch.PerformerLM", records=TEXT, losses=tokens, num_tokens=V, max_seq_len=T,
          dim=16, depth=2, heads=2, dim_head=8),
    plain("linear_attention", "linear_attention_transformer.LinearAttentionTransformerLM", V, 16, 2, T, records=TEXT,
          losses=tokens, heads=2, dim_head=8),
    plain("sinkhorn", "sinkhorn_transformer.SinkhornTransformerLM", V, 16, T, 1, records=TEXT, losses=tokens, heads=2,
          bucket_size=4),
    plain("local_attention", "local_attention.LocalTransformer", records=TEXT, losses=tokens, num_tokens=V,
          max_seq_len=T, dim=16, depth=2, local_attn_window_size=4, dim_head=8, heads=2),
    plain("memory_transformer_xl", "memory_transformer_xl.MemoryTransformerXL", V, 16, T, 1, records=TEXT,
          losses=tokens_without_memory, mem_len=4, lmem_len=4, heads=2),
    plain("feedback_transformer", "feedback_transformer_pytorch.FeedbackTransformer", records=TEXT, losses=tokens,
          num_tokens=V, dim=16, depth=1, mem_len=4, heads=2, dim_head=8),
    plain("megabyte", "MEGABYTE_pytorch.MEGABYTE", records=columns(x=ids(V, 2, 4)),
          losses=lambda model, batch: token_loss(model(batch["x"]).flatten(1, -2), batch["x"].flatten(1)),
          num_tokens=V, dim=(16, 8), depth=(1, 1), max_seq_len=(2, 4), dim_head=8, heads=2),
    plain("charformer", "charformer_pytorch.GBST", records=TEXT, losses=lambda m, b: regress(first(m(b["x"]))),
          num_tokens=V, dim=8, max_block_size=2, downsample_factor=2),
    plain("gmlp_text", "g_mlp_pytorch.gMLP", records=TEXT, losses=tokens, num_tokens=V, dim=16, depth=2, seq_len=T),
    plain("perceiver_pytorch", "perceiver_pytorch.Perceiver", records=IMAGES, losses=logits, num_freq_bands=2, depth=1,
          max_freq=4.0, num_latents=4, latent_dim=8, cross_heads=1, latent_heads=2, cross_dim_head=4,
          latent_dim_head=4, num_classes=3),
    plain("denoising_unet", "denoising_diffusion_pytorch.Unet", records=NOISY, losses=denoise, single=True, dim=8,
          dim_mults=(1, 2), attn_dim_head=4, attn_heads=2),
    plain("karras_unet", "denoising_diffusion_pytorch.KarrasUnet", records=NOISY, losses=denoise_karras, image_size=8,
          dim=8, dim_max=16, channels=3, num_downsamples=1, num_blocks_per_stage=1, attn_dim_head=4, fourier_dim=8,
          dropout=0.0),
    plain("itransformer", "iTransformer.iTransformer", records=columns(x=floats(16, 5)), losses=forecast,
          num_variates=5, lookback_len=16, depth=1, dim=16, pred_length=4, dim_head=8, heads=2),
    plain("soft_moe", "soft_moe_pytorch.SoftMoE", 6, records=SERIES, seq_len=T, num_experts=2),
    plain("st_moe", "st_moe_pytorch.MoE", records=SERIES, dim=6, num_experts=2, capacity_factor_eval=0.5),
    plain("slot_attention", "slot_attention.SlotAttention", 3, 6, records=SERIES, hidden_dim=12),
    plain("axial_attention", "axial_attention.AxialAttention", records=columns(x=floats(4, 4, 8)), dim=8, heads=2),
    plain("lambda_layer_eval", "lambda_networks.LambdaLayer", records=columns(x=floats(8, 4, 4)), dim=8, dim_k=4, n=4,
          heads=2),
    plain("mambapy", local("mamba"), package="mambapy", records=columns(x=floats(T, 8))),
    plain("vector_quantize_eval", local("quantized"), 0.8, package="vector_quantize_pytorch", records=SERIES),
    plain("vector_quantize_training", local("QuantizedTraining"), package="vector_quantize_pytorch", records=SERIES,
          mixes="the codes are moving averages of the batch"),
]  # fmt: skip

SOUND = [
    plain("conformer_eval", "conformer.Conformer", 8, records=columns(x=floats(T, 8)), depth=1, dim_head=4, heads=2,
          conv_kernel_size=3),
    plain("demucs", "demucs.demucs.Demucs", ["a", "b"], records=columns(x=floats(1, 256)), audio_channels=1,
          channels=8, depth=2, resample=False, dconv_mode=0, norm_starts=2),
    plain("hdemucs", "demucs.hdemucs.HDemucs", ["a", "b"], records=columns(x=floats(1, 2048)), audio_channels=1,
          channels=8, depth=2, nfft=64, dconv_mode=0, norm_starts=2, kernel_size=8),
    plain("tcn", "pytorch_tcn.TCN", 6, [8, 8], records=columns(x=floats(6, T)), kernel_size=3,
          use_norm="layer_norm"),
    plain("cfc", "ncps.torch.CfC", 6, 8, records=SERIES),
    plain("ltc", local("ncp"), package="ncps", records=SERIES),
    plain("spiking", local("Spiking"), package="snntorch", records=SERIES, single=True),
]  # fmt: skip

ROWS: list[Row] = [*XT, *LUCID, *SOUND]
