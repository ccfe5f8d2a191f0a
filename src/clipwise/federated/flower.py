"""The same rounds on Flower: a strategy for your ServerApp, and one call for your ClientApp. Needs the extra `flower`.

A Flower node is a user here: what is protected is everything that one node holds. Flower's usage reports (and those
of Ray, which runs its simulations) are off unless the environment says otherwise when this module is imported first.
"""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from clipwise._json import parse_json
from clipwise.accounting import Ledger, Relation
from clipwise.clipping import Style
from clipwise.errors import ClipwiseError, DataError, InvalidPlan, InvalidSampling, MissingExtra
from clipwise.federated.local import Task, Work
from clipwise.federated.server import Failure, Server, Successes, apply
from clipwise.federated.updates import Reply
from clipwise.noise import Normals
from clipwise.packing import read_npy
from clipwise.plan import Plan
from clipwise.sampling import FullBatch

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # read by Flower when it is imported
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
try:
    from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import FedAvg
    from flwr.serverapp.strategy.strategy_utils import sample_nodes
except ImportError as error:
    raise MissingExtra("clipwise.federated.flower needs Flower: pip install 'clipwise[flower]'.") from error

__all__ = ["DPFedAvg", "answer"]

_Record = TypeVar("_Record")

_LOG = logging.getLogger("clipwise.federated")
_ROUND, _STYLE, _ASKS = "clipwise-round", "clipwise-style", "clipwise-asks-within"  # in the configuration
_WEIGHT, _WITHIN = "num-examples", "within"  # in the metrics
_DEAD = "ActorDiedError"
"""Ray's error about a process that does not come back. Flower's simulation gives it further nodes all the same."""
_DIED = (
    "the process of Flower's simulation that worked for node {node} has died (a crash, os._exit, no memory left), and "
    "what Flower gives it from here on is lost: the model would become noise. Nothing was released in this round. Find "
    'out why it died, or let Ray start it again: backend_config={{"client_resources": {{"num_cpus": 1, "max_restarts": '
    '-1, "max_task_retries": 1}}}}.'
)


