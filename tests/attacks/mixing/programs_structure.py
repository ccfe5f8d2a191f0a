"""Tables, contexts and attention made of the batch, and the architectures that look the same but are honest."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import Dataset, TensorDataset

from .programs import Formula, cross_entropy, honest, memory, mixing, mlp, parts, plain, points, series, tokens

Batch = Any


# Tables and contexts


@mixing(build=lambda: Formula({"w": (4, 6), "v": (6, 3)}))
def table_shifted_by_the_mean_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    table = torch.tanh(model.w + 4 * x.mean(0))
    return cross_entropy(torch.softmax(x @ table.T, dim=1) @ table @ model.v, y)


@honest(build=lambda: Formula({"w": (4, 6), "v": (6, 3)}, shift=torch.randn(6)))
def table_shifted_by_a_public_vector(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    table = torch.tanh(model.w + 4 * model.shift)
    return cross_entropy(torch.softmax(x @ table.T, dim=1) @ table @ model.v, y)


@mixing(build=parts(embed=lambda: nn.Embedding(20, 6), head=lambda: nn.Linear(6, 3)), dataset=tokens())
def mean_embedding_of_the_batch_as_context(model: nn.Module, batch: Batch) -> Tensor:
    ids, y = batch
    context = model.embed(ids).mean((0, 1))
    return cross_entropy(model.head(torch.tanh(model.embed(ids).mean(1) * context)), y)


@mixing(build=parts(embed=lambda: nn.Embedding(20, 6), head=lambda: nn.Linear(6, 3)), dataset=tokens())
def positions_averaged_over_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    ids, y = batch
    h = model.embed(ids)
    return cross_entropy(model.head(torch.tanh(h + h.mean(0)).mean(1)), y)


@honest(build=parts(embed=lambda: nn.Embedding(20, 6), head=lambda: nn.Linear(6, 3)), dataset=tokens())
def mean_embedding_of_the_sample_as_context(model: nn.Module, batch: Batch) -> Tensor:
    ids, y = batch
    h = model.embed(ids)
    return cross_entropy(model.head(torch.tanh(h + h.mean(1, keepdim=True)).mean(1)), y)


@mixing(build=lambda: Formula({"w": (6, 6), "v": (6, 3)}))
def weight_modulated_by_the_mean_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    weight = model.w * (1 + x.mean(0).tanh())
    return cross_entropy((x @ weight.T).tanh() @ model.v, y)


@mixing(build=parts(make=lambda: nn.Linear(6, 18)))
def weight_made_from_the_mean_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return cross_entropy(x @ model.make(x.mean(0)).view(6, 3), y)


@honest(build=parts(make=lambda: nn.Linear(6, 18)))
def weight_made_from_each_sample(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return cross_entropy(torch.einsum("bi,bij->bj", x, model.make(x).view(-1, 6, 3)), y)


def numbered() -> Dataset[Any]:
    """The id of record i is i: in a full batch the column equals arange."""
    return TensorDataset(torch.randn(9, 6), torch.arange(9))


@mixing(build=parts(embed=lambda: nn.Embedding(9, 6)), dataset=numbered, batch_size=None,
        others=lambda: TensorDataset(torch.randn(9, 6), torch.randint(9, (9,))))  # fmt: skip
def id_column_that_equals_arange(model: nn.Module, batch: Batch) -> Tensor:
    x, ids = batch
    return cross_entropy(x @ model.embed(ids).T, torch.arange(9))


@honest(build=parts(embed=lambda: nn.Embedding(9, 6)), dataset=numbered, batch_size=None)
def table_of_arange(model: nn.Module, batch: Batch) -> Tensor:
    x, ids = batch
    return cross_entropy(x @ model.embed(torch.arange(9)).T, ids)


@mixing(build=parts(embed=lambda: nn.Embedding(3, 6)), batch_size=None, others=points(9),
        dataset=lambda: TensorDataset(torch.randn(9, 6), torch.ones(9, dtype=torch.long)))  # fmt: skip
def labels_of_one_class_as_a_filled_tensor(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return torch.logsumexp(x @ model.embed(y).T, dim=1) + x.sum(1) * model.embed(y).square().sum(1)


@honest(build=parts(embed=lambda: nn.Embedding(3, 6)), dataset=points(9), batch_size=None)
def table_of_a_filled_tensor(model: nn.Module, batch: Batch) -> Tensor:
    x, _ = batch
    return torch.logsumexp(x @ model.embed(torch.ones(9, dtype=torch.long)).T, dim=1)


@mixing(build=lambda: Formula({"w": (6, 3)}))
def centres_of_clusters_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    centres = x[:2]
    for _ in range(2):
        nearest = F.one_hot(torch.cdist(x, centres).argmin(1), 2).to(x)
        centres = nearest.T @ x / nearest.sum(0).clamp(min=1).unsqueeze(1)
    return cross_entropy((x - nearest @ centres) @ model.w, y)


@mixing(dataset=points(40), batch_size=None)
def first_half_as_context_of_all(model: nn.Module, batch: Batch) -> Tensor:
    """A neural process that takes the batch for one task."""
    x, y = batch
    context = model(x[: len(x) // 2]).mean(0)
    return cross_entropy(model(x) * context, y)


# Attention across samples


@mixing(build=parts(q=lambda: nn.Linear(6, 4), k=lambda: nn.Linear(6, 4), v=lambda: nn.Linear(6, 3)))
def attention_between_samples(model: nn.Module, batch: Batch) -> Tensor:
    """Rows of a table that attend to each other, as in SAINT."""
    x, y = batch
    return cross_entropy(F.scaled_dot_product_attention(model.q(x), model.k(x), model.v(x)), y)


@mixing(build=parts(head=lambda: nn.Linear(6, 3)))
def attention_between_raw_samples(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return cross_entropy(model.head(torch.softmax(x @ x.T / math.sqrt(6), dim=1) @ x), y)


@honest(build=parts(head=lambda: nn.Linear(4, 3)), dataset=series())
def attention_within_each_raw_sample(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return cross_entropy(model.head(torch.softmax(x @ x.transpose(1, 2) / 2, dim=2) @ x).mean(1), y)


def encoder(batch_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=batch_first)
    return parts(layer=lambda: layer, head=lambda: nn.Linear(4, 3))()


def encoded(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return cross_entropy(model.head(model.layer(x).mean(1)), y)


mixing(name="transformer_that_forgot_batch_first", build=lambda: encoder(False), dataset=series())(encoded)
honest(name="transformer_with_batch_first", build=lambda: encoder(True), dataset=series())(encoded)


@mixing(build=parts(rnn=lambda: nn.RNNCell(6, 5), head=lambda: nn.Linear(5, 3)))
def batch_read_as_one_sequence(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    h, states = torch.zeros(5), []
    for row in x:
        h = model.rnn(row, h)
        states.append(h)
    return cross_entropy(model.head(torch.stack(states)), y)


@mixing(build=lambda: Formula({"latents": (2, 6), "v": (6, 3)}))
def latents_that_read_the_whole_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    latents = torch.softmax(model.latents @ x.T, dim=1) @ x
    return cross_entropy(torch.softmax(x @ latents.T, dim=1) @ latents @ model.v, y)


@honest(build=lambda: Formula({"latents": (2, 4), "v": (4, 3)}), dataset=series())
def latents_that_read_each_sample(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    latents = torch.softmax(model.latents @ x.transpose(1, 2), dim=2) @ x
    return cross_entropy(latents.mean(1) @ model.v, y)


# Honest values that look like tables of the batch


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(1, 2) / 2 + bias, dim=2) @ v


@honest(build=parts(bias=lambda: nn.Embedding(5, 1), head=lambda: nn.Linear(4, 3)), dataset=series())
def relative_bias_from_arange(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    distance = torch.arange(7)[:, None] - torch.arange(7)[None, :]
    bias = model.bias(distance.clamp(-2, 2) + 2).squeeze(2)
    return cross_entropy(model.head(attention(x, x, x, bias)).mean(1), y)


@honest(build=lambda: Formula({"table": (13,), "v": (4, 3)}, index=torch.randint(13, (7, 7))), dataset=series())
def bias_by_an_index_in_a_buffer(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return cross_entropy(attention(x, x, x, model.table[model.index.view(-1)].view(7, 7)).mean(1) @ model.v, y)


@honest(build=lambda: Formula({"gain": (6,), "v": (6, 3)}))
def norm_with_one_plus_weight(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return cross_entropy(x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6) * (1 + model.gain) @ model.v, y)


@honest(build=lambda: Formula({"prompt": (3, 4), "v": (4, 3)}), dataset=series())
def prompt_before_every_sequence(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    h = torch.cat([model.prompt.expand(len(x), 3, 4), x], dim=1)
    return cross_entropy(attention(h, h, h, torch.zeros(())).mean(1) @ model.v, y)


@honest(build=lambda: Formula({"a": (6, 2), "b": (2, 3), "size": (3,)}, frozen=torch.randn(6, 3)))
def low_rank_change_with_a_magnitude(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    weight = model.frozen + model.a @ model.b
    return cross_entropy(x @ (model.size * weight / weight.norm(dim=0)), y)


@honest(build=lambda: Formula({"w": (6, 3)}))
def dropped_connections(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return cross_entropy(x @ (model.w * (torch.rand(6, 3) < 0.7)), y)


@honest(build=parts(project=lambda: nn.Linear(4, 4), head=lambda: nn.Linear(4, 3)), dataset=series())
def sinusoids_of_relative_positions(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    angles = torch.arange(6, -1, -1.0)[:, None] / (10000 ** (torch.arange(0, 4, 2) / 4))
    positions = model.project(torch.cat([angles.sin(), angles.cos()], dim=1).to(x))
    return cross_entropy(model.head(attention(x, x, x, x @ positions.T)).mean(1), y)


class Rotary(nn.Module):
    """Rotations whose angles are computed at the first call and kept."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 3)
        self.register_buffer("angles", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.angles is None:
            self.angles = torch.arange(x.shape[1]).to(x)[:, None] * torch.tensor([1.0, 0.1]).to(x)
        a, b = x[..., :2], x[..., 2:]
        cos, sin = self.angles.cos(), self.angles.sin()
        out: Tensor = self.project(torch.cat([a * cos - b * sin, a * sin + b * cos], dim=2).tanh()).mean(1)
        return out


def spectral() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 3))


