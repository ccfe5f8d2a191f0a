"""What is kept between batches: buffers, banks, queues, running statistics, attributes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .programs import Parts, cross_entropy, honest, id_pairs, memory, mixing, mlp, parts, plain, scorer, series

Batch = Any


class Holding(nn.Module):
    """A network with buffers; `__call__` is the network."""

    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        self.net = mlp()
        self.last: Any = None
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


def holding(**shapes: tuple[int, ...]) -> Any:
    return lambda: Holding(**{name: torch.ones(shape) for name, shape in shapes.items()})


# Buffers written from the batch


@mixing(build=holding(codes=(4, 3), counts=(4,)), refused_by=2)
def codebook_by_moving_averages(model: nn.Module, batch: Batch) -> Tensor:
    """VQ-EMA."""
    x, _ = batch
    z = model(x)
    with torch.no_grad():
        noise = torch.linspace(-1, 1, 4).unsqueeze(1)
        nearest = F.one_hot(torch.cdist(z, model.codes * noise).argmin(1), 4).to(z)
        model.counts.mul_(0.9).add_(nearest.sum(0), alpha=0.1)
        model.codes.mul_(0.9).add_(nearest.T @ z / model.counts[:, None], alpha=0.1)
    return (z - nearest @ model.codes).square().sum(1)


@honest(build=parts(net=mlp, codes=lambda: nn.Embedding(4, 3)))
def codebook_learned_by_gradients(model: nn.Module, batch: Batch) -> Tensor:
    x, _ = batch
    z = model.net(x)
    code = model.codes(torch.cdist(z.detach(), model.codes.weight.detach()).argmin(1))
    straight = z + (code - z).detach()
    return (straight - x[:, :3]).square().sum(1) + (code - z.detach()).square().sum(1)


def remember(model: nn.Module, batch: Batch) -> None:
    with torch.no_grad():
        model.bank.copy_(torch.cat([model(batch[0]), model.bank])[: len(model.bank)])


@mixing(build=holding(bank=(12, 3)), refused_by=2, after=remember)
def memory_bank_filled_after_the_step(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    z = model(x)
    return cross_entropy(z, y) + torch.logsumexp(z @ model.bank.T, dim=1)


@mixing(build=holding(bank=(12, 3)), refused_by=2)
def memory_bank_filled_in_the_forward_pass(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    z = model(x)
    remember(model, batch)
    return cross_entropy(z, y) + torch.logsumexp(z @ model.bank.T, dim=1)


def against_the_bank(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    x, y = batch
    z = model(x)
    return z, cross_entropy(z, y) + torch.logsumexp(z @ model.bank.T, dim=1)


@mixing(build=holding(bank=(12, 3)), refused_by=2)
def memory_bank_replaced_in_the_forward_pass(model: nn.Module, batch: Batch) -> Tensor:
    z, losses = against_the_bank(model, batch)
    model.bank = torch.cat([z.detach(), model.bank])[:12]
    return losses


@mixing(build=holding(bank=(12, 3)), refused_by=2)
def memory_bank_written_behind_the_version_counter(model: nn.Module, batch: Batch) -> Tensor:
    z, losses = against_the_bank(model, batch)
    model.bank.data[:2] = z.detach()[:2]
    return losses


@mixing(build=holding(bank=(12, 3)), refused_by=2)
def memory_bank_written_with_numpy(model: nn.Module, batch: Batch) -> Tensor:
    z, losses = against_the_bank(model, batch)
    model.bank.numpy()[:2] = z.detach().numpy()[:2]
    return losses


@honest(build=lambda: Holding(bank=torch.randn(12, 3)))
def memory_bank_of_public_vectors(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    z = model(x)
    return cross_entropy(z, y) + torch.logsumexp(z @ model.bank.T, dim=1)


@mixing(build=holding(table=(60, 4)), dataset=id_pairs(), refused_by=2)
def memory_of_every_item(model: nn.Module, batch: Batch) -> Tensor:
    """Each item's last features are kept and read by whoever meets the item."""
    users, items = batch
    z = model(torch.sin(users.unsqueeze(1) * torch.arange(1, 7)).to(model.table))
    losses = (z.sum(1) - model.table[items].sum(1)).square()
    model.table[items] = torch.cat([z, z[:, :1]], dim=1).detach()
    return losses


