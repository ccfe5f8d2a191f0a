"""The place of a sample in its batch says how many others were drawn before it: losses must not depend on it.

Where batches are drawn by Poisson sampling, one record more or less moves all that follow to another place. A constant
with a row for every sample is harmless when it was drawn at random, or when its rows are the same. A table of weights
or positions along the batch (`x + encoding[: len(x)]`, with samples and time mixed up) is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clipwise.errors import NotSeparable
from clipwise.private.evidence.records import same
from clipwise.private.evidence.traffic import tensors_in
from clipwise.private.evidence.twin import Twin

_ROW_BY_ROW = {
    "baddbmm", "binary_cross_entropy", "binary_cross_entropy_with_logits", "bmm", "cat", "copy_", "gather",
    "huber_loss", "mse_loss", "nll_loss_forward", "smooth_l1_loss", "stack",
}  # fmt: skip
_FACTORS = {"addmm": 1, "addmv": 1, "baddbmm": 1, "bmm": 0, "mm": 0, "mv": 0}  # where they are among the arguments
_SUMS = {"addmm", "addmv", "mm", "mv"}
CLASS_WEIGHTS = {"nll_loss2d_forward": 2, "nll_loss_forward": 2}  # the same
_COMPARING = {"eq", "ge", "gt", "le", "lt", "ne"}


def is_row_by_row(func: Any, name: str) -> bool:
    """Whether rows of operands meet one by one in a kernel, as they do in a product with a diagonal matrix."""
    return torch.Tag.pointwise in func.tags or name in _ROW_BY_ROW or name in _SUMS


def operands_of(name: str, args: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The operands of such a kernel, and those among them that are read: what is overwritten does not matter."""
    found = list(tensors_in(args))
    if name == "nll_loss_forward":  # the classes, beside one row of scores each
        scores, classes = found[:2]
        found = [scores, classes[:, None]] if scores.dim() == 2 else []
    elif name in ("cat", "stack") and (len(args) < 2 or args[1] in (0, -found[0].dim() - (name == "stack"))):
        found = []  # one below the other
    elif name in _SUMS:
        found = _of_a_sum(*args[_FACTORS[name] :][:2])
    elif name in _FACTORS and any(tensor.shape[0] in tensor.shape[1:] for tensor in factors_of(name, args)):
        found = []  # the samples may be along another axis: as many experts, steps of time
    elif name == "copy_":
        return _of_a_copy(*found[:2])
    return found, found


def _of_a_sum(left: Tensor, right: Tensor) -> list[Tensor]:
    """The operands of a sum over rows, whose terms are no sums where one of them is diagonal.

    Twins see any other sum over samples. A diagonal of equal numbers tells no places apart. Where there may be as many
    features as samples, a feature that is dead for the others would look like a sample that stays.
    """
    rows, columns = right if right.dim() == 2 else right[:, None], left.t()
    for table, others in ((columns, rows), (rows, columns)):
        either = others.shape[1] % max(others.shape[0], 1) == 0
        if table.layout is torch.strided and table.shape[0] == table.shape[1] and not either:
            diagonal = table.detach().diagonal()
            if not same(diagonal[1:], diagonal[:-1]) and int((table != 0).sum()) == int((diagonal != 0).sum()):
                return [table, others]
    return []


def _of_a_copy(into: Tensor, tensor: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The operands of a copy: also all columns of the rows that are written, of which a few may be new."""
    plain = into.layout is torch.strided and not into.is_nested and not into.is_quantized
    if not plain or not into.dim() or into.dim() != tensor.dim() or into.stride(0) < 1:
        return [into, tensor], [tensor]
    rows, width, begin = into.shape[0], into.stride(0), into.storage_offset() // into.stride(0) * into.stride(0)
    if (begin + rows * width) * into.element_size() > into.untyped_storage().nbytes():
        return [into, tensor], [tensor]
    if into.dim() == 1:
        into, tensor = into[:, None], tensor[:, None]
    axes = (1,) * (into.dim() - 2)
    whole = into.as_strided((rows, *axes, width), (width, *axes, 1), begin)
    return [into, whole, tensor], [tensor]


def factors_of(name: str, args: Any) -> list[Tensor]:
    """The operands of a product, and the weights of classes: they scale what they meet, whatever their shape."""
    if name in CLASS_WEIGHTS:
        return list(tensors_in(args[CLASS_WEIGHTS[name]]))
    return list(tensors_in(args[_FACTORS[name] :][:2])) if name in _FACTORS else []


def are_row_numbers(name: str, operands: Sequence[Tensor]) -> bool:
    """Whether a kernel computes numbers of rows, as indices are: whole numbers from whole numbers."""
    whole = not any(
        tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool for tensor in operands
    )
    return whole and name not in _COMPARING


def meets_places(ours: Sequence[Tensor], fixed: Sequence[Tensor], twins: Sequence[Twin], size: int) -> bool:
    """Whether values with a row per sample meet a constant whose rows differ from sample to sample."""
    axes = max((tensor.dim() for tensor in (*ours, *fixed)), default=0)

    def has_rows(tensor: Tensor) -> bool:
        plain = tensor.layout is torch.strided and not tensor.is_nested
        return plain and tensor.dim() == axes > 0 and tensor.shape[0] == size

    if not any(has_rows(t) and not same(t.detach()[1:], t.detach()[:-1]) for t in fixed):
        return False
    return any(has_rows(t) and _rows_are_samples(t.detach(), twin) for t in ours for twin in twins if not twin.broken)


def _rows_are_samples(tensor: Tensor, twin: Twin) -> bool:
    """Other records move rows of their own and of nobody else: the first axis is the samples'."""
    other = twin.of(tensor)
    if other.shape != tensor.shape or twin.change.losses_only:
        return False
    kept = torch.zeros(tensor.shape[0], dtype=torch.bool, device=tensor.device)
    kept[twin.change.kept.to(tensor.device)] = True
    return same(tensor[kept], other[kept]) and not same(tensor[~kept], other[~kept])


def refuse_places(marks: Sequence[int], place: int, where: str) -> None:
    """Refuse losses that depend on the place of a sample in its batch."""
    line = f" ({where})" if where else ""
    if any(found & place for found in marks):
        raise NotSeparable(
            f"the losses depend on the place of a sample in its batch{line}: a constant with other values for every "
            "row meets the samples. The place says how many others were drawn before, so with one record more or less "
            "every gradient after it changes. Typical causes: positions added along the axis of samples instead of "
            "time, weights by position in the batch. Use constants that are the same for all samples, or random ones."
        )
