"""The registries of accounting, walked: an accountant, a sampling or a kind of event is one definition and a row here.

A row that is missing fails the test, and so does a definition that claims more than the oracles allow.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import numpy as np
import pytest

from clipwise.accounting import ACCOUNTANTS, Event, Guarantee, Ledger, account, account_delta, privacy_panel
from clipwise.accounting._schemes import SCHEMES, scheme_of
from clipwise.accounting.events import (
    _KINDS,
    FederatedRounds,
    GaussianSteps,
    PrivateCalibration,
    PrivateStatistics,
    ProjectedSteps,
    decode,
    encode,
)
from clipwise.accounting.guarantee import Kind, Relation
from clipwise.cli import epsilon as epsilon_command
from clipwise.cli import noise as noise_command
from clipwise.entropy import Entropy
from clipwise.errors import AccountingError, MissingExtra
from clipwise.sampling import SAMPLINGS, BallsInBins, CyclicPoisson, Draws, FixedSize, FullBatch, Poisson, Shuffled

from .oracles import Step, bracket

KINDS: tuple[str, ...] = get_args(Kind)  # from the most that can be claimed to the least
DELTA = 1e-5
ROUND_OFF = 1e-6

# Accountants -------------------------------------------------------------------------------------------------------


ROWS = {
    "exact": (1.0, 1.0),
    "rdp": (1.0, 1.4),
    "pld": (1.0, 1.001),
    "gdp": (0.4, 1.0),
    "edgeworth": (0.7, 1.1),
}
"""What an accountant's epsilon may be, over the exact one, on the sampled runs below."""

SAMPLED = {
    "one phase": ((0.1, 1.0, 50),),
    "half of the records": ((0.5, 4.0, 20),),
    "rare records": ((0.02, 0.8, 50),),
    "a schedule": ((0.1, 1.5, 20), (0.3, 3.0, 10)),
}
"""Runs as (rate, noise multiplier, steps), so short that the oracle can follow."""


def sampled(name: str) -> tuple[Event, ...]:
    return tuple(GaussianSteps(Poisson(rate=q, batch_size=10), sigma, steps) for q, sigma, steps in SAMPLED[name])


def delta_ends(name: str, epsilon: float) -> tuple[float, float]:
    """A lower and an upper end of delta, by the definition of privacy: the worse of removing and adding."""
    sides: tuple[Literal["remove", "add"], ...] = ("remove", "add")
    found = [
        bracket([([(1.0, Step(side, q, 1.0 / sigma))], steps) for q, sigma, steps in SAMPLED[name]], epsilon)
        for side in sides
    ]
    return max(low for low, _ in found), max(high for _, high in found)


def answer(name: str, events: Any, delta: float = DELTA, **how: Any) -> Guarantee:
    """The accountant's answer; a package that it needs may be missing."""
    try:
        return account(events, delta, name, **how)
    except MissingExtra as error:
        pytest.skip(str(error))


def test_every_accountant_has_a_row() -> None:
    assert list(ACCOUNTANTS) == list(ROWS)
    assert all(name == one.name and one.kind in KINDS for name, one in ACCOUNTANTS.items())
    assert next(iter(ACCOUNTANTS)) == "exact"  # whatever the others refuse, there is an answer to show


def some(others: Iterable[str], quick: Sequence[str]) -> list[Any]:
    """Every accountant with every other. dp-accounting takes a second for each: those not named are slow tests."""
    slow = pytest.mark.slow
    each = itertools.product(ROWS, others)
    return [pytest.param(a, b, marks=[slow] if a == "pld" and b not in quick else []) for a, b in each]


@pytest.mark.parametrize(("name", "run"), some(SAMPLED, ["a schedule"]))
def test_an_accountant_keeps_to_its_kind_and_its_row(name: str, run: str) -> None:
    events, exact = sampled(run), account(sampled(run), DELTA).epsilon
    found = answer(name, events)
    assert found.kind == ACCOUNTANTS[name].kind and found.accountant == name
    least, most = ROWS[name]
    assert least * exact * (1 - ROUND_OFF) <= found.epsilon <= most * exact * (1 + ROUND_OFF)
    back = account_delta(events, found.epsilon, name)
    assert back.kind == found.kind
    if found.is_bound:
        # No bound is below what some data reach, neither in epsilon nor in delta; and what is exact is no more.
        low, high = delta_ends(run, found.epsilon)
        assert low <= DELTA * (1 + ROUND_OFF) and back.delta >= low * (1 - ROUND_OFF)
        assert back.delta == pytest.approx(DELTA, rel=1e-4)
        assert found.kind != "numerically exact" or high >= DELTA * (1 - 2e-3)


@pytest.mark.parametrize("name", ROWS)
def test_nobody_is_below_the_closed_form_of_full_batches(name: str) -> None:
    events, truth = (GaussianSteps(FullBatch(1_279), 35.0, 2_000),), 4.3959155
    found = answer(name, events, 1 / (1.1 * 1_279))
    assert found.is_bound and found.epsilon >= truth * (1 - ROUND_OFF)
    if found.kind == "numerically exact":
        assert found.epsilon == pytest.approx(truth, rel=ROUND_OFF)


