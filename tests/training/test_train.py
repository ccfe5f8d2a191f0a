"""A configuration becomes a run: the loop is the one a user would write, and the folder tells what happened."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise import data as data_module
from clipwise.accounting import PrivateCalibration
from clipwise.calibration import CalibrationResult, RegressionResult
from clipwise.data import DataSet, Pairs, TextDataSet
from clipwise.entropy import arm_seed
from clipwise.errors import DataError, InvalidConfig
from clipwise.report import Run, card, clip_norm
from clipwise.training import Config, Progress, prepare, train

from .common import TINY, config

DIGITS = data_module.load("digits")


pytestmark = pytest.mark.usefixtures("exact_only")


def trained(tmp_path: Path, *overrides: str, data: DataSet | None = None, text: str = TINY) -> Run:
    return train(config(*overrides, text=text), output=tmp_path / "run", page=False, data=data)[0]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def own_loop(clip: Any, steps: int, rate: Any, begins_with: float, size: int = 64) -> dict[str, torch.Tensor]:
    """The loop of the documents, by hand. The optimizer at the start labels the coins."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=begins_with)
    plan = cw.Plan(sampling=cw.Poisson(1_297, size), steps=steps, clip=clip, noise_multiplier=1.0)
    private = cw.Private(plan, model, optimizer, seed=arm_seed(3, "tiny"))
    for x, y in private.loader(DIGITS.train, yield_empty=True):
        optimizer.param_groups[0]["lr"] = rate(private)
        private.step(F.cross_entropy(model(x), y, reduction="none") if len(y) else torch.zeros(0))
    names = ("hidden1.weight", "hidden1.bias", "output.weight", "output.bias")
    return dict(zip(names, (p.detach() for p in model.parameters()), strict=True))


def test_the_loop_is_the_one_that_a_user_would_write(finished: tuple[Run, Path]) -> None:
    run, folder = finished
    expected = own_loop(cw.Abadi(1.0), 12, lambda private: 0.5, begins_with=0.5)
    found = weights(folder)
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)
    assert run.ledger is not None and run.ledger.steps == 12
    assert run.guarantees["exact"].epsilon == pytest.approx(cw.epsilon(1.0, cw.Poisson(1_297, 64), 12, 1e-4))


def test_every_check_for_samples_that_mix_is_made(finished: tuple[Run, Path]) -> None:
    """Records of a run are read a whole batch at once; they were not read one by one for longer and shorter ones."""
    run, _ = finished
    assert run.provenance["other_samples"] == (
        "checked with other records at steps 0, 1, 2: no sample moved another's loss or gradient"
    )
    assert not any("Not checked" in warning for warning in run.warnings)


def test_a_card_names_the_noise_as_the_result_does(finished: tuple[Run, Path]) -> None:
    """What looked like a path, std/1024, became 1024."""
    run, _ = finished
    assert "on a grid of about std/1024" in run.provenance["noise"]
    assert run.publishable().provenance["noise"] == run.provenance["noise"] in card(run)


@pytest.mark.slow
def test_the_learning_rate_follows_r_at_the_switch_and_on_empty_batches(tmp_path: Path) -> None:
    clip = "clip={schedule='MixUp', switch_at=0.5, small={rule='Abadi', R=0.5}, large={rule='Abadi', R=4}}"
    trained(tmp_path, clip, "batch_size=1", "steps=30", "optimizer.learning_rate=0.1 / R")
    schedule = cw.MixUp(cw.Abadi(0.5), cw.Abadi(4.0), 0.5)
    expected = own_loop(
        schedule, 30, lambda private: 0.2 if private.steps_done < 15 else 0.025, begins_with=0.1, size=1
    )
    found = weights(tmp_path / "run")
    assert all(torch.allclose(found[name], expected[name], atol=1e-5) for name in expected)


