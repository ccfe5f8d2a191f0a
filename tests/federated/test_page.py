"""The examples of docs/federated.md run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.supercore.task_identity import TaskIdentity

import clipwise as cw
from clipwise.federated.flower import DPFedAvg
from tests.federated.common import federated_plan
from tests.federated.test_flower import StandIn

PAGE = Path(__file__).parents[2] / "docs" / "federated.md"
HERE, FLOWER = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.slow
def test_the_example_in_one_process_learns(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(HERE, names)
    assert 7.9 < float(capsys.readouterr().out) <= 8.0
    accuracy = (names["model"](names["x"]).argmax(dim=1) == names["y"]).float().mean()
    assert float(accuracy) > 0.75


def test_the_example_on_flower_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    names: dict[str, Any] = {}
    exec(FLOWER, names)
    plan = federated_plan(cw.FullBatch(2), steps=1, clip=cw.Abadi(0.5), noise_multiplier=1.0)
    strategy = DPFedAvg(plan, names["make_model"](), min_available_nodes=0)
    arrays = ArrayRecord(names["make_model"]().state_dict())
    messages = list(strategy.configure_train(1, arrays, ConfigRecord(), StandIn(2).grid))
    replies: list[Message] = [names["train"](message, None) for message in messages]
    before = arrays.to_torch_state_dict()
    after, _ = strategy.aggregate_train(1, replies)
    assert strategy.server.last is not None and strategy.server.last.used == 2
    assert after is not None and not torch.equal(after.to_torch_state_dict()["weight"], before["weight"])


def test_the_table_shows_the_results_of_the_recipe() -> None:
    results = json.loads((PAGE.parents[1] / "papers" / "federated" / "results.json").read_text())["arms"]
    rows = re.findall(
        r"^\| (.+) \| ([\d.]+) % \| ([\d.]+) \| ([\d.]+) % \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    shown = {name: tuple(map(float, numbers)) for name, *numbers in rows}
    units = {"accuracy": (100, 2), "nll": (1, 4), "ece": (100, 2)}
    assert shown == {
        name: tuple(round(unit * found[metric]["mean"], digits) for metric, (unit, digits) in units.items())
        for name, found in results.items()
    }
