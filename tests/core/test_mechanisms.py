"""The table of mechanisms: what each of them releases, allows, divides by and writes down."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from typing import Any

import pytest
import torch

import clipwise as cw
from clipwise import mechanisms
from clipwise.accounting import Event, FederatedRounds, PrivateCalibration, ProjectedSteps
from clipwise.mechanisms import Gaussian, Mechanism, ProjectedNorms, Rounds

POISSON, CUT = cw.Poisson(1_000, 50), cw.Poisson(1_000, 50, max_batch_size=80)
OTHERS = [cw.FullBatch(9), cw.Shuffled(9, 2), cw.FixedSize(9, 2), cw.BallsInBins(9, 2)]
SAMPLINGS = [POISSON, CUT, cw.Poisson(rate=0.05, batch_size=50), *OTHERS]
GROUPS = cw.Layerwise(cw.Abadi(1.0))
OWN_LAST = cw.MixUp(cw.Abadi(1.0), GROUPS, switch_at=0.5)


@dataclass(frozen=True)
class Row:
    """A mechanism, and what is expected of it."""

    mechanism: Mechanism
    event: type[Any]
    unit: str = "example"
    refused_samplings: tuple[Any, ...] = ()
    refused_clips: tuple[Any, ...] = ()
    denominator: float = 50
    wrong: tuple[dict[str, Any], ...] = ()
    """Arguments that make no sense."""


ROWS = [
    Row(Gaussian(), cw.GaussianSteps),
    Row(
        ProjectedNorms(60),
        ProjectedSteps,
        refused_samplings=(CUT, *SAMPLINGS[-2:]),
        refused_clips=(GROUPS, OWN_LAST, cw.Groupwise({"*": cw.Abadi(1.0)}), cw.AdaptiveClip(1.0)),
        wrong=({"projections": 0}, {"projections": 2.5}, {"projections": True}),
    ),
    Row(
        Rounds(weight_cap=3.0, total_weight=500.0),
        FederatedRounds,
        unit="client",
        refused_samplings=(CUT, *SAMPLINGS[-3:]),
        denominator=25.0,
        wrong=({"weight_cap": 0.0}, {"weight_cap": float("nan")}, {"total_weight": -1.0}, {"weight_cap": True}),
    ),
]
each = pytest.mark.parametrize("row", ROWS, ids=lambda row: type(row.mechanism).__name__)


def plan(row: Row, **changes: Any) -> cw.Plan:
    given = {"sampling": POISSON, "steps": 7, "clip": cw.Abadi(1.0), "noise_multiplier": 1.5, **changes}
    return cw.Plan(**given, mechanism=row.mechanism)


def test_every_mechanism_has_a_row() -> None:
    offered = {value for value in vars(mechanisms).values() if isinstance(value, type) and issubclass(value, Mechanism)}
    assert offered - {Mechanism} == {type(row.mechanism) for row in ROWS}
    assert {cls.__name__ for cls in offered} <= set(mechanisms.__all__)


@each
def test_it_is_a_frozen_value(row: Row) -> None:
    for f in fields(row.mechanism):  # type: ignore[arg-type]
        with pytest.raises(FrozenInstanceError):
            setattr(row.mechanism, f.name, 1)
    assert replace(row.mechanism) == row.mechanism and hash(replace(row.mechanism)) == hash(row.mechanism)  # type: ignore[type-var]
    for wrong in row.wrong:
        with pytest.raises(cw.InvalidPlan, match=next(iter(wrong))):
            type(row.mechanism)(**wrong)


@each
def test_its_event_says_sampling_noise_and_count(row: Row) -> None:
    event: Event = row.mechanism.event(POISSON, 1.5, 4)
    assert type(event) is row.event and event.count == 4 and event.noise_multiplier == 1.5
    assert event.sampling == POISSON  # type: ignore[union-attr]
    assert event.unit == row.mechanism.unit == row.unit


@each
def test_plan_and_ledger_agree(row: Row) -> None:
    p = plan(row)
    assert p.events == (row.mechanism.event(POISSON, 1.5, 7),)
    ledger = cw.Ledger()
    for step in range(7):
        ledger.record(p.event_at(step))
    assert ledger.events == p.events and ledger.epsilon(1e-4) == p.epsilon(1e-4)
    assert p.events_of(2, 5) == (row.mechanism.event(POISSON, 1.5, 3),)
    assert ledger.guarantee(1e-4).unit == row.unit


@each
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=repr)
def test_samplings_without_a_proof_are_refused(row: Row, sampling: Any) -> None:
    if sampling in row.refused_samplings:
        with pytest.raises((cw.InvalidPlan, cw.InvalidSampling)):
            plan(row, sampling=sampling)
    else:
        assert plan(row, sampling=sampling, noise_multiplier=30.0).epsilon(1e-4) > 0


@each
def test_clipping_without_a_proof_is_refused(row: Row) -> None:
    for clip in (cw.Abadi(1.0), GROUPS, OWN_LAST, cw.Groupwise({"*": cw.Abadi(1.0)}), cw.AdaptiveClip(1.0)):
        if clip in row.refused_clips:
            with pytest.raises(cw.InvalidPlan):
                plan(row, clip=clip)
        else:
            assert plan(row, clip=clip).is_private
    with pytest.raises(cw.InvalidPlan, match="does not bound"):
        plan(row, clip=cw.NoClip())


@each
def test_the_denominator_is_public(row: Row) -> None:
    assert plan(row).denominator == row.denominator


@each
def test_noise_is_found_for_a_target_and_what_is_charged_besides(row: Row) -> None:
    empty = plan(row, sampling=cw.FullBatch(1_000), noise_multiplier=None)
    found = empty.calibrate(2.0, 1e-4)
    assert 0.998 * 2.0 < found.epsilon(1e-4) <= 2.0 and found.mechanism == row.mechanism
    if row.unit == "example":
        besides = PrivateCalibration(8.0)
        with_it = empty.calibrate(2.0, 1e-4, fixed=(besides,))
        assert 0.998 * 2.0 < cw.Ledger([*with_it.events, besides]).epsilon(1e-4) <= 2.0
        assert with_it.noise_multiplier > found.noise_multiplier  # type: ignore[operator]
    with pytest.raises(TypeError):
        empty.calibrate(2.0, 1e-4, "rdp")  # type: ignore[misc]


@each
def test_a_plan_with_it_survives_json(row: Row) -> None:
    for p in (plan(row), plan(row, noise_multiplier=None)):
        record = json.loads(json.dumps(p.to_dict()))
        assert cw.Plan.from_dict(record) == p and cw.Plan.from_dict(record).to_dict() == p.to_dict()
    damaged = {**record, "mechanism": {"kind": type(row.mechanism).__name__, "more": 1}}
    with pytest.raises(cw.InvalidPlan, match="fields"):
        cw.Plan.from_dict(damaged)


@each
def test_only_its_own_runner_takes_it(row: Row) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    p = plan(row, noise_multiplier=30.0)
    runners = {
        "example": lambda: cw.Private(p, model, optimizer, loss_fn=lambda m, b: m(b)),
        "client": lambda: cw.federated.Server(p, model),
    }
    for unit, runner in runners.items():
        if unit == row.unit:
            assert runner().ledger.events == ()
        else:
            with pytest.raises(cw.InvalidPlan, match="mechanism"):
                runner()


def test_a_plan_says_nothing_of_the_default() -> None:
    p = plan(ROWS[0])
    assert p == replace(p, mechanism=None) and p.mechanism == Gaussian()  # type: ignore[arg-type]
    assert "mechanism" not in p.to_dict()  # the label of a seeded run, and old files, stay as they are
    for wrong in ("gaussian", Gaussian, 1.0):
        with pytest.raises(cw.InvalidPlan, match="mechanism must be"):
            replace(p, mechanism=wrong)  # type: ignore[arg-type]


def test_a_file_cannot_choose_the_class_of_the_mechanism() -> None:
    record = {**plan(ROWS[0]).to_dict(), "mechanism": {"kind": "os.system"}}
    with pytest.raises(cw.InvalidPlan, match="own values"):
        cw.Plan.from_dict(record)
    for kind in ({"kind": "Abadi", "R": 1.0}, 3, "Gaussian", None):
        if kind is None:
            assert cw.Plan.from_dict({**record, "mechanism": None}).mechanism == Gaussian()
            continue
        with pytest.raises(cw.InvalidPlan, match="mechanism must be"):
            cw.Plan.from_dict({**record, "mechanism": kind})


def test_labels_of_a_seeded_run_know_the_mechanism() -> None:
    from clipwise.private.labels import of_plan

    assert len({of_plan(plan(row)) for row in ROWS}) == len(ROWS)
    assert of_plan(plan(ROWS[1])) != of_plan(plan(replace(ROWS[1], mechanism=ProjectedNorms(61))))


@pytest.mark.parametrize("name", ["quantile", "share"])
@pytest.mark.parametrize("value", [0, 0.0, 1, 1.0, 1.5, 2, -0.5, "0.5", True, float("nan")])
def test_a_quantile_and_a_share_lie_between_0_and_1(name: str, value: Any) -> None:
    with pytest.raises(cw.InvalidPlan, match=rf"AdaptiveClip\({name}=...\) must lie between 0 and 1"):
        cw.AdaptiveClip(**{"R": 1.0, name: value})
    assert cw.AdaptiveClip(1.0) == cw.AdaptiveClip(R=1.0, quantile=0.5, floor=0.01, learning_rate=0.2, share=0.01)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), "1", True])
def test_an_adaptive_norm_needs_positive_numbers(value: Any) -> None:
    for name in ("R", "learning_rate"):
        with pytest.raises(cw.InvalidPlan, match="positive finite number"):
            cw.AdaptiveClip(**{"R": 1.0, name: value})


@pytest.mark.parametrize("within", [-1e4, -0.25, 0.0, 0.8, 1.0, 3.0, 1e4])
def test_an_adaptive_norm_moves_towards_its_quantile_and_not_far_from_its_start(within: float) -> None:
    """R exp(-learning_rate (share within - quantile)), from the floor to six powers of ten over the first norm."""
    clip = cw.AdaptiveClip(R=2.0, quantile=0.8, floor=0.3, learning_rate=0.3)
    for bound in (0.5, 2.0, 7.0):
        expected = min(max(bound * math.exp(max(min(-0.3 * (within - 0.8), 50), -50)), 0.3), 2e6)
        assert clip.move(bound, within) == pytest.approx(expected, rel=1e-12)
    assert clip.at(0, 9) == clip.at(8, 9) == cw.Flat(cw.Abadi(2.0)) and clip.style(5.0) == cw.Flat(cw.Abadi(5.0))


@pytest.mark.parametrize("name", ["weight_cap", "total_weight"])
def test_weights_are_numbers_that_float32_can_be_divided_by(name: str) -> None:
    assert all(getattr(Rounds(**{name: value}), name) == value for value in (1e-30, 1, 0.5, 1 / 1e-30))
    for value in (0.9e-30, 1.1e30, 0, -1.0, float("nan"), float("inf"), "1", True):
        with pytest.raises(cw.InvalidPlan, match=f"{name} must be a positive number from 1e-30 to 1e\\+30"):
            Rounds(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sampling", "weights", "denominator"),
    [
        (POISSON, {}, 50.0),
        (POISSON, {"weight_cap": 3.0}, 150.0),
        (POISSON, {"weight_cap": 3.0, "total_weight": 700.0}, 35.0),
        (cw.Poisson(rate=0.05, batch_size=40), {"weight_cap": 3.0}, 120.0),
        (cw.Poisson(rate=0.05, batch_size=40), {"weight_cap": 3.0, "total_weight": 700.0}, 35.0),
        (cw.FullBatch(9), {"weight_cap": 2.0}, 18.0),
    ],
    ids=str,
)
def test_a_sum_over_users_is_divided_by_the_expected_weight_of_a_round(
    sampling: Any, weights: dict[str, float], denominator: float
) -> None:
    rounds = Rounds(**weights)
    assert rounds.denominator(sampling) == pytest.approx(denominator, rel=1e-12)
    assert rounds.rate(sampling) == {"Poisson": 0.05, "FullBatch": 1.0}[type(sampling).__name__]


def test_a_rule_that_needs_the_norms_of_all_is_refused_for_users_at_every_step() -> None:
    batch, own = cw.BatchClip(1.0), cw.Abadi(1.0)
    for clip in (batch, cw.MixUp(batch, own, switch_at=1), cw.MixUp(own, batch, switch_at=6)):
        with pytest.raises(cw.InvalidPlan, match="BatchClip needs the norms of all"):
            cw.Plan(POISSON, 7, clip, 0.0, mechanism=Rounds())
