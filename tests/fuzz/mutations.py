"""Seeded damage: to bytes of any kind, and to what lies in JSON, TOML, CSV, zip, npy and safetensors files.

A mutation is a function of bytes and a `random.Random`. One that knows a format gives the bytes back unchanged where
they are not of that format any more, since several mutations follow each other.
"""

from __future__ import annotations

import copy
import csv
import io
import json
import re
import struct
import tomllib
import warnings
import zipfile
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np

from clipwise.training.config.toml import write

__all__ = [
    "BYTES", "CSV", "NPZ", "SAFETENSORS", "TEXT", "TOML", "Mutation", "damaged_npy",
    "in_archive", "json_mutations", "mutated",
]  # fmt: skip

Mutation = Callable[[bytes, Random], bytes]

_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_NUMBERS = (
    *(b"0", b"-1", b"-0.0", b"1e400", b"-1e400", b"1e-400", b"nan", b"NaN", b"inf", b"-inf", b"Infinity", b"-Infinity"),
    *(b"2147483648", b"9223372036854775808", b"1000000000000", b"18446744073709551616", b"1e308", b"0.1", b"1_000"),
    *(b"9" * 5_000, b"1" + b"0" * 400, b"0x" + b"f" * 5_000, b"-" + b"7" * 4_000, b"0b1", b"1979-05-27", b"07:32:00"),
)
_WORDS = (
    *(
        "",
        " ",
        "\x00",
        "\x1b[31m",
        "\r\n",
        "\u202e",
        "\ufeff",
        "é",
        "𝔘",
        "a" * 10_000,
        "nan",
        "inf",
        "1e999",
        "-1",
        "0",
    ),
    *('"', "'", ",", ";", "=", "#", "$tensor", "$float", "kind", "mapping", "../../x", "none", "true", "9" * 5_000),
    *("\x7f\x9b", "x\ny", "%s{0}", "١٢", "1_0", "0x10", "_"),
)
_JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**12, 10**400, 10**4_000, 0.5, -0.0, 1e308, -1e308, 5e-324),
    *(float("nan"), float("inf"), float("-inf"), [], {}, [[]], [None], [0, 1], {"": {}}, {"kind": "mapping"}),
    *({"kind": "Poisson"}, {"kind": "mapping", "items": [[1]]}, {"$tensor": 9}, {"$float": "x"}, {"$dict": [[]]}),
    *({"$dict": [[[], 1]]}, {"$tuple": 1}, {"a": 1, "b": 2}, [1e308] * 3, "nan", "exact", "classification"),
)
_LARGEST = 1 << 21
"""Bytes of a damaged file: limits of time and memory are for files up to this size."""
_DEPTHS = (3, 60, 2_000, 100_000)


# Bytes of any kind


def flip(data: bytes, random: Random) -> bytes:
    """Single bits turned."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8))):
        if changed:
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def overwrite(data: bytes, random: Random) -> bytes:
    """A few bytes replaced by zeros, ones or noise."""
    size = random.choice((1, 2, 4, 8, 16))
    at = random.randrange(len(data) + 1)
    fill = random.choice((bytes(size), b"\xff" * size, b"\x7f" * size, random.randbytes(size)))
    return data[:at] + fill + data[at + size :]


def truncate(data: bytes, random: Random) -> bytes:
    """Cut, at either end."""
    at = random.randrange(len(data) + 1)
    return data[:at] if random.random() < 0.8 else data[at:]


def insert(data: bytes, random: Random) -> bytes:
    """Bytes in between."""
    at = random.randrange(len(data) + 1)
    word = random.choice(_WORDS).encode() if random.random() < 0.5 else random.randbytes(random.choice((1, 4, 40)))
    return data[:at] + word + data[at:]


def splice(data: bytes, random: Random) -> bytes:
    """A part of the file once more, elsewhere: moved, repeated or in the place of another."""
    a, b = sorted(random.randrange(len(data) + 1) for _ in range(2))
    at = random.randrange(len(data) + 1)
    return data[:at] + data[a:b] + data[at + random.choice((0, b - a)) :]


def remove(data: bytes, random: Random) -> bytes:
    """A part left out."""
    a, b = sorted(random.randrange(len(data) + 1) for _ in range(2))
    return data[:a] + data[min(b, a + 64) :]


BYTES: tuple[Mutation, ...] = (flip, overwrite, truncate, insert, splice, remove)


# Text


def number(data: bytes, random: Random) -> bytes:
    """A number replaced by one that is huge, negative, not finite, or of another kind."""
    found = list(_NUMBER.finditer(data))
    if not found:
        return data
    chosen = random.choice(found)
    return data[: chosen.start()] + random.choice(_NUMBERS) + data[chosen.end() :]


def lines(data: bytes, random: Random) -> bytes:
    """A line lost, repeated or moved."""
    parts = data.splitlines(keepends=True)
    if not parts:
        return data
    line = parts[random.randrange(len(parts))]
    if random.random() < 0.5:
        parts.remove(line)
    if random.random() < 0.7:
        parts.insert(random.randrange(len(parts) + 1), line * random.choice((1, 2, 50)))
    return b"".join(parts)


def nested(data: bytes, random: Random) -> bytes:
    """Brackets around a number, or in its place, up to a hundred thousand deep."""
    found = list(_NUMBER.finditer(data))
    depth = random.choice(_DEPTHS)
    opening, closing = random.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"{a=", b"}"), (b"[", b"")))
    at, end = random.choice(found).span() if found else (len(data), len(data))
    return data[:at] + opening * depth + data[at:end] + closing * depth + data[end:]


TEXT: tuple[Mutation, ...] = (number, number, lines, nested)


# Trees: JSON and TOML


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container of a tree with each of its keys."""
    if isinstance(value, dict):
        found = [(value, key) for key in value]
    elif isinstance(value, list):
        found = [(value, k) for k in range(len(value))]
    else:
        return []
    return [*found, *(place for _, key in list(found) for place in _places(value[key]))]


