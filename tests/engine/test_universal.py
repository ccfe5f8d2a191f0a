"""The bound itself, on every model x rule x style: no sample moves the clipped sum by more than the sensitivity.

Noise is zero throughout. A batch of one with a huge loss and a tiny clipping norm, neighbouring batches, and samples
whose loss or data is not finite.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from clipwise.clipping import Abadi, Automatic, Flat, Global, GlobalScaled, Groupwise, Layerwise, Normalize, Rule, Style
from clipwise.engine import clipped_gradients
from clipwise.engine.cost import Way
from clipwise.errors import NotSeparable, UnsupportedNode
from tests.zoo import BY_NAME, CASES, Case, Data, named, shared_model

from .reference import clipped_loop, flat, flat_sum, groups_of, loop_gradients, norms_of, precision, tolerance

R = 1e-3
HUGE = 2.0**20
RULES: list[Rule] = [Abadi(R), Automatic(R, gamma=0.01), Normalize(R), Global(R), GlobalScaled(R, Z=1e12)]
WAYS: tuple[Way, ...] = ("bookkeeping", "second_backward")


def styles(rule: Rule) -> list[Style]:
    """The rule in every style; the groups of `Groupwise` have different clipping norms."""
    return [Flat(rule), Layerwise(rule), Groupwise({"*bias*": Abadi(2 * R), "*weight*": rule, "*": rule})]


STYLES = [style for rule in RULES for style in styles(rule)]
PARTS = ["some", pytest.param("others", marks=pytest.mark.slow)]


def tried(case: Case, part: str) -> list[tuple[Style, Way]]:
    """`some`: each rule in one style, in another one for the next model; `others`: the rest. Ways take turns, too."""
    turn, found = CASES.index(case), []
    for number, style in enumerate(STYLES):
        rule, kind = divmod(number, len(STYLES) // len(RULES))
        if ((kind - rule - turn) % 3 == 0) == (part == "some"):
            found.append((style, WAYS[(number + turn) % 2]))
    return found


def clipped(losses: Tensor, params: dict[str, torch.nn.Parameter], style: Style, way: Way | None = None) -> Tensor:
    return flat_sum(clipped_gradients(losses, params, style, retain_graph=True, way=way).gradients)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_huge_sample_is_bounded_and_keeps_its_direction(case: Case, part: str) -> None:
    dtype = precision(case)
    model = shared_model(case, dtype)
    params = named(model)
    losses = HUGE * case.losses(model, 1, seed=5, dtype=dtype)
    loop = loop_gradients(losses, params)
    rounding = tolerance(case, losses, dtype)
    for style, _ in tried(case, part):  # there is one way for a sample alone
        expected = flat(clipped_loop(without_rounding(loop, style), style))[0]
        actual = clipped(losses, params, style)
        bound = style.sensitivity(list(groups_of(style, params)))
        assert actual.norm() <= bound * (1 + rounding), style
        assert (actual - expected).norm() <= rounding * expected.norm(), style


def without_rounding(loop: dict[str, Tensor], style: Style) -> dict[str, Tensor]:
    """Zero for groups whose gradient is nothing but rounding beside the whole: they have no direction to keep."""
    smallest = 8 * torch.finfo(next(iter(loop.values())).dtype).eps * norms_of(loop)
    kept = {}
    for names in groups_of(style, loop).values():
        seen = norms_of({name: loop[name] for name in names}) > smallest
        kept |= {name: loop[name] * seen.view(-1, *[1] * (loop[name].dim() - 1)) for name in names}
    return {name: kept[name] for name in loop}


def prepared(case: Case) -> tuple[torch.dtype, torch.nn.Module, int]:
    """The precision, the model and the batch size in which a case is tried."""
    dtype = precision(case)
    return dtype, shared_model(case, dtype), case.batches[2]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_neighbouring_batches_differ_by_at_most_the_sensitivity(case: Case, part: str) -> None:
    """Add or remove one sample, here one with a huge loss: the others' contributions stay what they are."""
    dtype, model, batch = prepared(case)
    scale = torch.ones(batch, dtype=dtype)
    scale[1] = HUGE
    data = case.draw(batch, seed=6, dtype=dtype)
    losses = scale * case.loss(model, **data)
    without = case.loss(model, **leave_out(data, 1))
    loop, rounding = loop_gradients(without, named(model)), tolerance(case, losses, dtype)
    for style, way in tried(case, part):
        params = above_rounding(named(model), loop, style)
        moved = (clipped(losses, params, style, way) - clipped(without, params, style, way)).norm()
        bound = style.sensitivity(list(groups_of(style, params)))
        # Rounding is relative to the sum of all contributions, not only to the one that moved.
        assert moved <= bound * (1 + batch * rounding), (style, way)


def above_rounding(
    params: dict[str, torch.nn.Parameter], loop: dict[str, Tensor], style: Style
) -> dict[str, torch.nn.Parameter]:
    """All parameters, but for `Normalize` without groups whose gradient is zero up to rounding (a key's bias).

    `Normalize` brings a gradient of pure rounding to length R, and its direction changes with the batch.
    """
    if not any(isinstance(style.rule_of(group), Normalize) for group in groups_of(style, params)):
        return params
    total = norms_of(loop)
    kept = {}
    for names in groups_of(style, params).values():
        norms = norms_of({name: loop[name] for name in names})
        if not ((norms > 0) & (norms < 1e-6 * total)).any():
            kept |= {name: params[name] for name in names}
    return {name: p for name, p in params.items() if name in kept}


