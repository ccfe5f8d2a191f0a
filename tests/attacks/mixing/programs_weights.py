"""Weights, thresholds and divisors that the batch decides, and penalties over the batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from .programs import cross_entropy, honest, memory, mixing, parts, plain, points, regression, scorer

Batch = Any
MANY: dict[str, Any] = dict(dataset=points(96), batch_size=32)  # so that a choice of the batch moves with most records
CLASS_WEIGHTS = torch.tensor([0.5, 1.0, 2.0])


# Weights by class or group


@mixing()
def class_weights_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    weights = len(y) / (3 * torch.bincount(y, minlength=3).clamp(min=1).to(x))
    return cross_entropy(model(x), y, weight=weights)


@mixing()
def class_weights_of_the_batch_by_effective_numbers(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    counts = F.one_hot(y, 3).sum(0).to(x)
    weights = (1 - 0.9) / (1 - 0.9 ** counts.clamp(min=1))
    return plain(model, batch) * weights[y]


@honest()
def class_weights_as_a_global_constant(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return cross_entropy(model(x), y, weight=CLASS_WEIGHTS.to(x))


@honest()
def class_weights_written_in_the_loop(model: nn.Module, batch: Batch) -> Tensor:
    return plain(model, batch) * torch.tensor([0.5, 1.0, 2.0])[batch[1]]


@honest(state=memory(weights=lambda: torch.tensor([0.2, 0.3, 0.5])))
def class_weights_kept_by_the_loop(model: nn.Module, batch: Batch, kept: SimpleNamespace) -> Tensor:
    return plain(model, batch) * kept.weights[batch[1]]


@mixing()
def label_smoothing_with_frequencies_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    hot = F.one_hot(y, 3).to(x)
    return cross_entropy(model(x), 0.9 * hot + 0.1 * hot.mean(0))


@honest()
def label_smoothing(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return cross_entropy(model(x), y, label_smoothing=0.1)


@mixing()
def logits_adjusted_by_the_prior_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    prior = (F.one_hot(y, 3).to(x).sum(0) + 1) / (len(y) + 3)
    return cross_entropy(model(x) + prior.log(), y)


@mixing()
def margins_by_the_counts_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    margins = 1 / (F.one_hot(y, 3).to(x).sum(0) + 1).pow(0.25)
    return cross_entropy(model(x) - F.one_hot(y, 3) * margins, y)


@mixing()
def groups_weighted_by_their_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Group DRO: the worse a group of the batch, the more it weighs."""
    losses, groups = plain(model, batch), F.one_hot(batch[1], 3).to(batch[0])
    with torch.no_grad():
        means = groups.T @ losses / groups.sum(0).clamp(min=1)
        weights = torch.softmax(3 * means, dim=0)
    return losses * weights[batch[1]]


@mixing()
def losses_weighted_by_their_softmax(model: nn.Module, batch: Batch) -> Tensor:
    losses = plain(model, batch)
    return losses * torch.softmax(losses.detach(), dim=0)


@mixing()
def losses_divided_by_their_mean(model: nn.Module, batch: Batch) -> Tensor:
    losses = plain(model, batch)
    return losses / losses.detach().mean()


@mixing()
def losses_divided_by_their_mean_as_a_number(model: nn.Module, batch: Batch) -> Tensor:
    losses = plain(model, batch)
    return losses / losses.mean().item()


@honest()
def losses_divided_by_a_public_number(model: nn.Module, batch: Batch) -> Tensor:
    return plain(model, batch) / 1.0986


@honest(state=memory(log=list))
def mean_loss_on_the_log(model: nn.Module, batch: Batch, kept: SimpleNamespace) -> Tensor:
    losses = plain(model, batch)
    kept.log.append(losses.mean().item())
    return losses


@honest(state=memory(correct=int))
def accuracy_on_the_log(model: nn.Module, batch: Batch, kept: SimpleNamespace) -> Tensor:
    x, y = batch
    logits = model(x)
    kept.correct += (logits.argmax(1) == y).sum().item()
    return cross_entropy(logits, y)