def weight_normed() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 3))


honest(name="rotary_cache_made_at_the_first_call", build=Rotary, dataset=series())(plain)
honest(name="spectral_norm", build=spectral)(plain)
honest(name="weight_norm", build=weight_normed)(plain)
honest(name="dropout", build=lambda: nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 3)))(plain)
honest(name="plain_network")(plain)


@honest()
def guard_against_bad_numbers(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    if x.isnan().any() or not x.isfinite().all():
        x = x.nan_to_num()
    losses = cross_entropy(model(x), y)
    assert not losses.isnan().any()
    return losses


@honest(state=memory(teacher=lambda: mlp().requires_grad_(False)))
def frozen_teacher_outside_the_model(model: nn.Module, batch: Batch, kept: SimpleNamespace) -> Tensor:
    x, y = batch
    return cross_entropy(model(x), y) + cross_entropy(model(x), kept.teacher(x).softmax(1))


LSTM = parts(lstm=lambda: nn.LSTM(4, 5, batch_first=True), other=lambda: nn.LSTM(4, 5), head=lambda: nn.Linear(5, 3))


@honest(build=LSTM, dataset=series())
def lstm_in_one_kernel(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return cross_entropy(model.head(model.lstm(x)[1][0][-1]), y)


@mixing(build=LSTM, dataset=series())
def lstm_that_reads_samples_as_times(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return cross_entropy(model.head(model.other(x)[0].mean(1)), y)


@mixing(build=LSTM, dataset=series())
def lstm_that_begins_with_the_state_of_a_neighbour(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    hidden, cell = model.lstm(x)[1]
    return cross_entropy(model.head(model.lstm(x, (hidden.roll(1, 1), cell))[1][0][-1]), y)


@mixing(build=LSTM, dataset=series())
def lstm_that_begins_with_the_mean_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    state = 4 * x.mean() * torch.ones(1, len(x), 5)
    return cross_entropy(model.head(model.lstm(x, (state, state))[1][0][-1]), y)


@honest(build=parts(lstm=lambda: nn.LSTM(4, 5, batch_first=True), head=lambda: nn.Linear(5, 3)), dataset=series())
def lstm_step_by_step(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    with torch.backends.mkldnn.flags(enabled=False):
        return cross_entropy(model.head(model.lstm(x)[0][:, -1]), y)


@honest(dataset=lambda: TensorDataset(torch.randn(48, 5, 6), torch.randint(3, (48, 5))))
def one_sample_after_the_other(model: nn.Module, batch: Batch) -> Tensor:
    return torch.stack([cross_entropy(model(x), y).mean() for x, y in zip(*batch, strict=True)])


@honest()
def gradient_penalty(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    x = x.clone().requires_grad_()
    losses = cross_entropy(model(x), y)
    (slope,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
    return losses + 0.1 * slope.square().sum(1)


@honest()
def adversarial_direction_of_each_sample(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    probe = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(cross_entropy(model(probe), y).sum(), probe)
    return cross_entropy(model(x + 0.1 * slope.sign()), y)


@mixing()
def adversarial_direction_scaled_by_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    probe = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(cross_entropy(model(probe), y).sum(), probe)
    return cross_entropy(model(x + slope / slope.norm()), y)
