"""What a fetch tells the person who waits for it: a line for what is fetched, and on a terminal how far it is."""

from __future__ import annotations

import sys
import time
from typing import Protocol, TextIO

__all__ = ["FetchProgress", "Terminal", "size_text"]


class FetchProgress(Protocol):
    """Where a fetch reports to."""

    def say(self, text: str) -> None:
        """One line that stays."""
        ...

    def advance(self, done: int, total: int) -> None:
        """`done` of about `total` bytes have come; `total` 0: unknown, `done` counts seconds."""
        ...


class Terminal:
    """Lines on standard error (or `stream`), and a line that counts when that is a terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._next = 0.0
        self._shown = ""

    def say(self, text: str) -> None:
        self._clear()
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def advance(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self._stream.isatty() or (now < self._next and done != total):
            return
        self._next = now + 0.1
        text = f"  {min(done / total, 1):4.0%} of {size_text(total)}" if total else f"  {done} s"
        self._clear()
        self._shown = text
        self._stream.write(text)
        self._stream.flush()

    def _clear(self) -> None:
        if self._shown:
            self._stream.write("\r" + " " * len(self._shown) + "\r")
            self._shown = ""


def size_text(size: int) -> str:
    """A number of bytes for people.

    >>> size_text(15_513_529), size_text(84_199)
    ('15.5 MB', '84.2 kB')
    """
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"
