"""What must be refused, each with the reason, the place and the way out; and a refusal changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clipwise.clipping import Abadi
from clipwise.engine import check, clipped_gradients, per_sample_gradients, per_sample_norms
from clipwise.errors import CheckFailed, ClipwiseError, InvalidLosses, InvalidPlan, NotSeparable, UnsupportedNode
from clipwise.private import check_model
from tests.core.doubles import Remembering
from tests.zoo import named

from .reference import untouched


@dataclass(frozen=True)
class Refused:
    """A model whose losses must be refused with `error`; the message must contain every word of `words`."""

    name: str
    build: Callable[[], nn.Module]
    losses: Callable[[nn.Module, Tensor], Tensor]
    error: type[ClipwiseError]
    words: tuple[str, ...]
    shape: tuple[int, ...] = (6,)


def per_row(out: Tensor) -> Tensor:
    return out.flatten(1).square().sum(1)


def plain(model: nn.Module, x: Tensor) -> Tensor:
    return per_row(model(x))


def batch_norm(affine: bool, where: str) -> Callable[[], nn.Module]:
    """A network with a batch norm in training mode first, in the middle or last."""

    def build() -> nn.Module:
        norm = nn.BatchNorm1d(6, affine=affine)
        layers = {
            "first": [norm, nn.Linear(6, 6), nn.Tanh()],
            "middle": [nn.Linear(6, 6), norm, nn.Tanh(), nn.Linear(6, 3)],
            "last": [nn.Linear(6, 6), nn.Tanh(), norm],
        }
        return nn.Sequential(*layers[where]).train()

    return build


def contrastive(model: nn.Module, x: Tensor) -> Tensor:
    """In-batch negatives: every sample's loss reads all the others."""
    z = F.normalize(model(x), dim=1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(x)), reduction="none")


def frozen_query(model: nn.Module, x: Tensor) -> Tensor:
    """The keys of all samples against constant queries; only the other samples' keys carry gradients."""
    with torch.no_grad():
        query = x.flip(0)[:, :3].clone()
    return F.cross_entropy(query @ model(x).T, torch.arange(len(x)), reduction="none")


def two_views(model: nn.Module, x: Tensor) -> Tensor:
    """SimCLR: both views of all samples in one pass, each first view against every row."""
    z = F.normalize(model(torch.cat([x, 0.9 * x])), dim=1)
    return F.cross_entropy(z[: len(x)] @ z.T / 0.5, torch.arange(len(x)) + len(x), reduction="none")


def two_views_and_more(model: nn.Module, x: Tensor) -> Tensor:
    """The same beside an honest term."""
    return two_views(model, x) + per_row(model(x))


def prototypes(model: nn.Module, x: Tensor) -> Tensor:
    """Distances to the class means of the batch."""
    z, y = model(x), torch.arange(len(x)) // 2
    means = torch.stack([z[y == label].mean(0) for label in y.unique()])
    return (z - means[y]).square().sum(1)


def across_the_batch(model: nn.Module, x: Tensor) -> Tensor:
    """Attention whose tokens are the samples."""
    h = model(x)
    return per_row(torch.softmax(h @ h.T, dim=1) @ h)


