"""Epochs of one run are no epochs of another, and a law that no data reach proves nothing from below.

The events of two runs, put on one ledger as the documentation had it, became one sequence of epochs where both ended
within one: two halves of an epoch were charged as a whole one, in which a record is once.
"""

from __future__ import annotations

import pytest

import clipwise as cw
from clipwise.accounting import GaussianSteps, Ledger, account
from clipwise.errors import LedgerError
from clipwise.sampling import Sampling

ORDERED = [
    cw.BallsInBins(40, 10),
    cw.Shuffled(40, 10),
    cw.Shuffled(40, 10, reshuffle=False),
    cw.CyclicPoisson(40, 5, bands=4),
]
DELTA = 1e-5


@pytest.mark.parametrize("sampling", ORDERED, ids=repr)
def test_two_runs_of_half_an_epoch_are_not_one_epoch(sampling: Sampling) -> None:
    run = GaussianSteps(sampling, 1.0, 2)
    with pytest.raises(LedgerError, match="Account for each run by itself"):
        Ledger([run, run])
    with pytest.raises(LedgerError, match="Account for each run by itself"):
        Ledger([GaussianSteps(cw.Poisson(40, 5), 9.0), run, run.repeated(1)])


@pytest.mark.parametrize("sampling", ORDERED, ids=repr)
def test_the_steps_of_one_run_and_two_runs_with_something_between_are_accounted(sampling: Sampling) -> None:
    run, other = GaussianSteps(sampling, 1.0, 2), GaussianSteps(cw.FullBatch(40), 1e5)
    ledger = Ledger([run])
    ledger.record(run)
    assert Ledger(ledger.events).events == (run.repeated(4),)
    apart = Ledger([run, other, run]).epsilon(DELTA)
    # In both runs a record is at least as surely as in two steps of a quarter each, at rates of their own.
    assert apart >= account([GaussianSteps(cw.Poisson(40, 10), 1.0, 2)], DELTA).epsilon


@pytest.mark.parametrize("interval", [cw.Shuffled(40, 10), cw.FixedSize(40, 10)], ids=repr)
@pytest.mark.parametrize(
    "sampling",
    [cw.BallsInBins(40, 10), cw.CyclicPoisson(40, 5, bands=4), cw.Poisson(40, 10, max_batch_size=12)],
    ids=repr,
)
def test_a_lower_end_is_not_made_of_laws_that_no_data_reach(interval: Sampling, sampling: Sampling) -> None:
    hardly, steps = GaussianSteps(interval, 1e4, 4), GaussianSteps(sampling, 1.0, 1)
    found = account([hardly, steps], DELTA)
    assert found.lower is not None and found.lower < 0.01  # that of the first event; the second has no lower end
    assert found.epsilon >= account([steps], DELTA, relation=found.relation).epsilon  # type: ignore[arg-type]
