"""One user's update: its norm, its clipping, and what the server lets through. Functions of one user alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from clipwise._validate import is_finite
from clipwise.clipping import Abadi, Rule, Style
from clipwise.errors import DataError

__all__ = ["Reply", "admit", "clip_update", "norms", "shorten"]

Update = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Reply:
    """What a user sends back: the clipped update, how many examples it rests on, and, if asked, whether it was short.

    `within` answers an adaptive norm: was the update, before clipping, no longer than the norm of the round?
    """

    update: Update
    weight: float
    within: bool | None = None


def norms(update: Update, style: Style) -> dict[str, float]:
    """The norm of the update in each clipping group; inf or NaN when it is not finite.

    >>> from clipwise import Abadi, Flat
    >>> norms({"weight": torch.tensor([3.0]), "bias": torch.tensor([4.0])}, Flat(Abadi(1.0)))
    {'': 5.0}
    """
    return {group: _norm([update[n] for n in names]) for group, names in style.groups(update).items()}


def _norm(tensors: list[Tensor]) -> float:
    """In float64 and scaled by the largest entry, so that no square leaves the range of numbers."""
    tensors = [t for t in tensors if t.numel()]
    if not tensors:
        return 0.0
    largest = float(torch.stack([t.abs().max().double() for t in tensors]).max())
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * math.sqrt(math.fsum(float((t.double() / largest).square().sum()) for t in tensors))


def clip_update(update: Update, style: Style) -> dict[str, Tensor]:
    """ClipFn: factor * update, with the style's factors. An update that is not finite becomes zero.

    Guarantees: the norm of the result is at most the style's sensitivity, up to rounding.

    >>> from clipwise import Abadi, Flat, GlobalScaled
    >>> clip_update({"weight": torch.tensor([3.0, 4.0])}, Flat(Abadi(1.0)))
    {'weight': tensor([0.6000, 0.8000])}
    >>> clip_update({"weight": torch.tensor([3.0, 4.0])}, Flat(GlobalScaled(R=1.0, Z=10.0)))
    {'weight': tensor([0.3000, 0.4000])}
    """
    return _scaled(update, style, style.rule_of)


def shorten(update: Update, style: Style) -> dict[str, Tensor]:
    """The server's clipping: bring what is longer than the style's sensitivity to that length, leave the rest.

    It is not `clip_update` a second time: GlobalClip would scale an honest update by R/Z twice.

    Guarantees: the norm of the result is at most the style's sensitivity, up to rounding, whatever was sent.

    >>> from clipwise import Flat, GlobalScaled
    >>> shorten({"weight": torch.tensor([3.0, 4.0])}, Flat(GlobalScaled(R=1.0, Z=10.0)))
    {'weight': tensor([0.6000, 0.8000])}
    """

    def ball(group: str) -> Rule:
        rule = style.rule_of(group)
        return Abadi(rule.sensitivity) if math.isfinite(rule.sensitivity) else rule

    return _scaled(update, style, ball)


def _scaled(update: Update, style: Style, rule_of: Callable[[str], Rule]) -> dict[str, Tensor]:
    found = norms(update, style)
    if not all(math.isfinite(norm) for norm in found.values()):
        return {name: torch.zeros_like(t) for name, t in update.items()}
    result: dict[str, Tensor] = {}
    for group, names in style.groups(update).items():
        factor = float(rule_of(group)(torch.tensor([found[group]], dtype=torch.float64, device="cpu")))
        for name in names:
            # In float64: a factor for a huge update has too few digits left in float32.
            result[name] = (update[name].double() * factor).to(update[name].dtype)
    return {name: result[name] for name in update}


def admit(reply: object, like: Mapping[str, Tensor], weight_cap: float) -> tuple[dict[str, Tensor], float]:
    """The update and the capped weight of a reply, or a `DataError` that says why it cannot be used.

    >>> admit(Reply({"w": torch.ones(2)}, weight=50), {"w": torch.zeros(2)}, weight_cap=10.0)
    ({'w': tensor([1., 1.])}, 10.0)
    """
    if not isinstance(reply, Reply) or not isinstance(reply.update, Mapping):
        raise DataError(f"expected a Reply with an update for every parameter, got {type(reply).__name__}")
    if set(reply.update) != set(like):
        missing, unknown = sorted(set(like) - set(reply.update)), sorted(map(str, set(reply.update) - set(like)))
        raise DataError(f"the update has other parameters than the model: missing {missing[:3]}, unknown {unknown[:3]}")
    weight = reply.weight
    if not is_finite(weight) or weight < 0:
        raise DataError(f"the weight must be a finite number >= 0, got {str(weight)[:40]}")
    if reply.within is not None and not isinstance(reply.within, bool):
        raise DataError(f"within must be True, False or None, got {type(reply.within).__name__}")
    update = {name: _fitting(name, reply.update[name], expected) for name, expected in like.items()}
    return update, float(min(weight, weight_cap))


def _fitting(name: str, got: object, expected: Tensor) -> Tensor:
    if not isinstance(got, Tensor) or not got.is_floating_point() or got.layout != torch.strided:
        kind = got.dtype if isinstance(got, Tensor) else type(got).__name__
        raise DataError(f"the update of {name} must be a dense tensor of real numbers, got {kind}")
    if got.shape != expected.shape:
        raise DataError(f"the update of {name} has shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    moved = got.detach().to(expected)
    if not bool(torch.isfinite(moved).all()):
        raise DataError(f"the update of {name} is not finite")
    return moved
