"""Where files lie on somebody's machine, taken out of what is published: the last part of a path stays."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["without_paths"]

_ADDRESS = re.compile(r"((?!file:)\b[a-z][a-z0-9+.-]+://[^\s'\"]+)")
_QUOTED = re.compile(r"(['\"])([^'\"]*)\1")
_ROOTED = re.compile(r"(?:file://|[A-Za-z]:|~\w*|\.{1,2})?[/\\]")
_WORD = re.compile(r"[^\s'\"(),;\[\]<>|]+")


def without_paths(value: Any) -> Any:
    """The same value, in which every path in a text is its last part; addresses of the web stay.

    >>> without_paths({"source": "/srv/J. Doe/heart.csv", "model": "HuggingFace(folder='my weights/bert')"})
    {'source': 'heart.csv', 'model': "HuggingFace(folder='bert')"}
    >>> without_paths(["~/code/mine.py:load", "https://example.org/mnist.gz", "2 / R", "512/60,000", "is in /tmp/x/y"])
    ['mine.py:load', 'https://example.org/mnist.gz', '2 / R', '512/60,000', 'is in y']
    """
    if isinstance(value, str):
        return "".join(part if _ADDRESS.fullmatch(part) else _bare(part) for part in _ADDRESS.split(value))
    if isinstance(value, Mapping):
        return {without_paths(key): without_paths(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(without_paths(item) for item in value)
    return value


def _bare(text: str) -> str:
    if _ROOTED.match(text):  # all of it is a path, which may have spaces
        return _last(text)
    quoted = _QUOTED.sub(lambda found: found[1] + _last(found[2]) + found[1], text)
    return _WORD.sub(lambda found: _last(found[0]), quoted)


def _last(text: str) -> str:
    """The last part of a path; a fraction, and a bar between spaces, is none."""
    if not re.search(r"[/\\]\S", text) or re.fullmatch(r"[\d.,]+/[\d.,R]+", text) or re.search(r"\s/\s", text):
        return text
    return re.split(r"[/\\]", text.rstrip("/\\"))[-1]
