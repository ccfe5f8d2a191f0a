"""A seeded server gave the same noise to whatever came: two sets of updates cancelled, and a resumed round as well."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.federated import LocalTraining, Reply, Server, run
from clipwise.mechanisms import Rounds
from clipwise.private.digests import file_of

SIZE, USERS, MULTIPLIER = 400, 4, 50.0
STD = MULTIPLIER / USERS


def server_of(clip: cw.Abadi | cw.AdaptiveClip, value: float = 0.0) -> Server:
    model = nn.Linear(SIZE, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return Server(cw.Plan(cw.FullBatch(USERS), 3, clip, MULTIPLIER, Rounds()), model, seed=0)


def closed(server: Server, moved: float = 0.0) -> Tensor:
    """One round, in which user 2 may send another update."""
    server.open(range(USERS))
    updates = [torch.full((1, SIZE), 0.01) for _ in range(USERS)]
    updates[2][0, 7] += moved
    replies = [(k, Reply({"weight": u}, 1, within=True if server.bound else None)) for k, u in enumerate(updates)]
    return server.close(replies)["weight"].flatten()


@pytest.mark.parametrize("clip", [cw.Abadi(1.0), cw.AdaptiveClip(R=1.0)], ids=["fixed", "adaptive"])
def test_other_updates_get_other_noise(clip: cw.Abadi | cw.AdaptiveClip) -> None:
    a, b, again = closed(server_of(clip)), closed(server_of(clip), moved=0.1), closed(server_of(clip))
    assert torch.equal(a, again)
    assert abs(float((a / STD) @ (b / STD)) / SIZE) < 5 / math.sqrt(SIZE)
    assert float((a - b).norm()) > STD  # before: 0.1 / 4 at place 7, and nothing elsewhere


@pytest.mark.parametrize("other", [server_of(cw.Abadi(10.0)), server_of(cw.Abadi(1.0), 0.5)], ids=["R", "start"])
def test_other_runs_of_one_seed_share_no_noise(other: Server) -> None:
    a, b = closed(server_of(cw.Abadi(1.0))), closed(other)
    assert abs(float(a @ b / (a.norm() * b.norm()))) < 5 / math.sqrt(SIZE)


def test_a_round_that_is_repeated_with_other_updates_is_charged_again(tmp_path: Path) -> None:
    server, model = server_of(cw.Abadi(1.0)), nn.Linear(SIZE, 1, bias=False)
    closed(server)
    server.save(tmp_path / "run", model)
    expected = closed(server)
    for moved, charged in ((0.0, 2), (0.1, 3)):
        again = server_of(cw.Abadi(1.0))
        again.resume(tmp_path / "run", model)
        assert torch.equal(closed(again, moved), expected) == (moved == 0.0)
        assert again.ledger.steps == charged
    assert file_of(tmp_path / "run").stat().st_mode & 0o777 == 0o600


def test_a_changed_record_of_a_user_is_noticed(tmp_path: Path) -> None:
    def users(changed: bool = False) -> list[TensorDataset]:
        x = torch.randn(USERS, 5, 2, generator=torch.Generator().manual_seed(0))
        x[3, 4, 0] += 0.001 * changed
        return [TensorDataset(each) for each in x]

    plan = cw.Plan(cw.FullBatch(USERS), 3, cw.Abadi(1.0), 1.0, Rounds())
    work = LocalTraining(
        lambda m, batch: m(batch[0])[:, 0].square(), functools.partial(torch.optim.SGD, lr=0.1), seed=0
    )
    model = nn.Linear(2, 1)
    server = Server(plan, model, seed=0)
    rounds = run(server, model, users(), work)
    server.save(tmp_path / "run", model)
    next(rounds)
    again = Server(plan, model, seed=0)
    again.resume(tmp_path / "run", model)
    with pytest.raises(cw.CheckpointError, match="the data changed"):
        run(again, model, users(changed=True), work)
    for _ in run(again, model, users(), work):
        pass
    assert again.ledger.steps == 3 and again.looked.state == "unchanged"