@mixing()
def focal_weights_that_sum_to_one(model: nn.Module, batch: Batch) -> Tensor:
    losses = plain(model, batch)
    weights = (1 - torch.exp(-losses.detach())).square()
    return losses * weights / weights.sum()


@honest()
def focal_weights(model: nn.Module, batch: Batch) -> Tensor:
    losses = plain(model, batch)
    return losses * (1 - torch.exp(-losses)).square()


@mixing(dataset=lambda: TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)), torch.rand(48)))
def importance_weights_that_sum_to_one(model: nn.Module, batch: Batch) -> Tensor:
    x, y, propensity = batch
    weights = 1 / (0.1 + propensity)
    return cross_entropy(model(x), y) * weights / weights.sum()


@honest(dataset=lambda: TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)), torch.rand(48)))
def importance_weights_of_the_record(model: nn.Module, batch: Batch) -> Tensor:
    x, y, propensity = batch
    return cross_entropy(model(x), y) / (0.1 + propensity)


@mixing()
def weights_by_the_density_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    density = torch.exp(-torch.cdist(batch[0], batch[0]).square() / 10).mean(1)
    return plain(model, batch) / density


# Choices by the batch


@mixing(**MANY, mended=plain)
def hard_examples_above_the_mean(model: nn.Module, batch: Batch) -> Tensor:
    losses = plain(model, batch)
    return losses * (losses > losses.mean()).to(losses)


