"""One mutant: a copy of the package with one change, and the tests that cover it."""

from __future__ import annotations

import math
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from tests.mutants.changes import Change
from tests.mutants.coverage_of import ROOT

CRASHED = "no test ended"
_SOURCE = "src/"  # where the doctests of the package are
_LIMIT = 4.0  # times the processor time that the tests take, and no more: a mutant that hangs is noticed
_GRACE = 30.0  # seconds besides, to start
_PATIENCE = 5.0  # times that, by the clock: for one that waits, and for a busy machine


@contextmanager
def copy_of_the_package() -> Iterator[Path]:
    """A folder with a copy of the package, which a mutant may be written into."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        shutil.copytree(
            ROOT / "src" / "clipwise", Path(folder, "clipwise"), ignore=shutil.ignore_patterns("__pycache__")
        )
        yield Path(folder)


def seconds_for(seconds: float) -> int:
    """Seconds of processor time for tests that take so many without a change."""
    return math.ceil(_GRACE + _LIMIT * seconds)


def failing(
    changes: Sequence[Change], source: Path, tests: Sequence[str], seconds: float, first: bool = False
) -> list[str] | None:
    """The tests that fail with all these changes made; only the first of them if asked.

    `seconds` is what the tests take without them. None: they did not end in time. `CRASHED`: they did not end as tests
    do, for example since the package cannot be imported.
    """
    texts = {path: (source / path).read_text(encoding="utf-8") for path in {change.path for change in changes}}
    for path, text in texts.items():
        for change in sorted((c for c in changes if c.path == path), key=lambda c: -c.start):
            text = change.applied(text)
        (source / path).write_text(text, encoding="utf-8")
    failed = source / "failed"
    failed.unlink(missing_ok=True)
    limit = seconds_for(seconds)
    process = _fresh().Process(target=_run, args=(str(source), list(tests), str(failed), first, limit))
    try:
        process.start()
        process.join(_PATIENCE * limit)
        in_time = not process.is_alive() and process.exitcode != -signal.SIGXCPU
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # with whatever the tests started
        process.join()
        for path, text in texts.items():
            (source / path).write_text(text, encoding="utf-8")
    if not in_time:
        return None
    if process.exitcode == 0:
        return []
    return sorted(set(failed.read_text(encoding="utf-8").split("\n")[:-1])) if failed.exists() else [CRASHED]


@cache
def _fresh() -> ForkServerContext:
    """Processes that have imported what takes long, but nothing of clipwise."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = get_context("forkserver")
    context.set_forkserver_preload(["pytest", "scipy.optimize", "scipy.stats", "torch.utils.data"])
    return context


class _Notes:
    """A plugin that writes down which test functions and doctests fail."""

    def __init__(self, path: str, source: str) -> None:
        self._path, self._source = path, os.path.realpath(source)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            path, _, name = report.nodeid.partition("[")[0].partition("::")
            whole = os.path.realpath(ROOT / report.location[0])
            if whole.startswith(self._source):  # a doctest of the copy, which has no path in its name
                path = _SOURCE + os.path.relpath(whole, self._source)
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(f"{path}::{name}\n")


def _run(source: str, tests: list[str], failed: str, first: bool, limit: int) -> None:
    """Run the tests against this copy of the package; ends with 0 when all pass, by a signal after `limit` seconds."""
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 10))
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(quiet, stream)
    os.chdir(ROOT)
    sys.path[:0] = [source, str(ROOT)]
    os.environ["PYTHONPATH"] = source
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow", *(["-x"] if first else [])]
    options += ["--doctest-modules", "-c", "pyproject.toml", "--rootdir", str(ROOT)]
    here = [f"{source}/{test.removeprefix(_SOURCE)}" if test.startswith(_SOURCE) else test for test in tests]
    code = pytest.main([*options, *here], plugins=[_Notes(failed, source)])
    import clipwise

    imported = Path(clipwise.__file__ or "").is_relative_to(source)  # else nothing was tried
    os._exit(int(code) if imported else 70)