def _wrapped(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def grown(value: Any, random: Random) -> Any:
    """A tree with a value of another type, left out, doubled, renamed, nested or taken from elsewhere."""
    value = copy.deepcopy(value)
    places = _places(value)
    if not places:
        return random.choice(_JUNK)
    home, key = random.choice(places)
    how = random.randrange(8)
    if how <= 2:
        home[key] = random.choice((*_JUNK, random.choice(_WORDS)))
    elif how == 3:
        del home[key]
    elif how == 4 and isinstance(home, dict):
        home[random.choice((*_WORDS, f"{key}{key}", key.upper()))] = home.pop(key)
    elif how == 5 and isinstance(home, list):
        home[key:key] = [home[key]] * random.choice((1, 2, 100))
    elif how == 6:
        home[key] = _wrapped(home[key], random.choice((1, 2, 40)))
    else:
        other, place = random.choice(places)
        home[key] = copy.deepcopy(other[place])
    return value


def json_mutations(seal: Callable[[Any], Any] = lambda value: value) -> tuple[Mutation, ...]:
    """Damage to what a JSON file says; `seal` makes a checksum fit again."""

    def tree(data: bytes, random: Random) -> bytes:
        try:
            return json.dumps(seal(grown(json.loads(data), random)), indent=1).encode()
        except (ValueError, RecursionError, TypeError, AttributeError, KeyError):
            return data

    def twice(data: bytes, random: Random) -> bytes:
        """A field that is given twice."""
        fields = list(re.finditer(rb'"[^"\\]*"\s*:\s*[^,{}\[\]]+,', data))
        if not fields:
            return data
        chosen = random.choice(fields)
        return data[: chosen.end()] + chosen[0] + data[chosen.end() :]

    return (*TEXT, tree, tree, tree, tree, twice)


def _toml_tree(data: bytes, random: Random) -> bytes:
    try:
        changed = grown(tomllib.loads(data.decode()), random)
        return write(changed).encode() if isinstance(changed, dict) else data
    except (ValueError, RecursionError):
        return data


TOML: tuple[Mutation, ...] = (*TEXT, _toml_tree, _toml_tree, _toml_tree, _toml_tree)


# Tables


def _cells(data: bytes, random: Random) -> bytes:
    try:
        rows = [row for row in csv.reader(io.StringIO(data.decode(), newline="")) if row]
    except (UnicodeDecodeError, csv.Error):
        return data
    if not rows:
        return data
    row = random.choice(rows)
    how = random.randrange(7)
    if how <= 2:
        row[random.randrange(len(row))] = random.choice((*_WORDS, random.choice(_NUMBERS).decode()))
    elif how == 3:
        row.insert(random.randrange(len(row) + 1), random.choice(_WORDS))
    elif how == 4:
        del row[random.randrange(len(row))]
    elif how == 5:
        column = random.randrange(len(row))
        for each in rows:
            each.insert(0, each[min(column, len(each) - 1)])
    else:
        wide = random.choice((20, 300, 12_000))
        rows[0] += [f"c{k}" for k in range(wide)]
        for each in rows[1:4]:
            each += ["1"] * wide
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator=random.choice(("\n", "\r\n"))).writerows(rows)
    return text.getvalue().encode("utf-8", "surrogatepass")


CSV: tuple[Mutation, ...] = (*TEXT, _cells, _cells, _cells, _cells)


# Archives of arrays

