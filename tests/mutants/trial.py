"""One mutant: a copy of the package with one change, and the tests that cover it."""

from __future__ import annotations

import os
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

_LIMIT = 4.0  # times as long as the tests take, and no more: a mutant that hangs is noticed


@contextmanager
def copy_of_the_package() -> Iterator[Path]:
    """A folder with a copy of the package, which a mutant may be written into."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        shutil.copytree(
            ROOT / "src" / "clipwise", Path(folder, "clipwise"), ignore=shutil.ignore_patterns("__pycache__")
        )
        yield Path(folder)


def tried(change: Change, source: Path, tests: Sequence[str], seconds: float) -> bool:
    """Whether some test fails on the mutant. `seconds` is what the tests take without it."""
    target = source / change.path
    text = target.read_text(encoding="utf-8")
    target.write_text(change.applied(text), encoding="utf-8")
    process = _fresh().Process(target=_run, args=(str(source), list(tests)))
    try:
        process.start()
        process.join(60 + _LIMIT * seconds)
        if process.is_alive():
            return True
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # with whatever the tests started
        process.join()
        target.write_text(text, encoding="utf-8")
    return process.exitcode != 0


@cache
def _fresh() -> ForkServerContext:
    """Processes that have imported what takes long, but nothing of clipwise."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = get_context("forkserver")
    context.set_forkserver_preload(["pytest", "scipy.optimize", "scipy.stats", "torch.utils.data"])
    return context


def _run(source: str, tests: list[str]) -> None:
    """Run the tests against this copy of the package, and end with the code that pytest ends with."""
    os.setpgid(0, 0)
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(quiet, stream)
    os.chdir(ROOT)
    sys.path[:0] = [source, str(ROOT)]
    os.environ["PYTHONPATH"] = source
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *tests])
    import clipwise

    imported = Path(clipwise.__file__ or "").is_relative_to(source)  # else nothing was tried
    os._exit(int(code) if imported else 70)
