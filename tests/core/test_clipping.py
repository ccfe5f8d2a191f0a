"""Rules, styles and schedules: the bound that privacy rests on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import clipwise as cw
from clipwise import clipping
from clipwise.clipping import Clip, Rule, as_clip, is_private
from clipwise.errors import InvalidPlan
from tests.core.doubles import Own

positive = st.floats(min_value=1e-30, max_value=1e30, allow_nan=False)
extreme = st.floats(min_value=1.2e-38, max_value=1e300, allow_nan=False)
PRIVATE_RULES = {
    "abadi": st.builds(cw.Abadi, extreme),
    "automatic": st.builds(cw.Automatic, extreme, extreme),
    "normalize": st.builds(cw.Normalize, extreme),
    "global": st.builds(cw.Global, extreme),
    "global_scaled": st.builds(cw.GlobalScaled, extreme, extreme),
}
norm_values = st.one_of(
    st.floats(min_value=0, allow_nan=False, width=32),
    st.sampled_from([0.0, 1e-45, 1e-38, 1.0, 3e38, math.inf, math.nan]),
)


def test_every_private_rule_of_the_module_is_in_the_table() -> None:
    rules = {
        name
        for name in clipping.__all__
        if isinstance(getattr(clipping, name), type) and hasattr(getattr(clipping, name), "sensitivity")
    } - {"Rule", "Flat", "Layerwise", "Groupwise", "NoClip", "BatchClip", "Unclipped"}
    assert len(rules) == len(PRIVATE_RULES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule_name", PRIVATE_RULES)
@given(data=st.data())
@settings(max_examples=200)
def test_a_contribution_never_exceeds_the_sensitivity(rule_name: str, dtype: torch.dtype, data: st.DataObject) -> None:
    rule = data.draw(PRIVATE_RULES[rule_name])
    norms = torch.tensor(data.draw(st.lists(norm_values, min_size=1, max_size=8)), dtype=dtype)
    factors = rule(norms)
    assert factors.shape == norms.shape and factors.dtype == dtype
    finite = torch.isfinite(norms)
    assert torch.isfinite(factors[finite]).all() and (factors[finite] >= 0).all()
    contribution = factors[finite].double() * norms[finite].double()
    # Below the normal numbers a factor has few bits: allow its last one, times the norm.
    last_bit = 2 * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps * norms[finite].double().clamp(min=1)
    assert (contribution <= rule.sensitivity * (1 + 8 * torch.finfo(dtype).eps) + last_bit).all()
    # Whatever is not finite is left out: a zero or NaN factor, never a usable one.
    assert not ((factors[~finite] != 0) & torch.isfinite(factors[~finite])).any()


def test_the_rules_are_the_equations() -> None:
    norms = torch.tensor([0.0, 0.5, 1.0, 2.0, 10.0], dtype=torch.float64)
    assert cw.Abadi(1.0)(norms).tolist() == [1.0, 1.0, 1.0, 0.5, 0.1]
    assert cw.Automatic(2.0, 0.5)(norms).tolist() == [2.0 / (n + 0.5) for n in norms.tolist()]
    assert cw.Normalize(3.0)(norms).tolist() == pytest.approx([0.0, 6.0, 3.0, 1.5, 0.3])
    assert cw.Global(1.0)(norms).tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert cw.GlobalScaled(R=1.0, Z=2.0)(norms).tolist() == [0.5, 0.5, 0.5, 0.5, 0.0]
    assert cw.NoClip()(norms).tolist() == cw.Unclipped(3.0)(norms).tolist() == [1.0] * 5
    assert cw.BatchClip(1.35)(norms).tolist() == pytest.approx([0.1] * 5)
    assert cw.BatchClip(100.0)(norms).tolist() == [1.0] * 5


def test_one_bad_norm_does_not_turn_batch_clipping_off() -> None:
    assert cw.BatchClip(1.0)(torch.tensor([2.0, math.inf, math.nan])).tolist() == [0.5, 0.5, 0.5]


def test_rules_accept_an_empty_batch() -> None:
    for rule in (
        cw.Abadi(1.0),
        cw.Automatic(),
        cw.Normalize(),
        cw.Global(1.0),
        cw.GlobalScaled(1.0, 2.0),
        cw.NoClip(),
        cw.BatchClip(1.0),
        cw.Unclipped(1.0),
    ):
        assert rule(torch.empty(0)).shape == (0,)


def test_a_clipping_norm_that_float32_rounds_to_zero_is_refused() -> None:
    with pytest.raises(InvalidPlan, match="float32"):
        cw.Abadi(1e-300)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, "1", True, None])
def test_a_clipping_norm_that_is_not_positive_is_refused(value: object) -> None:
    for rule in (cw.Abadi, cw.Normalize, cw.Global, cw.BatchClip, cw.Unclipped):
        with pytest.raises(InvalidPlan, match="positive finite"):
            rule(value)  # type: ignore[arg-type]
    with pytest.raises(InvalidPlan):
        cw.Automatic(1.0, value)  # type: ignore[arg-type]
    with pytest.raises(InvalidPlan):
        cw.GlobalScaled(1.0, value)  # type: ignore[arg-type]


def test_a_rule_of_ones_own_is_a_rule() -> None:
    assert isinstance(Own(1.0), Rule) and not isinstance(Own(1.0), Clip)
    assert as_clip(Own(1.0)) == cw.Flat(Own(1.0))
    for bad in (Own(0.0), Own(-1.0), Own(math.nan)):
        with pytest.raises(InvalidPlan, match="sensitivity"):
            cw.Flat(bad)
    for nothing in (1.0, "abadi", None, lambda norms: norms):
        with pytest.raises(InvalidPlan):
            cw.Flat(nothing)  # type: ignore[arg-type]
    for cls in (cw.Abadi, cw.Flat, cw.MixUp):
        with pytest.raises(InvalidPlan, match="class"):
            as_clip(cls)  # type: ignore[arg-type]


def test_a_rule_that_understates_its_sensitivity_is_refused() -> None:
    @dataclass(frozen=True)
    class Wrong:
        sensitivity: float = 1.0

        def __call__(self, norms: torch.Tensor) -> torch.Tensor:
            return torch.ones_like(norms) if self.sensitivity < 2 else norms * math.nan

    good = cw.Abadi(1.0)
    for wrong in (Wrong(1.0), Wrong(3.0)):
        for make in (
            lambda rule: cw.Flat(rule),
            lambda rule: cw.Layerwise(rule),
            lambda rule: cw.Layerwise({"a": good, "b": rule}),
            lambda rule: cw.Groupwise({"a": good, "b": rule}),
            lambda rule: cw.MixUp(good, rule, switch_at=0.5),
            lambda rule: cw.MixUp(rule, good, switch_at=0.5),
            lambda rule: as_clip(rule),
        ):
            with pytest.raises(InvalidPlan, match="times the sensitivity it states"):
                make(wrong)
    for nothing in (1.0, cw.Abadi, lambda norms: norms):
        with pytest.raises(InvalidPlan, match="expected a clipping rule"):
            cw.Layerwise(nothing)  # type: ignore[arg-type]


def whole_vector_ratio(style: cw.Layerwise | cw.Groupwise | cw.Flat, groups: list[str]) -> float:
    """Noise-to-sensitivity ratio of the whole gradient at noise multiplier 1, in units of each group's own noise."""
    scales = style.noise_scales(groups)
    rules = {group: style.rule_of(group).sensitivity for group in groups}
    if isinstance(style, cw.Flat):  # one norm over all groups: the worst sample spends it all where the noise is least
        return min(scales.values()) / style.sensitivity()
    return 1 / math.sqrt(math.fsum((rules[g] / scales[g]) ** 2 for g in groups))