def centred(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    return per_row(y - y.mean(0))


def shifted(model: nn.Module, x: Tensor) -> Tensor:
    """Each sample's loss reads its neighbour's output too."""
    y = model(x)
    return per_row(y.tanh() + y.roll(1, 0))


def running_sum(model: nn.Module, x: Tensor) -> Tensor:
    return per_row(model(x)).cumsum(0)


def common_term(model: nn.Module, x: Tensor) -> Tensor:
    losses = per_row(model(x))
    return losses + losses.mean()


def above_average(model: nn.Module, x: Tensor) -> Tensor:
    """The gradients of all losses together are zero, so a batch that mixes looks like one that nothing reaches."""
    losses = per_row(model(x))
    return losses - losses.mean()


def share_of_the_total(model: nn.Module, x: Tensor) -> Tensor:
    losses = per_row(model(x))
    return losses / losses.sum()


def one_for_all(model: nn.Module, x: Tensor) -> Tensor:
    return per_row(model(x)).mean().expand(len(x))


def batch_softmax(model: nn.Module, x: Tensor) -> Tensor:
    return -torch.log_softmax(model(x).sum(1), dim=0)


class Solved(nn.Module):
    """A system of equations with the parameter as its matrix, for which there is no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(6) + 0.1 * torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.solve(self.weight, x.T).T


class FoldedStates(nn.Module):
    """The last states of both directions, (2, B, H), viewed as (B, 2 H): each row of it holds two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(6, 4, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        with torch.backends.mkldnn.flags(enabled=False):
            return self.rnn(x)[1].reshape(len(x), -1)


class FoldedTowers(nn.Module):
    """The same fold of two towers over one input."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.one(x), self.other(x)]).view(len(x), -1)


def frequency_scaled() -> nn.Module:
    """An embedding that divides a row's gradient by how often the whole batch uses it."""
    return nn.Embedding(3, 4, scale_grad_by_freq=True)


def bag_scaled() -> nn.Module:
    """The same, of a bag."""
    return nn.EmbeddingBag(3, 4, scale_grad_by_freq=True)


def looked_up(model: nn.Module, x: Tensor) -> Tensor:
    return per_row(model((x > 0).long()))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


def half_hidden(model: nn.Module, x: Tensor) -> Tensor:
    """The first layer inside a reentrant checkpoint, where no graph shows its parameters; the others are seen."""
    first, *others = model.children()
    hidden = checkpoint(first, x.requires_grad_(), use_reentrant=True)
    return per_row(nn.Sequential(*others)(hidden))


def squashed_in_half(model: nn.Module, x: Tensor) -> Tensor:
    """Autograd would round the sum over samples on its way through the tanh."""
    return per_row((x.bfloat16() @ model.weight.bfloat16().tanh().T).float())  # type: ignore[operator, union-attr]


REFUSED = [
    *(
        Refused(f"batch_norm_{where}_{'affine' if affine else 'plain'}", batch_norm(affine, where), plain, NotSeparable,
            ("BatchNorm",))
        for affine in (True, False) for where in ("middle", "last")
    ),
    Refused("batch_norm_first_affine", batch_norm(True, "first"), plain, NotSeparable, ("BatchNorm",)),
    Refused(
        "batch_norm_2d",
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 1)).train(),
        plain, NotSeparable, ("BatchNorm",), (2, 5, 5),
    ),
    Refused("contrastive", mlp, contrastive, NotSeparable, ("sample",)),
    Refused("frozen_query_contrastive", mlp, frozen_query, NotSeparable, ("sample",)),
    Refused("two_views_contrastive", mlp, two_views, NotSeparable, ("sample",)),
    Refused("two_views_and_more", mlp, two_views_and_more, NotSeparable, ("sample",)),
    Refused("prototypes", mlp, prototypes, NotSeparable, ("sample",)),
    Refused("attention_across_the_batch", mlp, across_the_batch, NotSeparable, ("sample",)),
    Refused("centred_outputs", mlp, centred, NotSeparable, ("sample",)),
    Refused("neighbours_output", mlp, shifted, NotSeparable, ("sample",)),
    Refused("running_sum_of_losses", mlp, running_sum, NotSeparable, ("sample",)),
    Refused("common_term", mlp, common_term, NotSeparable, ("sample",)),
    Refused("above_average", mlp, above_average, NotSeparable, ("sample",)),
    Refused("share_of_the_total", mlp, share_of_the_total, NotSeparable, ("sample",)),
    Refused("mean_loss_expanded", mlp, one_for_all, NotSeparable, ("sample",)),
    Refused("softmax_over_the_batch", mlp, batch_softmax, NotSeparable, ("sample",)),
    Refused("folded_towers", FoldedTowers, plain, NotSeparable, ("two different samples",)),
    Refused("scale_grad_by_freq", frequency_scaled, looked_up, UnsupportedNode, ("scale_grad_by_freq",)),
    Refused("bag_scale_grad_by_freq", bag_scaled, looked_up, UnsupportedNode, ("scale_grad_by_freq",)),
    Refused("solved_system", Solved, plain, UnsupportedNode, ("LinalgSolve", "weight")),
    Refused("reentrant_checkpoint", mlp, half_hidden, UnsupportedNode, ("use_reentrant=False",)),
    Refused("weight_computed_in_half", lambda: nn.Linear(6, 3, bias=False), squashed_in_half, UnsupportedNode,
        ("half precision", "float32")),
]  # fmt: skip

