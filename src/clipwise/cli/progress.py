"""How far a long run is: a bar with speed, time left and spent epsilon on a terminal, a few lines elsewhere."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from clipwise.training import Progress

__all__ = ["Bar", "duration", "measured", "redraw"]

WIDTH = 20
REFRESH = 0.2
LINES = 4
"""How often progress is reported when nobody watches."""

_GLANCE = ("accuracy", "ece", "rmse")


class Bar:
    """Shows the progress of a run on standard error (or `stream`); `close` leaves the line of a terminal clean."""

    def __init__(self, name: str, stream: TextIO | None = None) -> None:
        self._name, self._stream = name, sys.stderr if stream is None else stream
        self._begun: float | None = None
        self._next = 0.0
        self._test = ""
        self._told = 0

    def __call__(self, progress: Progress) -> None:
        """Show where the run stands, if it is time to."""
        now = time.monotonic()
        if self._begun is None:
            self._begun = now
        if progress.test is not None:
            self._test = measured(progress.test)
        if not self._stream.isatty():
            self._tell(progress, now)
        elif now >= self._next or progress.step == progress.steps:
            self._draw(progress, now)
            # Epsilon takes a few milliseconds; it must not slow a fast run down.
            self._next = time.monotonic() + max(REFRESH, 20 * (time.monotonic() - now))

    def _tell(self, progress: Progress, now: float) -> None:
        quarter = LINES * progress.step // progress.steps
        if progress.test is not None and quarter > self._told:
            self._told = quarter
            print(self._line(progress, now), file=self._stream, flush=True)

    def _draw(self, progress: Progress, now: float) -> None:
        full = WIDTH * progress.step // progress.steps
        text = f"{self._line(progress, now, bar='#' * full + '.' * (WIDTH - full))}"
        redraw(self._stream, text)

    def _line(self, progress: Progress, now: float, bar: str = "") -> str:
        assert self._begun is not None
        made, passed = progress.step - progress.first - 1, now - self._begun
        speed = made / passed if made > 0 and passed > 0 else 0.0
        parts = [f"{self._name} [{bar}]" if bar else self._name, f"{progress.step}/{progress.steps}"]
        if speed:
            parts += [f"{speed:.3g} steps/s", f"{duration((progress.steps - progress.step) / speed)} left"]
        epsilon = progress.epsilon()
        parts.append("not private" if epsilon is None else f"epsilon {math.ceil(epsilon * 1000) / 1000:.3f}")
        return "  ".join(filter(None, [*parts, self._test]))

    def close(self) -> None:
        """Remove the bar from a terminal."""
        if self._begun is not None and self._stream.isatty():
            redraw(self._stream, "")


def redraw(terminal: TextIO, text: str) -> None:
    """Put a text, cut to the terminal's width, in place of the current line."""
    print(f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}", end="", file=terminal, flush=True)


def measured(test: Mapping[str, float]) -> str:
    """The first few metrics in a short line.

    >>> measured({"accuracy": 0.934, "nll": 0.25, "ece": 0.031}), measured({"mse": 0.5, "rmse": 0.707, "r2": 0.4})
    ('accuracy 93.4 %  ECE 3.1 %', 'RMSE 0.707')
    """
    from clipwise.calibration import metric_named

    shown = [(metric_named(name), test[name]) for name in _GLANCE if name in test]
    return "  ".join(f"{m.label} {100 * value:.1f} %" if m.share else f"{m.label} {value:.4g}" for m, value in shown)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> duration(3.2), duration(75), duration(4000)
    ('0:03', '1:15', '1:06:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
