"""The plan refuses what makes no sense, and survives being written down."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError, dataclass, replace

import pytest
import torch

import clipwise as cw
from clipwise._encoding import encode
from clipwise.clipping import Style
from tests.core.doubles import Own

SAMPLING = cw.Poisson(sample_size=1000, batch_size=50)
CLIPS = [
    cw.Abadi(1.0),
    cw.Automatic(1.0, 0.5),
    cw.Normalize(),
    cw.Global(2.0),
    cw.GlobalScaled(1.0, 3.0),
    cw.Layerwise(cw.Abadi(1.0), noise="per_layer"),
    cw.Layerwise({"fc": cw.Abadi(1.0), "head": cw.Normalize(0.5)}),
    cw.Groupwise({"b*": cw.Abadi(1.0), "*": cw.Global(0.5)}),
    cw.MixUp(cw.Abadi(0.1), cw.Layerwise(cw.Abadi(20.0)), switch_at=0.95),
    cw.MixUp(cw.Abadi(0.1), cw.Abadi(20.0), switch_at=7),
]


@dataclass(frozen=True)
class Growing:
    """A schedule of one's own: R doubles half-way."""

    def at(self, step: int, steps: int) -> Style:
        return cw.Flat(cw.Abadi(1.0 if 2 * step < steps else 2.0))


def plan(**changes: object) -> cw.Plan:
    fields = {"sampling": SAMPLING, "steps": 100, "clip": cw.Abadi(1.0), "noise_multiplier": 1.0, **changes}
    return cw.Plan(**fields)  # type: ignore[arg-type]


def test_a_bare_rule_means_flat() -> None:
    assert plan().clip == cw.Flat(cw.Abadi(1.0))
    assert plan() == plan(clip=cw.Flat(cw.Abadi(1.0)))


@pytest.mark.parametrize("steps", [0, -1, 10.0, 1.5, True, "10", None, math.nan])
def test_steps_are_positive_integers(steps: object) -> None:
    with pytest.raises(cw.InvalidPlan, match="steps"):
        plan(steps=steps)


@pytest.mark.parametrize("noise", [-1.0, math.nan, math.inf, True, "1"])
def test_noise_is_a_finite_number(noise: object) -> None:
    with pytest.raises(cw.InvalidPlan, match="noise_multiplier"):
        plan(noise_multiplier=noise)


@pytest.mark.parametrize("sampling", [0.01, 50, None, cw.Poisson, {"rate": 0.1}])
def test_a_bare_rate_is_no_sampling(sampling: object) -> None:
    with pytest.raises(cw.InvalidPlan, match="sampling"):
        plan(sampling=sampling)


@pytest.mark.parametrize("clip", [1.0, "abadi", None, cw.Abadi])
def test_clipping_is_a_value(clip: object) -> None:
    with pytest.raises(cw.InvalidPlan):
        plan(clip=clip)


@pytest.mark.parametrize(
    "clip",
    [
        cw.NoClip(),
        cw.BatchClip(1.0),
        cw.Layerwise(cw.NoClip()),
        cw.MixUp(cw.Abadi(1.0), cw.NoClip(), switch_at=0.5),
        cw.MixUp(cw.BatchClip(1.0), cw.Abadi(1.0), switch_at=0.5),
        cw.Unclipped(2.0),
        cw.Layerwise(cw.Unclipped(2.0)),
        cw.Groupwise({"0.*": cw.Unclipped(2.0), "*": cw.Unclipped(1.0)}),
        cw.MixUp(cw.Abadi(1.0), cw.Unclipped(2.0), switch_at=0.5),
        cw.MixUp(cw.Layerwise(cw.Unclipped(2.0)), cw.Abadi(1.0), switch_at=99),
    ],
)
def test_a_rule_without_a_bound_cannot_be_made_private(clip: object) -> None:
    with pytest.raises(cw.InvalidPlan, match="does not bound"):
        plan(clip=clip)
    honest = plan(clip=clip, noise_multiplier=0)
    assert not honest.is_private
    with pytest.raises(cw.InvalidPlan):
        honest.calibrate(epsilon=1.0, delta=1e-5)
    with pytest.raises(cw.InvalidPlan):
        plan(clip=clip, noise_multiplier=None).calibrate(epsilon=1.0, delta=1e-5)


