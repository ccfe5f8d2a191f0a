"""CIFAR-10's recipe: networks with public weights, the cache of their features, the grid, and the whole quick form."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from clipwise.data import DataSet
from clipwise.errors import DataError
from papers.cifar10 import features as kept
from papers.cifar10 import grid, networks, page
from papers.cifar10.page import findings
from papers.cifar10.study import LARGE, SMALL, cells, study
from tests.conftest import HANG

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random vision transformer of one layer, as save_pretrained writes it, with a head of another size."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("networks") / "small_vit"
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=8,
        num_labels=3,
    )  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.4] * 3, "image_std": [0.2] * 3}))
    return folder


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> DataSet:
    """Thirty images in the place of CIFAR-10, shards of eight, and an empty cache folder."""
    x, y = torch.rand(30, 3, 32, 32, generator=torch.Generator().manual_seed(1)), torch.arange(30) % 10
    parts = TensorDataset(x[:20], y[:20]), TensorDataset(x[20:], y[20:])
    data = DataSet("cifar10", "classification", *parts, classes=tuple(map(str, range(10))))
    monkeypatch.setattr(kept, "load", lambda name: data)
    monkeypatch.setattr(kept, "SHARD", 8)
    monkeypatch.setenv("CLIPWISE_DATA", str(tmp_path / "cache"))
    kept.features.cache_clear()
    kept.images.cache_clear()
    yield data
    kept.features.cache_clear()
    kept.images.cache_clear()


def test_a_vision_transformer_sees_images_at_its_own_size_and_scale(vit: Path) -> None:
    images = torch.rand(2, 3, 32, 32)
    model, seen = networks.classifier(str(vit)), networks.extractor(str(vit))
    assert model(images).shape == (2, 10) and seen(images).shape == (2, 8)
    assert (model.side, model.mean, model.std) == (16, 0.4, 0.2)
    inner = seen.network.vit((nn.functional.interpolate(images, size=(16, 16), mode="bilinear") - 0.4) / 0.2)
    assert torch.allclose(seen(images), inner.last_hidden_state[:, 0])
    with pytest.raises(DataError, match="16 pixels"):
        networks.classifier(str(vit), side=32)


def test_scaling_that_differs_between_channels_is_refused(vit: Path, tmp_path: Path) -> None:
    for file in vit.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1, 0.2, 0.3]}))
    with pytest.raises(DataError, match="one mean"):
        networks.extractor(str(tmp_path))


def test_efficientnet_is_scaled_as_it_was_trained_and_stays_in_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    package = pytest.importorskip("efficientnet_lite_pytorch")
    torch.manual_seed(0)
    monkeypatch.setattr(networks, "efficientnet_lite0", lambda: package.EfficientNet.from_name("efficientnet-lite0"))
    model = networks.classifier("efficientnet_lite0", side=64).train()
    assert not any(module.training for module in model.modules())
    images = torch.rand(1, 3, 64, 64)
    assert torch.allclose((images - model.mean) / model.std, (255 * images - 127) / 128, atol=1e-6)
    assert model(images).shape == (1, 10)
    assert networks.extractor("efficientnet_lite0").side == 224


def test_the_tiny_network_has_the_same_weights_whatever_the_seed() -> None:
    torch.manual_seed(1)
    first = networks.extractor("tiny").state_dict()
    torch.manual_seed(2)
    second = networks.extractor("tiny").state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_features_are_those_of_the_network_and_are_computed_once(
    few: DataSet, vit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = kept.features(str(vit))
    direct = networks.extractor(str(vit))(few.train.tensors[0])
    assert torch.allclose(data.train.tensors[0], direct, atol=1e-2) and data.shape == (8,)
    assert torch.equal(data.train.tensors[1], few.train.tensors[1]) and len(data.test) == 10
    kept.features.cache_clear()
    monkeypatch.setattr(kept, "compute", lambda *args: pytest.fail("computed again"))
    assert torch.equal(kept.features(str(vit)).train.tensors[0], data.train.tensors[0])


def test_an_interrupted_computation_goes_on(few: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    model, compute, done = networks.extractor("tiny"), kept.compute, []

    def interrupted(*args: object) -> np.ndarray:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(args[2])
        return compute(*args)

    monkeypatch.setattr(kept, "compute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kept.cached("tiny", model)
    (folder,) = (Path(os.environ["CLIPWISE_DATA"]) / "features").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["train-00000.npz", "train-00008.npz"]
    calls = []
    monkeypatch.setattr(kept, "compute", lambda *args: calls.append(args[2]) or compute(*args))
    assert kept.cached("tiny", model) == folder
    assert calls == [16, 0, 8]  # the rest of the training part, then the test part
    assert len(kept.features("tiny").train) == 20


def test_a_lost_shard_is_computed_again(few: DataSet) -> None:
    model = networks.extractor("tiny")
    folder = kept.cached("tiny", model)
    before = np.load(folder / "train-00008.npz")["x"]
    (folder / "train-00008.npz").unlink()
    assert kept.cached("tiny", model) == folder
    assert np.array_equal(np.load(folder / "train-00008.npz")["x"], before)


def test_other_weights_have_another_folder(few: DataSet) -> None:
    model = networks.extractor("tiny")
    first = kept.cached("tiny", model)
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    second = kept.cached("tiny", model)
    assert first != second
    assert json.loads((first / "made_of.json").read_text()) != json.loads((second / "made_of.json").read_text())


def test_a_subset_of_the_images_says_so(few: DataSet) -> None:
    data = kept.images(records=7, test_records=3)
    assert (len(data.train), len(data.test)) == (7, 3) and "first 7 training and 3 test" in data.note


def test_both_styles_of_a_cell_have_the_same_sensitivity(tmp_path: Path) -> None:
    from clipwise.training import Config

    made = {}
    for style in ("flat", "layerwise"):
        cell = grid.Cell(style, 5, 3.0, 0.1, 0)
        config = Config.load(ROOT / "papers/cifar10/config.toml", cell.overrides())
        made[style] = config.clip.at(0, 5).sensitivity(["hidden1", "output"])
    assert made["flat"] == pytest.approx(made["layerwise"]) == pytest.approx(3.0)


@pytest.mark.slow
def test_a_grid_goes_on_and_marks_what_diverged(tmp_path: Path) -> None:
    settings = ["data.options.network=tiny", "data.options.synthetic=true", "batch_size=100"]
    config, path = ROOT / "papers/cifar10/config.toml", tmp_path / "grid.json"
    good, bad = grid.Cell("flat", 2, 1.0, 0.1, 0), grid.Cell("flat", 2, 1e20, 1e20, 0)
    grid.complete([good], path, config, settings, 1)
    first = json.loads(path.read_text())["cells"]
    rows = grid.complete([good, bad], path, config, settings, 1)
    assert len(rows) == 2 and first[0] in rows
    fine, lost = grid.points(rows, "flat", 2)
    assert 0 <= fine.metrics["mce"].mean <= 1 and fine.metrics["mce"] == fine.metrics["mce15"]
    assert math.isnan(lost.metrics["accuracy"].mean)


def cell_rows(style: str, accuracies: dict[float, list[float]]) -> list[dict[str, Any]]:
    """The rows of a grid with one learning rate, 1 / R, and a seed for every accuracy."""
    metrics = dict.fromkeys(grid.METRICS, 0.1)
    return [
        {**asdict(grid.Cell(style, 50, R, 1 / R, seed)), **metrics, "accuracy": accuracy}
        for R, values in accuracies.items()
        for seed, accuracy in enumerate(values)
    ]


def test_a_grid_that_was_cut_decides_nothing_yet() -> None:
    flat = cell_rows("flat", {0.1: [0.8, 0.81], 1.0: [0.7, 0.71]})
    assert findings({}, []) == findings({}, flat) == findings({}, flat + cell_rows("layerwise", {0.1: [0.8]})) == []
    assert page.grid(flat, Path("nowhere")) == ""


@pytest.mark.parametrize(
    ("flat", "layered", "verdicts"),
    [
        ({0.1: [0.80, 0.81], 10.0: [0.70, 0.71]}, {0.1: [0.75, 0.76], 10.0: [0.6, 0.61]}, [True, True, True]),
        (
            {0.1: [0.80, 0.81], 10.0: [0.79, 0.81]}, {0.1: [0.75, 0.76], 10.0: [0.79, 0.81]},
            [True, "not clear: R = 10 cannot be distinguished from the best", "for R = 0.1"],
        ),
        ({0.1: [0.80, 0.81], 1.0: [0.7, 0.71]}, {0.1: [0.8, 0.81], 1.0: [0.7, 0.71]}, [True, True, False]),
    ],
    ids=["clear", "within the spread", "norms of the quick form"],
)  # fmt: skip
def test_what_the_grid_says(flat: dict[float, Any], layered: dict[float, Any], verdicts: list[Any]) -> None:
    found = findings({}, cell_rows("flat", flat) + cell_rows("layerwise", layered))
    assert [each.holds for each in found] == verdicts


def test_styles_are_compared_seed_by_seed() -> None:
    """The seeds are far apart, and layerwise clipping is a little worse with each."""
    flat, layered = {0.1: [0.70, 0.75, 0.80]}, {0.1: [0.69, 0.739, 0.79]}
    *_, last = findings({}, cell_rows("flat", flat) + cell_rows("layerwise", layered))
    assert last.holds is True and "same seed, in points: R = 0.1: -1.03 ± 0.06" in last.here
    *_, last = findings({}, cell_rows("flat", flat) + cell_rows("layerwise", {0.1: [0.69, 0.76, 0.79]}))
    assert last.holds is False


@pytest.mark.parametrize(
    "content", ["", "[{]", "{}", "[1]", '{"made_of": "a", "cells": [1]}', '{"cells": [{"style": "flat"}]}', b"\xff"]
)
def test_a_damaged_grid_is_told(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "grid.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match="is damaged: restore it"):
        grid.read(path, "a")
    assert grid.read(tmp_path / "other.json", "a") == []


def test_cells_of_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    path.write_text(json.dumps({"made_of": "a", "cells": cell_rows("flat", {1.0: [0.5]})}))
    assert len(grid.read(path, "a")) == 1
    with pytest.raises(DataError, match="other settings"):
        grid.read(path, "b")


@pytest.mark.parametrize("damage", ["train-00008.npz", "made_of.json"])
def test_a_damaged_cache_is_told(few: DataSet, damage: str) -> None:
    folder = kept.cached("tiny", networks.extractor("tiny"))
    (folder / damage).write_bytes((folder / damage).read_bytes()[:40])
    with pytest.raises(DataError, match=f"{damage} is damaged .*remove it"):
        kept.features("tiny")


def test_a_stray_shard_is_not_read(few: DataSet) -> None:
    folder = kept.cached("tiny", networks.extractor("tiny"))
    (folder / "train-99999.npz").write_bytes((folder / "train-00000.npz").read_bytes())
    assert len(kept.features("tiny").train) == 20


def test_every_private_arm_moves_by_the_same_noise() -> None:
    for arm in study().arms:
        if f"clip.R={SMALL}" in arm.overrides or f"clip.R={LARGE}" in arm.overrides:
            assert any(setting.endswith('/ R"') for setting in arm.overrides), arm.name
    assert len({(cell.style, cell.R, cell.rate, cell.seed) for cell in cells(False, None)}) == len(cells(False, None))


def test_fine_tuning_a_vision_transformer_through_the_recipe(vit: Path, tmp_path: Path) -> None:
    from clipwise.training import Config, train

    arm = study(str(vit), quick=True).arms[-1]
    config = Config.load(ROOT / "papers/cifar10/config.toml", [*arm.overrides, "seed=0"])
    run, _ = train(config, output=tmp_path / "run", page=False)
    assert run.is_private and "fine-tuned" in arm.name
    assert run.provenance["parameters"] == sum(p.numel() for p in networks.classifier(str(vit)).parameters())


@pytest.mark.slow
def test_the_quick_form_runs_without_a_network_and_says_what_it_is(tmp_path: Path) -> None:
    environment = {**os.environ, "CLIPWISE_DATA": str(tmp_path), "CLIPWISE_OFFLINE": "1"}
    before = sorted((ROOT / "papers/cifar10").rglob("*"))
    done = subprocess.run(
        [sys.executable, "-m", "papers.cifar10", "--quick", "--jobs", "1"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "synthetic images" in done.stdout and "97.17 %" in done.stdout and "fine-tuned" in done.stdout
    assert [path for path in sorted((ROOT / "papers/cifar10").rglob("*")) if "__pycache__" not in str(path)] == [
        path for path in before if "__pycache__" not in str(path)
    ]
