"""Few steps and far corners, against privacy worked out a second time from its definition (`oracles`)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from scipy import stats

from clipwise.accounting import account, account_delta
from clipwise.accounting._problem import pose
from clipwise.accounting.accountants.edgeworth import saddle_interval
from clipwise.accounting.events import FederatedRounds, GaussianSteps, PrivateCalibration, ProjectedSteps
from clipwise.sampling import FixedSize, FullBatch, Poisson, Shuffled

from .common import run
from .oracles import (
    Law,
    Outputs,
    Step,
    bracket,
    fixed_batches,
    hockey_stick,
    largest_epsilon,
    outputs_of,
    poisson_batches,
    shuffled_outputs,
    told_apart,
    two_steps,
)

EXACT = 1e-8  # what the exact accountant may be off, as a share of epsilon


@pytest.fixture
def mp() -> Any:
    """mpmath with 30 digits."""
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(30):
        yield mpmath


def directions(rate: float, mu: float, relation: str | None) -> list[Step]:
    kinds: Any = ("replace",) if relation == "replace_one" else ("remove", "add")
    return [Step(kind, rate, mu) for kind in kinds]


# One step and two, in 30 digits ----------------------------------------------------------------------------------

CORNERS = [(0.05, 1e-6), (0.3, 1e-3), (1.0, 0.01), (0.5, 1 - 1e-9), (20.0, 0.5), (1.0, 1e-12), (1e4, 0.1), (3.0, 1.0)]


@pytest.mark.parametrize("relation", ["add_remove", "zero_out", "replace_one"])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.3])
@pytest.mark.parametrize(("sigma", "rate"), CORNERS)
def test_one_sampled_step(sigma: float, rate: float, delta: float, relation: Any, mp: Any) -> None:
    events = (GaussianSteps(Poisson(rate=rate, batch_size=1), sigma),)

    def truth(epsilon: float) -> float:
        return float(max(hockey_stick(s, mp.mpf(epsilon), mp) for s in directions(rate, 1 / sigma, relation)))

    found = account(events, delta, relation=relation)
    assert found.kind == "numerically exact"
    assert truth(found.epsilon * (1 + EXACT) + 1e-15) <= delta
    if found.epsilon:
        assert truth(found.epsilon * (1 - EXACT) - 1e-15) >= delta
    for epsilon in (0.0, found.epsilon):
        back = account_delta(events, epsilon, relation=relation).delta
        assert back == pytest.approx(max(1e-18, truth(epsilon)), rel=1e-6)
        assert account_delta(events, epsilon, "rdp", relation=relation).delta >= truth(epsilon) * (1 - 1e-9)
    assert account(events, delta, "rdp", relation=relation).epsilon >= found.epsilon * (1 - EXACT)


@pytest.mark.parametrize("relation", ["zero_out", "replace_one"])
@pytest.mark.parametrize(
    ("sigma", "rate", "delta"), [(0.3, 1e-3, 1e-3), (0.8, 0.2, 0.12), (1.0, 0.01, 1e-9), (5.0, 0.999, 1e-12)]
)
def test_two_sampled_steps(sigma: float, rate: float, delta: float, relation: Any, mp: Any) -> None:
    events = (GaussianSteps(Poisson(rate=rate, batch_size=1), sigma, 2),)
    found = account(events, delta, relation=relation)
    # Of delta, which changes up to 30 times as fast as epsilon, and that has eight digits; the fallback bounds it.
    slack = 3e-7 if found.accountant == "exact" else 2e-3
    true = float(max(two_steps(s, mp.mpf(found.epsilon), mp) for s in directions(rate, 1 / sigma, relation)))
    assert true <= delta * (1 + 1e-7)
    assert true >= delta * (1 - slack)
    assert account_delta(events, found.epsilon, relation=relation).delta >= true * (1 - 1e-7)
    assert account(events, delta, "rdp", relation=relation).epsilon >= found.epsilon * (1 - EXACT)


@pytest.mark.parametrize("accountant", ["exact", "rdp", "gdp", "edgeworth"])
@pytest.mark.parametrize("steps", [1, 2, 5, 10, 50])
@pytest.mark.parametrize("sigma", [0.011, 1.0, 1e4])
def test_full_batches(sigma: float, steps: int, accountant: Any, mp: Any) -> None:
    """Under every relation, for groups, and for every event that reads all records: one Gaussian step of their mu."""
    full = GaussianSteps(FullBatch(100), sigma, steps)
    asked: list[tuple[Any, Any, int, float]] = [
        (full, None, 1, 1.0),
        (full, "zero_out", 1, 1.0),
        (full, "replace_one", 1, 2.0),
        (full, None, 3, 3.0),
        (GaussianSteps(Poisson(rate=1.0, batch_size=1), sigma, steps), "add_remove", 1, 1.0),
        (GaussianSteps(FixedSize(10, 10), sigma, steps), None, 1, 2.0),
        (PrivateCalibration(sigma, steps), None, 1, 1.0),
        (FederatedRounds(FullBatch(10), sigma, steps), None, 1, 1.0),
    ]
    for (event, relation, group, reach), delta in itertools.product(asked, (1e-12, 1e-5, 0.4)):
        step = Step("remove", 1.0, reach * steps**0.5 / sigma)
        found = account((event,), delta, accountant, relation=relation, group=group)
        assert float(hockey_stick(step, mp.mpf(found.epsilon * (1 + EXACT)), mp)) <= delta
        if found.epsilon and accountant != "rdp":
            assert float(hockey_stick(step, mp.mpf(found.epsilon * (1 - EXACT)), mp)) >= delta
        back = account_delta((event,), found.epsilon, accountant, relation=relation, group=group).delta
        true = float(hockey_stick(step, mp.mpf(found.epsilon), mp))
        assert back >= true * (1 - 1e-7)
        assert accountant == "rdp" or back == pytest.approx(max(true, 1e-18), rel=1e-6, abs=1e-18)


@pytest.mark.parametrize("steps", [1, 2, 5, 10, 50])
@pytest.mark.parametrize(("sigma", "rate"), [(0.5, 1e-6), (1.0, 0.1), (50.0, 0.999)])
def test_the_central_limit_theorem_is_its_formula_and_says_that_it_is_no_bound(
    sigma: float, rate: float, steps: int, mp: Any
) -> None:
    event = GaussianSteps(Poisson(rate=rate, batch_size=1), sigma, steps)
    limit = Step("remove", 1.0, float(rate * mp.sqrt(steps * mp.expm1(mp.mpf(sigma) ** -2))))
    found = account((event,), 1e-6, "gdp")
    assert found.kind == "approximation" and not found.is_bound
    if found.epsilon:
        assert float(hockey_stick(limit, mp.mpf(found.epsilon), mp)) == pytest.approx(1e-6, rel=1e-6)
    assert account((event,), 1e-6, "edgeworth").kind == "approximation"


# Any number of steps ---------------------------------------------------------------------------------------------


def cut_law(n: int, rate: Fraction, cap: int, mu: float, relation: str | None) -> list[Law]:
    """Batches cut at `cap`: if the others alone fill one, the record takes another's place."""
    others = [math.comb(n - 1, k) * rate**k * (1 - rate) ** (n - 1 - k) for k in range(n)]
    full = sum(others[cap:])
    inside = sum(chance * rate * cap / (k + 1) for k, chance in enumerate(others) if k >= cap) / full
    worse = Step("replace", float(inside), 2 * mu)
    return [[(float(1 - full), s), (float(full), worse)] for s in directions(float(rate), mu, relation)]