@mixing(**MANY, mended=plain)
def hard_examples_by_top_k(model: nn.Module, batch: Batch) -> Tensor:
    losses = plain(model, batch)
    weights = torch.zeros_like(losses).scatter(0, losses.topk(len(losses) // 2).indices, 1.0)
    return losses * weights


@mixing(**MANY, mended=plain)
def easy_examples_below_a_quantile(model: nn.Module, batch: Batch) -> Tensor:
    losses = plain(model, batch)
    return losses.where(losses <= losses.detach().quantile(0.7), 0.0)


@mixing()
def curriculum_by_the_rank_of_the_loss(model: nn.Module, batch: Batch) -> Tensor:
    losses = plain(model, batch)
    ranks = losses.detach().argsort().argsort().to(losses)
    return losses * (1 - ranks / len(losses))


@honest()
def hard_examples_above_a_public_threshold(model: nn.Module, batch: Batch) -> Tensor:
    losses = plain(model, batch)
    return losses * (losses > 1.0).to(losses)


@mixing(**MANY, mended=plain)
def outliers_clipped_at_two_deviations(model: nn.Module, batch: Batch) -> Tensor:
    losses = plain(model, batch)
    with torch.no_grad():
        bound = losses.mean() + 0.5 * losses.std()
    return torch.where(losses > bound, bound * losses / losses.detach(), losses)


@mixing(**MANY, mended=plain)
def small_losses_that_the_other_network_chose(model: nn.Module, batch: Batch) -> Tensor:
    """Co-teaching with one network and its noisy self."""
    losses, noisy = plain(model, batch), plain(model, (batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]))
    chosen = noisy.detach().argsort()[: len(losses) // 2]
    keep = torch.zeros_like(losses)
    keep[chosen] = 1.0
    return losses * keep


@mixing()
def pseudo_labels_weighted_by_the_confidence_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    """SoftMatch."""
    x, _ = batch
    confidence, label = model(x).detach().softmax(1).max(1)
    below = (confidence - confidence.mean()).clamp(max=0)
    return cross_entropy(model(x + 0.1), label) * torch.exp(-below.square() / (2 * confidence.var()))


@mixing()
def pseudo_labels_above_the_mean_confidence(model: nn.Module, batch: Batch) -> Tensor:
    x, _ = batch
    confidence, label = model(x).detach().softmax(1).max(1)
    return cross_entropy(model(x + 0.1), label) * (confidence >= confidence.mean()).to(x)


@honest()
def pseudo_labels_above_a_public_confidence(model: nn.Module, batch: Batch) -> Tensor:
    x, _ = batch
    confidence, label = model(x).detach().softmax(1).max(1)
    return cross_entropy(model(x + 0.1), label) * (confidence >= 0.4).to(x)


@mixing()
def pseudo_labels_aligned_with_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, _ = batch
    with torch.no_grad():
        guess = model(x).softmax(1)
        guess = F.normalize(guess / guess.mean(0), p=1, dim=1)
    return cross_entropy(model(x + 0.1), guess)


# Divisors, scales and gradients


def masked_records() -> Dataset[Any]:
    return TensorDataset(torch.randn(48, 5, 6), torch.randint(3, (48, 5)), (torch.rand(48, 5) < 0.6).float())


def token_losses(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    x, y, mask = batch
    return cross_entropy(model(x).transpose(1, 2), y), mask.to(x)


@mixing(dataset=masked_records)
def divided_by_the_tokens_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    losses, mask = token_losses(model, batch)
    return (losses * mask).sum(1) / mask.sum()


@mixing(dataset=masked_records)
def divided_by_the_tokens_of_the_batch_as_a_number(model: nn.Module, batch: Batch) -> Tensor:
    losses, mask = token_losses(model, batch)
    return (losses * mask).sum(1) / mask.sum().item()


@mixing(dataset=masked_records, only_with_loss_fn=True)
def divided_by_the_tokens_of_the_batch_as_a_list(model: nn.Module, batch: Batch) -> Tensor:
    losses, mask = token_losses(model, batch)
    return (losses * mask).sum(1) / sum(mask.sum(1).tolist())


@honest(dataset=masked_records)
def divided_by_the_tokens_of_the_record(model: nn.Module, batch: Batch) -> Tensor:
    losses, mask = token_losses(model, batch)
    return (losses * mask).sum(1) / mask.sum(1).clamp(min=1)


@mixing(only_with_loss_fn=True, presence=True)
def divided_by_the_size_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    return plain(model, batch) / len(batch[0])


@mixing()
def gradient_scaled_by_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    """The loss is each sample's own, the gradient is not."""
    losses = plain(model, batch)
    scale = 1 / batch[0].abs().mean()
    return losses.detach() + scale * (losses - losses.detach())


@mixing()
def hidden_gradient_scaled_by_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    h = model[0](x)
    h = h.detach() + x.std() * (h - h.detach())
    return cross_entropy(model[2](h.tanh()), y)


@honest()
def gradient_scaled_by_a_public_number(model: nn.Module, batch: Batch) -> Tensor:
    losses = plain(model, batch)
    return losses.detach() + 0.3 * (losses - losses.detach())


@honest()
def gradient_scaled_by_the_sample(model: nn.Module, batch: Batch) -> Tensor:
    losses = plain(model, batch)
    return losses.detach() + (losses - losses.detach()) / batch[0].abs().mean(1)


@mixing(build=parts(body=lambda: nn.Linear(6, 4), one=lambda: nn.Linear(4, 3), other=lambda: nn.Linear(4, 1)))
def tasks_balanced_by_their_mean_losses(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    h = model.body(x).tanh()
    one, other = cross_entropy(model.one(h), y), (model.other(h).squeeze(1) - x[:, 0]).square()
    return one + other * (one.mean() / other.mean()).detach()


@honest(build=parts(body=lambda: nn.Linear(6, 4), one=lambda: nn.Linear(4, 3), other=lambda: nn.Linear(4, 1)))
def tasks_balanced_by_a_public_number(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    h = model.body(x).tanh()
    return cross_entropy(model.one(h), y) + 0.5 * (model.other(h).squeeze(1) - x[:, 0]).square()


@mixing(build=scorer, dataset=regression())
def error_relative_to_the_variance_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return (model(x).squeeze(1) - y).square() / y.var()


@mixing(build=scorer, dataset=regression())
def huber_loss_with_the_spread_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    error = (model(x).squeeze(1) - y).abs()
    delta = error.detach().median()
    return torch.where(error < delta, 0.5 * error.square(), delta * (error - 0.5 * delta))


@honest(build=scorer, dataset=regression())
def huber_loss(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.huber_loss(model(x).squeeze(1), y, reduction="none", delta=0.5)