LOOSE = {
    "cut": GaussianSteps(Poisson(60_000, 256, max_batch_size=300), 1.1, 1_000),
    "shuffled": GaussianSteps(Shuffled(1_000, 100), 2.0, 30),
    "fixed size": GaussianSteps(FixedSize(1_000, 10), 1.0, 100),
    "balls in bins": GaussianSteps(BallsInBins(1_000, 100), 2.0, 30),
    "estimated norms": ProjectedSteps(Poisson(60_000, 256), 1.1, projections=64, steps=100),
}
"""Events whose law is only a bound: nobody may call an answer exact, and nobody's bound is below a proven lower end."""


REFUSED = {
    "cut": (),
    "shuffled": (),
    "fixed size": ("pld", "gdp", "edgeworth"),
    "balls in bins": ("pld",),
    "estimated norms": ("pld",),
}
"""Who has no formula for it."""


@cache
def lower_end(which: str) -> float | None:
    """The proven lower end of epsilon, once for all accountants."""
    return account((LOOSE[which],), DELTA).lower


@pytest.mark.parametrize(("name", "which"), some(LOOSE, [name for name in LOOSE if name != "cut"]))
def test_a_law_that_is_a_bound_is_never_called_exact(name: str, which: str) -> None:
    event, lower = LOOSE[which], lower_end(which)
    if name in REFUSED[which]:
        with pytest.raises(AccountingError, match="exact"):  # who does have an answer
            answer(name, (event,))
        return
    found = answer(name, (event,))
    assert found.kind != "numerically exact"
    assert KINDS.index(found.kind) <= KINDS.index("upper bound") or ACCOUNTANTS[name].kind == "approximation"
    assert not found.is_bound or lower is None or found.epsilon >= lower


@pytest.mark.parametrize("name", ROWS)
def test_what_needs_no_accountant_is_the_same_for_all(name: str) -> None:
    assert account((), DELTA, name).epsilon == 0.0 and account_delta((), 1.0, name).delta == 0.0
    nothing = (GaussianSteps(Poisson(100, 10), 0.0, 3),)
    assert math.isinf(account(nothing, DELTA, name).epsilon) and account_delta(nothing, 1.0, name).delta == 1.0
    few = (ProjectedSteps(Poisson(1_000, 10), 1.0, projections=1, steps=10),)
    assert math.isinf(account(few, DELTA, name).epsilon)


def test_all_that_shows_accountants_shows_these() -> None:
    panel = privacy_panel(sampled("one phase"), DELTA)
    assert list(panel) == [name for name in ACCOUNTANTS if name in panel] and len(panel) >= len(ACCOUNTANTS) - 1
    for command in (epsilon_command, noise_command):
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        (option,) = (action for action in parser._actions if "--accountant" in action.option_strings)
        assert list(option.choices or ()) == list(ACCOUNTANTS) and all(name in parser.format_help() for name in ROWS)


@pytest.mark.parametrize("name", ["moments", "Exact", "", None, 3, ["exact"]])
def test_another_name_is_refused_with_the_names_that_there_are(name: Any) -> None:
    for ask in (account, account_delta):
        with pytest.raises(AccountingError, match=f"accountant must be one of {', '.join(ACCOUNTANTS)}, got"):
            ask(sampled("one phase"), 0.5, name)


# Samplings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """A kind of sampling: an example, the relations that hold, what a guarantee says, and what is not known."""

    example: Any
    relations: tuple[Relation, ...]
    words: str
    interval: bool = False
    tight: bool = True
    estimates: bool = True


DRAWN = {
    "poisson": Drawn(Poisson(100, 10), ("zero_out", "replace_one"), "Poisson sampling at rate 0.1"),
    "full_batch": Drawn(FullBatch(20), ("zero_out", "replace_one"), "every record in every step"),
    "shuffled": Drawn(Shuffled(100, 10), ("zero_out", "replace_one"), "without amplification", interval=True),
    "fixed_size": Drawn(
        FixedSize(100, 10), ("replace_one",), "fresh subsets of exactly 10 from 100", interval=True, estimates=False
    ),
    "cyclic_poisson": Drawn(
        CyclicPoisson(100, 10, 4),
        ("zero_out", "replace_one"),
        "Poisson sampling at rate 0.4 from 4 groups in turns",
        tight=False,
        estimates=False,
    ),
    "balls_in_bins": Drawn(
        BallsInBins(100, 10),
        ("zero_out", "replace_one"),
        "each of 100 records in one of 10 batches of every epoch",
        tight=False,
        estimates=False,
    ),
}


def test_every_sampling_has_a_row_and_an_account() -> None:
    assert list(SAMPLINGS) == list(DRAWN)
    assert {type(None), *SAMPLINGS.values()} == set(SCHEMES)
    assert all(type(row.example) is SAMPLINGS[name] for name, row in DRAWN.items())