@mixing(build=holding(low=(), high=()), refused_by=2)
def range_observed_for_quantisation(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    logits = model(x)
    with torch.no_grad():
        model.low.copy_(torch.minimum(model.low, logits.min()))
        model.high.copy_(torch.maximum(model.high, logits.max()))
    scale = (model.high - model.low) / 15
    rounded = logits + ((logits / scale).round() * scale - logits).detach()
    return cross_entropy(rounded, y)


@honest(build=lambda: Holding(low=torch.tensor(-2.0), high=torch.tensor(2.0)))
def range_given_for_quantisation(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    logits = model(x)
    scale = (model.high - model.low) / 15
    rounded = logits + ((logits / scale).round() * scale - logits).detach()
    return cross_entropy(rounded, y)


@mixing(build=holding(centre=(3,)), refused_by=2)
def teacher_centred_by_a_moving_average(model: nn.Module, batch: Batch) -> Tensor:
    x, _ = batch
    with torch.no_grad():
        teacher = model(x)
        target = torch.softmax((teacher - model.centre) / 0.1, dim=1)
        model.centre.lerp_(teacher.mean(0), 0.1)
    return cross_entropy(model(x + 0.1), target)


@mixing(build=holding(mean=(6,), square=(6,)), refused_by=2)
def observations_standardised_by_running_statistics(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    with torch.no_grad():
        model.mean.lerp_(x.mean(0), 0.1)
        model.square.lerp_(x.square().mean(0), 0.1)
    return cross_entropy(model((x - model.mean) / (model.square - model.mean.square() + 1).sqrt()), y)


@mixing(build=lambda: nn.Sequential(nn.BatchNorm1d(6, affine=False), mlp()), refused_by=2)
def running_statistics_updated_but_not_used(model: nn.Module, batch: Batch) -> Tensor:
    """The forward pass is that of evaluation; training mode only updates the buffers."""
    x, y = batch
    with torch.no_grad():
        model.train()(x)
    return cross_entropy(model.eval()(x), y)


@mixing(build=holding(prototypes=(3, 3)), refused_by=2)
def prototypes_by_moving_averages(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    z = model(x)
    losses = cross_entropy(-(z[:, None] - model.prototypes).square().sum(2) * torch.arange(1, 4), y)
    with torch.no_grad():
        for label, row in zip(y, z, strict=True):
            model.prototypes[label].lerp_(row, 0.1)
    return losses


@mixing(build=holding(prior=(3,)), refused_by=2)
def class_prior_counted_on_the_way(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    model.prior += torch.bincount(y, minlength=3)
    return cross_entropy(model(x) + (model.prior / model.prior.sum()).log(), y)


@mixing(build=holding(scale=()), refused_by=2)
def parameter_set_by_the_first_batch(model: nn.Module, batch: Batch) -> Tensor:
    """Glow's ActNorm: the statistics of the first batch become the parameters."""
    x, y = batch
    h = model.net[0](x)
    if model.scale == 1:
        with torch.no_grad():
            model.net[0].bias.sub_(h.mean(0))
            model.net[0].weight.div_(h.std(0).unsqueeze(1))
            model.scale.fill_(2)
    return cross_entropy(model(x), y)


@mixing(build=mlp, refused_by=2, mended=None)
def thresholds_set_by_the_first_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    if not hasattr(model, "threshold"):
        model.threshold = x.quantile(0.3, dim=0)
    return cross_entropy(model(x * (x > model.threshold)), y)


# Kept by the loop or as an attribute


@mixing(state=memory(queue=list), refused_by=2)
def queue_of_keys_in_a_list(model: nn.Module, batch: Batch, kept: SimpleNamespace) -> Tensor:
    x, y = batch
    z = F.normalize(model(x), dim=1)
    losses = cross_entropy(z, y)
    for keys in kept.queue[-4:]:
        losses = losses + torch.logsumexp(z @ keys.T, dim=1)
    kept.queue.append(z.detach())
    return losses


@mixing(state=memory(queue=lambda: torch.ones(10, 3)), refused_by=2)
def queue_of_keys_in_a_tensor(model: nn.Module, batch: Batch, kept: SimpleNamespace) -> Tensor:
    x, _ = batch
    q, k = F.normalize(model(x), dim=1), F.normalize(model(x + 0.1), dim=1).detach()
    scores = torch.cat([(q * k).sum(1, keepdim=True), q @ kept.queue.T], dim=1)
    kept.queue = torch.cat([k, kept.queue])[:10]
    return cross_entropy(scores, torch.zeros(len(x), dtype=torch.long))


@honest(state=memory(queue=lambda: torch.randn(10, 3)))
def queue_of_public_keys(model: nn.Module, batch: Batch, kept: SimpleNamespace) -> Tensor:
    x, _ = batch
    q = F.normalize(model(x), dim=1)
    k = F.normalize(model(x + 0.1), dim=1).detach()
    scores = torch.cat([(q * k).sum(1, keepdim=True), q @ kept.queue.T], dim=1)
    return cross_entropy(scores, torch.zeros(len(x), dtype=torch.long))


@mixing(state=memory(average=lambda: 1.0), only_with_loss_fn=True)
def losses_divided_by_a_moving_average(model: nn.Module, batch: Batch, kept: SimpleNamespace) -> Tensor:
    losses = plain(model, batch)
    kept.average = 0.9 * kept.average + 0.1 * losses.mean().item()
    return losses / kept.average


def put_back(model: nn.Module, batch: Batch, kept: SimpleNamespace) -> None:
    kept.last = batch


@mixing(state=memory(last=lambda: None), refused_by=2, after=put_back)
def mixup_with_the_last_batch(model: nn.Module, batch: Batch, kept: SimpleNamespace) -> Tensor:
    x, y = batch
    if kept.last is not None:
        x = 0.8 * x + 0.2 * kept.last[0][torch.randint(len(kept.last[0]), (len(x),))]
    return cross_entropy(model(x), y)


@mixing(build=parts(rnn=lambda: nn.RNNCell(4, 5), head=lambda: nn.Linear(5, 3)), dataset=series(),
        state=memory(hidden=lambda: None), refused_by=2)  # fmt: skip
def hidden_state_carried_to_the_next_batch(model: nn.Module, batch: Batch, kept: SimpleNamespace) -> Tensor:
    x, y = batch
    h = torch.zeros(len(x), 5) if kept.hidden is None else kept.hidden.expand(len(x), 5)
    for step in x.unbind(1):
        h = model.rnn(step, h)
    kept.hidden = h[-1:].detach()
    return cross_entropy(model.head(h), y)


@honest(build=parts(rnn=lambda: nn.RNNCell(4, 5), head=lambda: nn.Linear(5, 3)), dataset=series())
def hidden_state_begun_anew(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    h = torch.zeros(len(x), 5)
    for step in x.unbind(1):
        h = model.rnn(step, h)
    return cross_entropy(model.head(h), y)


@mixing(state=memory(thresholds=lambda: torch.full((3,), 0.3)), refused_by=2)
def thresholds_adapted_to_the_classes_seen(model: nn.Module, batch: Batch, kept: SimpleNamespace) -> Tensor:
    """FlexMatch."""
    x, _ = batch
    confidence, label = model(x).detach().softmax(1).max(1)
    counts = torch.bincount(label, weights=confidence, minlength=3)
    kept.thresholds = 0.5 * kept.thresholds + 0.5 * counts / counts.max()
    return cross_entropy(model(x + 0.1), label) * torch.sigmoid(20 * (confidence - kept.thresholds[label]))


class Attended(Parts):
    """Attention whose context is set as an attribute before the call."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        out: Tensor = self.head(torch.softmax(h @ self.context.T, dim=1) @ self.context)
        return out


def attended() -> nn.Module:
    return Attended(embed=nn.Linear(6, 6), head=nn.Linear(6, 3))


@mixing(build=attended)
def batch_as_an_attribute(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    model.context = x
    return cross_entropy(model(x), y)


@honest(build=attended)
def public_context_as_an_attribute(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    model.context = torch.linspace(-1, 1, 30).view(5, 6)
    return cross_entropy(model(x), y)


@mixing(build=holding())
def mean_as_an_attribute(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    model.last = x.mean(0)
    return cross_entropy(model(x * model.last), y)


@mixing(build=holding())
def spread_as_a_number_on_the_model(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    logits = model(x)
    model.last = float(logits.detach().std())
    return cross_entropy(logits / model.last, y)


@mixing(build=holding(), refused_by=2)
def last_logits_as_an_attribute(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    logits = model(x)
    before, model.last = model.last, logits.detach().mean(0)
    return cross_entropy(logits, y) + (0 if before is None else (logits * before).sum(1))


def count(model: nn.Module, batch: Batch) -> None:
    model.steps.add_(1)


@honest(build=holding(steps=()), after=count)
def temperature_by_a_counter_of_steps(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return cross_entropy(model(x) / (1 + 0.1 * model.steps), y)


@honest(build=holding(steps=()))
def counter_in_the_forward_pass(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    model.steps += 1
    return cross_entropy(model(x) * torch.cos(0.01 * model.steps), y)


@honest(build=scorer, state=memory(step=int))
def annealing_by_a_number_of_the_loop(model: nn.Module, batch: Batch, kept: SimpleNamespace) -> Tensor:
    kept.step += 1
    beta = min(1.0, kept.step / 10)
    score = model(batch[0]).squeeze(1)
    return F.softplus(score) + beta * score.square()
