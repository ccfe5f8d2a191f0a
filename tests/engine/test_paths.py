"""The ways of the engine that small models would not take: streaming, ghost norms or not, chunks, large kernels."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clipwise.clipping import Abadi, Flat, Layerwise, Normalize
from clipwise.engine import Clipper, Total, check, clipped_gradients, per_sample_gradients, per_sample_norms
from clipwise.engine.cache import Engine
from clipwise.engine.cost import Way
from clipwise.engine.grams import Gram
from clipwise.engine.joint import joint_squared_norms
from clipwise.engine.parameters import Parameters
from clipwise.engine.rules.conv import Geometry, gram_of_patches
from clipwise.engine.uses import Dense, Gathered, Outer
from tests.zoo import BY_NAME, named

from .reference import clipped_loop, flat, flat_sum, loop_gradients, norms_of, relative_errors, tolerance, untouched

Patch = Callable[[pytest.MonkeyPatch], None]


def pairs_of_samples(use: object, limit: int = 0) -> list[slice]:
    batch = use.batch_size  # type: ignore[attr-defined]
    return [slice(start, min(start + 2, batch)) for start in range(0, batch, 2)]


def in_chunks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("clipwise.engine.uses.chunks", pairs_of_samples)
    patch.setattr("clipwise.engine.joint.chunks", pairs_of_samples)
    patch.setattr("clipwise.engine.run.chunks", pairs_of_samples)


def pixel_grams(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("clipwise.engine.rules.conv._LARGE_WEIGHT", 0)
    patch.setattr("clipwise.engine.rules.conv._GRAM_ELEMENTS", 0)
    patch.setattr(
        "clipwise.engine.rules.conv.Convolved._pixels_suffice",
        property(lambda use: use.geometry.stride == (1, 1)),
    )


def cut_grams(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("clipwise.engine.uses.Outer.ghost_is_cheaper", True)
    patch.setattr("clipwise.engine.grams._WORTH_CUTTING", 0)


def kept(patch: pytest.MonkeyPatch) -> None:
    """Gradients of samples are formed and kept wherever that is possible, also where they take more memory."""
    patch.setattr("clipwise.engine.plan._SMALL", 0)
    patch.setattr("clipwise.engine.uses.Outer.ghost_is_cheaper", True)
    patch.setattr("clipwise.engine.cost._MOVED", -1)
    patch.setattr("clipwise.engine.cost._SHARE", 1e9)


PATHS: dict[str, Patch] = {
    "streaming": lambda patch: patch.setattr("clipwise.engine.plan._SMALL", 0),
    "ghost_norms": lambda patch: patch.setattr("clipwise.engine.uses.Outer.ghost_is_cheaper", True),
    "instantiated": lambda patch: patch.setattr("clipwise.engine.uses.Outer.ghost_is_cheaper", False),
    "chunks": in_chunks,
    "large_kernels": lambda patch: patch.setattr("clipwise.engine.rules.conv._LARGE_WEIGHT", 0),
    "pixel_grams": pixel_grams,
    "cut_grams": cut_grams,
    "kept": kept,
}

CASES = [
    "mlp", "mlp_on_sequences", "residual_sequence_first", "deep_recurrent_reuse", "tied_autoencoder_sequences",
    "hypernetwork", "weight_norm", "lora_merged", "checkpointed", "matmul_heads", "bmm_shared_heads",
    "einsum_bthd_hde", "conv1d_depthwise", "conv2d_grouped", "conv2d_dilated", "conv_transposed_2d_grouped",
    "conv3d", "conv_two_sizes", "resnet_group_norm", "layer_norm", "rms_norm", "batch_norm_eval",
    "prelu_channels", "embedding_tied_head", "embedding_padding_idx", "embedding_bag_offsets_max",
    "lstm_two_layers_bidirectional", "gru_packed", "attention_bias_kv", "transformer_decoder",
    "class_token_position_3d", "experts_in_place", "rows_sorted", "mixed_uses_of_one_parameter", "bert", "gpt2",
    "t5", "swin",
]  # fmt: skip


@cache
def loop_of(name: str, batch: int) -> dict[str, Tensor]:
    """The per-sample loop on a model of its own, once for all paths: fresh models of a case have equal weights."""
    model = BY_NAME[name].model()
    return loop_gradients(BY_NAME[name].losses(model, batch), named(model))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", CASES)
def test_every_path_agrees_with_the_loop(name: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PATHS[path](monkeypatch)
    case = BY_NAME[name]
    model = case.model()
    params = named(model)
    for batch in case.batches[1:3]:
        losses = case.losses(model, batch)
        limit = tolerance(case, losses, torch.float64)
        loop = loop_of(name, batch)
        size = norms_of(loop)
        assert (
            relative_errors(per_sample_norms(losses, params, retain_graph=True), size, size, size.dtype).max() <= limit
        )
        gradients = per_sample_gradients(losses, params, retain_graph=True)
        assert relative_errors(flat(gradients), flat(loop), size, size.dtype).max() <= limit
        for style in (Flat(Abadi(0.1)), Layerwise(Abadi(0.1))):
            expected = flat(clipped_loop(loop, style))
            got = clipped_gradients(losses, params, style, retain_graph=True, way="bookkeeping")
            error = (flat_sum(got.gradients) - expected.sum(0)).norm()
            assert error <= limit * expected.norm(dim=1).sum(), type(style)


@pytest.mark.parametrize(
    ("name", "way"),
    [*((name, "bookkeeping") for name in CASES), *((name, "second_backward") for name in ("mlp", "conv2d", "bert"))],
)
def test_a_running_sum_grows_by_the_clipped_sum(name: str, way: Way) -> None:
    """Whichever way a parameter's part is added; nothing else of it changes."""
    case = BY_NAME[name]
    model = case.model()
    params = named(model)
    torch.manual_seed(0)
    clip = Clipper(params)
    for batch in (1, *case.batches[1:3]):
        losses = case.losses(model, batch)
        alone = clipped_gradients(losses, params, Abadi(0.1), retain_graph=True, way=way)
        before = {key: torch.randn_like(p) for key, p in params.items()}
        total = Total([values.clone() for values in before.values()])
        grown = clip(losses, Abadi(0.1), onto=total, retain_graph=True, way=way)
        assert total.torn and all(a is b for a, b in zip(grown.gradients.values(), total.tensors, strict=True))
        expected = flat_sum(before) + flat_sum(alone.gradients)
        torch.testing.assert_close(flat_sum(grown.gradients), expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(grown.norms, alone.norms)
    total.end()
    clip(losses[:0], Abadi(0.1), onto=total)
    assert not total.torn and torch.equal(flat_sum(dict(enumerate(total.tensors))), flat_sum(grown.gradients))


@pytest.mark.parametrize("name", ["mlp_on_sequences", "conv2d", "bert", "gpt2"])
def test_streaming_leaves_no_hook_on_the_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the graph retained an ordinary backward pass still does what it did, and calls nothing of ours."""
    PATHS["streaming"](monkeypatch)
    case = BY_NAME[name]
    model = case.model()
    params = named(model)
    losses = case.losses(model, 4)
    loop = loop_gradients(losses, params)
    with untouched(model):
        result = clipped_gradients(losses, params, Abadi(0.1), retain_graph=True, way="bookkeeping")
    before = flat_sum(result.gradients)
    losses.sum().backward()
    assert torch.equal(flat_sum(result.gradients), before)
    for key, p in params.items():
        assert p.grad is not None and torch.allclose(p.grad, loop[key].sum(0), rtol=1e-9, atol=1e-12)


def cancelling(layer: nn.Module, x: Tensor) -> Tensor:
    """Positions pull in opposite directions, so that a sample's gradient is far smaller than its terms."""
    signs = torch.tensor([1.0, -1.0] * (x.shape[1] // 2), dtype=x.dtype)
    return (torch.tanh(layer(x)).sum(-1) * signs).sum(1)


@pytest.mark.parametrize("rest", [1.0, 0.1, 0.01])
def test_terms_that_cancel_do_not_break_the_bound_in_float32(rest: float) -> None:
    """Gram matrices lose twice the digits that the gradient loses: a norm that reads low lets a sample through."""
    torch.manual_seed(0)
    layer = nn.Linear(32, 32, bias=False)
    params = named(layer)
    x = torch.randn(8, 1, 32) + 0.1 * rest * torch.randn(8, 8, 32)
    loop = loop_gradients(cancelling(layer, x), params)
    norms = per_sample_norms(cancelling(layer, x), params)
    limit = 1e-5 / min(1.0, 10 * rest)
    assert relative_errors(norms, norms_of(loop), norms_of(loop), torch.float32).max() <= limit
    for sample in range(8):
        only = torch.nn.functional.one_hot(torch.tensor(sample), 8)
        clipped = clipped_gradients(cancelling(layer, x) * only, params, Normalize(1.0))
        assert flat_sum(clipped.gradients).norm() <= 1 + limit


@pytest.mark.parametrize("way", ["bookkeeping", "second_backward"])
@pytest.mark.parametrize("bad", [False, True])
def test_doubtful_norms_are_settled_before_they_are_used(way: Way, bad: bool) -> None:
    """At steps without a check against autograd all doubts are looked at together, also beside a loss that is NaN."""
    torch.manual_seed(0)
    layer = nn.Linear(32, 32, bias=False)
    params = named(layer)
    x = torch.randn(8, 1, 32) + 1e-3 * torch.randn(8, 8, 32)
    expected = per_sample_norms(cancelling(layer.double(), x.double()), named(layer))
    layer.float()
    for step in range(3):
        losses = cancelling(layer, x)
        if bad and step:
            losses = losses + torch.tensor([torch.nan] + 7 * [0.0])
        clipped = clipped_gradients(losses, params, Normalize(1.0), way=way)
        assert clipped.bad.tolist() == [bad and step > 0] + 7 * [False]
        found = clipped.norms[~clipped.bad].double()
        torch.testing.assert_close(found, expected[~clipped.bad], rtol=1e-3, atol=0)


@pytest.mark.parametrize("rest", [1.0, 0.1, 0.01])
def test_pixels_that_cancel_do_not_break_the_bound_in_float32(rest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for inner products of patches, which are sums of inner products of pixels."""
    pixel_grams(monkeypatch)
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 12, 3, padding=1, bias=False)
    params = named(layer)
    x = torch.randn(6, 8, 1, 1) + 0.1 * rest * torch.randn(6, 8, 6, 6)
    signs = (-1.0) ** torch.arange(36).view(6, 6)

    def losses() -> Tensor:
        inner = torch.zeros(6, 6)
        inner[1:-1, 1:-1] = 1.0  # pixels at the edge see padding, and would not cancel
        return (torch.tanh(layer(x)) * signs * inner).flatten(1).sum(1)

    loop = loop_gradients(losses(), params)
    limit = 1e-5 / min(1.0, 10 * rest)
    norms = per_sample_norms(losses(), params)
    assert relative_errors(norms, norms_of(loop), norms_of(loop), torch.float32).max() <= limit


@pytest.mark.parametrize(
    ("size", "kernel", "padding", "dilation"),
    [((8, 8), (3, 3), (1, 1), (1, 1)), ((6, 9), (3, 2), (0, 0), (1, 2)), ((4, 5), (5, 1), (6, 0), (1, 1)),
     ((20, 3), (2, 3), (16, 2), (9, 2))],
)  # fmt: skip
def test_inner_products_of_patches_from_those_of_pixels(
    size: tuple[int, int], kernel: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    pixels = torch.randn(3, 4, *size, dtype=torch.float64)
    patches = torch.nn.functional.unfold(pixels, kernel, dilation=dilation, padding=padding)
    outputs = [s + 2 * p - d * (k - 1) for s, p, d, k in zip(size, padding, dilation, kernel, strict=True)]
    geometry = Geometry((1, 1), padding, dilation, False, (0, 0), 1)
    torch.testing.assert_close(gram_of_patches(pixels, kernel, geometry, outputs), patches.mT @ patches)


def test_query_key_and_value_share_inner_products_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    PATHS["ghost_norms"](monkeypatch)
    counted: list[int] = []
    original = Gram.of
    monkeypatch.setattr(Gram, "of", lambda vectors: counted.append(vectors.data_ptr()) or original(vectors))  # type: ignore[func-returns-value]
    torch.manual_seed(0)
    maps = nn.ModuleList(nn.Linear(6, 5, bias=False) for _ in range(3)).double()
    params = named(maps)
    x = torch.randn(4, 7, 6, dtype=torch.float64)
    other = x.clone()

    def losses(third: Tensor) -> Tensor:
        q, k, v = (layer(data) for layer, data in zip(maps, (x, x, third), strict=True))
        return (q * k * v).flatten(1).sum(1)

    for third, grams in ((x, 4), (other, 5)):
        loop = loop_gradients(losses(third), params)
        counted.clear()
        result = clipped_gradients(losses(third), params, Abadi(1e9), way="bookkeeping")
        torch.testing.assert_close(result.norms, norms_of(loop))
        counted.clear()
        clipped_gradients(losses(third), params, Abadi(1e9), way="bookkeeping")
        assert len(counted) == grams


def test_powers_of_a_parameter_to_exponents_of_the_batch() -> None:
    """The derivative is e p^(e-1), also where p = 0 and e = 0: there it is 0, and not 0 times infinity."""
    p = torch.nn.Parameter(torch.tensor([0.0, 1.5, 2.0, 0.5], dtype=torch.float64))
    e = torch.tensor([[0.0, 2.0, 0.0, 1.0], [1.0, 0.0, 3.0, 0.5], [2.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    expected = [[0.0, 3.0, 0.0, 1.0], [1.0, 0.0, 12.0, 0.5 * 0.5**-0.5], [0.0, 1.0, 1.0, 1.0]]
    found = per_sample_gradients((p**e).sum(1), {"p": p})["p"]
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("turned", ["left", "right", "both", "neither"])
def test_the_two_sides_of_a_product_may_lie_differently_in_memory(turned: str) -> None:
    torch.manual_seed(0)
    left, right, factors = torch.randn(4, 7, 40), torch.randn(4, 7, 30), torch.rand(4)
    expected = torch.einsum("b,btm,btn->mn", factors, left, right)
    if turned in ("left", "both"):
        left = left.transpose(0, 1).contiguous().transpose(0, 1)
    if turned in ("right", "both"):
        right = right.transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(Outer(left, right, (40, 30)).weighted(factors), expected)
    torch.testing.assert_close(Outer(right, left, (30, 40)).weighted(factors), expected.T)


def test_every_use_is_let_go_as_its_sum_is_formed() -> None:
    """Doubts about norms that were found by Gram matrices hold uses too; they are over when the sum begins."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(3)))
    losses = model(torch.randn(4, 5, 40)).square().mean((1, 2))
    with torch.no_grad():
        backward = Engine().backward(losses, Parameters(named(model)), keep=False)
        backward.squared_norms()
        factors, uses = torch.ones(4), [use for each in backward.uses.values() for use in each]
        held = [weakref.ref(use) for use in uses if isinstance(use, Outer) and use.ghost_is_cheaper]
        del uses
        alive: list[int] = []

        def counted(parameter: int) -> Tensor:
            alive.append(sum(ref() is not None for ref in held))
            return factors

        backward.weighted(counted, consume=True)
    assert len(held) == 3 and alive[0] == 3 and alive[-1] <= 1  # the last one is in hand


def test_the_memory_that_check_tells_is_that_of_the_sums_and_of_what_is_held() -> None:
    model = nn.Linear(6, 3)
    found = check(model(torch.randn(4, 6)).square().sum(1), named(model)).bytes
    assert found["second_backward"] == 4 * (18 + 3)
    assert found["bookkeeping"] > found["second_backward"]


def test_parts_of_a_parameter_along_its_last_axis_count_from_either_end() -> None:
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(4, 6, dtype=torch.float64))
    x = torch.randn(5, 4, dtype=torch.float64)

    def losses() -> Tensor:
        hidden = torch.tanh(x @ w[:, :3]) + torch.tanh(x @ w.narrow(-1, 3, 3))
        return hidden.sum(1) + (x * w.select(-1, 5)).sum(1).square()

    expected = norms_of(loop_gradients(losses(), {"w": w}))
    torch.testing.assert_close(per_sample_norms(losses(), {"w": w}), expected)
    clipped = clipped_gradients(losses(), {"w": w}, Abadi(0.1), way="bookkeeping").gradients
    torch.testing.assert_close(
        flat_sum(clipped), flat(clipped_loop(loop_gradients(losses(), {"w": w}), Flat(Abadi(0.1)))).sum(0)
    )


def test_uses_of_one_matrix_add_before_they_are_squared() -> None:
    """Whatever the kinds of the two: a product and a table have a way of their own, a product and others have none."""
    torch.manual_seed(0)
    outer = Outer(torch.randn(3, 2, 4), torch.randn(3, 2, 5), (4, 5))
    table = Gathered(torch.randint(4, (3, 6)), torch.randn(3, 6, 5), (4, 5))
    for other in (table, Dense(torch.randn(3, 4, 5), (4, 5))):
        expected = (outer.gradients() + other.gradients()).square().sum((1, 2))
        torch.testing.assert_close(joint_squared_norms([outer, other]), expected)


@pytest.mark.parametrize("small", [0, 1 << 30])
def test_a_part_of_a_model_may_be_checkpointed(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipwise.engine.plan._SMALL", small)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).double()
    x, params = torch.randn(6, 4, dtype=torch.float64), named(model)

    def losses() -> Tensor:
        return checkpoint(model[1], model[0](x).tanh(), use_reentrant=False).square().sum(1)

    torch.testing.assert_close(per_sample_norms(losses(), params), norms_of(loop_gradients(losses(), params)))


def test_several_images_of_a_sample_add_also_under_a_large_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    PATHS["large_kernels"](monkeypatch)
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 3, 3).double()
    params = named(layer)
    x = torch.randn(4, 2, 2, 5, 5, dtype=torch.float64)

    def losses() -> Tensor:
        return layer(x.flatten(0, 1)).tanh().view(4, -1).sum(1)

    torch.testing.assert_close(per_sample_norms(losses(), params), norms_of(loop_gradients(losses(), params)))


@pytest.mark.parametrize(
    "question", [per_sample_norms, per_sample_gradients, lambda *of: clipped_gradients(*of, Abadi(1.0))]
)
@pytest.mark.parametrize("size", [1, 3])
def test_the_graph_is_freed_unless_it_is_to_be_kept(question: Callable[..., object], size: int) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    for _ in range(2):  # the first time a plan is made, which needs the graph more often
        losses = model(torch.ones(size, 4)).squeeze(1).square()
        question(losses, list(model.parameters()))
    with pytest.raises(RuntimeError, match="second time"):
        losses.sum().backward()


class Cubed(torch.autograd.Function):
    """A function of a user, which vmap cannot batch."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return w**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (w,) = ctx.saved_tensors
        return grads[0] * 3 * w**2


Use: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]  # data (B, 4), matrices (4, 4) a and b -> (B, any)
TO_A_PARAMETER: dict[str, Use] = {
    "itself and a function of it": lambda x, a, b: x @ a + x @ a.tanh(),
    "turned and a function of it": lambda x, a, b: x @ a.t() + (x @ a.tanh()).sigmoid(),
    "itself and in another shape": lambda x, a, b: x @ a + x @ a.view(2, 8).reshape(4, 4).tanh(),
    "itself and turned": lambda x, a, b: (x @ a).tanh() @ a.t(),
    "a part of it, twice": lambda x, a, b: (x @ a[:, :2]).tanh() @ a[:, :2].t(),
    "parts that overlap": lambda x, a, b: x @ a[:, :3] + (x @ a[:, 1:]).tanh(),
    "every second column": lambda x, a, b: x @ a[:, ::2],
    "a function of two": lambda x, a, b: x @ (a * b) + x @ a,
    "functions of one and of both": lambda x, a, b: x @ (a * b) + (x @ b.tanh()).sigmoid(),
    "a function of a user": lambda x, a, b: x @ Cubed.apply(a) + x @ b,
    "one operand of two products": lambda x, a, b: (lambda t: (x @ t).tanh() @ t)(a.t()),
    "rows of a function": lambda x, a, b: a.tanh()[(x > 0).long()].flatten(1) * 0.5,
    "a function that is turned": lambda x, a, b: x @ (a + b).t() + (x @ (a + b)).tanh(),
}


@pytest.mark.parametrize("small", [False, True], ids=["at once", "in chunks"])
@pytest.mark.parametrize("name", TO_A_PARAMETER)
def test_every_way_from_an_operand_to_its_parameter(name: str, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if small:
        in_chunks(monkeypatch)
    torch.manual_seed(0)
    params = {key: nn.Parameter(torch.randn(4, 4, dtype=torch.float64)) for key in ("one.a", "two.b")}
    for batch in (3, 4):
        x = torch.randn(batch, 4, dtype=torch.float64)
        losses = TO_A_PARAMETER[name](x, *params.values()).square().sum(1)
        loop = loop_gradients(losses, params)
        size = norms_of(loop)
        torch.testing.assert_close(per_sample_norms(losses, params, retain_graph=True), size)
        torch.testing.assert_close(flat(per_sample_gradients(losses, params, retain_graph=True)), flat(loop))
        for style in (Flat(Abadi(0.1)), Layerwise(Abadi(0.1))):
            for way in ("bookkeeping", "second_backward"):
                found = clipped_gradients(losses, params, style, retain_graph=True, way=way)  # type: ignore[arg-type]
                torch.testing.assert_close(flat_sum(found.gradients), flat(clipped_loop(loop, style)).sum(0))


HALVED: dict[str, Callable[[Tensor], Tensor]] = {
    "cast": lambda a: a.bfloat16(),
    "cast and turned": lambda a: a.bfloat16().t(),
    "turned and cast": lambda a: a.t().bfloat16(),
    "part of a cast": lambda a: a.bfloat16()[:, 1:],
    "another shape": lambda a: a.bfloat16().view(2, 8).view(4, 4),
    "axes swapped": lambda a: a.bfloat16().unsqueeze(0).permute(2, 0, 1)[:, 0],
}


@pytest.mark.parametrize("way", ["bookkeeping", "second_backward"])
@pytest.mark.parametrize("name", HALVED)
def test_a_weight_that_is_cast_is_clipped_without_rounding_its_sum(name: str, way: Way) -> None:
    """Samples of the same gradient: the sum is a multiple of it, which half precision would round."""
    torch.manual_seed(0)
    a, b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
    x = torch.randn(1, 4).expand(257, 4)
    losses = ((x.bfloat16() @ HALVED[name](a)).float() + (x @ b).sum(1, keepdim=True)).sum(1)
    params = {"a": a, "b": b}
    one = {key: g[:1] for key, g in loop_gradients(losses[:1], params).items()}
    found = clipped_gradients(losses, params, Abadi(1e-3), way=way)
    expected = 257 * flat(clipped_loop(one, Flat(Abadi(1e-3))))[0]
    torch.testing.assert_close(flat_sum(found.gradients), expected, rtol=2e-3, atol=1e-6)
    assert float(flat_sum(found.gradients).norm()) <= 257e-3 * (1 + 1e-5)
