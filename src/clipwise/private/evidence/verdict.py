"""What a watched forward pass shows: samples that mix are refused, with the place and the usual remedy.

Other records must leave a sample's loss and gradient as they are. The same kernels ran on the same shapes, so they
agree to the last bits; the tolerance only allows for kernels that add in another order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clipwise.engine import HALF, Graph, distance, memory_of, widened
from clipwise.errors import NotSeparable
from clipwise.private.evidence.gradients import Known
from clipwise.private.evidence.records import some
from clipwise.private.evidence.traffic import CARRIED
from clipwise.private.evidence.twin import Twin
from clipwise.private.evidence.watch import Watch

_ULPS = 160  # 2e-5 in float32, 4e-14 in float64
_SAME_BITS = 2.0**-10  # of the rounding of a gradient: on a processor the same kernels give the same bits


@dataclass(frozen=True)
class Findings:
    """What a watched pass showed: how many changes of records it stood, and why others could not tell.

    Values that left the tensors and would have been others may have come back: then no change counts.
    """

    passed: int
    unclear: tuple[str, ...]

    @property
    def conclusive(self) -> bool:
        """Whether at least one change of records was followed to the end."""
        return self.passed > 0


def judge(watch: Watch, losses: Tensor, graph: Graph, also: Callable[[], None]) -> Findings:
    """Refuse losses or gradients of a sample that other records move.

    Whatever else is asked of the twins is asked by `also`, before they are let go to make room for gradients.
    """
    _refuse_carried(watch, graph)
    made = watch.made_by.get(memory_of(losses), watch.count)
    passed, unclear, passed_over = 0, [], False
    outside, able = watch.traffic.written_outside(), []
    for twin in watch.twins:
        if outside:
            twin.broken = twin.broken or "values of the batch were changed outside torch"
        if watch.is_changed_outside:
            twin.broken = twin.broken or "memory was changed outside torch (NumPy, ctypes)"
        reason = _unable(twin, losses, watch)
        if twin.change.wild:
            if not reason:
                _compare_losses(twin, losses)
        elif reason:
            unclear.append(reason)
        else:
            _compare_losses(twin, losses)
            able.append(twin)
    also()
    for twin in watch.twins:
        if twin.change.losses_only or twin not in able:
            twin.forget()
    known = Known(losses, graph, watch)
    for twin in able:
        finite = twin.change.losses_only or _compare_gradients(twin, known)
        left = [why for count, why in twin.left if count < made]
        if left or not finite:
            unclear.append(left[0] if left else "gradients cannot be computed with other records")
            passed_over = passed_over or bool(left)
        elif not twin.change.losses_only:
            passed += 1
    known.look_at_reads()
    _refuse_read(known)
    if watch.traffic.imported_any:
        unclear.append("a tensor was made from values of the batch that are not tensors")
        passed_over = True
    return Findings(0 if passed_over else passed, tuple(dict.fromkeys(unclear)))


def _unable(twin: Twin, losses: Tensor, watch: Watch) -> str:
    if twin.broken:
        return twin.broken
    if losses.shape[0] != watch.records.size:
        return f"there are {losses.shape[0]} losses for {watch.records.size} records"
    return "" if memory_of(losses) in twin else "the losses were not seen to be computed from the batch"


def _refuse_carried(watch: Watch, graph: Graph) -> None:
    """Refuse losses that read memory which changed since the run began, or the data set itself."""
    marks = watch.node_marks(graph)
    for k in graph.leaves_first:
        if marks[k] & CARRIED:
            raise NotSeparable(
                f"{graph.names[k]} reads memory of unknown origin: it is neither the batch, nor memory of the model or "
                "the program that stayed the same since the first batch. It may hold other records or earlier batches "
                "(a memory bank, a queue, a state carried over, the tensors of the data set). Compute it from the "
                "batch alone, or before the first batch. If it holds no data of records (a schedule, a teacher that "
                "averages released weights, a public table of the data set with at least as many rows as there are "
                "records), declare it: Private(..., constants=[...])."
            )


def _refuse_read(known: Known) -> None:
    """Refuse a backward pass that reads such memory: hooks and custom functions do, and the graph does not show it."""
    if known.reads:
        raise NotSeparable(
            f"in the backward pass {known.reads} reads memory of unknown origin: it is neither of this forward pass, "
            "nor memory of the model or the program that stayed the same since the first batch. A hook or the backward "
            "of a custom function may scale gradients by other records or earlier batches (a running norm, a statistic "
            "of the units). Compute it from the batch alone, or before the first batch. If it holds no data of "
            "records, declare it: Private(..., constants=[...])."
        )


def _compare_losses(twin: Twin, losses: Tensor) -> None:
    kept = twin.change.kept.to(losses.device)
    ours, theirs = losses.detach()[kept].double(), twin.of(losses.detach())[kept].double()
    moved = (theirs - ours).abs()
    limit = _tolerance(losses) * ours.abs() + torch.finfo(torch.float32).tiny
    wrong = ~(moved <= limit) & torch.isfinite(ours)
    if twin.change.wild:  # zero times what is no number is no mixing
        wrong &= torch.isfinite(theirs)
    if bool(wrong.any()):
        worst = int(torch.where(wrong, moved.nan_to_num(float("inf")), -1).argmax())
        raise _mixing(
            twin, f"the loss of sample {int(kept[worst])} moved from {ours[worst]:.6g} to {theirs[worst]:.6g}"
        )


def _compare_gradients(twin: Twin, known: Known) -> bool:
    """Differentiate the very graph with the twin's numbers in it. False where that gives no finite numbers."""
    if twin.has_odd:  # its numbers do not fit the graph of the true batch
        return False
    kept = twin.change.kept
    passes = known.passes(kept)
    finite = all(_compare_pass(twin, known, cotangent, number) for number, cotangent in enumerate(passes))
    if not finite:  # weights that are large may be why
        finite = _compare_pass(twin, known, known.plain(kept), -1)
    twin.forget()
    return finite


