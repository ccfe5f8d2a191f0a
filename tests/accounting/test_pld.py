"""What the pld accountant asks of dp-accounting, which a recorder stands in for here; no distribution is computed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest

from clipwise.accounting import account, account_delta
from clipwise.accounting._numerics.saddle import quick_epsilon
from clipwise.accounting._problem import pose
from clipwise.accounting.events import FederatedRounds, GaussianSteps, PrivateCalibration, ProjectedSteps
from clipwise.errors import AccountingError
from clipwise.sampling import FixedSize, FullBatch, Poisson, Shuffled


@dataclass
class Recorder:
    """The module `privacy_loss_distribution`: it writes down what is made of what."""

    epsilon: Callable[[float], float] = lambda interval: 2.0
    delta: Callable[[float], float] = lambda interval: 1e-3
    made: list[list[tuple[Any, ...]]] = field(default_factory=list)
    intervals: list[float] = field(default_factory=list)

    class NeighborRel:
        ADD_OR_REMOVE_ONE, REPLACE_ONE = "add or remove", "replace"

    def from_gaussian_mechanism(self, deviation: float, **how: Any) -> Any:
        return self._new("gaussian", deviation, **how)

    def from_truncated_subsampled_gaussian_mechanism(self, *given: Any, **how: Any) -> Any:
        return self._new("cut", *given, **how)

    def _new(self, *what: Any, value_discretization_interval: float, **how: Any) -> Any:
        self.intervals.append(value_discretization_interval)
        return Distribution(self, value_discretization_interval, [(*what, *sorted(how.items()))])


@dataclass
class Distribution:
    of: Recorder
    interval: float
    parts: list[tuple[Any, ...]]

    def self_compose(self, count: int) -> Distribution:
        return Distribution(self.of, self.interval, [(*part, count) for part in self.parts])

    def compose(self, other: Distribution) -> Distribution:
        return Distribution(self.of, self.interval, self.parts + other.parts)

    def get_epsilon_for_delta(self, delta: float) -> float:
        self.of.made.append(self.parts)
        return self.of.epsilon(self.interval)

    def get_delta_for_epsilon(self, epsilon: float) -> float:
        self.of.made.append(self.parts)
        return self.of.delta(self.interval)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    package, inner = ModuleType("dp_accounting"), ModuleType("dp_accounting.pld")
    inner.privacy_loss_distribution = found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dp_accounting", package)
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", inner)
    return found


def sampled(rate: float, relation: str) -> tuple[tuple[str, Any], ...]:
    return ("neighboring_relation", relation), ("sampling_prob", rate)


@pytest.mark.parametrize(("relation", "name", "reach"), [(None, "add or remove", 1), ("replace_one", "replace", 2)])
def test_every_event_is_asked_for_as_it_is(recorder: Recorder, relation: Any, name: str, reach: float) -> None:
    def asked(*events: Any) -> Any:
        del recorder.made[:]
        found = account(events, 1e-5, "pld", relation=relation)
        assert (found.epsilon, found.kind, found.accountant) == (2.0, "upper bound", "pld")
        return recorder.made

    steps = GaussianSteps(Poisson(100, 10), 3.0, 7)
    assert asked(steps) == [[("gaussian", 3.0, *sampled(0.1, name), 7)]]
    assert asked(GaussianSteps(Poisson(rate=0.25, batch_size=10), 3.0, 7)) == [
        [("gaussian", 3.0, *sampled(0.25, name), 7)]
    ]
    assert asked(GaussianSteps(FullBatch(100), 3.0, 4)) == [[("gaussian", 3.0 / (reach * 2.0))]]
    assert asked(GaussianSteps(Poisson(100, 100), 3.0, 4)) == [[("gaussian", 3.0 / (reach * 2.0))]]
    assert asked(PrivateCalibration(3.0, 4)) == [[("gaussian", 3.0 / (reach * 2.0))]]
    assert asked(FederatedRounds(FullBatch(10), 3.0, 4)) == [[("gaussian", 3.0 / (reach * 2.0))]]
    assert asked(GaussianSteps(Poisson(100, 10, 14), 3.0, 7)) == [
        [("cut", 100, 0.1, 14, 3.0, ("neighboring_relation", name), 7)]
    ]
    # Ten batches an epoch: a record is in two of 15 steps, and in two of the second event's if it begins within one.
    shuffled = Shuffled(100, 10)
    assert asked(GaussianSteps(shuffled, 3.0, 15)) == [[("gaussian", pytest.approx(3.0 / (reach * 2**0.5)))]]
    both = asked(GaussianSteps(shuffled, 3.0, 10), GaussianSteps(shuffled, 5.0, 10))
    assert both == [[("gaussian", 3.0 / reach), ("gaussian", pytest.approx(5.0 / (reach * 2**0.5)))]]
    apart = asked(steps, PrivateCalibration(3.0, disjoint=True), GaussianSteps(FullBatch(100), 9.0))
    assert apart == [
        [("gaussian", 3.0, *sampled(0.1, name), 7), ("gaussian", 9.0 / reach)],
        [("gaussian", 3.0 / reach)],
    ]


def test_a_group_moves_full_batches_farther_and_is_refused_for_sampled_ones(recorder: Recorder) -> None:
    account((GaussianSteps(FullBatch(100), 3.0, 4),), 1e-5, "pld", group=3)
    account((GaussianSteps(FullBatch(100), 3.0, 4),), 1e-5, "pld", group=3, relation="replace_one")
    assert recorder.made == [[("gaussian", 0.5)], [("gaussian", 0.25)]]
    for ask in (account, account_delta):
        with pytest.raises(AccountingError, match="no group privacy with sampling; use the exact"):
            ask((GaussianSteps(Poisson(100, 10), 3.0, 4),), 1e-5, "pld", group=2)


def test_the_worse_of_two_disjoint_parts_is_the_answer(recorder: Recorder) -> None:
    values = iter([1.5, 2.5, 3.5, 0.5])
    recorder.epsilon = lambda interval: next(values)
    events = (GaussianSteps(FullBatch(100), 3.0), PrivateCalibration(3.0, disjoint=True))
    assert [account(events, 1e-5, "pld").epsilon for _ in range(2)] == [2.5, 3.5]
    values = iter([0.1, 0.3, 0.29, 0.05])  # the last two on the finer grid
    assert account(events, 1e-5, "pld").epsilon == 0.29
    chances = iter([1e-3, 2e-3, 3e-3, 1e-3])
    recorder.delta = lambda interval: next(chances)
    assert [account_delta(events, 1.0, "pld").delta for _ in range(2)] == [2e-3, 3e-3]


@pytest.mark.parametrize(
    ("coarse", "fine", "found"),
    [(2.0, 1.0, 2.0), (0.4, 0.1, 0.4), (0.39, 0.2, 0.2), (0.2, 0.3, 0.2), (0.0, 9.0, 0.0), (-1e-9, 9.0, 0.0)],
)
def test_a_finer_grid_is_asked_where_epsilon_is_small(
    recorder: Recorder, coarse: float, fine: float, found: float
) -> None:
    recorder.epsilon = lambda interval: coarse if interval > 5e-5 else fine
    assert account((GaussianSteps(FullBatch(100), 3.0),), 1e-5, "pld").epsilon == found
    assert recorder.intervals == ([1e-4, 1e-5] if 0.0 < coarse < 0.4 else [1e-4])


def test_large_losses_have_a_coarser_grid(recorder: Recorder) -> None:
    loud = (GaussianSteps(FullBatch(100), 0.05),)
    rough = quick_epsilon(pose(loud).upper[0], 1e-5)
    assert rough > 200.0
    account(loud, 1e-5, "pld")
    assert recorder.intervals == [pytest.approx(1e-4 * rough / 50.0)]
    del recorder.intervals[:]
    account((*loud, PrivateCalibration(9.0, disjoint=True)), 1e-5, "pld")  # of the louder part
    assert recorder.intervals == [pytest.approx(1e-4 * rough / 50.0)] * 2
    del recorder.intervals[:]
    account_delta(loud, 200.0, "pld")
    account_delta(loud, 50.0, "pld")
    account_delta(loud, 1.0, "pld")
    assert recorder.intervals == pytest.approx([4e-4, 1e-4, 1e-4])


@pytest.mark.parametrize(("given", "found"), [(1e-3, 1e-3), (1e-9, 1e-8), (-1e-12, 1e-8), (1.0 + 1e-9, 1.0)])
def test_delta_is_given_from_one_in_a_hundred_million_on(recorder: Recorder, given: float, found: float) -> None:
    recorder.delta = lambda interval: given
    answer = account_delta((GaussianSteps(FullBatch(100), 3.0),), 1.0, "pld")
    assert (answer.delta, answer.kind, answer.accountant) == (found, "upper bound", "pld")


def test_limits(recorder: Recorder) -> None:
    event = GaussianSteps(FullBatch(100), 3.0)
    assert account((event,), 1e-8, "pld").epsilon == 2.0
    with pytest.raises(AccountingError, match="under-states epsilon below delta 1e-08"):
        account((event,), 0.99e-8, "pld")
    many = [GaussianSteps(FullBatch(100), 3.0 + k) for k in range(51)]
    assert account(many[:50], 1e-5, "pld").epsilon == 2.0
    with pytest.raises(AccountingError, match="more than 50 events"):
        account(many, 1e-5, "pld")
    long = GaussianSteps(Poisson(100, 10), 3.0, 10**6)
    assert account((long,), 1e-5, "pld").epsilon == 2.0
    with pytest.raises(AccountingError, match="more than 1,000,000 steps"):
        account((long.repeated(10**6 + 1),), 1e-5, "pld")
    with pytest.raises(AccountingError, match="more than 1,000,000 steps"):
        account((GaussianSteps(Poisson(100, 10), 9.0), long.repeated(10**6 + 1)), 1e-5, "pld")
    for free in (FullBatch(100), Poisson(100, 100), Shuffled(100, 10)):  # one Gaussian step, whatever their number
        assert account((GaussianSteps(free, 3.0, 10**7),), 1e-5, "pld").epsilon == 2.0


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (
            GaussianSteps(FixedSize(100, 10), 3.0),
            "no privacy loss distribution for fixed-size batches; ask exact or rdp",
        ),
        (ProjectedSteps(FullBatch(100), 3.0, 50), "for estimated norms; ask exact or rdp"),
        (
            GaussianSteps(Poisson(rate=0.1, batch_size=10, max_batch_size=14, largest=200), 3.0),
            "batches of a known number of records only; ask exact",
        ),
    ],
)
def test_what_has_no_distribution_is_refused(recorder: Recorder, event: Any, said: str) -> None:
    with pytest.raises(AccountingError, match=said):
        account((event,), 1e-5, "pld")
