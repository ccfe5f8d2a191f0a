"""The client's side of a round: from the model's weights and a user's examples to a clipped update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from clipwise._validate import is_count, is_positive
from clipwise.clipping import Style
from clipwise.entropy import Entropy
from clipwise.errors import InvalidLosses, InvalidPlan
from clipwise.federated.updates import Reply, clip_update, norms

__all__ = ["LocalGradient", "LocalTraining", "Task", "Work"]

LossFunction = Callable[[nn.Module, Any], Tensor]
OptimizerFactory = Callable[[Iterable[Tensor]], Optimizer]


@dataclass(frozen=True, eq=False)
class Task:
    """What a selected user receives: the round, the model's weights (a whole state dict), and how to clip."""

    number: int
    user: int
    weights: Mapping[str, Tensor]
    style: Style
    asks_within: bool = False


class Work(Protocol):
    """What clients do with a task; write your own as a function. `model` is theirs to change."""

    def __call__(self, model: nn.Module, dataset: Dataset[Any], task: Task) -> Reply:
        """Train `model` from `task.weights` on the user's examples, and reply with the clipped update."""
        ...


@dataclass(frozen=True)
class LocalTraining:
    """DP-FedAvg's UserUpdate: some epochs of ordinary training, then the difference to the start, clipped.

    `loss_fn(model, batch)` gives one loss per example, shape (B,); their mean is minimised. `optimizer` makes any
    optimizer of `torch.optim` for given parameters: `partial(torch.optim.SGD, lr=0.1)`. `clip_every="round"` clips
    once at the end; `"batch"` brings the weights back after every batch, as the paper prints it, which with
    GlobalClip shrinks the update by R/Z each time. `seed` makes batches and dropout repeatable.

    >>> import functools
    >>> from torch.utils.data import TensorDataset
    >>> from clipwise import Abadi, Flat
    >>> model = nn.Linear(2, 1)
    >>> _ = nn.init.ones_(model.weight)
    >>> task = Task(0, user=7, weights=model.state_dict(), style=Flat(Abadi(0.1)))
    >>> work = LocalTraining(lambda m, batch: m(batch[0])[:, 0].square(), functools.partial(torch.optim.SGD, lr=1.0))
    >>> reply = work(nn.Linear(2, 1), TensorDataset(torch.ones(5, 2)), task)
    >>> reply.weight, round(norms(reply.update, task.style)[""], 4)
    (5, 0.1)
    """

    loss_fn: LossFunction
    optimizer: OptimizerFactory
    epochs: int = 1
    batch_size: int = 32
    clip_every: Literal["round", "batch"] = "round"
    collate_fn: Callable[[list[Any]], Any] | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_positive(epochs=self.epochs, batch_size=self.batch_size)
        if self.clip_every not in ("round", "batch"):
            raise InvalidPlan(f'clip_every must be "round" or "batch", got {self.clip_every!r}.')
        Entropy(self.seed)

    def __call__(self, model: nn.Module, dataset: Dataset[Any], task: Task) -> Reply:
        """Train `model` from the task's weights, and reply."""
        entropy, start = _begin(model, task, self.seed)
        optimizer = self.optimizer([p for p in model.parameters() if p.requires_grad])
        moved = _difference(model, start)
        clipped = moved
        for epoch in range(self.epochs):
            order = entropy.generator("local order", task.number, task.user, epoch).permutation(_size(dataset))
            for batch in _batches(dataset, order.tolist(), self.batch_size, self.collate_fn):
                optimizer.step(_closure(model, optimizer, self.loss_fn, batch))
                if self.clip_every == "batch":
                    moved = _difference(model, start)
                    clipped = clip_update(moved, task.style)
                    _put(model, start, clipped)
        if self.clip_every == "round":
            moved = _difference(model, start)
            clipped = clip_update(moved, task.style)
        return _reply(moved, clipped, _size(dataset), task)


