"""Gradient norms estimated by forward-mode differentiation: no backward pass, no per-sample gradient.

For u ~ N(0, I) the directional derivative of a loss along u is g . u ~ N(0, ||g||^2), and one forward pass with dual
numbers gives it for every sample of a batch. The estimate is the root mean square over r directions: ||g|| sqrt(X),
X ~ chi2_r / r.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from clipwise.engine import Substitute, check_vector
from clipwise.entropy import Entropy
from clipwise.errors import InvalidLosses, UnsupportedNode
from clipwise.noise import GaussianNoise, Normals, SecureNormals
from clipwise.private.evidence.closure import LossFn

__all__ = ["Projections", "Replay"]

_ROUNDING = {torch.float64: 1e-9}
_LEAST = 1e-30


class Replay:
    """Lets a function of a model run again with the same buffers and the same random numbers.

    The norm must be that of the very gradient that is summed: with the same dropout mask, and from the same buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        self._devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
        self._state = torch.get_rng_state(), [torch.cuda.get_rng_state(d) for d in self._devices]

    def rewind(self) -> None:
        """Go back to where it was made."""
        torch.set_rng_state(self._state[0])
        for device, state in zip(self._devices, self._state[1], strict=True):
            torch.cuda.set_rng_state(state, device)
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)


class Projections:
    """Directional derivatives of per-sample losses along random directions in the space of all parameters."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, params: Mapping[str, Tensor], source: Normals | None = None
    ) -> None:
        _load_forward_mode()
        self._params = dict(params)
        self._losses = Substitute(model, loss_fn)
        # A secure source repeats nothing, and directions must be repeated; they could be published anyway.
        source = None if isinstance(source, SecureNormals) else source
        self._normals = GaussianNoise(list(self._params.values()), Entropy(), source)

    def norms(self, batch: Any, count: int, entropy: Entropy, replay: Replay) -> tuple[Tensor, Tensor, Tensor]:
        """(norms, losses, slopes), all of shape (B,): estimates from the first `count` directions of a seeded entropy.

        The slopes are those along the first direction, for `demand_slope`.
        """
        total: Tensor | None = None
        losses: Tensor | None = None
        first: Tensor | None = None
        for number in range(count):
            replay.rewind()
            again, slopes = self._slopes(batch, self._direction(entropy, number))
            if losses is None or total is None:
                losses, total, first = again, slopes.square(), slopes
            else:
                demand_same(again, losses)
                total += slopes.square()
        assert losses is not None and total is not None and first is not None
        return (total / count).sqrt(), losses, first

    def demand_slope(self, sums: Sequence[Tensor], contributions: Tensor, lengths: Tensor, entropy: Entropy) -> None:
        """Refuse a clipped sum whose slope along the first direction is not the sum of its samples' `contributions`.

        Backward and forward mode then differentiate other things: hooks change gradients on their way back, and
        forward mode goes through `torch.no_grad()`. A norm that is measured would not be that of the gradient used.
        """
        direction = self._direction(entropy, 0).values()
        found = sum(float(torch.dot(u.flatten(), s.flatten())) for u, s in zip(direction, sums, strict=True))
        # Rounding of half precision (autocast): of every sample by itself, and of the direction for all of them.
        allowed = 0.02 * float(torch.linalg.vector_norm(lengths)) + 0.005 * float(lengths.sum())
        if abs(found - float(contributions.sum())) <= allowed + _LEAST:
            return
        raise InvalidLosses(
            "the backward pass gives another gradient than the one whose norm was estimated by forward-mode "
            "differentiation. Change nothing between private.losses and step: neither the losses nor weights. "
            "Leave out hooks that change gradients, and write x.detach() for what must not be differentiated: "
            "torch.no_grad() does not stop forward mode. Or use exact norms."
        )

    def _direction(self, entropy: Entropy, number: int) -> dict[str, Tensor]:
        normals = self._normals.directions([p.detach() for p in self._params.values()], entropy, number)
        return dict(zip(self._params, normals, strict=True))

    def _slopes(self, batch: Any, direction: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Losses and their directional derivatives (float64: their squares must not run out of exponents)."""
        with torch.no_grad(), forward_ad.dual_level(), _forward_mode():
            duals = {name: forward_ad.make_dual(p.detach(), direction[name]) for name, p in self._params.items()}
            losses, slopes = forward_ad.unpack_dual(self._losses.with_weights(duals, batch))
            check_vector(losses)
            if slopes is None:
                raise InvalidLosses("the losses do not depend on the model's parameters: loss_fn(model, batch) must.")
            return losses.detach().clone(), slopes.detach().double()


def demand_same(again: Tensor, losses: Tensor) -> None:
    """Refuse losses that come out differently: then the norms are not those of the gradient that is summed."""
    rounding = _ROUNDING.get(losses.dtype, 1e-3) * losses.abs() + 1e-6
    if again.shape == losses.shape and bool(((again - losses).abs() <= rounding)[torch.isfinite(losses)].all()):
        return
    raise InvalidLosses(
        "loss_fn gave other losses when it was called again on the same batch, so a norm that is measured is not that "
        "of the gradient which is used. It may draw random numbers only from torch's global generator, and may keep "
        "state only in buffers; attention with dropout needs an implementation that draws in one way (eager)."
    )


@lru_cache(maxsize=1)
def _load_forward_mode() -> None:
    """Torch loads its forward-mode rules on first use, with a warning about itself; its kind depends on Python's."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        warnings.filterwarnings("ignore", "`torch.jit", FutureWarning)
        forward_ad.make_dual(torch.zeros(1, device="cpu"), torch.zeros(1, device="cpu"))


@contextmanager
def _forward_mode() -> Iterator[None]:
    """Attention in plain operations, since the fused kernels have no forward mode; what else has none is explained."""
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    except NotImplementedError as error:
        raise UnsupportedNode(
            f"norms cannot be estimated for this model, as an operation has no forward-mode derivative: "
            f"{str(error).splitlines()[0]} Use exact norms."
        ) from error
    except RuntimeError as error:
        if "jvp" not in str(error) and "forward" not in str(error):
            raise
        raise UnsupportedNode(
            f"norms cannot be estimated for this model: {str(error).splitlines()[0]} Use exact norms."
        ) from error


def sums_by_backward(losses: Tensor, params: Sequence[Tensor], factors: Tensor) -> list[Tensor]:
    """The sum over samples of factor_i g_i, by one ordinary backward pass."""
    if not losses.requires_grad:  # no sample, or none that is finite
        return [torch.zeros_like(p, requires_grad=False) for p in params]
    found = torch.autograd.grad(losses, list(params), factors.to(losses.dtype), allow_unused=True)
    return [torch.zeros_like(p, requires_grad=False) if g is None else g for g, p in zip(found, params, strict=True)]
