"""`clipwise data` and what a person sees of a fetch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clipwise.cli.main import main
from clipwise.data import catalog
from tests.data.common import FIRST, Clients, Web, entry


@pytest.fixture(autouse=True)
def small(cache: Path, web: Web, clients: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalogue of digits and one small entry."""
    monkeypatch.setattr(catalog, "CATALOG", {"digits": catalog.CATALOG["digits"], "small": entry()})


def result(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> list[dict[str, object]]:
    assert main(["data", *argv, "--json"]) == code
    return list(json.loads(capsys.readouterr().out))


def test_list_shows_what_is_there_and_what_could_be(web: Web, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digits, small = result(capsys, "list")
    assert digits["present"] and digits["source"] == "scikit-learn"
    assert not small["present"] and small["bytes_to_fetch"] and small["licence"] == "CC0"
    assert small["sources"] == ["https://example.org/small/", "pip download small==1"]
    web.serve()
    assert main(["data", "get", "small"]) == 0
    capsys.readouterr()
    assert main(["data", "list"]) == 0
    shown = capsys.readouterr().out
    for part in ("small", "CC0", "yes", "2.4 kB", f"small is in {cache}, from https://example.org/small/", "In small."):
        assert part in shown


def test_get_fetches_and_tells(web: Web, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    web.serve()
    assert main(["data", "get", "small", "digits"]) == 0
    out, err = capsys.readouterr()
    assert f"small: 2.4 kB in {cache}, from https://example.org/small/" in out and "digits: Part of scikit-learn" in out
    assert err.startswith("fetching Small (2.5 kB): https://example.org/small/\n") and "SHA-256 checked" in err
    (small,) = result(capsys, "get", "small")
    assert small["present"] and small["folder"] == str(cache)


def test_get_without_a_network_is_one_line_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "get", "small"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("clipwise: error: Small is not available. Tried:")


@pytest.mark.parametrize("argv", [["get"], ["get", "unknown"], ["verify", "unknown"], ["lst"], []])
def test_bad_usage_is_2(argv: list[str]) -> None:
    assert main(["data", *argv]) == 2


def test_verify_finds_damage(web: Web, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [row["state"] for row in result(capsys, "verify")] == ["ok", "absent"]
    assert [row["state"] for row in result(capsys, "verify", "small", code=1)] == ["absent"]
    web.serve()
    assert main(["data", "get", "small"]) == 0
    capsys.readouterr()
    assert [row["state"] for row in result(capsys, "verify", "small")] == ["ok"]
    (cache / "first").write_bytes(FIRST + b"!")
    (row,) = result(capsys, "verify", "small", code=1)
    assert row["state"] == "damaged" and not row["usable"]
    assert main(["data", "verify"]) == 1
    assert f"{cache / 'first'} is damaged" in capsys.readouterr().out
