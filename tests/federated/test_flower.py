"""The Flower strategy and client: with a stand-in for Flower's grid, and once in Flower's own simulation."""

from __future__ import annotations

import json
import os
import runpy
import secrets
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.error import Error
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity
from scipy import stats
from torch import nn

import clipwise as cw
from clipwise.entropy import Entropy
from clipwise.federated import LocalTraining, Reply, Server, Task, flower, run, select
from clipwise.federated.flower import DPFedAvg, answer
from tests.conftest import HANG
from tests.federated.common import federated_plan, flat, loss_fn, make_model, make_users

NODES = 12
WORK = LocalTraining(loss_fn, partial(torch.optim.SGD, lr=0.3), batch_size=3, seed=5)


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages carry the identity of the run that makes them, which Flower's runtime would set."""
    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class StandIn:
    """A grid whose nodes answer at once: node 100 + k holds the examples of user k."""

    def __init__(self, count: int = NODES) -> None:
        self.users = make_users(count)
        self.asked: list[int] = []

    def get_node_ids(self) -> Iterable[int]:
        return [100 + k for k in reversed(range(len(self.users)))]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return [self.reply(message) for message in messages]

    def reply(self, message: Message) -> Message:
        user = message.metadata.dst_node_id - 100
        self.asked.append(user)
        return answer(message, make_model(9), self.users[user], WORK, user=user)

    @property
    def grid(self) -> Grid:
        return cast(Grid, self)


def make_plan(**changes: Any) -> cw.Plan:
    settings: dict[str, Any] = dict(
        sampling=cw.Poisson(NODES, 5), steps=4, clip=cw.Abadi(0.2), noise_multiplier=0.8, weight_cap=3.0
    )
    return federated_plan(**{**settings, **changes})


def start(strategy: DPFedAvg, grid: StandIn, model: nn.Module, rounds: int) -> nn.Module:
    result = strategy.start(grid.grid, ArrayRecord(model.state_dict()), num_rounds=rounds)
    trained = make_model(9)
    trained.load_state_dict(result.arrays.to_torch_state_dict())
    return trained


@pytest.mark.parametrize(
    "clip",
    [cw.Abadi(0.2), cw.GlobalScaled(R=0.2, Z=5.0), cw.Layerwise(cw.Abadi(0.1)), cw.AdaptiveClip(R=0.1)],
    ids=repr,
)
def test_flower_and_the_runner_are_the_same_algorithm(clip: Any) -> None:
    """Same seed, same users: the same weights, bit for bit, noise included, and the same ledger."""
    plan, model, here = make_plan(clip=clip), make_model(), make_model()
    strategy = DPFedAvg(plan, model, seed=5, optimizer=torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.5))
    there = start(strategy, StandIn(), model, 4)
    server = Server(plan, here, seed=5)
    # Coins fall by position among the nodes, and numbers of nodes are sorted: user k is at position k on both sides.
    list(run(server, here, make_users(NODES), WORK, torch.optim.SGD(here.parameters(), lr=0.7, momentum=0.5)))
    assert torch.equal(flat(there), flat(here))
    assert strategy.ledger == server.ledger and strategy.epsilon(1e-2) == plan.epsilon(1e-2)


def test_a_run_on_flower_goes_on_after_a_stop(tmp_path: Path) -> None:
    plan, whole, first = make_plan(), make_model(), make_model()
    trained = start(DPFedAvg(plan, whole, seed=5), StandIn(), whole, 4)
    strategy = DPFedAvg(plan, first, seed=5)
    start(strategy, StandIn(), first, 2)
    strategy.server.save(tmp_path / "run", first)

    second = make_model(8)
    strategy = DPFedAvg(plan, second, seed=5)
    strategy.server.resume(tmp_path / "run", second)
    assert torch.equal(flat(start(strategy, StandIn(), second, 2)), flat(trained))
    assert strategy.ledger.steps == 4


