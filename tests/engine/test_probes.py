"""Layouts and probes by themselves: whose each position is, and what colours tell of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from clipwise.engine.layout import (
    NARROW,
    WIDE,
    Colours,
    Layout,
    Probe,
    Scattered,
    all_finite,
    blank,
    candidates,
    drawn,
    owners_by_digits,
    pack,
    peaks,
)


def by_definition(layout: Layout, size: int, batch: int) -> list[int]:
    """The index along the axis is (outer * B + sample) * inner + rest."""
    inner = size // batch if layout.inner is None else layout.inner
    outer = size // (batch * inner)
    found = {(o * batch + s) * inner + r: s for o in range(outer) for s in range(batch) for r in range(inner)}
    return [found[k] for k in range(size)]


LAYOUTS = [
    (Layout(0, exact=True), (3,)), (Layout(1, exact=True), (2, 3)), (Layout(2, exact=True), (2, 4, 3)),
    (Layout(0, exact=True), (3, 4)), (Layout(0), (6, 2)), (Layout(1), (2, 9)), (Layout(1, inner=1), (2, 9, 2)),
    (Layout(0, inner=1), (6,)), (Layout(0, inner=2, rest=4), (12,)), (Layout(2, inner=3, rest=6), (2, 2, 18)),
    (Layout(1), (2, 3, 4)), (Layout(1, inner=1), (2, 3)),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "shape"), LAYOUTS, ids=str)
def test_a_layout_says_whose_each_position_is(layout: Layout, shape: tuple[int, ...]) -> None:
    values = torch.arange(torch.Size(shape).numel()).view(shape)
    owners = by_definition(layout, shape[layout.axis], 3)
    assert layout.owners(shape, 3).tolist() == owners
    elements = layout.elements(shape, 3)
    split = layout.split(values, 3)
    turned = layout.split(values.movedim(layout.axis, -1), 3, values.dim() - 1)
    for sample in range(3):
        own = torch.tensor([k for k, owner in enumerate(owners) if owner == sample])
        mine = values.index_select(layout.axis, own)
        assert torch.equal(split[sample], mine)
        assert torch.equal(turned[sample], mine.movedim(layout.axis, -1))
        assert sorted(values.flatten()[elements == sample].tolist()) == sorted(mine.flatten().tolist())
    assert layout.fits(shape, 3)


def test_where_a_layout_fits() -> None:
    for layout, shape, expected in (
        (Layout(0, exact=True), (6,), False), (Layout(0, exact=True), (3, 9), True), (Layout(0), (6,), True),
        (Layout(0), (3,), True), (Layout(0), (7,), False), (Layout(1), (6,), False), (Layout(2), (3, 3), False),
        (Layout(1, inner=1), (2, 9), True), (Layout(1, inner=1), (2, 8), False),
        (Layout(0, inner=2, rest=4), (12,), True), (Layout(0, inner=2, rest=4), (24,), False),
        (Layout(0, inner=2, rest=4), (3,), False),
    ):  # fmt: skip
        assert layout.fits(shape, 3) is expected, (layout, shape)


def test_every_regular_layout_is_tried_the_usual_ones_first() -> None:
    assert list(candidates((0, 2), 2)) == [Layout(1, exact=True)]
    assert list(candidates((4, 3, 8), 2)) == [
        Layout(0), Layout(0, inner=1), Layout(2), Layout(2, inner=1), Layout(2, inner=2, rest=4),
    ]  # fmt: skip
    names = {str(layout) for layout in candidates((2, 8), 2)}
    assert names == {
        "axis 0, the batch", "axis 1, batch-major", "axis 1, batch-minor", "axis 1, batch-middle, inner 2",
    }  # fmt: skip
    assert str(Scattered(1)) == "axis 1, scattered"


def test_colours_scale_without_rounding() -> None:
    for colours in drawn(300, torch.zeros((), dtype=torch.float64)).each:
        assert set(torch.frexp(colours).mantissa.abs().tolist()) == {0.5}


def test_what_is_finite_and_what_tells_nothing() -> None:
    huge = torch.finfo(torch.float32).max
    for values, finite, tells in (
        ([0.0, 0.0], True, False), ([0.0, 1.0], True, True), ([huge, huge], True, True),
        ([0.0, torch.nan], False, False), ([1.0, torch.nan], False, True),
        ([torch.inf, -torch.inf], False, False), ([torch.inf, 0.0], False, False),
    ):  # fmt: skip
        assert all_finite(torch.tensor(values)) is finite
        assert blank(torch.tensor(values)) is not tells
    for place in (0, 1, 2, 1997, 1999):
        one = torch.zeros(2, 1000)
        one.view(-1)[place] = 1e-30
        assert not blank(one)
    assert blank(torch.zeros(2, 1000))


def probe_of(plain: Tensor, owners: Tensor, axis: int, bad: Tensor) -> Probe:
    """What colours show of a value whose positions along an axis belong to these samples."""
    view = [1] * plain.dim()
    view[axis] = -1
    colours = drawn(bad.numel(), plain)
    return Probe(plain, [plain * colour[owners].view(view) for colour in colours.each], colours, bad)


GOOD = torch.zeros(3, dtype=torch.bool)


def test_samples_that_cancel_still_tell_something() -> None:
    """The losses' gradients sum to zero, but not in the colours of all samples."""
    colours = drawn(20, torch.zeros(()))
    nothing, something = torch.zeros(4), torch.tensor([0.0, 0.0, 1.0, 0.0])
    bad = torch.zeros(20, dtype=torch.bool)
    for plain, coloured, expected in (
        (nothing, [nothing, nothing], True), (nothing, [nothing, something], False),
        (nothing, [something, nothing], False), (something, [nothing, nothing], False),
    ):  # fmt: skip
        assert Probe(plain, coloured, colours, bad).blank is expected


