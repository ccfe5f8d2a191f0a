"""The contour integral: what it answers, what it costs, and every check that stands between it and an answer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from clipwise.accounting._numerics import contour
from clipwise.accounting._numerics.contour import EASY, HARD, Attempt, exact_delta, exact_epsilon
from clipwise.accounting._numerics.gaussian import gaussian_delta, gaussian_epsilon
from clipwise.accounting._numerics.lattice import points, points_cut
from clipwise.accounting._numerics.laws import Composition, fixed_size, gaussian, poisson, truncated_poisson
from clipwise.accounting._numerics.moments import large_share
from clipwise.accounting._numerics.saddle import abscissa, first_guess, saddle_table, tail_share
from clipwise.accounting._numerics.single import single_delta, single_epsilon
from clipwise.errors import NotConverged

from .common import run
from .oracles import Step, bracket

MNIST = run(1.1, 256 / 60_000, 14_040)

ANSWERS: dict[str, tuple[Composition, float, float, tuple[float, ...]]] = {
    "mnist": (MNIST, 1e-5, 2.3795545188, (31e3, 69e3, 27e3)),
    "added": (MNIST.reversed(), 1e-5, 2.2415472524, (8e3, 0, 7e3)),
    "cifar": (run(1.3, 0.02, 750), 1e-5, 2.1047015129, (29e3, 69e3, 26e3)),
    "snli": (run(0.4, 32 / 550_152, 51_576), 1 / 550_152, 5.1306818966, (1.6e6, 2.8e6, 1.5e6)),
    "half": (run(4.0, 0.5, 40), 1e-6, 3.9433103858, (4.4e3, 11e3, 3.9e3)),
    "nearly all": (run(2.0, 0.999, 30), 1e-8, 18.5589492334, (4.4e3, 7.8e3, 3.9e3)),
    "few": (run(0.8, 0.2, 5), 1e-5, 5.8175632625, (2.2e6, 0.8e6, 2.0e6)),
    "three": (run(1.0, 0.3, 3), 1e-3, 2.5813237901, (0.76e6, 0.86e6, 0.68e6)),
    "many": (run(50.0, 256 / 60_000, 10**8), 1e-5, 3.6468216643, (3.9e3, 0, 3.6e3)),
    "a tiny delta": (run(2.0, 0.01, 1_500), 1e-15, 1.6553534717, (42e3, 68e3, 36e3)),
    "rare": (run(0.6, 1e-3, 2_000), 1e-6, 2.3549138895, (0.61e6, 1.2e6, 0.55e6)),
    "replaced": (Composition.of([(poisson(0.02, 1 / 1.3, True), 750)]), 1e-5, 3.6925197732, (15e3, 35e3, 13e3)),
    "fixed size": (Composition.of([(fixed_size(0.02, 1 / 1.3), 750)]), 1e-5, 11.2766651636, (46e3, 181e3, 41e3)),
    "cut": (
        Composition.of([(truncated_poisson(60_000, 256 / 60_000, 300, 1 / 1.1, False), 14_040)]),
        1e-5, 3.4568971582, (179e3, 570e3, 159e3),
    ),
    "a group": (
        Composition.of([(poisson(256 / 60_000, 1 / 1.1, False, 50), 14_040)]), 1e-5, 515.6604145530, (7e3, 16e3, 7e3),
    ),
    "with plain steps": (
        Composition.of([(gaussian(0.1), 50), (poisson(0.05, 0.7, False), 100)]), 1e-6, 3.9498864165, (14e3, 0, 12e3),
    ),
    "a schedule": (
        Composition.of([(poisson(0.01, 1.0, False), 500), (poisson(0.02, 0.8, False), 300)]),
        1e-5, 1.9148972514, (86e3, 219e3, 75e3),
    ),
    "much noise": (run(100.0, 0.01, 1_000), 1e-6, 0.0096648043189, (4e3, 8.1e3, 3.6e3)),
    "near zero": (run(3.0, 0.01, 400), 0.0082, 0.0567245384497, (25e3, 57e3, 19e3)),
    "little noise": (run(0.3, 0.01, 100), 1e-5, 26.8347144897, (0, 1.5e6, 0)),
}  # fmt: skip
"""Runs with delta, epsilon, and the work (points times nodes) of each attempt; 0 where it does not converge.

