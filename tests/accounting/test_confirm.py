"""Answers that were written down: which of them a ledger bears out, to which digit, and how the others are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clipwise._json import Fields
from clipwise.accounting import GaussianSteps, Guarantee, account, confirmed
from clipwise.errors import DataError
from clipwise.sampling import FullBatch, Poisson, Shuffled

EVENTS = (GaussianSteps(Poisson(1_000, 10), 2.0, 100),)
DELTA = 1e-5


def written(name: str = "exact", **changes: Any) -> Fields:
    said = account(EVENTS, DELTA, "exact" if name == "pld" else name).to_dict()
    return Fields({**said, "accountant": name, "seconds": 7.5, **changes}, "result.json")


@pytest.mark.parametrize("name", ["exact", "rdp", "gdp", "edgeworth"])
def test_an_answer_is_computed_again_and_keeps_its_seconds(name: str) -> None:
    found = confirmed(name, written(name), EVENTS, DELTA)
    today = account(EVENTS, DELTA, name)
    assert isinstance(found, Guarantee) and found.seconds == 7.5 and replace(found, seconds=today.seconds) == today


@pytest.mark.parametrize("share", [1 - 0.9e-3, 1 + 0.9e-3])
def test_what_differs_by_less_than_is_printed_is_the_ledgers_number(share: float) -> None:
    truth = account(EVENTS, DELTA).epsilon
    found = confirmed("exact", written(epsilon=truth * share), EVENTS, DELTA)
    assert found is not None and found.epsilon == truth


@pytest.mark.parametrize("share", [0.0, 1 - 1.1e-3, 1 + 1.1e-3, 2.0])
def test_what_differs_by_more_is_refused(share: float) -> None:
    truth = account(EVENTS, DELTA).epsilon
    with pytest.raises(DataError, match=f"exact accountant is said to give .* but the ledger is worth {truth:.4g}"):
        confirmed("exact", written(epsilon=truth * share), EVENTS, DELTA)


def test_no_epsilon_and_one_that_is_infinite() -> None:
    nothing = (GaussianSteps(FullBatch(100), 1e6),)
    zero = Fields({**account(nothing, DELTA).to_dict(), "epsilon": 0.9e-9}, "result.json")
    found = confirmed("exact", zero, nothing, DELTA)
    assert found is not None and found.epsilon == 0.0
    with pytest.raises(DataError, match="worth 0"):
        confirmed("exact", Fields({**zero.value, "epsilon": 1e-8}, "result.json"), nothing, DELTA)
    with pytest.raises(DataError, match="epsilon = inf"):
        confirmed("exact", written(epsilon=None), EVENTS, DELTA)
    bare = (GaussianSteps(Poisson(1_000, 10), 0.0, 100),)
    with pytest.raises(DataError, match="worth inf"):
        confirmed("exact", written(), bare, DELTA)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"delta": 1e-6}, "delta should be that of the run, 1e-05"),
        ({"relation": "swap"}, "relation should be one of add_remove, replace_one, zero_out"),
        ({"epsilon": -0.1}, "epsilon should be a number from 0"),
        ({"seconds": -1.0}, "seconds should be a number from 0"),
        ({"group": 0}, "group should be an integer of at least 1"),
        ({"group": "1"}, "group should be an integer of at least 1"),
    ],
)
def test_fields_that_cannot_be_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        confirmed("exact", written(**changes), EVENTS, DELTA)


def test_another_name_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(DataError, match="'moments' is not an accountant; there are exact, rdp, pld, gdp, edgeworth"):
        confirmed("moments", written(), EVENTS, DELTA)


def test_a_delta_that_nobody_answers_is_said() -> None:
    said = Fields({**written().value, "delta": 1e-30}, "result.json")
    with pytest.raises(DataError, match="the ledger has no epsilon at delta 1e-30"):
        confirmed("exact", said, EVENTS, 1e-30)


def test_the_relation_and_the_group_are_those_that_were_asked_for() -> None:
    replaced = account(EVENTS, DELTA, relation="replace_one")
    found = confirmed("exact", Fields(replaced.to_dict(), "result.json"), EVENTS, DELTA)
    assert found is not None and found.relation == "replace_one" and found.epsilon == replaced.epsilon
    pair = account(EVENTS, DELTA, group=2)
    found = confirmed("exact", Fields(pair.to_dict(), "result.json"), EVENTS, DELTA)
    assert found is not None and (found.group, found.epsilon) == (2, pair.epsilon)
    with pytest.raises(DataError, match="worth"):
        confirmed("exact", Fields({**pair.to_dict(), "group": 3}, "result.json"), EVENTS, DELTA)


def test_a_slow_accountants_number_is_kept_if_the_exact_one_is_not_above_it() -> None:
    truth = account(EVENTS, DELTA).epsilon
    for share in (1 - 0.9e-3, 1.0, 1.5):
        found = confirmed("pld", written("pld", epsilon=share * truth), EVENTS, DELTA)
        assert found is not None and found.epsilon == share * truth
        assert (found.accountant, found.kind, found.seconds) == ("pld", "upper bound", 7.5)
    with pytest.raises(DataError, match=f"pld accountant is said .* worth at least {truth:.4g}"):
        confirmed("pld", written("pld", epsilon=truth * (1 - 1.1e-3)), EVENTS, DELTA)


def test_a_slow_accountants_number_is_computed_where_the_exact_one_is_a_bound_too() -> None:
    pytest.importorskip("dp_accounting")
    shuffled = (GaussianSteps(Shuffled(100, 10), 4.0, 20),)
    said = account(shuffled, DELTA, "pld")
    found = confirmed("pld", Fields(said.to_dict(), "result.json"), shuffled, DELTA)
    assert found is not None and found.epsilon == said.epsilon
    with pytest.raises(DataError, match="pld accountant is said to give"):
        confirmed("pld", Fields({**said.to_dict(), "epsilon": 2 * said.epsilon}, "result.json"), shuffled, DELTA)