@pytest.mark.usefixtures("figures_in_words")
@pytest.mark.usefixtures("figures_in_words")
def test_the_folder_tells_everything(tmp_path: Path) -> None:
    made, folder = train(config("evaluation.resamples=100"), output=tmp_path / "run", command="clipwise train x")
    names = {"config.toml", "metrics.jsonl", "ledger.json", "result.json", "figures", "model.json", "model.safetensors"}
    assert {path.name for path in folder.iterdir()} == names | {"report.html", "card.md", "data.digest"}
    run = Run.load(folder)
    assert run.test == made.test and run.ledger == made.ledger
    assert run.config == config("evaluation.resamples=100").text
    assert isinstance(run.test, CalibrationResult) and run.test.count == 500 and run.test.intervals is not None
    assert [row["step"] for row in run.curves] == [4, 8, 12]
    last = run.curves[-1]
    assert last["epsilon"] == pytest.approx(run.guarantees["exact"].epsilon)
    assert last["epoch"] == pytest.approx(12 * 64 / 1_297)
    assert last["test"]["accuracy"] == run.test.accuracy and last["test"]["ece"] == pytest.approx(run.test.ece)
    assert set(last["private"]) == {"loss", "fraction_clipped", "norm_median", "batch_size", "bad_samples", "layers"}
    assert set(last["private"]["layers"]) == {"hidden1", "output"}
    assert run.delta == 1e-4 and run.plan.noise_multiplier == 1.0 and run.choices.learning_rate == 0.5
    assert run.provenance["command"] == "clipwise train x" and run.provenance["data"]["records"] == 1_297
    assert run.provenance["parameters"] == 64 * 8 + 8 + 8 * 10 + 10
    # The weights on disk are those that were measured.
    job = prepare(config())
    job.model.load_state_dict(weights(folder))
    accuracy = (job.predict(job.test).argmax(dim=1) == job.test.tensors[-1]).double().mean()
    assert float(accuracy) == run.test.accuracy


def test_what_is_recorded_of_the_private_batch_is_right(tmp_path: Path) -> None:
    text = TINY.replace("every = 4", "every = 1")
    (row,) = trained(tmp_path, "steps=1", "clip.R=0.9", text=text).curves
    job = prepare(config("clip.R=0.9"))
    plan = cw.Plan(sampling=cw.Poisson(1_297, 64), steps=1, clip=cw.Abadi(0.9), noise_multiplier=1.0)
    private = cw.Private(plan, job.model, torch.optim.SGD(job.model.parameters(), lr=0.5), seed=arm_seed(3, "tiny"))
    ((x, y),) = private.loader(DIGITS.train)
    norms = {}
    for layer in ("hidden1", "output"):
        losses = job.losses(job.model, (x, y))
        module = job.model.get_submodule(layer)
        norms[layer] = cw.per_sample_norms(losses, list(module.parameters()))
    whole = torch.stack(list(norms.values())).square().sum(dim=0).sqrt()
    found = row["private"]
    assert found["batch_size"] == len(y) and found["loss"] == pytest.approx(float(losses.detach().mean()), rel=1e-5)
    assert found["fraction_clipped"] == pytest.approx(float((whole > 0.9).double().mean()))
    for layer, statistics in found["layers"].items():
        assert statistics["norm_median"] == pytest.approx(float(norms[layer].median()), rel=1e-4)
        assert statistics["fraction_clipped"] == pytest.approx(found["fraction_clipped"])


@pytest.mark.slow
def test_layerwise_clipping_is_told_layer_by_layer(tmp_path: Path) -> None:
    clip = "clip={style='Layerwise', layers={hidden1={rule='Abadi', R=1e-3}, output={rule='Abadi', R=1e3}}}"
    layers = trained(tmp_path, clip, "steps=4", "privacy={private=false}").curves[-1]["private"]["layers"]
    assert layers["hidden1"]["fraction_clipped"] == 1.0 and layers["output"]["fraction_clipped"] == 0.0


def test_physical_batches_change_nothing(tmp_path: Path) -> None:
    trained(tmp_path / "a", "privacy={private=false}")  # a sum with another rounding gets other noise
    trained(tmp_path / "b", "privacy={private=false}", "physical_batch_size=7")
    one, other = weights(tmp_path / "a" / "run"), weights(tmp_path / "b" / "run")
    assert all(torch.allclose(one[name], other[name], atol=1e-5) for name in one)