The values of the three attempts agree; several are published, or bracketed by oracles in other tests.
"""


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The work of all contours, so far."""
    works, real = [], contour._Budget.spend

    def spend(self: Any, work: int) -> None:
        works.append(work)
        real(self, work)

    monkeypatch.setattr(contour._Budget, "spend", spend)
    return works


@pytest.mark.parametrize("attempt", [0, 1, 2], ids=["easy", "split", "last"])
@pytest.mark.parametrize("name", ANSWERS)
def test_every_attempt_gives_the_same_digits_for_the_work_that_it_is_worth(
    name: str, attempt: int, spent: list[int]
) -> None:
    composition, delta, truth, works = ANSWERS[name]
    how = (contour._ATTEMPTS[attempt],)
    if not works[attempt]:
        with pytest.raises(NotConverged):
            exact_epsilon(composition, delta, how)
        return
    # What is faded out makes an answer larger, by its share of delta and no more.
    tail = (1e-12, 1e-10, 1e-7)[attempt]
    more = 10.0 * tail
    found = exact_epsilon(composition, delta, how)
    assert truth * (1 - 1e-10) <= found <= truth * (1 + 1e-10 + more)
    assert sum(spent) <= 1.02 * works[attempt]
    del spent[:]
    back = exact_delta(composition, truth, how)
    assert back == pytest.approx(delta, rel=3e-9 + 30.0 * more)
    assert sum(spent) <= 1.7 * works[attempt]


def test_attempts_are_made_in_turn(spent: list[int]) -> None:
    composition, delta, truth, _ = ANSWERS["little noise"]
    with pytest.raises(NotConverged, match="too many nodes"):
        exact_epsilon(composition, delta, EASY)
    assert exact_epsilon(composition, delta) == pytest.approx(truth, rel=1e-9)
    assert exact_epsilon(composition, delta, HARD) == pytest.approx(truth, rel=1e-9)
    assert (*EASY, *HARD) == contour._ATTEMPTS and len(EASY) == 1
    tried = []

    def answer(attempt: Attempt) -> float:
        tried.append(attempt)
        raise NotConverged("no")

    with pytest.raises(NotConverged, match="no"):
        contour._first_sound(answer, contour._ATTEMPTS)
    assert tried == list(contour._ATTEMPTS)
    assert contour._first_sound(lambda attempt: attempt.tail, HARD) == HARD[0].tail


def test_what_fails_fails_fast(spent: list[int]) -> None:
    for composition, delta in (
        (run(0.45, 1e-7, 30_000), 1e-10),
        (run(1.0, 1e-3, 10), 1e-6),
        (run(0.5, 1e-4, 1_000), 1e-5),
    ):
        del spent[:]
        with pytest.raises(NotConverged, match="too many nodes"):
            exact_epsilon(composition, delta)
        assert sum(spent) < 0.9e6


def test_a_budget_is_spent_to_its_end_and_grows_with_the_pairs() -> None:
    budget = contour._Budget(10)
    budget.spend(4)
    budget.spend(6)
    assert budget.left == 0
    with pytest.raises(NotConverged, match="too many nodes"):
        budget.spend(1)
    cut = truncated_poisson(100, 0.1, 12, 1.0, False)
    composition = Composition.of([(cut, 5), (poisson(0.1, 1.0, False), 7)])
    assert Attempt(1e-9, split=False, work=1_000).budget(composition).left == 1_000 + 3 * 50_000


def test_short_cuts_are_the_closed_forms() -> None:
    assert exact_epsilon(Composition.of([]), 1e-5) == 0.0 == exact_delta(Composition.of([]), 1.0)
    plain = Composition.of([(gaussian(0.5), 4)])
    assert exact_epsilon(plain, 1e-5) == gaussian_epsilon(1.0, 1e-5) and exact_delta(plain, 1.0) == gaussian_delta(
        1.0, 1.0
    )
    one = poisson(0.1, 1.0, False)
    assert exact_epsilon(Composition.of([(one, 1)]), 1e-5) == single_epsilon(one, 1e-5)
    assert exact_delta(Composition.of([(one, 1)]), 1.0) == single_delta(one, 1.0)
    several = Composition.of([(gaussian(0.5), 4), (one, 3), (poisson(0.2, 0.5, True), 2)])
    apart = gaussian_delta(1.0, 0.0) + 3 * single_delta(one, 0.0) + 2 * single_delta(poisson(0.2, 0.5, True), 0.0)
    assert contour._total_variation(several) == pytest.approx(apart, rel=1e-12)
    assert exact_epsilon(several, apart * (1 + 1e-9)) == 0.0
    laws = [poisson(0.1 + 0.01 * k, 1.0, False) for k in range(4)]
    mixed = Composition.of([(law, 2) for law in laws])
    assert contour._one_step_delta(mixed, 1.0) == max(single_delta(law, 1.0) for law in laws)