CALLS: dict[str, Callable[[Tensor, Any], object]] = {
    "check": check,
    "per_sample_norms": per_sample_norms,
    "per_sample_gradients": per_sample_gradients,
    "clipped_gradients": lambda losses, params: clipped_gradients(losses, params, Abadi(1.0)),
    "bookkeeping": lambda losses, params: clipped_gradients(losses, params, Abadi(1.0), way="bookkeeping"),
    "second_backward": lambda losses, params: clipped_gradients(losses, params, Abadi(1.0), way="second_backward"),
}


@pytest.mark.parametrize("batch", [2, 3, 4, 6])
@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.name)
def test_is_refused_with_the_reason(refused: Refused, batch: int) -> None:
    torch.manual_seed(0)
    model = refused.build()
    for call in CALLS.values():
        losses = refused.losses(model, torch.randn(batch, *refused.shape))
        with pytest.raises(refused.error) as caught:
            call(losses, named(model))
        assert all(word.lower() in str(caught.value).lower() for word in refused.words), str(caught.value)


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.name)
def test_is_refused_also_after_a_batch_of_one(refused: Refused) -> None:
    """A batch of one cannot mix samples, so it may pass; it must not open the door for the next batch."""
    torch.manual_seed(0)
    model = refused.build().eval()
    with suppress(refused.error):
        per_sample_norms(refused.losses(model, torch.randn(1, *refused.shape)), named(model))
    model.train()
    with pytest.raises(refused.error):
        per_sample_norms(refused.losses(model, torch.randn(3, *refused.shape)), named(model))


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.name)
def test_a_refusal_changes_nothing(refused: Refused) -> None:
    torch.manual_seed(0)
    model = refused.build()
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    losses = refused.losses(model, torch.randn(3, *refused.shape))
    with untouched(model), pytest.raises(refused.error):
        clipped_gradients(losses, named(model), Abadi(1.0))


@pytest.mark.parametrize("batch", [3, 4, 5, 8])
def test_folded_states_of_two_directions_are_refused(batch: int) -> None:
    """Every row serves one loss, and every sample two: seen only by comparing what both directions read."""
    torch.manual_seed(0)
    model = FoldedStates()
    with pytest.raises(NotSeparable, match="two different samples"):
        per_sample_norms(plain(model, torch.randn(batch, 5, 6)), named(model))


@pytest.mark.parametrize("length", [1, 3])
def test_equal_samples_in_a_loop_are_not_taken_for_one(length: int) -> None:
    torch.manual_seed(0)
    model, x = mlp(), torch.randn(length, 6).expand(4, length, 6).contiguous()
    losses = torch.stack([model(sample).square().sum() for sample in x])
    assert per_sample_norms(losses, named(model)).unique().numel() == 1


def a_model_and_losses() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = mlp()
    return model, plain(model, torch.randn(4, 6))


