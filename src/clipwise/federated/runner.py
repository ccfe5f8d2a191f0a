"""All users in this process, one after the other: for tests and for studies of a few hundred users."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from clipwise.errors import InvalidSampling
from clipwise.federated.local import Task, Work
from clipwise.federated.server import Failure, Round, RoundReport, Server, Successes, apply
from clipwise.federated.updates import Reply

__all__ = ["run"]


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
