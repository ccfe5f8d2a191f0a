"""Operations that only move elements: by hand as by autograd; and which part of a parameter an operand is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
from torch import Tensor

from clipwise.engine.chains import Chain, below_view, chain_of, interval, is_simple, overlapping
from clipwise.engine.graph import Edge, Graph, walk
from clipwise.engine.ops import TABLE, op_of
from clipwise.engine.views import Region

View: TypeAlias = Callable[[Tensor], Tensor]
aten: Any = torch.ops.aten


class Kind(NamedTuple):
    """How a view of a tensor of some shape is made, and what is known of it."""

    name: str
    shape: tuple[int, ...]
    make: View
    in_order: bool = False  # known to keep the order of elements, whatever the shapes
    transposes: bool = False


WHOLE = [
    Kind("AliasBackward0", (2, 3), aten.alias), Kind("CloneBackward0", (2, 3), torch.clone),
    Kind("ToCopyBackward0", (2, 3), lambda w: w.to(torch.float64)),
    Kind("TBackward0", (2, 3), torch.t, transposes=True),
    Kind("TransposeBackward0", (2, 3), lambda w: w.transpose(-1, 0), transposes=True),
    Kind("TransposeBackward0", (2, 3, 4), lambda w: w.transpose(1, -1)),
    Kind("TransposeBackward0", (2, 3, 4, 5), lambda w: w.transpose(1, 2)),
    Kind("PermuteBackward0", (2, 3, 4), lambda w: w.permute(1, 2, 0)),
    Kind("PermuteBackward0", (2, 3, 4, 5), lambda w: w.permute(-1, 0, 2, -3)),
    Kind("SqueezeBackward0", (2, 1, 3), aten.squeeze), Kind("SqueezeBackward1", (2, 1, 3), lambda w: w.squeeze(1)),
    Kind("SqueezeBackward2", (2, 1, 3, 1), lambda w: w.squeeze((1, 3))),
    Kind("UnsqueezeBackward0", (2, 3), lambda w: w.unsqueeze(1)),
    Kind("ViewBackward0", (2, 6), lambda w: w.view(3, 4), in_order=True),
    Kind("UnsafeViewBackward0", (2, 6), lambda w: aten._unsafe_view(w, [4, 3]), in_order=True),
]  # fmt: skip
PARTS = [
    Kind("SelectBackward0", (3, 4), lambda w: w[1]), Kind("SelectBackward0", (3, 4, 5), lambda w: w.select(-2, -1)),
    Kind("UnbindBackward0", (3, 4, 5), lambda w: w.unbind(1)[2]),
    Kind("UnbindBackward0", (3, 4), lambda w: w.unbind()[0]),
    Kind("SliceBackward0", (5, 4), lambda w: w[1:3]), Kind("SliceBackward0", (5, 4), lambda w: w[:2]),
    Kind("SliceBackward0", (5, 4), lambda w: w[3:]), Kind("SliceBackward0", (5, 4), lambda w: w[-2:]),
    Kind("SliceBackward0", (5, 4), lambda w: w[:-3]), Kind("SliceBackward0", (5, 4), lambda w: w[-9:1]),
    Kind("SliceBackward0", (5, 4), lambda w: w[0:0]), Kind("SliceBackward0", (5, 4), lambda w: w[7:9]),
    Kind("SliceBackward0", (2, 3, 4), lambda w: w[..., 1:3]),
    Kind("SplitBackward0", (5, 4), lambda w: w.split(2)[0]), Kind("SplitBackward0", (5, 4), lambda w: w.split(2)[1]),
    Kind("SplitBackward0", (5, 4), lambda w: w.split(2)[2]),
    Kind("SplitBackward0", (4, 6), lambda w: w.chunk(3, -1)[1]),
    *(Kind("SplitWithSizesBackward0", (2, 6), lambda w, k=k: w.split([1, 3, 2], 1)[k]) for k in range(3)),  # type: ignore[misc]
]  # fmt: skip
BY_AUTOGRAD = [  # not by hand
    Kind("SliceBackward0", (5, 4), lambda w: w[::2]),
    Kind("UnsafeSplitBackward0", (5, 4), lambda w: aten.unsafe_split(w, 2)[1]),
]


def seen(kind: Kind) -> tuple[Tensor, Tensor, Graph, Edge]:
    torch.manual_seed(0)
    w = torch.randn(kind.shape, dtype=torch.float32, requires_grad=True)
    out = kind.make(w)
    return w, out, walk(out, {id(w): 0}, [w]), (0, out.output_nr)


@pytest.mark.parametrize("leading", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("kind", [*WHOLE, *PARTS], ids=lambda kind: kind.name)
def test_a_gradient_is_moved_below_a_view_as_autograd_does(kind: Kind, leading: tuple[int, ...]) -> None:
    w, out, graph, edge = seen(kind)
    assert graph.names[0] == kind.name
    gradient = torch.randn(*leading, *out.shape, dtype=out.dtype)
    rows = gradient.reshape(torch.Size(leading).numel(), *out.shape)
    expected = [torch.autograd.grad(out, w, row, retain_graph=True)[0] for row in rows]
    found = below_view(graph, edge, gradient)
    assert found is not None and torch.equal(found.float(), torch.stack(expected).view(*leading, *w.shape))


@pytest.mark.parametrize("kind", BY_AUTOGRAD, ids=lambda kind: kind.name)
def test_what_is_not_moved_by_hand_is_left_to_autograd(kind: Kind) -> None:
    _, out, graph, edge = seen(kind)
    assert graph.names[0] == kind.name
    assert below_view(graph, edge, torch.ones_like(out)) is None


def test_what_is_no_view_is_not_passed() -> None:
    w = torch.ones(2, 3, requires_grad=True)
    graph = walk(w.tanh(), {id(w): 0}, [w])
    assert below_view(graph, (0, 0), torch.ones(2, 3)) is None


@pytest.mark.parametrize("kind", [*WHOLE, *PARTS, *BY_AUTOGRAD], ids=lambda kind: kind.name)
def test_what_is_known_of_a_view_is_true(kind: Kind) -> None:
    w, out, graph, edge = seen(kind)
    view = op_of(kind.name).view
    assert view is not None
    assert view.is_whole is (out.numel() == w.numel())
    assert view.keeps_order is kind.in_order
    assert not kind.in_order or torch.equal(out.flatten(), w.flatten())
    assert view.transposes(graph, edge) is kind.transposes
    assert not kind.transposes or torch.equal(out, w.mT)


@pytest.mark.parametrize("kind", PARTS, ids=lambda kind: kind.name)
def test_a_part_is_a_range_of_one_axis(kind: Kind) -> None:
    w, out, graph, edge = seen(kind)
    axis, start, stop = interval(graph, edge)
    expected = torch.zeros_like(w)
    expected.narrow(axis, start, max(0, stop - start)).fill_(1)
    assert torch.equal(torch.autograd.grad(out.sum(), w)[0], expected)


def test_every_view_has_an_example() -> None:
    names = {name for op in TABLE if op.view is not None for name in op.names.split()}
    missing = names - {kind.name for kind in [*WHOLE, *PARTS, *BY_AUTOGRAD]}
    assert missing == {"SqueezeBackward3", "SqueezeBackward4"}  # of nested tensors


# program -> transposed, framed, whether a part, or None: not by views of one parameter alone
CHAINS: dict[str, tuple[View, tuple[bool, bool, bool] | None]] = {
    "itself": (lambda w: w, (False, True, False)),
    "turned": (torch.t, (True, True, False)),
    "turned by its axes": (lambda w: w.transpose(0, 1), (True, True, False)),
    "turned twice": (lambda w: w.t().transpose(0, 1), (False, True, False)),
    "copied": (lambda w: w.clone().double(), (False, True, False)),
    "part": (lambda w: w[1:3], (False, True, True)),
    "part of several": (lambda w: w.unbind(1)[1], (False, True, True)),
    "part, then turned": (lambda w: w[1:3].t(), (True, True, True)),
    "turned, then part": (lambda w: w.t()[1:3], (True, False, True)),
    "every second": (lambda w: w[::2], (False, False, True)),
    "part of a part": (lambda w: w[1:][:, 1:], (False, False, True)),
    "another shape": (lambda w: w.view(-1), (False, False, False)),
    "another shape, turned": (lambda w: w.t().unsqueeze(0), (True, False, False)),
    "part of another shape": (lambda w: w.view(-1)[2:4], (False, False, True)),
    "computed": (torch.tanh, None),
    "computed, then turned": (lambda w: w.tanh().t(), None),
    "computed from a part": (lambda w: w[1:] * 2, None),
    "joined": (lambda w: torch.cat([w, w]), None),
}


@pytest.mark.parametrize("name", CHAINS)
def test_how_an_operand_is_made_from_a_parameter(name: str) -> None:
    make, expected = CHAINS[name]
    others, w = torch.ones(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    operand = make(w)
    out = operand + 1  # the losses' own node, above it
    graph = walk(out, {id(others): 0, id(w): 1}, [others, w])
    edge = graph.edges[0][0]
    chain = chain_of(graph, edge)
    if expected is None:
        assert chain is None
        return
    assert chain is not None
    transposed, framed, part = expected
    assert (chain.parameter, chain.transposed, chain.framed) == (1, transposed, framed)
    assert chain.direct is (framed and not part)
    assert (chain.region is not None) is part
    if chain.region is not None:
        assert isinstance(op_of(graph.names[chain.region[0]]).view, Region)


def test_the_first_parameter_has_a_chain_and_another_leaf_has_none() -> None:
    w = torch.randn(4, 4, requires_grad=True)
    for position, known in (({id(w): 0}, True), ({}, False)):
        graph = walk(w.t() + 1, position, [w])
        assert (chain_of(graph, graph.edges[0][0]) is not None) is known


def operands(*makes: View) -> tuple[Graph, list[Edge]]:
    """Operands of one parameter, side by side on a graph."""
    w = torch.randn(4, 4, requires_grad=True)
    made = [make(w) for make in makes]
    out = torch.cat([part.reshape(-1) if part is not w else part.clone().reshape(-1) for part in made])
    graph = walk(out, {id(w): 0}, [w])
    at = {node: k for k, node in enumerate(graph.nodes)}
    leaf = next(iter(graph.leaf_parameter))
    return graph, [(leaf, 0) if part is w else (at[part.grad_fn], part.output_nr) for part in made]


OVERLAPS: dict[str, tuple[list[View], bool]] = {
    "whole twice": ([lambda w: w, torch.t], False),
    "whole and a part": ([lambda w: w, lambda w: w[1:]], True),
    "parts that touch": ([lambda w: w[2:], lambda w: w[:2]], False),
    "parts that overlap": ([lambda w: w[:3], lambda w: w[2:]], True),
    "parts far apart": ([lambda w: w[:1], lambda w: w[3:]], False),
    "one of three overlaps": ([lambda w: w[:1], lambda w: w[1:3], lambda w: w[2:4]], True),
    "the first of three overlap": ([lambda w: w[:2], lambda w: w[1:3], lambda w: w[3:]], True),
    "a part within another": ([lambda w: w[1:2], lambda w: w[:4]], True),
    "the same part": ([lambda w: w[1:3], lambda w: w[1:3]], False),
    "the same part in two shapes": ([lambda w: w[1], lambda w: w[1:2]], True),
    "parts of two axes": ([lambda w: w[:1], lambda w: w[:, 2:3]], True),
    "parts of two axes that meet": ([lambda w: w[:3], lambda w: w[:, 1:]], True),
    "all parts": ([lambda w: w.unbind()[0], lambda w: w.unbind()[1], lambda w: w.unbind()[3]], False),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_parts_overlap_or_not(name: str) -> None:
    makes, expected = OVERLAPS[name]
    graph, edges = operands(*makes)
    chains: dict[Edge, Chain] = {}
    for edge in edges:
        chain = chain_of(graph, edge)
        assert chain is not None
        chains[edge] = chain
    assert overlapping(graph, [chains[edge].region for edge in edges]) is expected
    assert is_simple(graph, edges, chains) is not expected
    assert is_simple(graph, edges[:1], chains)


def test_a_norm_is_simple_where_operands_are_views_and_stay_in_the_frame() -> None:
    """One operand may be in any order; of several, all must be as the parameter is."""
    graph, (whole, turned, reshaped, computed) = operands(lambda w: w, torch.t, lambda w: w.view(-1, 2), torch.tanh)
    chains = {edge: chain for edge in (whole, turned, reshaped) if (chain := chain_of(graph, edge)) is not None}
    assert len(chains) == 3 and chain_of(graph, computed) is None
    for edges, expected in (
        ([whole], True), ([reshaped], True), ([computed], False), ([whole, turned], True), ([whole, reshaped], False),
        ([reshaped, whole], False), ([whole, computed], False), ([computed, whole, turned], False),
    ):  # fmt: skip
        assert is_simple(graph, edges, chains) is expected, edges