@pytest.mark.parametrize("shape", [(2, 3, 4), (4, 3, 300)])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_one_element_of_another_sample_contradicts_a_layout(axis: int, shape: tuple[int, ...]) -> None:
    """Also where only some elements are looked at first."""
    torch.manual_seed(0)
    owners = torch.arange(shape[axis]) % 3
    probe = probe_of(torch.rand(shape) + 0.5, owners, axis, GOOD)
    assert probe.agrees(owners, axis)
    assert not probe.agrees((owners + 1) % 3, axis)
    for place in (0, 1, 7, probe.plain.numel() - 1):
        spoilt, *others = (c.clone() for c in probe.coloured)
        spoilt.view(-1)[place] *= -1
        assert not Probe(probe.plain, [spoilt, *others], probe.colours, GOOD).agrees(owners, axis)


def test_every_colouring_must_agree() -> None:
    owners, bad = torch.arange(20), torch.zeros(20, dtype=torch.bool)
    probe = probe_of(torch.ones(20), owners, 0, bad)
    assert len(probe.colours.each) == 2 and probe.agrees(owners, 0)
    for wrong in range(2):
        coloured = [2 * c if k == wrong else c for k, c in enumerate(probe.coloured)]
        assert not Probe(probe.plain, coloured, probe.colours, bad).agrees(owners, 0)


@pytest.mark.parametrize(
    ("dtype", "plain", "off", "expected"),
    [(torch.float32, 1.0, 8 * 2.0**-23, True), (torch.float32, 1.0, 9 * 2.0**-23, False),
     (torch.float32, 1e-7, 1e-7, False), (torch.float32, 1e-33, 1e-33, True), (torch.float64, 1.0, 1e-12, False),
     (torch.float16, 5e-7, 15 * 2.0**-24, True), (torch.float16, 1.0, 0.5, False)],
)  # fmt: skip
def test_rounding_is_no_mixing(dtype: torch.dtype, plain: float, off: float, expected: bool) -> None:
    """Eight units in the last place of an element, and none of another's; digits that underflow are lost."""
    values = torch.tensor([1.0, plain, 1.0], dtype=dtype)
    coloured = torch.tensor([1.0, plain + off, 1.0], dtype=dtype)
    found = Probe(values, [coloured], Colours([torch.ones(3, dtype=dtype)]), GOOD).agrees(torch.arange(3), 0)
    assert found is expected


def test_what_is_not_finite_lies_with_bad_samples_only() -> None:
    bad = torch.tensor([False, True, False])
    for place, expected in ((1, True), (0, False), (2, False)):
        for before, after in ((torch.nan, torch.nan), (torch.nan, 0.0), (1.0, torch.inf), (torch.inf, torch.inf)):
            plain, coloured = torch.ones(3), torch.ones(3)
            plain[place], coloured[place] = before, after
            assert Probe(plain, [coloured], Colours([torch.ones(3)]), bad).agrees(torch.arange(3), 0) is expected


@pytest.mark.parametrize("layout", [*candidates((12, 2, 3), 2)], ids=str)
def test_a_probe_shows_its_layout_and_no_other(layout: Layout) -> None:
    torch.manual_seed(0)
    shape = (12, 2, 3)
    owners = layout.owners(shape, 2)
    bad = torch.zeros(2, dtype=torch.bool)
    assert probe_of(torch.rand(shape) + 0.5, owners, layout.axis, bad).layouts(2) == (layout,)