def test_a_run_without_privacy_has_no_ledger(tmp_path: Path) -> None:
    run = trained(tmp_path, "privacy={private=false}")
    assert run.ledger is None and run.guarantees == {} and run.delta is None and not run.is_private
    assert not (tmp_path / "run" / "ledger.json").exists()
    assert {row["epsilon"] for row in run.curves} == {None}


def test_a_run_without_a_seed_differs_every_time(tmp_path: Path) -> None:
    text = TINY.replace("seed = 3\n", "")
    runs = [trained(tmp_path / name, text=text) for name in "ab"]
    assert not same(weights(tmp_path / "a" / "run"), weights(tmp_path / "b" / "run"))
    assert [run.seed for run in runs] == [None, None]


def test_epsilon_is_met_together_with_recalibration(tmp_path: Path) -> None:
    methods = (
        "recalibration={methods=['temperature', 'vector', 'isotonic', 'private-temperature'], noise_multiplier=20}"
    )
    run = trained(tmp_path, "privacy={epsilon=2.0, delta=1e-5}", methods)
    assert run.ledger is not None and isinstance(run.ledger.events[-1], PrivateCalibration)
    assert 2.0 * 0.998 < run.guarantees["exact"].epsilon <= 2.0
    assert set(run.recalibrated) == {"temperature", "vector", "isotonic", "private-temperature"}
    # Half of the held-out records are fitted on, and measured is the other half.
    assert {result.count for result in run.recalibrated.values()} == {250} and run.test.count == 250
    before, after = run.test, run.recalibrated["temperature"]
    assert isinstance(before, CalibrationResult) and after.nll < before.nll and after.accuracy == before.accuracy


def test_records_put_aside_are_not_trained_on(tmp_path: Path) -> None:
    choice = "recalibration={methods=['private-temperature'], noise_multiplier=5, private_share=0.25}"
    job = prepare(config(choice))
    assert job.aside is not None and len(job.aside) == round(0.25 * 1_297)
    assert len(job.train) + len(job.aside) == 1_297 == job.plan.sampling.sample_size + len(job.aside)
    rows = {tuple(row.flatten().tolist()) for row in job.train.tensors[0]}
    shared = sum(tuple(row.flatten().tolist()) in rows for row in job.aside.tensors[0])
    assert shared == 0
    run = trained(tmp_path, choice)
    assert run.ledger is not None and run.ledger.events[-1].disjoint  # type: ignore[union-attr]


def test_a_delta_over_one_over_n_is_refused_unless_it_is_asked_for() -> None:
    with pytest.raises(InvalidConfig, match=r"delta = 0.01 is over 1/n = 0.000771 \(n = 1,297\).*--allow-large-delta"):
        prepare(config("privacy.delta=0.01"))
    job = prepare(config("privacy.delta=0.01", "privacy.allow_large_delta=true"))
    assert job.delta == 0.01 and not job.warnings  # the accountants warn of it, once


def regression() -> DataSet:
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    y = x @ torch.tensor([1.0, -2.0, 0.5])
    return DataSet("line", "regression", TensorDataset(x[:150], y[:150]), TensorDataset(x[150:], y[150:]))


def test_regression_learns_a_line(tmp_path: Path) -> None:
    options = ("model.hidden=[]", "clip.R=5", "optimizer={name='Adam', learning_rate=0.1}", "steps=80")
    run = trained(tmp_path, *options, "evaluation.std=2.0", data=regression())
    assert isinstance(run.test, RegressionResult) and run.test.r2 is not None and run.test.r2 > 0.9
    assert set(run.curves[-1]["test"]) == {"mse", "rmse", "r2"}
    assert run.test.coverage is not None and run.test.coverage[0.95] == 1.0
    with pytest.raises(InvalidConfig, match="for a regression"):
        prepare(config("evaluation.std=2.0"))
    with pytest.raises(InvalidConfig, match="for classification"):
        prepare(config("recalibration={methods=['temperature']}"), regression())


