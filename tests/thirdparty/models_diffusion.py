"""diffusers and other generative models."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.zoo.case import floats, ids, regress

from .row import Row, columns, plain

NOISY = columns(x=floats(3, 16, 16), t=ids(1000))
LATENT = columns(x=floats(4, 8, 8), t=ids(1000), text=floats(5, 16), y=ids(10))


def denoise(model: nn.Module, batch: Any) -> Tensor:
    return regress(model(batch["x"], batch["t"]).sample)


def denoise_with_text(model: nn.Module, batch: Any) -> Tensor:
    return regress(model(batch["x"], batch["t"], encoder_hidden_states=batch["text"]).sample)


def denoise_by_class(model: nn.Module, batch: Any) -> Tensor:
    return regress(model(batch["x"], timestep=batch["t"], class_labels=batch["y"]).sample)


def reconstruct(model: nn.Module, batch: Any) -> Tensor:
    return regress(model(batch["x"]).sample)


def elbo(model: nn.Module, batch: Any) -> Tensor:
    posterior = model.encode(batch["x"]).latent_dist
    return regress(model.decode(posterior.sample()).sample) + 1e-3 * posterior.kl()


def with_commitment(model: nn.Module, batch: Any) -> Tensor:
    """The commitment loss of the package is a mean over the batch, added to every sample's loss."""
    out = model(batch["x"])
    return regress(out.sample) + out.commit_loss


def sd3(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch["x"], encoder_hidden_states=batch["text"], pooled_projections=batch["pool"], timestep=batch["t"])
    return regress(out.sample)


UNET = dict(
    block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, attention_head_dim=4,
)  # fmt: skip
DIT = dict(
    num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, patch_size=2,
    norm_num_groups=4, num_embeds_ada_norm=10,
)  # fmt: skip
VAE = dict(
    block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, latent_channels=2,
    down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
)  # fmt: skip

ROWS: list[Row] = [
    plain(
        "unet_2d", "diffusers.UNet2DModel", records=NOISY, losses=denoise, sample_size=16, **UNET,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    plain(
        "unet_2d_condition", "diffusers.UNet2DConditionModel", records=LATENT, losses=denoise_with_text,
        sample_size=8, cross_attention_dim=16, **UNET,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
    plain("autoencoder_kl", "diffusers.AutoencoderKL", records=NOISY, losses=elbo, **VAE),
    plain(
        "vq_model", "diffusers.VQModel", records=NOISY, losses=reconstruct, num_vq_embeddings=12,
        block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, latent_channels=2,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    ),
    plain(
        "vq_model_commitment", "diffusers.VQModel", records=NOISY, losses=with_commitment, num_vq_embeddings=12,
        block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, latent_channels=2,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        mixes="the commitment loss is a mean over the batch",
    ),
    plain("dit_2d", "diffusers.DiTTransformer2DModel", records=LATENT, losses=denoise_by_class, **DIT),
    plain(
        "pixart_2d", "diffusers.PixArtTransformer2DModel", records=LATENT,
        losses=lambda model, batch: regress(
            model(
                batch["x"], encoder_hidden_states=batch["text"], timestep=batch["t"],
                added_cond_kwargs={"resolution": None, "aspect_ratio": None},
            ).sample
        ),
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, sample_size=8,
        patch_size=2, norm_num_groups=4, cross_attention_dim=16, caption_channels=16,
        use_additional_conditions=False,
    ),
    plain(
        "sd3_transformer", "diffusers.SD3Transformer2DModel",
        records=columns(x=floats(4, 8, 8), t=ids(1000), text=floats(5, 16), pool=floats(12)), losses=sd3,
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=12, out_channels=4,
    ),
    plain(
        "prior_transformer", "diffusers.PriorTransformer",
        records=columns(x=floats(16), t=ids(1000), text=floats(16), s=floats(5, 16)),
        losses=lambda model, batch: regress(
            model(batch["x"], batch["t"], batch["text"], batch["s"]).predicted_image_embedding
        ),
        num_attention_heads=2, attention_head_dim=8, num_layers=2, embedding_dim=16, num_embeddings=5,
    ),
]  # fmt: skip
