"""Balls in bins claim amplification by bins that nobody knows: what would show them, or use a record twice, fails.

Each program tried to get the epsilon of one use an epoch for more than that, or to learn who is in a batch.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise._json import checksum
from clipwise.accounting import AHEAD, INTERRUPTED, account
from clipwise.private import checkpoint
from tests.attacks.misuse.common import N, Setting

BINS = cw.BallsInBins(N, 6)  # four batches an epoch
EPOCH = 4


def go(setting: Setting, steps: int, used: Counter[int] | None = None, **options: Any) -> Counter[int]:
    """Make some steps, then leave the loop; which records were in the batches."""
    used, end = Counter() if used is None else used, min(setting.private.steps_done + steps, setting.plan.steps)
    numbered = TensorDataset(setting.x, setting.y, torch.arange(N))
    options = {"yield_empty": True} | options  # no step without a turn of the loop
    for x, y, index in setting.private.loader(numbered, **options):
        used.update(index.tolist())
        setting.private.step(setting.losses(x, y))
        if setting.private.steps_done >= end:
            break
    return used


def resumed(setting: Setting, path: Path, **options: Any) -> Setting:
    """Another process that continues from a file."""
    other = Setting(BINS, setting.plan.steps)
    other.private.close()
    other.private = cw.Private.resume(path, other.model, other.optimizer, **options)
    return other


def begun(path: Path, steps: int, planned: int = 20, seed: int | None = None) -> tuple[Setting, Counter[int]]:
    s = Setting(BINS, planned, seed=seed)
    used = go(s, steps)
    s.private.save(path)
    return s, used


# Who is in which batch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 4, 6])
def test_no_file_has_the_bins(steps: int, tmp_path: Path) -> None:
    s, _ = begun(tmp_path / "run", steps)
    key = s.private._position.order
    assert key is not None and len(key) == 16
    state = s.private.state_dict()
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert state["order"] is None and key.hex() not in str(state)
    assert not any(key in each or key.hex().encode() in each for each in written)
    (record, _, _) = checkpoint.read(tmp_path / "run")
    assert record["run"]["order"] is None
    other = resumed(s, tmp_path / "run")
    assert other.private._position.order != key


def test_a_key_that_was_put_into_a_saved_run_is_not_used(tmp_path: Path) -> None:
    """Whoever chooses the bins of the epochs to come knows who is in them."""
    s, _ = begun(tmp_path / "run", 4)
    state = {**s.private.state_dict(), "order": bytes(16).hex()}
    other = Setting(BINS, 20)
    with pytest.raises(cw.CheckpointError, match="which nobody may know"):
        other.private.load_state_dict(state)
    assert other.private._position.order != bytes(16) and other.private.steps_done == 0


def test_the_ledger_does_not_tell_the_bins() -> None:
    s = Setting(BINS, 8)
    go(s, 8)
    texts = s.private.ledger.to_json() + s.private.ledger.guarantee(1e-2).statement()
    assert "each of 24 records in one of 4 batches of every epoch" in texts
    assert s.private._position.order is not None and s.private._position.order.hex() not in texts


# One use an epoch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(1, 9))
@pytest.mark.parametrize("way", ["file", "state"])
def test_an_interrupted_epoch_is_left_and_charged(way: str, steps: int, tmp_path: Path) -> None:
    s, used = begun(tmp_path / "run", steps)
    if way == "file":
        other = resumed(s, tmp_path / "run")
    else:
        other = Setting(BINS, 20)
        other.private.load_state_dict(s.private.state_dict())
    at = -(-steps // EPOCH) * EPOCH
    assert other.private.steps_done == other.private.ledger.steps == at
    assert max(used.values()) <= at // EPOCH
    before = copy.copy(used)
    go(other, EPOCH, used)
    assert all(used[i] == before[i] + 1 for i in range(N))  # a whole new epoch, once each
    go(other, 20, used)
    assert other.private.steps_done == other.private.ledger.steps == 20
    assert max(used.values()) <= 5  # five epochs were charged
    expected = [cw.GaussianSteps(BINS, 1.0, 20)]
    assert other.private.epsilon(1e-2) == account(expected, 1e-2).epsilon
    reasons = [event.reason for event in other.private.ledger.events]
    assert reasons == (["training"] if steps == at else ["training", INTERRUPTED, "training"])


def test_a_process_that_dies_again_and_again_uses_no_record_more_often_than_was_charged(tmp_path: Path) -> None:
    """Every one of them made a step or two of an epoch that the file did not know."""
    s, used = begun(tmp_path / "run", 2, planned=40)
    go(s, 1, used)  # after the save
    for k in range(4):
        s = resumed(s, tmp_path / "run")
        assert s.private.steps_done == s.private.ledger.steps == EPOCH * (k + 1)
        go(s, 1 + k % 2, used)
    s = resumed(s, tmp_path / "run")
    go(s, 40, used)
    assert s.private.ledger.steps == 40 and max(used.values()) <= 40 // EPOCH
    assert s.private.epsilon(1e-2) == account([cw.GaussianSteps(BINS, 1.0, 40)], 1e-2).epsilon


def test_what_a_witness_charged_ahead_belongs_to_the_epochs(tmp_path: Path) -> None:
    s = Setting(BINS, 20, witness=cw.Witness(tmp_path / "witness", 3))
    go(s, 3)
    s.private.save(tmp_path / "run")
    go(s, 3)
    other = resumed(s, tmp_path / "run")
    done = other.private.steps_done
    assert done % EPOCH == 0 and done >= 6 and other.private.ledger.steps == done
    assert {event.reason for event in other.private.ledger.events} <= {"training", INTERRUPTED, AHEAD}
    go(other, 20)
    assert other.private.epsilon(1e-2) == account([cw.GaussianSteps(BINS, 1.0, 20)], 1e-2).epsilon


def test_the_last_epoch_of_a_plan_may_be_a_part_and_ends_with_it(tmp_path: Path) -> None:
    s, _ = begun(tmp_path / "run", 9, planned=10)
    other = resumed(s, tmp_path / "run")
    assert other.private.steps_done == other.private.ledger.steps == 10
    assert not list(other.batches())
    with pytest.raises(cw.BudgetSpent):
        other.private.step()


@pytest.mark.parametrize("seed", [None, 3])
def test_a_second_loader_or_iteration_goes_on_in_the_same_epoch(seed: int | None) -> None:
    s, used = Setting(BINS, 8, seed=seed), Counter[int]()
    for size in (1, 2, 1, 3, 1):
        go(s, size, used)
    assert s.private.steps_done == 8 and all(used[i] == 2 for i in range(N))
    s, seen = Setting(BINS, 4, seed=seed), []
    numbered = TensorDataset(s.x, s.y, torch.arange(N))
    for _ in range(3):  # looked at, and left before it was given
        for _, _, index in s.private.loader(numbered):
            seen.append(index.tolist())
            break
    assert seen[0] == seen[1] == seen[2] and s.private.ledger.steps == 0


def test_a_loader_from_before_a_state_was_loaded_draws_as_the_run_does() -> None:
    s = Setting(BINS, 12)
    go(s, 2)
    other = Setting(BINS, 12)
    loader = other.private.loader(TensorDataset(other.x, other.y, torch.arange(N)))
    other.private.load_state_dict(s.private.state_dict())
    used, sizes = Counter[int](), len(loader)
    for x, y, index in loader:
        used.update(index.tolist())
        other.private.step(other.losses(x, y))
    assert sizes == 8 and all(used[i] == 2 for i in range(N)) and other.private.ledger.steps == 12


def test_pieces_and_empty_batches_are_steps_like_others() -> None:
    sampling = cw.BallsInBins(N, 1)  # 24 batches, a third of them empty
    for options in ({"physical_batch_size": 1}, {}, {"yield_empty": False}):
        s = Setting(sampling, 48, seed=5)
        used = go(s, 48, **options)
        assert s.private.ledger.steps == 48 and all(used[i] == 2 for i in range(N))


# Seeded runs -------------------------------------------------------------------------------------------------------


def test_a_seeded_run_goes_on_within_its_epoch(tmp_path: Path) -> None:
    whole = Setting(BINS, 8, seed=7)
    go(whole, 8)
    s, used = begun(tmp_path / "run", 3, planned=8, seed=7)
    other = resumed(s, tmp_path / "run")
    assert other.private.steps_done == 3
    go(other, 8, used)
    assert torch.equal(whole.weights(), other.weights()) and all(used[i] == 2 for i in range(N))
    assert other.private.ledger.events == whole.private.ledger.events


def test_a_step_made_again_with_other_sums_is_charged_without_amplification(tmp_path: Path) -> None:
    s, _ = begun(tmp_path / "run", 1, planned=8, seed=7)
    go(s, 3)  # released, and then the process dies
    other = resumed(s, tmp_path / "run")
    numbered = TensorDataset(other.x, other.y, torch.arange(N))
    for x, y, _ in other.private.loader(numbered):
        other.private.step(2.0 * other.losses(x, y) ** 2)
    events = other.private.ledger.events
    repeated = [event for event in events if event.reason == "repeated"]
    assert sum(event.count for event in repeated) == 3
    assert all(event.sampling == cw.FullBatch(N) for event in repeated)
    # Each of three batches was released twice, and the record may be in it: two plain steps.
    assert other.private.epsilon(1e-2) >= account([cw.GaussianSteps(cw.FullBatch(N), 1.0, 2)], 1e-2).epsilon
    assert other.private.epsilon(1e-2) > account([cw.GaussianSteps(BINS, 1.0, 8)], 1e-2).epsilon


# Claims ------------------------------------------------------------------------------------------------------------


def test_a_loader_of_ones_own_cannot_claim_bins() -> None:
    """A shuffling loader uses each record once an epoch, too, and amplifies next to nothing."""
    with pytest.raises(cw.ClipwiseError, match=r"own_batches=True.*cw\.Shuffled"):
        Setting(BINS, own_batches=True)
    s = Setting(BINS)
    for x, y in torch.utils.data.DataLoader(s.records, batch_size=6, shuffle=True):
        with pytest.raises(cw.InvalidSampling, match=r"private\.loader"):
            s.private.step(s.losses(x, y))
    assert s.private.ledger.steps == 0


def test_a_ledger_that_claims_it_is_refused() -> None:
    ledger = json.loads(cw.Ledger([cw.GaussianSteps(cw.Poisson(N, 6), 1.0, 4, own_batches=True)]).to_json())
    ledger["events"][0]["sampling"] = {"kind": "balls_in_bins", "sample_size": N, "batch_size": 6}
    ledger["checksum"] = checksum(ledger)
    with pytest.raises(cw.LedgerError, match="makes no sense"):
        cw.Ledger.from_dict(ledger)


def test_data_of_another_length_are_refused() -> None:
    s = Setting(BINS)
    for size in (N - 1, N + 1):
        with pytest.raises(cw.InvalidSampling, match=f"has {size}"):
            s.private.loader(TensorDataset(torch.zeros(size, 3), torch.zeros(size)))


def test_noise_that_is_correlated_over_steps_is_refused() -> None:
    for correlation in (cw.Banded(2), cw.SquareRoot(2), cw.Tree()):
        with pytest.raises(cw.ClipwiseError, match="no proof"):
            cw.Plan(BINS, 8, cw.Abadi(1.0), 1.0, correlation=correlation)
