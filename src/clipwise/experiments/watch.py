"""What a caller sees while a study runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any, TypeAlias

from clipwise.progress import Bar, Console
from clipwise.report import Run, arms_of

__all__ = ["Show", "Standing", "Watch", "silent"]


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
