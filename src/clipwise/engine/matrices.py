"""Products of large matrices, by the faster of the two libraries that torch carries for the CPU.

Torch multiplies float32 matrices by MKL. On a processor of AMD with AVX-512 that takes twice as long as oneDNN, by
which torch convolves there, runs recurrent layers and compiles linear ones. On others the two were not compared, and
MKL is left in place: the choice is made by the kind of processor and by sizes, so that a run that is repeated computes
with the same roundings. `torch.backends.mkldnn.flags(enabled=False)` turns oneDNN off here, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

_PROCESSOR = Path("/proc/cpuinfo")
_WIDE = 256  # columns from which oneDNN was faster, whatever lies how in memory
_LARGE = 1 << 22  # multiplications from which it was
_PART = 1 << 22  # numbers that are held beside a result
_LONG = 1024  # terms of one product: MKL adds no more one after the other, oneDNN would


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, of two matrices."""
    if not _is_faster(left, right):
        return left @ right
    if not _is_turned(left, right):
        return _onednn(left, right)
    found = left.new_empty(left.shape[0], right.shape[1])
    for rows, part in _parts(found, left, right):
        rows.copy_(part)
    return found


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to a matrix in place."""
    if not _is_faster(left, right):
        total.addmm_(left, right)
        return
    for rows, part in _parts(total, left, right):
        rows.add_(part)


def stacked_products(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """left @ right, of matrices or stacks of them; those of a stack in `out`, where it is given."""
    if left.dim() != 3 or not len(left) or not _is_faster(left[0], right[0]):
        return left @ right if out is None else torch.bmm(left, right, out=out)
    if out is None:
        out = left.new_empty(left.shape[0], left.shape[1], right.shape[2])
    for here, one, other in zip(out.unbind(), left.unbind(), right.unbind(), strict=True):
        here.copy_(product(one, other))
    return out


def _parts(total: Tensor, left: Tensor, right: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Some rows of a matrix and those of left @ right, which need not lie in memory by rows."""
    count = max(1, _PART // right.shape[1])
    for rows, some in zip(total.split(count), left.split(count), strict=True):
        turned = _is_turned(some, right)
        yield rows, _onednn(right.t(), some.t()).t() if turned else _onednn(some, right)


def _onednn(left: Tensor, right: Tensor) -> Tensor:
    count = -(-left.shape[1] // _LONG)
    total: Tensor | None = None
    for rows, columns in zip(left.tensor_split(count, 1), right.t().tensor_split(count, 1), strict=True):
        part: Tensor = torch.ops.mkldnn._linear_pointwise(rows, _dense(columns), None, "none", [], "")
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def _dense(matrix: Tensor) -> Tensor:
    """Without gaps in memory: with gaps in its second operand oneDNN takes two thousand times as long."""
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()


def _is_turned(left: Tensor, right: Tensor) -> bool:
    """Whether the transpose is formed, which has more columns, of a left side that is copied anyway."""
    return not _lies_by_rows(left) and left.shape[0] > right.shape[1]


def _lies_by_rows(matrix: Tensor) -> bool:
    return matrix.stride(1) == 1


def _is_faster(left: Tensor, right: Tensor) -> bool:
    """Whether oneDNN is, for two matrices."""
    (rows, terms), columns = left.shape, right.shape[1]
    return (
        rows * terms * columns >= _LARGE
        and (columns if _lies_by_rows(left) else max(rows, columns)) >= _WIDE
        and left.dtype is right.dtype is torch.float32
        and left.is_cpu
        and right.is_cpu
        and not (torch.is_grad_enabled() and (left.requires_grad or right.requires_grad))
        and cast(bool, torch.backends.mkldnn.enabled)
        and _suits()
    )


@cache
def _suits() -> bool:
    """Whether this processor is of those on which it was measured, and torch has the operation."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    try:
        return "AuthenticAMD" in _PROCESSOR.read_text(encoding="utf-8", errors="replace")
    except OSError:  # another system
        return False