def test_a_switch_beyond_the_last_step_is_refused() -> None:
    with pytest.raises(cw.InvalidPlan, match="only 100 steps"):
        plan(clip=cw.MixUp(cw.Abadi(0.1), cw.Abadi(20.0), switch_at=100))
    assert plan(clip=cw.MixUp(cw.Abadi(0.1), cw.Abadi(20.0), switch_at=99)).style(99) == cw.Flat(cw.Abadi(20.0))


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        plan().steps = 5  # type: ignore[misc]


def test_a_misspelt_argument_is_refused() -> None:
    with pytest.raises(TypeError):
        cw.Plan(sampling=SAMPLING, steps=1, clip=cw.Abadi(1.0), noise_multiplyer=1.0)  # type: ignore[call-arg]


def test_the_denominator_is_the_public_batch_size() -> None:
    assert plan().batch_size == 50
    assert plan(sampling=cw.Poisson(999, 50)).batch_size == 50
    assert plan(sampling=cw.Shuffled(999, 50)).batch_size == 50


def test_epsilon_is_the_ledger_of_its_events() -> None:
    p = plan(noise_multiplier=1.3)
    assert p.events == (cw.GaussianSteps(SAMPLING, 1.3, 100),)
    assert p.epsilon(delta=1e-5) == cw.Ledger(p.events).epsilon(delta=1e-5)


@pytest.mark.parametrize(("first", "stop"), [(-1, 2), (3, 3), (4, 2)])
def test_there_are_no_events_of_steps_that_are_none(first: int, stop: int) -> None:
    plan = cw.Plan(cw.FullBatch(10), 9, cw.Abadi(1.0), 1.0)
    with pytest.raises(cw.InvalidPlan, match="there are no steps from"):
        plan.events_of(first, stop)


def test_calibrate_meets_the_target() -> None:
    p = plan(noise_multiplier=None).calibrate(epsilon=2.0, delta=1e-5)
    assert p.noise_multiplier is not None
    assert p.epsilon(delta=1e-5) <= 2.0 < replace(p, noise_multiplier=p.noise_multiplier * 0.98).epsilon(delta=1e-5)
    assert replace(p, noise_multiplier=None) == plan(noise_multiplier=None)


def test_an_uncalibrated_plan_has_no_epsilon() -> None:
    for ask in (lambda p: p.epsilon(delta=1e-5), lambda p: p.events):
        with pytest.raises(cw.InvalidPlan, match="calibrate"):
            ask(plan(noise_multiplier=None))


@pytest.mark.parametrize("clip", CLIPS, ids=repr)
def test_a_plan_survives_json(clip: object) -> None:
    for sampling in (SAMPLING, cw.FullBatch(9), cw.Shuffled(9, 2), cw.FixedSize(9, 2), cw.Poisson(9, 2, 4)):
        p = plan(clip=clip, sampling=sampling)
        again = cw.Plan.from_dict(json.loads(json.dumps(p.to_dict())))
        assert again == p and again.to_dict() == p.to_dict()


def test_groupwise_patterns_keep_their_order() -> None:
    p = plan(clip=cw.Groupwise({"z*": cw.Abadi(1.0), "a*": cw.Abadi(2.0)}))
    again = cw.Plan.from_dict(json.loads(json.dumps(p.to_dict(), sort_keys=True)))
    assert list(again.clip.rules) == ["z*", "a*"]  # type: ignore[union-attr]


