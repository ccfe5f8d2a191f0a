"""Updates that clipwise did not make: steps of an optimizer and gradients from elsewhere, noticed while a run is open.

Changed weights are not looked at: averaging, projecting, tying and loading weights are allowed. What reveals an update
that no epsilon covers is its gradient, or the optimizer's step.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

from torch import Tensor, distributed
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from clipwise.accounting import GaussianSteps, Ledger
from clipwise.errors import InvalidPlan, UnaccountedUpdate
from clipwise.sampling import Sampling

__all__ = ["Guard", "check_one_process"]

_REASON = "an update that clipwise did not make"
_FOREIGN = (
    "{name!r} has a gradient that clipwise did not write, from loss.backward() or other code. If the weights were "
    "updated with it, that was without clipping, noise and a charge, so this run cannot state an epsilon any more. "
    "Begin again, or resume from a checkpoint that was saved before; give the losses to private.step(losses) only. "
    "Gradients for other purposes: take torch.autograd.grad, freeze the parameters meanwhile, or clear them with "
    "optimizer.zero_grad(), not with set_to_none=False, before the next batch."
)


class Guard:
    """Watches the gradients of a run's parameters, and the optimizers that hold them, until it is closed.

    Guarantees: while it is open, no `torch.optim.Optimizer` steps the parameters except inside `stepping` or once
    after `write`; and `look` finds every gradient that clipwise did not write.
    """

    def __init__(self) -> None:
        self._names: Sequence[str] = ()
        self._tensors: Sequence[Tensor] = ()
        self._identities: frozenset[int] = frozenset()
        self._known: dict[int, tuple[Callable[[], Tensor | None], int]] = {}
        self._wrote = False  # what is known; else it was there before
        self._stepping: tuple[weakref.ref[Optimizer], FrameType] | None = None
        self.is_due = False
        """Whether a gradient was released, with which the caller steps the optimizer."""
        self.is_last = False
        """Whether that step is the run's last."""
        self.begun = False
        """Whether the run has had data."""
        self.seen: str | None = None
        """What was found that no epsilon covers."""
        self.is_open = True

    def bind(self, names: Sequence[str], tensors: Sequence[Tensor], frozen: Sequence[Tensor] = ()) -> None:
        """Watch these parameters from here on; gradients that they have already are known.

        No optimizer may step `frozen` ones either: on private records that update would have no noise.
        """
        self._names, self._tensors = names, tensors
        self._identities = frozenset(map(id, (*tensors, *frozen)))
        self._accept(wrote=False)
        if self.is_open:
            _OPEN.add(self)
            _watch_optimizers()

    def close(self) -> None:
        """From here on the parameters are the caller's own."""
        self.is_open = False
        _OPEN.discard(self)

    # Gradients

    def _accept(self, wrote: bool) -> None:
        """What is in `p.grad` now is known."""
        self._wrote = wrote
        self._known = {id(p): (weakref.ref(g), g._version) for p in self._tensors if (g := p.grad) is not None}

    def look(self, ledger: Ledger, sampling: Sampling) -> None:
        """Look for gradients from elsewhere; the first one found is a step without noise on the ledger."""
        if self.seen is not None or not self.is_open:
            return
        name = self.foreign()
        if name is not None:
            self.seen = _FOREIGN.format(name=name)
            ledger.record(GaussianSteps(sampling, noise_multiplier=0.0, reason=_REASON))

    def check(self) -> None:
        """Refuse to continue after an update that no epsilon covers."""
        if self.seen is not None:
            raise UnaccountedUpdate(self.seen)

    def foreign(self) -> str | None:
        """The name of a parameter whose gradient is neither known here nor written by another run."""
        for place, p in enumerate(self._tensors):
            g = p.grad
            if g is None or self._knows(p, g) or any(guard._wrote and guard._knows(p, g) for guard in list(_OPEN)):
                continue
            return self._names[place]
        return None

    def _knows(self, p: Tensor, g: Tensor) -> bool:
        """Whether the gradient is the very one that this run knows, as it was or zeroed since."""
        gradient, version = self._known.get(id(p), _NOTHING)
        return gradient() is g and (version == g._version or not bool(g.any()))

    # Steps

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Steps inside are clipwise's own."""
        before, _OURS.active = getattr(_OURS, "active", False), True
        try:
            yield
        finally:
            _OURS.active = before

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """After an error the gradients are as they were."""
        before = [p.grad for p in self._tensors]
        try:
            yield
        except BaseException:
            for p, old in zip(self._tensors, before, strict=True):
                p.grad = old
            self.expect_none()
            raise

    def write(self, gradients: Sequence[Tensor]) -> None:
        """Put a released gradient in `p.grad`: the caller may step once with it."""
        for p, g in zip(self._tensors, gradients, strict=True):
            p.grad = g.to(p.dtype)
        self._accept(wrote=True)
        self.is_due, self._stepping = True, None

    def expect_none(self) -> None:
        """The step was made, or will not be."""
        self._accept(wrote=True)
        self.is_due, self._stepping = False, None

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has a parameter of the run."""
        return any(not self._identities.isdisjoint(map(id, group["params"])) for group in optimizer.param_groups)

    @property
    def has_gradient(self) -> bool:
        """Whether a parameter of the run has a gradient that is not zero."""
        return any(p.grad is not None and bool(p.grad.any()) for p in self._tensors)

    def begin_step(self, optimizer: Optimizer, call: FrameType) -> None:
        """The caller steps, with the released gradient, in this call. If it fails, it may be made again."""
        self._stepping = weakref.ref(optimizer), call

    def is_stepping(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer is still in the caller's step: some call the step of their base class."""
        return self._stepping is not None and self._stepping[0]() is optimizer and _is_active(self._stepping[1])

    def end_step(self, optimizer: Optimizer) -> None:
        """The caller's step is over; some optimizers write on the gradients."""
        if self.is_stepping(optimizer):
            self.expect_none()
            if self.is_last:
                self.close()


