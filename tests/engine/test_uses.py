"""Every kind of use, by itself: norms, gradients and weighted sums are those of gradients written out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from clipwise.engine import grams
from clipwise.engine.grams import Doubts, Gram, Recent, cancelled, ghost_norms, same_memory
from clipwise.engine.joint import joint_squared_norms, summed
from clipwise.engine.lengths import Lengths, sure_lengths
from clipwise.engine.rules.conv import Convolved, Geometry
from clipwise.engine.rules.linear import Segmented
from clipwise.engine.uses import (
    Dense,
    Gathered,
    Outer,
    Pieces,
    Use,
    accurate,
    chunks,
    squares,
    weighted_sum,
)  # fmt: skip

B = 4
Made: TypeAlias = tuple[Use, Tensor]  # and its gradients, (B, *shape), written out
DOUBLE = torch.float64


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DOUBLE)


def dense(*shape: int) -> Made:
    gradients = numbers(B, *shape)
    return Dense(gradients, shape), gradients


def reshaped() -> Made:
    gradients = numbers(B, 1, 6)
    return Dense(gradients, (2, 3)), gradients.view(B, 2, 3)


def in_pieces(*sizes: int) -> Made:
    gradients = numbers(B, 3, 2)
    return Pieces([Dense(part, (3, 2)) for part in gradients.split(sizes)]), gradients


def outer(*sizes: int, shape: tuple[int, ...] | None = None) -> Made:
    """(*E, T, m, n), or (m, n) for one position."""
    *leading, m, n = sizes
    left, right = numbers(B, *leading, m), numbers(B, *leading, n)
    if not leading:
        gradients = torch.stack([torch.outer(a, b) for a, b in zip(left, right, strict=True)])
    else:
        gradients = torch.einsum("b...tm,b...tn->b...mn", left, right)
    shape = shape or tuple(gradients.shape[1:])
    return Outer(left, right, shape), gradients.reshape(B, *shape)


def table(shape: tuple[int, ...], entries: int, axes: int = 1, padding: bool = False) -> Made:
    """Rows of a table, some of them twice; one index for `axes` axes."""
    rows, width = torch.Size(shape[:axes]).numel(), torch.Size(shape[axes:]).numel()
    index = torch.randint(rows, (B, entries))
    index[:, 0] = 0
    index[:, 1] = index[:, -1]
    if padding:
        index[0, 1] = index[2, :2] = -1
    values = numbers(B, entries, width)
    gradients = torch.zeros(B, rows, width, dtype=DOUBLE)
    for sample in range(B):
        for k in range(entries):
            if index[sample, k] >= 0:
                gradients[sample, index[sample, k]] += values[sample, k]
    use = Gathered(index, values, shape, None if axes == 1 else rows, padded=bool((index < 0).any()))
    return use, gradients.view(B, *shape)


def convolved(images: int, groups: int = 1, transposed: bool = False, **options: int) -> Made:
    weight = numbers(*((4, 3, 3, 2) if transposed else (6, 4 // groups, 3, 2))).requires_grad_()
    call = F.conv_transpose2d if transposed else F.conv2d
    inputs = numbers(B, images, 4, 6, 5)
    out = call(inputs.flatten(0, 1), weight, groups=groups, **options)
    cotangent = torch.randn_like(out)
    rows = [
        torch.autograd.grad(out.unflatten(0, (B, images))[i], weight, cotangent.unflatten(0, (B, images))[i],
                            retain_graph=True)[0] for i in range(B)
    ]  # fmt: skip
    pairs = {key: (options.get(key, default),) * 2 for key, default in (("stride", 1), ("padding", 0), ("dilation", 1))}
    geometry = Geometry(pairs["stride"], pairs["padding"], pairs["dilation"], transposed, (0, 0), groups)
    outputs = cotangent.unflatten(0, (B, images))
    return Convolved(inputs, outputs, tuple(weight.shape), geometry), torch.stack(rows)


def segmented() -> Made:
    """Three experts; a sample may have rows of several, and one has none."""
    sample, expert = torch.tensor([0, 0, 2, 3, 3]), torch.tensor([0, 2, 1, 1, 2])
    left, right = numbers(5, 2, 3), numbers(5, 2, 4)
    gradients = torch.zeros(B, 3, 3, 4, dtype=DOUBLE)
    for k in range(5):
        gradients[sample[k], expert[k]] = left[k].T @ right[k]
    return Segmented(left, right, sample, expert, (3, 3, 4), B), gradients


USES: dict[str, Callable[[], Made]] = {
    "number": lambda: dense(),
    "bias": lambda: dense(3),
    "matrix": lambda: dense(3, 2),
    "kernel": lambda: dense(2, 3, 2),
    "reshaped": reshaped,
    "in pieces": lambda: in_pieces(2, 1, 1),
    "in one piece": lambda: in_pieces(4),
    "one position": lambda: outer(3, 5),
    "one position, long and narrow": lambda: outer(20, 5),
    "one position, short and wide": lambda: outer(5, 20),
    "one position of a sequence": lambda: outer(1, 3, 5),
    "one position of each expert": lambda: outer(2, 1, 3, 5),
    "few positions": lambda: outer(2, 6, 5),
    "few positions, wide": lambda: outer(2, 5, 8),
    "many positions": lambda: outer(7, 3, 5),
    "stacks": lambda: outer(2, 2, 6, 5),
    "stacks of many": lambda: outer(2, 7, 3, 4),
    "in another shape": lambda: outer(2, 6, 4, shape=(3, 2, 4)),
    "table": lambda: table((5, 3), 4),
    "padded table": lambda: table((5, 3), 4, padding=True),
    "table of two axes": lambda: table((2, 3, 4), 5, axes=2),
    "convolution": lambda: convolved(1),
    "several images": lambda: convolved(3, padding=1),
    "strided": lambda: convolved(1, stride=2, padding=2, dilation=2),
    "grouped": lambda: convolved(2, groups=2),
    "transposed": lambda: convolved(1, transposed=True, stride=2),
    "by expert": segmented,
}


def made(name: str) -> Made:
    torch.manual_seed(0)
    return USES[name]()


def spread(gradients: Tensor, factors: Tensor) -> Tensor:
    return torch.einsum("b,b...->...", factors, gradients)


@pytest.mark.parametrize("name", USES)
def test_a_use_answers_as_its_gradients_do(name: str) -> None:
    use, gradients = made(name)
    squared = gradients.reshape(B, -1).square().sum(1)
    factors, bad = torch.rand(B, dtype=DOUBLE), torch.tensor([False, True, False, False])
    assert use.batch_size == B and use.shape == gradients.shape[1:]
    torch.testing.assert_close(use.squared_norms(), squared)
    for some in (slice(None), slice(0, 1), slice(1, 3), slice(3, 9)):
        torch.testing.assert_close(use.gradients(some), gradients[some])
    torch.testing.assert_close(use.weighted(factors), spread(gradients, factors))
    torch.testing.assert_close(use.weighted(factors.float()), spread(gradients, factors.float().double()))
    before = numbers(*gradients.shape[1:])
    total = before.clone()
    use.add_weighted(factors, total)
    torch.testing.assert_close(total, before + spread(gradients, factors))
    rounded = before.float()
    use.add_weighted(factors, rounded)
    torch.testing.assert_close(rounded, total.float(), rtol=1e-5, atol=1e-5)
    norms, kept = use.settled(Recent())
    torch.testing.assert_close(norms, squared)
    torch.testing.assert_close(kept.weighted(factors), spread(gradients, factors))
    factors_of_norms = use.row_factors()
    if factors_of_norms is not None:
        lengths = torch.stack([rows.norm(dim=1) for rows in factors_of_norms])
        torch.testing.assert_close(lengths.prod(0).square(), squared)
    rest = use.without(bad)
    torch.testing.assert_close(rest.squared_norms(), squared.masked_fill(bad, 0))
    torch.testing.assert_close(rest.weighted(factors), spread(gradients, factors.masked_fill(bad, 0)))


@pytest.mark.parametrize("name", USES)
def test_whatever_a_bad_sample_holds_is_left_out(name: str) -> None:
    use, gradients = made(name)
    gradients = gradients.clone()
    for part in ("_gradients", "left", "right", "inputs", "outputs"):
        held = getattr(use, part, None)
        if held is not None:
            owners = getattr(use, "sample", torch.arange(B))
            held[owners == 2] = torch.nan
    factors = torch.tensor([0.5, 1.0, 0.0, 2.0], dtype=DOUBLE)
    rest = use.without(torch.tensor([False, False, True, False]))
    torch.testing.assert_close(rest.weighted(factors), spread(gradients, factors))
    assert not bool(rest.squared_norms()[2])


@pytest.mark.parametrize("name", ["matrix", "kernel", "one position", "few positions", "many positions", "stacks"])
def test_a_use_of_the_transposed_matrix(name: str) -> None:
    use, gradients = made(name)
    assert isinstance(use, (Dense, Outer))
    turned = use.transposed()
    assert turned.shape == gradients.mT.shape[1:]
    torch.testing.assert_close(turned.gradients(), gradients.mT)
    torch.testing.assert_close(turned.squared_norms(), use.squared_norms())


@pytest.mark.parametrize(
    ("sizes", "how"),
    [((4, 4), "lengths"), ((1, 4, 4), "lengths"), ((2, 4, 4), "ghost"), ((3, 4, 4), "instantiated"),
     ((2, 3, 6), "ghost"), ((2, 6, 3), "ghost"), ((3, 3, 6), "instantiated"), ((5, 2, 4, 4), "ghost"),
     ((2, 5, 4, 4), "instantiated"), ((2, 2, 9), "instantiated"), ((4, 12, 6), "ghost"), ((5, 12, 6), "instantiated")],
)  # fmt: skip
def test_inner_products_of_positions_where_they_are_fewer_numbers_than_the_matrix(
    sizes: tuple[int, ...], how: str
) -> None:
    """T (m + n) against m n."""
    assert outer(*sizes)[0].how == how


SEVERAL: dict[str, list[str | Callable[[], Made]]] = {
    "two products": [lambda: outer(2, 6, 5), lambda: outer(3, 6, 5)],
    "two products of one position": [lambda: outer(6, 5), lambda: outer(6, 5)],
    "a product of one position and another": [lambda: outer(6, 5), lambda: outer(3, 6, 5)],
    "products of other sides": [lambda: outer(2, 6, 4, shape=(3, 2, 4)), lambda: outer(2, 3, 8, shape=(3, 2, 4))],
    "stacks": ["stacks", "stacks"],
    "a product and a stack": [lambda: outer(2, 2, 12, shape=(2, 3, 4)), lambda: outer(2, 5, 3, 4)],
    "two tables": [lambda: table((5, 3), 4), lambda: table((5, 3), 2, padding=True)],
    "tables of other axes": [lambda: table((2, 3, 4), 5, axes=2), lambda: table((2, 3, 4), 5)],
    "tables of two axes": [lambda: table((2, 3, 4), 5, axes=2), lambda: table((2, 3, 4), 3, axes=2)],
    "two matrices": [lambda: dense(3, 2), lambda: dense(3, 2), lambda: dense(3, 2)],
    "a product and a table": [lambda: outer(2, 5, 3), lambda: table((5, 3), 4, padding=True)],
    "a product and a table of other rows": [
        lambda: outer(6, 4, 6, shape=(2, 3, 4)), lambda: table((2, 3, 4), 5, axes=2),
    ],
    "a table and a product of one position": [lambda: table((5, 3), 4), lambda: outer(5, 3)],
    "a product and a matrix": [lambda: outer(2, 5, 3), lambda: dense(5, 3)],
    "a table and a matrix": [lambda: table((5, 3), 4), lambda: dense(5, 3)],
    "all three": [lambda: outer(2, 5, 3), lambda: table((5, 3), 4), lambda: dense(5, 3)],
    "two of each": [lambda: outer(2, 5, 3), lambda: outer(5, 3), lambda: table((5, 3), 4), lambda: table((5, 3), 2)],
    "kernels": ["convolution", "several images"],
    "one": ["many positions"],
}  # fmt: skip


@pytest.mark.parametrize("name", SEVERAL)
def test_several_uses_add_before_they_are_squared(name: str) -> None:
    torch.manual_seed(0)
    pairs = [USES[make]() if isinstance(make, str) else make() for make in SEVERAL[name]]
    uses, total = [use for use, _ in pairs], sum(gradients for _, gradients in pairs)
    assert isinstance(total, Tensor)
    torch.testing.assert_close(joint_squared_norms(uses), total.reshape(B, -1).square().sum(1))
    torch.testing.assert_close(summed(uses, slice(1, 3)), total[1:3])


def test_a_product_and_a_table_that_cancel_for_one_sample_only() -> None:
    """In float32 the sum of three large numbers would tell nothing of the small one."""
    torch.manual_seed(0)
    right = torch.randn(B, 1, 8)
    left = F.one_hot(torch.tensor([1, 2, 3, 4]), 5).float().unsqueeze(1)
    values = torch.randn(B, 1, 8)
    values[2] = -right[2] * (1 + 1e-4)
    gathered = Gathered(torch.tensor([[1], [2], [3], [4]]), values, (5, 8))
    expected = (right.double() + values.double()).square().sum((1, 2))
    found = joint_squared_norms([Outer(left, right, (5, 8)), gathered])
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=0)


def test_chunks_hold_as_many_samples_as_the_limit_allows() -> None:
    for shape, limit, starts in (
        ((3, 4), 24, [0, 2]), ((3, 4), 35, [0, 2]), ((3, 4), 36, [0, 3]), ((3, 4), 5, [0, 1, 2, 3]), ((), 3, [0, 3]),
        ((0, 4), 2, [0, 2]), ((3, 4), 1000, [0]),
    ):  # fmt: skip
        found = chunks(Dense(numbers(B, *shape), shape), limit)
        assert [part.start for part in found] == starts
        assert [k for part in found for k in range(B)[part]] == list(range(B))


def test_lengths_are_right_beyond_what_squares_hold() -> None:
    """Few numbers, and so many that most are looked at in float32."""
    torch.manual_seed(0)
    for width in (8, 3000):
        rows = torch.randn(5, width) * torch.tensor([1e-30, 1e-18, 1.0, 1e25, 0.0]).unsqueeze(1)
        found = sure_lengths(rows)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, rows.double().norm(dim=1), rtol=1e-6, atol=0)
        ordinary = torch.randn(5, width)
        torch.testing.assert_close(sure_lengths(ordinary), ordinary.double().norm(dim=1), rtol=1e-6, atol=0)
        torch.testing.assert_close(sure_lengths(rows.double()), rows.double().norm(dim=1))


def test_lengths_on_a_device_are_not_waited_for() -> None:
    """Whoever reads a number from the meta device fails."""
    rows = torch.empty(64, 1000, device="meta")
    assert sure_lengths(rows).dtype == torch.float64
    found = Lengths()
    found.add((0, 0), (rows, rows))
    assert found.squared(Doubts())[0, 0].dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_are_products_of_lengths_whatever_their_magnitudes(dtype: torch.dtype) -> None:
    """Of many matrices at once: 1e25 times an exact zero is zero, and 1e-22 may meet 1e20."""
    torch.manual_seed(0)
    left = torch.randn(5, 8, dtype=dtype) * torch.tensor([1e-22, 1.0, 1e25, 0.0, 3.0], dtype=dtype).unsqueeze(1)
    right = torch.randn(5, 3, dtype=dtype) * torch.tensor([1e20, 2.0, 0.0, 1e25, 1e-30], dtype=dtype).unsqueeze(1)
    ordinary, found = torch.randn(5, 4, dtype=dtype), Lengths()
    found.add((0, 0), (left, right))
    found.add((1, 0), (right,))
    found.add((2, 0), (ordinary,))
    squared = found.squared(Doubts())
    for edge, expected in (
        ((0, 0), left.double().norm(dim=1) * right.double().norm(dim=1)),
        ((1, 0), right.double().norm(dim=1)),
        ((2, 0), ordinary.double().norm(dim=1)),
    ):
        torch.testing.assert_close(squared[edge], expected.square(), rtol=1e-6, atol=0)


def test_there_are_no_norms_of_nothing() -> None:
    assert Lengths().squared(Doubts()) == {}


@pytest.mark.parametrize("shape", [(), (3,), (3, 2), (3, 2, 2), (2, 2, 1, 3)])
def test_squares_and_weighted_sums_of_gradients_of_any_rank(shape: tuple[int, ...]) -> None:
    gradients, factors = numbers(B, *shape), torch.rand(B)
    torch.testing.assert_close(squares(gradients), gradients.reshape(B, -1).square().sum(1))
    torch.testing.assert_close(weighted_sum(factors, gradients), spread(gradients, factors.double()))


def test_only_half_precision_is_widened() -> None:
    for dtype, expected in (
        (torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):  # fmt: skip
        assert accurate(torch.ones(2, dtype=dtype)).dtype == expected


@pytest.mark.parametrize("positions", [1, 2, 5, 63, 64, 65, 130])
def test_inner_products_of_positions(positions: int) -> None:
    """In strips right of the diagonal from some length on."""
    torch.manual_seed(0)
    left, right = numbers(3, 2, positions, 4), numbers(3, 2, positions, 5)
    mine, theirs = Gram.of(left), Gram.of(right)
    assert sum(strip.shape[-2] for strip in mine.strips) == positions
    torch.testing.assert_close(mine.lengths(), left.norm(dim=-1))
    expected = torch.einsum("betm,betn->bemn", left, right).square().sum((1, 2, 3))
    torch.testing.assert_close(mine.times_(theirs), expected)
    one = Gram.of(left[:, 0])
    torch.testing.assert_close(one.lengths(), left[:, 0].norm(dim=-1))
    expected = (left[:, 0].mT @ right[:, 0]).square().sum((1, 2))
    torch.testing.assert_close(one.times_(Gram.of(right[:, 0])), expected)


def test_digits_that_one_position_loses_are_found_again_whatever_the_others_hold() -> None:
    """A tiny factor meets a huge one; another position of the same sample has an ordinary length."""
    left, right = torch.zeros(3, 4, 32), torch.zeros(3, 4, 32)
    left[:, 0], right[:, 0, 0] = 2.6e-23, 1e19  # every square of the left is lost
    left[:, 1, 0] = 1.0
    right[1, 1, 1] = 1e-6
    left[2], right[2] = right[2].clone(), left[2].clone()
    use = Outer(left, right, (32, 32))
    assert use.ghost_is_cheaper
    expected = Dense(use.gradients().double(), (32, 32)).squared_norms()
    torch.testing.assert_close(use.squared_norms().double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e2, 1e4, 1e6])
def test_huge_terms_that_cancel_move_no_sum_by_more_than_the_bound(dtype: torch.dtype, scale: float) -> None:
    """Their sum is off by the last digits of the terms, so that its length is not that of the gradient meant."""
    torch.manual_seed(0)
    for _ in range(8):
        direction, steps = torch.randn(40, dtype=dtype), torch.randint(-1000, 1000, (2, 40)).to(dtype)
        left, right = torch.zeros(1, 4, 40, dtype=dtype), torch.zeros(1, 4, 40, dtype=dtype)
        left[0, :3] = direction * scale
        right[0, :2], right[0, 2] = steps, -steps.sum(0)
        left[0, 3], right[0, 3, 0] = direction / direction.norm() * 8, 1.0
        use = Outer(left, right, (40, 40))
        assert use.ghost_is_cheaper
        norms = use.squared_norms().sqrt()
        assert norms >= 8 * (1 - 1e-3)
        assert use.weighted(norms.clamp(min=1.0).reciprocal()).norm() <= 1.01


def test_norms_that_inner_products_cannot_tell_are_found_again() -> None:
    """Those that cancel, and those where one side's squares are lost and the other side makes up for it."""
    torch.manual_seed(0)
    left, right = torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    left[1], right[1] = left[1] * 100, right[1] * 100
    left[1, 1], right[1, 1] = left[1, 0], -right[1, 0] * (1 + 1e-4)
    left[2], right[2] = left[2] * 1e-22, right[2] * 1e22
    left[3], right[3] = left[3] * 1e22, right[3] * 1e-22
    right[2, 0] = left[3, 0] = 0  # as padding is
    left[4] = 0
    again: list[int] = []

    def exact(some: Tensor) -> tuple[Gram, Gram]:
        again.extend(some.nonzero().flatten().tolist())
        return Gram.of(left[some].double()), Gram.of(right[some].double())

    found = ghost_norms(lambda: (Gram.of(left), Gram.of(right)), exact)
    expected = torch.einsum("btm,btn->bmn", left.double(), right.double()).square().sum((1, 2))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    assert again == [1, 2, 3]
    again.clear()
    double = ghost_norms(lambda: (Gram.of(left.double()), Gram.of(right.double())), exact)
    torch.testing.assert_close(double, expected, rtol=1e-6, atol=0)
    assert not again


