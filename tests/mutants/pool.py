"""Several copies of the package, so that several trials run side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.changes import Change
from tests.mutants.coverage_of import Covering
from tests.mutants.trial import copy_of_the_package, failing


class Pool:
    """Trials side by side, each in a copy of its own."""

    def __init__(self, sources: Sequence[Path], covering: Covering) -> None:
        self._jobs, self._covering = len(sources), covering
        self._threads = ThreadPoolExecutor(len(sources))
        self._free: SimpleQueue[Path] = SimpleQueue()
        for source in sources:
            self._free.put(source)

    @classmethod
    @contextmanager
    def of(cls, jobs: int, covering: Covering) -> Iterator[Pool]:
        """So many trials at a time."""
        with ExitStack() as stack:
            pool = cls([stack.enter_context(copy_of_the_package()) for _ in range(jobs)], covering)
            with pool._threads:
                yield pool

    def _failing(self, changes: Sequence[Change], tests: Sequence[str], first: bool) -> list[str] | None:
        source = self._free.get()
        try:
            return failing(changes, source, tests, self._covering.time_of(tests), first)
        finally:
            self._free.put(source)

    def noticed(
        self, tests: Mapping[Change, Sequence[str]], note: Callable[[Change, list[str] | None], None] = lambda *_: None
    ) -> dict[Change, list[str] | None]:
        """The changes that some of their own tests notice, with them; `note` hears of it as soon as it is known."""

        def look(change: Change) -> list[str] | None:
            failed = self._failing([change], tests[change], first=True) if tests[change] else []
            note(change, failed)
            return failed

        found = zip(tests, self._threads.map(look, tests), strict=True)
        return {change: failed for change, failed in found if failed != []}

    def failing(self, changes: Sequence[Change], tests: Sequence[str]) -> list[str] | None:
        """The tests that fail when all changes are made; None: some of them did not end."""
        shards = [tests[k :: self._jobs] for k in range(min(self._jobs, len(tests)))]
        found = list(self._threads.map(lambda shard: self._failing(changes, shard, first=False), shards))
        return None if None in found else sorted({test for shard in found for test in shard or ()})
