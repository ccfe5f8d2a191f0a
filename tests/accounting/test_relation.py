"""The relation that a guarantee is for: what the sampling supports, named wherever a number stands."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from clipwise import Abadi, Plan
from clipwise._json import Fields
from clipwise.accounting import (
    FederatedRounds,
    GaussianSteps,
    Ledger,
    PrivateCalibration,
    account,
    account_delta,
    confirmed,
    free_cap,
    max_batch_size,
    noise_multiplier,
    privacy_curve,
)
from clipwise.accounting._numerics.lattice import Floats
from clipwise.accounting._numerics.laws import Law, Mixture, Pair, poisson, truncated_poisson, truncated_up_to
from clipwise.accounting.relation import relation_of
from clipwise.errors import AccountingError, InvalidSampling, LedgerError
from clipwise.sampling import FixedSize, FullBatch, Poisson, Shuffled, arguments, made_from

from .common import MNIST

RATE = Poisson(rate=256 / 60_000, batch_size=256)
CUT = Poisson(rate=256 / 60_000, batch_size=256, max_batch_size=330, largest=60_000)


def steps(sampling: Any, sigma: float = 1.1, count: int = 14_040) -> tuple[GaussianSteps]:
    return (GaussianSteps(sampling, sigma, count),)


@pytest.mark.parametrize(
    ("events", "relation"),
    [
        (steps(RATE), "add_remove"),
        (steps(Poisson(60_000, 256)), "zero_out"),
        (steps(FullBatch(100)), "zero_out"),
        (steps(Shuffled(100, 10)), "zero_out"),
        (steps(FixedSize(100, 10)), "replace_one"),
        ((FederatedRounds(RATE, 1.0),), "add_remove"),
        ((FederatedRounds(Poisson(100, 10), 1.0),), "zero_out"),
        ((PrivateCalibration(2.0),), "add_remove"),
        ((*steps(RATE), PrivateCalibration(2.0)), "add_remove"),
        ((*steps(RATE), *steps(Poisson(60_000, 256))), "zero_out"),
        ((*steps(RATE), *steps(FixedSize(100, 10))), "replace_one"),
        ((), "add_remove"),
    ],
)
def test_none_is_what_all_of_the_ledger_supports(events: Any, relation: str) -> None:
    assert relation_of(events) == (relation, ())
    assert Ledger(events).relation == relation and f" {relation})" in repr(Ledger(events))
    assert json.loads(Ledger(events).to_json())["relation"] == relation
    assert Ledger(events).guarantee(1e-3).relation == relation


@pytest.mark.parametrize("sampling", [Poisson(60_000, 256), FullBatch(100), Shuffled(100, 10), FixedSize(100, 10)])
def test_add_remove_with_a_public_number_names_the_rate(sampling: Any) -> None:
    event = GaussianSteps(sampling, 2.0, 3)
    plan = Plan(sampling, 3, Abadi(1.0), 2.0)
    questions: list[Any] = [
        lambda: account((event,), 1e-5, relation="add_remove"),
        lambda: account_delta((event,), 1.0, relation="add_remove"),
        lambda: noise_multiplier(3.0, 1e-5, sampling, 3, relation="add_remove"),
        lambda: Ledger([event]).epsilon(1e-5, relation="add_remove"),
        lambda: Ledger([event]).guarantee(1e-5, relation="add_remove"),
        lambda: plan.epsilon(1e-5, relation="add_remove"),
        lambda: plan.calibrate(3.0, 1e-5, relation="add_remove"),
        lambda: privacy_curve((event,), relation="add_remove"),
    ]
    for ask in questions:
        with pytest.raises(AccountingError, match=r"rate=\.\.\."):
            ask()


def test_the_number_is_the_same_with_a_public_rate_and_with_a_public_number() -> None:
    by_number, by_rate = account(MNIST, 1e-5), account(steps(RATE), 1e-5)
    assert by_number.epsilon == by_rate.epsilon == account(steps(RATE), 1e-5, relation="zero_out").epsilon
    assert "blanking one example" in by_number.statement() and "number of examples is public" in by_number.statement()
    assert "adding or removing one example" in by_rate.statement() and "public rate" in by_rate.statement()
    assert by_number.kind == by_rate.kind == "numerically exact"


def delta_of_a_step(law: Law, epsilon: float) -> float:
    """Delta of one step, by summing the densities: which part it was is revealed."""
    x = np.linspace(-40.0, 40.0, 16_001)

    def density(mixture: Mixture) -> Floats:
        return np.asarray(sum(weight * stats.norm.pdf(x, mean) for weight, mean in mixture))

    def above(pair: Pair) -> float:
        return float(np.maximum(density(pair.p) - np.exp(epsilon) * density(pair.q), 0.0).sum() * (x[1] - x[0]))

    return sum(weight * above(pair) for weight, pair in law.parts)


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize(("rate", "cap", "mu"), [(0.5, 1, 3.0), (0.1, 3, 0.5), (0.02, 4, 2.0), (1.0, 7, 1.0)])
def test_the_law_of_at_most_so_many_records_dominates_all_of_them(
    rate: float, cap: int, mu: float, replaced: bool
) -> None:
    """At every epsilon and in both directions, so that compositions of it dominate as well."""
    largest = 60
    bound = truncated_up_to(largest, rate, cap, mu, replaced)
    for records in (1, cap, cap + 1, cap + 2, 20, largest):
        law = truncated_poisson(records, rate, cap, mu, replaced)
        for epsilon in (0.0, 0.1, 1.0, 4.0):
            for one, other in ((law, bound), (law.reversed(), bound.reversed())):
                assert delta_of_a_step(one, epsilon) <= delta_of_a_step(other, epsilon) + 1e-12, (records, epsilon)


@pytest.mark.parametrize("replaced", [False, True])
def test_batches_that_are_always_or_never_cut_have_a_single_law(replaced: bool) -> None:
    assert truncated_up_to(60, 1.0, 7, 0.5, replaced) == poisson(1.0, 1.0, replace=True)
    assert truncated_up_to(60, 0.1, 60, 0.5, replaced) == poisson(0.1, 0.5, replaced)
    (whole,) = truncated_poisson(60, 1.0, 7, 0.5, replaced).parts
    assert whole == (1.0, poisson(7 / 60, 1.0, replace=True).parts[0][1])


def test_the_law_of_the_largest_number_alone_would_be_no_bound() -> None:
    """So many records compete for a place that each is hardly ever in a batch."""
    few, many = (delta_of_a_step(truncated_poisson(n, 0.5, 1, 3.0, False), 1.0) for n in (2, 60))
    assert few > 2 * many


def test_batches_that_are_cut_are_an_upper_bound_everywhere() -> None:
    cut = account(steps(CUT), 1e-5)
    assert cut.kind == "upper bound" and cut.lower is None and cut.relation == "add_remove"
    assert "at most 60000 records" in cut.statement()
    by_number = account(steps(Poisson(60_000, 256, 330)), 1e-5)
    assert by_number.epsilon < cut.epsilon < 1.001 * by_number.epsilon  # the bound for all sizes is almost free
    wide = replace(CUT, max_batch_size=60_000)
    assert account(steps(wide), 1e-5).kind == "numerically exact"  # no batch is ever cut
    assert privacy_curve(steps(CUT, count=100), count=5).kind == "upper bound"
    assert privacy_curve(steps(RATE, count=100), count=5).kind == "numerically exact"
    pytest.importorskip("dp_accounting")
    with pytest.raises(AccountingError, match="known number of records"):
        account(steps(CUT), 1e-5, "pld")


def test_caps_and_batch_sizes_at_a_public_rate() -> None:
    assert free_cap(replace(CUT, max_batch_size=60_000), noise_multiplier=1.1, steps=14_040, delta=1e-5) == free_cap(
        Poisson(60_000, 256), noise_multiplier=1.1, steps=14_040, delta=1e-5
    )
    with pytest.raises(AccountingError, match="largest="):
        free_cap(RATE, noise_multiplier=1.1, steps=14_040, delta=1e-5)
    with pytest.raises(AccountingError, match="does not depend on batch_size"):
        max_batch_size(2.0, 1e-5, RATE, steps=100, noise_multiplier=1.1)


def test_a_rate_beyond_double_precision_is_refused() -> None:
    assert account(steps(Poisson(rate=1e-12, batch_size=1), count=10), 1e-5).epsilon < 1e-6
    with pytest.raises(AccountingError, match="rate must be at least 1e-12"):
        steps(Poisson(rate=9e-13, batch_size=1))


def test_delta_is_judged_by_public_numbers() -> None:
    assert any("1/60000" in w for w in account(steps(RATE), 1e-4).warnings)
    assert not account(steps(RATE), 1e-5).warnings


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"batch_size": 8}, "sample_size=, the public number of records, or rate="),
        ({"sample_size": 100, "batch_size": 8, "rate": 0.08}, "not both"),
        ({"rate": 0.08}, "batch_size must be a finite int or float"),
        ({"rate": 0.08, "batch_size": "8.5"}, "batch_size must be a finite int or float"),
        ({"rate": 0.0, "batch_size": 8}, "over 0 and at most 1"),
        ({"rate": 1.1, "batch_size": 8}, "over 0 and at most 1"),
        ({"rate": float("nan"), "batch_size": 8}, "over 0 and at most 1"),
        ({"rate": True, "batch_size": 8}, "over 0 and at most 1"),
        ({"rate": "0.1", "batch_size": 8}, "over 0 and at most 1"),
        ({"rate": 0.08, "batch_size": 8, "max_batch_size": 20}, "needs largest="),
        ({"rate": 0.08, "batch_size": 8, "largest": 200}, "largest= goes with"),
        ({"sample_size": 100, "batch_size": 8, "max_batch_size": 20, "largest": 200}, "largest= goes with"),
        ({"rate": 0.08, "batch_size": 8, "max_batch_size": 20, "largest": 0}, "largest must be a positive integer"),
    ],
)
def test_half_said_sampling_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSampling, match=said):
        Poisson(**given)


@pytest.mark.parametrize(
    "sampling",
    [
        *(RATE, CUT, Poisson(60_000, 256), Poisson(60_000, 256, 330), Poisson(60_000, 100 / 3)),
        Poisson(rate=0.1, batch_size=12.5),
    ],
)
def test_a_sampling_is_made_again_from_its_arguments(sampling: Poisson) -> None:
    assert made_from(Poisson, arguments(sampling)) == sampling == eval(repr(sampling), {"Poisson": Poisson})
    ledger, plan = Ledger(steps(sampling)), Plan(sampling, 3, Abadi(1.0), 2.0)
    assert Ledger.from_json(ledger.to_json()) == ledger and Plan.from_dict(plan.to_dict()) == plan
    with pytest.raises(InvalidSampling):
        made_from(Poisson, {**arguments(sampling), "colour": 1})
    with pytest.raises(InvalidSampling):
        made_from(Poisson, {k: v for k, v in arguments(sampling).items() if k != "batch_size"})


def test_replacing_a_size_moves_the_rate_that_follows_from_it_and_no_public_one() -> None:
    assert replace(Poisson(100, 10), batch_size=20).rate == 0.2
    assert replace(RATE, batch_size=512).rate == RATE.rate
    # The rate of another plan is a public one when it is given as such.
    assert Poisson(rate=Poisson(100, 10).rate, batch_size=10).sample_size is None


def test_a_ledger_that_claims_another_relation_is_refused() -> None:
    text = Ledger(MNIST).to_json()
    with pytest.raises(LedgerError, match="checksum"):
        Ledger.from_json(text.replace('"zero_out"', '"add_remove"'))
    body = json.loads(text)
    body.pop("checksum")
    body["relation"] = "add_remove"
    from clipwise._json import checksum

    with pytest.raises(LedgerError, match="support 'zero_out' only"):
        Ledger.from_json(json.dumps({**body, "checksum": checksum(body)}))


def test_a_ledger_of_version_1_is_read_and_gets_its_relation() -> None:
    from clipwise._json import checksum

    body = json.loads(Ledger(MNIST).to_json())
    body = {k: v for k, v in body.items() if k not in ("checksum", "relation")} | {"version": 1}
    ledger = Ledger.from_json(json.dumps({**body, "checksum": checksum(body)}))
    assert ledger == Ledger(MNIST) and ledger.relation == "zero_out"


def test_an_accountant_without_an_answer_confirms_none() -> None:
    fixed = steps(FixedSize(1_000, 10), 1.0, 10)
    said = {**account(fixed, 1e-5).to_dict(), "accountant": "gdp"}
    assert confirmed("gdp", Fields(said, "here"), fixed, 1e-5) is None


def test_an_older_guarantee_is_confirmed_with_the_relation_and_the_kind_that_hold() -> None:
    """Until version 2 of the ledger, add_remove and "numerically exact" were written there."""
    for events in (MNIST, steps(Poisson(60_000, 256, 330)), steps(FullBatch(100), 50.0)):
        today = account(events, 1e-5)
        old = replace(today, relation="add_remove", kind="numerically exact").to_dict()
        assert "adding or removing" in old["statement"]
        assert confirmed("exact", Fields(old, "here"), events, 1e-5) == today
    of_a_rate = confirmed("exact", Fields(account(steps(RATE), 1e-5).to_dict(), "here"), steps(RATE), 1e-5)
    assert of_a_rate is not None and of_a_rate.relation == "add_remove"
    bare = steps(Poisson(100, 10), 0.0, 3)
    infinite = confirmed("exact", Fields(account(bare, 1e-5).to_dict(), "here"), bare, 1e-5)
    assert infinite is not None and infinite.epsilon == float("inf")


def test_a_fraction_of_a_batch_is_accounted_by_its_rate() -> None:
    """Half the batch of half the records: the same rate, the same epsilon; and between its whole neighbours."""
    spent = {size: account(steps(Poisson(1_000, size)), 1e-5).epsilon for size in (12, 12.5, 13)}
    assert spent[12] < spent[12.5] < spent[13]
    assert spent[12.5] == account(steps(Poisson(2_000, 25)), 1e-5).epsilon
    by_rate = account(steps(Poisson(rate=0.0125, batch_size=12.5)), 1e-5, relation="zero_out").epsilon
    assert by_rate == spent[12.5]
    with pytest.raises(AccountingError, match="rate must be at least 1e-12"):
        steps(Poisson(10**6, 1e-7))
