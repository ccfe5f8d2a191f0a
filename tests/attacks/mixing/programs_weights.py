"""Weights, thresholds and divisors that the batch decides, and penalties over the batch.

Reinforcement learning, penalties over the batch and mixtures of experts.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from .programs import Formula, cross_entropy, honest, memory, mixing, mlp, parts, plain, points, regression, scorer

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


# Policies


def transitions() -> Dataset[Any]:
    """States, actions, returns and the old policy's log-probabilities."""
    return TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)), torch.randn(48), -torch.rand(48) - 0.5)


def actor_critic() -> nn.Module:
    return parts(actor=mlp, critic=scorer)()


def log_probability(model: nn.Module, state: Tensor, action: Tensor) -> Tensor:
    return -cross_entropy(model.actor(state), action)


@mixing(build=actor_critic, dataset=transitions)
def returns_normalised_over_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    state, action, returns, _ = batch
    returns = (returns - returns.mean()) / (returns.std() + 1e-8)
    value = model.critic(state).squeeze(1)
    policy = -log_probability(model, state, action) * (returns - value).detach()
    return policy + F.smooth_l1_loss(value, returns, reduction="none")


def proximal_policy(model: nn.Module, batch: Batch, advantage: Tensor) -> Tensor:
    state, action, returns, old = batch
    ratio = torch.exp(log_probability(model, state, action) - old)
    clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -clipped + 0.5 * (model.critic(state).squeeze(1) - returns).square()


def surplus(model: nn.Module, batch: Batch) -> Tensor:
    state, _, returns, _ = batch
    return returns - model.critic(state).squeeze(1).detach()


@mixing(build=actor_critic, dataset=transitions)
def proximal_policy_with_normalised_advantages(model: nn.Module, batch: Batch) -> Tensor:
    advantage = surplus(model, batch)
    return proximal_policy(model, batch, (advantage - advantage.mean()) / (advantage.std() + 1e-8))


@honest(build=actor_critic, dataset=transitions)
def proximal_policy_with_public_constants(model: nn.Module, batch: Batch) -> Tensor:
    return proximal_policy(model, batch, (surplus(model, batch) - 0.1) / 1.5)


@mixing(build=actor_critic, dataset=transitions)
def baseline_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    state, action, returns, _ = batch
    return -log_probability(model, state, action) * (returns - returns.mean()) + model.critic(state).squeeze(1).square()


@mixing(build=actor_critic, dataset=transitions)
def leave_one_out_baseline(model: nn.Module, batch: Batch) -> Tensor:
    state, action, returns, _ = batch
    baseline = (returns.sum() - returns) / (len(returns) - 1)
    return -log_probability(model, state, action) * (returns - baseline) + model.critic(state).squeeze(1).square()


@mixing(build=actor_critic, dataset=transitions)
def returns_discounted_along_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    """The batch taken for one episode."""
    state, action, reward, _ = batch
    returns, running = [], torch.zeros(())
    for r in reward.flip(0):
        running = r + 0.9 * running
        returns.append(running)
    policy = -log_probability(model, state, action) * torch.stack(returns).flip(0)
    return policy + model.critic(state).squeeze(1).square()


@mixing(build=scorer, dataset=lambda: TensorDataset(torch.randn(48, 6), torch.randn(48, 6), torch.randn(48)))
def target_of_the_best_state_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    state, following, reward = batch
    with torch.no_grad():
        target = reward + 0.9 * model(following).max()
    return (model(state).squeeze(1) - target).square()


@honest(build=scorer, dataset=lambda: TensorDataset(torch.randn(48, 6), torch.randn(48, 6), torch.randn(48)))
def target_of_the_next_state(model: nn.Module, batch: Batch) -> Tensor:
    state, following, reward = batch
    with torch.no_grad():
        target = reward + 0.9 * model(following).squeeze(1)
    return (model(state).squeeze(1) - target).square()


# Penalties over the batch