def test_damaged_plans_are_refused() -> None:
    good = plan(clip=cw.Layerwise(cw.Abadi(1.0))).to_dict()
    bad = [
        {**good, "epsilon": 2.0},
        {k: v for k, v in good.items() if k != "steps"},
        {**good, "version": 2},
        {**good, "steps": -1},
        {**good, "sampling": {**good["sampling"], "rate": 0.5}},
        {**good, "clip": {**good["clip"], "nois": "joint"}},
        {**good, "clip": {"kind": "os.system", "command": "true"}},
        {**good, "clip": {"kind": "Abadi", "R": -1.0}},
        [],
    ]
    for record in bad:
        with pytest.raises(cw.ClipwiseError):
            cw.Plan.from_dict(record)  # type: ignore[arg-type]
    assert cw.Plan.from_dict(good).clip == cw.Layerwise(cw.Abadi(1.0))


def test_a_rule_of_ones_own_is_described_but_never_imported() -> None:
    for clip in (Own(2.0), Growing()):
        record = plan(clip=clip).to_dict()
        assert "Own" in str(record["clip"]) or "Growing" in str(record["clip"])
        with pytest.raises(cw.InvalidPlan, match="give the plan itself"):
            cw.Plan.from_dict(record)


def test_a_schedule_of_ones_own() -> None:
    p = plan(clip=Growing())
    assert [p.style(t).rule.R for t in (0, 49, 50, 99)] == [1.0, 1.0, 2.0, 2.0]  # type: ignore[union-attr]


@pytest.mark.parametrize("value", [[1.0], {1, 2}, object()])
def test_what_is_not_a_frozen_value_cannot_be_written_down(value: object) -> None:
    with pytest.raises(cw.errors.InvalidPlan, match="cannot be written down: make it a frozen dataclass"):
        encode(value)


def test_the_styles_of_a_schedule_are_those_of_its_first_and_last_step() -> None:
    """A rule without a bound is seen where it holds for a single step, too."""
    for small, large, switch_at in ((cw.NoClip(), cw.Abadi(1.0), 1), (cw.Abadi(1.0), cw.NoClip(), 99)):
        with pytest.raises(cw.InvalidPlan, match="does not bound"):
            plan(clip=cw.MixUp(small, large, switch_at=switch_at))

    @dataclass(frozen=True)
    class ByStep:
        def at(self, step: int, steps: int) -> Style:
            return cw.Flat(cw.Abadi(1.0 + step))

    p = plan(clip=ByStep())
    assert p.styles == (cw.Flat(cw.Abadi(1.0)), cw.Flat(cw.Abadi(100.0))) and p.style(7) == cw.Flat(cw.Abadi(8.0))
    assert plan(clip=cw.Layerwise(cw.Abadi(1.0))).styles == (cw.Layerwise(cw.Abadi(1.0)),)


@pytest.mark.parametrize("version", [0, 2, True, 1.0, "1", None])
def test_a_plan_of_another_version_is_refused(version: object) -> None:
    good = plan().to_dict()
    assert good["version"] == 1
    with pytest.raises(cw.InvalidPlan, match=r"the plan has version .*, this clipwise reads 1"):
        cw.Plan.from_dict({**good, "version": version})


