"""What a watched pass shows: how closely losses and gradients are compared, and what a refusal says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.engine import walk
from clipwise.private.evidence import gradients, verdict
from clipwise.private.evidence.records import Change, Records
from clipwise.private.evidence.twin import Twin
from clipwise.private.evidence.verdict import Findings, judge
from clipwise.private.evidence.watch import Watch
from tests.core.common import layer, squares

KEPT = torch.tensor([True, False, True, True])
Body = Callable[[nn.Module, Tensor], Tensor]


def batch() -> Tensor:
    return torch.arange(1.0, 13.0).reshape(4, 3) / 10


def judged(
    body: Body = squares, twins: tuple[dict[str, Any], ...] = ({},), meddle: Callable[[Watch], Any] = lambda watch: None
) -> Findings:
    """The findings of one pass, with a twin for each set of options; `meddle` comes before the verdict."""
    x, model = batch(), layer()
    changes = [Change.of(KEPT, 0, "others were drawn", **{"scale": 4.0} | options) for options in twins]
    watch = Watch(Records.of(x, 4), [Twin(change) for change in changes], lambda *_: True)
    watch.start()
    try:
        losses = body(model, x)
    finally:
        watch.stop()
    meddle(watch)
    parameters = list(model.parameters())
    return judge(watch, losses, walk(losses, {id(p): k for k, p in enumerate(parameters)}, parameters), lambda: None)


# What counts


def test_changes_that_were_followed_to_the_end_are_counted() -> None:
    assert judged() == Findings(1, ()) and judged(twins=({}, {"scale": 2.0})) == Findings(2, ())
    assert judged().conclusive and not Findings(0, ()).conclusive
    assert judged(twins=({"losses_only": True},)) == Findings(0, ()), "gradients are left to another change"
    assert judged(twins=()) == Findings(0, ())


def test_a_twin_that_is_broken_says_why_and_others_count() -> None:
    def meddle(watch: Watch) -> None:
        watch.twins[0].broken = watch.twins[1].broken = "it is broken"

    assert judged(twins=({}, {}, {}), meddle=meddle) == Findings(1, ("it is broken",))


def test_values_that_left_before_the_losses_leave_nothing_proven() -> None:
    def meddle(watch: Watch) -> None:
        watch.twins[1].left += [(1, "a number left"), (2, "another one")]

    assert judged(twins=({}, {}), meddle=meddle) == Findings(0, ("a number left",))


def test_values_that_left_after_the_losses_are_a_log() -> None:
    def body(model: nn.Module, x: Tensor) -> Tensor:
        losses = squares(model, x)
        losses.tolist()
        losses.sum().item()
        return losses

    assert judged(body) == Findings(1, ())


def test_values_that_were_changed_outside_torch_break_every_twin() -> None:
    def body(model: nn.Module, x: Tensor) -> Tensor:
        x.numpy()[:] = 0.5
        return squares(model, x)

    assert judged(body, ({}, {})) == Findings(0, ("values of the batch were changed outside torch",))


def test_a_tensor_made_of_plain_values_leaves_nothing_proven() -> None:
    def meddle(watch: Watch) -> None:
        watch.traffic.imported_any = True

    why = "a tensor was made from values of the batch that are not tensors"
    assert judged(meddle=meddle) == Findings(0, (why,))


def test_losses_that_are_not_those_of_the_records_are_unclear() -> None:
    fewer = judged(lambda model, x: squares(model, x)[:3])
    assert fewer == Findings(0, ("there are 3 losses for 4 records",))
    unrelated = judged(lambda model, x: model.weight.sum() * torch.ones(4))  # type: ignore[operator, union-attr]
    assert unrelated == Findings(0, ("the losses were not seen to be computed from the batch",))


def test_gradients_that_are_not_finite_are_unclear_and_others_count() -> None:
    """The square root of a sample's own zero: its loss is finite, and stays where it is."""

    def body(model: nn.Module, x: Tensor) -> Tensor:
        return squares(model, x) + (x[:, 0].detach() * 0 * model(x)[:, 0]).abs().sqrt()

    found = judged(body)
    assert found == Findings(0, ("gradients cannot be computed with other records",))


