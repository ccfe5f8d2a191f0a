"""How far long work is: a bar with speed and time left on a terminal or in a notebook, a few lines elsewhere.

Everything that reports progress does it here: training, studies, downloads, caches. `line` makes the text of values;
`Console` is where it goes, and `Bar` decides when.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterable
from html import escape
from typing import Any, TextIO

__all__ = ["BYTES", "Bar", "Console", "duration", "line", "size_text"]

BYTES = "bytes"
"""The unit whose amounts are shown in kB and MB."""
WIDTH = 20
REFRESH = 0.2
"""Seconds between two drawings of a bar, at least."""
LINES = 10
"""How often progress is reported where nobody watches."""
_ROUNDING = 1e-6
"""The shares of a piece add up to 1 up to this."""


class Console:
    """Lines on standard error (or `stream`) that stay, and one that is drawn again and again where somebody watches.

    That is below the lines on a terminal, and in a notebook one output of the cell that is updated.

    >>> console = Console(sys.stdout)
    >>> console.say("fetching MNIST")
    fetching MNIST
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._cell = _Cell() if stream is None and _in_notebook() else None
        self._drawn = False

    @property
    def is_watched(self) -> bool:
        """Whether somebody watches: on a terminal or in a notebook."""
        return self._cell is not None or self._stream.isatty()

    def say(self, text: str) -> None:
        """Write one line that stays."""
        self.clear()
        self._write(f"{text}\n")

    def draw(self, text: str) -> None:
        """Put a text, cut to the terminal's width, in place of the line that was drawn before."""
        if self._cell is not None:
            self._cell.show(text)
        elif self.is_watched:
            self._write(f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}")
        self._drawn = self.is_watched

    def clear(self) -> None:
        """Remove the line that was drawn."""
        if self._drawn:
            if self._cell is not None:
                self._cell.show("")
            else:
                self._write("\r\033[K")
            self._drawn = False

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _in_notebook() -> bool:
    """Whether a Jupyter kernel runs this code; IPython is asked only if it is there already."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class _Cell:
    """One output of a notebook's cell, whose text is replaced."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str) -> None:
        from IPython.display import display

        content = {"text/plain": text, "text/html": f"<pre>{escape(text)}</pre>"}
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


class Bar:
    """Shows how much of one piece of work is done.

    A terminal or a notebook sees a bar that moves; any other stream gets `lines` lines over the whole work, 0 for none.

    >>> bar = Bar("shards", "shards", lines=2, console=Console(sys.stdout))
    >>> for done in range(5):
    ...     bar.show(done, 4)
    shards  2/4  ... shards/s  0:00 left
    shards  4/4  ... shards/s  0:00 left
    >>> bar.close()
    """

    def __init__(self, name: str, unit: str, *, lines: int = LINES, console: Console | None = None) -> None:
        self._name, self._unit, self._lines = name, unit, lines
        self._console = Console() if console is None else console
        self._begun: tuple[float, float] | None = None  # when, and what was done then
        self._next = 0.0
        self._told = 0

    def show(self, done: float, total: float = 0.0, notes: Callable[[], Iterable[str]] = tuple) -> None:
        """Show that `done` of `total` is done, if it is time to; 0: nobody knows how much there is.

        `notes` gives what else there is to say; it is asked only when something is shown.
        """
        now = time.monotonic()
        if self._begun is None:
            self._begun = now, done
        passed, made = now - self._begun[0], done - self._begun[1]
        speed = made / passed if made > 0 and passed > 0 else None
        if self._console.is_watched:
            if now >= self._next or 0 < total <= done:
                self._console.draw(line(self._name, self._unit, done, total, speed, notes(), bar=True))
                # What the notes cost must not slow fast work down: epsilon takes milliseconds.
                self._next = time.monotonic() + max(REFRESH, 20 * (time.monotonic() - now))
        elif total and (reached := int(self._lines * _share(done, total))) > self._told:
            self._told = reached
            self._console.say(line(self._name, self._unit, done, total, speed, notes()))

    def say(self, text: str) -> None:
        """Write one line that stays."""
        self._console.say(text)

    def close(self) -> None:
        """Leave the line of a terminal to others."""
        self._console.clear()


def line(
    name: str, unit: str, done: float, total: float, speed: float | None, notes: Iterable[str] = (), bar: bool = False
) -> str:
    """What is shown of a piece of work: how much of it is done, `unit` per second, and what is left.

    >>> line("digits", "steps", 50, 100, 12.5, ["epsilon 1.235"])
    'digits  50/100  12.5 steps/s  0:04 left  epsilon 1.235'
    >>> line("runs", "runs", 3.4, 20, 0.05, bar=True)
    'runs [###.................]  3/20  3 runs/min  5:32 left'
    >>> line("mnist.npz", BYTES, 5e5, 2e6, 1e5), line("pip", "s", 12, 0, 1.0)
    ('mnist.npz  25% of 2.0 MB  100.0 kB/s  0:15 left', 'pip  12 s')
    """
    if not total:
        return f"{name}  {int(done)} {unit}"
    share = _share(done, total)
    full = int(WIDTH * share)
    parts = [f"{name} [{'#' * full}{'.' * (WIDTH - full)}]" if bar else name]
    parts.append(f"{share:.0%} of {size_text(total)}" if unit == BYTES else f"{int(done + _ROUNDING)}/{total:.0f}")
    if speed:
        parts += [_per_second(speed, unit), f"{duration(max(0.0, total - done) / speed)} left"]
    return "  ".join([*parts, *notes])


def _share(done: float, total: float) -> float:
    return min((done + _ROUNDING) / total, 1.0)


def _per_second(speed: float, unit: str) -> str:
    if unit == BYTES:
        return f"{size_text(speed)}/s"
    return f"{speed:.3g} {unit}/s" if speed >= 0.1 else f"{60 * speed:.3g} {unit}/min"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> duration(3.2), duration(75), duration(4000)
    ('0:03', '1:15', '1:06:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def size_text(size: float) -> str:
    """A number of bytes for people.

    >>> size_text(15_513_529), size_text(84_199)
    ('15.5 MB', '84.2 kB')
    """
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"
