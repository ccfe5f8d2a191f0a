"""What the tests of pages share."""

from __future__ import annotations

from pathlib import Path

import pytest

from clipwise import report

from .samples import HOSTILE, comparison, made_run


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a comparison, with hostile words in it; it takes seconds to draw, and nobody writes to its folder."""
    return report.write([*comparison(seeds=2), made_run(HOSTILE, 100.0, 1.4)], tmp_path_factory.mktemp("compared"))
