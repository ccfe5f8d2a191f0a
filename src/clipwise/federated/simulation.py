"""Studies in one process: users made of a data set, alike or with few classes each, who train one after the other."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from clipwise._validate import is_count
from clipwise.entropy import Entropy
from clipwise.errors import InvalidConfig, InvalidSampling
from clipwise.federated.local import Task, Work
from clipwise.federated.server import Failure, Round, RoundReport, Server, Successes, apply
from clipwise.federated.updates import Reply

__all__ = ["dirichlet", "run", "shards", "uniform"]

Indices = NDArray[np.int64]


def uniform(records: int, users: int, seed: int = 0) -> list[Indices]:
    """Records dealt at random: every user has the same mixture, and as many records as the others, or one more.

    >>> [len(part) for part in uniform(10, users=3)]
    [4, 3, 3]
    """
    _check(records, users)
    order = Entropy(seed).generator("users").permutation(records)
    return [np.sort(part) for part in np.array_split(order, users)]


def shards(labels: Tensor, users: int, shards_per_user: int = 2, seed: int = 0) -> list[Indices]:
    """Records sorted by label, cut into equal shards, and so many shards dealt to each user (McMahan et al., 2017).

    A user then has hardly more classes than shards.

    >>> import torch
    >>> parts = shards(torch.arange(10).repeat(20), users=10)
    >>> sorted({len(part) for part in parts}), max(len({int(i) % 10 for i in part}) for part in parts)
    ([20], 2)
    """
    _check(len(labels), users, shards_per_user)
    random = Entropy(seed).generator("shards")
    order = random.permutation(len(labels))
    order = order[np.argsort(labels.numpy()[order], kind="stable")]
    pieces = np.array_split(order, users * shards_per_user)
    dealt = random.permutation(len(pieces)).reshape(users, shards_per_user)
    return [np.sort(np.concatenate([pieces[k] for k in row])) for row in dealt]


def dirichlet(labels: Tensor, users: int, concentration: float = 0.5, seed: int = 0) -> list[Indices]:
    """Every class is dealt to the users in shares from a Dirichlet distribution: sizes and mixtures both differ.

    A small `concentration` gives a class to few users; a large one makes users alike. Some may have no records at all.

    >>> import torch
    >>> parts = dirichlet(torch.arange(10).repeat(20), users=5, concentration=0.1)
    >>> sum(len(part) for part in parts), len({len(part) for part in parts}) > 1
    (200, True)
    """
    _check(len(labels), users)
    if not 0 < concentration < np.inf:
        raise InvalidConfig(f"concentration must be a positive finite number, got {concentration!r}.")
    random = Entropy(seed).generator("dirichlet")
    owner = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels.numpy()):
        members = random.permutation(np.flatnonzero(labels.numpy() == label))
        share = random.dirichlet(np.full(users, concentration))
        ends = np.round(np.cumsum(share) * len(members)).astype(np.int64)
        owner[members] = np.searchsorted(ends, np.arange(len(members)), side="right").clip(max=users - 1)
    return [np.flatnonzero(owner == user) for user in range(users)]


def _check(records: int, users: int, parts_each: int = 1) -> None:
    for count in (users, parts_each):
        if not is_count(count):
            raise InvalidConfig(f"users, and the parts of each, must be positive integers, got {count!r}.")
    if users * parts_each > records:
        raise InvalidConfig(f"{records} records cannot be cut into {users * parts_each} parts.")


def run(
    server: Server,
    model: nn.Module,
    datasets: Sequence[Dataset[Any]],
    work: Work,
    optimizer: Optimizer | None = None,
) -> Iterator[RoundReport]:
    """Make the rounds still to be made; `model` has the new weights whenever a round's report comes out.

    `datasets[k]` has the examples of user k. `optimizer` is the server's, see `apply`. A user whose work raises an
    exception drops out of the round, which is logged; if not a single user has succeeded so far, it is taken for a
    mistake in the work and raised.

    >>> import functools, torch
    >>> from torch.utils.data import TensorDataset
    >>> from clipwise import Abadi, Plan, Poisson
    >>> from clipwise.federated import LocalTraining
    >>> from clipwise.mechanisms import Rounds
    >>> users = [TensorDataset(torch.randn(5, 2)) for _ in range(10)]
    >>> plan = Plan(Poisson(10, 4), steps=3, clip=Abadi(1.0), noise_multiplier=1.0, mechanism=Rounds())
    >>> work = LocalTraining(lambda m, batch: m(batch[0])[:, 0].square(), functools.partial(torch.optim.SGD, lr=0.1))
    >>> model = nn.Linear(2, 1)
    >>> server = Server(plan, model)
    >>> [report.number for report in run(server, model, users, work)]
    [0, 1, 2]
    >>> server.epsilon(delta=0.01) == plan.epsilon(delta=0.01)
    True
    """
    users = server.plan.sampling.sample_size
    if users is not None and len(datasets) != users:
        raise InvalidSampling(f"the plan has {users} users, but there are {len(datasets)} data sets.")
    server.look_at(datasets)
    return _rounds(server, model, datasets, _Clients(datasets, work, copy.deepcopy(model)), optimizer)


def _rounds(
    server: Server, model: nn.Module, datasets: Sequence[Dataset[Any]], clients: _Clients, optimizer: Optimizer | None
) -> Iterator[RoundReport]:
    while server.rounds_done < server.plan.steps:
        opened = server.open(range(len(datasets)))
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        apply(model, server.close(clients.replies(opened, weights)), optimizer)
        assert server.last is not None
        yield server.last


class _Clients:
    """The users' work, each on its own copy: what one leaves in a model must not reach another's update."""

    def __init__(self, datasets: Sequence[Dataset[Any]], work: Work, untouched: nn.Module) -> None:
        self._datasets, self._work, self._untouched = datasets, work, untouched
        self._successes = Successes()

    def replies(self, opened: Round, weights: dict[str, Tensor]) -> Iterator[tuple[int, Reply | Failure]]:
        """What the selected users send back."""
        return self._successes.among(self._replies(opened, weights), len(opened.selected))

    def _replies(self, opened: Round, weights: dict[str, Tensor]) -> Iterator[tuple[int, Reply | Failure]]:
        for user in opened.selected:
            task = Task(opened.number, user, weights, opened.style, opened.asks_within)
            reply: Reply | Failure
            try:
                reply = self._work(copy.deepcopy(self._untouched), self._datasets[user], task)
            except Exception as error:
                reply = Failure(f"its work raised {error!r}", error)
            yield user, reply