@dataclass(frozen=True)
class LocalGradient:
    """DP-FedSGD's UserUpdate: one gradient, of a batch of the user's examples, times -lr, clipped.

    `batch_size=None` takes all examples of the user; otherwise so many, chosen at random in every round.

    >>> from torch.utils.data import TensorDataset
    >>> from clipwise import Abadi, Flat
    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.ones_(model.weight)
    >>> task = Task(0, user=7, weights=model.state_dict(), style=Flat(Abadi(10.0)))
    >>> work = LocalGradient(lambda m, batch: m(batch[0])[:, 0].square(), lr=0.5)
    >>> work(nn.Linear(1, 1, bias=False), TensorDataset(torch.ones(5, 1)), task).update
    {'weight': tensor([[-1.]])}
    """

    loss_fn: LossFunction
    lr: float
    batch_size: int | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.batch_size is not None:
            _check_positive(batch_size=self.batch_size)
        if not is_positive(self.lr):
            raise InvalidPlan(f"lr must be a positive finite number, got {self.lr!r}.")
        Entropy(self.seed)

    def __call__(self, model: nn.Module, dataset: Dataset[Any], task: Task) -> Reply:
        """One gradient at the task's weights, and reply."""
        entropy, start = _begin(model, task, self.seed)
        size = _size(dataset)
        taken = size if self.batch_size is None else min(size, self.batch_size)
        order = entropy.generator("local order", task.number, task.user, 0).permutation(size)[:taken]
        moved = {name: torch.zeros_like(p) for name, p in start.items()}
        for batch in _batches(dataset, sorted(order.tolist()), max(taken, 1), self.collate_fn):
            loss = _losses(self.loss_fn, model, batch).mean()
            parameters = _trainable(model)
            gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            moved = {
                name: moved[name] if g is None else -self.lr * g for name, g in zip(parameters, gradients, strict=True)
            }
        return _reply(moved, clip_update(moved, task.style), size, task)


def _check_positive(**numbers: object) -> None:
    for name, value in numbers.items():
        if not is_count(value):
            raise InvalidPlan(f"{name} must be a positive integer, got {value!r}.")


def _size(dataset: Dataset[Any]) -> int:
    return len(cast(Sized, dataset))


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _begin(model: nn.Module, task: Task, seed: int | None) -> tuple[Entropy, dict[str, Tensor]]:
    """Fill the model with the weights of the round; the coins, and where its trainable parameters start."""
    entropy = Entropy(seed)
    entropy.seed_globals("local", task.number, task.user)
    model.load_state_dict(task.weights)
    return entropy, {name: p.detach().clone() for name, p in _trainable(model).items()}


def _difference(model: nn.Module, start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: p.detach() - start[name] for name, p in _trainable(model).items()}


@torch.no_grad()
def _put(model: nn.Module, start: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> None:
    for name, p in _trainable(model).items():
        p.copy_(start[name] + update[name])


def _batches(
    dataset: Dataset[Any], order: list[int], size: int, collate_fn: Callable[[list[Any]], Any] | None
) -> Iterator[Any]:
    batches = [order[i : i + size] for i in range(0, len(order), size)]
    yield from DataLoader(dataset, batch_sampler=batches, collate_fn=collate_fn)


def _losses(loss_fn: LossFunction, model: nn.Module, batch: Any) -> Tensor:
    losses = loss_fn(model, batch)
    if not isinstance(losses, Tensor) or losses.dim() != 1 or not losses.numel():
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise InvalidLosses(f"loss_fn(model, batch) must give one loss per example, shape (B,), got {shape}.")
    return losses


def _closure(model: nn.Module, optimizer: Optimizer, loss_fn: LossFunction, batch: Any) -> Callable[[], float]:
    """What optimizers call once, or several times (LBFGS), for the gradient of a batch."""

    def evaluate() -> float:
        optimizer.zero_grad()
        loss = _losses(loss_fn, model, batch).mean()
        loss.backward()
        return float(loss.detach())

    return evaluate


def _reply(moved: Mapping[str, Tensor], clipped: Mapping[str, Tensor], weight: int, task: Task) -> Reply:
    """An update that is not finite is sent as it is, so that the server can say so; the server leaves it out."""
    found = norms(moved, task.style)
    finite = all(norm < float("inf") for norm in found.values())
    within = None
    if task.asks_within:
        within = all(norm <= task.style.rule_of(group).sensitivity for group, norm in found.items())
    return Reply(clipped if finite else moved, weight, within)