def test_gradients_that_torch_cannot_compute_for_other_records_are_unclear(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = gradients.differentiate

    def differentiate(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) % 2 == 0:
            raise (RuntimeError if len(calls) == 2 else IndexError)("index out of range")
        return real(*args, **options)

    monkeypatch.setattr(gradients, "differentiate", differentiate)
    for _ in range(2):
        assert judged() == Findings(0, ("gradients cannot be computed with other records",))


def test_memory_of_unknown_origin_is_refused() -> None:
    def body(model: nn.Module, x: Tensor) -> Tensor:
        return squares(model, x + BANK)

    x, model = batch(), layer()
    watch = Watch(Records.of(x, 4), [], lambda tensor, _: tensor is not BANK)
    watch.start()
    losses = body(model, x)
    watch.stop()
    parameters = list(model.parameters())
    with pytest.raises(cw.NotSeparable, match=r"AddmmBackward0 reads memory of unknown origin.*constants="):
        judge(watch, losses, walk(losses, {id(p): k for k, p in enumerate(parameters)}, parameters), lambda: None)


BANK = torch.ones(3)


# How closely


def twin_of(losses: Tensor, theirs: Tensor) -> Twin:
    twin = Twin(Change.of(KEPT, 0, "others were drawn"))
    twin.enter(losses.detach(), theirs)
    return twin


def moved(ours: list[float], theirs: list[float], dtype: torch.dtype = torch.float64) -> str:
    """What a refusal says of losses that would be others; empty when they count as the same."""
    losses = torch.tensor(ours, dtype=dtype)
    try:
        verdict._compare_losses(twin_of(losses, torch.tensor(theirs, dtype=dtype)), losses)
    except cw.NotSeparable as error:
        return str(error)
    return ""


def test_the_loss_that_moved_most_is_named() -> None:
    assert moved([1, 2, 3, 4], [1, 9, 3, 4]) == "", "the second sample is another record"
    assert "samples mix: when others were drawn, the loss of sample 2 moved from 3 to 3.5" in moved(
        [1, 2, 3, 4], [1.1, 2, 3.5, 4]
    )
    assert "the loss of sample 0 moved from 1 to 1.1" in moved([1, 2, 3, 4], [1.1, 2, 3, 4])
    assert "the loss of sample 3 moved from 4 to 3" in moved([1, 2, 3, 4], [1, 2, 3, 3])


def test_losses_that_are_not_finite() -> None:
    nan, inf = torch.nan, torch.inf
    assert moved([nan, 1, inf, 4], [5.0, 1, 6.0, 4]) == "", "what is not finite is left out of the sum"
    assert "the loss of sample 0 moved from 1 to nan" in moved([1, 1, 1, 1], [nan, 1, 5, 1])
    assert "the loss of sample 3 moved from 1 to inf" in moved([1, 1, 1, 1], [1, 1, 5, inf])


@pytest.mark.parametrize(
    ("dtype", "ulps"), [(torch.float64, 160), (torch.float32, 160), (torch.bfloat16, 2), (torch.float16, 2)]
)
def test_rounding_is_allowed_and_no_more(dtype: torch.dtype, ulps: int) -> None:
    eps = torch.finfo(dtype).eps
    for scale in (1.0, 1024.0, 2.0**-10):
        allowed, more = [[scale * (1 + n * eps), 1.0, scale, scale] for n in (ulps, ulps + 1)]
        assert moved([scale, 1, scale, scale], allowed, dtype) == ""
        assert "the loss of sample 0" in moved([scale, 1, scale, scale], more, dtype)
    assert "the loss of sample 0" in moved([0, 1, 1, 1], [1e-30, 1, 1, 1]), "relative to the loss itself"


def gradient_moves(body: Body) -> str:
    with pytest.raises(cw.NotSeparable) as refused:
        judged(body)
    return str(refused.value)


def test_gradients_are_compared_with_their_length() -> None:
    def pulled(share: float, own: float) -> Body:
        def body(model: nn.Module, x: Tensor) -> Tensor:
            pull = share * model(x).sum(1) * x.mean().detach()
            return own * squares(model, x) + pull - pull.detach()

        return body

    assert "the gradient of samples 0, 2, 3 moved by" in gradient_moves(pulled(1.0, 1.0))
    share = "0.12"  # the mean moves from 0.65 to 0.725
    assert f"the gradient of samples 0, 2, 3 moved by {share} of" in gradient_moves(pulled(1e-4, 0.0))
    assert judged(pulled(0.0, 1.0)) == Findings(1, ()) == judged(pulled(0.0, 0.0)), "no gradient does not move"
    assert judged(pulled(1e-7, 1.0)) == Findings(1, ()), "rounding"

    def appears(model: nn.Module, x: Tensor) -> Tensor:
        pull = model(x).sum(1) * (x[1].sum() > 2)
        return 0 * squares(model, x) + pull - pull.detach()

    assert "moved by inf of its length" in gradient_moves(appears)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_the_gradients_of_all_parameters_are_compared(name: str) -> None:
    def body(model: nn.Module, x: Tensor) -> Tensor:
        pull = getattr(model, name).sum() * x.mean() * torch.ones(4)
        return squares(model, x) + pull - pull.detach()

    assert "the gradient of samples 0, 2, 3 moved" in gradient_moves(body)
    assert "the loss of sample" in gradient_moves(lambda model, x: squares(model, x) + x.mean())


REMEDIES = {
    "mm": "meet in a product", "index": "mix views of one record", "roll": "mix views", "topk": "ranked or counted",
    "convolution": "runs along the batch", "native_batch_norm": "BatchNorm in training mode", "mean": "A statistic",
}  # fmt: skip


@pytest.mark.parametrize(("operation", "remedy"), REMEDIES.items())
def test_the_first_operation_names_the_remedy(operation: str, remedy: str) -> None:
    twin = twin_of(torch.ones(4), torch.ones(4))
    twin.moved = operation, "loop.py:7"
    text = str(verdict._mixing(twin, "something moved"))
    assert f"It was first seen after {operation} (loop.py:7). " in text and remedy in text
    twin.moved = operation, ""
    assert f"after {operation}. " in str(verdict._mixing(twin, ""))
    twin.moved = None
    assert "first seen" not in str(verdict._mixing(twin, "")) and "A statistic" in str(verdict._mixing(twin, ""))


@pytest.mark.parametrize(
    "losses",
    [
        lambda out, y: (out - y).square().mean(1),
        lambda out, y: nn.functional.mse_loss(out, y, reduction="none").mean(1),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_outputs_that_are_broadcast_against_targets_are_named_as_the_cause(losses: Any) -> None:
    torch.manual_seed(0)
    model, data = nn.Linear(3, 1), TensorDataset(torch.randn(32, 3), torch.randn(32))
    plan = cw.Plan(cw.Poisson(32, 16), 3, cw.Abadi(1.0), 1.0)
    private = cw.Private(plan, model, torch.optim.SGD(model.parameters(), 0.1), seed=0)
    batches = iter(private.loader(data))
    x, y = next(batches)
    given = losses(model(x), y)
    with pytest.raises(cw.NotSeparable, match=r"broadcast to \(B, B\)\. Use outputs\.squeeze\(1\)") as refused:
        private.step(given)
    assert "A statistic" not in str(refused.value)
