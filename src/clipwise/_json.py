"""JSON of files that anyone may have edited or cut: read strictly, with an error that names the place and the remedy.

Every reader of a file that clipwise wrote goes through here: ledgers, checkpoints, digests and runs.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

from clipwise._validate import is_count, is_finite
from clipwise.errors import ClipwiseError, DataError
from clipwise.files import read_bytes

__all__ = ["RESTORE", "Fields", "checksum", "parse_json", "read_json"]

RESTORE = "It was edited, cut or damaged: restore it as it was written last."

_DEEPEST = 200
_DIGITS = 300  # of an integer: floats end there
_SHOWN = 60
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str | bytes, where: str, error: type[ClipwiseError] = DataError) -> Any:
    """The value of a JSON text; `where` is its name in a message.

    Guarantees: the value is nested at most 200 deep, has finite numbers only and no name twice in an object, and all
    its texts can be written again. Any other text is an `error`, whatever it holds.

    >>> parse_json('{"steps": 5}', "note.json")
    {'steps': 5}
    >>> parse_json('{"steps": NaN}', "note.json")
    Traceback (most recent call last):
    clipwise.errors.DataError: note.json is not JSON as clipwise writes it: NaN is not a number of JSON. It was ...
    """
    try:
        found = text if isinstance(text, str) else text.decode("utf-8")
        value = json.loads(
            found, object_pairs_hook=_object, parse_int=_integer, parse_float=_number, parse_constant=_constant
        )
        if found.count("[") + found.count("{") > _DEEPEST or _SURROGATE.search(found):
            _walk(value)
    except RecursionError as problem:
        raise error(f"{where} is nested too deep. {RESTORE}") from problem
    except ValueError as problem:
        raise error(f"{where} is not JSON as clipwise writes it: {_short(str(problem))}. {RESTORE}") from problem
    return value


def read_json(path: str | os.PathLike[str], error: type[ClipwiseError] = DataError) -> Any:
    """The value of a JSON file, as `parse_json` reads it."""
    return parse_json(read_bytes(path, error), os.fspath(path), error)


def checksum(body: Mapping[str, Any]) -> str:
    """Of a JSON object, whatever the order of its fields; its own field "checksum" is left out.

    >>> checksum({"a": 1, "b": 2}) == checksum({"b": 2, "a": 1, "checksum": "sha256:..."}) != checksum({"a": 1})
    True
    """
    rest = {name: value for name, value in body.items() if name != "checksum"}
    canonical = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


class Fields:
    """A JSON object whose fields are asked for by name and kind; one of another kind is an error with its place.

    >>> Fields({"steps": 5}, "result.json").count("steps")
    5
    >>> Fields({"steps": "5"}, "result.json").count("steps")
    Traceback (most recent call last):
    clipwise.errors.DataError: result.json: steps should be an integer of at least 0, got '5'. It was edited, cut or ...
    """

    def __init__(
        self,
        value: object,
        where: str,
        names: Collection[str] | None = None,
        error: type[ClipwiseError] = DataError,
    ) -> None:
        self._where, self._error = where, error
        if not isinstance(value, Mapping):
            raise error(f"{where} should be a JSON object, got {_shown(value)}. {RESTORE}")
        if names is not None and set(value) != set(names):
            odd = ", ".join(sorted(map(str, set(value) ^ set(names))))
            raise error(f"{where} has missing or unknown fields: {_short(odd)}. {RESTORE}")
        self.value: Mapping[str, Any] = value

    def closed(self, names: Collection[str]) -> Fields:
        """The same object, which must have these fields and no others."""
        return Fields(self.value, self._where, names, self._error)

    def fail(self, name: str, expected: str) -> NoReturn:
        """Raise the error about a field."""
        got = _shown(self.value[name]) if name in self.value else "nothing"
        raise self._error(f"{self._where}: {name} should be {expected}, got {got}. {RESTORE}")

    def _get(self, name: str, is_right: Callable[[Any], bool], expected: str) -> Any:
        if name not in self.value or not is_right(self.value[name]):
            self.fail(name, expected)
        return self.value[name]

    def text(self, name: str) -> str:
        """A text."""
        found: str = self._get(name, lambda value: isinstance(value, str), "a text")
        return found

    def count(self, name: str, least: int = 0) -> int:
        """An integer of at least `least`."""
        found: int = self._get(name, lambda value: is_count(value, least), f"an integer of at least {least}")
        return found

    def number(self, name: str, low: float = -math.inf, high: float = math.inf) -> float:
        """A finite number from `low` to `high`."""
        within = "" if (low, high) == (-math.inf, math.inf) else f" from {low:g} to {high:g}"
        return float(self._get(name, lambda value: is_finite(value) and low <= value <= high, f"a number{within}"))

    def many(self, name: str, kind: Callable[[Any], bool], what: str) -> list[Any]:
        """A list of values of one kind, `what` they are in words."""
        found: list[Any] = self._get(
            name, lambda value: isinstance(value, (list, tuple)) and all(map(kind, value)), f"a list of {what}"
        )
        return list(found)

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts."""
        return tuple(self.many(name, lambda value: isinstance(value, str), "texts"))

    def object(self, name: str, names: Collection[str] | None = None) -> Fields:
        """An object within, with these `names` and no others, if they are given."""
        return Fields(self.value.get(name), f"{self._where}: {name}", names, self._error)

    def objects(self, name: str) -> dict[str, Fields]:
        """An object of objects."""
        inner = self.object(name)
        return {key: inner.object(key) for key in inner.value}

    def is_null(self, name: str) -> bool:
        """Whether the field is there and says nothing."""
        return name in self.value and self.value[name] is None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a field is given twice")
    return made


def _integer(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _number(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{_short(digits)} is larger than a number can be")
    return value


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _walk(value: Any) -> None:
    """Refuse what is nested too deep, and texts that no file can hold; without recursion of its own."""
    level: list[Any] = [value]
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for each in level:
            if isinstance(each, str):
                _check_text(each)
            elif isinstance(each, dict):
                _check_text("".join(each))
                below += each.values()
            elif isinstance(each, list):
                below += each
        if not below:
            return
        level = below
    raise RecursionError


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("half a character in a text") from None


def _shown(value: object) -> str:
    """A value for a message: its beginning, or its kind where it is large."""
    if isinstance(value, (Mapping, list, tuple)):
        return f"{'an object' if isinstance(value, Mapping) else 'a list'} of {len(value)}"
    return _short(repr(value) if not isinstance(value, int) or abs(value) < 10**_SHOWN else "a very large integer")


def _short(text: str) -> str:
    return text if len(text) <= 2 * _SHOWN else f"{text[: 2 * _SHOWN]}..."
