"""Watching the theory in training: every k steps, on a fixed probe set, what clipping does to the tangent kernel."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from clipwise.clipping import Clip, Flat, Groupwise, Layerwise, Rule, as_clip
from clipwise.errors import DataError
from clipwise.files import replacing
from clipwise.ntk.analysis import analyse
from clipwise.ntk.dynamics import descent
from clipwise.ntk.network import Inputs, LossFunction, sample_count

__all__ = ["NOT_COVERED", "NTKMonitor", "NTKRecord"]

NOT_COVERED = "computed from private data without noise: not covered by epsilon"
_COVERED = "computed from public data and the released weights: covers no more than epsilon says"


@dataclass(frozen=True)
class NTKRecord:
    """One measurement on the probe set; where the loss is not finite, nothing is positive and numbers are NaN."""

    step: int
    loss: float
    loss_rate: float
    """dL/dt of the clipped flow at this point."""
    unclipped_rate: float
    """dL/dt of the flow without clipping."""
    alignment: float
    """The cosine of the angle between clipped and true gradient."""
    fraction_clipped: float
    symmetric: bool
    positive_quadratic: bool
    positive_eigenvalues: bool
    min_quadratic: float
    """The smallest eigenvalue of the symmetric part of H C (or of the sum of H_r C_r)."""
    min_eigenvalue: float
    seconds: float
    """What the measurement took."""


class NTKMonitor:
    """Measures every `every` steps how clipping bends training, on a probe set that stays the same.

    Call `update()` after every step of the optimizer, in any loop. `clip` is a rule, a style, or a schedule; a schedule
    needs `steps`, the length of training. `public=True` says that the probe set is public. It is not by default:
    numbers computed from private data, held out or not, are marked wherever they go as not covered by epsilon.

    >>> import clipwise as cw, torch
    >>> from torch.utils.data import TensorDataset
    >>> _ = torch.manual_seed(0)
    >>> model, data = nn.Linear(3, 1), TensorDataset(torch.randn(64, 3), torch.randn(64))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> plan = cw.Plan(sampling=cw.Poisson(64, 16), steps=6, clip=cw.Abadi(0.5), noise_multiplier=1.0)
    >>> private = cw.Private(plan, model, optimizer, seed=0)
    >>> loss_fn = lambda outputs, y: (outputs.squeeze(1) - y).square()
    >>> monitor = NTKMonitor(model, loss_fn, torch.randn(5, 3), torch.randn(5), plan.clip, every=3, public=True)
    >>> for x, y in private.loader(data):
    ...     if private.step(loss_fn(model(x), y)):
    ...         measured = monitor.update()
    >>> [record.step for record in monitor.records], monitor.covered_by_epsilon
    ([0, 3, 6], True)
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        x: Inputs,
        y: Any,
        clip: Rule | Clip,
        *,
        every: int = 100,
        steps: int | None = None,
        public: bool = False,
        on_record: Callable[[NTKRecord], object] | None = None,
    ) -> None:
        if every < 1:
            raise DataError(f"every must be a positive number of steps, got {every!r}.")
        sample_count(x)
        if steps is None and not isinstance(as_clip(clip), (Flat, Layerwise, Groupwise)):
            raise DataError(f"{clip!r} changes during training: pass steps=, the number of steps it is made for.")
        self._model, self._loss_fn, self._x, self._y = model, loss_fn, x, y
        self._clip, self._every, self._steps = as_clip(clip), every, steps
        self._public, self._on_record = public, on_record
        self._step = 0
        self._records: list[NTKRecord] = []
        self._measure()

    @property
    def records(self) -> tuple[NTKRecord, ...]:
        """All measurements, the first before training."""
        return tuple(self._records)

    @property
    def covered_by_epsilon(self) -> bool:
        """Whether publishing the records reveals no more than the trained weights: only if the probe set is public."""
        return self._public

    @property
    def note(self) -> str:
        """What epsilon says about these numbers, in words."""
        return _COVERED if self._public else NOT_COVERED

    @property
    def seconds(self) -> float:
        """The time that all measurements took."""
        return sum(record.seconds for record in self._records)

    def update(self) -> NTKRecord | None:
        """Count a step of the optimizer; every k of them measure and return the record."""
        self._step += 1
        return self._measure() if self._step % self._every == 0 else None

    def _measure(self) -> NTKRecord:
        start = time.perf_counter()
        steps = self._step + 1 if self._steps is None else self._steps  # a style is the same at any step
        style = self._clip.at(min(self._step, steps - 1), steps)
        at = descent(self._model, self._loss_fn, self._x, self._y, style)
        # Training that has diverged is recorded, not stopped: it has no matrix to look at.
        diverged = not math.isfinite(at.loss)
        found = None if diverged else analyse(self._model, self._loss_fn, self._x, self._y, style)
        record = NTKRecord(
            step=self._step,
            loss=at.loss,
            loss_rate=at.loss_rate,
            unclipped_rate=at.unclipped_rate,
            alignment=at.alignment,
            fraction_clipped=at.fraction_clipped,
            symmetric=found is not None and found.symmetric,
            positive_quadratic=found is not None and found.positive_quadratic,
            positive_eigenvalues=found is not None and found.positive_eigenvalues,
            min_quadratic=math.nan if found is None else found.min_quadratic,
            min_eigenvalue=math.nan if found is None else found.min_eigenvalue,
            seconds=time.perf_counter() - start,
        )
        self._records.append(record)
        if self._on_record is not None:
            self._on_record(record)
        return record

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, with the note on privacy."""
        return {
            "covered_by_epsilon": self.covered_by_epsilon,
            "note": self.note,
            "every": self._every,
            "records": [_plain(record) for record in self._records],
        }

    def save(self, path: str | Path) -> None:
        """Write `to_dict()` as JSON, which its owner alone can read."""
        with replacing(path, DataError) as file:
            file.write((json.dumps(self.to_dict(), indent=1) + "\n").encode())


def _plain(record: NTKRecord) -> dict[str, Any]:
    """The record as JSON can hold it: None for what is not a number."""
    values = asdict(record)
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()}