def _compare_pass(twin: Twin, known: Known, cotangent: Tensor, number: int) -> bool:
    kept = tuple(twin.change.kept.tolist())
    ours = known.of(cotangent, kept, number)
    try:
        theirs = twin.exchanged(lambda: known.now(cotangent))
    except (IndexError, RuntimeError):  # indices and values of different records
        return False
    moved = [distance(a, b) for a, b in zip(ours, theirs, strict=True)]
    if not math.isfinite(sum(moved)):
        return False
    if any(moved):
        _demand_small(twin, known, moved, [distance(a, None) for a in ours], kept)
    return True


def _demand_small(
    twin: Twin, known: Known, moved: Sequence[float], lengths: Sequence[float], kept: tuple[int, ...]
) -> None:
    """Refuse a gradient that moved, or that of a parameter which is more than the rounding of the whole."""
    whole, tolerance = math.hypot(*lengths), _tolerance(known.losses)
    rounding = torch.finfo(widened(known.losses.dtype)).eps * whole * (_SAME_BITS if known.losses.is_cpu else 1)
    for what, by, length in (
        ("the gradient", math.hypot(*moved), whole),
        *(("a part of the gradient", by, length) for by, length in zip(moved, lengths, strict=True)),
    ):
        if by > max(tolerance * length, rounding):
            share = by / length if length else math.inf
            raise _mixing(twin, f"{what} of {some(kept)} moved by {share:.2g} of its length")


def _tolerance(losses: Tensor) -> float:
    eps = torch.finfo(losses.dtype).eps
    return 2 * eps if losses.dtype in HALF else _ULPS * eps


# What the first operation that moved a row says about the cause, and the usual way out.
_REMEDIES: Sequence[tuple[tuple[str, ...], str]] = (
    (
        ("mm", "bmm", "addmm", "baddbmm", "mv", "dot", "einsum", "_scaled_dot_product", "cdist", "_cdist"),
        "Samples meet in a product (contrastive losses, in-batch negatives, attention or a graph over the batch): let "
        "pairs, lists or subgraphs be the samples.",
    ),
    (
        ("index", "gather", "flip", "roll", "select", "take", "lerp", "cat", "stack", "scatter"),
        "Rows of other samples are read (mixup, cutmix, shuffled negatives, neighbours): mix views of one record only.",
    ),
    (
        ("sort", "topk", "argsort", "kthvalue", "median", "quantile", "cumsum", "unique", "bincount", "histc", "rank"),
        "Samples are ranked or counted (hard-example mining, class weights, quantiles of the batch): use public "
        "thresholds and constants.",
    ),
    (("convolution", "conv"), "A convolution runs along the batch: the first axis must be the samples."),
    (
        ("native_batch_norm", "_native_batch_norm", "batch_norm", "cudnn_batch_norm"),
        "BatchNorm in training mode: use GroupNorm or LayerNorm (model, replaced = cw.without_batchnorm(model)), or "
        "put it in eval mode.",
    ),
)
_PAIRS = (
    "It gave a value for every pair of samples: outputs of shape (B, 1) and targets of shape (B,) are broadcast to "
    "(B, B). Use outputs.squeeze(1)."
)
_STATISTIC = (
    "A statistic of the batch is used (standardisation, normalised advantages, class weights, a maximum, a count, the "
    "batch size): use public constants, private statistics, or a statistic of each sample."
)


_GUARD = (
    "A guard looks at the whole batch (its losses are dropped where one is not finite, its values clipped by their "
    "common norm or maximum): one record switches it for all. Judge each sample by its own numbers."
)


def _mixing(twin: Twin, what: str) -> NotSeparable:
    place, remedy = "", _STATISTIC
    if twin.moved is not None:
        operation, line = twin.moved
        place = f" It was first seen after {operation}{f' ({line})' if line else ''}."
        usual = _PAIRS if twin.paired else _STATISTIC
        remedy = next((text for names, text in _REMEDIES if operation.startswith(names)), usual)
    if twin.change.wild:
        remedy = _GUARD
    return NotSeparable(
        f"samples mix: when {twin.change.what}, {what}. A sample's clipped gradient must depend on that sample "
        f"alone.{place} {remedy}"
    )
