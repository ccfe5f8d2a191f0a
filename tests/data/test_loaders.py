"""Bytes into tensors: small files made here, and the real ones when they are at hand (nothing is fetched)."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from clipwise.data import DataSet, Pairs, TextDataSet, convert, load, load_text, trim
from clipwise.data.catalog import entry
from clipwise.data.dataset import split
from clipwise.data.images import cifar, idx_parts
from clipwise.data.loaders import _read
from clipwise.data.store import Found, find
from clipwise.data.tables import ADULT, adult, housing, wine
from clipwise.data.text import imdb, snli, snli_from_zip
from clipwise.errors import DataError


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


def test_adult_is_encoded_by_its_schema() -> None:
    header = [*(column.name for column in ADULT.columns), "income-per-year", "fnlwgt"]
    row = ["17", "16", "0", "4000", "50", "?", "Divorced", "Sales", "Wife", "Other", "Male", ">50K", "1"]
    text = "\n".join(",".join(line) for line in (header, *[row] * 5)).encode()
    train, test = adult(text)
    assert (len(train), len(test)) == (4, 1) and test.tensors[1].tolist() == [1]
    assert train.tensors[0].shape == (4, ADULT.width) and train.tensors[0][0, :5].tolist() == [-1, 1, -1, 1, 0]
    assert train.tensors[0][0, 5:].sum() == 5, "one category of every column but the one that is missing"


@pytest.mark.slow
def test_real_tables_when_they_are_at_hand() -> None:
    for name in ("wine_quality_red", "california_housing", "adult"):
        if find(entry(name), check=False) is None:
            pytest.skip(f"{name} is in no cache folder")
    data = load("wine_quality_red")
    scores = torch.cat([data.train.tensors[1], data.test.tensors[1]]).long().bincount()
    assert scores.tolist() == [0, 0, 0, 10, 53, 681, 638, 199, 18] and len(data.test) == 320
    data = load("california_housing")
    assert len(data.train) + len(data.test) == (20_433 if data.note else 20_640)
    data = load("adult")
    assert torch.cat([data.train.tensors[1], data.test.tensors[1]]).bincount().tolist() == [24_720, 7_841]


@pytest.mark.slow
def test_real_text_when_it_is_at_hand() -> None:
    if find(entry("snli"), check=False) is None:
        pytest.skip("snli is in no cache folder")
    data = load_text("snli")
    assert len(data.test) == 9_824 and len(data.train) == (99_890 if "subset" in data.note else 549_367)