# What lies between a contour and an answer -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "lost", "agree"),
    [
        (1e-5, 1e-5 * (1 + 0.9e-7), 0.0, True),
        (1e-5, 1e-5 * (1 - 0.9e-7), 0.0, True),
        (1e-5, 1e-5 * (1 + 1.1e-7), 0.0, False),
        (1e-5, 1e-5 * (1 - 1.1e-7), 0.0, False),
        (1e-5, 1e-5 * (1 + 1.1e-7), 2e-13, True),
        (-1e-5, -1e-5 * (1 + 0.9e-7), 0.0, True),
        (1e-5, math.nan, 1.0, False),
        (math.nan, 1e-5, 1.0, False),
    ],
)
def test_two_contours_agree_to_seven_digits(first: float, second: float, lost: float, agree: bool) -> None:
    if agree:
        contour._assert_agreement(first, second, lost)
    else:
        with pytest.raises(NotConverged, match="disagree"):
            contour._assert_agreement(first, second, lost)


def made(composition: Composition, delta: float, split: bool = False, epsilon: float | None = None, **how: Any) -> Any:
    """A contour as `exact_epsilon` makes its first one."""
    tail = tail_share(composition, 1e-12 * delta)
    saddle = saddle_table(composition, tail)
    guess = first_guess(composition, saddle, delta, tail) if epsilon is None else epsilon
    t = abscissa(saddle, guess, delta)
    budget = contour._Budget(10**9)
    return contour._Contour(composition, saddle, tail, t, guess, delta, split, budget, **how)


@pytest.mark.parametrize(
    ("what", "change", "share"),
    [("The contour is too short", "_rest", 1e-9), ("cancels too much", "_terms", 1e7), ("loss's tail", "lost", 1e-4)],
)
def test_a_contour_that_is_not_sound_is_no_answer(what: str, change: str, share: float) -> None:
    delta = 1e-5
    line = made(MNIST, delta)
    epsilon = line.solve(delta)
    line.assert_sound(epsilon, delta)

    def put(value: float) -> None:
        if change == "lost":
            line.lost = value
        elif change == "_rest":
            line._rest = lambda epsilon: value
        else:
            line._terms = lambda epsilon: np.array([-value / 2, value / 2]) / line._factor(epsilon)

    for value in (0.99 * share * delta, 0.0):
        put(value)
        line.assert_sound(epsilon, delta)
    for value in (1.01 * share * delta, math.nan, math.inf):
        put(value)
        with np.errstate(all="ignore"), pytest.raises(NotConverged, match=what):
            line.assert_sound(epsilon, delta)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", ["cifar", "cut", "with plain steps", "little noise", "snli"])
