"""Runs that look alike, and events that begin in the middle of an epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

from clipwise.accounting import GaussianSteps, Ledger, account
from clipwise.cli.main import main
from clipwise.errors import LedgerError
from clipwise.sampling import FixedSize, Poisson, Sampling, Shuffled


@pytest.mark.parametrize("sigma", [1.0, 0.3])
def test_noise_that_changes_within_an_epoch_is_bounded_from_above(sigma: float) -> None:
    """A record can be in both steps of the second event: at least two Poisson(1/2) steps at its noise."""
    shuffled = Shuffled(20, 10)
    events = (GaussianSteps(shuffled, 10.0, 1), GaussianSteps(shuffled, sigma, 2))
    alone = account((GaussianSteps(Poisson(20, 10), sigma, 2),), 1e-5)
    assert account(events, 1e-5).epsilon >= alone.epsilon


@pytest.mark.parametrize("accountant", ["rdp", "pld", "gdp", "edgeworth"])
def test_no_accountant_forgets_that_a_later_event_may_begin_within_an_epoch(accountant: str) -> None:
    """A record can be in both steps of the second event: no bound may lie below the exact accountant's."""
    if accountant == "pld":
        pytest.importorskip("dp_accounting")
    shuffled = Shuffled(20, 10)
    events = (GaussianSteps(shuffled, 100.0, 1), GaussianSteps(shuffled, 1.0, 2))
    proven = account(events, 1e-5)
    assert account(events, 1e-5, accountant).epsilon >= proven.epsilon * (1 - 1e-6)


def test_an_event_that_stands_twice_is_first_only_once() -> None:
    """Epochs of two steps: the last event begins within one, so a record can be in both of its steps."""
    event, other = GaussianSteps(Shuffled(20, 10), 1.0, 2), GaussianSteps(Shuffled(20, 10), 10.0, 1)
    again = GaussianSteps(Shuffled(20, 10), 1.0, 2)
    assert account((event, other, event), 1e-5).epsilon == account((event, other, again), 1e-5).epsilon
    assert account((event, other, event), 1e-5).epsilon > account((event.repeated(4),), 1e-5).epsilon


@pytest.mark.parametrize("sampling", [Shuffled(1_000, 10), FixedSize(1_000, 10), Poisson(1_000, 10)])
def test_splitting_a_run_changes_nothing(sampling: Sampling) -> None:
    whole = GaussianSteps(sampling, 2.0, 250)
    split = (whole.repeated(1), whole.repeated(99), whole.repeated(150))
    one, other = account((whole,), 1e-5), account(split, 1e-5)
    assert (one.epsilon, one.lower) == (other.epsilon, other.lower)


def test_a_second_run_with_the_same_settings_does_not_overwrite_the_first(tmp_path: Path) -> None:
    event = GaussianSteps(Poisson(1000, 10), 1.0)
    Ledger([event.repeated(5)]).save(tmp_path / "ledger.json")
    with pytest.raises(LedgerError, match="overwriting"):
        Ledger([event.repeated(6)]).save(tmp_path / "ledger.json")
    same = Ledger.load(tmp_path / "ledger.json")
    same.record(event)
    same.save(tmp_path / "ledger.json")
    assert Ledger.load(tmp_path / "ledger.json").steps == 6


@pytest.mark.parametrize("change", [("--noise-multiplier", "1e300")])
def test_numbers_and_files_that_cannot_be_are_told_in_one_line(
    change: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = {
        "--noise-multiplier": "1.1",
        "--sample-size": "60000",
        "--batch-size": "256",
        "--steps": "10",
        "--delta": "1e-5",
    }
    given[change[0]] = change[1]
    assert main(["epsilon", *(word for pair in given.items() for word in pair)]) == 2
    assert capsys.readouterr().err.strip().count("\n") == 0
