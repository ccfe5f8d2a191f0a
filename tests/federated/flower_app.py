"""A small Flower app in Flower's simulation, run by test_flower.py in a process of its own, in an empty folder.

`python flower_app.py NODES ROUNDS` writes result.json, and a node writes an empty file for every round it takes part
in. Some nodes misbehave; all have examples of y = 2x + 1. With `dies` after them, the process of one node dies in every
round, and with `dies restarted` Ray starts it again.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path

import ray
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.federated import LocalTraining
from clipwise.federated.flower import DPFedAvg, answer

NODES, ROUNDS = int(sys.argv[1]), int(sys.argv[2])
FOLDER = Path.cwd()
DIES, RESTARTED = "dies" in sys.argv, "restarted" in sys.argv
BAD = {0: "dies"} if DIES else {0: "raises", 1: "nan", 2: "shape", 3: "huge", 4: "garbage", 5: "weight"}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(1, 1)


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().squeeze(1)


def examples(node: int) -> TensorDataset:
    x = torch.randn(8, 1, generator=torch.Generator().manual_seed(node))
    return TensorDataset(x, 2 * x + 1)


client = ClientApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    node = int(context.node_config["partition-id"])
    (FOLDER / f"{message.content.config_records['config']['server-round']}-{node}").touch()
    how = BAD.get(node)
    if how == "dies":
        os._exit(1)
    if how == "raises":
        raise RuntimeError("this node is broken")
    work = LocalTraining(squared_error, functools.partial(torch.optim.SGD, lr=0.1), seed=1)
    reply = answer(message, make_model(), examples(node), work, user=node)
    return reply if how is None else spoil(reply, how)


def spoil(reply: Message, how: str) -> Message:
    arrays = reply.content.array_records["arrays"].to_torch_state_dict()
    metrics = MetricRecord({"num-examples": 8})
    if how == "nan":
        arrays["weight"] = torch.full((1, 1), torch.nan)
    elif how == "shape":
        arrays["weight"] = torch.ones(2, 2)
    elif how == "huge":
        arrays["weight"] = torch.full((1, 1), 1e30)
    elif how == "weight":
        metrics = MetricRecord({"num-examples": -1})
    record = ArrayRecord(arrays)
    if how == "garbage":
        record["weight"] = Array(dtype="float32", shape=(1, 1), stype="numpy.ndarray", data=b"no array")
    reply.content = RecordDict({"arrays": record, "metrics": metrics})
    return reply


def main() -> None:
    plan = cw.Plan(
        sampling=cw.FullBatch(NODES) if DIES else cw.Poisson(NODES, NODES // 2),
        steps=ROUNDS,
        clip=cw.AdaptiveClip(R=1.0),
        noise_multiplier=0.5,
        mechanism=cw.mechanisms.Rounds(),
    )
    model = make_model()
    strategy = DPFedAvg(plan, model, seed=3)
    seen: list[dict[str, object]] = []
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        def look(number: int, arrays: ArrayRecord) -> MetricRecord | None:
            report = strategy.server.last
            if report is not None:
                problems = sorted(reason for _, reason in report.problems)
                seen.append(
                    {
                        "selected": report.selected,
                        "used": report.used,
                        "problems": problems,
                        "shortened": report.shortened,
                    }
                )
            return None

        result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=ROUNDS, timeout=900, evaluate_fn=look)
        model.load_state_dict(result.arrays.to_torch_state_dict())

    ray.init(num_cpus=2, include_dashboard=False)  # if Ray cannot start, end at once and not after Flower's time-outs
    again = {"max_restarts": -1, "max_task_retries": 1} if RESTARTED else {}
    resources = {"num_cpus": 1, **again}
    run_simulation(server, client, num_supernodes=NODES, backend_config={"client_resources": resources})
    result = {
        "rounds": seen,
        "weights": [p.item() for p in model.parameters()],
        "epsilon": strategy.epsilon(1e-3),
        "planned": plan.epsilon(1e-3),
        "recorded": strategy.ledger.steps,
    }
    (FOLDER / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