@given(st.lists(positive, min_size=1, max_size=6), st.sampled_from(["joint", "per_layer"]))
def test_the_joint_noise_ratio_is_the_noise_multiplier(bounds: list[float], noise: str) -> None:
    groups = [f"layer{i}" for i in range(len(bounds))]
    rules = {group: cw.Abadi(bound) for group, bound in zip(groups, bounds, strict=True)}
    joint = math.sqrt(math.fsum(b * b for b in bounds))
    for style in (cw.Layerwise(rules, noise=noise), cw.Groupwise(rules, noise=noise)):  # type: ignore[arg-type]
        assert whole_vector_ratio(style, groups) == pytest.approx(1.0)
        assert style.sensitivity(groups) == pytest.approx(joint)
    same = cw.Layerwise(cw.Abadi(bounds[0]), noise=noise)  # type: ignore[arg-type]
    assert whole_vector_ratio(same, groups) == pytest.approx(1.0)
    assert same.sensitivity(len(groups)) == pytest.approx(same.sensitivity(groups))
    assert whole_vector_ratio(cw.Flat(cw.Abadi(bounds[0])), groups) == pytest.approx(1.0)


def test_the_sensitivity_of_layers_is_that_of_all_together() -> None:
    """Four layers of 1/2 are 1 in length, as are 0.6 and 0.8."""
    assert (
        cw.Layerwise(cw.Abadi(0.5)).sensitivity(4) == cw.Layerwise(cw.Abadi(0.5)).sensitivity(["a", "b", "c", "d"]) == 1
    )
    rules = {"a": cw.Abadi(0.6), "b": cw.Abadi(0.8), "c": cw.Abadi(9.0)}
    for style in (cw.Layerwise(rules), cw.Groupwise(rules)):
        assert style.sensitivity(["a", "b"]) == pytest.approx(1.0) and style.noise_scales(["c"]) == {"c": 9.0}
    assert cw.Layerwise(cw.Abadi(0.5)).noise_scales(["a", "b", "c", "d"]) == dict.fromkeys("abcd", 1.0)
    assert cw.Flat(cw.Abadi(0.5)).noise_scales(["a", "b"]) == {"a": 0.5, "b": 0.5}


