"""Contrastive and ranking losses: pairs, negatives, prototypes and distances within the batch."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from .programs import Formula, cross_entropy, honest, id_pairs, mixing, mlp, parts, regression, scorer, vector_pairs

Batch = Any


def two_towers(high: int = 60, d: int = 8) -> nn.Module:
    return parts(u=lambda: nn.Embedding(high, d), i=lambda: nn.Embedding(high, d))()


def linear_towers(d: int = 6) -> nn.Module:
    return parts(a=lambda: nn.Linear(d, 4), b=lambda: nn.Linear(d, 4))()


def diagonal(scores: Tensor) -> Tensor:
    return cross_entropy(scores, torch.arange(len(scores)))


def in_batch_softmax_of_embeddings(model: nn.Module, batch: Batch) -> Tensor:
    users, items = batch
    return diagonal(model.u(users) @ model.i(items).T)


def in_batch_softmax_of_layers(model: nn.Module, batch: Batch) -> Tensor:
    x, z = batch
    return diagonal(F.normalize(model.a(x), dim=1) @ F.normalize(model.b(z), dim=1).T / 0.1)


for size in (8, 64, 255, 512, 4096):
    mixing(
        name=f"two_towers_of_{size}",
        build=two_towers,
        dataset=id_pairs(size),
        batch_size=None,
        slow=size > 1000,
    )(in_batch_softmax_of_embeddings)
mixing(name="in_batch_softmax_of_512", build=linear_towers, dataset=vector_pairs(512), batch_size=None)(
    in_batch_softmax_of_layers
)
mixing(name="two_towers_of_a_poisson_batch", build=two_towers, dataset=id_pairs())(in_batch_softmax_of_embeddings)
mixing(name="in_batch_softmax_of_a_poisson_batch", build=linear_towers, dataset=vector_pairs())(
    in_batch_softmax_of_layers
)


@mixing(build=lambda: nn.Embedding(60, 8), dataset=id_pairs())
def two_towers_that_share_their_table(model: nn.Module, batch: Batch) -> Tensor:
    users, items = batch
    return diagonal(model(users) @ model(items).T / math.sqrt(8))


@mixing(build=two_towers, dataset=id_pairs())
def sampled_softmax_with_popularity_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    users, items = batch
    popularity = (items.unsqueeze(0) == items.unsqueeze(1)).float().mean(1)
    return diagonal(model.u(users) @ model.i(items).T - popularity.to(model.u.weight).log())


@mixing(build=two_towers, dataset=id_pairs())
def bayesian_ranking_against_the_next_item(model: nn.Module, batch: Batch) -> Tensor:
    users, items = batch
    u = model.u(users)
    return F.softplus((u * model.i(items.roll(1))).sum(1) - (u * model.i(items)).sum(1))


@mixing(build=two_towers, dataset=id_pairs())
def bayesian_ranking_against_a_shuffled_item(model: nn.Module, batch: Batch) -> Tensor:
    users, items = batch
    negatives = items[torch.randperm(len(items))]
    return F.softplus((model.u(users) * (model.i(negatives) - model.i(items))).sum(1))


@honest(build=two_towers, dataset=id_pairs())
def bayesian_ranking_against_a_random_item(model: nn.Module, batch: Batch) -> Tensor:
    users, items = batch
    negatives = torch.randint(60, items.shape)
    return F.softplus((model.u(users) * (model.i(negatives) - model.i(items))).sum(1))


@honest(build=two_towers, dataset=id_pairs())
def softmax_over_the_whole_catalogue(model: nn.Module, batch: Batch) -> Tensor:
    users, items = batch
    return cross_entropy(model.u(users) @ model.i.weight.T, items)


@honest(build=two_towers, dataset=id_pairs())
def softmax_over_public_random_items(model: nn.Module, batch: Batch) -> Tensor:
    users, items = batch
    u, own = model.u(users), model.i(items)
    scores = torch.cat([(u * own).sum(1, keepdim=True), u @ model.i(torch.randint(60, (9,))).T], dim=1)
    return cross_entropy(scores, torch.zeros(len(users), dtype=torch.long))


@mixing()
def queries_against_keys_of_the_next(model: nn.Module, batch: Batch) -> Tensor:
    x, _ = batch
    z = model(x)
    return torch.logsumexp(z @ model(x[1:]).T, dim=1) - z.square().sum(1)


@mixing(build=lambda: Formula({"w": (6, 4)}, bank=torch.randn(10, 6)))
def infonce_with_the_bank_behind_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, _ = batch
    keys = torch.cat([x, model.bank]) @ model.w
    return diagonal((x @ model.w) @ keys.T)


@honest(build=lambda: Formula({"w": (6, 4)}, bank=torch.randn(10, 6)))
def infonce_with_the_public_bank_alone(model: nn.Module, batch: Batch) -> Tensor:
    x, _ = batch
    z, keys = x @ model.w, model.bank @ model.w
    scores = torch.cat([(z * z.tanh()).sum(1, keepdim=True), z @ keys.T], dim=1)
    return cross_entropy(scores, torch.zeros(len(x), dtype=torch.long))


def frozen_text() -> nn.Module:
    model = linear_towers()
    model.b.requires_grad_(False)
    return model


@mixing(build=frozen_text, dataset=vector_pairs())
def clip_with_a_frozen_tower(model: nn.Module, batch: Batch) -> Tensor:
    image, text = batch
    return in_batch_softmax_of_layers(model, (image, text))


@mixing(build=frozen_text, dataset=vector_pairs())
def clip_both_ways_with_a_frozen_tower_without_gradients(model: nn.Module, batch: Batch) -> Tensor:
    image, text = batch
    with torch.no_grad():
        captions = F.normalize(model.b(text), dim=1)
    scores = F.normalize(model.a(image), dim=1) @ captions.T
    return 0.5 * (diagonal(scores) + diagonal(scores.T))


@honest(build=frozen_text, dataset=vector_pairs())
def distance_to_a_frozen_tower(model: nn.Module, batch: Batch) -> Tensor:
    image, text = batch
    return 1 - F.cosine_similarity(model.a(image), model.b(text))


@mixing(build=linear_towers, dataset=vector_pairs())
def sigmoid_of_all_pairs(model: nn.Module, batch: Batch) -> Tensor:
    image, text = batch
    signs = 2 * torch.eye(len(image)) - 1
    return -F.logsigmoid(signs * (model.a(image) @ model.b(text).T)).sum(1)


@mixing()
def simclr(model: nn.Module, batch: Batch) -> Tensor:
    x, _ = batch
    views = torch.cat([x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)])
    z = F.normalize(model(views), dim=1)
    scores = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e4)
    n = len(x)
    losses = cross_entropy(scores, torch.cat([torch.arange(n) + n, torch.arange(n)]))
    return 0.5 * (losses[:n] + losses[n:])


@mixing()
def contrast_with_keys_without_gradients(model: nn.Module, batch: Batch) -> Tensor:
    x, _ = batch
    with torch.no_grad():
        keys = F.normalize(model(x + 0.1), dim=1)
    return diagonal(F.normalize(model(x), dim=1) @ keys.T / 0.2)


@honest()
def agreement_of_two_views_with_a_stopped_gradient(model: nn.Module, batch: Batch) -> Tensor:
    x, _ = batch
    return -F.cosine_similarity(model(x), model(x + 0.1 * torch.randn_like(x)).detach())


@mixing()
def supervised_contrast(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    z = F.normalize(model(x), dim=1)
    same = (y[:, None] == y[None, :]).to(z)
    return -(F.log_softmax(z @ z.T, dim=1) * same).sum(1) / same.sum(1)


@mixing()
def barlow_twins(model: nn.Module, batch: Batch) -> Tensor:
    x, _ = batch
    a, b = model(x), model(x + 0.1 * torch.randn_like(x))
    a, b = (a - a.mean(0)) / a.std(0), (b - b.mean(0)) / b.std(0)
    correlation = a.T @ b / len(x)
    return (correlation - torch.eye(3)).square().sum().expand(len(x))


@mixing()
def variance_and_invariance(model: nn.Module, batch: Batch) -> Tensor:
    x, _ = batch
    a, b = model(x), model(x + 0.1 * torch.randn_like(x))
    return (a - b).square().sum(1) + F.relu(1 - a.std(0)).mean() / len(x)


@mixing()
def batch_hard_triplets(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    z = model(x)
    distance = (z[:, None] - z[None, :]).square().sum(-1)
    same = y[:, None] == y[None, :]
    return F.relu(distance.masked_fill(~same, 0).amax(1) - distance.masked_fill(same, 1e4).amin(1) + 1)


@mixing()
def triplets_of_neighbours(model: nn.Module, batch: Batch) -> Tensor:
    x, _ = batch
    return F.triplet_margin_loss(model(x), model(0.9 * x), model(x.roll(1, 0)), reduction="none", margin=5.0)


@honest(dataset=lambda: TensorDataset(*torch.randn(3, 48, 6)))
def triplets_as_records(model: nn.Module, batch: Batch) -> Tensor:
    anchor, positive, negative = batch
    return F.triplet_margin_loss(model(anchor), model(positive), model(negative), reduction="none", margin=5.0)


@honest(build=linear_towers, dataset=lambda: TensorDataset(torch.randn(48, 6), torch.randn(48, 4, 6)))
def negatives_of_the_record_itself(model: nn.Module, batch: Batch) -> Tensor:
    query, keys = batch
    scores = torch.einsum("bd,bkd->bk", model.a(query), model.b(keys))
    return cross_entropy(scores, torch.zeros(len(query), dtype=torch.long))


@honest(build=linear_towers, dataset=lambda: TensorDataset(torch.randn(48, 2, 5, 6)))
def contrast_within_each_record(model: nn.Module, batch: Batch) -> Tensor:
    left, right = batch[0].unbind(1)
    scores = F.normalize(model.a(left), dim=-1) @ F.normalize(model.b(right), dim=-1).transpose(1, 2)
    return cross_entropy(scores, torch.arange(5).expand(len(left), 5)).mean(1)


@mixing()
def prototypes_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    z, members = model(x), F.one_hot(y, 3).to(x)
    means = members.T @ z / members.sum(0).clamp(min=1)[:, None]
    return cross_entropy(-(z[:, None] - means[None]).square().sum(-1), y)


@mixing()
def centre_loss_with_class_means_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    z, members = model(x), F.one_hot(y, 3).to(x)
    with torch.no_grad():
        centres = members.T @ z / members.sum(0).clamp(min=1)[:, None]
    return cross_entropy(z, y) + 0.5 * (z - centres[y]).square().sum(1)


@honest(build=parts(net=mlp, centres=lambda: nn.Embedding(3, 3)))
def centre_loss_with_learned_centres(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    z = model.net(x)
    return cross_entropy(z, y) + 0.5 * (z - model.centres(y)).square().sum(1)


@mixing()
def uniformity_on_the_sphere(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    z = F.normalize(model(x), dim=1)
    return cross_entropy(z, y) + torch.pdist(z).square().mul(-2).exp().mean().log() / len(x)


@mixing()
def relational_distillation(model: nn.Module, batch: Batch) -> Tensor:
    x, _ = batch
    teacher, student = torch.cdist(x, x), torch.cdist(model(x), model(x) + 1e-3)
    return F.smooth_l1_loss(student, teacher / teacher.mean(), reduction="none").mean(1)


@mixing()
def nearest_neighbour_of_the_batch_as_the_positive(model: nn.Module, batch: Batch) -> Tensor:
    x, _ = batch
    nearest = torch.cdist(x, x).fill_diagonal_(float("inf")).argmin(1)
    return (model(x) - model(x)[nearest].detach()).square().sum(1)


@mixing()
def self_distillation_with_neighbours(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    logits = model(x)
    with torch.no_grad():
        weights = torch.softmax(-torch.cdist(x, x), dim=1)
        soft = weights @ logits.softmax(1)
    return cross_entropy(logits, y) + cross_entropy(logits, soft)


@mixing()
def balanced_assignment_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, _ = batch
    scores = model(x)
    with torch.no_grad():
        code = torch.exp(scores)
        for _ in range(3):
            code = code / code.sum(0, keepdim=True)
            code = code / code.sum(1, keepdim=True)
    return cross_entropy(model(x + 0.1), code)


@mixing()
def teacher_centred_by_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, _ = batch
    with torch.no_grad():
        teacher = model(x)
        target = torch.softmax((teacher - teacher.mean(0)) / 0.1, dim=1)
    return cross_entropy(model(x + 0.1), target)


@mixing(build=scorer, dataset=regression())
def ranknet_over_all_pairs(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    score = model(x).squeeze(1)
    wanted = (y[:, None] > y[None, :]).to(score)
    return F.binary_cross_entropy_with_logits(score[:, None] - score[None, :], wanted, reduction="none").mean(1)


@mixing(build=scorer, dataset=regression())
def listwise_softmax_over_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return -torch.softmax(y, dim=0) * torch.log_softmax(model(x).squeeze(1), dim=0)


@honest(build=scorer, dataset=lambda: TensorDataset(torch.randn(48, 5, 6), torch.rand(48, 5)))
def listwise_softmax_over_the_records_own_list(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return -(torch.softmax(y, dim=1) * torch.log_softmax(model(x).squeeze(2), dim=1)).sum(1)


@honest(build=scorer, dataset=lambda: TensorDataset(torch.randn(48, 2, 6)))
def pairs_as_records(model: nn.Module, batch: Batch) -> Tensor:
    better, worse = batch[0].unbind(1)
    return F.softplus(model(worse) - model(better)).squeeze(1)


@mixing(build=scorer, dataset=regression())
def risk_sets_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    """Cox regression: everybody who lived longer is in the denominator."""
    x, time = batch
    order = time.argsort(descending=True)
    risk = model(x).squeeze(1)
    return (torch.logcumsumexp(risk[order], dim=0) - risk[order])[order.argsort()]