@pytest.mark.parametrize("name", DRAWN)
def test_a_sampling_is_accounted_as_its_row_says(name: str) -> None:
    row = DRAWN[name]
    events = (GaussianSteps(row.example, 4.0, 30),)
    assert scheme_of(row.example).relations(row.example) == row.relations
    with pytest.raises(AccountingError, match="relation='add_remove' does not hold"):
        account(events, DELTA, relation="add_remove")
    found = account(events, DELTA)
    assert found.relation == row.relations[0] and row.words in found.sampling
    # Never worse than if every record were in every batch, and replaced.
    assert 0.0 < found.epsilon <= account((GaussianSteps(FullBatch(100), 2.0, 30),), DELTA).epsilon * (1 + ROUND_OFF)
    assert (found.lower is not None) == row.interval and found.is_bound
    assert found.kind == ("upper bound" if row.interval or not row.tight else "numerically exact")
    if found.lower is not None:
        assert 0.0 <= found.lower <= found.epsilon


@pytest.mark.parametrize("name", DRAWN)
def test_a_sampling_draws_what_it_says(name: str) -> None:
    sampling = DRAWN[name].example
    draws = Draws(sampling, Entropy(3))
    for step in range(25):
        batch = draws.batch(step)
        assert len(set(batch.tolist())) == len(batch) <= sampling.largest_batch
        assert np.all((batch >= 0) & (batch < sampling.sample_size))
        np.testing.assert_array_equal(batch, Draws(sampling, Entropy(3)).batch(step))


@pytest.mark.parametrize("name", DRAWN)
def test_estimated_norms_are_refused_without_a_proof(name: str) -> None:
    sampling, proven = DRAWN[name].example, DRAWN[name].estimates
    if proven:
        assert ProjectedSteps(sampling, 1.0, projections=10).count == 1
    else:
        with pytest.raises(AccountingError, match="no proof"):
            ProjectedSteps(sampling, 1.0, projections=10)


def test_a_sampling_without_a_proof_of_its_own_has_none() -> None:
    class Guess(type(scheme_of(None))):  # type: ignore[misc]
        """A definition that does not speak of estimated norms."""

    assert "use cw.Poisson" in Guess().unproven(object())


# Events ------------------------------------------------------------------------------------------------------------

POISSON = '"sampling": {"kind": "poisson", "sample_size": 100, "batch_size": 10, "max_batch_size": null}'
WRITTEN = {
    "gaussian_steps": (
        GaussianSteps(Poisson(100, 10), 1.5, 7),
        f'{{"kind": "gaussian_steps", {POISSON}, "noise_multiplier": 1.5, "steps": 7, "reason": "training"}}',
    ),
    "projected_steps": (
        ProjectedSteps(Poisson(100, 10), 1.5, 64, 7, own_batches=True),
        f'{{"kind": "projected_steps", {POISSON}, "noise_multiplier": 1.5, "projections": 64, "steps": 7, '
        '"reason": "training", "own_batches": true}',
    ),
    "federated_rounds": (
        FederatedRounds(Poisson(100, 10), 1.5, 7),
        f'{{"kind": "federated_rounds", {POISSON}, "noise_multiplier": 1.5, "rounds": 7, "reason": "federated"}}',
    ),
    "private_calibration": (
        PrivateCalibration(1.5, 7, disjoint=True),
        '{"kind": "private_calibration", "noise_multiplier": 1.5, "releases": 7, "disjoint": true, '
        '"reason": "calibration"}',
    ),
    "private_statistics": (
        PrivateStatistics(1.5, 7),
        '{"kind": "private_statistics", "noise_multiplier": 1.5, "releases": 7, "reason": "statistics"}',
    ),
}
"""Each kind with the bytes that stand on ledgers: these are read for ever."""


def test_every_kind_of_event_has_a_row() -> None:
    assert list(_KINDS) == list(WRITTEN)
    assert all(type(event) is _KINDS[name] for name, (event, _) in WRITTEN.items())


@pytest.mark.parametrize("name", WRITTEN)
def test_an_event_is_written_as_ever_and_counts(name: str) -> None:
    event, text = WRITTEN[name]
    assert json.dumps(encode(event)) == text and decode(json.loads(text)) == event
    assert event.count == 7 and event.repeated(3).count == 3 and hash(event) == hash(decode(encode(event)))
    assert event.same_mechanism(event.repeated(2)) and event.repeated(7) == event
    for change in ({"noise_multiplier": 2.0}, {"reason": "another"}):
        assert not event.same_mechanism(event.changed(**change))
    others = [other for key, (other, _) in WRITTEN.items() if key != name]
    assert not any(event.same_mechanism(other) for other in others)
    ledger = Ledger([event, event])
    assert len(ledger.events) == 1 and ledger.events[0].count == 14
    assert ledger.steps == (14 if event.trains else 0)


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "1", None, True])
def test_no_event_has_such_noise(name: str, value: Any) -> None:
    with pytest.raises(AccountingError, match="noise_multiplier"):
        WRITTEN[name][0].changed(noise_multiplier=value)


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("value", [0, -1, 1.0, True, None, 10**13])
def test_no_event_happens_so_often(name: str, value: Any) -> None:
    with pytest.raises(AccountingError, match=WRITTEN[name][0].counted):
        WRITTEN[name][0].repeated(value)
