"""Every model of the zoo: norms, per-sample gradients and clipped sums equal those of the per-sample loop."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from clipwise.clipping import Abadi, Flat, Layerwise, Style
from clipwise.engine import check, clipped_gradients, per_sample_gradients, per_sample_norms
from clipwise.engine.cost import Way
from clipwise.errors import NotSeparable, UnsupportedNode
from tests.zoo import BY_NAME, CASES, Case, named, shared_model

from .reference import (
    clipped_loop,
    flat,
    flat_sum,
    groups_of,
    loop_gradients,
    norms_of,
    precision,
    relative_errors,
    tolerance,
    untouched,
)  # fmt: skip

WAYS: tuple[Way | None, ...] = ("bookkeeping", "second_backward", None)
LONG = ("mobilevit", "switch_transformers", "swin", "swinv2", "rwkv", "funnel", "qwen2_moe", "vilt")  # seconds each
DOUBLE = [
    pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.name in LONG else [])
    for case in CASES
    if precision(case) == torch.float64
]


def clip_at_the_median(norms: Tensor) -> Abadi:
    """A clipping norm that shortens some samples and leaves others."""
    return Abadi(float(norms.median()) or 1.0)


def tried(case: Case, batch: int, seed: int, clip: Abadi, every: bool) -> list[tuple[Style, Way | None]]:
    """Styles and ways: all at one size, or at `every`; at the others each style in one way, and they take turns.

    A batch of one knows only one way; the chosen way (None) is one of the other two.
    """
    styles, place = (Flat(clip), Layerwise(clip)), case.batches.index(batch)
    if batch == 1 or (seed and not every):
        return [(style, None) for style in styles]
    if place == 1:
        return list(product(styles, WAYS))
    if every:
        return list(product(styles, WAYS[:2]))
    return list(zip(styles, WAYS[:2] if place % 2 else WAYS[1::-1], strict=True))


def disagreements(case: Case, batch: int, seed: int, dtype: torch.dtype, every: bool = False) -> list[str]:
    """What differs from the loop for one batch, by more than the tolerance."""
    model = shared_model(case, dtype)
    params = named(model)
    losses = case.losses(model, batch, seed=seed, dtype=dtype)
    limit = tolerance(case, losses, dtype)
    loop = loop_gradients(losses, params)
    size = norms_of(loop)
    found = []

    def compare(what: str, actual: Tensor, expected: Tensor, scale: Tensor) -> None:
        error = float(relative_errors(actual, expected, scale, dtype).max())
        if not error <= limit:
            found.append(f"B={batch} {what}: off by {error:.1e} of the gradient norm")

    def attached(what: str, *tensors: Tensor) -> None:
        if any(tensor.requires_grad for tensor in tensors):
            found.append(f"B={batch} {what}: still attached to the graph")

    norms = per_sample_norms(losses, params, retain_graph=True)
    gradients = per_sample_gradients(losses, params, retain_graph=True)
    assert norms.shape == (batch,)
    attached("norms", norms)
    attached("per-sample gradients", *gradients.values())
    assert {k: g.shape for k, g in gradients.items()} == {k: (batch, *p.shape) for k, p in params.items()}
    compare("norms", norms, size, size)
    compare("per-sample gradients", flat(gradients), flat(loop), size)
    for style, way in tried(case, batch, seed, clip_at_the_median(size), every):
        expected = flat(clipped_loop(loop, style))
        clipped = clipped_gradients(losses, params, style, retain_graph=True, way=way)
        what = f"{type(style).__name__} clipped sum ({way or 'chosen way'})"
        compare(what, flat_sum(clipped.gradients)[None], expected.sum(0)[None], expected.norm(dim=1).sum()[None])
        compare(f"norms of the {what}", clipped.norms, size, size)
        attached(what, clipped.norms, *clipped.gradients.values())
    return found


@pytest.mark.parametrize("case", DOUBLE)
def test_agrees_with_the_loop_in_float64(case: Case) -> None:
    """One model object and its cached plan through all batch sizes, a batch of one first, then other data."""
    found = [text for batch in case.batches for text in disagreements(case, batch, 0, torch.float64)]
    found += disagreements(case, case.batches[1], 1, torch.float64)
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_the_loop_in_float32(case: Case) -> None:
    """Every style in every way at every size."""
    found = [text for batch in case.batches for text in disagreements(case, batch, 0, torch.float32, every=True)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_leaves_nothing_behind(case: Case) -> None:
    dtype = precision(case)
    model = case.model(dtype=dtype)
    params = named(model)
    for p in params.values():
        p.grad = torch.full_like(p, 7.0)
    losses = case.losses(model, case.batches[1], dtype=dtype)
    with untouched(model):
        per_sample_norms(losses, params, retain_graph=True)
        per_sample_gradients(losses, params, retain_graph=True)
        clipped_gradients(losses, params, Abadi(1.0))


INPUTS = ["mlp", "conv2d", "bias_table", "class_token_position_3d", "attention_sequence_first", "lstm", "scalar_scale"]


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_may_require_gradients(name: str) -> None:
    """An input that is a leaf of the graph is data, not a parameter."""
    case = BY_NAME[name]
    model = case.model()
    params = named(model)
    for batch in case.batches:
        data = {key: value.requires_grad_() for key, value in case.draw(batch).items()}
        losses = case.loss(model, **data)
        loop = loop_gradients(losses, params)
        error = relative_errors(flat(per_sample_gradients(losses, params)), flat(loop), norms_of(loop), torch.float64)
        assert error.max() <= 1e-10
        assert all(value.grad is None for value in data.values())


def test_losses_made_of_gradients_are_exact_or_refused() -> None:
    """A gradient penalty: the parameters are used a second time by the backward pass inside the losses."""
    case = BY_NAME["mlp"]
    model = case.model()
    params = named(model)
    x = case.draw(4)["x"].requires_grad_()
    out = torch.tanh(model(x)).sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    losses = (slope.norm(dim=1) - 1).square()
    loop = loop_gradients(losses, params)
    try:
        norms = per_sample_norms(losses, params)
    except (UnsupportedNode, NotSeparable):
        return
    assert torch.allclose(norms, norms_of(loop), rtol=1e-10)


def test_bfloat16_parameters() -> None:
    """Norms of a model kept in bfloat16 are those of its rounded gradients."""
    case = BY_NAME["mlp_on_sequences"]
    model = case.model(dtype=torch.bfloat16)
    params = named(model)
    losses = case.losses(model, 4, dtype=torch.bfloat16)
    loop = loop_gradients(losses, params)
    assert (
        relative_errors(per_sample_norms(losses, params), norms_of(loop), norms_of(loop), torch.bfloat16).max() < 0.03
    )


@pytest.mark.parametrize("name", ["mlp_on_sequences", "conv2d", "embedding_tied_head", "attention_batch_first"])
def test_a_step_inside_autocast_is_as_exact_as_outside(name: str) -> None:
    """Products in bfloat16 would give norms that read low, and a sum beyond its bound."""
    case = BY_NAME[name]
    model = case.model(dtype=torch.float32)
    params = named(model)
    losses = case.losses(model, 4, dtype=torch.float32)
    outside = clipped_gradients(losses, params, Abadi(0.1), retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = clipped_gradients(losses, params, Abadi(0.1), retain_graph=True)
        norms = per_sample_norms(losses, params)
    assert torch.equal(inside.norms, outside.norms) and torch.allclose(norms, outside.norms)
    assert torch.equal(flat_sum(inside.gradients), flat_sum(outside.gradients))


def mlp() -> tuple[torch.nn.Module, dict[str, torch.nn.Parameter], Tensor]:
    case = BY_NAME["mlp"]
    model = case.model()
    return model, named(model), case.losses(model, 5)


def test_results_are_keyed_as_the_parameters_were_given() -> None:
    model, params, losses = mlp()
    by_name = per_sample_gradients(losses, params, retain_graph=True)
    by_tensor = per_sample_gradients(losses, model.parameters(), retain_graph=True)
    assert list(by_name) == list(params)
    assert all(a is b for a, b in zip(by_tensor, model.parameters(), strict=True))
    assert all(torch.equal(by_name[name], by_tensor[p]) for name, p in params.items())
    clipped = clipped_gradients(losses, list(model.parameters()), Abadi(1.0))
    assert all(a is b for a, b in zip(clipped.gradients, model.parameters(), strict=True))


def test_some_parameters_only() -> None:
    _, params, losses = mlp()
    some = {"2.bias": params["2.bias"], "0.weight": params["0.weight"]}
    loop = loop_gradients(losses, some)
    assert torch.allclose(per_sample_norms(losses, some), norms_of(loop), rtol=1e-12)


def test_retain_graph_leaves_the_graph_for_an_ordinary_backward() -> None:
    _, params, losses = mlp()
    loop = loop_gradients(losses, params)
    per_sample_norms(losses, params, retain_graph=True)
    clipped_gradients(losses, params, Abadi(0.1), retain_graph=True)
    losses.sum().backward()
    for name, p in params.items():
        assert p.grad is not None and torch.allclose(p.grad, loop[name].sum(0), rtol=1e-12)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["mlp", "conv2d", "embedding_tied_head", "attention_batch_first"])
def test_empty_batch_gives_zeros(name: str, way: str | None) -> None:
    case = BY_NAME[name]
    model = case.model()
    params = named(model)
    losses = case.loss(model, **{key: value[:0] for key, value in case.draw(2).items()})
    assert losses.shape == (0,)
    assert per_sample_norms(losses, params, retain_graph=True).shape == (0,)
    gradients = per_sample_gradients(losses, params, retain_graph=True)
    assert {k: g.shape for k, g in gradients.items()} == {k: (0, *p.shape) for k, p in params.items()}
    clipped = clipped_gradients(losses, params, Abadi(1.0), way=way)
    assert all(not g.any() and g.shape == params[k].shape for k, g in clipped.gradients.items())


def test_empty_losses_without_a_graph_give_zeros() -> None:
    _, params, _ = mlp()
    clipped = clipped_gradients(torch.zeros(0, dtype=torch.float64), params, Abadi(1.0))
    assert all(not g.any() and g.shape == params[k].shape for k, g in clipped.gradients.items())


def test_check_says_which_operands_it_could_not_see() -> None:
    """What `add`, `sub`, `cat` and `stack` do not save may be a constant or the batch: the graph is the same."""
    w = torch.randn(2, 4, requires_grad=True)
    x, other = torch.randn(5, 4), torch.randn(2, 4)
    for made in (w + other, w - other, torch.cat([w, other]), torch.stack([w, other]).flatten(0, 1)):
        found = check((x @ made.T).square().sum(1), {"w": w})
        assert len(found.unseen) == 1 and found.unseen[0].endswith("(w)")
        assert found.unseen[0] in str(found) and "not seen" in str(found)
    product = (x @ (w * other).T).square().sum(1)
    assert len(check(product, {"w": w}).unseen) == 1
    assert check(product, {"w": w}, constants=other).unseen == ()  # what was saved lies in declared memory
    assert check((x @ w.tanh().T).square().sum(1), {"w": w}).unseen == ()


@pytest.mark.parametrize("way", WAYS)
def test_declared_constants_count_beside_a_bad_sample_too(way: str | None) -> None:
    """A table as long as the batch; with a second backward the uses were formed again as if nothing was declared."""
    torch.manual_seed(0)
    w, table = torch.randn(3, 5, requires_grad=True), torch.randn(4, 3)
    losses = (torch.randn(4, 5) * (table @ w).tanh().mean(0)).sum(1).square()
    bad = torch.tensor([1.0, float("nan"), 1.0, 1.0])
    found = clipped_gradients(losses * bad, {"w": w}, Abadi(1.0), way=way, constants=table)  # type: ignore[arg-type]
    assert found.bad.tolist() == [False, True, False, False]


def test_unused_parameter_is_zero_and_named_by_check() -> None:
    case = BY_NAME["unused_parameter"]
    model = case.model()
    params = named(model)
    losses = case.losses(model, 4)
    gradients = per_sample_gradients(losses, params, retain_graph=True)
    assert not gradients["spare.weight"].any() and not gradients["spare.bias"].any()
    assert "spare.weight" in str(check(losses, params))


def test_scaling_the_losses_scales_the_norms() -> None:
    """Loss scaling by a power of two is exact."""
    _, params, losses = mlp()
    norms = per_sample_norms(losses, params, retain_graph=True)
    assert torch.equal(per_sample_norms(losses * 2.0**16, params), norms * 2.0**16)


def test_order_of_samples_does_not_matter() -> None:
    case = BY_NAME["transformer_encoder_padded"]
    model = case.model()
    params = named(model)
    data, order = case.draw(5), torch.tensor([3, 0, 4, 2, 1])
    norms = per_sample_norms(case.loss(model, **data), params)
    permuted = per_sample_norms(case.loss(model, **{key: value[order] for key, value in data.items()}), params)
    assert torch.allclose(permuted, norms[order], rtol=1e-10)


@pytest.mark.parametrize("style", [Flat(Abadi(0.1)), Layerwise(Abadi(0.1))], ids=["flat", "layerwise"])
def test_factors_are_those_of_the_rule(style: Style) -> None:
    _, params, losses = mlp()
    loop = loop_gradients(losses, params)
    factors = clipped_gradients(losses, params, style).factors
    for group, names in groups_of(style, params).items():
        expected = style.rule_of(group)(norms_of({name: loop[name] for name in names}))
        actual = factors if isinstance(factors, Tensor) else factors[group]
        assert torch.allclose(actual, expected, rtol=1e-10)


def test_the_zoo_is_complete_where_its_packages_are_installed() -> None:
    """Case names are unique, and the packages that cases need are importable, so none is left out in silence."""
    import peft
    import transformers

    assert transformers.__version__ and peft.__version__
    assert len(BY_NAME) == len(CASES) >= 60