def plain(rate: float, sigma: float, relation: str | None = None) -> list[Law]:
    return [[(1.0, step)] for step in directions(rate, 1 / sigma, relation)]


ROWS: list[tuple[str, list[Any], list[list[tuple[Law, int]]], float]] = []
for _relation in ("zero_out", "replace_one"):
    for _sigma, _batch, _steps, _delta in [
        (0.8, 200, 5, 1e-5),
        (0.5, 20, 10, 1e-4),
        (2.0, 999, 10, 1e-12),
        (1.0, 100, 50, 1e-3),
        (4.0, 500, 50, 1e-9),
    ]:
        _events = [GaussianSteps(Poisson(1_000, _batch), _sigma, _steps)]
        _phases = [[(law, _steps)] for law in plain(_batch / 1_000, _sigma, _relation)]
        ROWS.append((_relation, _events, _phases, _delta))
    for _cap, _sigma, _steps, _delta in [(6, 2.0, 5, 1e-4), (9, 2.0, 10, 1e-6), (7, 8.0, 50, 1e-3)]:
        _events = [GaussianSteps(Poisson(40, 4, _cap), _sigma, _steps)]
        _laws = cut_law(40, Fraction(1, 10), _cap, 1 / _sigma, _relation)
        ROWS.append((_relation, _events, [[(law, _steps)] for law in _laws], _delta))
    _mixed = [(0.7, 0.1, 1), (1.0, 0.3, 4), (3.0, 0.05, 5), (10.0, 0.999, 2)]
    _events = [GaussianSteps(Poisson(rate=q, batch_size=1), s, t) for s, q, t in _mixed]
    _sides = zip(*(plain(q, s, _relation) for s, q, _ in _mixed), strict=True)
    ROWS.append((_relation, _events, [[(law, t) for law, (*_, t) in zip(side, _mixed, strict=True)] for side in _sides],
                 1e-5))  # fmt: skip


