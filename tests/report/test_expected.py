"""Every word and number of pages and cards, of runs that are made up: a change is seen where it is made.

After one that is meant, `python -m tests.report.expected` writes the texts anew.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from tests.report.expected import PAGES, SCENES, shown


@pytest.mark.usefixtures("figures_in_words")
@pytest.mark.parametrize("scene", SCENES)
def test_pages_and_cards_say_what_is_expected(scene: str, tmp_path: Path) -> None:
    expected, found = (PAGES / f"{scene}.txt").read_text(encoding="utf-8"), shown(scene, tmp_path)
    changed = difflib.unified_diff(expected.splitlines(), found.splitlines(), "expected", "found", lineterm="", n=0)
    assert found == expected, "\n".join(changed)


def test_every_expected_text_is_of_a_scene() -> None:
    assert {path.stem for path in PAGES.iterdir()} == set(SCENES)
