"""TOML that is read strictly: every key is asked for by name and kind, and what nobody asked for is an error."""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from clipwise._validate import is_line
from clipwise.errors import InvalidConfig

__all__ = ["TomlTable", "TomlText", "inline", "nearest", "write"]

Default = TypeVar("Default")

_HEADER = re.compile(r"\s*\[\[?(?P<key>[^\[\]]+)\]\]?\s*(?:#.*)?$")
_ENTRY = re.compile(r"""\s*(?P<key>(?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")
_PART = re.compile(r"""[\w-]+|"[^"]*"|'[^']*'""")
_BARE = re.compile(r"[A-Za-z0-9_-]+")

_NAMES: dict[type, str] = {
    dict: "a table",
    list: "an array",
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
}


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence that says what was probably meant, or what there is.

    >>> nearest("epsilom", ["epsilon", "delta"])
    "did you mean 'epsilon'?"
    >>> nearest("zzz", ["epsilon", "delta"])
    'there are delta, epsilon.'
    """
    names = sorted(known)
    folded = {each.casefold(): each for each in names}
    close = difflib.get_close_matches(name.casefold(), folded, n=1)
    return f"did you mean {folded[close[0]]!r}?" if close else f"there are {', '.join(names)}."


@dataclass(frozen=True)
class TomlText:
    """The text of a configuration, what was read from it, and what was set on the command line instead."""

    name: str
    text: str
    values: Mapping[str, Any]
    overrides: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: str | Path, overrides: Sequence[str] = ()) -> TomlText:
        """Read a file; `overrides` are like `clip.R=0.5`, a TOML value or a bare word."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidConfig(f"the configuration {path} cannot be read: {error}.") from error
        return cls.parse(text, str(path), overrides)

    @classmethod
    def parse(cls, text: str, name: str = "configuration", overrides: Sequence[str] = ()) -> TomlText:
        """Read a text.

        >>> TomlText.parse("steps = 5", overrides=["clip.rule=Abadi", "steps=7"]).values
        {'steps': 7, 'clip': {'rule': 'Abadi'}}
        """
        try:
            values = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # ValueError: also a number of more digits than Python reads
            raise InvalidConfig(f"{name} is not TOML: {error}.") from error
        for override in overrides:
            _override(values, override)
        source = cls(name, text, values, tuple(overrides))
        source._check_extent()
        return source

    def _check_extent(self) -> None:
        """Refuse what nothing in a configuration needs: values nested ever deeper, and integers beyond 64 bits."""
        level: list[tuple[tuple[str, ...], Any]] = [((), self.values)]
        for _ in range(_DEEPEST):
            level = [inner for path, value in level for inner in _inside(path, value)]
            for path, value in level:
                if type(value) is int and abs(value) > _LARGEST:
                    what = f"an integer of {value.bit_length()} bits; there are 64 at most."
                    raise InvalidConfig(f"{self.where(path)}: {'.'.join(path)}: {what}")
        if any(isinstance(value, (dict, list)) for _, value in level):
            where = self.where(level[0][0])
            raise InvalidConfig(f"{where}: tables or arrays are more than {_DEEPEST} deep, which no key needs.")

    def where(self, path: Sequence[str]) -> str:
        """The place of a key for an error message: the file and, where it is found, the line."""
        dotted = ".".join(path)
        for override in self.overrides:
            if (dotted + ".").startswith(override.partition("=")[0].strip() + "."):
                return f"--set {override}"
        line = _line_of(self.text, tuple(path))
        return self.name if line is None else f"{self.name}, line {line}"

    def effective(self, **needed: Any) -> str:
        r"""The text, or with overrides the values as they are in force; before it what is `needed` and not in it.

        >>> TomlText.parse("steps = 5  # few").effective(name="a", steps=7)
        'name = "a"\nsteps = 5  # few'
        """
        absent = {key: value for key, value in needed.items() if key not in self.values}
        if self.overrides:
            return write({**absent, **self.values})
        return f"{inline(absent)}\n{self.text}" if absent else self.text

    def preferring(self, *rivals: str) -> TomlText:
        """Of keys that exclude each other, one that was set on the command line displaces those of the file.

        >>> TomlText.parse("epochs = 5", overrides=["steps=7"]).preferring("steps", "epochs").values
        {'steps': 7}
        """
        given = {override.partition("=")[0].strip() for override in self.overrides}
        if given.isdisjoint(rivals):
            return self
        kept = {key: value for key, value in self.values.items() if key not in rivals or key in given}
        return replace(self, values=kept)

    def root(self) -> TomlTable:
        """The whole configuration as a table to be read."""
        return TomlTable(self, self.values, ())


