"""What a plan says of a graph: where parameters meet the batch, and what must be looked at again at every step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clipwise.engine import check, per_sample_norms
from clipwise.engine.cache import Engine
from clipwise.engine.layout import Layout
from clipwise.engine.parameters import Parameters
from clipwise.engine.plan import GraphPlan
from clipwise.engine.run import Backward
from clipwise.errors import InvalidLosses, UnsupportedNode
from tests.zoo import named

B = 4


def backward_of(losses: Tensor, params: dict[str, nn.Parameter]) -> Backward:
    with torch.no_grad():
        return Engine().backward(losses, Parameters(params), keep=True)


def plan_of(losses: Tensor, params: dict[str, nn.Parameter]) -> GraphPlan:
    return backward_of(losses, params).plan


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def matrix() -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(3, 3))


def test_the_plan_of_a_network() -> None:
    model = mlp()
    found = backward_of(model(torch.randn(B, 3)).square().sum(1), named(model))
    plan, names = found.plan, found.graph.names
    assert [names[meeting.node] for meeting in plan.meetings] == ["AddmmBackward0"] * 2
    assert [meeting.end for meeting in plan.meetings] == [True, False]
    assert all(meeting.layouts == (Layout(0, exact=True),) for meeting in plan.meetings)
    assert {p: len(edges) for p, edges in plan.roots.items()} == dict.fromkeys(range(4), 1)
    assert plan.solo == {edge for edges in plan.roots.values() for edge in edges}
    assert plan.data_meetings == {plan.meetings[0].node}  # the second reads what the first made
    assert not (plan.derived or plan.parted or plan.identities or plan.unseen)
    assert plan.at_hand and plan.decided and plan.cacheable
    assert not (plan.streaming or plan.live or plan.routed or plan.indexed or plan.must_keep)


def test_large_outputs_are_not_all_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """More elements than the limit, over all meetings."""
    model = mlp()
    for limit, expected in ((B * 7 - 1, True), (B * 7, False)):
        monkeypatch.setattr("clipwise.engine.plan._SMALL", limit)
        assert plan_of(model(torch.randn(B, 3)).square().sum(1), named(model)).streaming is expected


def test_a_checkpointed_graph_is_kept() -> None:
    model = mlp()
    hidden = checkpoint(model[2], model[:2](torch.randn(B, 3)), use_reentrant=False)
    plan = plan_of(hidden.square().sum(1), named(model))
    assert plan.must_keep and not plan.at_hand and not plan.streaming


def test_an_operand_is_alone_where_its_parameter_has_no_other_use() -> None:
    x = torch.randn(B, 3)
    for uses, alone in (
        (lambda w: x @ w, True), (lambda w: x @ w.t(), True), (lambda w: (x @ w).tanh() @ w, False),
        (lambda w: (lambda t: (x @ t).tanh() @ t)(w.t()), False), (lambda w: x @ w.tanh(), False),
        (lambda w: x @ w[:, :2] + (x @ w.t())[:, :2], False),
    ):  # fmt: skip
        w = matrix()
        assert bool(plan_of(uses(w).square().sum(1), {"w": w}).solo) is alone


def test_parameters_that_are_pulled_back_by_autograd() -> None:
    x = torch.randn(B, 3)
    for uses, derived in (
        (lambda w: x @ w, False), (lambda w: x @ w.tanh(), True), (lambda w: x @ w.view(9).view(3, 3), False),
        (lambda w: x @ w + x @ w.view(9).view(3, 3), True), (lambda w: x @ w[:, :2] + (x @ w[:, 1:]).tanh(), True),
        (lambda w: x @ w[:, :2] + (x @ w[:, 1:2]).tanh(), True), (lambda w: x @ w[:, :1] + x @ w[:, 1:2], False),
    ):  # fmt: skip
        w = matrix()
        assert bool(plan_of(uses(w).square().sum(1), {"w": w}).derived) is derived


def test_parts_of_a_parameter_are_looked_at_again() -> None:
    w, x = matrix(), torch.randn(B, 3)
    (parts,) = plan_of((x @ w[:, :1] + x @ w[:, 1:2]).square().sum(1), {"w": w}).parted
    assert len(parts) == 2
    assert not plan_of(((x @ w).tanh() @ w.t()).square().sum(1), {"w": w}).parted


def test_what_is_looked_at_at_every_step() -> None:
    model, rows = mlp(), torch.arange(B)
    out = model(torch.randn(B, 3))
    identity = plan_of(out[rows].square().sum(1), named(model))
    assert len(identity.identities) == 1 and identity.indexed and not identity.routed
    moved = plan_of(out[rows.flip(0)].square().sum(1), named(model))
    assert moved.routed and moved.must_keep and not moved.identities
    unknown = plan_of(torch.special.i0e(out).sum(1), named(model))
    assert unknown.routed and not unknown.indexed
    assert plan_of((torch.eye(B).flip(0) @ out).square().sum(1), named(model)).routed  # a matrix may be any order
    middle = plan_of(model(torch.randn(2 * B * 3, 3)).view(2, B, 3, 2).square().sum((0, 2, 3)), named(model))
    assert middle.routed  # seen with so many entries per sample


@pytest.mark.parametrize("classes", [2, 10])
@pytest.mark.parametrize(
    "losses",
    [
        lambda out, y: F.cross_entropy(out, y, reduction="none"),
        lambda out, y: -out.log_softmax(1).gather(1, y.unsqueeze(1)).squeeze(1),
        lambda out, y: F.cross_entropy(out[..., None, None].expand(-1, -1, 3, 5), y.view(-1, 1, 1).expand(-1, 3, 5),
                                       reduction="none").mean((1, 2)),
    ],
    ids=["cross_entropy", "gather", "images"],
)  # fmt: skip
def test_two_samples_of_two_classes_tell_rows_from_columns(
    losses: Callable[[Tensor, Tensor], Tensor], classes: int
) -> None:
    """Either layout agrees with the two numbers that such a pair shows: the operation says which of them it is."""
    torch.manual_seed(0)
    model = nn.Linear(3, classes)
    plan = plan_of(losses(model(torch.randn(2, 3)), torch.tensor([0, classes - 1])), named(model))
    assert not plan.routed and plan.decided and plan.cacheable


def test_what_reads_no_rows_leaves_a_layout_open() -> None:
    """Samples along the columns of the classes, seen with a pair that looks like rows."""
    model = nn.Linear(3, 2)
    turned = model(torch.randn(2, 3)).log_softmax(1).t()
    open_one = plan_of(-turned.gather(1, torch.tensor([[0], [1]])).squeeze(1), named(model))
    assert open_one.routed


def test_a_rule_that_runs_the_nodes_own_backward_keeps_the_graph() -> None:
    w = matrix()
    plan = plan_of(torch.cdist(torch.randn(B, 3), w).sum(1), {"w": w})
    assert plan.live and plan.must_keep


def test_a_batch_that_is_not_finite_decides_nothing() -> None:
    layer, spoilt = nn.Linear(3, 2), torch.randn(B, 3)
    spoilt[1] = torch.nan
    plan = plan_of(layer(spoilt).square().sum(1), named(layer))
    assert not plan.decided and not plan.cacheable and plan.must_keep


def test_a_refusal_names_three_parameters() -> None:
    params = {name: nn.Parameter(torch.eye(3)) for name in "abcde"}
    total = params["e"] + params["d"] + params["c"] + params["b"] + params["a"]
    losses = torch.linalg.solve(total, torch.randn(3, B)).T.square().sum(1)
    with pytest.raises(
        UnsupportedNode, match=r"LinalgSolveExBackward0 has no per-sample rule \(parameters a, b, c\)\."
    ):
        per_sample_norms(losses, params)


def test_one_value_in_two_places_of_a_node_is_refused_unless_autograd_serves_it() -> None:
    w = nn.Parameter(torch.rand(3, dtype=torch.float64) + 0.5)
    x = torch.rand(B, 3, dtype=torch.float64)
    with pytest.raises(UnsupportedNode, match=r"AddcmulBackward0 uses the same shared value twice \(w\)"):
        per_sample_norms(torch.addcmul(x, w, w).square().sum(1), {"w": w})
    norms = per_sample_norms((torch.clamp(x + 2, w, w) * x).sum(1), {"w": w})
    torch.testing.assert_close(norms, x.norm(dim=1))  # every number is w


def test_check_tells_what_was_found() -> None:
    torch.manual_seed(0)
    table, layer, spare = nn.Embedding(7, 3), nn.Linear(3, 2), nn.Parameter(torch.ones(2))
    params = {"table": table.weight, **named(layer), "spare": spare}
    found = check(layer(table(torch.randint(7, (B, 5)))).square().sum((1, 2)), params)
    assert found.batch_size == B and found.unreached == ("spare",) and found.unseen == ()
    assert [(node.name, node.rule, node.parameters, node.norm) for node in found.nodes] == [
        ("EmbeddingBackward0", "table", ("table",), "rows"),
        ("AddmmBackward0", "linear", ("bias", "weight"), "instantiated"),
    ]
    assert "reached by no sample: spare" in str(found) and "memory beyond the forward pass, bookkeeping" in str(found)
    sums = 4 * (21 + 6 + 2 + 2)
    assert found.bytes == {"second_backward": sums, "bookkeeping": sums + 4 * B * 5 * (3 + 2)}
    for size in (0, 1):
        with pytest.raises(InvalidLosses, match=f"a batch of {size} cannot show"):
            check(layer(torch.randn(size, 3)).sum(1), params)
    check(layer(torch.randn(2, 3)).sum(1), params)
