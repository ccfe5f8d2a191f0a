"""One mutant: a copy of the package with one change, and the tests that cover it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

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
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, timeout=60 + _LIMIT * seconds,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return True
    finally:
        target.write_text(text, encoding="utf-8")
    return done.returncode != 0
