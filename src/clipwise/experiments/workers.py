"""Calls side by side, in processes of their own: one that fails or is killed stops no other; and what a caller sees."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from typing import Any, TypeAlias, TypeVar

from clipwise.errors import ClipwiseError
from clipwise.progress import Bar, Console
from clipwise.report import Run, arms_of

__all__ = ["Show", "Standing", "Watch", "advance", "cores", "side_by_side", "silent"]


@dataclass(frozen=True)
class Standing:
    """Where a study, or other work side by side, stands.

    >>> Standing(done=1.5, total=4).ended is None
    True
    """

    done: float
    """How many have ended, with the shares of those under way."""
    total: int
    ended: Any = None
    """What has ended just now: the `Trial` of a study; None between."""
    result: Any = None
    """What came of it: the `Run`."""
    problem: str | None = None
    """Why it failed, if it did."""


Watch: TypeAlias = Callable[[Standing], None]


def silent(standing: Standing) -> None:
    """Look on and say nothing."""


class Show:
    """A watch that shows a bar on standard error, with the largest epsilon of a run, and a line for every failure.

    `told(standing)` is called for everything that ended well, with the bar out of the way. Leaving the `with` block
    removes the bar.

    >>> import sys
    >>> with Show("runs", lambda standing: print(f"{standing.ended}: done"), Console(sys.stdout)) as show:
    ...     show(Standing(1.0, 2, "R = 1, seed 0"))
    ...     show(Standing(2.0, 2, "R = 1, seed 1", problem="it diverged"))
    R = 1, seed 0: done
    failed, R = 1, seed 1: it diverged
    """

    def __init__(self, what: str = "runs", told: Watch = silent, console: Console | None = None) -> None:
        self._bar = Bar(what, what.split()[0], console=console)
        self._told = told
        self._epsilon: float | None = None

    def __enter__(self) -> Show:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def __call__(self, standing: Standing) -> None:
        """Show where the work stands."""
        if standing.ended is None:
            self._bar.show(standing.done, standing.total, self._notes)
        elif standing.problem is not None:
            self._bar.say(f"failed, {standing.ended}: {standing.problem}")
        else:
            self._bar.close()
            self._told(standing)
        if isinstance(standing.result, Run):
            spent = [self._epsilon, *(arm.epsilon for arm in arms_of([standing.result]))]
            self._epsilon = max((epsilon for epsilon in spent if epsilon is not None), default=None)

    def _notes(self) -> list[str]:
        """Rounded up: less must not be shown than was spent."""
        return [] if self._epsilon is None else [f"epsilon {ceil(self._epsilon * 1000) / 1000:.3f}"]


Item = TypeVar("Item")
Result = TypeVar("Result")

STEP = 0.005
"""The parent hears of it when so much more of an item is done."""
_pipe: Connection | None = None  # in a worker: the way to its parent
_share = _sent = 0.0  # in a worker: how much of its item is done, and how much of it the parent knows


def cores() -> int:
    """How many processes can work at the same time: the cores that this process may use.

    >>> cores() >= 1
    True
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def advance(share: float) -> None:
    """Say, from within the work that `side_by_side` does, that this much more of its item is done.

    >>> advance(0.25)  # outside of such work nobody listens
    """
    global _share, _sent
    _share += share
    if _pipe is not None and _share - _sent >= STEP:
        _sent = _share
        _pipe.send(_share)


def _serve(pipe: Connection, work: Callable[[Item], Result]) -> None:
    """What a worker does: one item after the other, until its parent ends it or is gone."""
    global _pipe, _share, _sent
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _pipe = pipe
    with suppress(EOFError, BrokenPipeError):
        while True:
            item, _share, _sent = pipe.recv(), 0.0, 0.0
            try:
                answer: tuple[Result | None, str | None] = (work(item), None)
            except BrokenPipeError:
                raise
            except (Exception, SystemExit) as error:
                answer = (None, str(error) or type(error).__name__)
            pipe.send(answer)


class _Worker:
    """A process, the item that it works on, and how much of it is done."""

    def __init__(self, context: SpawnContext, work: Callable[[Any], Any]) -> None:
        self.pipe, theirs = context.Pipe()
        # Started afresh rather than forked: a forked process must not use the threads that torch may have begun.
        self._process = context.Process(target=_serve, args=(theirs, work), daemon=True)
        self._process.start()
        theirs.close()
        self.item: Any = None
        self.alive, self.share = True, 0.0

    def give(self, item: Any) -> None:
        self.item, self.share = item, 0.0
        self.pipe.send(item)

    def answer(self) -> tuple[Any, str | None] | None:
        """The result, or what went wrong; None when the item is not done yet."""
        try:
            message = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            self.alive = False
            return None, f"its process was ended from outside (exit code {self._process.exitcode})"
        if isinstance(message, float):
            self.share = message
            return None
        result, problem = message
        return result, problem

    def end(self) -> None:
        self.pipe.close()
        self._process.terminate()
        self._process.join()


def side_by_side(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    jobs: int | None = None,
    watch: Watch = silent,
    what: str = "runs",
) -> Iterator[tuple[Item, Result]]:
    """Every item with what `work` made of it, in the order in which they end, made by `jobs` processes (all cores).

    `work` is a function of a module, and items and results are values that can be pickled. An item that fails, or whose
    process is killed, is reported at once and stops none of the others. Ctrl-C ends all, and begins nothing more.

    Raises: ClipwiseError when all are done, if any failed.

    >>> import math
    >>> sorted(side_by_side(math.factorial, [3, 4, 5], jobs=1))
    [(3, 6), (4, 24), (5, 120)]
    """
    context = get_context("spawn")
    waiting, busy, ended = deque(items), list[_Worker](), 0
    failed: list[str] = []
    try:
        while waiting or busy:
            while waiting and len(busy) < (jobs or cores()):
                busy.append(_Worker(context, work))
                busy[-1].give(waiting.popleft())
            watch(Standing(ended + sum(worker.share for worker in busy), len(items)))
            ready = wait([worker.pipe for worker in busy], timeout=1.0)
            for worker in [worker for worker in busy if worker.pipe in ready]:
                item, answer = worker.item, worker.answer()
                if answer is None:
                    continue
                ended += 1
                if worker.alive and waiting:
                    worker.give(waiting.popleft())
                else:
                    busy.remove(worker)
                    worker.end()
                result, problem = answer
                watch(Standing(ended, len(items), item, result, problem))
                if problem is None:
                    yield item, result
                else:
                    failed.append(f"{item}: {problem}")
        if items:
            watch(Standing(ended, len(items)))
    finally:
        for worker in busy:
            worker.end()
    if failed:
        raise ClipwiseError(f"{len(failed)} of {len(items)} {what} failed. The first: {failed[0]}")