def _override(values: dict[str, Any], text: str) -> None:
    dotted, equals, given = text.partition("=")
    keys = [part.strip() for part in dotted.split(".")]
    if not equals or not all(keys):
        raise InvalidConfig(f"--set needs KEY=VALUE, such as clip.R=0.5, got {text!r}.")
    if not is_line(text):
        raise InvalidConfig(f"--set {text!r} has a control character. Use a text that can be printed on one line.")
    try:
        value = tomllib.loads(f"value = {given}")["value"]
    except tomllib.TOMLDecodeError:
        value = given.strip()  # a bare word: --set model.kind=mlp
    except (ValueError, RecursionError) as error:
        raise InvalidConfig(f"--set {text}: {error}.") from error
    table = values
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise InvalidConfig(f"--set {text}: {key!r} is not a table.")
    table[keys[-1]] = value


def _inside(path: tuple[str, ...], value: Any) -> list[tuple[tuple[str, ...], Any]]:
    """What lies in a table or an array, with the path of its key."""
    if isinstance(value, dict):
        return [((*path, key), item) for key, item in value.items()]
    return [(path, item) for item in value] if isinstance(value, list) else []


def _line_of(text: str, path: tuple[str, ...]) -> int | None:
    """The line that names the longest part of `path` (a key in an inline table is on its table's line)."""
    best: tuple[int, int] | None = None
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), start=1):
        header, entry = _HEADER.match(line), _ENTRY.match(line)
        if header:
            table = found = _parts(header["key"])
        elif entry:
            found = (*table, *_parts(entry["key"]))
        else:
            continue
        if found == path[: len(found)] and (best is None or len(found) > best[0]):
            best = (len(found), number)
    return None if best is None else best[1]


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in _PART.findall(dotted))


_REQUIRED: Any = object()
_LARGEST = 2**63 - 1  # TOML promises no more
_DEEPEST = 12