class DPFedAvg(FedAvg):
    """DP-FedAvg or DP-FedSGD as a Flower strategy; which of the two is the clients' work.

    Trainable parameters of `model` are learnt; it holds the latest weights, and `start` is given the first ones:
    `ArrayRecord(model.state_dict())`. `optimizer` is the server's, see `clipwise.federated.apply`. A round begins when
    `min_available_nodes` nodes are connected (all users of the plan unless given).

    The strategy does not use Flower's sampling: every connected node is selected by its own coin, perhaps none is,
    and then the round is noise alone. What clients measure (losses, accuracies) is not covered by epsilon, so it is
    dropped, and clients are not asked to evaluate: give `start` an `evaluate_fn` with public data.

    A process of Flower's simulation that dies ends the run with an error, unless Ray is to start it again; so does a
    first round in which no selected node succeeds. Neither round is charged.

    Guarantees: those of `clipwise.federated.Server`, whatever nodes send.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        *,
        seed: int | None = None,
        noise: Normals | None = None,
        ledger: Ledger | None = None,
        optimizer: Optimizer | None = None,
        min_available_nodes: int | None = None,
        fraction_train: float | None = None,
    ) -> None:
        if fraction_train is not None:
            raise InvalidSampling(
                f"fraction_train={fraction_train!r} takes a fixed number of nodes, which cannot be accounted as "
                "independent selection. Say it in the plan: sampling=Poisson(users, expected users per round)."
            )
        awaited = plan.sampling.sample_size if min_available_nodes is None else min_available_nodes
        if awaited is None:
            raise InvalidPlan("a plan with rate= does not say how many nodes to wait for: give min_available_nodes=.")
        self.server = Server(plan, model, seed=seed, noise=noise, ledger=ledger)
        super().__init__(
            fraction_evaluate=0.0,
            min_available_nodes=awaited,
            weighted_by_key=_WEIGHT,
        )
        self._model, self._optimizer = model, optimizer
        self._successes, self._selected = Successes(), 0

    @property
    def ledger(self) -> Ledger:
        """Everything that was released, as facts."""
        return self.server.ledger

    def epsilon(self, delta: float, accountant: str = "exact", *, relation: Relation | None = None) -> float:
        """The epsilon spent so far at this `delta`, for everything of one node."""
        return self.server.epsilon(delta, accountant, relation=relation)

    def summary(self) -> None:
        """Log the plan where Flower logs its sampling."""
        _LOG.info("%r", self.server.plan)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Select nodes, each by its own coin, and send them the weights and how to clip."""
        try:
            self._model.load_state_dict(arrays.to_torch_state_dict())
        except RuntimeError as error:
            raise InvalidPlan(f"the arrays are not those of the strategy's model: {error}") from error
        _, nodes = sample_nodes(grid, self.min_available_nodes, 0)  # draws nobody; waits for nodes to connect
        users = self.server.plan.sampling.sample_size
        if users is not None and len(nodes) > users:
            _LOG.warning("%d nodes are connected, the plan counts on %d users", len(nodes), users)
        opened = self.server.open(sorted(nodes))
        self._selected = len(opened.selected)
        # Flower counts rounds from the start of the process, the server those of the plan.
        ours: dict[str, Any] = {_ROUND: opened.number, _STYLE: _encode(opened.style), _ASKS: opened.asks_within}
        told = ConfigRecord({**config, "server-round": server_round, **ours})
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: told})
        return self._construct_messages(record, list(opened.selected), MessageType.TRAIN)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add the noisy mean update to the arrays of the round. Metrics of clients are dropped."""
        read = self._successes.among(self._read(replies), self._selected)
        apply(self._model, self.server.close(read), self._optimizer)
        return ArrayRecord(self._model.state_dict()), None

    def _read(self, replies: Iterable[Message]) -> Iterator[tuple[int, Reply | Failure]]:
        for message in replies:
            node = message.metadata.src_node_id
            if message.has_error():
                if _DEAD in str(message.error.reason):
                    raise ClipwiseError(_DIED.format(node=node))
                lines = str(message.error.reason).strip().splitlines() or ["no reason given"]
                yield node, Failure(f"Flower reports an error: {lines[-1][:200]}")
                continue
            try:
                reply = _unpack(message.content)
            except Exception as problem:  # a client can send anything; none of it may stop the round
                yield node, Failure(f"its message cannot be read: {problem!r}")
                continue
            yield node, reply


def answer(
    message: Message, model: nn.Module, dataset: Dataset[Any], work: Work, *, user: int | None = None
) -> Message:
    """Do the work that a message of `DPFedAvg` asks for, in a function under `@app.train()` of your ClientApp.

    `model` is changed; it needs the same architecture as the server's. `user` is a number of the node, which makes
    seeded work differ between nodes (by default the number that Flower gave it).

    ```python
    @app.train()
    def train(message: Message, context: Context) -> Message:
        return answer(message, make_model(), my_examples(context), LocalTraining(loss_fn, optimizer))
    ```
    """
    arrays = _only(message.content.array_records, "ArrayRecord")
    config: dict[str, Any] = dict(_only(message.content.config_records, "ConfigRecord"))
    if _STYLE not in config:
        raise InvalidPlan("the message does not say how to clip: the server's strategy must be clipwise's DPFedAvg.")
    task = Task(
        number=config[_ROUND],
        user=message.metadata.dst_node_id if user is None else user,
        weights=arrays.to_torch_state_dict(),
        style=_decode(config[_STYLE]),
        asks_within=config[_ASKS],
    )
    return Message(_pack(work(model, dataset, task)), reply_to=message)


def _pack(reply: Reply) -> RecordDict:
    metrics = MetricRecord({_WEIGHT: reply.weight})
    if reply.within is not None:
        metrics[_WITHIN] = int(reply.within)
    return RecordDict({"arrays": ArrayRecord(dict(reply.update)), "metrics": metrics})


def _unpack(content: RecordDict) -> Reply:
    metrics: dict[str, Any] = dict(_only(content.metric_records, "MetricRecord"))
    arrays = _only(content.array_records, "ArrayRecord")
    update = {name: _tensor(array.data) for name, array in arrays.items()}
    within = metrics.get(_WITHIN)
    return Reply(update, metrics[_WEIGHT], None if within is None else within > 0)


def _tensor(data: bytes) -> Tensor:
    """An array of a message; what its header claims is held against its bytes, which Flower does not do."""
    return torch.from_numpy(read_npy(io.BytesIO(data), len(data)).copy())


def _only(records: Mapping[str, _Record], kind: str) -> _Record:
    if len(records) != 1:
        raise DataError(f"expected one {kind} in the message, got {len(records)}.")
    return next(iter(records.values()))


def _encode(style: Style) -> str:
    """A style as text, by way of a plan, which knows how to write one down."""
    return json.dumps(Plan(sampling=FullBatch(1), steps=1, clip=style, noise_multiplier=0.0).to_dict())


def _decode(text: str) -> Style:
    return Plan.from_dict(parse_json(text, "the clipping of the message")).style(0)
