"""Networks that begin with public weights, each taking CIFAR-10's images as they are: 3 x 32 x 32 in [0, 1].

`efficientnet_lite0` comes from a package and runs everywhere; `vit_base`, the paper's, from the model hub; a folder
written by `save_pretrained()` is taken as it is; `tiny` is a random network of a moment, for `--quick`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clipwise.data import efficientnet_lite0, load_weights
from clipwise.errors import DataError

CLASSES = 10


class Network(nn.Module):
    """Images are brought to `side` pixels, scaled as the network was trained on them, and given to it.

    It stays in evaluation mode: batch norms keep the statistics of the public images, as private training needs, and
    nothing is dropped.
    """

    def __init__(self, network: nn.Module, side: int, mean: float = 0.5, std: float = 0.5) -> None:
        super().__init__()
        self.network, self.side, self.mean, self.std = network, side, mean, std
        self.train()

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[-1] != self.side:
            images = F.interpolate(images, size=(self.side, self.side), mode="bilinear", align_corners=False)
        outputs = self.network((images - self.mean) / self.std)
        logits: Tensor = getattr(outputs, "logits", outputs)
        return logits

    def train(self, mode: bool = True) -> Network:
        return super().train(False)


def called(network: str) -> str:
    """A name for folders and pages; that of a folder is its own."""
    return Path(network).resolve().name


def classifier(network: str, side: int | None = None) -> Network:
    """The network with a new last layer for the ten classes; `side` is another resolution than its own."""
    return _made(network, side, new_head=True)


def extractor(network: str, side: int | None = None) -> Network:
    """The network without its last layer: what it says of an image before it decides."""
    return _made(network, side, new_head=False)


def _made(network: str, side: int | None, new_head: bool) -> Network:
    if network == "efficientnet_lite0":
        model: Any = efficientnet_lite0()
        model._fc = nn.Linear(model._fc.in_features, CLASSES) if new_head else nn.Identity()
        return Network(model, side or 224, mean=127 / 255, std=128 / 255)
    if network == "tiny":
        return Network(_tiny(new_head), side or 32)
    return _transformer(load_weights(network).folder, side, new_head)


def _transformer(folder: Path, side: int | None, new_head: bool) -> Network:
    """A vision transformer; its new last layer stands on the class token."""
    from transformers import AutoModelForImageClassification

    model = AutoModelForImageClassification.from_pretrained(
        folder, num_labels=CLASSES, local_files_only=True, ignore_mismatched_sizes=True
    )
    own = int(model.config.image_size)
    if side not in (None, own):
        raise DataError(
            f"{folder} takes images of {own} pixels a side, not of {side}: its positions are made for them."
        )
    if not new_head:
        model.classifier = nn.Identity()
    scaling = folder / "preprocessor_config.json"
    told = json.loads(scaling.read_text(encoding="utf-8")) if scaling.is_file() else {}
    mean, std = told.get("image_mean", [0.5]), told.get("image_std", [0.5])
    if len({*mean}) > 1 or len({*std}) > 1:
        raise DataError(f"{scaling}: one mean and one deviation for all channels is expected.")
    return Network(model, own, mean[0], std[0])


def _tiny(new_head: bool) -> nn.Module:
    """Two random convolutions; the same for every seed, as public weights would be."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        trunk = nn.Sequential(
            nn.Conv2d(3, 8, 5, stride=4), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 24, 3, stride=2), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
    return nn.Sequential(trunk, nn.Linear(24, CLASSES) if new_head else nn.Identity())
