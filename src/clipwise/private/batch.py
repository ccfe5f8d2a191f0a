"""The logical batch that is being gathered from physical ones."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from clipwise.clipping import Style
from clipwise.engine import Clipped, Total, check_vector
from clipwise.errors import InvalidLosses, InvalidSampling
from clipwise.mechanisms import AdaptiveClip
from clipwise.private.fit import Fit
from clipwise.private.parts import PhysicalBatch
from clipwise.sampling import Sampling

__all__ = ["Batch"]


class Batch:
    """The clipped sum so far, its style, the statistics of every part, and which part comes next.

    `own`: the caller draws the batches and ends the logical one; else the loader does.

    Guarantees: no batch of the loader is added twice, skipped or mixed with another step's.
    """

    def __init__(self, sampling: Sampling, own: bool) -> None:
        self.own = own
        self.offered: PhysicalBatch | None = None
        """What the loader handed out and no losses were given of."""
        self.last: tuple[int, list[Clipped[Any]]] | None = None
        """The last logical batch that was taken: its step, and the parts without their gradients."""
        self._sampling = sampling
        self.forget()

    def forget(self) -> None:
        """Drop what was gathered."""
        self.unconfirmed = True  # until all of it is gone
        self.style: Style | None = None
        self.total: Total | None = None
        self.parts: list[Clipped[Any]] = []  # without their gradients
        self._given: list[weakref.ref[Tensor]] = []
        self._ended = False
        self.unconfirmed = False
        """Whether something was noted, and the caller may not know: an interrupt may still come, and a retry."""

    @property
    def sums(self) -> list[Tensor] | None:
        """The clipped sum so far; None where nothing was added."""
        return None if self.total is None else self.total.tensors

    @property
    def is_complete(self) -> bool:
        """Whether the logical batch may be released."""
        return self.own or self._ended

    def check(self, losses: Tensor, step: int) -> None:
        """Refuse losses that are not those of the batch that comes next in this step. Nothing is changed."""
        self.check_whole()
        check_vector(losses)
        if self.own:
            self._check_size(losses.shape[0])
        else:
            self._check_offered(losses.shape[0], step)
        if any(given() is losses for given in self._given):
            raise InvalidLosses(
                "these very losses were given already in this logical batch: a sample that counts twice has twice the "
                "sensitivity. Give each batch once."
            )

    def _check_size(self, size: int) -> None:
        """Refuse more samples than the declared sampling can give."""
        gathered = size + sum(part.norms.numel() for part in self.parts)
        most = self._sampling.largest_batch
        if most is not None and gathered > most:
            raise InvalidSampling(
                f"a logical batch of {gathered} samples is more than {self._sampling!r} can give: the plan must tell "
                "the truth about your loader."
            )

    def _check_offered(self, size: int, step: int) -> None:
        """Refuse losses of any but the very batch that the loader has handed out."""
        part = self.offered
        if part is None:
            raise InvalidSampling(
                "these losses do not belong to a new batch of the loader: each batch is given once, since a sample "
                "that counts twice has twice the sensitivity."
            )
        if (part.step, part.part) != (step, len(self.parts)):
            raise InvalidSampling(
                "batches of the loader were skipped, so this is not the sampling that is accounted for. Give every "
                "batch to step, or start iterating again."
            )
        if size != part.size:
            raise InvalidLosses(
                f"the batch has {part.size} samples but there are {size} losses. Give one loss per sample: sum or "
                "average the terms of a sample first."
            )

    def check_whole(self) -> None:
        """Refuse to continue with a sum that holds a part of a physical batch, or one that would be given again.

        It is dropped.
        """
        if self.unconfirmed or (self.total is not None and self.total.torn):
            self.forget()
            raise InvalidLosses(
                "an error interrupted the addition of a physical batch, so what was gathered of this logical batch is "
                "of no use and was dropped. Nothing of it was released or charged. Start iterating over the loader "
                "again; batches of your own are to be given again from the first of the logical batch on."
            )

    def check_given(self) -> None:
        """Refuse to end the logical batch while a part of it is missing."""
        self.check_whole()
        if self.offered is not None:
            raise InvalidSampling("the batch from the loader was not given to backward(losses) or step(losses).")

    def add(self, losses: Tensor, clipped: Clipped[Any], fit: Fit) -> None:
        """Note what a physical batch gave, which was added to `total` already where there was one.

        The caller ends it: `unconfirmed = False` is the last that it does, or `take`.
        """
        if self.total is None:
            gradients = [clipped.gradients[name] for name in fit.names]
            total = Total([g.to(dtype) for g, dtype in zip(gradients, fit.wide, strict=True)])
        else:
            total = self.total
        self.unconfirmed = True
        self.total = total
        self._given.append(weakref.ref(losses))
        self.parts.append(clipped.without_gradients())
        self.style = clipped.style
        if self.offered is not None:
            self._ended, self.offered = self.offered.last, None
        total.end()

    @property
    def within(self) -> float:
        """The centred count of all parts, for an adaptive norm: samples within it less samples beyond it, halved."""
        return sum(AdaptiveClip.centred(part.norms, part.bad, part.style.sensitivity(1)) for part in self.parts)

    def take(self, step: int, fit: Fit) -> list[Tensor]:
        """The sum, to be released as that of `step`; the next batch begins empty."""
        if self.total is not None and self.total.torn:
            self.check_whole()
        sums = fit.zeros() if self.sums is None else self.sums
        self.last = step, self.parts
        self.forget()
        return sums
