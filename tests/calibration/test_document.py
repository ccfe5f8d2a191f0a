"""The examples of docs/calibration.md run as they stand and print what the comments beside them say."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

NUMBER = re.compile(r"\d+\.\d+")
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "calibration.md"


def test_the_examples_print_what_they_say() -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) >= 6
    namespace: dict[str, Any] = {}
    for block in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, str(DOCUMENT), "exec"), namespace)
        # A comment at the end of a print, or on lines of their own after a loop.
        promised = re.findall(r"^\s*(?:print\(.*\)\s+)?# (.*)$", block, flags=re.MULTILINE)
        for line, promise in zip(printed.getvalue().splitlines(), promised, strict=True):
            _check(line, promise)


def _check(line: str, promise: str) -> None:
    """Equal; or alike, where the promise is one example: the noise of a seed depends on how a processor rounds."""
    example = promise.removeprefix("for example ")
    if example == promise:
        assert line == promise
        return
    assert NUMBER.sub("", line) == NUMBER.sub("", example)
    found, expected = ([float(number) for number in NUMBER.findall(text)] for text in (line, example))
    assert found == pytest.approx(expected, rel=0.4)
