"""Long work: calls side by side in processes of their own, and caches that are filled shard by shard.

On a terminal a bar tells how much is done and how long the rest will take; a log gets a line now and then.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from clipwise.cli.progress import duration, redraw
from clipwise.data.store import folders
from clipwise.errors import ClipwiseError, DataError
from clipwise.files import replacing

Item, Result = TypeVar("Item"), TypeVar("Result")
WIDTH = 30
LINES = 10


@contextmanager
def told() -> Iterator[None]:
    """What is wrong with data or a run ends the command with a sentence, as it does in `clipwise` itself."""
    try:
        yield
    except ClipwiseError as error:
        raise SystemExit(f"clipwise: error: {error}") from error


class Bar:
    """How much of `total` pieces is done, on standard error."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._begun, self._told = what, total, time.monotonic(), 0
        self._live = sys.stderr.isatty()

    def show(self, done: float) -> None:
        """Draw the bar; in a log, add a line for every tenth of the work."""
        done = min(done + 1e-6, self._total)  # the shares of a piece add up to 1 but for rounding
        share = done / self._total
        text = f"{self._what}: {int(done)} of {self._total}"
        if share > 1e-4:
            text += f", {duration((time.monotonic() - self._begun) * (1 / share - 1))} left"
        if self._live:
            full = int(WIDTH * share)
            redraw(sys.stderr, f"[{'#' * full}{'.' * (WIDTH - full)}] {text}")
        elif int(LINES * share) > self._told:
            self._told = int(LINES * share)
            print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Leave the terminal's line to others."""
        if self._live:
            redraw(sys.stderr, "")


_done: Any = None  # in a worker: how many items all workers have done, a shared number
_share = 0.0  # in a worker: how much of its item has been counted


def _receive(done: Any) -> None:
    global _done
    _done = done


def advance(share: float) -> None:
    """Told by the work itself, for the bar: this much more of its item is done."""
    global _share
    if _done is not None:
        with _done.get_lock():
            _done.value += share
        _share += share


def _carry_out(work: Callable[[Item], Result], item: Item) -> Result:
    global _share
    _share = 0.0
    try:
        return work(item)
    finally:
        advance(1 - _share)


def side_by_side(
    what: str, work: Callable[[Item], Result], items: Sequence[Item], processes: int
) -> Iterator[tuple[Item, Result]]:
    """Every item with what `work` made of it, in the order in which they end.

    An item that fails is told at once and stops none of the others.

    Raises: SystemExit when all are done, if any failed.
    """
    if not items:
        return
    context, bar = get_context("spawn"), Bar(what, len(items))
    done = context.Value("d", 0.0)
    failed: list[str] = []
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_receive, initargs=(done,)) as pool:
        waiting: dict[Future[Result], Item] = {pool.submit(_carry_out, work, item): item for item in items}
        try:
            while waiting:
                ended, _ = wait(waiting, timeout=1.0, return_when=FIRST_COMPLETED)
                bar.clear()
                for future in ended:
                    item = waiting.pop(future)
                    if (problem := future.exception()) is None:
                        yield item, future.result()
                    else:
                        failed.append(f"{item}: {problem}")
                        print(f"failed, {failed[-1]}", file=sys.stderr, flush=True)
                bar.show(done.value)
        except BaseException:  # nothing new is begun after Ctrl-C
            pool.shutdown(cancel_futures=True)
            raise
    bar.clear()
    if failed:
        raise SystemExit(f"{len(failed)} of {len(items)} {what} failed. The first: {failed[0]}")


def cache_folder(kind: str, name: str, made_of: Any) -> Path:
    """A folder of the cache for what is computed from `made_of`: a hash of it ends the folder's name.

    It is the one that is there, else one in the first data folder that can be written.
    """
    key = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()
    places = [base / kind / f"{name}-{key[:16]}" for base in folders()]
    for folder in [place for place in places if place.is_dir()] or places:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            return folder
    raise DataError(f"{' and '.join(map(str, folders()))} cannot be written; let CLIPWISE_DATA name a folder that can.")


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    with replacing(path, DataError) as file:
        file.write(text.encode())


def fill(what: str, paths: Sequence[Path], make: Callable[[int, BinaryIO], None]) -> None:
    """Write the shards that are missing, each whole or not at all: `make(k, file)` writes the k-th."""
    missing = [k for k, path in enumerate(paths) if not path.is_file()]
    if not missing:
        return
    bar, begun = Bar(what, len(missing)), time.monotonic()
    for done, k in enumerate(missing, start=1):
        with replacing(paths[k], DataError) as file:
            make(k, file)
        bar.show(done)
    bar.clear()
    print(f"{what}: {len(missing)} in {duration(time.monotonic() - begun)}", file=sys.stderr, flush=True)
