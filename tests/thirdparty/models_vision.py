"""Images and volumes: timm, vit-pytorch, segmentation-models-pytorch, monai, torchvision and smaller packages."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.zoo.case import class_loss, floats, ids, regress

from .row import Row, columns, first, plain, thing

SMALL = columns(x=floats(3, 32, 32), y=ids(2))
LARGE = columns(x=floats(3, 64, 64), y=ids(2))
GREY = columns(x=floats(1, 32, 32))
VOLUME = columns(x=floats(1, 16, 16, 16))


def logits(model: nn.Module, batch: Any) -> Tensor:
    return class_loss(first(model(batch["x"])), batch["y"])


def timm(name: str, model: str, records: Any = SMALL, train: bool = False, **options: Any) -> Row:
    """A model of timm by its name."""
    fields = {key: options.pop(key) for key in ("mixes", "single") if key in options}

    def build() -> nn.Module:
        return thing("timm.create_model")(model, num_classes=3, **options).train(train)

    return Row(f"timm_{name}", "timm", build, records, logits, **fields)


MIXER = dict(num_classes=3, img_size=32, patch_size=8, embed_dim=16, num_blocks=2)
TINY = dict(img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2)
VIT = dict(image_size=32, patch_size=8, num_classes=3, dim=16, depth=2, heads=2, mlp_dim=24)

TIMM = [
    timm("vit", "vit_tiny_patch16_224", **TINY),
    timm("deit3", "deit3_small_patch16_224", **TINY),
    timm("eva", "eva02_tiny_patch14_224", **TINY),
    timm("beit", "beit_base_patch16_224", **TINY),
    timm("cait", "cait_xxs24_224", **TINY),
    timm("xcit", "xcit_nano_12_p16_224", **TINY),
    timm("convnext", "convnext_atto", dims=(8, 8, 16, 16), depths=(1, 1, 1, 1)),
    plain("timm_mixer", "timm.models.mlp_mixer.MlpMixer", records=SMALL, losses=logits, **MIXER),
    plain("timm_convmixer_eval", "timm.models.convmixer.ConvMixer", 16, 2, 3, 4, records=SMALL, losses=logits,
          num_classes=3),
    timm("swin", "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=8, depths=(1, 1),
         num_heads=(1, 2)),
    timm("poolformer", "poolformer_s12", layers=(1, 1), embed_dims=(8, 16), mlp_ratios=(2, 2),
         downsamples=(False, True)),
    timm("nfnet", "nfnet_f0", depths=(1, 1, 1, 1), channels=(16, 16, 16, 16), group_size=8, ch_div=8),
    timm("resnet_group_norm", "resnet10t", norm_layer="groupnorm1"),
    timm("resnet_eval", "resnet10t"),
    timm("resnet_training", "resnet10t", train=True, mixes="BatchNorm in training mode"),
    timm("mobilenetv3_eval", "mobilenetv3_small_050", records=LARGE),
    timm("efficientvit_eval", "efficientvit_b0", records=LARGE, widths=(8, 8, 16, 16, 16), head_widths=(16, 16)),
]  # fmt: skip

VIT_PYTORCH = [
    plain("vit_pytorch_vit", "vit_pytorch.ViT", records=SMALL, losses=logits, **VIT),
    plain("vit_pytorch_simple", "vit_pytorch.SimpleViT", records=SMALL, losses=logits, **VIT),
    plain("vit_pytorch_deepvit", "vit_pytorch.deepvit.DeepViT", records=SMALL, losses=logits, **VIT),
    plain("vit_pytorch_cait", "vit_pytorch.cait.CaiT", records=SMALL, losses=logits, cls_depth=1, **VIT),
    plain("vit_pytorch_t2t", "vit_pytorch.t2t.T2TViT", records=SMALL, losses=logits, dim=16, image_size=32, depth=1,
          heads=2, mlp_dim=24, num_classes=3, t2t_layers=((7, 4), (3, 2))),
    plain("vit_pytorch_cct", "vit_pytorch.cct.CCT", records=SMALL, losses=logits, img_size=(32, 32),
          embedding_dim=16, n_conv_layers=1, kernel_size=7, stride=2, padding=3, pooling_kernel_size=3,
          pooling_stride=2, pooling_padding=1, num_layers=2, num_heads=2, mlp_ratio=2.0, num_classes=3,
          positional_embedding="learnable"),
    plain("vit_pytorch_crossvit", "vit_pytorch.cross_vit.CrossViT", records=LARGE, losses=logits, image_size=64,
          num_classes=3, depth=1, sm_dim=8, sm_patch_size=16, sm_enc_depth=1, sm_enc_heads=2, sm_enc_mlp_dim=12,
          lg_dim=16, lg_patch_size=32, lg_enc_depth=1, lg_enc_heads=2, lg_enc_mlp_dim=24, cross_attn_depth=1,
          cross_attn_heads=2),
    plain("vit_pytorch_pit", "vit_pytorch.pit.PiT", records=SMALL, losses=logits, image_size=32, patch_size=8,
          dim=16, num_classes=3, depth=(1, 1), heads=2, mlp_dim=24),
    plain("vit_pytorch_levit", "vit_pytorch.levit.LeViT", records=LARGE, losses=logits, image_size=64, num_classes=3,
          stages=2, dim=(16, 16), depth=1, heads=(2, 2), mlp_mult=2),
    plain("vit_pytorch_maxvit", "vit_pytorch.max_vit.MaxViT", records=LARGE, losses=logits, num_classes=3,
          dim_conv_stem=8, dim=8, dim_head=4, depth=(1, 1), window_size=4),
    plain("vit_pytorch_nest", "vit_pytorch.nest.NesT", records=SMALL, losses=logits, image_size=32, patch_size=4,
          dim=8, heads=2, num_hierarchies=2, block_repeats=(1, 1), num_classes=3),
    plain("vit_pytorch_regionvit", "vit_pytorch.regionvit.RegionViT", records=LARGE, losses=logits,
          dim=(8, 8, 16, 16), depth=(1, 1, 1, 1), window_size=2, num_classes=3),
    plain("vit_pytorch_scalable", "vit_pytorch.scalable_vit.ScalableViT", records=LARGE, losses=logits, num_classes=3,
          dim=8, heads=(2, 2, 2, 2), depth=(1, 1, 1, 1), ssa_dim_key=(4, 4, 4, 4), reduction_factor=(2, 2, 1, 1),
          window_size=(4, 4, None, None)),
    plain("vit_pytorch_3d", "vit_pytorch.vit_3d.ViT", records=columns(x=floats(3, 4, 16, 16), y=ids(2)),
          losses=logits, image_size=16, image_patch_size=8, frames=4, frame_patch_size=2, num_classes=3, dim=16,
          depth=2, heads=2, mlp_dim=24),
    plain("vit_pytorch_cvt", "vit_pytorch.cvt.CvT", records=LARGE, losses=logits, num_classes=3, s1_emb_dim=8,
          s2_emb_dim=8, s3_emb_dim=16, s2_heads=2, s3_heads=2, s3_depth=1),
    plain("mlp_mixer_pytorch", "mlp_mixer_pytorch.MLPMixer", records=SMALL, losses=logits, image_size=32, channels=3,
          patch_size=8, dim=16, depth=2, num_classes=3),
]  # fmt: skip

MONAI = [
    plain("monai_unet", "monai.networks.nets.UNet", records=GREY, spatial_dims=2, in_channels=1, out_channels=2,
          channels=(4, 8, 8), strides=(2, 2), num_res_units=1),
    plain("monai_basic_unet", "monai.networks.nets.BasicUNet", records=GREY, spatial_dims=2, features=(4,) * 6),
    plain("monai_attention_unet_eval", "monai.networks.nets.AttentionUnet", records=GREY, spatial_dims=2,
          in_channels=1, out_channels=2, channels=(4, 8, 8), strides=(2, 2)),
    plain("monai_dynunet", "monai.networks.nets.DynUNet", records=GREY, spatial_dims=2, in_channels=1,
          out_channels=2, kernel_size=[3, 3, 3], strides=[1, 2, 2], upsample_kernel_size=[2, 2], filters=[4, 8, 8]),
    plain("monai_segresnet", "monai.networks.nets.SegResNet", records=VOLUME, init_filters=8, blocks_down=(1, 1),
          blocks_up=(1,)),
    plain("monai_swin_unetr", "monai.networks.nets.SwinUNETR", records=columns(x=floats(1, 64, 64)), in_channels=1,
          out_channels=2, feature_size=12, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 2), spatial_dims=2,
          window_size=4),
    plain("monai_unetr", "monai.networks.nets.UNETR", records=GREY, in_channels=1, out_channels=2, img_size=32,
          feature_size=4, hidden_size=16, mlp_dim=24, num_heads=2, spatial_dims=2),
    plain("monai_vit", "monai.networks.nets.ViT", records=GREY, in_channels=1, img_size=(32, 32), patch_size=(8, 8),
          hidden_size=16, mlp_dim=24, num_layers=2, num_heads=2, classification=True, spatial_dims=2),
    plain("monai_autoencoder", "monai.networks.nets.AutoEncoder", records=GREY, spatial_dims=2, in_channels=1,
          out_channels=1, channels=(4, 8), strides=(2, 2)),
    plain("monai_diffusion_unet", "monai.networks.nets.DiffusionModelUNet",
          records=columns(x=floats(1, 16, 16), t=ids(1000)),
          losses=lambda model, batch: regress(model(batch["x"], batch["t"])), spatial_dims=2, in_channels=1,
          out_channels=1, channels=(8, 16), attention_levels=(False, True), num_res_blocks=1, norm_num_groups=4,
          num_head_channels=4),
    plain("monai_unet_batch_norm_training", f"{__name__}.monai_training", package="monai", records=GREY,
          mixes="BatchNorm in training mode"),
]  # fmt: skip


def monai_training() -> Any:
    """MONAI's UNet with BatchNorm, kept in training mode by the caller's `eval`."""
    net = thing("monai.networks.nets.UNet")
    return Training(net(spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8), strides=(2,), norm="batch"))


class Training(nn.Module):
    """A model that stays in training mode."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def train(self, mode: bool = True) -> Any:
        return super().train(True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out


SMP: dict[str, Any] = dict(encoder_weights=None, classes=2)

SEGMENTATION = [
    plain("smp_unet_eval", "segmentation_models_pytorch.Unet", "resnet18", records=SMALL, encoder_depth=3,
          decoder_channels=(16, 8, 8), **SMP),
    plain("smp_fpn_eval", "segmentation_models_pytorch.FPN", "resnet18", records=SMALL, encoder_depth=3,
          decoder_pyramid_channels=16, decoder_segmentation_channels=32, **SMP),
    plain("smp_segformer_eval", "segmentation_models_pytorch.Segformer", "mobilenet_v2", records=SMALL,
          decoder_segmentation_channels=16, **SMP),
]  # fmt: skip

OTHERS = [
    plain("efficientnet_pytorch_eval", f"{__name__}.efficientnet", package="efficientnet_pytorch", records=SMALL),
    plain("pytorchcv_resnet_eval", "pytorchcv.model_provider.get_model", "resnet20_cifar10", records=SMALL),
    plain("torchvision_vit", "torchvision.models.VisionTransformer", records=SMALL, losses=logits, image_size=32,
          patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=24),
    plain("torchvision_swin", "torchvision.models.SwinTransformer", records=SMALL, losses=logits, patch_size=[4, 4],
          embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=[4, 4], stochastic_depth_prob=0.0),
    plain("torchvision_squeezenet", "torchvision.models.squeezenet1_1", records=LARGE, losses=logits, num_classes=3),
]  # fmt: skip


def efficientnet() -> nn.Module:
    """EfficientNet-B0 as the package gives it."""
    made: nn.Module = thing("efficientnet_pytorch.EfficientNet").from_name("efficientnet-b0", num_classes=3)
    return made


ROWS: list[Row] = [*TIMM, *VIT_PYTORCH, *MONAI, *SEGMENTATION, *OTHERS]