BAD_LOSSES: dict[str, Callable[[Tensor], Any]] = {
    "scalar": lambda losses: losses.mean(),
    "column": lambda losses: losses.unsqueeze(1),
    "matrix": lambda losses: losses.unsqueeze(1).expand(4, 3),
    "detached": lambda losses: losses.detach(),
    "integers": lambda losses: losses.detach().long(),
    "list": lambda losses: list(losses),
    "number": float,
}


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar")
@pytest.mark.parametrize("spoil", BAD_LOSSES.values(), ids=BAD_LOSSES)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_losses_that_are_no_vector_with_a_graph_are_refused(
    call: Callable[[Tensor, Any], object], spoil: Callable[[Tensor], Any]
) -> None:
    model, losses = a_model_and_losses()
    bad = spoil(losses.sum() if spoil is float else losses)
    with untouched(model), pytest.raises(InvalidLosses) as caught:
        call(bad, named(model))
    assert "losses" in str(caught.value)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_losses_that_reach_no_parameter_are_refused(call: Callable[[Tensor, Any], object]) -> None:
    _, losses = a_model_and_losses()
    with pytest.raises(InvalidLosses, match=r"no parameter|none of the parameters|reach"):
        call(losses, named(mlp()))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_no_parameters_at_all_are_refused(call: Callable[[Tensor, Any], object]) -> None:
    _, losses = a_model_and_losses()
    with pytest.raises(ClipwiseError):
        call(losses, {})


def test_a_frozen_parameter_among_the_private_ones_is_refused() -> None:
    """A parameter that needs no gradient would silently get noise and no signal."""
    model, _ = a_model_and_losses()
    next(model.parameters()).requires_grad_(False)
    losses = plain(model, torch.randn(4, 6))
    with pytest.raises(ClipwiseError, match=r"requires_grad|frozen"):
        per_sample_norms(losses, dict(model.named_parameters()))