@pytest.mark.parametrize(
    ("relation", "events", "truth", "delta"), ROWS, ids=[f"{r}-{i}" for i, (r, *_) in enumerate(ROWS)]
)
def test_some_steps(relation: Any, events: list[Any], truth: list[list[tuple[Law, int]]], delta: float) -> None:
    found = account(events, delta, relation=relation)
    ends = [bracket(phases, found.epsilon) for phases in truth]
    low, high = max(low for low, _ in ends), max(high for _, high in ends)
    assert 0.97 * high < low <= high  # else nothing is tested
    assert low <= delta * (1 + 1e-9) and high >= delta * (1 - 2e-3)
    back = account_delta(events, found.epsilon, relation=relation).delta
    assert low * (1 - 1e-9) <= back <= high * (1 + 2e-3)
    bound = account(events, delta, "rdp", relation=relation).epsilon
    assert bound >= found.epsilon * (1 - EXACT)
    assert account_delta(events, found.epsilon, "rdp", relation=relation).delta >= low


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "relation", "steps"), [(20, "zero_out", 2), (999, "replace_one", 10), (1_000, "zero_out", 50)]
)
def test_pld_of_few_steps(batch: int, relation: Any, steps: int) -> None:
    pytest.importorskip("dp_accounting")
    events = (GaussianSteps(Poisson(1_000, batch), 3.0, steps),)
    found = account(events, 1e-6, "pld", relation=relation)
    ends = [bracket([(law, steps)], found.epsilon) for law in plain(batch / 1_000, 3.0, relation)]
    assert max(low for low, _ in ends) <= 1e-6 and max(high for _, high in ends) >= 0.9e-6


@pytest.mark.parametrize(("rate", "steps"), [(0.2, 5), (0.01, 50), (0.999, 10), (0.9, 1)])
@pytest.mark.parametrize("delta", [1e-10, 1e-3])
def test_the_rigorous_interval_of_few_steps_holds_the_truth(rate: float, steps: int, delta: float) -> None:
    low, high = saddle_interval(run(1.0, rate, steps), delta)
    law: Law = [(1.0, Step("remove", rate, 1.0))]
    assert bracket([(law, steps)], low)[1] >= delta
    assert math.isinf(high) or bracket([(law, steps)], high)[0] <= delta


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "projections", "steps"), [(0.1, 50, 1), (0.1, 50, 5), (1.0, 50, 2), (1.0, 20, 50), (0.1, 400, 10)]
)
def test_estimated_norms(rate: float, projections: int, steps: int) -> None:
    """Estimates rounded up are better for privacy than the truth: the shift is 1 / (sigma sqrt(X)) or less."""
    law, shares, mus = stats.chi2(projections), [], []
    edges = law.ppf([0.0, *np.geomspace(1e-8, 0.01, 6), *np.linspace(0.05, 0.95, 12), 1.0])
    for low, high in itertools.pairwise(edges):
        shares.append(float(law.cdf(high) - law.cdf(low)))
        mus.append(math.sqrt(projections / min(high, 1e6)) / 3.0)
    event = ProjectedSteps(Poisson(rate=rate, batch_size=1), 3.0, projections, steps)
    for epsilon in (0.2, 1.0):
        sides: list[Law] = [
            [(share, Step(kind, rate, mu)) for share, mu in zip(shares, mus, strict=True)] for kind in ("remove", "add")
        ]
        truth = max(bracket([(side, steps)], epsilon)[0] for side in sides)
        for accountant in ("exact", "rdp"):
            assert account_delta((event,), epsilon, accountant).delta >= truth


