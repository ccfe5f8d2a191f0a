"""Products by oneDNN: the same numbers as torch's, on every layout, and no less exact where terms have one sign."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from clipwise.engine import matrices
from tests.zoo import CASES, Case

from .reference import precision
from .test_conformance import LONG, disagreements

HERE = hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.backends.mkldnn.is_available()
needs_onednn = pytest.mark.skipif(not HERE, reason="this torch has no oneDNN")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """OneDNN for products of every size, on whatever processor; the shapes of its left sides."""
    seen: list[torch.Size] = []
    inner = matrices._onednn

    def counted(left: Tensor, right: Tensor) -> Tensor:
        seen.append(left.shape)
        return inner(left, right)

    monkeypatch.setattr(matrices, "_suits", lambda: True)
    monkeypatch.setattr(matrices, "_WIDE", 1)
    monkeypatch.setattr(matrices, "_LARGE", 1)
    monkeypatch.setattr(matrices, "_LONG", 7)
    monkeypatch.setattr(matrices, "_PART", 40)
    monkeypatch.setattr(matrices, "_onednn", counted)
    return seen


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "by rows": lambda x: x.contiguous(),
    "by columns": lambda x: x.mT.contiguous().mT,
    "a part of a larger one": lambda x: torch.cat([x, x, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]],
    "every second row": lambda x: torch.cat([x, x], -1).unflatten(-1, (2, -1)).flatten(-3, -2)[..., ::2, :],
}


@needs_onednn
@pytest.mark.parametrize("sizes", [(5, 3, 4), (3, 20, 9), (9, 20, 3), (1, 8, 1), (16, 7, 16), (2, 29, 33)], ids=str)
@pytest.mark.parametrize("right_lies", LAYOUTS)
@pytest.mark.parametrize("left_lies", LAYOUTS)
def test_products_are_those_of_torch(
    left_lies: str, right_lies: str, sizes: tuple[int, int, int], calls: list[torch.Size]
) -> None:
    rows, terms, columns = sizes
    left, right = LAYOUTS[left_lies](random(3, rows, terms)), LAYOUTS[right_lies](random(3, terms, columns))
    expected = left.double() @ right.double()

    def check(found: Tensor, expected: Tensor = expected) -> None:
        assert torch.allclose(found.double(), expected, rtol=0, atol=1e-5)
        assert found.is_contiguous(), "it would be copied later, while all other sums are held"

    check(matrices.product(left[0], right[0]), expected[0])
    total = random(rows, columns)
    onto = total.clone()
    matrices.add_product(onto, left[0], right[0])
    check(onto, total.double() + expected[0])
    out = torch.full((3, rows, columns), torch.nan)
    stacked = matrices.stacked_products(left, right)
    assert matrices.stacked_products(left, right, out) is out
    check(stacked)
    assert torch.equal(out, stacked), "what is kept, and what is formed again, would differ"
    assert calls


PLAIN = {
    "float64": (random(4, 4, dtype=torch.float64), random(4, 4, dtype=torch.float64)),
    "bfloat16": (random(4, 4).bfloat16(), random(4, 4).bfloat16()),
    "no rows": (random(0, 4), random(4, 4)),
    "no terms": (random(4, 0), random(0, 4)),
    "differentiated": (random(4, 4).requires_grad_(), random(4, 4)),
}


@pytest.mark.parametrize("name", PLAIN)
def test_everything_else_is_left_to_torch(name: str, calls: list[torch.Size]) -> None:
    left, right = PLAIN[name]
    found = matrices.product(left, right)
    assert torch.equal(found, left @ right) and found.requires_grad == left.requires_grad
    assert not calls


def test_it_can_be_turned_off(calls: list[torch.Size]) -> None:
    with torch.backends.mkldnn.flags(enabled=False):
        matrices.product(random(4, 4), random(4, 4))
    assert not calls


@pytest.mark.parametrize(
    ("capability", "processor", "expected"),
    [
        ("AVX512", "vendor_id\t: AuthenticAMD\n", HERE),
        ("AVX512", "vendor_id\t: GenuineIntel\n", False),
        ("AVX2", "vendor_id\t: AuthenticAMD\n", False),
        ("AVX512", None, False),
    ],
)
def test_it_is_for_processors_on_which_it_was_measured(
    capability: str, processor: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cpuinfo"
    if processor is not None:
        path.write_text(processor, encoding="utf-8")
    monkeypatch.setattr(matrices, "_PROCESSOR", path)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert matrices._suits.__wrapped__() is expected


def test_only_large_products_are_made_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "_suits", lambda: True)
    for rows, terms, columns, by_rows, by_columns in [
        (128, 128, 256, True, True),
        (256, 128, 128, False, True),
        (128, 127, 256, False, False),
        (255, 512, 255, False, False),
    ]:
        left, right = torch.empty(rows, terms), torch.empty(terms, columns)
        assert matrices._is_faster(left, right) is by_rows
        assert matrices._is_faster(left.t().contiguous().t(), right) is by_columns


def seconds(work: Callable[[], object]) -> float:
    def once() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return min(once() for _ in range(5))


@needs_onednn
@pytest.mark.parametrize("right_lies", LAYOUTS)
@pytest.mark.parametrize("left_lies", LAYOUTS)
def test_no_layout_takes_long(left_lies: str, right_lies: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """OneDNN has an operation for those that it does not know, which takes two thousand times as long."""
    monkeypatch.setattr(matrices, "_suits", lambda: True)
    left, right = LAYOUTS[left_lies](random(257, 1025)), LAYOUTS[right_lies](random(1025, 300))
    total = torch.zeros(257, 300)
    usual = seconds(lambda: left @ right)
    assert seconds(lambda: matrices.product(left, right)) < 100 * usual
    assert seconds(lambda: matrices.add_product(total, left, right)) < 100 * usual
    assert seconds(lambda: matrices.product(left[:, :1].expand_as(left), right[:1].expand_as(right))) < 100 * usual


def test_no_samples_have_no_products(calls: list[torch.Size]) -> None:
    assert matrices.stacked_products(random(0, 4, 4), random(0, 4, 4)).shape == (0, 4, 4)


@needs_onednn
@pytest.mark.parametrize("terms", [256, 4096, 65_536])
@pytest.mark.parametrize("number", [0.1, 0.7, 1.1])
def test_errors_of_one_sign_stay_small(number: float, terms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal terms, whose roundings all go to one side: MKL is off by 2e-5 where there are 262,144 of them."""
    monkeypatch.setattr(matrices, "_suits", lambda: True)
    left, right = torch.full((256, terms), number), torch.full((terms, 256), 1.3)
    found = matrices.product(left.contiguous(), right)
    expected = terms * left[0, 0].double() * right[0, 0].double()
    assert ((found.double() - expected).abs().max() / expected) < 1e-5


FLOAT32 = [
    pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.name in LONG or number % 4 else [])
    for number, case in enumerate(CASES)
    if precision(case) == torch.float64
]


@needs_onednn
@pytest.mark.parametrize("case", FLOAT32)
def test_agrees_with_the_loop_where_all_products_are_made_by_it(case: Case, calls: list[torch.Size]) -> None:
    assert not disagreements(case, case.batches[1], 0, torch.float32)


@needs_onednn
def test_recurrent_layers_and_linear_maps_are_made_by_it(calls: list[torch.Size]) -> None:
    """The test above compares what it says."""
    for name in ("lstm", "mlp_on_sequences"):
        calls.clear()
        case = next(case for case in CASES if case.name == name)
        assert not disagreements(case, case.batches[1], 0, torch.float32)
        assert calls, name