def leave_out(data: Data, sample: int) -> Data:
    return {name: torch.cat([value[:sample], value[sample + 1 :]]) for name, value in data.items()}


# Differentiated by autograd sample by sample: NaN in one sample's data would spoil the others, so the batch is refused.
SPOILT_TOGETHER = {"bilinear", "bilinear_sequences", "distances"}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_samples_that_are_not_finite_contribute_nothing(case: Case, part: str) -> None:
    """A NaN or infinite loss, and NaN in the data, next to good samples: the sum is that of the good ones.

    Some: one of the losses, and the data. Others: one loss after the other, by one plan.
    """
    dtype, model, batch = prepared(case)
    params = named(model)
    data = case.draw(batch, seed=7, dtype=dtype)
    losses = case.loss(model, **data)
    rounding = tolerance(case, losses, dtype)
    good = loop_gradients(case.loss(model, **leave_out(data, 1)), params)
    style = Flat(Abadi(float(norms_of(good).median()) or 1.0))
    expected = flat(clipped_loop(good, style))
    turn, bad_losses = CASES.index(case), ("nan loss", "infinite loss")
    for k, poison in enumerate((bad_losses[turn % 2], "nan data") if part == "some" else bad_losses):
        way = WAYS[(turn // 2 + k) % len(WAYS)]  # each way on half of the models
        spoilt = poisoned(case, model, data, poison)
        if spoilt is None:
            continue
        if poison == "nan data" and case.name in SPOILT_TOGETHER:
            with pytest.raises(UnsupportedNode, match="spoils"):
                clipped_gradients(spoilt, params, style, way=way)
            continue
        try:
            result = clipped_gradients(spoilt, params, style, way=way)
        except NotSeparable:
            assert case.name == "funnel"  # its constant table may be refused, and is where NaN hides the layout
            continue
        error = (flat_sum(result.gradients) - expected.sum(0)).norm()
        assert result.bad.nonzero().tolist() == [[1]], (poison, way)
        assert error <= rounding * expected.norm(dim=1).sum(), (poison, way)


def poisoned(case: Case, model: torch.nn.Module, data: Data, poison: str) -> Tensor | None:
    """Losses whose sample 1 is not finite; None when the data has no numbers, or the model does not pass them on."""
    if poison != "nan data":
        scale = torch.ones(len(next(iter(data.values()))), dtype=next(iter(model.parameters())).dtype)
        scale[1] = float("nan") if poison == "nan loss" else float("inf")
        losses: Tensor = case.loss(model, **data) * scale
        return losses
    numbers = [name for name, value in data.items() if value.is_floating_point()]
    if not numbers:
        return None
    data = {name: value.clone() for name, value in data.items()}
    for name in numbers:
        data[name][1] = float("nan")
    losses = case.loss(model, **data)
    others = torch.cat([losses[:1], losses[2:]])
    return losses if losses[1].isnan() and others.isfinite().all() else None


AUTOCAST = [case for case in CASES if "autocast" in case.tags]


@pytest.mark.parametrize("case", AUTOCAST, ids=lambda case: case.name)
def test_bfloat16_activations_keep_the_bound_to_float32_precision(case: Case) -> None:
    """The norm is that of the gradient used, not of a rounded copy of it: one sample of several has a loss at all."""
    model = shared_model(case, torch.float32)
    params = named(model)
    for sample in range(4):
        only = 1000.0 * torch.nn.functional.one_hot(torch.tensor(sample), 4)
        losses = only * case.losses(model, 4, seed=9, dtype=torch.float32)
        assert clipped(losses, params, Flat(Normalize(1.0))).norm() <= 1 + 1e-5


@pytest.mark.parametrize("scale", [2.0**-60, 2.0**30, 2.0**62, 2.0**100])
@pytest.mark.parametrize("name", ["mlp", "conv2d", "embedding_tied_head", "attention_batch_first", "gpt2"])
def test_float32_overflow_and_underflow_keep_the_bound(name: str, scale: float) -> None:
    """Squares of such gradients leave float32's range; a contribution may become zero, never longer than allowed."""
    case = BY_NAME[name]
    model = shared_model(case, torch.float32)
    params = named(model)
    losses = case.losses(model, 3, dtype=torch.float32) * scale
    for style, way in product(STYLES, WAYS):
        total = clipped(losses, params, style, way)
        assert total.isfinite().all(), (style, way)
        assert total.norm() <= 3 * style.sensitivity(list(groups_of(style, params))) * (1 + 1e-5), (style, way)


@pytest.mark.parametrize("way", WAYS)
def test_a_first_batch_with_a_bad_sample_is_planned_too(way: str) -> None:
    """The very first step, nothing cached, sees a NaN."""
    case = BY_NAME["transformer_encoder"]
    model = case.model(seed=11)
    params = named(model)
    data = case.draw(4, seed=8)
    losses = poisoned(case, model, data, "nan data")
    assert losses is not None
    result = clipped_gradients(losses, params, Abadi(0.1), way=way)
    good = loop_gradients(case.loss(model, **leave_out(data, 1)), params)
    expected = flat(clipped_loop(good, Flat(Abadi(0.1)))).sum(0)
    assert (flat_sum(result.gradients) - expected).norm() <= 1e-10 * expected.norm()


def test_a_batch_of_bad_samples_only_gives_zeros() -> None:
    case = BY_NAME["mlp"]
    model = case.model()
    params = named(model)
    for way in WAYS:
        losses = case.losses(model, 3) * float("nan")
        result = clipped_gradients(losses, params, Abadi(1.0), way=way)
        assert result.bad.all()
        assert all(not g.any() for g in result.gradients.values())
