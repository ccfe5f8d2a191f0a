"""Reinforcement learning, penalties over the batch and mixtures of experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from .programs import Formula, cross_entropy, honest, mixing, mlp, parts, plain, regression, scorer

Batch = Any


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