_TYPES = (
    "<f8",
    "<f4",
    "|O",
    "|S0",
    "<U0",
    "|V8",
    "<c16",
    "<M8[s]",
    "|b1",
    "<i8",
    "<U9999999",
    ">u2",
    "<f2",
    "[('a','<f8')]",
)
_SHAPES = (
    "()",
    "(0,)",
    "(-1,)",
    "(1000000000000,)",
    "(5, 1000000000000)",
    "(1000000000000, 0)",
    "(5.0,)",
    "(5,",
    "'x'",
)
_HEADER = re.compile(rb"'descr': ('[^']*'|\[.*?\])(.*)'shape': (\([^)]*\))")


def damaged_npy(data: bytes, random: Random) -> bytes:
    """An array whose header says another type or shape than its bytes have."""
    if data[:6] != b"\x93NUMPY" or len(data) < 12:
        return data
    size = struct.unpack("<H", data[8:10])[0]
    header, body = data[10 : 10 + size], data[10 + size :]
    found = _HEADER.search(header)
    if found is None or random.random() < 0.2:
        return flip(data, random)
    kind, shape = found[1], found[3]
    if random.random() < 0.5:
        chosen = random.choice(_TYPES)
        kind = (chosen if chosen.startswith("[") else f"'{chosen}'").encode()
    else:
        shape = random.choice(_SHAPES).encode()
    header = header[: found.start()] + b"'descr': " + kind + found[2] + b"'shape': " + shape + header[found.end() :]
    return data[:8] + struct.pack("<H", len(header)) + header + body


def _members(data: bytes) -> dict[str, bytes] | None:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    except Exception:
        return None


def _zipped(members: dict[str, bytes], packed: bool, twice: str | None = None) -> bytes:
    """An archive of these members, one of them perhaps twice."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as archive:
        for name, content in [*members.items(), *([(twice, members[twice])] if twice in members else [])]:
            info = zipfile.ZipInfo(name)
            info.compress_type = archive.compression
            with archive.open(info, "w") as member:
                member.write(content)
    return file.getvalue()


def _arrays(data: bytes, random: Random) -> bytes:
    members = _members(data)
    if not members:
        return data
    name = random.choice(list(members))
    how, twice = random.randrange(8), None
    if how <= 3:
        members[name] = damaged_npy(members[name], random)
    elif how == 4:
        members[random.choice((*_WORDS, "x_train.npy", "y.txt", "../y.npy")).replace("\x00", "")] = members.pop(name)
    elif how == 5:
        twice = name
    elif how == 6:
        members[name] = truncate(members[name], random)
    else:
        array = io.BytesIO()
        np.save(array, np.zeros(random.choice((1, 5, 100_000)), dtype=random.choice(("f4", "i8", "S3", "U2", "?"))))
        members[name] = array.getvalue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name that is there twice
        return _zipped(members, random.random() < 0.5, twice)


def _directory(data: bytes, random: Random) -> bytes:
    """The sizes that the directory of a zip file states, changed."""
    at = data.rfind(b"PK\x01\x02")
    if at < 0 or at + 46 > len(data):
        return data
    field, size = random.choice(((10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (42, 4), (8, 2)))
    value = random.choice((0, 1, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF)) & (256**size - 1)
    return data[: at + field] + value.to_bytes(size, "little") + data[at + field + size :]


NPZ: tuple[Mutation, ...] = (_arrays, _arrays, _arrays, _arrays, _directory)


def _header(data: bytes, random: Random) -> bytes:
    """The JSON at the beginning of a safetensors file, or the length that it states."""
    if len(data) < 8:
        return data
    size = struct.unpack("<Q", data[:8])[0]
    header, body = data[8 : 8 + size], data[8 + size :]
    if random.random() < 0.15:
        stated = random.choice((0, 1, 2**31, 2**62, -1, size - 1, size + 1)) % 2**64
        return struct.pack("<Q", stated) + header + body
    for mutation in random.choices(json_mutations(), k=1):
        header = mutation(header, random)
    return struct.pack("<Q", len(header)) + header + body


SAFETENSORS: tuple[Mutation, ...] = (_header, _header, _header, _header)


def in_archive(name: str, mutations: Sequence[Mutation]) -> Mutation:
    """Damage to one member of a zip file, whose sums are made to fit again."""

    def inside(data: bytes, random: Random) -> bytes:
        start = data.find(b"PK\x03\x04")
        members = _members(data[start:]) if start >= 0 else None
        if not members or name not in members:
            return data
        members[name] = random.choice(mutations)(members[name], random)
        return data[:start] + _zipped(members, random.random() < 0.05)

    return inside


def mutated(corpus: Sequence[bytes], mutations: Sequence[Mutation], random: Random) -> bytes:
    """One damaged file: one of the corpus after one to four mutations, half of them blind to the format."""
    data = random.choice(corpus)
    for _ in range(random.choice((1, 1, 1, 2, 3, 4))):
        data = random.choice(mutations if mutations and random.random() < 0.6 else BYTES)(data, random)
    return data[:_LARGEST]