def test_noise_scales_of_the_two_layerwise_forms() -> None:
    rules = {"a": cw.Abadi(3.0), "b": cw.Abadi(4.0)}
    assert cw.Layerwise(rules).noise_scales(["a", "b"]) == {"a": 5.0, "b": 5.0}
    per_layer = cw.Layerwise(rules, noise="per_layer").noise_scales(["a", "b"])
    assert per_layer == {"a": pytest.approx(3 * math.sqrt(2)), "b": pytest.approx(4 * math.sqrt(2))}


def test_layers_and_groups_are_found_or_refused() -> None:
    layerwise = cw.Layerwise({"fc": cw.Abadi(1.0)})
    assert layerwise.group_of("fc", "fc.weight") == "fc"
    with pytest.raises(InvalidPlan, match="no rule for layer 'head'"):
        layerwise.group_of("head", "head.weight")
    with pytest.raises(InvalidPlan, match="names"):
        layerwise.sensitivity(2)
    groupwise = cw.Groupwise({"*.bias": cw.Abadi(1.0), "encoder.*": cw.Abadi(2.0)})
    assert groupwise.group_of("encoder", "encoder.bias") == "*.bias"
    assert groupwise.group_of("encoder", "encoder.weight") == "encoder.*"
    with pytest.raises(InvalidPlan, match=r"matches parameter 'head\.weight'"):
        groupwise.group_of("head", "head.weight")
    with pytest.raises(InvalidPlan, match="names"):
        groupwise.group_of("", "")
    assert groupwise.sensitivity(2) == pytest.approx(math.sqrt(5))
    assert groupwise.sensitivity(["*.bias"]) == 1.0
    with pytest.raises(InvalidPlan, match="2 groups"):
        groupwise.sensitivity(3)
    assert (
        cw.Flat(cw.Abadi(2.0)).group_of("fc", "fc.weight") == ""
        and cw.Flat(cw.Abadi(2.0)).sensitivity(["a", "b"]) == 2.0
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: cw.Layerwise({}),
        lambda: cw.Layerwise(cw.Abadi(1.0), noise="per-layer"),  # type: ignore[arg-type]
        lambda: cw.Layerwise({"a": 1.0}),  # type: ignore[dict-item]
        lambda: cw.Groupwise({}),
        lambda: cw.Groupwise(cw.Abadi(1.0)),  # type: ignore[arg-type]
        lambda: cw.Groupwise({"*": cw.Abadi(1.0)}, noise="none"),  # type: ignore[arg-type]
        lambda: cw.Groupwise({"*": cw.Abadi}),  # type: ignore[dict-item]
    ],
)
def test_styles_that_make_no_sense_are_refused(make: object) -> None:
    with pytest.raises(InvalidPlan):
        make()  # type: ignore[operator]