@pytest.mark.parametrize("spoil", [lambda p: 2 * p, lambda p: "weight"], ids=["computed", "no tensor"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_params_that_are_no_parameters_are_refused(call: Callable[[Tensor, Any], object], spoil: Any) -> None:
    model, losses = a_model_and_losses()
    weight, *others = model.parameters()
    with pytest.raises(InvalidLosses, match="params must be"):
        call(losses, [spoil(weight), *others])


def test_an_unknown_way_is_refused() -> None:
    model, losses = a_model_and_losses()
    with pytest.raises(InvalidPlan, match="second_backward"):
        clipped_gradients(losses, named(model), Abadi(1.0), way="fast")  # type: ignore[arg-type]


def test_an_error_in_the_users_rule_leaves_everything_as_it_was() -> None:
    @dataclass(frozen=True)
    class Broken:
        sensitivity: float = 1.0

        def __call__(self, norms: Tensor) -> Tensor:
            raise RuntimeError("a bug in a rule")

    model, losses = a_model_and_losses()
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    with untouched(model), pytest.raises(RuntimeError, match="a bug in a rule"):
        clipped_gradients(losses, named(model), Broken())


def test_every_unsupported_node_is_named_at_once() -> None:
    model = nn.Sequential(Solved(), nn.Tanh(), Solved())
    with pytest.raises(UnsupportedNode) as refusal:
        per_sample_norms(plain(model, torch.randn(4, 6)), named(model))
    assert "0.weight" in str(refusal.value) and "2.weight" in str(refusal.value)


def test_a_hook_that_changes_a_gradient_is_named() -> None:
    model = nn.Linear(6, 3)
    model.weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(CheckFailed, match="hook"):
        per_sample_norms(plain(model, torch.randn(4, 6)), named(model))


@pytest.mark.parametrize(("dtype", "little", "much"), [(torch.float32, 1e-3, 3e-3), (torch.bfloat16, 5e-3, 4e-2)])
def test_gradients_that_differ_from_autograds_by_a_little_are_refused(
    dtype: torch.dtype, little: float, much: float
) -> None:
    """Orthogonal samples, so that a hook's factor is the relative difference: under 0.2 %, in half precision 2 %."""
    for factor, fails in ((1 + little, False), (1 + much, True), (1 - much, True)):
        model = nn.Linear(4, 3, bias=False).to(dtype)
        model.weight.register_hook(lambda gradient, factor=factor: factor * gradient)
        losses = per_row(model(torch.eye(4, dtype=dtype)).float())
        with pytest.raises(CheckFailed, match="disagree with autograd") if fails else nullcontext():
            per_sample_norms(losses, named(model))


BATCH = 4
OF_SHAPE_OF_THE_BATCH: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "sum": ((BATCH,), lambda w: (w + torch.randn(5, BATCH)).square().sum(0)),
    "hypot": ((BATCH, 3), lambda w: torch.hypot(w, torch.randn(BATCH, 3)).sum(1)),
    "hypot_sequence_first": ((BATCH,), lambda w: torch.hypot(w, torch.randn(5, BATCH)).sum(0)),
    "left factor": ((BATCH, 3), lambda w: (w @ torch.randn(3, 2)).square().sum(1)),
    "right factor": ((3, BATCH), lambda w: (torch.randn(5, 3) @ w).square().sum(0)),
    "stacks": ((BATCH, 2, 3), lambda w: torch.bmm(w, torch.randn(BATCH, 3, 2)).square().sum((1, 2))),
    "added rows": ((BATCH, 2), lambda w: torch.addmm(w, torch.randn(BATCH, 3), torch.randn(3, 2)).square().sum(1)),
    "matrix of a vector": ((BATCH, 3), lambda w: torch.mv(w, torch.randn(3)).square()),
    "scaled matrix of a vector": ((BATCH, 3), lambda w: torch.addmv(torch.ones(BATCH), w, torch.randn(3)).square()),
    "images": ((BATCH, 2, 5), lambda w: F.conv1d(w, torch.randn(3, 2, 2)).square().sum((1, 2))),
    "channels": ((BATCH, 2, 2), lambda w: F.conv1d(torch.randn(5, 2, 4), w).square().sum((0, 2))),
    "embedding": ((7, BATCH), lambda w: F.embedding(torch.randint(7, (5,)), w).square().sum(0)),
    "index": ((7, BATCH), lambda w: w[torch.randint(7, (5,))].square().sum(0)),
    "index_select": ((7, BATCH), lambda w: w.index_select(0, torch.randint(7, (5,))).square().sum(0)),
    "repeated": ((BATCH, 3), lambda w: (w.repeat(2, 1) * torch.randn(2 * BATCH, 3)).view(2, BATCH, 3).sum((0, 2))),
    **{
        f"embedding_bag_{mode}": (
            (7, BATCH),
            lambda w, mode=mode: F.embedding_bag(torch.randint(7, (6, 3)), w, mode=mode).square().sum(0),  # type: ignore[misc]
        )
        for mode in ("sum", "mean", "max")
    },
}
if hasattr(F, "grouped_mm"):  # not in every torch
    OF_SHAPE_OF_THE_BATCH["grouped_product"] = (
        (2, 8, BATCH),
        lambda w: F.grouped_mm(torch.randn(8, 8), w, offs=torch.tensor([3, 8], dtype=torch.int32)).square().sum(0),
    )


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="not in every torch")
def test_rows_that_meet_matrices_of_the_batch_in_a_grouped_product_are_refused() -> None:
    """A row for every two places of the batch, and a matrix for every sample."""
    rows = nn.Parameter(torch.randn(2 * BATCH, 8))
    ends = torch.arange(2, 2 * BATCH + 1, 2, dtype=torch.int32)
    out = F.grouped_mm(rows, torch.randn(BATCH, 8, 8), offs=ends)
    with pytest.raises(NotSeparable, match="the rows of a grouped product"):
        per_sample_norms(per_row(out.view(BATCH, 16)), {"rows": rows})


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="not in every torch")
def test_a_grouped_product_without_offsets_is_refused() -> None:
    stacks = nn.Parameter(torch.randn(BATCH, 8, 8))
    out = F.grouped_mm(torch.randn(BATCH, 8, 8), stacks)
    with pytest.raises(UnsupportedNode, match="without row offsets"):
        per_sample_norms(per_row(out.flatten(1)), {"stacks": stacks})


