"""Augmentation between records, in the loop and in the collate function, and other rows read by position."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from .programs import (
    Formula,
    Listed,
    convnet,
    cross_entropy,
    honest,
    images,
    memory,
    mixing,
    mlp,
    on_inputs,
    parts,
    plain,
    series,
)

Batch = Any


# In the loop


@mixing()
def mixup(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    lam, other = torch.distributions.Beta(0.4, 0.4).sample(), torch.randperm(len(x))
    logits = model(lam * x + (1 - lam) * x[other])
    return lam * cross_entropy(logits, y) + (1 - lam) * cross_entropy(logits, y[other])


@mixing()
def mixup_with_a_weight_for_each_sample(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    lam, other = torch.rand(len(x), 1), torch.randperm(len(x))
    hot = F.one_hot(y, 3).to(x)
    return cross_entropy(model(lam * x + (1 - lam) * x[other]), lam * hot + (1 - lam) * hot[other])


on_inputs(
    mixing,
    mixup_with_the_reversed_batch=lambda x: 0.7 * x + 0.3 * x.flip(0),
)


@honest(dataset=lambda: TensorDataset(torch.randn(48, 2, 6), torch.randint(3, (48,))))
def mixup_of_two_views_of_one_record(model: nn.Module, batch: Batch) -> Tensor:
    views, y = batch
    lam = torch.rand(len(y), 1)
    return cross_entropy(model(lam * views[:, 0] + (1 - lam) * views[:, 1]), y)


@honest()
def mixup_with_random_numbers(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    lam = torch.distributions.Beta(0.4, 0.4).sample()
    return cross_entropy(model(lam * x + (1 - lam) * torch.randn_like(x)), y)


@mixing()
def manifold_mixup(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    h, other = model[1](model[0](x)), torch.randperm(len(x))
    logits = model[2](0.6 * h + 0.4 * h[other])
    return 0.6 * cross_entropy(logits, y) + 0.4 * cross_entropy(logits, y[other])


@mixing()
def manifold_mixup_with_a_detached_partner(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    h = model[1](model[0](x))
    return cross_entropy(model[2](0.6 * h + 0.4 * h.detach().roll(1, 0)), y)


@mixing(build=convnet, dataset=images(), mended=plain)
def cutmix(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    other = torch.randperm(len(x))
    pasted = x.clone()
    pasted[:, :, 1:4, 2:5] = x[other, :, 1:4, 2:5]
    logits = model(pasted)
    return 0.75 * cross_entropy(logits, y) + 0.25 * cross_entropy(logits, y[other])


@honest(build=convnet, dataset=images())
def cutout(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    cut = x.clone()
    cut[:, :, 1:4, 2:5] = 0
    return cross_entropy(model(cut), y)


@mixing(build=convnet, dataset=images(), mended=plain)
def style_of_another_image(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    mean, std = x.mean((2, 3), keepdim=True), x.std((2, 3), keepdim=True)
    other = torch.randperm(len(x))
    return cross_entropy(model((x - mean) / std * std[other] + mean[other]), y)


@honest(build=convnet, dataset=images())
def style_of_random_numbers(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    mean, std = x.mean((2, 3), keepdim=True), x.std((2, 3), keepdim=True)
    return cross_entropy(model((x - mean) / std * (1 + 0.1 * torch.randn_like(std)) + torch.randn_like(mean)), y)


@mixing()
def features_swapped_between_records(model: nn.Module, batch: Batch) -> Tensor:
    """Corruption by the marginals of the batch, as in self-supervised learning of tables."""
    x, y = batch
    swapped = torch.stack([column[torch.randperm(len(x))] for column in x.unbind(1)], dim=1)
    return cross_entropy(model(torch.where(torch.rand_like(x) < 0.4, swapped, x)), y)


@honest(state=memory(marginals=lambda: torch.randn(100, 6)))
def features_swapped_with_a_public_table(model: nn.Module, batch: Batch, kept: SimpleNamespace) -> Tensor:
    x, y = batch
    drawn = kept.marginals.gather(0, torch.randint(100, x.shape))
    return cross_entropy(model(torch.where(torch.rand_like(x) < 0.4, drawn, x)), y)


@mixing()
def labels_shuffled(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return cross_entropy(model(x), y[torch.randperm(len(y))])


@mixing()
def interpolated_with_the_nearest_record(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    nearest = (torch.cdist(x, x) + 1e4 * torch.eye(len(x))).argmin(1)
    return cross_entropy(model(x + 0.5 * (x[nearest] - x)), y)


# Other rows by position


on_inputs(
    mixing,
    difference_to_the_neighbour=lambda x: x - x.roll(1, 0),
    running_sum_of_inputs=lambda x: x.cumsum(0),
    running_maximum_of_inputs=lambda x: x.cummax(0).values,
    median_of_the_batch_subtracted=lambda x: x - x.median(0).values,
    sorted_inputs=lambda x: x.sort(0).values,
)
on_inputs(
    honest,
    sorted_features=lambda x: x.sort(1).values,
)


@mixing(dataset=lambda: TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)), torch.randint(100, (48,))))
def row_of_another_sample_by_a_column(model: nn.Module, batch: Batch) -> Tensor:
    x, y, pointer = batch
    return cross_entropy(model(x[pointer % len(x)] + x), y)


@mixing(build=lambda: Formula({"w": (6, 3)}))
def convolution_along_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    kernel = torch.ones(1, 1, 3) / 3
    smooth = F.conv1d(x.T.unsqueeze(1), kernel, padding=1).squeeze(1).T
    return cross_entropy(smooth @ model.w, y)


@mixing(build=parts(conv=lambda: nn.Conv1d(6, 3, 3, padding=1)))
def learned_convolution_along_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return cross_entropy(model.conv(x.T.unsqueeze(0)).squeeze(0).T, y)


@honest(build=parts(conv=lambda: nn.Conv1d(4, 3, 3, padding=1)), dataset=series())
def learned_convolution_along_time(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return cross_entropy(model.conv(x.transpose(1, 2)).mean(2), y)


on_inputs(
    partial(mixing, build=mlp),
    pooling_along_the_batch=lambda x: F.avg_pool1d(x.T, 3, stride=1, padding=1).T,
)


@mixing(build=lambda: nn.Sequential(nn.Flatten(), nn.Linear(28, 3)), dataset=series())
def reshaped_instead_of_transposed(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    length_first = x.reshape(x.shape[1], len(x), -1)
    return cross_entropy(model(length_first.transpose(0, 1)), y)


@honest(build=lambda: nn.Sequential(nn.Flatten(), nn.Linear(28, 3)), dataset=series())
def transposed_twice(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    length_first = x.transpose(0, 1).contiguous()
    return cross_entropy(model(length_first.tanh().transpose(0, 1)), y)


# In the collate function


def mixup_collate(records: list[Any]) -> Batch:
    x, y = default_collate(records)
    other = torch.randperm(len(x))
    hot = F.one_hot(y, 3).to(x)
    return 0.7 * x + 0.3 * x[other], 0.7 * hot + 0.3 * hot[other]


def cutmix_collate(records: list[Any]) -> Batch:
    x, y = default_collate(records)
    x[:, :, :3] = x.roll(1, 0)[:, :, :3]
    return x, y


def standardising_collate(records: list[Any]) -> Batch:
    x, y = default_collate(records)
    return (x - x.mean(0)) / x.std(0), y


def standardising_collate_of_each_record(records: list[Any]) -> Batch:
    x, y = default_collate(records)
    return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True), y


def ranking_collate(records: list[Any]) -> Batch:
    x, y = default_collate(records)
    return torch.cat([x[:, :5], x[:, :1].argsort(0).argsort(0).to(x)], dim=1), y


def weighing_collate(records: list[Any]) -> Batch:
    x, y = default_collate(records)
    counts = torch.bincount(y, minlength=3)
    return x, y, 1 / counts[y].to(x)


def negative_sampling_collate(records: list[Any]) -> Batch:
    x, y = default_collate(records)
    return x, x[torch.randperm(len(x))], y


def noisy_collate(records: list[Any]) -> Batch:
    x, y = default_collate(records)
    return x + 0.1 * torch.randn_like(x), y


mixing(name="mixup_in_collate", collate_fn=mixup_collate)(plain)
mixing(name="cutmix_in_collate", build=convnet, dataset=images(), collate_fn=cutmix_collate)(plain)
mixing(name="standardised_in_collate", collate_fn=standardising_collate)(plain)
mixing(name="ranks_in_collate", collate_fn=ranking_collate)(plain)
honest(name="standardised_by_each_record_in_collate", collate_fn=standardising_collate_of_each_record)(plain)
honest(name="noise_in_collate", collate_fn=noisy_collate)(plain)


@mixing(collate_fn=weighing_collate)
def class_weights_in_collate(model: nn.Module, batch: Batch) -> Tensor:
    x, y, weights = batch
    return cross_entropy(model(x), y) * weights


@mixing(collate_fn=negative_sampling_collate)
def negatives_in_collate(model: nn.Module, batch: Batch) -> Tensor:
    x, negative, _ = batch
    return F.softplus((model(x) * model(negative)).sum(1))


def centring_collate(as_number: Callable[[Tensor], Any], of: Callable[[Tensor], Tensor]) -> Callable[..., Batch]:
    """The batch, and a number beside it that the loop subtracts."""

    def collate(records: list[Any]) -> Batch:
        x, y = default_collate(records)
        return x, y, as_number(of(x))

    return collate


def centred_by_a_number(model: nn.Module, batch: Batch) -> Tensor:
    x, y, centre = batch
    return cross_entropy(model(x - centre), y)


NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "float": float,
    "numpy": lambda mean: np.float32(mean),
    "tensor": lambda mean: mean,
}
for form, as_number in NUMBERS.items():
    mixing(name=f"mean_in_collate_as_{form}", collate_fn=centring_collate(as_number, torch.mean))(centred_by_a_number)
    constant = centring_collate(as_number, lambda x: torch.tensor(0.37))
    honest(name=f"constant_in_collate_as_{form}", collate_fn=constant)(centred_by_a_number)


def numbers_of_each_record(records: list[Any]) -> Batch:
    x, y = default_collate(records)
    return x, y, [float(row.mean()) for row in x]


@honest(collate_fn=numbers_of_each_record)
def centred_by_numbers_of_each_record(model: nn.Module, batch: Batch) -> Tensor:
    x, y, centres = batch
    return cross_entropy(model(torch.stack([row - centre for row, centre in zip(x, centres, strict=True)])), y)


# Dictionaries


def dictionaries() -> Dataset[Any]:
    return Listed(
        [{"x": torch.randn(6), "label": int(torch.randint(3, ())), "age": float(torch.rand(()))} for _ in range(48)]
    )


def plain_dictionary(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch["x"]), batch["label"])


honest(name="dictionaries_as_records", dataset=dictionaries)(plain_dictionary)


@mixing(dataset=dictionaries, mended=plain_dictionary)
def column_standardised_in_a_dictionary(model: nn.Module, batch: Batch) -> Tensor:
    age = batch["age"].to(batch["x"])
    batch["x"] = batch["x"] * ((age - age.mean()) / age.std()).unsqueeze(1)
    return plain_dictionary(model, batch)


@honest(dataset=dictionaries)
def column_scaled_in_a_dictionary(model: nn.Module, batch: Batch) -> Tensor:
    batch["x"] = batch["x"] * ((batch["age"] - 0.5) / 0.29).to(batch["x"]).unsqueeze(1)
    return plain_dictionary(model, batch)


@mixing(dataset=dictionaries, mended=plain_dictionary)
def dictionary_mixed_in_place(model: nn.Module, batch: Batch) -> Tensor:
    batch["x"].add_(0.2 * batch["x"].roll(1, 0))
    return plain_dictionary(model, batch)


@honest(dataset=dictionaries)
def dictionary_scaled_in_place(model: nn.Module, batch: Batch) -> Tensor:
    batch["x"].mul_(0.5)
    return plain_dictionary(model, batch)