@dataclass
class TomlTable:
    """A table whose keys are asked for one by one; `close` refuses those that nobody asked for.

    >>> table = TomlText.parse("steps = 5").root()
    >>> table.integer("steps")
    5
    """

    source: TomlText
    values: Mapping[str, Any]
    path: tuple[str, ...]
    _asked: dict[str, None] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def fail(self, name: str | None, message: str) -> NoReturn:
        """Raise an error about a key (or the whole table), with its place."""
        path = self.path if name is None else (*self.path, name)
        what = f"{'.'.join(path)}: " if path else ""
        raise InvalidConfig(f"{self.source.where(path)}: {what}{message}")

    def _get(self, name: str, default: Any, kind: type[Any]) -> Any:
        self._asked[name] = None
        if name not in self.values:
            if default is _REQUIRED:
                self._missing(name, kind)
            return default
        value = self.values[name]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            self.fail(name, f"expected {_NAMES[kind]}, got {_shown(value)}.")
        return value

    def _missing(self, name: str, kind: type[Any]) -> NoReturn:
        wrong = difflib.get_close_matches(name, [key for key in self.values if key not in self._asked], n=1)
        if wrong:
            self.fail(wrong[0], f"there is no such key; did you mean {name!r}?")
        self.fail(None, f"{name!r} is missing; it is {_NAMES[kind]}.")

    def text(self, name: str, default: Default = _REQUIRED, choices: Iterable[str] | None = None) -> str | Default:
        """A string, one of `choices` if these are given."""
        value: str | Default = self._get(name, default, str)
        known = None if choices is None else list(choices)
        if known is not None and name in self.values and value not in known:
            self.fail(name, f"{value!r} is not known; {nearest(str(value), known)}")
        if name in self.values and not str(value).strip():
            self.fail(name, "is an empty string.")
        if isinstance(value, str) and not is_line(value):
            self.fail(name, f"has a control character: {value!r}. Use a text that can be printed on one line.")
        return value

    def integer(self, name: str, default: Default = _REQUIRED, least: int = 1) -> int | Default:
        """An integer of at least `least`."""
        value: int | Default = self._get(name, default, int)
        if name in self.values and isinstance(value, int) and value < least:
            self.fail(name, f"must be at least {least}, got {value}.")
        return value

    def number(
        self, name: str, default: Default = _REQUIRED, *, above: float = 0.0, below: float = math.inf
    ) -> float | Default:
        """A finite number within (above, below)."""
        value: float | Default = self._get(name, default, float)
        if name in self.values and isinstance(value, float) and not (math.isfinite(value) and above < value < below):
            limit = "" if below == math.inf else f" and under {below:g}"
            self.fail(name, f"must be a finite number over {above:g}{limit}, got {value:g}.")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value: bool = self._get(name, default, bool)
        return value

    def texts(self, name: str, default: Default) -> tuple[str, ...] | Default:
        """An array of strings, as a tuple."""
        values: tuple[str, ...] | Default = self._array(name, default, str)
        return values

    def labels(self, name: str) -> tuple[str, ...] | None:
        """An array of strings or integers, as strings; None when it is missing."""
        values = self._get(name, None, list)
        for value in values or ():
            if type(value) not in (str, int):
                self.fail(name, f"expected an array of strings or integers, found {_shown(value)} in it.")
        return None if values is None else tuple(map(str, values))

    def integers(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """An array of positive integers, as a tuple."""
        values: tuple[int, ...] = self._array(name, default, int)
        if name in self.values and any(value < 1 for value in values):
            self.fail(name, f"its integers must be at least 1, got {list(values)}.")
        return values

    def numbers(self, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """A finite number or an array of them, as a tuple."""
        self._asked[name] = None
        given = self.values.get(name, default)
        values = tuple(given) if isinstance(given, (list, tuple)) else (given,)
        for value in values:
            if type(value) not in (int, float) or not math.isfinite(value):
                self.fail(name, f"expected a number or an array of them, got {_shown(value)}.")
        if not values:
            self.fail(name, "is an empty array.")
        return tuple(map(float, values))

    def _array(self, name: str, default: Any, kind: type[Any]) -> Any:
        values = self._get(name, default, list)
        if name not in self.values:
            return values
        for value in values:
            if type(value) is not kind:
                self.fail(name, f"expected an array of {_NAMES[kind].split()[-1]}s, found {_shown(value)} in it.")
        return tuple(values)

    def table(self, name: str) -> TomlTable:
        """A table within; an empty one when it is missing."""
        return TomlTable(self.source, self._get(name, {}, dict), (*self.path, name))

    def raw(self, name: str) -> Any:
        """A value of any kind, None when it is missing."""
        self._asked[name] = None
        return self.values.get(name)

    def tables(self) -> dict[str, TomlTable]:
        """All that is in this table, each a table itself, under names of the user's."""
        return {name: self.table(name) for name in self.values}

    def rest(self) -> dict[str, Any]:
        """Whatever was not asked for, to be checked by the caller."""
        left = {name: value for name, value in self.values.items() if name not in self._asked}
        self._asked.update(dict.fromkeys(left))
        return left

    def close(self) -> None:
        """Refuse keys that were not asked for."""
        for name in self.values:
            if name not in self._asked:
                where = f"[{'.'.join(self.path)}]" if self.path else "the configuration"
                self.fail(name, f"{where} has no such key; {nearest(name, self._asked)}")


def _shown(value: Any) -> str:
    return f"{_NAMES.get(type(value), type(value).__name__)} ({value!r})"


def write(values: Mapping[str, Any]) -> str:
    """The TOML text of nested tables; comments of a file it came from are lost.

    >>> print(write({"steps": 5, "clip": {"rule": "Abadi", "R": 0.1}}), end="")
    steps = 5
    <BLANKLINE>
    [clip]
    rule = "Abadi"
    R = 0.1
    """
    return "\n".join(_lines(values, ())).lstrip("\n") + "\n"


def _lines(values: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    lines = [f"{_key(k)} = {_value(v)}" for k, v in values.items() if not isinstance(v, Mapping)]
    if path and (lines or not values):
        lines = ["", f"[{'.'.join(map(_key, path))}]", *lines]
    for name, value in values.items():
        if isinstance(value, Mapping):
            lines += _lines(value, (*path, name))
    return lines


def inline(values: Mapping[str, Any]) -> str:
    """The TOML text of entries, one on a line; a table among them stands in braces.

    >>> print(inline({"age": {"kind": "number", "low": 17}}))
    age = { kind = "number", low = 17 }
    """
    return "\n".join(f"{_key(name)} = {_value(value)}" for name, value in values.items())


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
