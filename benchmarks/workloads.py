"""The models that are measured: unmodified torch and Hugging Face models with random weights, and per-sample losses.

A `Workload` says how to build the model and a batch, and how to get the vector of per-sample losses. Sizes are
arguments of the builders, so that the scaling study reuses them. Dropout is off so that every method computes the
same function and can be compared with the per-sample loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from papers.mnist.network import layers as mnist_cnn

Batch: TypeAlias = dict[str, Tensor]
LossFn: TypeAlias = Callable[[nn.Module, Batch], Tensor]

BERT_VOCABULARY = 30_522
GPT2_VOCABULARY = 50_257


@dataclass(frozen=True)
class Goal:
    """What the step may cost, as ratios to the plain step; `memory` is None where no goal was set."""

    time: float
    memory: float | None = None


@dataclass(frozen=True)
class Workload:
    """One measured setting: model, batch, per-sample losses, and the goal beside it."""

    name: str
    title: str
    build: Callable[[], nn.Module]
    make_batch: Callable[[int], Batch]
    losses: LossFn
    batch_size: int
    goal: Goal | None = None
    rounds: int = 20
    explicit_ids: bool = False

    def model(self, seed: int = 0) -> nn.Module:
        """The model in training mode, its weights drawn from `seed`."""
        torch.manual_seed(seed)
        return self.build().train()

    def batch(self, seed: int = 0, size: int | None = None) -> Batch:
        """A batch of random data; `seed` moves on from step to step so that no method can reuse a result."""
        torch.manual_seed(1_000 + seed)
        batch = self.make_batch(self.batch_size if size is None else size)
        return with_position_ids(batch) if self.explicit_ids else batch

    def with_explicit_ids(self) -> Workload | None:
        """The same for peers that cannot broadcast position ids: they are passed for every sample. None: no tokens."""
        return replace(self, explicit_ids=True) if "input_ids" in self.make_batch(1) else None


def with_position_ids(batch: Batch) -> Batch:
    """The batch with position ids of full batch shape, and token types where the model is a classifier (BERT)."""
    ids = batch["input_ids"]
    positions = torch.arange(ids.shape[1]).expand_as(ids).contiguous()
    types = {"token_type_ids": torch.zeros_like(ids)} if "y" in batch else {}
    return {**batch, **types, "position_ids": positions}


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that a step changes."""
    return [p for p in model.parameters() if p.requires_grad]


# Small models in plain torch -------------------------------------------------------------------------------------


def mlp(inputs: int, outputs: int = 1, widths: tuple[int, ...] = (64, 64, 32)) -> nn.Module:
    """A multilayer perceptron with ReLU."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in zip((inputs, *widths), widths, strict=False):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with group norm, and a 1x1 convolution on the shortcut where the shape changes."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        groups = min(32, channels // 2)
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.GroupNorm(groups, channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, after the last ReLU."""
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


