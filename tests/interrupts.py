"""An interrupt at a chosen line, as Ctrl-C may come at any."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any


class Interrupt:
    """Raises KeyboardInterrupt before the n-th line that is reached in some functions."""

    def __init__(self, count: int, functions: Iterable[Callable[..., Any]]) -> None:
        self._left = count
        self._codes: set[CodeType] = {function.__code__ for function in functions}
        self.where = ""
        """The line that it came before; empty where there are fewer lines."""

    def __enter__(self) -> Interrupt:
        self._before = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code in self._codes else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and not self.where:
            if self._left == 0:
                self.where = f"{frame.f_code.co_name}, line {frame.f_lineno}"
                raise KeyboardInterrupt
            self._left -= 1
        return self._line


def at_every_line(
    functions: Iterable[Callable[..., Any]], attempt: Callable[[], Callable[[], object]]
) -> Iterator[tuple[str, bool]]:
    """Interrupt what `attempt()` gives, anew each time, before every line: where, and whether it was let out."""
    functions, count = list(functions), 0
    while True:
        run, let_out = attempt(), False
        interrupt = Interrupt(count, functions)
        try:
            with interrupt:
                run()
        except KeyboardInterrupt:
            let_out = True
        if not interrupt.where:
            return
        yield interrupt.where, let_out
        count += 1