@pytest.mark.slow
def test_a_small_network_of_convolutions_learns_digits(tmp_path: Path) -> None:
    options = ("model={source='cnn', channels=[4], hidden=[]}", "privacy={private=false}", "steps=60")
    run = trained(tmp_path, *options)
    assert isinstance(run.test, CalibrationResult) and run.test.accuracy > 0.6
    with pytest.raises(InvalidConfig, match="at least 16 pixels a side"):
        prepare(config("model={source='cnn', channels=[4, 4, 4, 4]}"))


def test_inputs_are_pooled_and_scaled() -> None:
    job = prepare(config("data={source='digits', pool=2, mean=0.5, std=0.25}"))
    x = DIGITS.test.tensors[0]
    expected = (x.reshape(-1, 1, 4, 2, 4, 2).mean(dim=(3, 5)) - 0.5) / 0.25
    assert torch.allclose(job.test.tensors[0], expected) and job.data.shape == (1, 4, 4)
    assert str(job.config.data.inputs) == "averaged over 2 x 2 pixels, scaled with constants of the configuration"
    with pytest.raises(InvalidConfig, match="needs larger images"):
        prepare(config("data.pool=9"))
    with pytest.raises(InvalidConfig, match=r"data\.mean has 3 numbers"):
        prepare(config("data.mean=[1, 2, 3]"))


def test_only_what_is_named_is_trained(tmp_path: Path) -> None:
    torch.manual_seed(3)
    before = prepare(config()).model.state_dict()["hidden1.weight"].clone()
    trained(tmp_path, "model.trainable=['output.*']")
    found = weights(tmp_path / "run")
    assert torch.equal(found["hidden1.weight"], before)
    with pytest.raises(InvalidConfig, match=r"'outputs\.\*' matches no parameter"):
        prepare(config("model.trainable=['outputs.*']"))


def test_a_mixup_switch_beyond_the_steps_is_refused_before_training(tmp_path: Path) -> None:
    clip = "clip={schedule='MixUp', switch_at=50, small={rule='Normalize'}, large={rule='Normalize'}}"
    with pytest.raises(cw.InvalidPlan, match="switches at step 50"):
        trained(tmp_path, clip)
    assert not (tmp_path / "run").exists()


def test_what_is_refused_at_the_first_step_leaves_no_folder(tmp_path: Path, own: str) -> None:
    with pytest.raises(cw.NotSeparable, match="BatchNorm"):
        trained(tmp_path, f"model={{source='{own}:mixing'}}")
    with pytest.raises(cw.InvalidPlan, match="no rule for layer"):
        trained(tmp_path, "clip={style='Layerwise', layers={output={rule='Normalize'}}}")
    assert not (tmp_path / "run").exists()
    with pytest.raises(InvalidConfig, match="needs a clipping norm R"):
        trained(tmp_path, "privacy={private=false}", "clip={rule='NoClip'}", "optimizer.learning_rate=1 / R")
    assert not (tmp_path / "run").exists()


def test_a_run_that_diverges_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"diverged\. Lower the learning rate"):
        trained(tmp_path, "privacy={private=false}", "optimizer.learning_rate=1e38", "model.activation=relu")


def test_a_finished_run_is_not_lost(finished: tuple[Run, Path], tmp_path: Path) -> None:
    shutil.copytree(finished[1], tmp_path / "run")
    before = json.loads((tmp_path / "run" / "result.json").read_text())
    with pytest.raises(DataError, match=r"holds a finished run.*--set name=.*--force removes"):
        trained(tmp_path)
    with pytest.raises(DataError, match="nothing to resume"):
        train(config(), output=tmp_path / "run", resume=True)
    (tmp_path / "run" / "publishable").mkdir()  # `clipwise report --publishable` makes it; of the old run
    train(config("seed=4"), output=tmp_path / "run", force=True, page=False)
    assert not (tmp_path / "run" / "publishable").exists()
    after = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (before["seed"], after["seed"]) == (3, 4)


