"""The engine's own result against plain autograd's, on the first step of a plan and now and then after it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clipwise.engine.cost import reduced_precision
from clipwise.engine.graph import dense, differentiate
from clipwise.engine.norms import negligible_norm
from clipwise.engine.parameters import Parameters
from clipwise.engine.run import Backward
from clipwise.errors import CheckFailed

_PIECE = 1 << 20  # values that are compared at once
_DRAWS, _POWERS = 3, 4  # of weights that are powers of two, and how many powers


def verify_against_autograd(losses: Tensor, backward: Backward, parameters: Parameters) -> bool:
    """Compare a random combination of all samples with autograd, and norms with gradients. False: not possible now.

    With random weights, equality of sum_i w_i g_i can only hold if every per-sample gradient is right. The weights
    bring all gradients to one length, so that an error in a small one shows as well as in a large one. What
    disagrees is compared again: gradients that are rounding themselves are others with every weight but powers of two.
    """
    squared = backward.squared_norms()
    norms = sum(squared.values(), losses.new_zeros(losses.shape, dtype=torch.float64)).sqrt()
    if not bool(torch.isfinite(norms + losses).all()):
        return False
    seen = norms > negligible_norm(losses.dtype)
    generator = torch.Generator().manual_seed(losses.shape[0])
    signs = torch.randn(losses.shape[0], generator=generator, device="cpu").to(losses.device)
    half = reduced_precision(backward.graph, backward.plan)
    weights = _exact_weights(signs, norms, seen) if half else torch.where(seen, signs / torch.where(seen, norms, 1), 0)
    float16 = backward.graph.computes_in(torch.float16)
    if float16:
        weights = torch.where(seen, signs.sign(), 0)  # any scale would change what underflows
    tolerance = 2e-2 if half else 2e-3
    different = _different(losses, backward, parameters, weights, norms, tolerance)
    if different is not None and not float16:
        again = [_drawn_again(generator, norms, seen, alone=half) for _ in range(_DRAWS)]
        if not any(_different(losses, backward, parameters, each, norms, tolerance) for each in again):
            different = None
    if different is not None:
        place, share = different
        raise CheckFailed(
            f"the per-sample gradients of parameter {parameters.describe(place)} disagree with autograd (by "
            f"{share:.3g} of their length). Nothing was released. {_cause(parameters.tensors[place], half, float16)}"
        )
    largest = int(norms.argmax())
    gradients = backward.gradients(slice(largest, largest + 1))
    for place, gradient in gradients.items():
        want, got = distance(gradient, None), float(squared[place][largest].sqrt())
        if seen[largest] and abs(want - got) > tolerance * float(norms[largest]):
            raise CheckFailed(
                f"the per-sample norm of parameter {parameters.describe(place)} is {got:.6g}, its gradient's is "
                f"{want:.6g}. Nothing was released. Please report the model."
            )
    return True


def _different(
    losses: Tensor, backward: Backward, parameters: Parameters, weights: Tensor, norms: Tensor, tolerance: float
) -> tuple[int, float] | None:
    """The first parameter whose weighted sum is not autograd's, and by how much of the length of all together."""
    weights = weights.to(losses.dtype)
    ours = backward.weighted(lambda _: weights)
    theirs = list(differentiate(losses, parameters.tensors, weights, keep=True))
    scale = float((weights * norms).norm())
    for place in range(len(theirs)):
        expected, theirs[place] = theirs[place], None  # let go of each as soon as it was compared
        difference = distance(ours.pop(place, None), expected)
        if difference > tolerance * scale:
            return place, difference / scale if scale else math.inf
    return None


def _exact_weights(signs: Tensor, norms: Tensor, seen: Tensor) -> Tensor:
    """Powers of two: a sample's gradient is then rounded as it is without a weight, and only autograd's sum is off."""
    return torch.where(seen, signs.sign() * torch.exp2(-torch.where(seen, norms, 1).log2().round()), 0)


def _drawn_again(generator: torch.Generator, norms: Tensor, seen: Tensor, *, alone: bool) -> Tensor:
    """Such weights with other signs and powers, so that few samples have the same; or for one sample `alone`.

    In half precision autograd adds the rows of a batch up in half precision, which may be off by a tenth.
    """
    drawn = torch.randint(-_POWERS, _POWERS, (2, len(norms)), generator=generator, device="cpu").to(norms.device)
    weights = _exact_weights(drawn[0] + 0.5, norms, seen) * torch.exp2(drawn[1])
    if alone:
        places = seen.nonzero().flatten()
        chosen = places[int(torch.randint(len(places), (), generator=generator, device="cpu"))] if len(places) else 0
        weights = torch.where(torch.arange(len(norms), device=norms.device) == chosen, weights, 0)
    return weights


def _cause(parameter: Tensor, half: bool, float16: bool) -> str:
    if getattr(parameter, "_backward_hooks", None):
        return "The parameter has a hook (register_hook), which may change its gradient: remove it."
    if float16:
        return "The graph computes in float16, where small gradients are lost: use bfloat16."
    if half:
        return (
            "In half precision autograd's own sums over long sequences may be what is off: compute normalizations in "
            "float32 (`with torch.autocast(..., enabled=False)`), or report the model."
        )
    return "Please report the model."


def distance(a: Tensor | None, b: Tensor | None) -> float:
    """The length of a - b, None being zero, in float64 and in pieces: no copy of a large embedding in double.

    Not finite where a or b is not, also where both hold the same. Equal numbers, the usual case, are seen in one pass.
    """
    if a is not None and b is not None and _are_same(a, b):
        return 0.0
    terms = [dense(term).reshape(-1).split(_PIECE) for term in (a, b) if term is not None]
    pieces = (pair[0].double() - (pair[1] if len(pair) == 2 else 0.0) for pair in zip(*terms, strict=True))
    return math.sqrt(sum(float(piece.square_().sum()) for piece in pieces))


def _are_same(a: Tensor, b: Tensor) -> bool:
    """Whether two dense tensors hold the same finite numbers; False where the sum of such overflows."""
    plain = not (a.is_sparse or b.is_sparse) and a.dtype == b.dtype
    return plain and torch.equal(a, b) and math.isfinite(float(a.sum().abs()))
