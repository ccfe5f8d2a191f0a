"""Files that somebody edited, cut or damaged: each is refused with its place, and none says more than its ledger."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clipwise._json import Fields, parse_json, read_json
from clipwise.errors import DataError, LedgerError

NOT_JSON: dict[str, str | bytes] = {
    "cut": '{"a": 1',
    "empty": "",
    "a constant": '{"a": NaN}',
    "infinite": "[1e999]",
    "5,000 digits": "1" * 5_000,
    "400 digits": "[-" + "1" * 400 + "]",
    "deep": "[" * 100_000,
    "deep, yet parsed": "[" * 300 + "]" * 300,
    "a field twice": '{"a": 1, "a": 2}',
    "not UTF-8": b'{"a": "\xff"}',
    "half a character": '{"a": "\\ud800"}',
    "half a character in a name": '{"\\udfff": 1}',
}


@pytest.mark.parametrize("text", NOT_JSON.values(), ids=NOT_JSON)
def test_json_that_clipwise_does_not_write_is_refused_with_its_place(text: str | bytes) -> None:
    with pytest.raises(LedgerError, match=r"^here .* restore it"):
        parse_json(text, "here", LedgerError)


def test_what_clipwise_writes_is_read() -> None:
    text = '{"a": [1, -2.5e300, null, true, "\\u00e9\\ud83d\\ude00"], "b": {}}'
    assert parse_json(text, "here") == {"a": [1, -2.5e300, None, True, "é\U0001f600"], "b": {}}
    assert parse_json("[" * 200 + "]" * 200, "here")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_only_ordinary_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # nobody writes to it: reading would wait for ever
    for place in (tmp_path / "pipe", tmp_path, tmp_path / "nowhere", tmp_path / "a\0b"):
        with pytest.raises(DataError, match="cannot be read"):
            read_json(place)


@pytest.mark.parametrize("value", [None, "1", True, -1, 1.5, [], 10**299])
def test_a_field_is_of_the_kind_that_is_asked_for(value: object) -> None:
    fields = Fields({"a": value}, "here")
    if value != 10**299:
        with pytest.raises(DataError, match="here: a should be an integer of at least 0, got"):
            fields.count("a")
    for ask in (fields.text, fields.object, lambda name: fields.number(name, 0.0, 1.0)):
        if value != "1" or ask != fields.text:
            with pytest.raises(DataError, match="here: a should be"):
                ask("a")