# Mechanisms on few records, and every data set that they can have -------------------------------------------------

UNIT = (-1.0, 0.0, 1.0)


def neighbours(relation: str, records: int = 3) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """Data sets of numbers of at most one, and their neighbours: all that differ in the first record."""
    others = list(itertools.combinations_with_replacement(UNIT, records - 1))
    if relation == "add_remove":
        return [((1.0, *rest), rest) for rest in others]
    return [((1.0, *rest), ({"zero_out": 0.0, "replace_one": -1.0}[relation], *rest)) for rest in others]


def worst(releases: Sequence[Sequence[tuple[Outputs, Outputs, int]]], sigma: float, epsilon: float) -> float:
    """The largest delta over all data, in both directions."""
    turned = [[(other, one, count) for one, other, count in release] for release in releases]
    return max(told_apart(release, sigma, epsilon) for release in (*releases, *turned))


MECHANISMS: list[tuple[Any, str, Any, float, tuple[int, ...]]] = [
    (Poisson(rate=0.3, batch_size=1), "add_remove", lambda v: poisson_batches(v, 0.3), 0.9, (1, 2, 5, 10, 50)),
    (Poisson(rate=0.3, batch_size=1), "zero_out", lambda v: poisson_batches(v, 0.3), 0.95, (2, 10)),
    (Poisson(rate=0.3, batch_size=1), "replace_one", lambda v: poisson_batches(v, 0.3), 0.9, (1, 2, 5, 10, 50)),
    (Poisson(3, 2), "zero_out", lambda v: poisson_batches(v, 2 / 3), 0.95, (1, 10)),
    (Poisson(3, 2), "replace_one", lambda v: poisson_batches(v, 2 / 3), 0.95, (2, 10)),
    (Poisson(3, 1, 1), "zero_out", lambda v: poisson_batches(v, 1 / 3, 1), 0.2, (1, 5)),
    (Poisson(3, 1, 1), "replace_one", lambda v: poisson_batches(v, 1 / 3, 1), 0.2, (1, 5)),
    (Poisson(3, 2, 2), "zero_out", lambda v: poisson_batches(v, 2 / 3, 2), 0.2, (1, 10)),
    (Poisson(rate=0.5, batch_size=1, max_batch_size=1, largest=3), "add_remove",
     lambda v: poisson_batches(v, 0.5, 1), 0.1, (1, 5)),
    (Poisson(rate=0.5, batch_size=1, max_batch_size=2, largest=3), "replace_one",
     lambda v: poisson_batches(v, 0.5, 2), 0.2, (1, 10)),
    (FixedSize(3, 1), "replace_one", lambda v: fixed_batches(v, 1), 0.8, (1, 10)),
    (FixedSize(3, 2), "replace_one", lambda v: fixed_batches(v, 2), 0.8, (1, 10)),
    (FullBatch(3), "zero_out", lambda v: [(1.0, v)], 0.95, (1, 50)),
    (FullBatch(3), "replace_one", lambda v: [(1.0, v)], 0.95, (1, 10)),
]  # fmt: skip
RUNS = [(*row[:4], steps) for row in MECHANISMS for steps in row[4]]


@pytest.mark.parametrize(
    ("sampling", "relation", "batches", "least", "steps"), RUNS, ids=[f"{r[0]}-{r[1]}-{r[4]}" for r in RUNS]
)
def test_no_data_are_worse_than_what_is_accounted(
    sampling: Any, relation: Any, batches: Any, least: float, steps: int
) -> None:
    sigma, epsilon = 2.0, 0.4
    pairs = [[(outputs_of(batches(a)), outputs_of(batches(b)), steps)] for a, b in neighbours(relation)]
    truth = worst(pairs, sigma, epsilon)
    events = (GaussianSteps(sampling, sigma, steps),)
    found = account_delta(events, epsilon, relation=relation)
    assert found.relation == relation
    assert least * found.delta <= truth <= found.delta
    assert account_delta(events, epsilon, "rdp", relation=relation).delta >= truth
    if found.lower is not None:
        assert found.lower <= truth * 1.01
    assert account(events, truth, "rdp", relation=relation).epsilon >= epsilon


