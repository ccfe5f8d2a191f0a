"""Several uses of one tensor: their gradients add before they are squared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clipwise.engine.grams import Doubts, cancelled, doubt_cancelled, is_cancelled, rounded_up
from clipwise.engine.lengths import lengths
from clipwise.engine.uses import Dense, Gathered, Outer, Use, chunks, squares

_FAINT = 1e-30  # of a length: a squared norm that inner products lose digits of before they meet the length


def cross(outer: Outer, gathered: Gathered) -> Tensor:
    """<g_i, h_i> of a matrix used as a linear map (g) and as a table (h): a gather, no matrix is formed."""
    index = gathered.index.clamp(min=0)
    picked = torch.gather(outer.left, 2, index.unsqueeze(1).expand(-1, outer.left.shape[1], -1))  # (B, S, T)
    products = outer.right @ gathered.right.mT  # (B, S, T)
    return torch.where((gathered.index >= 0).unsqueeze(1), picked * products, 0).flatten(1).sum(1)


def merge(uses: Sequence[Use]) -> list[Use]:
    """Uses of one tensor, merged along their positions where they are of one kind."""
    uses = [use.with_positions() if isinstance(use, Outer) else use for use in uses]
    outers = [use for use in uses if isinstance(use, Outer) and use.left.dim() == 3]
    gathered = [use for use in uses if isinstance(use, Gathered)]
    if len({(use.rows, use.right.shape[-1]) for use in gathered}) > 1:  # indexed in different numbers of axes
        gathered = []
    dense = [use for use in uses if isinstance(use, Dense)]
    rest = [use for use in uses if use not in outers and use not in gathered and use not in dense]
    merged: list[Use] = list(rest)
    if outers and len({(use.left.shape[-1], use.right.shape[-1]) for use in outers}) > 1:
        merged.extend(outers)
    elif outers:
        left, right = [use.left for use in outers], [use.right for use in outers]
        merged.append(
            outers[0] if len(outers) == 1 else Outer(torch.cat(left, 1), torch.cat(right, 1), outers[0].shape)
        )
    if gathered:
        index, padded = torch.cat([use.index for use in gathered], 1), any(use.padded for use in gathered)
        values = torch.cat([use.right for use in gathered], 1)
        merged.append(Gathered(index, values, gathered[0].shape, gathered[0].rows, padded=padded))
    if dense:
        merged.append(Dense(sum((use.gradients() for use in dense[1:]), dense[0].gradients()), dense[0].shape))
    return merged


def joint_squared_norms(uses: Sequence[Use], doubts: Doubts | None = None) -> Tensor:
    """||sum of the uses' gradients||^2 per sample: uses of one tensor add before they are squared."""
    merged = merge(uses) if len(uses) > 1 else uses
    if len(uses) == 1 or (len(merged) == 1 and not isinstance(merged[0], Dense)):
        return merged[0].squared_norms(doubts)
    parts = [use for use in uses if isinstance(use, Dense)] + [use for use in merged if not isinstance(use, Dense)]
    terms = sum((use.terms() for use in parts[1:]), parts[0].terms())
    return doubt_cancelled(_added_norms(merged), terms, lambda some: _precise_norms(uses, some), doubts)


def _added_norms(merged: Sequence[Use]) -> Tensor:
    if len(merged) == 2:
        outer = next((use for use in merged if isinstance(use, Outer)), None)
        gathered = next((use for use in merged if isinstance(use, Gathered)), None)
        if outer is not None and gathered is not None and outer.left.shape[-1] == gathered.rows:
            parts = outer.squared_norms() + gathered.squared_norms()
            total = parts + 2 * cross(outer, gathered)
            faint = _FAINT * lengths(outer.left).amax(1) > total  # inner products may be subnormal on the way
            if not bool((cancelled(total, parts) | faint).any()):  # else the two uses cancel: add before squaring
                return total
    return torch.cat([squares(summed(merged, chunk)) for chunk in chunks(merged[0])])


def _precise_norms(uses: Sequence[Use], some_B: Tensor) -> Tensor:
    """The squared norms of some samples, their gradients formed in float64."""
    precise = [use.precise(some_B) for use in uses]
    squared = torch.cat([squares(summed(precise, chunk)) for chunk in chunks(precise[0], 1 << 22)])
    return rounded_up(squared, sum((use.terms() for use in precise[1:]), precise[0].terms()))


def summed(uses: Sequence[Use], samples: slice) -> Tensor:
    """The added gradients of several uses of one tensor, for some samples."""
    return sum((use.gradients(samples) for use in uses[1:]), uses[0].gradients(samples))


def summed_surely(uses: Sequence[Use], samples: slice) -> tuple[Tensor, Tensor | None]:
    """The same, formed in float64 where terms cancel; and of which samples, (B,), None where of none."""
    gradients = summed(uses, samples)
    if len(uses) == 1 and isinstance(uses[0], Dense):
        return gradients, None
    terms = sum((use.terms() for use in uses[1:]), uses[0].terms())
    some = torch.zeros_like(terms, dtype=torch.bool)
    some[samples] = is_cancelled(squares(gradients), terms[samples])
    if not bool(some.any()):
        return gradients, None
    gradients[some[samples]] = summed([use.precise(some) for use in uses], slice(None)).to(gradients.dtype)
    return gradients, some
