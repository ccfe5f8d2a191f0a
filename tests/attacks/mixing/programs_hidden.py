"""Mixing in hidden places: backward passes, recomputation, numbers outside torch, helpers, later steps."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from .programs import cross_entropy, honest, id_pairs, memory, mixing, mlp, parts, plain, regression, scorer
from .programs_ragged import GRAPHS, graph_network

Batch = Any


# Backward passes


class ScaledGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (scale,) = ctx.saved_tensors
        return grads[0] * scale, None


@mixing()
def gradient_scaled_by_the_batch_in_a_function(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    h = ScaledGradient.apply(model[0](x), x.std())
    return cross_entropy(model[2](h.tanh()), y)


@honest()
def gradient_reversed_in_a_function(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    h = ScaledGradient.apply(model[0](x), torch.tensor(-0.5))
    return cross_entropy(model[2](h.tanh()), y)


@mixing()
def gradient_scaled_by_the_batch_in_a_hook(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    h, scale = model[0](x), x.std()
    h.register_hook(lambda grad: grad * scale)
    return cross_entropy(model[2](h.tanh()), y)


@honest()
def gradient_scaled_by_a_public_number_in_a_hook(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    h = model[0](x)
    h.register_hook(lambda grad: grad * 0.5)
    return cross_entropy(model[2](h.tanh()), y)


# Recomputation, transforms, precision


@mixing()
def centred_inside_a_checkpoint(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch

    def block(x: Tensor) -> Tensor:
        h = model[0](x)
        return (h - h.mean(0)).tanh()

    return cross_entropy(model[2](checkpoint(block, x, use_reentrant=False)), y)


@honest()
def recomputed_inside_a_checkpoint(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    hidden = checkpoint(lambda x: model[0](x).tanh(), x, use_reentrant=False)
    return cross_entropy(model[2](hidden), y)


@mixing()
def standardised_under_autocast(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model((x - x.mean(0)) / x.std(0))
    return cross_entropy(logits.to(x), y)


@honest()
def standardised_by_each_sample_under_autocast(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model((x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True))
    return cross_entropy(logits.to(x), y)


@mixing()
def functional_call_with_a_shifted_bias(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    weights = dict(model.named_parameters())
    weights["2.bias"] = weights["2.bias"] + x[:, :3].mean(0)
    return cross_entropy(functional_call(model, weights, (x,)), y)


@honest()
def functional_call_with_a_scaled_bias(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    weights = dict(model.named_parameters())
    weights["2.bias"] = 0.5 * weights["2.bias"]
    return cross_entropy(functional_call(model, weights, (x,)), y)


@mixing(build=lambda: mlp(), physical_batch_size=4)
def standardised_by_the_physical_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return cross_entropy(model((x - x.mean(0)) / (x.std(0) + 1)), y)


@honest(physical_batch_size=4)
def physical_batches(model: nn.Module, batch: Batch) -> Tensor:
    return plain(model, batch)


# Helpers outside the model


def backbone() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).requires_grad_(False)


@mixing(state=memory(backbone=backbone), mended=None)
def frozen_backbone_left_in_training_mode(model: nn.Module, batch: Batch, kept: SimpleNamespace) -> Tensor:
    x, y = batch
    with torch.no_grad():
        features = kept.backbone(x)
    return cross_entropy(model(features), y)


@honest(state=memory(backbone=lambda: backbone().eval()))
def frozen_backbone_in_evaluation(model: nn.Module, batch: Batch, kept: SimpleNamespace) -> Tensor:
    x, y = batch
    with torch.no_grad():
        features = kept.backbone(x)
    return cross_entropy(model(features), y)


@mixing(state=memory(critic=scorer))
def samples_weighted_by_a_normalised_critic(model: nn.Module, batch: Batch, kept: SimpleNamespace) -> Tensor:
    with torch.no_grad():
        weights = torch.softmax(kept.critic(batch[0]).squeeze(1), dim=0)
    return plain(model, batch) * weights


@honest(state=memory(critic=scorer))
def samples_weighted_by_a_critic(model: nn.Module, batch: Batch, kept: SimpleNamespace) -> Tensor:
    with torch.no_grad():
        weights = torch.sigmoid(kept.critic(batch[0]).squeeze(1))
    return plain(model, batch) * weights


# Numbers, lists and branches


@mixing(build=parts(u=lambda: nn.Embedding(60, 8), i=lambda: nn.Embedding(60, 8)), dataset=id_pairs())
def two_towers_of_ids_that_were_lists(model: nn.Module, batch: Batch) -> Tensor:
    users, items = (torch.tensor(ids.tolist()) for ids in batch)
    return cross_entropy(model.u(users) @ model.i(items).T, torch.arange(len(users)))


@mixing()
def partners_shuffled_by_python(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    order = list(range(len(x)))
    random.Random(0).shuffle(order)
    return cross_entropy(model(0.7 * x + 0.3 * torch.stack([x[k] for k in order])), y)


@mixing()
def mean_by_a_loop_over_samples(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    total = torch.zeros(6)
    for row in x:
        total = total + row
    return torch.stack([cross_entropy(model(row - total / len(x)), label) for row, label in zip(x, y, strict=True)])


@mixing(refused_by=2)
def centred_by_the_mean_of_one_class(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    own = x[y == 0]
    return cross_entropy(model(x - own.sum(0) / (1 + len(own))), y)


@mixing(only_with_loss_fn=True)
def losses_doubled_in_a_hard_batch(model: nn.Module, batch: Batch) -> Tensor:
    losses = plain(model, batch)
    if losses.mean() > 1.1:
        losses = 2 * losses
    return losses


@mixing(only_with_loss_fn=True)
def divided_by_the_number_of_classes_in_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    return plain(model, batch) / len(batch[1].unique())


@mixing(only_with_loss_fn=True)
def standardised_with_numpy(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    values = x.numpy()
    x = torch.from_numpy((values - values.mean(0)) / values.std(0))
    return cross_entropy(model(x), y)


@mixing(only_with_loss_fn=True)
def centred_in_place_with_numpy(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch[0].clone(), batch[1]
    values = x.numpy()
    values -= values.mean(0)
    return cross_entropy(model(x), y)


@honest()
def standardised_by_each_sample_with_numpy(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    values = x.numpy()
    x = torch.from_numpy((values - values.mean(1, keepdims=True)) / values.std(1, keepdims=True))
    return cross_entropy(model(x), y)


@mixing(only_with_loss_fn=True)
def curriculum_sorted_by_python(model: nn.Module, batch: Batch) -> Tensor:
    losses = plain(model, batch)
    order = sorted(range(len(losses)), key=losses.tolist().__getitem__)
    weights = torch.zeros(len(losses))
    for rank, k in enumerate(order):
        weights[k] = 1 / (1 + rank)
    return losses * weights


def two_tasks() -> nn.Module:
    return parts(body=lambda: nn.Linear(6, 4), one=lambda: nn.Linear(4, 3), other=lambda: nn.Linear(4, 1))()


@honest(build=two_tasks)
def second_task_for_some_samples(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    h, some = model.body(x).tanh(), y == 0
    losses = cross_entropy(model.one(h), y)
    extra = torch.zeros_like(losses).masked_scatter(some, model.other(h[some]).squeeze(1).square())
    return losses + extra


@honest(dataset=lambda: TensorDataset(torch.randn(48, 5, 6), torch.randint(1, 6, (48,))))
def rows_cut_to_the_length_of_the_record(model: nn.Module, batch: Batch) -> Tensor:
    x, lengths = batch
    return torch.stack([model(row[:n]).square().mean() for row, n in zip(x, lengths.tolist(), strict=True)])


@honest(build=scorer, dataset=regression())
def branch_by_each_record(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return torch.stack(
        [model(row).sum() if target > 0 else model(-row).sum().square() for row, target in zip(x, y, strict=True)]
    )


# Later


@mixing(state=memory(step=int), refused_by=2)
def mixup_after_the_first_step(model: nn.Module, batch: Batch, kept: SimpleNamespace) -> Tensor:
    x, y = batch
    kept.step += 1
    if kept.step > 1:
        x = 0.7 * x + 0.3 * x.roll(1, 0)
    return cross_entropy(model(x), y)


@mixing(state=memory(step=int), refused_by=3, batch_size=24)
def hard_examples_after_the_first_step(model: nn.Module, batch: Batch, kept: SimpleNamespace) -> Tensor:
    losses = plain(model, batch)
    kept.step += 1
    easy = losses.detach() < (losses.detach().mean() if kept.step > 1 else 0.0)
    return losses * torch.where(easy, 0.5, 1.0)


@mixing(**GRAPHS, state=memory(step=int), refused_by=2)
def edges_between_graphs_after_the_first_step(model: nn.Module, batch: Batch, kept: SimpleNamespace) -> Tensor:
    nodes, edges, graph, y = batch
    kept.step += 1
    if kept.step > 1:
        edges = torch.stack([edges[0].flip(0), edges[1]])
    return graph_network(model, (nodes, edges, graph, y))


@mixing(dataset=lambda: TensorDataset(torch.randn(9, 6), torch.randint(3, (9,))), batch_size=None,
        state=memory(step=int), refused_by=2)  # fmt: skip
def other_rows_after_the_first_step(model: nn.Module, batch: Batch, kept: SimpleNamespace) -> Tensor:
    """The same operation, once with everybody's own index and then with another's."""
    x, y = batch
    kept.step += 1
    index = torch.arange(len(x)) if kept.step == 1 else torch.arange(len(x)).roll(1)
    h = model[0](x)
    return cross_entropy(model[2]((h + h[index]).tanh()), y)


@honest(state=memory(step=int))
def noise_after_the_first_step(model: nn.Module, batch: Batch, kept: SimpleNamespace) -> Tensor:
    x, y = batch
    kept.step += 1
    return cross_entropy(model(x + (0.1 if kept.step > 1 else 0.0) * torch.randn_like(x)), y)


@mixing()
def dropout_of_the_features_that_vary_least(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    keep = torch.ones(6).scatter(0, x.var(0).topk(2, largest=False).indices, 0.0)
    return cross_entropy(model(x * keep), y)


@honest()
def dropout_of_random_features_for_all(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return cross_entropy(model(F.dropout(torch.ones(6), 0.3) * x), y)