@pytest.mark.parametrize("relation", ["zero_out", "replace_one"])
def test_no_two_records_are_worse_than_what_is_accounted_for_a_group(relation: Any) -> None:
    other = {"zero_out": 0.0, "replace_one": -1.0}[relation]
    for steps in (1, 5):
        pairs = [
            [(outputs_of(poisson_batches((1.0, b, c), 0.3)), outputs_of(poisson_batches((other, x, c), 0.3)), steps)]
            for b, x, c in itertools.product(UNIT, (0.0,) if relation == "zero_out" else (-1.0, 1.0), (0.0, 1.0))
        ]
        truth = worst(pairs, 2.0, 0.4)
        event = GaussianSteps(Poisson(10, 3), 2.0, steps)
        found = account_delta((event,), 0.4, relation=relation, group=2).delta
        assert 0.95 * found <= truth <= found


@pytest.mark.parametrize("steps", [1, 2, 3, 5])  # one after the other: they share what the oracle finds
@pytest.mark.parametrize(("records", "size"), [(2, 2), (2, 1), (4, 2), (3, 2)])
@pytest.mark.parametrize("relation", ["zero_out", "replace_one"])
def test_no_order_is_worse_than_what_is_accounted_for_shuffled_batches(
    records: int, size: int, steps: int, relation: Any
) -> None:
    """Whole epochs are seen together; of an unfinished one its first batches."""
    sigma, epsilon, epoch = 2.0, 0.2, -(-records // size)
    whole, rest = divmod(steps, epoch)
    releases = []
    for a, b in neighbours(relation, records):
        parts = [(epoch, whole)] if whole else []
        parts += [(rest, 1)] if rest else []
        releases.append([(shuffled_outputs(a, size, n), shuffled_outputs(b, size, n), count) for n, count in parts])
    truth = worst(releases, sigma, epsilon)
    found = account_delta((GaussianSteps(Shuffled(records, size), sigma, steps),), epsilon, relation=relation)
    assert found.lower is not None and found.lower <= truth * 1.02 and 0.0 < truth <= found.delta
    if whole and not rest and relation == "zero_out":
        assert found.lower >= 0.9 * truth or size > 1


def test_fixed_size_is_the_convex_hull_of_both_directions(mp: Any) -> None:
    """One step: the larger of the two directions at every epsilon; and never less than what some data reach."""
    for sigma, rate in ((0.5, 0.01), (2.0, 0.5), (10.0, 0.9), (0.1, 1e-4)):
        event = GaussianSteps(FixedSize(10_000, round(10_000 * rate)), sigma)
        for epsilon in (0.0, 0.1, 1.0, 5.0):
            both = [float(hockey_stick(Step(kind, rate, 2 / sigma), mp.mpf(epsilon), mp)) for kind in ("remove", "add")]
            found = account_delta((event,), epsilon)
            assert found.delta == pytest.approx(max(*both, 1e-18), rel=1e-7)
            assert found.lower is not None and found.lower <= found.delta


def test_a_lower_end_that_oracles_give_is_one(mp: Any) -> None:
    """The oracles agree among themselves: closed form, bins of the loss, cells of the output."""
    step = Step("remove", 0.3, 0.5)
    one, none = outputs_of(poisson_batches((1.0,), 0.3)), outputs_of(poisson_batches((), 0.3))
    for steps, exact in ((1, hockey_stick), (2, two_steps)):
        true = float(exact(step, mp.mpf(0.2), mp))
        low, high = bracket([([(1.0, step)], steps)], 0.2)
        assert true * (1 - 1e-3) <= low <= true * (1 + 1e-9) and true * (1 - 1e-9) <= high <= true * (1 + 1e-4)
        assert true * (1 - 1e-2) <= told_apart([(one, none, steps)], 2.0, 0.2) <= true
    epsilon = largest_epsilon(lambda e: float(hockey_stick(step, mp.mpf(e), mp)), 1e-3)
    assert float(hockey_stick(step, mp.mpf(epsilon), mp)) == pytest.approx(1e-3, rel=1e-9)


def test_the_pairs_of_both_directions_are_asked_for() -> None:
    """Adding is worse than removing at some epsilon: with little noise, large losses of adding do not exist."""
    assert len(pose((GaussianSteps(Poisson(10, 3), 1.0, 2),)).upper) == 2