def test_a_style_keeps_its_own_copy_of_the_mapping() -> None:
    rules = {"fc": cw.Abadi(1.0)}
    layerwise, groupwise = cw.Layerwise(rules), cw.Groupwise(rules)
    rules["fc"] = cw.Abadi(100.0)
    assert layerwise.rule_of("fc") == groupwise.rule_of("fc") == cw.Abadi(1.0)


@given(st.integers(1, 100_000), st.integers(1, 9_999))
def test_mixup_switches_at_the_written_fraction(steps: int, ten_thousandths: int) -> None:
    clip = cw.MixUp(cw.Abadi(0.1), cw.Abadi(20.0), switch_at=ten_thousandths / 10_000)
    switch = -(-ten_thousandths * steps // 10_000)  # the ceiling, in integers
    assert clip.switch_step(steps) == switch
    assert clip.at(switch - 1, steps) == cw.Flat(cw.Abadi(0.1))
    assert clip.at(switch, steps) == cw.Flat(cw.Abadi(20.0))


def test_mixup_by_step_number() -> None:
    clip = cw.MixUp(cw.Layerwise(cw.Abadi(0.1)), cw.Abadi(20.0), switch_at=3)
    assert [clip.at(t, 5) for t in range(5)] == [cw.Layerwise(cw.Abadi(0.1))] * 3 + [cw.Flat(cw.Abadi(20.0))] * 2
    # One object throughout, so that noise and clipping cannot read different copies.
    assert clip.at(0, 5) is clip.at(2, 5) and clip.at(3, 5) is clip.at(4, 5)
    with pytest.raises(InvalidPlan, match="only 3 steps"):
        clip.at(0, 3)


@pytest.mark.parametrize("switch_at", [0, -1, 0.0, 1.0, 1.5, math.nan, True, "0.5", None])
def test_a_switch_outside_the_run_is_refused(switch_at: object) -> None:
    with pytest.raises(InvalidPlan, match="switch_at"):
        cw.MixUp(cw.Abadi(0.1), cw.Abadi(20.0), switch_at=switch_at)  # type: ignore[arg-type]


def test_which_styles_are_private() -> None:
    assert is_private(cw.Flat(cw.Abadi(1.0))) and is_private(cw.Layerwise({"a": cw.Abadi(1.0)}))
    assert not is_private(cw.Flat(cw.BatchClip(1.0))) and not is_private(cw.Layerwise(cw.NoClip()))
    assert not is_private(cw.Layerwise(cw.Unclipped(1.0))) and not is_private(cw.Groupwise({"*": cw.Unclipped(1.0)}))
    assert not is_private(cw.Layerwise({"a": cw.Abadi(1.0), "b": cw.NoClip()}))
    assert not is_private(cw.Groupwise({"a": cw.Abadi(1.0), "*": cw.NoClip()}))


def test_a_style_is_its_own_schedule() -> None:
    for style in (cw.Flat(cw.Abadi(1.0)), cw.Layerwise(cw.Abadi(1.0)), cw.Groupwise({"*": cw.Abadi(1.0)})):
        assert as_clip(style) is style and style.at(3, 10) is style


def test_a_norm_that_torch_cannot_read_is_refused() -> None:
    """A file can hold such an integer; a step with it would end in torch."""
    with pytest.raises(InvalidPlan, match=r"Abadi\(R=...\) is an integer beyond 64 bits; write 1e\+299"):
        cw.Abadi(10**299)
    assert float(cw.Abadi(1e299)(torch.tensor([2.0]))) == 1.0


def test_the_largest_and_the_smallest_clipping_norm() -> None:
    """The last integer that torch reads, and the smallest number that float32 holds with all its digits."""
    assert cw.Abadi(2**63 - 1).sensitivity == 2**63 - 1
    with pytest.raises(InvalidPlan, match="beyond 64 bits"):
        cw.Abadi(2**63)
    assert cw.Abadi(2.0**-126).sensitivity == 2.0**-126
    with pytest.raises(InvalidPlan, match="smaller than float32"):
        cw.Abadi(math.nextafter(2.0**-126, 0.0))


def test_what_a_rule_takes_unless_it_is_given() -> None:
    assert cw.Automatic() == cw.Automatic(R=1.0, gamma=0.01) and cw.Normalize() == cw.Normalize(R=1.0)
    assert cw.Flat(cw.Abadi(3.0)).sensitivity() == 3.0


@pytest.mark.parametrize("rule", [cw.Automatic(), cw.Normalize(), cw.Global(1.0), cw.GlobalScaled(1.0, 2.0)], ids=repr)
def test_a_gradient_that_is_not_finite_is_left_out(rule: Rule) -> None:
    assert rule(torch.tensor([math.nan, math.inf])).tolist() == [0.0, 0.0]


@dataclass(frozen=True)
class Bump:
    """A rule that keeps to its sensitivity of 1, but for gradients of about this norm."""

    at: float
    height: float
    sensitivity: float = 1.0

    def __call__(self, norms: torch.Tensor) -> torch.Tensor:
        near = (norms / self.at).log().abs() < 0.01
        return torch.where(near, self.height, 0.5) / norms


@pytest.mark.parametrize("at", [1e-6, 1e-5, 0.1, 1.0, 10.0, 1e6])
def test_a_rule_is_tried_at_small_and_at_large_norms(at: float) -> None:
    assert cw.Flat(Bump(at, 1.0000005)).sensitivity() == 1.0  # the last digits of float32
    with pytest.raises(InvalidPlan, match=r"contribute 1\.00001 times the sensitivity"):
        cw.Flat(Bump(at, 1.000005))


def test_parameters_belong_to_the_module_that_owns_them() -> None:
    names = ["encoder.0.weight", "encoder.0.bias", "head.weight", "scale"]
    assert clipping.by_layer(names) == {"encoder.0": names[:2], "head": names[2:3], "": names[3:]}
    assert cw.Layerwise(cw.Abadi(1.0)).groups(names) == clipping.by_layer(names)
    assert cw.Flat(cw.Abadi(1.0)).groups(names) == {"": names}
    style = cw.Groupwise({"*.bias": cw.Abadi(1.0), "encoder.*": cw.Abadi(2.0), "*": cw.Abadi(3.0)})
    assert style.groups(names) == {"encoder.*": names[:1], "*.bias": names[1:2], "*": names[2:]}


def test_a_schedule_is_refused_where_one_style_is_needed() -> None:
    schedule = cw.MixUp(cw.Abadi(0.1), cw.Abadi(20.0), switch_at=0.5)
    for refused in (
        lambda: clipping.as_style(schedule),
        lambda: cw.MixUp(schedule, cw.Abadi(1.0), switch_at=0.5),
        lambda: cw.MixUp(cw.Abadi(1.0), schedule, switch_at=0.5),
    ):
        with pytest.raises(InvalidPlan, match="expected a rule or a style, got the schedule MixUp"):
            refused()
    assert clipping.as_style(schedule.at(0, 10)) == clipping.as_style(cw.Abadi(0.1)) == cw.Flat(cw.Abadi(0.1))