def check_one_process() -> None:
    """Refuse to run on one of several ranks: none of them would know what the others release."""
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise InvalidPlan(
            f"torch.distributed has {distributed.get_world_size()} ranks. Each would train on its own and claim the "
            "whole epsilon. A private run, or a federated server, is one process: training on several ranks "
            "(process_group=) is not supported yet. Use one rank, or destroy the process group first."
        )


_NOTHING = (lambda: None), 0
_OPEN: weakref.WeakSet[Guard] = weakref.WeakSet()
_OURS = threading.local()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Stop a step on parameters of an open run, unless it is clipwise's own or expected."""
    if not _OPEN or getattr(_OURS, "active", False):
        return
    holding = [guard for guard in list(_OPEN) if guard.holds(optimizer)]
    if any(guard.is_stepping(optimizer) for guard in holding):
        return
    due = [guard for guard in holding if guard.is_due]
    if due:
        _check_released(holding, kwargs.get("closure", args[1] if len(args) > 1 else None))
        for guard in due:
            guard.begin_step(optimizer, sys._getframe(1))
    elif any(guard.begun or guard.has_gradient for guard in holding):
        raise UnaccountedUpdate(
            f"{type(optimizer).__name__}.step() was called on parameters of a private run, and stopped before it "
            "changed them: no epsilon covers that update. private.step(losses) steps the optimizer itself, so leave "
            "out optimizer.step() and loss.backward(). To step it yourself, call private.release() and then step once. "
            "Before training that does not belong to this run, clear the gradients and call private.close()."
        )


def _is_active(call: FrameType) -> bool:
    """Whether a call is still running: an error ends a step without a word to its hooks."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is call


def _check_released(holding: Sequence[Guard], closure: object) -> None:
    """Refuse the caller's step with anything but a released gradient."""
    changed = next((name for guard in holding if (name := guard.foreign()) is not None), None)
    if changed is not None:
        what = f"the gradient of {changed!r} is not what private.release() wrote"
    elif closure is not None:
        what = "optimizer.step(closure) would compute a gradient that private.release() did not write"
    else:
        return
    raise UnaccountedUpdate(
        f"{what}. The step was stopped before it was made. Call optimizer.step() with the released gradient as it is, "
        "without loss.backward()."
    )


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not _OPEN or getattr(_OURS, "active", False):
        return
    for guard in list(_OPEN):
        guard.end_step(optimizer)


@cache
def _watch_optimizers() -> None:
    """From the first run of the process on."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
