"""From events to a question and from an answer to a guarantee: laws, limits, defaults, warnings and words."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clipwise import GaussianSteps, Guarantee, Ledger, privacy_panel
from clipwise._json import checksum
from clipwise.accounting import ACCOUNTANTS, PrivateStatistics, account, account_delta, privacy_curve, tight_mu
from clipwise.accounting import _problem as problem_module
from clipwise.accounting import accounts as accounts_module
from clipwise.accounting._numerics.gaussian import gaussian_delta, gaussian_epsilon, gaussian_mu
from clipwise.accounting._numerics.laws import Composition, fixed_size, gaussian, poisson, truncated_poisson
from clipwise.accounting._numerics.shuffle import ShuffledRun
from clipwise.accounting._problem import pose
from clipwise.accounting._schemes import Unsampled, scheme_of, uses
from clipwise.accounting._vacuous import least_epsilon, refuse_vacuous
from clipwise.accounting.accountants import exact as exact_module
from clipwise.accounting.accountants.definition import approximation, upper_bound
from clipwise.accounting.events import FederatedRounds, PrivateCalibration, ProjectedSteps, decode, encode
from clipwise.accounting.guarantee import default_delta, round_up
from clipwise.errors import AccountingError, InvalidPlan, LedgerError, NotConverged
from clipwise.sampling import FixedSize, FullBatch, Poisson, Shuffled

# Questions -------------------------------------------------------------------------------------------------------


def test_the_ends_of_delta_and_of_groups() -> None:
    events = (GaussianSteps(FullBatch(100), 2.0),)
    assert account(events, 1e-20).epsilon == pytest.approx(gaussian_epsilon(0.5, 1e-20), rel=1e-9)
    for delta in (0.0, 1.0):
        with pytest.raises(AccountingError, match="between 0 and 1, both excluded"):
            account(events, delta)
    assert account_delta(events, 0.0).delta == pytest.approx(gaussian_delta(0.5, 0.0), rel=1e-12)
    assert pose(events, group=1_000).group == 1_000
    for group in (0, 1_001, 1.0, True):
        with pytest.raises(AccountingError, match="group must be an integer from 1 to 1000"):
            pose(events, group=group)  # type: ignore[arg-type]


def test_noise_of_a_hundredth_counts_and_less_does_not() -> None:
    assert pose((GaussianSteps(FullBatch(100), 0.01),)).private
    for events in (
        (GaussianSteps(FullBatch(100), 0.00999),),
        (GaussianSteps(FullBatch(100), 1.0), PrivateCalibration(0.0)),
    ):
        posed = pose(events)
        assert not posed.private and posed.upper == () and posed.lower is None


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("relation", "reach"), [(None, 1.0), ("zero_out", 1.0), ("replace_one", 2.0)])
def test_the_laws_of_every_sampling(relation: Any, reach: float, group: int) -> None:
    mu, replaced = 0.5, relation == "replace_one"
    plain = [(gaussian(group * reach * mu), 10)]
    sampled = [(poisson(0.1, mu, replaced, group), 10)]
    rows: list[tuple[Any, Any]] = [
        (FullBatch(100), plain),
        (Poisson(100, 10), sampled),
        (Poisson(rate=0.1, batch_size=10), sampled),
    ]
    for sampling, laws in rows:
        (found, *turned) = pose((GaussianSteps(sampling, 2.0, 10),), relation, group).upper
        assert found == Composition.of(laws)
        assert turned == ([found.reversed()] if found.terms and not replaced else [])
    (found,) = pose((PrivateStatistics(2.0, 10),), relation, group).upper
    assert found == Composition.of(plain)


def test_laws_of_samplings_for_one_record_only() -> None:
    def laws(sampling: Any, steps: int = 10, relation: Any = None) -> tuple[Composition, ...]:
        return pose((GaussianSteps(sampling, 2.0, steps),), relation).upper

    cut = truncated_poisson(100, 0.1, 14, 0.5, replace=False)
    assert laws(Poisson(100, 10, 14)) == (Composition.of([(cut, 10)]), Composition.of([(cut, 10)]).reversed())
    assert laws(FixedSize(100, 10)) == (Composition.of([(fixed_size(0.1, 0.5), 10)]),)
    assert laws(FixedSize(100, 100)) == (Composition.of([(gaussian(1.0), 10)]),)
    posed = pose((GaussianSteps(FixedSize(100, 10), 2.0, 10),))
    assert posed.lower is not None and posed.lower[0] == Composition.of([(poisson(0.1, 1.0, replace=False), 10)])
    assert posed.relation == "replace_one" and not posed.tight
    whole = pose((GaussianSteps(FixedSize(100, 100), 2.0, 10),))
    assert whole.lower == whole.upper
    # Ten batches an epoch: 25 steps meet a record three times at most.
    assert laws(Shuffled(100, 10), 25) == (Composition.of([(gaussian(0.5), 3)]),)
    assert laws(Shuffled(100, 10), 25, "replace_one") == (Composition.of([(gaussian(1.0), 3)]),)


@pytest.mark.parametrize("sampling", [Shuffled(100, 10), FixedSize(100, 10), Poisson(100, 10, 14)])
def test_a_group_is_refused_above_and_below(sampling: Any) -> None:
    steps = Unsampled(1.0, 10, replace=False, group=2, first=True)
    with pytest.raises(AccountingError, match="Group privacy is not available"):
        scheme_of(sampling).upper(sampling, steps)
    with pytest.raises(AccountingError, match="Group privacy is not available"):
        scheme_of(sampling).lower(sampling, steps)


@pytest.mark.parametrize("records", [10, 11, 19])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 6, 7, 11])
def test_uses_of_a_record_by_brute_force(records: int, steps: int) -> None:
    """Five batches of two an epoch, wherever a record stands in it; a later event may begin at any batch."""
    sampling, batches = Shuffled(records, 2), records // 2

    def most(begin: int) -> int:
        """The largest number of epochs that the steps begin..begin+steps-1 touch."""
        return (begin + steps - 1) // batches - begin // batches + 1

    assert uses(sampling, steps, first=True) == most(0)
    assert uses(sampling, steps, first=False) == max(most(begin) for begin in range(batches))


def test_whole_epochs_of_shuffled_batches_prove_a_lower_end() -> None:
    sampling = Shuffled(100, 10)
    first = [pose((GaussianSteps(sampling, 2.0, n),)).shuffled for n in (9, 10, 19, 20)]
    assert first == [(), (ShuffledRun(0.5, 10, 1),), (ShuffledRun(0.5, 10, 1),), (ShuffledRun(0.5, 10, 2),)]
    before = GaussianSteps(sampling, 9.0, 3)
    later = [pose((before, GaussianSteps(sampling, 2.0, n))).shuffled for n in (18, 19, 28, 29)]
    assert later == [(), (ShuffledRun(0.5, 10, 1),), (ShuffledRun(0.5, 10, 1),), (ShuffledRun(0.5, 10, 2),)]


def test_what_is_disjoint_is_composed_apart() -> None:
    steps, apart = GaussianSteps(FullBatch(100), 2.0, 4), PrivateCalibration(4.0, 2, disjoint=True)
    beside = PrivateCalibration(4.0, 2)
    assert pose((steps, apart)).upper == (Composition(1.0, ()), Composition(2 / 16, ()))
    assert pose((steps, beside)).upper == (Composition(1.0 + 2 / 16, ()),)
    assert pose((steps, apart), group=2).upper == (Composition(4.0 + 8 / 16, ()),)
    assert pose((apart,)).upper == (Composition(2 / 16, ()),)
    # Whichever is worse, in every accountant.
    for name in ("exact", "rdp", "gdp", "edgeworth"):
        both = [account((first, second), 1e-5, name).epsilon for first, second in ((steps, apart), (apart, steps))]
        assert both[0] == both[1] == account((steps,), 1e-5, name).epsilon
        assert account_delta((steps, apart), 1.0, name).delta == account_delta((steps,), 1.0, name).delta


def test_the_largest_over_directions_is_the_answer() -> None:
    def by_size(composition: Composition, given: float) -> float:
        return composition.gaussian

    posed = pose((GaussianSteps(FullBatch(100), 2.0, 4), PrivateCalibration(4.0, 2, disjoint=True)))
    for one in (upper_bound("some", by_size, by_size), approximation("some", by_size, by_size)):
        assert one.epsilon(posed, 1e-5).value == one.delta(posed, 1.0).value == 1.0
        assert one.epsilon(posed, 1e-5).accountant == "some" and not one.slow
    kinds = {
        "numerically exact": (GaussianSteps(FullBatch(100), 2.0),),
        "upper bound": (GaussianSteps(Shuffled(100, 10), 2.0),),
        "approximation": (GaussianSteps(Poisson(100, 10), 2.0),),
    }
    for kind, events in kinds.items():
        assert approximation("some", by_size, by_size).epsilon(pose(events), 1e-5).kind == kind
        assert upper_bound("some", by_size, by_size).epsilon(pose(events), 1e-5).kind == "upper bound"
    with pytest.raises(AccountingError, match="some has no formula for fixed-size batches"):
        approximation("some", by_size, by_size).epsilon(pose((GaussianSteps(FixedSize(100, 10), 2.0),)), 1e-5)


# The exact accountant's ways -------------------------------------------------------------------------------------


def ways(**found: Any) -> Any:
    """Ways to an answer: numbers, or None where one does not converge. What was asked is written down."""
    asked: list[str] = []

    def way(name: str) -> Any:
        def ask(composition: Composition, given: float, attempts: Any = None) -> float:
            label = name if attempts is None else f"{name} {'easy' if len(attempts) == 1 else 'hard'}"
            asked.append(label)
            value = found.get(label.replace(" ", "_"))
            if isinstance(value, dict):
                value = value[composition.gaussian]
            if value is None:
                raise NotConverged(label)
            return float(value)

        return ask

    return exact_module._Ways(*(way(name) for name in ("exact", "grid", "rough", "quick", "rdp"))), asked


@pytest.mark.parametrize(
    ("found", "value", "source", "asked"),
    [
        ({"exact_easy": 1.0}, 1.0, "exact", ["exact easy"]),
        ({"exact_hard": 1.0}, 1.0, "exact", ["exact easy", "exact hard"]),
        ({"rdp": 3.0, "quick": 2.5, "grid": 2.0}, 2.0, "grid", ["exact easy", "exact hard", "rdp", "quick", "grid"]),
        ({"rdp": 3.0, "quick": 2.5}, 2.5, "rdp", ["exact easy", "exact hard", "rdp", "quick", "grid"]),
        ({"rdp": 2.0, "quick": 2.5, "grid": 4.0}, 2.0, "rdp", ["exact easy", "exact hard", "rdp", "quick", "grid"]),
    ],
)
def test_a_bound_stands_in_where_no_contour_converges(
    found: dict[str, float], value: float, source: str, asked: list[str]
) -> None:
    to, seen = ways(**found)
    posed = pose((GaussianSteps(FullBatch(100), 1.0),))
    answer = exact_module._answer(to, posed, 1e-5)
    assert (answer.value, answer.accountant, seen) == (value, source, asked)
    assert answer.kind == ("numerically exact" if source == "exact" else "upper bound")
    words = {"grid": "privacy losses on a grid", "rdp": "Renyi divergences"}
    assert [words[source] in note for note in answer.warnings] == ([True] if source in words else [])
    loose = exact_module._answer(ways(**found)[0], replace(posed, tight=False), 1e-5)
    assert loose.kind == "upper bound"


def test_estimated_norms_are_never_exact_and_do_not_try_hard() -> None:
    posed = replace(pose((GaussianSteps(FullBatch(100), 1.0),)), estimated=True)
    assert exact_module._answer(ways(exact_easy=1.0)[0], posed, 1e-5).kind == "upper bound"
    to, seen = ways(grid=2.0, exact_hard=1.0)
    assert exact_module._answer(to, posed, 1e-5).value == 2.0 and seen == ["exact easy", "grid"]
    to, seen = ways(exact_hard=1.0)
    assert exact_module._answer(to, posed, 1e-5).value == 1.0 and seen == ["exact easy", "grid", "exact hard"]


@pytest.mark.parametrize(
    ("found", "value", "source", "asked"),
    [
        ({"quick": 0.4}, 0.5, "exact", ["exact easy", "quick"]),  # it cannot matter
        ({"quick": 0.5}, 0.5, "exact", ["exact easy", "quick"]),
        ({"quick": 1.5, "rough": 0.4}, 0.5, "exact", ["exact easy", "quick", "exact easy", "rough"]),
        ({"quick": 1.5, "rough": 1.2, "exact_hard": 1.1}, 1.1, "exact",
         ["exact easy", "quick", "exact easy", "rough", "exact hard"]),
        ({"quick": 1.5, "exact_hard": 0.4}, 0.5, "exact", ["exact easy", "quick", "exact easy", "rough", "exact hard"]),
        ({"quick": 1.5, "rdp": 1.4}, 1.4, "rdp",
         ["exact easy", "quick", "exact easy", "rough", "exact hard", "rdp", "quick", "grid"]),
    ],
)  # fmt: skip
def test_a_second_direction_counts_if_it_is_worse(
    found: dict[str, float], value: float, source: str, asked: list[str]
) -> None:
    """Of two compositions the first has an exact answer, a half."""
    posed = replace(pose((GaussianSteps(FullBatch(100), 1.0),)), upper=(Composition(1.0, ()), Composition(2.0, ())))
    to, seen = ways(exact_easy={1.0: 0.5, 2.0: None}, **found)
    answer = exact_module._answer(to, posed, 1e-5)
    assert (answer.value, answer.accountant, seen) == (value, source, asked)
    to, _ = ways(exact_easy={1.0: 0.5, 2.0: 5.0}, quick=9.0)
    assert exact_module._answer(to, posed, 1e-5).value == 5.0


# Many noises -----------------------------------------------------------------------------------------------------


def steps_of(noises: Any, **how: Any) -> tuple[GaussianSteps, ...]:
    return tuple(GaussianSteps(Poisson(600, 60), noise, 2, **how) for noise in noises)


def test_a_thousand_noises_are_kept_and_one_more_is_not() -> None:
    thousand = steps_of(1.0 + 1e-3 * k for k in range(1_000))
    assert pose(thousand).events == thousand and pose(thousand).tight
    more = steps_of(1.0 + 1e-3 * k for k in range(1_001))
    grouped = pose(more)
    assert len(grouped.events) <= 1_000 and sum(e.count for e in grouped.events) == 2_002
    assert not grouped.tight and "1,001 different events" in grouped.warnings[-1] and grouped.lower is None


def test_groups_of_noises_count_with_their_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem_module, "_MOST_NOISES", 4)
    counts = {1.0: 3, 1.05: 1, 2.0: 5, 4.0: 2, 15.0: 7, 16.0: 1}
    found = problem_module._in_groups(counts)
    # Edges at 1, 2, 4 and 8, the noises' logarithms being what is close.
    assert found == {1.0: 4, 2.0: 5, 4.0: 2, 15.0: 8}
    four = {1.0: 3, 1.05: 5, 4.0: 2, 15.0: 7}
    assert problem_module._in_groups(four) == four
    kept = [PrivateCalibration(3.0), GaussianSteps(FullBatch(600), 9.0), GaussianSteps(Poisson(600, 60), 0.0)]
    posed = pose((*steps_of(counts), *kept, *steps_of([2.0], reason="later")))
    assert [event for event in posed.events if event in kept] == kept
    sampled = {e.noise_multiplier: e.count for e in posed.events if e not in kept}
    assert sampled == {1.0: 4, 2.0: 4, 4.0: 2, 15.0: 4}
    other = (*steps_of([1.0, 1.1, 1.2]), *(GaussianSteps(Poisson(600, 30), noise) for noise in (1.0, 1.1, 1.2)))
    assert pose(other).events == other  # of either kind three: nothing to group


# Words and warnings ----------------------------------------------------------------------------------------------


def test_schemes_are_described_and_long_lists_are_cut_short() -> None:
    def words(*samplings: Any) -> str:
        return pose([GaussianSteps(sampling, 2.0) for sampling in samplings]).sampling

    assert pose(()).sampling == "no release at all"
    assert words(Poisson(100, 10)) == "Poisson sampling at rate 0.1"
    assert words(Poisson(100, 10), Poisson(100, 10), FullBatch(9)) == (
        "Poisson sampling at rate 0.1 and every record in every step"
    )
    three = [Poisson(100, 10 + k) for k in range(3)]
    assert words(*three).count("Poisson") == 3 and "more such" not in words(*three)
    assert words(*three, FullBatch(9)) == (
        "Poisson sampling at rate 0.1 and Poisson sampling at rate 0.11 and 2 more such schemes"
    )
    cut = Poisson(rate=0.1, batch_size=10, max_batch_size=20, largest=200)
    assert words(cut) == "Poisson sampling at the public rate 0.1, batches cut at 20 of at most 200 records"
    own = pose((GaussianSteps(FullBatch(9), 2.0, own_batches=True),))
    assert own.sampling == "every record in every step, in batches that the caller drew"
    assert "declared and not checked" in own.warnings[-1]
    assert pose((PrivateCalibration(2.0),)).sampling == "statistics over all records"


def test_warnings_name_what_an_answer_rests_on() -> None:
    projected = [ProjectedSteps(Poisson(100, 10), 2.0, projections=k, steps=3) for k in (90, 40, 70)]
    assert any("estimated from 40 random projections" in note for note in pose(projected).warnings)
    assert pose(projected).estimated and pose(projected).lost > 0.0
    assert (
        not pose((GaussianSteps(FullBatch(9), 2.0),)).estimated
        and pose((GaussianSteps(FullBatch(9), 2.0),)).lost == 0.0
    )
    changed = GaussianSteps(FullBatch(9), 2.0, reason="training, changed data")
    assert any("Records were changed" in note for note in pose((changed,)).warnings)
    assert pose((GaussianSteps(FullBatch(9), 2.0),)).warnings == ()


@pytest.mark.parametrize(("delta", "over"), [(0.01, False), (0.0101, True)])
def test_a_delta_over_one_by_the_number_of_records_is_warned_of(delta: float, over: bool) -> None:
    found = account((GaussianSteps(FullBatch(100), 2.0),), delta).warnings
    assert any("over 1/100:" in note for note in found) == over


def test_an_epsilon_over_fifty_is_warned_of_once() -> None:
    noise = 1.0 / gaussian_mu(50.0, 1e-5)
    below, above = (account((GaussianSteps(FullBatch(10**5), share * noise),), 1e-5) for share in (1.001, 0.999))
    assert below.epsilon < 50.0 < above.epsilon < 51.0
    assert below.warnings == () and above.warnings == ("epsilon over 50 promises next to nothing.",)
    assert account_delta((GaussianSteps(FullBatch(10**6), 1.0),), 50.0).warnings == ()
    assert len(account_delta((GaussianSteps(FullBatch(10**6), 1.0),), 50.1).warnings) == 1
    nothing = account((GaussianSteps(FullBatch(100), 0.0),), 1e-5)
    assert len(nothing.warnings) == 1 and "nothing is private" in nothing.warnings[0]


def test_what_is_lost_to_estimates_hardly_counts_in_delta() -> None:
    event = ProjectedSteps(FullBatch(1_000), 10.0, projections=100, steps=20)
    for epsilon in (2.4, 2.5, 2.7):
        found = account_delta((event,), epsilon).delta
        finer = pose((event,), None, 1, 1e-6 * found)
        true = ACCOUNTANTS["exact"].delta(finer, epsilon).value + finer.lost
        assert 1e-11 < found < 1e-7
        assert found == pytest.approx(true, rel=1.5e-3)  # two upper bounds


def test_defaults_are_one_record_and_ten_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts_module, "ACCOUNTANTS", {name: ACCOUNTANTS[name] for name in ("exact", "rdp")})
    events = (GaussianSteps(FullBatch(1_000), 2.0, 4),)
    single = gaussian_epsilon(1.0, 1e-5)
    assert account(events, 1e-5).epsilon == Ledger(events).guarantee(1e-5).epsilon == single
    assert account(events, 1e-5).group == 1 and account_delta(events, 1.0).group == 1
    assert account_delta(events, 1.0).delta == gaussian_delta(1.0, 1.0)
    assert {name: found.group for name, found in privacy_panel(events, 1e-5).items()} == {"exact": 1, "rdp": 1}
    assert {found.group for found in privacy_panel(events, 1e-5, group=3).values()} == {3}
    assert privacy_curve(events, count=5).min_delta == 1e-10
    assert privacy_curve(events, count=5).epsilon[-1] == pytest.approx(gaussian_epsilon(1.0, 1e-10), rel=1e-9)
    one = (GaussianSteps(Poisson(100, 10), 1.0),)
    assert tight_mu(one) == privacy_curve(one).mu != privacy_curve(one, min_delta=1e-9).mu


def test_a_guarantee_as_a_table_and_a_sentence() -> None:
    found = Guarantee(1.23401, 1e-5, "upper bound", "exact", "zero_out", "shuffled batches", lower=0.98765)
    assert "<td" in found._repr_html_() and "1.235 (at least 0.987)" in found._repr_html_()
    assert "The true value is at least 0.987." in found.statement()
    alone = replace(found, lower=None)
    assert "1.235<" in alone._repr_html_() and "at least" not in alone._repr_html_() + alone.statement()
    assert (found.group, found.seconds, found.unit, found.warnings) == (1, 0.0, "example", ())
    assert replace(found, lower=0.0).statement().endswith("at least 0.000.")
    assert round_up(1.0) == 1.0 and round_up(1.00001) == 1.001 and round_up(0.12345, 4) == 0.1235
    assert [default_delta(n) for n in (9, 10, 99_999, 100_000)] == [0.1, 0.01, 1e-5, 1e-6]


# Settings that protect nobody ------------------------------------------------------------------------------------


def test_settings_that_protect_nobody_are_refused_with_the_number() -> None:
    for size in (100, 10):
        good = GaussianSteps(FullBatch(size), 5.0)
        refuse_vacuous([good], "This", "Do that.")
    little = GaussianSteps(FullBatch(1_000), 0.01)
    with pytest.raises(
        InvalidPlan, match=r"This: epsilon is at least 5\d\d\d at delta 0.001, and over 50 .* Do that\."
    ):
        refuse_vacuous([little], "This", "Do that.")
    with pytest.raises(InvalidPlan, match=r"epsilon is infinite at delta 0\.1"):
        refuse_vacuous([FederatedRounds(FullBatch(10), 0.0)], "This", "Do that.")
    # Of the smallest number of records; where the bound from below says little, the accountant decides.
    several = [GaussianSteps(FullBatch(n), 1.0, 40) for n in (1_000, 10)]
    truth = account(several, 0.1).epsilon
    assert truth > 50.0 > max(least_epsilon(event, 0.1) for event in several)
    with pytest.raises(InvalidPlan, match=rf"This: epsilon is {truth:.4g} at delta 0.1, and"):
        refuse_vacuous(several, "This", "Do that.")
    refuse_vacuous([GaussianSteps(FullBatch(1), 1.0)], "This", "Do that.")  # delta is a half at most


@pytest.mark.parametrize("noise", [0.05, 0.3, 1.0])
@pytest.mark.parametrize(("sampling", "steps"), [(FullBatch(100), 1), (Poisson(100, 10), 5), (Poisson(100, 50), 1)])
def test_a_bound_from_below_is_one(sampling: Any, steps: int, noise: float) -> None:
    event = GaussianSteps(sampling, noise, steps)
    for delta in (1e-6, 0.01):
        least, most = least_epsilon(event, delta), account((event,), delta).epsilon
        assert 0.0 <= least <= most
        if noise == 0.05 and delta == 0.01:
            assert least > 0.5 * most or steps > 1


# Events and ledgers ----------------------------------------------------------------------------------------------


def test_defaults_of_events() -> None:
    assert GaussianSteps(FullBatch(9), 1.0) == GaussianSteps(FullBatch(9), 1.0, 1, "training", False)
    assert ProjectedSteps(FullBatch(9), 1.0, 5) == ProjectedSteps(FullBatch(9), 1.0, 5, 1, "training", False)
    assert FederatedRounds(FullBatch(9), 1.0) == FederatedRounds(FullBatch(9), 1.0, 1, "federated")
    assert PrivateCalibration(1.0) == PrivateCalibration(1.0, 1, False, "calibration")
    assert PrivateStatistics(1.0) == PrivateStatistics(1.0, 1, "statistics")
    kinds = [GaussianSteps, ProjectedSteps, FederatedRounds, PrivateCalibration, PrivateStatistics]
    assert [kind.trains for kind in kinds] == [True, True, True, False, False]
    assert not PrivateStatistics(1.0).disjoint and not PrivateStatistics(1.0).own_batches
    assert not FederatedRounds(FullBatch(9), 1.0).own_batches


@pytest.mark.parametrize("noise", [-1.0, math.nan])
def test_estimated_norms_are_checked_like_all_events(noise: float) -> None:
    with pytest.raises(AccountingError, match="noise_multiplier"):
        ProjectedSteps(FullBatch(9), noise, 5)
    with pytest.raises(AccountingError, match="projections must be a positive integer"):
        ProjectedSteps(FullBatch(9), 1.0, 0)


def test_a_trillion_is_the_most_of_everything() -> None:
    most = 10**12
    for made in (
        lambda n: GaussianSteps(FullBatch(9), 1.0, n),
        lambda n: GaussianSteps(FullBatch(n), 1.0),
        lambda n: GaussianSteps(Poisson(n, 1), 1.0),
        lambda n: GaussianSteps(Poisson(rate=0.1, batch_size=1, max_batch_size=1, largest=n), 1.0),
    ):
        made(most)
        with pytest.raises(AccountingError, match=r"at most 1e\+12"):
            made(most + 1)


def test_what_is_no_event_is_not_written() -> None:
    class Mine(GaussianSteps):
        """Derived elsewhere: what it means is not known here."""

    for wrong in (Mine(FullBatch(9), 1.0), "a step", None):
        with pytest.raises(LedgerError, match="Only events can go on a ledger"):
            encode(wrong)  # type: ignore[arg-type]
    record = encode(GaussianSteps(FullBatch(9), 1.0))
    with pytest.raises(LedgerError, match=r"^Unknown sampling scheme 'lottery'; known are poisson, full_batch"):
        decode({**record, "sampling": {"kind": "lottery"}})
    with pytest.raises(LedgerError, match="An event must be a JSON object, got 5"):
        decode(5)  # type: ignore[arg-type]
    with pytest.raises(LedgerError, match="has the fields"):
        decode({**record, "colour": 1})
    with pytest.raises(LedgerError, match="makes no sense"):
        decode({**record, "sampling": {"kind": "full_batch", "sample_size": 0}})


def test_versions_of_ledgers() -> None:
    body = json.loads(Ledger([GaussianSteps(FullBatch(9), 1.0)]).to_json())
    assert body["version"] == 2
    for version, said in (
        (0, "expected a positive integer"),
        ("2", "expected a positive integer"),
        (3, "reads up to 2"),
    ):
        other = {**{k: v for k, v in body.items() if k != "checksum"}, "version": version}
        with pytest.raises(LedgerError, match=said):
            Ledger.from_dict({**other, "checksum": checksum(other)})


def test_an_earlier_state_of_a_run_does_not_overwrite_a_later_one(tmp_path: Path) -> None:
    ledger = Ledger([GaussianSteps(FullBatch(9), 1.0, 5)])
    early = ledger.kept()
    ledger.record(PrivateCalibration(2.0))
    more = ledger.kept()
    ledger.save(tmp_path / "ledger.json")
    with pytest.raises(LedgerError, match="forget"):
        early.save(tmp_path / "ledger.json")
    more.save(tmp_path / "ledger.json")
    ledger.record(PrivateCalibration(2.0))
    ledger.save(tmp_path / "ledger.json")
    with pytest.raises(LedgerError, match="forget"):
        more.save(tmp_path / "ledger.json")
    assert Ledger.load(tmp_path / "ledger.json").events[-1].count == 2