@pytest.mark.parametrize("positions", [64, 256, 700])
@pytest.mark.parametrize("spread", [0.05, 0.1, 0.2, 0.5, 1.0, 1e3])
def test_norms_from_inner_products_are_right_however_much_cancels(positions: int, spread: float) -> None:
    """Inputs that are nearly the same, under gradients that add up to nothing: less is left the smaller the spread."""
    torch.manual_seed(0)
    left = torch.randn(3, 1, 96) + spread * torch.randn(3, positions, 96)
    right = torch.randn(3, positions, 80)
    right -= right.mean(1, keepdim=True)
    again: list[int] = []

    def exact(some: Tensor) -> tuple[Gram, Gram]:
        again.extend(some.nonzero().flatten().tolist())
        return Gram.of(left[some].double()), Gram.of(right[some].double())

    found = ghost_norms(lambda: (Gram.of(left), Gram.of(right)), exact)
    expected = (left.double().mT @ right.double()).square().sum((1, 2))
    torch.testing.assert_close(found.double(), expected, rtol=3e-6, atol=0)
    if spread >= 1:  # unrelated positions add up to the root of their number, which is told well enough up to 555
        assert again == ([0, 1, 2] if positions > 555 else [])
    if spread <= 0.1:
        assert again == [0, 1, 2]


