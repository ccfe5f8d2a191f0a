"""Long work: calls side by side in processes of their own, and caches that are filled shard by shard.

On a terminal a bar shows how much is done and how long the rest will take; a log gets a line now and then.
"""

from __future__ import annotations

import hashlib
import json
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from zipfile import BadZipFile

from clipwise.data import folders
from clipwise.errors import ClipwiseError, DataError
from clipwise.files import file_sha256 as file_sha256
from clipwise.files import locked, replacing
from clipwise.hashing import digest as digest
from clipwise.progress import Bar, duration
from clipwise.report.folder import write_text as write_text

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def told() -> Iterator[None]:
    """What is wrong with data, a run or a disk ends the command with a sentence, as it does in `clipwise` itself."""
    try:
        yield
    except (ClipwiseError, OSError) as error:
        raise SystemExit(f"clipwise: error: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit("stopped; --resume continues.") from None


_pipe: Connection | None = None  # in a worker: the way to its parent
_share = _told = 0.0  # in a worker: how much of its item is done, and how much of it the parent knows
STEP = 0.005
"""The parent is told when so much more of an item is done."""


def advance(share: float) -> None:
    """Told by the work itself, for the bar: this much more of its item is done."""
    global _share, _told
    _share += share
    if _pipe is not None and _share - _told >= STEP:
        _told = _share
        _pipe.send(_share)


def _serve(pipe: Connection, work: Callable[[Item], Result]) -> None:
    """What a worker does: one item after the other, until its parent ends it or is gone."""
    global _pipe, _share, _told
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _pipe = pipe
    with suppress(EOFError, BrokenPipeError):
        while True:
            item, _share, _told = pipe.recv(), 0.0, 0.0
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
            told = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            self.alive = False
            return None, f"its process was ended from outside (exit code {self._process.exitcode})"
        if isinstance(told, float):
            self.share = told
            return None
        result, problem = told
        return result, problem

    def end(self) -> None:
        self.pipe.close()
        self._process.terminate()
        self._process.join()


def side_by_side(
    what: str, work: Callable[[Item], Result], items: Sequence[Item], processes: int
) -> Iterator[tuple[Item, Result]]:
    """Every item with what `work` made of it, in the order in which they end.

    An item that fails, or whose process is killed, is told at once and stops none of the others. Ctrl-C ends all.

    Raises: SystemExit when all are done, if any failed.
    """
    context, bar = get_context("spawn"), Bar(what, what)
    waiting, busy, ended = deque(items), list[_Worker](), 0
    failed: list[str] = []
    try:
        while waiting or busy:
            while waiting and len(busy) < processes:
                busy.append(_Worker(context, work))
                busy[-1].give(waiting.popleft())
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
                bar.close()
                if problem is None:
                    yield item, result
                else:
                    failed.append(f"{item}: {problem}")
                    print(f"failed, {failed[-1]}", file=sys.stderr, flush=True)
            bar.show(ended + sum(worker.share for worker in busy), len(items))
    finally:
        for worker in busy:
            worker.end()
        bar.close()
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


@contextmanager
def kept(path: Path) -> Iterator[None]:
    """Around the reading of a file of the cache: one that is damaged is told, with what to do."""
    try:
        yield
    except (OSError, ValueError, EOFError, KeyError, TypeError, BadZipFile) as error:
        raise DataError(f"{path} is damaged ({error}); remove it to have it made again.") from error


def fill(what: str, paths: Sequence[Path], make: Callable[[int, BinaryIO], None]) -> None:
    """Write the shards of a folder that are missing, each whole or not at all: `make(k, file)` writes the k-th.

    Of several processes one writes, and the others wait for it.
    """

    def busy() -> None:
        print(f"{what}: waiting for another process that makes them", file=sys.stderr, flush=True)

    if not all(path.is_file() for path in paths):
        with locked(paths[0].parent, busy):
            _fill(what, paths, make)


def _fill(what: str, paths: Sequence[Path], make: Callable[[int, BinaryIO], None]) -> None:
    missing = [k for k, path in enumerate(paths) if not path.is_file()]
    if not missing:
        return
    bar, begun = Bar(what, "shards"), time.monotonic()
    for done, k in enumerate(missing, start=1):
        with replacing(paths[k], DataError) as file:
            make(k, file)
        bar.show(done, len(missing))
    bar.close()
    print(f"{what}: {len(missing)} in {duration(time.monotonic() - begun)}", file=sys.stderr, flush=True)
