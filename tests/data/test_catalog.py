"""The catalogue is complete and consistent: every file has a hash and a way to get it, every package is pinned."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from clipwise.data.catalog import CATALOG, entry
from clipwise.data.convert import cifar_from_png, idx_from_csv
from clipwise.data.dequantise import distilbert_from_onnx, smollm2_from_gguf
from clipwise.data.entries import Entry
from clipwise.data.origins import Address, Debian, Npm, PyPI
from clipwise.errors import DataError

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
    assert entry(name).name == known


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(DataError, match="Did you mean 'cifar10'"):
        entry("cifar100")
    with pytest.raises(DataError, match="There are digits, mnist"):
        entry("imagenet", "data")
    with pytest.raises(DataError, match="there is no weights 'mnist'"):
        entry("mnist", "weights")


def test_the_page_shows_every_entry() -> None:
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    assert not [name for name in CATALOG if f"| `{name}`" not in page]
    for value in ENTRIES:
        for _, source in value.attempts():
            for origin in source.origins:
                package = getattr(origin, "requirement", getattr(origin, "package", "")).split("==")[0].split("@")[0]
                assert f"`{package}`" in page or isinstance(origin, Address)