def resnet18(width: int = 64) -> nn.Module:
    """ResNet-18 for 32x32 images (3x3 stem, no max-pool) with GroupNorm in place of BatchNorm."""
    stages: list[nn.Module] = []
    channels_in = width
    for stage in range(4):
        channels = width * 2**stage
        for block in range(2):
            stages.append(ResidualBlock(channels_in, channels, 2 if stage and not block else 1))
            channels_in = channels
    stem = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.GroupNorm(min(32, width // 2), width), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels_in, 10)]
    return nn.Sequential(*stem, *stages, *head)


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    """(prediction - y)^2 of each sample."""
    return F.mse_loss(model(batch["x"]).squeeze(-1), batch["y"], reduction="none")


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of each sample, for a model that returns logits."""
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def rows(features: int, size: int) -> Batch:
    """Rows of features with a real target."""
    return {"x": torch.randn(size, features), "y": torch.randn(size)}


def images(channels: int, side: int, size: int, classes: int = 10) -> Batch:
    """Images with a class."""
    return {"x": torch.randn(size, channels, side, side), "y": torch.randint(classes, (size,))}


# Hugging Face models from their configurations, random weights -----------------------------------------------------


def vit(width: int, layers: int, heads: int, image: int = 224) -> Any:
    """`ViTForImageClassification`, as the library builds it."""
    transformers: Any = import_module("transformers")

    config = transformers.ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        image_size=image,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=10,
    )
    return transformers.ViTForImageClassification(config)


def bert(
    width: int,
    layers: int,
    heads: int,
    last_layer_only: bool = False,
    vocabulary: int = BERT_VOCABULARY,
    length: int = 512,
) -> Any:
    """`BertForSequenceClassification`; with `last_layer_only` the last block, the pooler and the head are trained."""
    transformers: Any = import_module("transformers")

    config = transformers.BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    model = transformers.BertForSequenceClassification(config)
    if last_layer_only:
        model.requires_grad_(False)
        for part in (model.bert.encoder.layer[-1], model.bert.pooler, model.classifier):
            assert part is not None
            part.requires_grad_(True)
    return model


def gpt2(width: int, layers: int, heads: int, vocabulary: int = GPT2_VOCABULARY) -> Any:
    """`GPT2LMHeadModel` with its tied head."""
    transformers: Any = import_module("transformers")

    sizes = {"vocab_size": vocabulary, "n_embd": width, "n_layer": layers, "n_head": heads}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def vit_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of each image."""
    return F.cross_entropy(model(batch["x"]).logits, batch["y"], reduction="none")


def classification_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of each text; everything in the batch but `y` goes to the model."""
    inputs = {name: value for name, value in batch.items() if name != "y"}
    return F.cross_entropy(model(**inputs).logits, batch["y"], reduction="none")


def language_model_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Mean next-token cross entropy of each text."""
    logits = model(**batch, use_cache=False).logits
    per_token = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten(), reduction="none")
    return per_token.view(len(logits), -1).mean(1)


def texts(vocabulary: int, length: int, size: int, labelled: bool = True) -> Batch:
    """Random tokens, with a class when `labelled`."""
    batch = {"input_ids": torch.randint(vocabulary, (size, length))}
    return {**batch, "y": torch.randint(2, (size,))} if labelled else batch


def bert_workload(
    length: int = 128, batch_size: int = 4, width: int = 768, layers: int = 3, vocabulary: int = BERT_VOCABULARY
) -> Workload:
    """BERT with everything trained; the scaling study varies its sizes."""
    return Workload(
        "bert_wide",
        "BERT width, 3 layers, all trained, batch 4",
        partial(bert, width, layers, max(width // 64, 1), vocabulary=vocabulary, length=max(length, 512)),
        partial(texts, vocabulary, length),
        classification_losses,
        batch_size,
        Goal(1.15, 1.2),
        rounds=12,
    )


# fmt: off
_ALL = (
    Workload("mlp", "mlp 8-64-64-32-1, batch 256",
             partial(mlp, 8), partial(rows, 8), squared_error, 256, Goal(1.8), 300),
    Workload("mlp_full", "mlp 11-64-64-32-1, full batch 1279",
             partial(mlp, 11), partial(rows, 11), squared_error, 1279, Goal(1.4), 200),
    Workload("mnist_cnn", "MNIST CNN of the paper, batch 256",
             mnist_cnn, partial(images, 1, 28), cross_entropy, 256, Goal(1.3, 1.3), 60),
    Workload("resnet18", "ResNet-18 with GroupNorm, 32x32, batch 64",
             resnet18, partial(images, 3, 32), cross_entropy, 64, Goal(1.2, 1.6), 5),
    Workload("vit_tiny", "ViT-tiny 224, batch 16",
             partial(vit, 192, 12, 3), partial(images, 3, 224), vit_losses, 16, Goal(1.10, 1.2), 8),
    Workload("vit_wide", "ViT-base width, 3 layers, batch 4",
             partial(vit, 768, 3, 12), partial(images, 3, 224), vit_losses, 4, Goal(1.10, 1.2), 12),
    Workload("bert_last", "BERT-base, last layer trained, seq 128, batch 8",
             partial(bert, 768, 12, 12, True), partial(texts, BERT_VOCABULARY, 128),
             classification_losses, 8, Goal(1.05, 1.2), 8),
    bert_workload(),
    Workload("gpt2_wide", "GPT-2 width, 3 layers, batch 4",
             partial(gpt2, 768, 3, 12), partial(texts, GPT2_VOCABULARY, 128, labelled=False),
             language_model_losses, 4, Goal(1.15, 1.2), 8),
)
# fmt: on
WORKLOADS = {workload.name: workload for workload in _ALL}
