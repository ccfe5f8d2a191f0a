"""Statistics of the batch in inputs, hidden values and targets: normalisation, scaling, imputation."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from .programs import (
    Formula,
    convnet,
    cross_entropy,
    honest,
    images,
    mixing,
    mlp,
    on_inputs,
    parts,
    plain,
    regression,
    scorer,
    series,
)

Batch = Any


# Normalisation of hidden values


def batch_normalised(rows: Tensor) -> Tensor:
    return F.batch_norm(rows, None, None, training=True)


on_inputs(
    mixing,
    batch_norm_of_plain_inputs=lambda x: batch_normalised(x),
)


@mixing()
def batch_norm_of_hidden_values(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return cross_entropy(model[2](batch_normalised(model[0](x))), y)


def bare_batch_norm() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(6, affine=False, track_running_stats=False), mlp())


def convolution_with(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 2, 1), norm, convnet())


mixing(name="batch_norm_layer_without_statistics", build=bare_batch_norm, mended=None)(plain)
mixing(name="batch_norm_layer", build=lambda: convolution_with(nn.BatchNorm2d(2)), dataset=images())(plain)
honest(name="batch_norm_in_evaluation", build=lambda: convolution_with(nn.BatchNorm2d(2)).eval(), dataset=images())(
    plain
)
honest(name="group_norm", build=lambda: convolution_with(nn.GroupNorm(1, 2)), dataset=images())(plain)
honest(name="instance_norm", build=lambda: convolution_with(nn.InstanceNorm2d(2)), dataset=images())(plain)
honest(name="layer_norm", build=lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)))(plain)


on_inputs(
    mixing,
    ghost_batch_norm=lambda x: torch.cat([batch_normalised(part) for part in x.tensor_split(2)]),
)


@mixing()
def batch_renormalisation(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    h = model[0](x)
    with torch.no_grad():
        r = h.std(0).clamp(0.5, 2.0)
        d = h.mean(0).clamp(-0.5, 0.5)
    return cross_entropy(model[2](((h - h.mean(0)) / h.std(0) * r + d).tanh()), y)


@mixing()
def centred_hidden_values(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    h = model[0](x)
    return cross_entropy(model[2](torch.tanh(h - h.mean(0))), y)


@mixing()
def centred_hidden_values_without_gradients(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    h = model[0](x)
    with torch.no_grad():
        centre, scale = h.mean(0), h.std(0) + 1e-5
    return cross_entropy(model[2](torch.tanh((h - centre) / scale)), y)


on_inputs(
    mixing,
    layer_norm_over_the_whole_batch=lambda x: F.layer_norm(x, x.shape),
)
on_inputs(
    honest,
    standardised_by_each_sample=lambda x: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True),
)
on_inputs(
    partial(mixing, dataset=images(), build=convnet),
    instance_norm_with_the_axes_of_the_batch=lambda x: (
        (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True)
    ),
)
on_inputs(
    mixing,
    normalised_along_the_wrong_axis=lambda x: F.normalize(x, dim=0),
)


@mixing()
def softmax_along_the_wrong_axis(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.nll_loss(torch.log_softmax(model(x), dim=0), y, reduction="none")


@mixing()
def whitened_by_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    centred = x - x.mean(0)
    lower = torch.linalg.cholesky(centred.T @ centred / len(x) + 0.1 * torch.eye(6))
    return cross_entropy(model(torch.linalg.solve_triangular(lower, centred.T, upper=False).T), y)


@mixing()
def principal_components_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    _, _, axes = torch.linalg.svd(x, full_matrices=False)
    return cross_entropy(model(x @ axes.abs().T), y)


on_inputs(
    mixing,
    scaled_by_the_largest_singular_value=lambda x: x / torch.linalg.matrix_norm(x, ord=2),
)


# Preparation of inputs


@mixing()
def standardised_by_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    x = (x - x.mean(0)) / x.std(0)
    return cross_entropy(model(x), y)


@mixing()
def standardised_by_one_number_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    x = (x - x.mean()) / x.std()
    return cross_entropy(model(x), y)


@mixing()
def standardised_by_numbers_that_left_torch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    mean, std = x.mean().item(), x.std().item()
    return cross_entropy(model((x - mean) / std), y)


@honest()
def standardised_by_public_constants(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    mean, std = torch.full((6,), 0.13), torch.full((6,), 0.31)
    return cross_entropy(model((x - mean) / std), y)


on_inputs(
    mixing,
    divided_by_the_largest_value_of_the_batch=lambda x: x / x.abs().max(),
)
on_inputs(
    honest,
    divided_by_the_largest_value_of_each_sample=lambda x: x / x.abs().amax(1, keepdim=True),
)


@mixing()
def scaled_to_the_range_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    low, high = x.amin(0), x.amax(0)
    return cross_entropy(model((x - low) / (high - low + 1e-6)), y)


@mixing()
def label_overlay_with_the_largest_value(model: nn.Module, batch: Batch) -> Tensor:
    """Forward-forward: the label is written into the first features."""
    x, y = batch
    x = x.clone()
    x[:, :3] = 0
    x[torch.arange(len(x)), y] = x.max()
    return F.softplus(2 - model(x).square().sum(1))


@honest()
def label_overlay_with_a_public_value(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    x = x.clone()
    x[:, :3] = 0
    x[torch.arange(len(x)), y] = 3.0
    return F.softplus(2 - model(x).square().sum(1))


@mixing()
def ranks_within_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    ranks = x.argsort(0).argsort(0).to(x) / len(x)
    return cross_entropy(model(ranks), y)


on_inputs(
    mixing,
    clipped_at_quantiles_of_the_batch=lambda x: torch.clamp(x, x.quantile(0.1, 0), x.quantile(0.9, 0)),
)
on_inputs(
    honest,
    clipped_at_public_bounds=lambda x: torch.clamp(x, -torch.ones(6), torch.ones(6)),
)


def gaps() -> Dataset[Any]:
    x = torch.randn(48, 6)
    return TensorDataset(x.masked_fill(torch.rand(48, 6) < 0.3, float("nan")), torch.randint(3, (48,)))


on_inputs(
    partial(mixing, dataset=gaps),
    missing_values_filled_with_the_mean_of_the_batch=lambda x: torch.where(x.isnan(), x.nanmean(0).nan_to_num(), x),
)
on_inputs(
    partial(honest, dataset=gaps),
    missing_values_filled_with_zero=lambda x: x.nan_to_num(0.0),
)
on_inputs(
    mixing,
    logarithm_shifted_by_the_smallest_value=lambda x: torch.log(x - x.min() + 1),
    noise_scaled_by_the_spread_of_the_batch=lambda x: x + 0.1 * x.std(0) * torch.randn_like(x),
)
on_inputs(
    honest,
    noise_of_a_public_scale=lambda x: x + 0.1 * torch.randn_like(x),
)
on_inputs(
    partial(mixing, dataset=series(), build=lambda: nn.Sequential(nn.Flatten(), nn.Linear(28, 3))),
    series_normalised_over_batch_and_time=lambda x: (x - x.mean((0, 1))) / x.std((0, 1)),
)
on_inputs(
    partial(honest, dataset=series(), build=lambda: nn.Sequential(nn.Flatten(), nn.Linear(28, 3))),
    series_normalised_over_time=lambda x: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True),
)


# Targets


@mixing(build=scorer, dataset=regression())
def targets_standardised_by_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return (model(x).squeeze(1) - (y - y.mean()) / y.std()).square()


@mixing(build=scorer, dataset=regression())
def target_of_the_wrong_shape(model: nn.Module, batch: Batch) -> Tensor:
    """(B, 1) minus (B,) is (B, B), and nobody notices."""
    x, y = batch
    return (model(x) - y).square().mean(1)


@mixing(build=scorer, dataset=regression())
def targets_as_ranks_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return (model(x).squeeze(1) - y.argsort().argsort().to(x) / len(y)).square()


@mixing(build=parts(net=scorer, embed=lambda: nn.Embedding(4, 6)),
        dataset=lambda: TensorDataset(torch.randint(4, (48,)), torch.randn(48)))  # fmt: skip
def target_encoding_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    category, y = batch
    members = F.one_hot(category, 4).to(y)
    means = (members.T @ y) / members.sum(0).clamp(min=1)
    return (model.net(model.embed(category) * means[category, None]).squeeze(1) - y).square()


@mixing(build=scorer, dataset=regression())
def expectile_loss_around_the_quantile_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    error = y - y.quantile(0.9) - model(x).squeeze(1)
    return torch.where(error > 0, 0.9, 0.1) * error.square()


@honest(build=scorer, dataset=regression())
def expectile_loss(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    error = y - model(x).squeeze(1)
    return torch.where(error > 0, 0.9, 0.1) * error.square()


# Hidden choices and temperatures


@mixing()
def temperature_from_the_spread_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    logits = model(x)
    return cross_entropy(logits / logits.detach().std(), y)


@honest()
def temperature_from_the_spread_of_each_sample(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    logits = model(x)
    return cross_entropy(logits / (1 + logits.detach().std(1, keepdim=True)), y)


@mixing()
def units_dropped_that_the_batch_rarely_uses(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    h = model[0](x).relu()
    keep = (h.detach().mean(0) > h.detach().mean()).to(h)
    return cross_entropy(model[2](h * keep), y)


@mixing()
def top_activations_of_the_whole_batch(model: nn.Module, batch: Batch) -> Tensor:
    """The sparse autoencoder that keeps B x k activations of a batch."""
    x, _ = batch
    h = model[0](x).relu()
    kept = torch.zeros_like(h).flatten().scatter(0, h.flatten().topk(2 * len(x)).indices, 1.0).view_as(h)
    return (model[2](h * kept) - x[:, :3]).square().sum(1)


@honest()
def top_activations_of_each_sample(model: nn.Module, batch: Batch) -> Tensor:
    x, _ = batch
    h = model[0](x).relu()
    kept = torch.zeros_like(h).scatter(1, h.topk(2, dim=1).indices, 1.0)
    return (model[2](h * kept) - x[:, :3]).square().sum(1)


@mixing(build=lambda: Formula({"w": (4, 4), "v": (4, 3)}), dataset=series())
def delays_chosen_by_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    """Autoformer: the lags that correlate best on average over the batch."""
    x, y = batch
    q = x @ model.w
    spectrum = torch.fft.rfft(x.transpose(1, 2))
    correlation = torch.fft.irfft(spectrum * spectrum.conj(), n=7).mean((0, 1))
    lags = correlation[1:].topk(2).indices + 1
    delayed = sum(q.roll(-int(lag), 1) for lag in lags)
    return cross_entropy((q * delayed).mean(1) @ model.v, y)
