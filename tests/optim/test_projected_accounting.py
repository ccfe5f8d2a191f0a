"""The accounting of estimated norms: a bound, and against the true privacy where that can be computed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import integrate, stats

import clipwise as cw
from clipwise.accounting import ProjectedSteps, account, account_delta, noise_scale, privacy_curve
from clipwise.accounting.gaussian import gaussian_delta
from clipwise.accounting.projected import noise_kept
from clipwise.errors import AccountingError


def steps(**changes: Any) -> ProjectedSteps:
    fields: dict[str, Any] = {
        "sampling": cw.Poisson(10_000, 100),
        "noise_multiplier": 2.0,
        "projections": 100,
        "steps": 500,
        **changes,
    }
    return ProjectedSteps(**fields)


@pytest.mark.parametrize("projections", [1, 3, 64, 5_000])
@pytest.mark.parametrize("failure", [1e-3, 1e-9, 1e-15])
def test_the_kept_noise_is_a_quantile_of_chi_squared(projections: int, failure: float) -> None:
    kept = noise_kept(projections, failure)
    assert 0 < kept < 1
    found = stats.chi2.cdf(projections * kept**2, projections)
    assert found <= failure and found == pytest.approx(failure, rel=1e-3)


@pytest.mark.parametrize("projections", [12, 50, 400])
def test_one_full_batch_step_against_its_true_privacy(projections: int) -> None:
    """The worst gradient is very long: it contributes R/sqrt(X) exactly, and X can be integrated out."""
    event = steps(sampling=cw.FullBatch(1_000), noise_multiplier=3.0, projections=projections, steps=1)
    law = stats.chi2(projections)

    def weighted(s: float, epsilon: float) -> float:
        return float(law.pdf(s)) * gaussian_delta(1 / (3.0 * math.sqrt(s / projections)), epsilon)

    for epsilon in (0.5, 1.5):
        true, _ = integrate.quad(weighted, law.ppf(1e-14), law.isf(1e-14), args=(epsilon,), limit=400)
        found = account_delta([event], epsilon).delta
        assert true <= found
        assert found < 300 * true


def test_many_full_batch_steps_against_their_true_privacy() -> None:
    rng = np.random.default_rng(0)
    shifts = np.sqrt((100 / rng.chisquare(100, size=(4_000, 50))).sum(1)) / 20.0
    event = steps(sampling=cw.FullBatch(1_000), noise_multiplier=20.0, projections=100, steps=50)
    for epsilon in (0.3, 1.0):
        true = float(np.mean([gaussian_delta(shift, epsilon) for shift in shifts]))
        assert true <= account_delta([event], epsilon).delta


@pytest.mark.parametrize("accountant", ["exact", "rdp", "pld", "gdp", "edgeworth"])
def test_no_accountant_calls_it_exact_and_none_is_below_exact_norms(accountant: Any) -> None:
    for sampling in (cw.Poisson(10_000, 100), cw.FullBatch(10_000)):
        event = steps(sampling=sampling, noise_multiplier=2.0 if isinstance(sampling, cw.Poisson) else 60.0)
        found = account([event], 1e-5, accountant)
        plain = cw.GaussianSteps(sampling, event.noise_multiplier, 500)
        assert found.epsilon > account([plain], 1e-5, accountant).epsilon
        assert found.delta == 1e-5
        approximate = accountant in ("gdp", "edgeworth") and isinstance(sampling, cw.Poisson)
        assert found.kind == ("approximation" if approximate else "upper bound")
        assert any("estimated from 100 random projections" in warning for warning in found.warnings)


def test_more_projections_cost_less_and_in_the_end_nothing() -> None:
    found = [account([steps(projections=r)], 1e-5).epsilon for r in (1, 30, 100, 1_000, 10**6)]
    assert found == sorted(found, reverse=True) and math.isinf(found[0])
    exact = account([cw.GaussianSteps(cw.Poisson(10_000, 100), 2.0, 500)], 1e-5).epsilon
    assert exact < found[-1] < 1.02 * exact


def test_the_share_of_delta_is_near_the_best() -> None:
    from clipwise.accounting.projected import _at_reduced_noise

    shares = np.geomspace(1e-4, 0.9, 25)
    by_hand = [
        account(_at_reduced_noise([steps()], share * 1e-5 / 500), (1 - share) * 1e-5).epsilon for share in shares
    ]
    assert account([steps()], 1e-5).epsilon <= 1.01 * min(by_hand)


def test_delta_and_epsilon_agree() -> None:
    epsilon = account([steps()], 1e-6).epsilon
    assert 1e-7 < account_delta([steps()], epsilon).delta <= 1.01e-6


def test_more_records_at_risk_cost_more() -> None:
    one = account([steps()], 1e-5).epsilon
    replaced = account([steps()], 1e-5, relation="replace_one")
    assert replaced.epsilon > account([cw.GaussianSteps(cw.Poisson(10_000, 100), 2.0, 500)], 1e-5, "exact",
                                      "replace_one").epsilon  # fmt: skip
    assert account([steps()], 1e-5, group=2).epsilon > one
    fixed = account([steps(sampling=cw.FixedSize(10_000, 100))], 1e-5)
    assert fixed.relation == "replace_one" and fixed.lower is None
    assert account([steps(sampling=cw.Shuffled(10_000, 100), noise_multiplier=10.0)], 1e-5).relation == "zero_out"


def test_mixed_ledgers_and_their_files() -> None:
    ledger = cw.Ledger([steps(steps=3), steps(steps=2), cw.GaussianSteps(cw.Poisson(10_000, 100), 2.0, 10)])
    assert [event.count for event in ledger.events] == [5, 10] and ledger.steps == 15
    again = cw.Ledger.from_json(ledger.to_json())
    assert again == ledger
    assert again.epsilon(1e-5) > cw.Ledger(ledger.events[:1]).epsilon(1e-5)


def test_noise_can_be_calibrated() -> None:
    scale = noise_scale([steps(noise_multiplier=1.0)], epsilon=2.0, delta=1e-5)
    assert 1.99 < account([steps(noise_multiplier=scale)], 1e-5).epsilon <= 2.0


def test_what_has_no_answer_is_refused() -> None:
    with pytest.raises(AccountingError, match="no pair of distributions"):
        privacy_curve([steps()])
    with pytest.raises(AccountingError, match="batches that are cut"):
        steps(sampling=cw.Poisson(10_000, 100, max_batch_size=150))
    with pytest.raises(AccountingError, match="projections"):
        steps(projections=0)
    assert math.isinf(account([steps(noise_multiplier=0.0)], 1e-5).epsilon)
    assert account_delta([steps(projections=1)], 1.0).delta == 1.0