def test_participation_on_flower_is_independent_coins() -> None:
    strategy = DPFedAvg(make_plan(steps=2_000), make_model(), seed=1)
    grid, arrays = StandIn(), ArrayRecord(make_model().state_dict())
    taken = torch.zeros(2_000, NODES)
    for number in range(2_000):
        messages = strategy.configure_train(number + 1, arrays, ConfigRecord(), grid.grid)
        taken[number, [m.metadata.dst_node_id - 100 for m in messages]] = 1
        strategy.server.close([])
    rate = 5 / NODES
    for node in range(NODES):
        assert stats.binomtest(int(taken[:, node].sum()), 2_000, rate).pvalue > 1e-3 / NODES
    counts = taken.sum(dim=1)
    assert float(counts.var()) == pytest.approx(NODES * rate * (1 - rate), rel=0.15)  # a fixed number would have 0


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("WARNING", "clipwise.federated")
    return caplog


class Unreliable(StandIn):
    """Some nodes answer with an error, with rubbish, or not at all."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        replies = []
        for message in messages:
            user = message.metadata.dst_node_id - 100
            if user == 0:
                continue
            reply = self.reply(message)
            if user == 1:
                reply = Message(Error(code=1, reason="first line\nout of memory"), reply_to=message)
            elif user == 2:
                reply.content = RecordDict({"metrics": MetricRecord({"num-examples": 1})})
            elif user == 3:
                reply.content["arrays"] = ArrayRecord({"0.weight": torch.ones(1)})
            elif user == 4:
                reply.content["metrics"] = MetricRecord({"num-examples": [1.0, 2.0]})
            elif user == 5:
                reply.content["metrics"] = MetricRecord({"samples": 1})
            elif user == 6:
                reply.content["arrays"] = ArrayRecord({n: p * 1e20 for n, p in make_model().state_dict().items()})
            replies.append(reply)
        return replies


def test_the_round_goes_on_whatever_nodes_send(logged: pytest.LogCaptureFixture) -> None:
    plan = make_plan(sampling=cw.FullBatch(NODES), steps=1, noise_multiplier=0.0, total_weight=1.0)
    model = make_model()
    strategy = DPFedAvg(plan, model)
    trained = start(strategy, Unreliable(), model, 1)
    report = strategy.server.last
    assert report is not None and report.used == 6 and report.shortened == 1
    reasons = {node - 100: reason for node, reason in report.problems}
    assert set(reasons) == {0, 1, 2, 3, 4, 5}
    assert reasons[0] == "no reply" and reasons[1] == "Flower reports an error: out of memory"
    assert "ArrayRecord" in reasons[2] and "missing" in reasons[3] and "weight" in reasons[4] and "num" in reasons[5]
    assert float((flat(trained) - flat(make_model())).norm()) <= 6 * 3.0 * 0.2 * (1 + 1e-9)
    assert logged.text.count("continues without") == 6


@pytest.mark.parametrize(
    ("reason", "said"), [("", "no reason given"), (" \n ", "no reason given"), ("a\n" + "b" * 300, "b" * 200)]
)
def test_an_error_of_a_node_is_told_in_one_line(reason: str, said: str) -> None:
    model = make_model()
    strategy = DPFedAvg(make_plan(sampling=cw.FullBatch(NODES), steps=1), model)
    start(strategy, Broken(reason, whole=3), model, 1)
    assert strategy.server.last is not None
    told = {reason for _, reason in strategy.server.last.problems}
    assert told == {f"Flower reports an error: {said}"} and len(strategy.server.last.problems) == NODES - 3


@pytest.mark.parametrize(("sampling", "warned"), [(cw.Poisson(11, 5), 1), (cw.Poisson(12, 5), 0), (None, 0)], ids=str)
def test_more_nodes_than_users_are_told(sampling: Any, warned: int, logged: pytest.LogCaptureFixture) -> None:
    plan = make_plan(sampling=sampling or cw.Poisson(rate=0.5, batch_size=5))
    strategy = DPFedAvg(plan, make_model(), min_available_nodes=1)
    strategy.configure_train(1, ArrayRecord(make_model().state_dict()), ConfigRecord(), StandIn().grid)
    assert logged.text.count("12 nodes are connected, the plan counts on 11 users") == warned
    assert logged.text.count("nodes are connected") == warned


def test_a_node_is_told_its_number_the_round_and_how_to_clip(caplog: pytest.LogCaptureFixture) -> None:
    plan, asked = make_plan(sampling=cw.FullBatch(NODES), steps=2, clip=cw.NoClip(), noise_multiplier=0.0), []

    def work(model: nn.Module, dataset: Any, task: Task) -> Reply:
        asked.append(task)
        return Reply({name: torch.zeros_like(p) for name, p in model.named_parameters()}, 1)

    class Asking(StandIn):
        def reply(self, message: Message) -> Message:
            return answer(message, make_model(), self.users[0], work)

    model = make_model()
    strategy = DPFedAvg(plan, model)
    with caplog.at_level("INFO", "clipwise.federated"):
        start(strategy, Asking(), model, 2)
    assert [(task.number, task.user) for task in asked] == [(n, 100 + k) for n in range(2) for k in range(NODES)]
    assert {task.style for task in asked} == {cw.Flat(cw.NoClip())} and not any(task.asks_within for task in asked)
    assert repr(plan) in caplog.text


def test_a_round_without_nodes_is_noise() -> None:
    plan = make_plan(sampling=cw.Poisson(10**6, 1), steps=1)
    model = make_model()
    strategy = DPFedAvg(plan, model, min_available_nodes=1, seed=0)
    grid = StandIn()
    assert not torch.equal(flat(start(strategy, grid, model, 1)), flat(make_model()))
    assert grid.asked == [] and strategy.ledger.steps == 1


def test_fixed_fractions_are_refused() -> None:
    with pytest.raises(cw.InvalidSampling, match="fixed number of nodes"):
        DPFedAvg(make_plan(), make_model(), fraction_train=0.5)

    class OwnSampling(DPFedAvg):
        def configure_train(self, *args: Any) -> Iterable[Message]:
            return FedAvg.configure_train(self, *args)

    model = make_model()
    strategy = OwnSampling(make_plan(), model)
    grid = StandIn()
    grid.reply = lambda message: message  # type: ignore[method-assign]
    with pytest.raises(cw.InvalidSampling, match="no round is open"):
        start(strategy, grid, model, 1)
    assert strategy.ledger.steps == 0


def test_more_rounds_than_planned_are_refused() -> None:
    model = make_model()
    strategy = DPFedAvg(make_plan(steps=2), model)
    with pytest.raises(cw.BudgetSpent):
        start(strategy, StandIn(), model, 3)
    assert strategy.ledger.steps == 2


def test_tied_weights_get_one_update_and_buffers_stay() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2, bias=False)
            self.b = nn.Linear(2, 2, bias=False)
            self.b.weight = self.a.weight
            self.register_buffer("scale", torch.tensor([3.0]))

    model = Tied()
    strategy = DPFedAvg(make_plan(), model, seed=0, min_available_nodes=0)
    before = model.a.weight.detach().clone()
    arrays = ArrayRecord(model.state_dict())
    strategy.configure_train(1, arrays, ConfigRecord(), StandIn(0).grid)
    changed, metrics = strategy.aggregate_train(1, [])
    assert changed is not None and metrics is None
    state = changed.to_torch_state_dict()
    assert torch.equal(state["a.weight"], state["b.weight"]) and float(state["scale"]) == 3.0
    assert not torch.equal(state["a.weight"], before)


def test_arrays_and_messages_of_others_are_refused() -> None:
    strategy = DPFedAvg(make_plan(), make_model(), min_available_nodes=0)
    with pytest.raises(cw.InvalidPlan, match="not those of the strategy"):
        strategy.configure_train(1, ArrayRecord(), ConfigRecord(), StandIn().grid)
    plain = FedAvg()
    [message, *_] = plain.configure_train(1, ArrayRecord(make_model().state_dict()), ConfigRecord(), StandIn().grid)
    with pytest.raises(cw.InvalidPlan, match="DPFedAvg"):
        answer(message, make_model(), make_users(1)[0], WORK)


def test_usage_reports_are_off_unless_somebody_turned_them_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED"):
        for before, after in ((None, "0"), ("1", "1")):
            with monkeypatch.context() as patch:
                if before is None:
                    patch.delenv(name, raising=False)
                else:
                    patch.setenv(name, before)
                runpy.run_path(str(flower.__file__))
                assert os.environ[name] == after


def test_without_flower_the_extra_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr.serverapp", None)
    with pytest.raises(cw.errors.MissingExtra, match=r"clipwise\[flower\]"):
        runpy.run_path(str(flower.__file__))


@pytest.mark.slow
def test_telemetry_is_off() -> None:
    code = "import clipwise.federated.flower, flwr.supercore.telemetry as t; print(t.FLWR_TELEMETRY_ENABLED)"
    environment = {k: v for k, v in os.environ.items() if k != "FLWR_TELEMETRY_ENABLED"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=HANG, check=True
    )
    assert done.stdout.strip() == "0"


@pytest.mark.slow
def test_without_flower_the_extra_is_named() -> None:
    code = "import sys; sys.modules['flwr'] = None; import clipwise.federated; import clipwise.federated.flower"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG, check=False)
    assert done.returncode != 0 and "MissingExtra" in done.stderr and "clipwise[flower]" in done.stderr


def started_with(mark: str) -> list[psutil.Process]:
    """Processes that inherited the mark in their environment, whoever their parent is by now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("CLIPWISE_TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


DEAD = "<class 'ray.exceptions.ActorDiedError'>:<'The actor died unexpectedly before finishing this task.\n\tclass'>"


class Broken(StandIn):
    """The processes of all nodes but some fail."""

    def __init__(self, reason: str, whole: int = 0) -> None:
        super().__init__()
        self.reason, self.whole = reason, whole

    def reply(self, message: Message) -> Message:
        if message.metadata.dst_node_id - 100 < self.whole:
            return super().reply(message)
        return Message(Error(code=0, reason=self.reason), reply_to=message)


@pytest.mark.parametrize(
    ("grid", "expected"),
    [(Broken(DEAD, whole=3), "node 10[3-9] has died"), (Broken("no CUDA"), "every user so far failed.*no CUDA")],
    ids=["a dead process", "work that fails everywhere"],
)
def test_a_federation_that_gives_nothing_ends_in_an_error_and_charges_nothing(grid: Broken, expected: str) -> None:
    model = make_model()
    strategy = DPFedAvg(make_plan(sampling=cw.FullBatch(NODES)), model)
    with pytest.raises(cw.ClipwiseError, match=expected):
        start(strategy, grid, model, 2)
    assert strategy.ledger.steps == 0 and torch.equal(flat(model), flat(make_model()))


def test_nodes_that_are_never_heard_of_end_the_run() -> None:
    model, grid = make_model(), StandIn()
    grid.send_and_receive = lambda messages, timeout=None: []  # type: ignore[method-assign]
    strategy = DPFedAvg(make_plan(sampling=cw.FullBatch(NODES)), model)
    with pytest.raises(cw.ClipwiseError, match="no reply"):
        start(strategy, grid, model, 2)
    assert strategy.ledger.steps == 0


@pytest.mark.slow
@pytest.mark.parametrize("restarted", [False, True], ids=["as it is", "restarted"])
def test_a_client_process_that_dies_takes_no_reply_of_others_with_it(restarted: bool, tmp_path: Path) -> None:
    """Flower gives a dead process further nodes: the run ends in an error, unless Ray starts the process again."""
    app = [str(Path(__file__).with_name("flower_app.py")), "6", "2", "dies", *(["restarted"] if restarted else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *app], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG, check=False
    )
    if not restarted:
        assert done.returncode != 0 and "has died" in done.stderr, done.stderr[-3000:]
        assert not (tmp_path / "result.json").exists()
        return
    assert done.returncode == 0, done.stderr[-3000:]
    rounds = json.loads((tmp_path / "result.json").read_text())["rounds"]
    assert [(r["selected"], r["used"]) for r in rounds] == [(6, 5)] * 2


REASONS = {0: "this node is broken", 1: "not finite", 2: "shape (2, 2)", 4: "cannot be read", 5: "weight must be"}
"""What the log says of the bad nodes of flower_app.py, which are left out."""


@pytest.mark.slow
def test_simulation_of_flower_ends_by_itself_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """Thirty nodes in Flower's simulation, six of them bad: the rounds go on, and all processes are gone afterwards."""
    nodes, rounds, mark = 30, 6, secrets.token_hex(8)
    command = [sys.executable, str(Path(__file__).with_name("flower_app.py")), str(nodes), str(rounds)]
    environment = {**os.environ, "CLIPWISE_TEST_MARK": mark, "OMP_NUM_THREADS": "1"}
    most, deadline = 0, time.monotonic() + HANG
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
        try:
            while process.poll() is None and time.monotonic() < deadline:
                most = max(most, len(started_with(mark)))
                time.sleep(1)
            patience = time.monotonic() + HANG  # Ray's workers notice the end of their driver a moment later
            while started_with(mark) and time.monotonic() < patience:
                time.sleep(0.5)
            left = [" ".join(p.cmdline()) for p in started_with(mark)]
        finally:
            for stray in started_with(mark):
                stray.kill()
    assert process.wait() == 0, (tmp_path / "log").read_text()[-3000:]
    assert most > 3  # Ray's processes are seen while they live
    assert not left
    result = json.loads((tmp_path / "result.json").read_text())

    plan = federated_plan(
        cw.Poisson(nodes, nodes // 2), rounds, cw.AdaptiveClip(R=1.0), noise_multiplier=0.5
    )  # the app's
    torch.manual_seed(0)
    entropy = Entropy(3).labelled(Server(plan, nn.Linear(1, 1), seed=3)._position.begin())
    coins = [len(select(range(nodes), 0.5, entropy, number)) for number in range(rounds)]
    assert [r["selected"] for r in result["rounds"]] == coins and len(set(coins)) > 1
    took_part = [len(list(tmp_path.glob(f"{number + 1}-*"))) for number in range(rounds)]
    assert took_part == coins  # as the nodes themselves say
    assert stats.binomtest(sum(took_part), nodes * rounds, 0.5).pvalue > 0.01

    # Flower numbers its nodes at random, so which of them the coins select differs from run to run.
    rounds_of = [len(list(tmp_path.glob(f"*-{node}"))) for node in range(6)]
    problems = " ".join(problem for r in result["rounds"] for problem in r["problems"])
    for node, reason in REASONS.items():
        assert problems.count(reason) == rounds_of[node]
    assert sum(r["shortened"] for r in result["rounds"]) == rounds_of[3]  # the one that sends a huge update
    assert result["recorded"] == rounds and result["epsilon"] == result["planned"]
    assert result["weights"] == pytest.approx([2.0, 1.0], abs=1.0)  # of y = 2x + 1


def test_a_public_rate_does_not_say_how_many_nodes_to_wait_for() -> None:
    plan = federated_plan(cw.Poisson(rate=0.5, batch_size=6), 2, cw.Abadi(1.0), 1.0)
    with pytest.raises(cw.InvalidPlan, match="min_available_nodes"):
        DPFedAvg(plan, make_model())
    assert DPFedAvg(plan, make_model(), min_available_nodes=3).min_available_nodes == 3