@mixing(build=scorer, dataset=regression())
def correlation_as_the_loss(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    score = model(x).squeeze(1)
    a, b = score - score.mean(), y - y.mean()
    return -a * b / (a.norm() * b.norm())


@mixing(build=scorer)
def gap_between_groups(model: nn.Module, batch: Batch) -> Tensor:
    """Demographic parity: the mean scores of two groups should be equal."""
    x, y = batch
    score, group = model(x).squeeze(1), (y == 0).to(x)
    gap = (score * group).sum() / group.sum().clamp(min=1) - (score * (1 - group)).sum() / (1 - group).sum().clamp(
        min=1
    )
    return F.softplus(-score * (2 * group - 1)) + gap.square()


@mixing(build=scorer, dataset=regression(), batch_size=16)
def ranking_of_positives_over_negatives(model: nn.Module, batch: Batch) -> Tensor:
    """A surrogate of the area under the curve."""
    x, y = batch
    score, positive = model(x).squeeze(1), (y > 0).to(x)
    pairs = F.softplus(score[None, :] - score[:, None]) * positive[:, None] * (1 - positive[None, :])
    return pairs.sum(1) + 0.01 * score.square()


@mixing()
def overlap_of_the_whole_batch(model: nn.Module, batch: Batch) -> Tensor:
    """Dice loss with the sums of numerator and denominator over the batch."""
    x, y = batch
    p, t = model(x).softmax(1), F.one_hot(y, 3).to(x)
    dice = 2 * (p * t).sum(0) / (p.sum(0) + t.sum(0))
    return cross_entropy(model(x), y) + (1 - dice.mean()).expand(len(x))


@honest(build=scorer, dataset=lambda: TensorDataset(torch.randn(48, 9, 6), torch.randint(2, (48, 9)).float()))
def overlap_of_each_sample(model: nn.Module, batch: Batch) -> Tensor:
    x, t = batch
    p, t = model(x).squeeze(2).sigmoid(), t.to(x)
    return 1 - (2 * (p * t).sum(1) + 1) / (p.sum(1) + t.sum(1) + 1)


@mixing()
def entropy_of_the_mean_prediction(model: nn.Module, batch: Batch) -> Tensor:
    x, _ = batch
    p = model(x).softmax(1)
    mean = p.mean(0)
    return -(p * p.log()).sum(1) + (mean * mean.log()).sum()


@honest()
def entropy_of_each_prediction(model: nn.Module, batch: Batch) -> Tensor:
    p = model(batch[0]).softmax(1)
    return plain(model, batch) - 0.1 * (p * p.log()).sum(1)


@mixing()
def difference_of_the_halves_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    """Domain adaptation: the first half is the source, the second the target."""
    h = model(batch[0])
    source, target = h.tensor_split(2)
    return plain(model, batch) + (source.mean(0) - target.mean(0)).square().sum()


@mixing()
def decorrelated_features(model: nn.Module, batch: Batch) -> Tensor:
    h = model(batch[0])
    return plain(model, batch) + 0.1 * (torch.cov(h.T) - torch.eye(3)).square().sum()


@mixing()
def common_penalty_on_the_mean_without_its_gradient(model: nn.Module, batch: Batch) -> Tensor:
    h = model(batch[0])
    return plain(model, batch) + (h * h.detach().mean(0)).sum(1)


@mixing(build=scorer, dataset=regression())
def losses_as_shares_of_their_total(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    losses = (model(x).squeeze(1) - y).square()
    return losses * (losses / losses.sum()).detach()


# Experts


def experts() -> nn.Module:
    return parts(gate=lambda: nn.Linear(6, 2), left=mlp, right=mlp)()


def both(model: nn.Module, x: Tensor, weights: Tensor) -> Tensor:
    return weights[:, :1] * model.left(x) + weights[:, 1:] * model.right(x)


@mixing(build=experts, batch_size=24)
def experts_with_a_capacity(model: nn.Module, batch: Batch) -> Tensor:
    """Who comes first is served, who comes when an expert is full is dropped."""
    x, y = batch
    weights = model.gate(x).softmax(1)
    chosen = F.one_hot(weights.argmax(1), 2)
    place = chosen.cumsum(0) * chosen
    served = ((place > 0) & (place <= len(x) // 3)).to(x)
    return cross_entropy(both(model, x, weights * served) + x[:, :3], y)


@mixing(build=experts, batch_size=24)
def experts_that_choose_their_samples(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    weights = model.gate(x).softmax(1)
    served = torch.zeros_like(weights).scatter(0, weights.topk(len(x) // 2, dim=0).indices, 1.0)
    return cross_entropy(both(model, x, weights * served) + x[:, :3], y)


@mixing(build=experts)
def experts_with_a_balance_over_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    weights = model.gate(x).softmax(1)
    share = F.one_hot(weights.argmax(1), 2).to(x).mean(0)
    return cross_entropy(both(model, x, weights), y) + (weights * share).sum(1)


@honest(build=experts)
def experts_chosen_by_each_sample(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    weights = model.gate(x).softmax(1)
    return cross_entropy(both(model, x, weights * F.one_hot(weights.argmax(1), 2)), y)


@honest(build=experts)
def experts_with_a_public_balance(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    weights = model.gate(x).softmax(1)
    return cross_entropy(both(model, x, weights), y) + (weights * torch.tensor([0.4, 0.6])).sum(1)


@mixing(build=lambda: Formula({"gate": (4, 1), "w": (4, 4), "v": (4, 3)}),
        dataset=lambda: TensorDataset(torch.randn(48, 5, 4), torch.randint(3, (48,))))  # fmt: skip
def tokens_of_the_batch_that_may_enter_the_block(model: nn.Module, batch: Batch) -> Tensor:
    """Mixture of depths with one capacity for all tokens of the batch."""
    x, y = batch
    score = (x @ model.gate).squeeze(2)
    enter = (score >= score.flatten().topk(2 * len(x)).values[-1]).to(x)
    h = x + enter.unsqueeze(2) * (x @ model.w).tanh() * score.unsqueeze(2)
    return cross_entropy(h.mean(1) @ model.v, y)


@honest(build=lambda: Formula({"gate": (4, 1), "w": (4, 4), "v": (4, 3)}),
        dataset=lambda: TensorDataset(torch.randn(48, 5, 4), torch.randint(3, (48,))))  # fmt: skip
def tokens_of_the_sample_that_may_enter_the_block(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    score = (x @ model.gate).squeeze(2)
    enter = (score >= score.topk(2, dim=1).values[:, -1:]).to(x)
    h = x + enter.unsqueeze(2) * (x @ model.w).tanh() * score.unsqueeze(2)
    return cross_entropy(h.mean(1) @ model.v, y)