@pytest.mark.skipif(sys.platform == "win32", reason="folders cannot be locked there")
@pytest.mark.parametrize("how", ["resume", "force"])
def test_a_folder_is_for_one_process_at_a_time(finished: tuple[Run, Path], tmp_path: Path, how: str) -> None:
    refused = []

    def meanwhile(progress: Progress) -> None:
        if progress.step == 6:
            with pytest.raises(DataError, match="another process is training in"):
                train(config(), output=tmp_path / "run", **{how: True})  # type: ignore[arg-type]
            refused.append(how)

    run, _ = train(config(), output=tmp_path / "run", watch=meanwhile, page=False)
    assert refused == [how] and run.test == finished[0].test


@pytest.mark.parametrize("force", [False, True])
def test_other_files_are_never_touched(tmp_path: Path, force: bool) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "figures").mkdir()
    with pytest.raises(DataError, match=r"not a run's \(thesis.tex\)"):
        train(config(), output=tmp_path, force=force)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures", "thesis.tex"]
    with pytest.raises(DataError, match="cannot be the folder of a run"):
        train(config(), output=tmp_path / "thesis.tex", force=force)


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no checkpoint"):
        train(config(), output=tmp_path / "run", resume=True)


OWN = """
import numpy as np, torch
from torch import nn
from clipwise.data import DataSet, Pairs, TextDataSet

def labels(): return np.ones((9, 2)), np.arange(9) % 3, np.ones((3, 2)), np.arange(3)
def numbers(n=9): return torch.ones(n, 2), torch.linspace(0, 1, n), torch.ones(2, 2), torch.ones(2)
def short(): return np.ones(3), np.ones(3)
def negative(): return torch.ones(3, 2), torch.tensor([0, 1, -1]), torch.ones(1, 2), torch.tensor([0])
def fails(): raise KeyError("no such file")
def network(width): return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
def wrong(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 7))
def narrow(): return nn.Sequential(nn.Flatten(), nn.Linear(7, 10))
def mixing(): return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
def nothing(): return None
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own_for_train.py"
    path.write_text(OWN)
    return str(path)


def loaded(own: str, function: str, *overrides: str) -> Any:
    return config(f"data={{source='{own}:{function}'}}", *overrides).data.load()


def test_data_of_the_users_own(own: str) -> None:
    classes = loaded(own, "labels")
    assert (classes.task, classes.outputs, classes.train.tensors[0].dtype) == ("classification", 3, torch.float32)
    numbers = config(f"data={{source='{own}:numbers', options={{n=5}}}}").data.load()
    assert (numbers.task, numbers.outputs, len(numbers.train)) == ("regression", 1, 5)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("short", "must return a clipwise.data.DataSet or .*tuple of length 2"),
        ("negative", "negative class numbers"),
        ("fails", r"fails\(\) failed at .*own_for_train.py:10: KeyError"),
        ("absent", "has no function absent"),
    ],
)
def test_data_that_cannot_be_used(own: str, function: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        loaded(own, function)


def test_a_network_of_the_users_own(own: str, tmp_path: Path) -> None:
    run = trained(tmp_path, f"model={{source='{own}:network', options={{width=5}}}}", "clip={rule='Automatic'}")
    assert run.provenance["parameters"] == 64 * 5 + 5 + 5 * 10 + 10
    with pytest.raises(InvalidConfig, match=r"returns \(\d+, 7\) for a batch"):
        trained(tmp_path / "b", f"model={{source='{own}:wrong'}}")
    with pytest.raises(DataError, match=r"forward pass failed at .*: RuntimeError: mat1 and mat2 shapes"):
        trained(tmp_path / "c", f"model={{source='{own}:narrow'}}")
    assert not (tmp_path / "c" / "run").exists()
    with pytest.raises(DataError, match=r"must return a torch\.nn\.Module, got NoneType"):
        prepare(config(f"model={{source='{own}:nothing'}}"))
    with pytest.raises(DataError, match="TypeError"):
        prepare(config(f"model={{source='{own}:network'}}"))


def test_a_table_from_a_file(tmp_path: Path) -> None:
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(1))
    lines = [f"{a:.4f},{100 * b:.4f},{'yes' if a > 0 else 'no'}" for a, b in x.tolist()]
    path = tmp_path / "table.csv"
    path.write_text("\n".join(["first,second,answer", *lines]))
    source = f"data={{source='{path}', target='answer', standardise=true}}"
    run = trained(tmp_path, source, "batch_size=20", "privacy={private=false}", "steps=60")
    assert isinstance(run.test, CalibrationResult) and run.test.accuracy > 0.8 and run.test.classes == 2
    assert any("epsilon does not cover" in warning for warning in run.warnings)
    with pytest.raises(InvalidConfig, match=r"data\.targt: \[data\] has no such key; did you mean 'target'"):
        config(f"data={{source='{path}', targt='answer'}}")


def test_a_missing_extra_is_told_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(cw.MissingExtra, match=r"safetensors: pip install 'clipwise\[train\]'"):
        trained(tmp_path)
    assert not (tmp_path / "run").exists()


SHAPE = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def test_a_local_folder_of_a_language_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    settings = transformers.BertConfig(vocab_size=20, max_position_embeddings=8, **SHAPE)
    transformers.BertModel(settings).save_pretrained(tmp_path / "bert")
    generator = torch.Generator().manual_seed(0)
    ids, mask = torch.randint(20, (48, 6), generator=generator), torch.ones(48, 6, dtype=torch.long)
    part = TensorDataset(ids, mask, (ids[:, 0] > 9).long())
    data = DataSet("toy", "classification", part, part, classes=("no", "yes"))
    options = (f"model={{source='{tmp_path / 'bert'}', trainable=['classifier.*', 'bert.pooler.*']}}", "batch_size=8")
    run = trained(tmp_path, *options, "steps=3", data=data)
    assert run.ledger is not None and run.ledger.steps == 3 and run.provenance["parameters"] == 8 * 8 + 8 + 8 * 2 + 2


def test_a_local_folder_of_a_vision_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    settings = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, **SHAPE)
    transformers.ViTModel(settings, add_pooling_layer=False).save_pretrained(tmp_path / "vit")
    run = trained(tmp_path, f"model={{source='{tmp_path / 'vit'}'}}", "batch_size=8", "steps=2")
    assert isinstance(run.test, CalibrationResult) and run.test.classes == 10


def test_sentences_are_made_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "dog", "runs", "sleeps"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "tokens")
    pairs = Pairs(("a dog runs", "a dog sleeps") * 4, ("a dog runs",) * 8, (0, 2) * 4)
    text = TextDataSet("snli", pairs, pairs, classes=("entailment", "neutral", "contradiction"))
    monkeypatch.setattr(data_module, "load_text", lambda name: text)
    chosen = f"data={{source='snli', tokenizer='{tmp_path / 'tokens'}', max_length=9, records=6}}"
    data = config(chosen).data.load()
    assert (len(data.train), len(data.test), data.outputs, len(data.train.tensors)) == (6, 8, 3, 4)
    with pytest.raises(DataError, match=r"loading .*nowhere failed"):
        config("data={source='snli', tokenizer='nowhere'}").data.load()
    with pytest.raises(InvalidConfig, match="'tokenizer' is missing"):
        config("data={source='snli'}")


def test_a_configuration_that_was_kept_trains_again(tmp_path: Path) -> None:
    trained(tmp_path, "clip.R=0.5", "data.mean=0.3")
    again = Config.load(tmp_path / "run" / "config.toml")
    train(again, output=tmp_path / "again", page=False)
    assert same(weights(tmp_path / "run"), weights(tmp_path / "again"))


@pytest.mark.usefixtures("exact_only")
def test_a_schedule_of_noise_is_on_the_ledger_and_in_the_result(tmp_path: Path) -> None:
    noise = cw.Steps({0: 2.0, 5: 1.0})
    run = trained(tmp_path, "privacy.noise_multiplier={0=2.0, 5=1.0}")
    sampling = cw.Poisson(1_297, 64)
    assert run.ledger is not None
    assert run.ledger.events == (cw.GaussianSteps(sampling, 2.0, 5), cw.GaussianSteps(sampling, 1.0, 7))
    assert prepare(config("privacy.noise_multiplier={0=2.0, 5=1.0}")).plan.noise_multiplier == noise
    for each in (run, Run.load(tmp_path / "run")):
        assert each.plan == run.plan
    with pytest.raises(cw.InvalidPlan, match="only 12 steps"):
        prepare(config("privacy.noise_multiplier={0=2.0, 12=1.0}"))


@pytest.mark.usefixtures("exact_only")
@pytest.mark.usefixtures("figures_in_words")
def test_an_adaptive_norm_is_in_the_rows_the_result_and_the_page(tmp_path: Path) -> None:
    """A public number after every evaluation; the learning rate follows it; a run that was cut ends the same."""
    chosen = ("clip.rule=AdaptiveClip", "clip.floor=0.3", 'optimizer.learning_rate="0.5 / R"', "evaluation.every=4")
    made = config(*chosen)

    def stop(progress: Progress) -> None:
        if progress.step == 7:
            raise KeyboardInterrupt

    run, folder = train(made, output=tmp_path / "whole")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    norms = [row["released"]["clipping_norm"] for row in rows]
    assert [row["step"] for row in rows] == [4, 8, 12] and len(set(norms)) == 3 and min(norms) >= 0.3
    assert run.plan == Run.load(folder).plan and run.plan.clip == cw.AdaptiveClip(1.0, 0.5, 0.3)
    assert run.choices.learning_rate == "0.5 / R" and clip_norm(run.plan) is None
    by_hand = own_loop(run.plan.clip, 12, lambda private: 0.5 / private.bound, begins_with=0.5)
    assert same(by_hand, weights(folder))
    assert run.ledger is not None and run.ledger.events == (cw.GaussianSteps(cw.Poisson(1_297, 64), 1.0, 12),)
    drawn = json.loads((folder / "figures" / "training.json").read_text())
    assert next(iter(drawn.values()))["clipping_norm"] == {"step": [4, 8, 12], "mean": norms, "low": [], "high": []}
    with pytest.raises(KeyboardInterrupt):
        train(made, output=tmp_path / "cut", page=False, watch=stop)
    again, _ = train(made, output=tmp_path / "cut", page=False, resume=True)
    assert again.curves == run.curves and same(weights(tmp_path / "whole"), weights(tmp_path / "cut"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (("algorithm=dp-sgd-jl", "projections=40"), "no proof"),
        (("algorithm=dp-ftrl", "sampling=shuffled"), "no proof"),
        (("sampling=cyclic-poisson", "bands=4", 'correlation={kind="banded",bands=4}'), "no proof"),
    ],
    ids=str,
)
def test_an_adaptive_norm_without_a_proof_is_refused(changes: tuple[str, ...], reason: str) -> None:
    with pytest.raises(cw.InvalidPlan, match=reason):
        prepare(config("clip.rule=AdaptiveClip", *changes))
    with pytest.raises(cw.InvalidPlan, match="would change its temperature"):
        prepare(config("clip.rule=AdaptiveClip", text=CHAIN))


def test_a_schedule_of_noise_is_scaled_to_a_target() -> None:
    plan = prepare(config("privacy.noise_multiplier={0=2.0, 5=1.0}", "privacy.epsilon=2", "privacy.delta=1e-4")).plan
    assert isinstance(plan.noise_multiplier, cw.Steps) and 0.998 * 2 < plan.epsilon(1e-4) <= 2
    assert plan.noise_multiplier.at(0) == pytest.approx(2 * plan.noise_multiplier.at(5), rel=1e-12)
    with pytest.raises(InvalidConfig, match="one temperature"):
        prepare(config("privacy.noise_multiplier={0=2.0, 5=1.0}", text=CHAIN))


CHAIN = TINY.replace('[optimizer]\nname = "SGD"\nlearning_rate = 0.5\n', "").replace(
    "steps = 12", 'algorithm = "dp-sgld"\nsteps = 12'
)