@pytest.mark.parametrize(("shape", "losses"), OF_SHAPE_OF_THE_BATCH.values(), ids=OF_SHAPE_OF_THE_BATCH)
def test_a_parameter_with_an_entry_for_each_place_in_the_batch_is_refused(
    shape: tuple[int, ...], losses: Callable[[Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(*shape))
    with pytest.raises(NotSeparable, match="Backward0: "):
        per_sample_norms(losses(weight), {"weight": weight})


def test_losses_that_nothing_of_the_batch_enters_are_refused() -> None:
    """A parameter of the batch's own shape: no operand is broadcast, so that nothing else could be the batch."""
    weight = nn.Parameter(torch.randn(BATCH, 3))
    with pytest.raises(NotSeparable, match=r"samples mix after SumBackward1 \(parameters weight\)"):
        per_sample_norms((weight * torch.randn(BATCH, 3)).sum(1), {"weight": weight})


UNSUPPORTED: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor], str]] = {
    "a mask": ((BATCH, 3), lambda w: w[torch.tensor([True] * BATCH)].square().sum(1), "an index with a mask"),
    "not on the leading axes": (
        (3, 7), lambda w: (w[:, torch.arange(BATCH)].T * torch.randn(BATCH, 3)).sum(1), "not on the leading axes",
    ),
    "other columns": (
        (3, 7), lambda w: (w.index_select(1, torch.arange(BATCH)).T * torch.randn(BATCH, 3)).sum(1), "another axis",
    ),
    "weights of a bag": (
        (BATCH, 3),
        lambda w: F.embedding_bag(torch.randint(7, (BATCH, 3)), torch.randn(7, 2), mode="sum", per_sample_weights=w)
        .square().sum(1), "per_sample_weights",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("shape", "losses", "why"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_a_form_of_an_operation_without_a_rule_is_refused_with_the_reason(
    shape: tuple[int, ...], losses: Callable[[Tensor], Tensor], why: str
) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(*shape))
    with pytest.raises(UnsupportedNode, match=why):
        per_sample_norms(losses(weight), {"weight": weight})


def compiled_losses() -> tuple[nn.Module, Tensor]:
    model = mlp()
    return model, plain(torch.compile(model, backend="aot_eager"), torch.randn(4, 6))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_graph_is_refused_with_the_way_out() -> None:
    """`aot_eager` makes the same single autograd node as the default backend, and needs no C++ compiler."""
    model, losses = compiled_losses()
    with pytest.raises(UnsupportedNode, match=r"[Cc]ompile"):
        per_sample_norms(losses, named(model))


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return per_row(model(batch))


class DetachedStatistics(nn.Module):
    """Centres by batch statistics that carry no gradient: the graph of the losses cannot show it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y - y.detach().mean(0)


class SharedKeys(nn.Module):
    """Constant queries against keys of several rows per sample: looks like a table of constants times a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.layer(torch.cat([x, 2 * x, 3 * x]))
        query = torch.sin(torch.arange(3.0 * len(x))).view(-1, 3)
        return torch.softmax(query @ keys.T, dim=1)[:, :3]


class MeanAsInput(nn.Module):
    """The mean of the batch goes through the layer like a constant would."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mean(0)) - x[:, :3]


class ReadsTheNeighbour(nn.Module):
    """Two passes, one over the neighbours' data: every row serves one loss, every sample two."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.layer(x.roll(1, 0)).tanh()
        return out


def weighted_by_count() -> nn.Module:
    class Weighted(nn.Module):
        """Divides by the batch size: no sample's value matters to the others, its presence does."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x) / len(x)
            return out

    return Weighted()


INVISIBLE: dict[str, Callable[[], nn.Module]] = {
    "batch_norm_on_the_raw_input": batch_norm(False, "first"),
    "detached_statistics": DetachedStatistics,
    "reads_the_neighbours_data": ReadsTheNeighbour,
    "keys_of_all_samples": SharedKeys,
    "mean_of_the_data": MeanAsInput,
    "divided_by_the_batch_size": weighted_by_count,
    "batch_norm_middle": batch_norm(True, "middle"),
}


@pytest.mark.parametrize("build", INVISIBLE.values(), ids=INVISIBLE)
def test_check_model_sees_what_the_graph_hides(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, batch = build(), torch.randn(5, 6)
    with untouched(model), pytest.raises(NotSeparable):
        check_model(model, loss_fn, batch)


def test_check_model_passes_an_honest_model() -> None:
    torch.manual_seed(0)
    model, batch = mlp(), torch.randn(5, 6)
    with untouched(model):
        check_model(model, loss_fn, batch)


class Random(nn.Module):
    """Draws random numbers by functions, in training only or always, and may divide by the batch size beside it."""

    def __init__(self, always: bool, honest: bool) -> None:
        super().__init__()
        self.layer, self.always, self.honest = nn.Linear(6, 3), always, honest

    def forward(self, x: Tensor) -> Tensor:
        out = F.dropout(self.layer(x), 0.5, self.training or self.always)
        return out if self.honest else out / len(x)


@pytest.mark.parametrize("always", [True, False])
def test_check_model_does_not_take_random_numbers_for_mixing(always: bool) -> None:
    torch.manual_seed(0)
    model, batch = Random(always, honest=True), torch.randn(5, 6)
    with untouched(model):
        check_model(model, loss_fn, batch)


def test_check_model_looks_behind_random_numbers() -> None:
    torch.manual_seed(0)
    model, batch = Random(always=False, honest=False), torch.randn(5, 6)
    with untouched(model), pytest.raises(NotSeparable, match="removing"):
        check_model(model, loss_fn, batch)


def test_check_model_restores_a_model_that_fails_half_way() -> None:
    """A memory that the forward pass has written to before it raises is put back as well."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(mlp(), nn.Dropout(0.5)), torch.randn(5, 6)
    model.register_buffer("calls", torch.zeros(()))

    def failing(model: nn.Module, x: Tensor) -> Tensor:
        model.calls += 1  # type: ignore[operator]
        raise RuntimeError("out of memory")

    with untouched(model), pytest.raises(RuntimeError, match="out of memory"):
        check_model(model, failing, batch)


def test_check_model_names_a_number_in_the_batch() -> None:
    with pytest.raises(InvalidLosses, match="no axis of samples"):
        check_model(mlp(), lambda model, pair: plain(model, pair[0]), (torch.randn(4, 6), torch.tensor(3)))


def test_check_model_takes_a_named_tuple() -> None:
    class Pair(NamedTuple):
        x: Tensor
        y: Tensor

    check_model(mlp(), lambda model, pair: plain(model, pair.x + pair.y), Pair(torch.randn(4, 6), torch.randn(4, 6)))


def test_check_model_needs_three_samples() -> None:
    with pytest.raises(InvalidLosses, match="at least three samples, got 2"):
        check_model(mlp(), loss_fn, torch.randn(2, 6))


class Remembers(Remembering):
    """Writes a statistic of the batch where it is saved with the model, and does not read it."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept.copy_(x.mean(0))
        out: Tensor = self.layer(x)
        return out


def test_check_model_sees_what_is_written_into_a_buffer() -> None:
    model, batch = Remembers(), torch.randn(5, 6)
    with untouched(model), pytest.raises(NotSeparable, match="computed from the batch into 'kept'"):
        check_model(model, loss_fn, batch)


def test_a_batch_norm_is_named_first() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    with pytest.raises(NotSeparable, match=r"^samples mix in a BatchNorm .* \(model, replaced = cw\.without_batchn"):
        check(model(torch.randn(8, 3)).squeeze(1), dict(model.named_parameters()))