def test_a_plan_says_what_is_planned_and_what_it_costs() -> None:
    epsilon = ("epsilon", "0.357 at delta 0.01")
    few = plan(sampling=cw.FullBatch(10), steps=5, noise_multiplier=9.0)
    head = [("batches", "all 10 records in every step"), ("steps", "5"), ("clipping", "Flat(rule=Abadi(R=1.0))")]
    assert few.rows() == [*head, ("noise multiplier", "9"), epsilon]
    asked: list[float] = []
    assert few.rows(lambda delta: asked.append(delta) or 0.1234)[-1] == ("epsilon spent", "0.124 at delta 0.01")  # type: ignore[func-returns-value]
    assert asked == [0.01]
    assert few.rows(lambda delta: math.inf)[-1] == ("epsilon spent", "infinite")
    rounds = replace(few, mechanism=cw.mechanisms.Rounds())
    assert rounds.rows()[3:] == [("mechanism", repr(rounds.mechanism)), ("noise multiplier", "9"), epsilon]
    none = replace(few, noise_multiplier=None)
    assert none.rows() == [*head, ("noise multiplier", "none yet: plan.calibrate(epsilon, delta) finds it")]
    changing = replace(few, noise_multiplier=cw.Steps({0: 9.0, 3: 8.0})).rows()
    assert changing[3] == ("noise multiplier", "Steps({0: 9.0, 3: 8.0})")
    assert replace(few, noise_multiplier=0.0).rows()[-1] == ("epsilon", "infinite: not private")
    unknown = replace(few, sampling=cw.Poisson(rate=0.1, batch_size=5)).rows()
    assert unknown[-1] == ("epsilon", "at a delta of your choice: the number of records is not public")
    assert plan(steps=14_040).rows()[1] == ("steps", "14,040")

    def failing(delta: float) -> float:
        raise cw.AccountingError("too far out")

    assert few.rows(failing)[-1] == ("epsilon spent", "unknown: too far out")


def test_an_epsilon_without_a_delta_is_refused_with_one_to_give() -> None:
    planned = cw.Plan(cw.Poisson(1_400, 128), 3, cw.Abadi(1.0))
    model = torch.nn.Linear(2, 1)
    private = cw.Private(replace(planned, noise_multiplier=1.0), model, torch.optim.SGD(model.parameters(), 0.1))
    for ask in (
        lambda: planned.calibrate(epsilon=3.0),
        private.epsilon,
        replace(planned, noise_multiplier=1.0).epsilon,
    ):
        with pytest.raises(cw.AccountingError, match=r"below 1/n for n records: delta=1e-4, with n = 1400"):
            ask()
    with pytest.raises(cw.AccountingError, match="epsilon needs a delta"):
        cw.Ledger().guarantee()


def test_a_mapping_of_a_damaged_plan_names_no_key_twice() -> None:
    record = plan(clip=cw.Groupwise({"a*": cw.Abadi(1.0), "*": cw.Abadi(2.0)})).to_dict()
    items = record["clip"]["rules"]["items"]
    record["clip"]["rules"]["items"] = [*items, items[0]]
    with pytest.raises(cw.InvalidPlan, match="is given twice"):
        cw.Plan.from_dict(record)
    record["clip"]["rules"] = {"kind": "mapping", "items": 5}
    with pytest.raises(cw.InvalidPlan, match="written as pairs"):
        cw.Plan.from_dict(record)


def test_a_delta_over_one_in_n_is_warned_about_once_for_a_plan() -> None:
    """`clipwise train` refused it, and the loop said nothing."""
    said = r"delta = 0\.01 is over 1/n = 0\.001: .* a record now and then\. Give a delta below 1/n, such as 0\.0001\."
    with pytest.warns(UserWarning, match=said) as found:
        made = plan(steps=5).calibrate(epsilon=3.0, delta=0.01)
    assert [warning.filename for warning in found] == [__file__]
    model = torch.nn.Linear(2, 1)
    private = cw.Private(made, model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert private.epsilon(delta=0.01) == 0.0, "of this plan it was said"
    private = cw.Private(plan(steps=5), model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.warns(UserWarning, match=said) as found:
        private.epsilon(delta=0.01)
    assert [warning.filename for warning in found] == [__file__]
    private.epsilon(delta=0.01)


def test_a_delta_of_one_in_n_and_an_unknown_n_are_no_reason_to_warn() -> None:
    plan(steps=5).calibrate(epsilon=3.0, delta=0.001)
    plan(steps=5, sampling=cw.Poisson(rate=0.05, batch_size=50)).calibrate(epsilon=3.0, delta=0.01)
