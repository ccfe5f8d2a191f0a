"""Several copies of the package, and processes that have imported it, so that several trials run side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.changes import Change
from tests.mutants.coverage_of import Covering
from tests.mutants.trial import copy_of_the_package, failing, seconds_for
from tests.mutants.warm import RunsOnImportError, Warm


class Pool:
    """Trials side by side, each in a copy of its own."""

    def __init__(self, sources: Sequence[Path], covering: Covering) -> None:
        self._jobs, self._covering = len(sources), covering
        self._threads = ThreadPoolExecutor(len(sources))
        self._free: SimpleQueue[Path] = SimpleQueue()
        self._warm: SimpleQueue[Warm] = SimpleQueue()
        for source in sources:
            self._free.put(source)

    @classmethod
    @contextmanager
    def of(cls, jobs: int, covering: Covering) -> Iterator[Pool]:
        """So many trials at a time."""
        with ExitStack() as stack:
            pool = cls([stack.enter_context(copy_of_the_package()) for _ in range(jobs)], covering)
            stack.callback(pool._end)
            yield pool

    def _end(self) -> None:
        self._threads.shutdown()
        while not self._warm.empty():
            self._warm.get().close()

    def _failing(self, changes: Sequence[Change], tests: Sequence[str], first: bool) -> list[str] | None:
        source = self._free.get()
        try:
            return failing(changes, source, tests, self._covering.time_of(tests), first)
        finally:
            self._free.put(source)

    def _failing_warm(self, change: Change, tests: Sequence[str]) -> list[str] | None:
        try:
            return self._warmly(change, tests)
        except RunsOnImportError:
            return self._failing([change], tests, first=True)

    def _warmly(self, change: Change | None, tests: Sequence[str]) -> list[str] | None:
        warm = self._warm.get()
        try:
            return warm.failing(change, tests, seconds_for(self._covering.time_of(tests)))
        finally:
            self._warm.put(warm)

    def failing_anyway(self, tests: Sequence[str]) -> set[str]:
        """The tests that fail on the package as it is, in a new process or in a fork."""
        return {*(self.failing([], tests) or ()), *(self._warmly(None, tests) or ())}

    def quickly_noticed(
        self, tests: Mapping[Change, Sequence[str]], note: Callable[[Change, list[str] | None], None]
    ) -> None:
        """Tell `note` which of its own tests notice each change, where that shows without a new process."""

        def look(change: Change) -> None:
            note(change, self._failing_warm(change, tests[change]) if tests[change] else [])

        if self._warm.empty():
            for warm in list(self._threads.map(lambda _: Warm(), range(self._jobs))):
                self._warm.put(warm)
        list(self._threads.map(look, tests))

    def noticed(self, tests: Mapping[Change, Sequence[str]]) -> dict[Change, list[str] | None]:
        """The changes that some of their own tests notice, with them."""

        def look(change: Change) -> list[str] | None:
            return self._failing([change], tests[change], first=True) if tests[change] else []

        found = zip(tests, self._threads.map(look, tests), strict=True)
        return {change: failed for change, failed in found if failed != []}

    def failing(self, changes: Sequence[Change], tests: Sequence[str]) -> list[str] | None:
        """The tests that fail when all changes are made; None: some of them did not end."""
        shards = [tests[k :: self._jobs] for k in range(min(self._jobs, len(tests)))]
        found = list(self._threads.map(lambda shard: self._failing(changes, shard, first=False), shards))
        return None if None in found else sorted({test for shard in found for test in shard or ()})