def test_all_layouts_that_agree_are_told_the_usual_ones_first() -> None:
    plain = torch.zeros(12)
    plain[0] = 1.0
    found = probe_of(plain, torch.zeros(12, dtype=torch.long), 0, torch.zeros(2, dtype=torch.bool)).layouts(2)
    assert found == (Layout(0), Layout(0, inner=1), Layout(0, inner=2, rest=6), Layout(0, inner=3, rest=6))


def test_rows_that_tell_nothing_are_given_to_a_bad_sample() -> None:
    owners = torch.tensor([4, 0, 2, 2, 1])
    plain = torch.tensor([1.0, 0.0, torch.nan, 0.5, 2.0])
    for bad, nobody in ((torch.tensor([False, False, True, True, False]), 2), (torch.zeros(5, dtype=torch.bool), None)):
        found = owners_by_digits(probe_of(plain, owners, 0, bad), 0)
        if nobody is None:
            assert found is None  # NaN, and nobody is bad
        else:
            assert found is not None and found.tolist() == [4, nobody, nobody, 2, 1]
    plain[2] = 0.0
    found = owners_by_digits(probe_of(plain, owners, 0, torch.zeros(5, dtype=torch.bool)), 0)
    assert found is not None and found.tolist() == [4, 0, 0, 2, 1]


def test_colours_of_nobody_are_refused() -> None:
    """A sum of samples may look like the colour of a sample that the batch does not have."""
    for owners in ([0, 20, 1], [20, 20, 20], [0, 30, 1]):
        plain = torch.ones(3)
        colours = drawn(31, plain).each
        coloured = [colour[owners] for colour in colours]
        few = Probe(plain, coloured, Colours([colour[:20] for colour in colours]), torch.zeros(20, dtype=torch.bool))
        assert owners_by_digits(few, 0) is None


def test_positions_of_each_sample_are_packed_in_their_order() -> None:
    for owners, batch, expected in (
        ([2, 0, 2, 2, 0], 4, [[1, 4, 5], [5, 5, 5], [0, 2, 3], [5, 5, 5]]),
        ([0, 1, 2], 3, [[0], [1], [2]]), ([], 2, [[], []]), ([1, 1], 2, [[2, 2], [0, 1]]),
    ):  # fmt: skip
        assert pack(torch.tensor(owners, dtype=torch.long), batch).tolist() == expected


def test_the_peak_of_a_row_is_its_largest_finite_number() -> None:
    values = torch.tensor([[1.0, torch.nan], [-torch.inf, -2.0], [0.0, 0.0]])
    assert [found.tolist() for found in peaks(values, 0)] == [[1, 2, 0], [0, 1, 0]]
    assert [found.tolist() for found in peaks(values, 1)] == [[1, 2], [0, 1]]
    assert peaks(torch.tensor([2.0, -3.0]), 0)[0].tolist() == [2, 3]
    assert peaks(torch.tensor([[1 + 2j, 3 - 4j]]).conj(), 1)[0].tolist() == [2, 4]
    assert peaks(torch.zeros(2, 0), 0)[0].tolist() == [0, 0]


def test_a_few_elements_that_something_reached_tell_wrong_layouts() -> None:
    """One class of many has a gradient: elements at equal distances are all zero."""
    plain = torch.zeros(4, 3000)
    plain[torch.arange(4), torch.tensor([5, 1001, 1207, 2999])] = 1.0
    found = probe_of(plain, torch.arange(4), 0, torch.zeros(4, dtype=torch.bool))
    number, few = found._few
    assert number.tolist() == plain.flatten().nonzero().squeeze(1).tolist() and bool(few.plain.all())
    assert found.layouts(4) == (Layout(0, exact=True),)
    assert Probe(0 * plain, [0 * plain] * 2, found.colours, found.bad).agrees(torch.arange(4), 0)


@pytest.mark.parametrize("exponents", [NARROW, WIDE])
@pytest.mark.parametrize("off", [1 - 2**-20, 1.0, 1 + 2**-20])
def test_the_nearest_colour_is_read(exponents: range, off: float) -> None:
    colours = drawn(64, torch.zeros(()), exponents)
    assert torch.equal(colours.samples([c.double() * off for c in colours.each]), torch.arange(64))


def test_colours_leave_what_is_huge_finite() -> None:
    huge = torch.tensor(1e37)
    assert all(bool(torch.isfinite(c * huge).all()) for c in drawn(200, huge).each)


def test_rows_that_are_too_small_to_be_read_belong_to_anybody() -> None:
    colours, owners = drawn(8, torch.ones(())), torch.tensor([3, 5, 7])
    plain = torch.tensor([1.0, 1e-36, 1e-20]).unsqueeze(1)
    probe = Probe(plain, [plain * c[owners].unsqueeze(1) for c in colours.each], colours, torch.zeros(8).bool())
    found = owners_by_digits(probe, 0)
    assert found is not None
    assert found.tolist() == [3, 0, 7]