def test_the_integrand_is_that_of_the_theorem(name: str, split: bool) -> None:
    """exp(K(z)), over its size at t; without the runs whose every loss is small, of which it is taken out."""
    composition, delta, truth, works = ANSWERS[name]
    if not works[split]:
        pytest.skip("no such contour")
    line = made(composition, delta, split, epsilon=truth)
    z, t = line._z[:12], line._t
    assert np.all(z.real == t) and np.allclose(np.diff(line._z.imag), line._step) and line._z[0].imag == 0.0
    whole = calm = 0.5 * composition.gaussian * z * (z + 1)
    for law, count in composition.terms:
        grid = points(law, line._tail, t, float(line._z[-1].imag), window=line._window)
        whole = whole + count * np.log(np.exp(np.outer(z, grid.loss)) @ grid.weight)
        small = grid.weight * (1.0 - (large_share(grid, line._window) if split else 0.0))
        calm = calm + count * np.log(np.exp(np.outer(z, grid.loss)) @ small)
    expected = np.exp(whole - line._log_scale) - (np.exp(calm - line._log_scale) if split else 0.0)
    np.testing.assert_allclose(line._value[: len(z)], expected, rtol=1e-8, atol=1e-10 * abs(expected[0]))
    lost = sum(n * points(law, line._tail, t, 1.0, window=line._window).lost for law, n in composition.terms)
    assert line.lost == pytest.approx(lost, rel=0.05)
    terms = line._value * np.exp(-1j * truth * line._z.imag) / (line._z * (line._z + 1))
    scale = math.exp(line._log_scale - truth * t) * line._step / math.pi
    total = float(np.sum(terms[1:].real) + 0.5 * terms[0].real) * scale
    assert line.delta(truth) == pytest.approx(total + line.lost, rel=1e-12)
    assert line.delta(truth) == pytest.approx(delta, rel=1e-8)
    n = len(line._z)
    last = np.abs(line._value / (line._z * (line._z + 1)))[-max(4, n // 4) :]
    assert line._rest(truth) == pytest.approx(n * float(last.max()) * scale, rel=1e-12)
    assert line._rest(truth) <= 1.1e-10 * delta
    assert line._factor(-1e9) == pytest.approx(math.exp(700.0) * line._step / math.pi)


@pytest.mark.parametrize("guess", [0.3, 0.97, 1.0, 1.02, 1.6])
def test_the_root_is_found_from_any_guess(guess: float) -> None:
    line = made(run(2.0, 0.1, 200), 1e-4)
    truth = line.solve(1e-4)
    line._guess *= guess
    assert line.solve(1e-4) == pytest.approx(truth, rel=1e-10)
    assert line.delta(truth) == pytest.approx(1e-4, rel=1e-9)
    line._guess = 0.0
    assert line.solve(1e-4) == pytest.approx(truth, rel=1e-10)


def test_epsilon_zero_and_no_epsilon_at_all() -> None:
    line = made(run(2.0, 0.1, 200), 1e-4)
    line.delta = lambda epsilon: 0.9e-4 * math.exp(-epsilon)
    assert line.solve(1e-4) == 0.0
    line.delta = lambda epsilon: 2e-4 * math.exp(-epsilon)
    assert line.solve(1e-4) == pytest.approx(math.log(2.0), rel=1e-10)
    line.delta = lambda epsilon: 2e-4
    with pytest.raises(NotConverged, match="No epsilon reaches this delta"):
        line.solve(1e-4)
    line.delta = lambda epsilon: -1.0 if epsilon > 1.0 else 2e-4  # a sum that lost its sign is below every delta
    assert line.solve(1e-4) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(("share", "refused"), [(1 + 2e-6, True), (1 + 0.9e-6, False), (1 - 1e-3, False)])
def test_less_than_one_step_tells_is_no_answer(share: float, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the epsilon, one step alone has `share` of delta; anyone who sees all steps sees that one."""
    composition, delta = run(2.0, 0.5, 4), 1e-3
    law = composition.terms[0][0]
    epsilon = single_epsilon(law, share * delta)
    monkeypatch.setattr(contour._Contour, "assert_sound", lambda self, epsilon, delta: None)
    monkeypatch.setattr(contour._Contour, "solve", lambda self, delta: epsilon)
    monkeypatch.setattr(contour._Contour, "delta", lambda self, epsilon: delta)
    for ask in (lambda: exact_epsilon(composition, delta, EASY), lambda: exact_delta(composition, epsilon, EASY)):
        if refused:
            with pytest.raises(NotConverged, match="below that of one step"):
                ask()
        else:
            assert ask() in (epsilon, delta)


def test_every_answer_was_found_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, float, float]] = []

    def check(self: Any, epsilon: float, delta: float) -> None:
        seen.append((epsilon, delta, self.lost))

    monkeypatch.setattr(contour._Contour, "assert_sound", check)
    for attempt, tail in zip(contour._ATTEMPTS, (1e-12, 1e-10, 1e-7), strict=True):
        del seen[:]
        epsilon = exact_epsilon(run(1.3, 0.02, 750), 1e-5, (attempt,))
        delta = exact_delta(run(1.3, 0.02, 750), 2.0, (attempt,))
        assert [(at, size) for at, size, _ in seen] == [(epsilon, 1e-5), (2.0, delta)]
        assert all(0.0 < lost <= 12.0 * tail * size for _, size, lost in seen)
    del seen[:]
    assert exact_delta(run(1.3, 0.02, 750), 30.0, EASY) == 1e-18 and [size for _, size, _ in seen] == [1e-18]

    def refuse(self: Any, epsilon: float, delta: float) -> None:
        raise NotConverged("not sound")

    monkeypatch.setattr(contour._Contour, "assert_sound", refuse)
    with pytest.raises(NotConverged, match="not sound"):
        exact_epsilon(MNIST, 1e-5)
    with pytest.raises(NotConverged, match="not sound"):
        exact_delta(MNIST, 2.0)


def test_an_epsilon_above_the_renyi_bound_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    composition, delta = MNIST, 1e-5
    tail = tail_share(composition, EASY[0].tail * delta)
    bound = saddle_table(composition, tail).renyi_epsilon(math.log(delta))
    assert 2.38 < bound < 3.0
    monkeypatch.setattr(contour._Contour, "assert_sound", lambda self, epsilon, delta: None)
    monkeypatch.setattr(contour._Contour, "solve", lambda self, delta: bound * (1 + 0.9e-6))
    assert exact_epsilon(composition, delta, EASY) == pytest.approx(bound, rel=1e-5)
    monkeypatch.setattr(contour._Contour, "solve", lambda self, delta: bound * (1 + 1.1e-6))
    with pytest.raises(NotConverged, match="exceeds the Renyi bound"):
        exact_epsilon(composition, delta, EASY)


def test_delta_has_a_floor_and_a_top() -> None:
    composition = run(2.0, 0.05, 100)
    assert exact_delta(composition, 30.0) == 1e-18
    assert exact_delta(composition, 30.0, floor=1e-14) == 1e-14
    low, high = bracket([([(1.0, Step("remove", 0.05, 0.5))], 100)], 0.0)
    assert low <= exact_delta(composition, 0.0) <= high < 1.04 * low
    assert (
        exact_delta(run(0.5, 0.5, 200), 0.0) == pytest.approx(1.0, abs=1e-6)
        and exact_delta(run(0.5, 0.5, 200), 0.0) <= 1.0
    )
    # Far below what quick bounds say, its size is found in several rounds.
    for epsilon in (1.0, 2.0, 2.7):
        found = exact_delta(composition, epsilon)
        assert exact_epsilon(composition, found) == pytest.approx(epsilon, rel=1e-8)


@pytest.mark.parametrize("name", ["little noise", "few", "snli", "little noise and plain steps"])
def test_runs_without_a_large_loss_never_reach_epsilon(name: str) -> None:
    """Chernoff's bound of those runs, at the best exponent, is nothing beside delta; with a larger window it is not."""
    composition, delta, epsilon, _ = ANSWERS[name.partition(" and")[0]]
    if name not in ANSWERS:
        composition = Composition(1.0, composition.terms)
    tail = tail_share(composition, 1e-10 * delta)
    window = contour._window(composition, tail, epsilon, delta)
    shares = (1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
    (share,) = [s for s in shares if epsilon / s == window]

    def bound(window: float) -> float:
        found = math.inf
        for t in np.geomspace(0.1, 200.0, 150) / window:
            K = 0.5 * composition.gaussian * t * (t + 1.0)
            for law, count in composition.terms:
                grid = points_cut(law, tail)
                calm = np.log(np.maximum(grid.weight * (1.0 - large_share(grid, window)), 1e-300)) + t * grid.loss
                K += count * float(np.logaddexp.reduce(np.where(calm > t * grid.loss - 690.0, calm, -np.inf)))
            found = min(found, K - epsilon * t)
        return math.exp(found)

    assert bound(window) <= 1.0001e-12 * delta
    if share != shares[0]:
        assert bound(epsilon / shares[shares.index(share) - 1]) > 1e-14 * delta


def test_no_window_where_nothing_is_small_or_rare() -> None:
    with pytest.raises(NotConverged, match="against an epsilon of zero"):
        contour._window(MNIST, 1e-20, 0.0, 1e-5)
    with pytest.raises(NotConverged, match="both small against epsilon and rare"):
        contour._window(run(50.0, 0.5, 10**6), 1e-20, 30.0, 1e-5)
