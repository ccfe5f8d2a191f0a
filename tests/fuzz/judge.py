"""What a reader makes of one file: accepted, refused by an error of clipwise with a message, or a defect.

A defect is any other exception, a warning, a message that is empty, too long or has control characters, more than
`CPU_SECONDS` of processor time, or more than `MEMORY` bytes beyond what the process had.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipwise.errors import ClipwiseError

__all__ = ["CPU_SECONDS", "LONGEST", "MEMORY", "Verdict", "judge"]

CPU_SECONDS = 5.0
MEMORY = 512 << 20
"""Bytes that a reader may take for one file: asked for (RLIMIT_AS), and used (resident)."""
LONGEST = 3_000
"""Characters of a message."""

_STATUS = Path("/proc/self/status")
_NO_MEMORY = ("allocate", "bad_alloc", "Cannot allocate", "malloc")


@dataclass(frozen=True)
class Verdict:
    """`kind` is accepted, refused or DEFECT; `detail` the message, or what is wrong."""

    kind: str
    detail: str = ""


class TooSlow(BaseException):
    """The reader has had its processor time; no reader catches this."""


def judge(read: Callable[[bytes], Any], data: bytes) -> Verdict:
    """Let a reader read, within the limits."""
    spent = time.process_time()
    try:
        with _limits() as peak, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            verdict = _attempt(read, data)
    except TooSlow:
        return Verdict("DEFECT", f"more than {CPU_SECONDS:g} s of processor time")
    if verdict.kind == "DEFECT":
        return verdict
    if told:
        return Verdict("DEFECT", f"a warning: {told[0].category.__name__}: {told[0].message}")
    if time.process_time() - spent > CPU_SECONDS:
        return Verdict("DEFECT", f"more than {CPU_SECONDS:g} s of processor time")
    if peak() > MEMORY:
        return Verdict("DEFECT", f"{peak() >> 20} MiB of memory")
    return verdict


def _attempt(read: Callable[[bytes], Any], data: bytes) -> Verdict:
    try:
        read(data)
    except ClipwiseError as error:
        return _refusal(error)
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno}"
        return Verdict("DEFECT", f"{type(error).__name__} at {place}: {str(error)[:300]!r}")
    return Verdict("accepted")


def _refusal(error: ClipwiseError) -> Verdict:
    message = str(error)
    if not message.strip() or len(message) > LONGEST:
        return Verdict("DEFECT", f"a message of {len(message)} characters: {message[:200]!r}")
    unclean = {character for character in message if not character.isprintable() and character != "\n"}
    if unclean:
        return Verdict(
            "DEFECT", f"control characters {sorted(map(ascii, unclean))[:5]} in a message: {message[:200]!r}"
        )
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or any(word in str(cause) for word in _NO_MEMORY):
            return Verdict("DEFECT", f"memory asked for in vain: {cause!s:.200}")
        cause = cause.__cause__ or cause.__context__
    return Verdict("refused", message)


@contextlib.contextmanager
def _limits() -> Iterator[Callable[[], int]]:
    """Bounds on time and memory, and no log; the function gives the most memory that was used."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    resident = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + MEMORY, hard))
    previous = signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS, 1.0)  # once more, if the first was swallowed
    try:
        yield lambda: _status("VmHWM") - resident
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))
        logging.disable(level)


def _stop(*_: object) -> None:
    raise TooSlow


def _status(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise OSError(f"{_STATUS} has no {name}")