def test_where_a_norm_is_much_smaller_than_its_terms() -> None:
    parts = torch.tensor([1.0, 1.0, 100.0])
    total = torch.tensor([grams._CANCELLED * 0.9, grams._CANCELLED * 1.1, grams._CANCELLED * 90])
    assert cancelled(total, parts).tolist() == [True, False, True]


def test_the_same_inner_products_are_those_of_the_same_memory() -> None:
    memory = torch.randn(3, 4, 4)
    assert same_memory(memory, memory.view(3, 4, 4))
    others = (memory.mT, memory[:2], memory[1:], memory.clone(), memory.view(torch.int32), memory.view(3, 2, 8))
    recent = Recent()
    first = recent.of(memory)
    assert recent.of(memory) is first
    for other in others:
        assert not same_memory(memory, other)
    for other in (memory.mT, memory[:2]):
        torch.testing.assert_close(recent.of(other).strips[0], other @ other.mT)
    assert recent.of(memory) is not first


@pytest.mark.parametrize("name", ["convolution", "several images", "strided", "grouped", "transposed"])
def test_a_convolution_seen_as_products_answers_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a plain one with one image per sample may be seen so."""
    monkeypatch.setattr("clipwise.engine.rules.conv._LARGE_WEIGHT", 0)
    test_a_use_answers_as_its_gradients_do(name)


@pytest.mark.parametrize(("stride", "how"), [(1, "ghost"), (2, "ghost"), (3, "lengths")])
def test_few_pixels_under_many_channels(stride: int, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inner products of pixels give those of patches, unless the kernel skips some: then patches are formed."""
    monkeypatch.setattr("clipwise.engine.rules.conv._LARGE_WEIGHT", 0)
    torch.manual_seed(0)
    weight, inputs = numbers(30, 20, 3, 3).requires_grad_(), numbers(B, 20, 5, 5)
    out = F.conv2d(inputs, weight, stride=stride)
    cotangent = torch.randn_like(out)
    rows = [torch.autograd.grad(out[i], weight, cotangent[i], retain_graph=True)[0] for i in range(B)]
    geometry = Geometry((stride, stride), (0, 0), (1, 1), False, (0, 0), 1)
    use = Convolved(inputs.unsqueeze(1), cotangent.unsqueeze(1), weight.shape, geometry)
    assert use.how == how
    torch.testing.assert_close(use.squared_norms(), torch.stack(rows).flatten(1).square().sum(1))


def test_a_small_kernel_has_its_gradients_formed() -> None:
    assert made("convolution")[0].how == "instantiated"


class _Counted(TorchDispatchMode):
    """Counts operations by their name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_a_narrow_product_has_its_factors_once_where_it_is_added() -> None:
    use, gradients = Outer(numbers(B, 20), numbers(B, 3), (20, 3)), numbers(20, 3)
    with _Counted() as counted:
        use.add_weighted(torch.rand(B, dtype=DOUBLE), gradients)
    assert counted.calls["mul"] == 1


def test_pieces_are_added_to_a_sum_as_they_are_formed() -> None:
    use, _ = in_pieces(2, 2)
    with _Counted() as counted:
        use.add_weighted(torch.rand(B, dtype=DOUBLE), numbers(3, 2))
    assert counted.calls["addmv_"] == 2 and not counted.calls["add_"]
