"""A trained model in use: it predicts as it did in training, from its folder alone, and refuses what it cannot use."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import clipwise as cw
from clipwise.cli import predict as command
from clipwise.cli.main import main
from clipwise.data import DataSet
from clipwise.errors import DataError, InvalidConfig
from clipwise.report import SEEDED, Run, RunFolder, arms_of, warnings_of
from clipwise.training import Config, prepare, train
from clipwise.training.config import FromFunction, Inputs
from clipwise.training.model import SavedModel

from .common import config

ODD = ("<=50K, 'odd'", "=cmd|'/c calc'!A1", '-"x"', "-1")


def people(path: Path, rows: int = 60) -> Path:
    """A table with text, gaps and classes of odd names."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "age", "sex", "kind"])
        for k in range(rows):
            writer.writerow([f"={k}", 20 + k % 50, ("Male", "Female", "?")[k % 3], ODD[k % 4]])
    return path


def of_people(path: Path, *overrides: str) -> Config:
    text = f"""
    name = "people"
    steps = 3
    batch_size = 8
    model = {{ source = "mlp", hidden = [4] }}
    optimizer.learning_rate = 0.5
    privacy.private = false
    evaluation.resamples = 0
    [data]
    source = {json.dumps(str(path))}
    target = "kind"
    classes = {json.dumps(ODD)}
    [data.columns]
    age = {{ kind = "number", low = 20, high = 70 }}
    sex = {{ kind = "category", categories = ["Female", "Male"], missing = true }}
    """
    return Config.parse(text, "people.toml", overrides)


def read(path: Path) -> list[list[str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


@pytest.fixture(scope="module")
def person(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A table and the folder of a run on it."""
    place = tmp_path_factory.mktemp("people")
    table = people(place / "people.csv")
    train(of_people(table), output=place / "run", page=False)
    return table, place / "run"


# The same predictions


@pytest.mark.parametrize(
    ("overrides", "method"),
    [
        (["data.pool=2", "data.mean=[0.1]", "data.std=[0.5]"], None),
        (["model={source='cnn', channels=[2], hidden=[]}", "recalibration={methods=['temperature']}"], "temperature"),
        (
            ["recalibration={methods=['vector', 'private-temperature'], noise_multiplier=9.0}"],
            "private-temperature",
        ),
    ],
    ids=["scaled", "cnn", "private"],
)
def test_a_loaded_model_predicts_what_the_run_measured(
    tmp_path: Path, exact_only: None, overrides: list[str], method: str | None
) -> None:
    made = config("steps=3", *overrides)
    run, folder = train(made, output=tmp_path / "run", page=False)
    state = torch.get_rng_state()
    model = cw.load(folder)
    assert torch.equal(torch.get_rng_state(), state)
    raw = cw.data.load("digits").test.tensors[0]
    chosen = prepare(made).test
    if made.recalibration.public:  # half of the held-out records have been used
        whole = made.data.load().test.tensors[0]
        raw = raw[[int((whole == x).flatten(1).all(dim=1).nonzero()[0]) for x in chosen.tensors[0]]]
    expected = run.test if method is None else run.recalibrated[method]
    measured = cw.calibration.evaluate(model.predict_proba(raw), chosen.tensors[-1], bins=15)
    assert measured.nll == pytest.approx(expected.nll, rel=1e-5) and measured.ece == pytest.approx(expected.ece)
    assert model.method == method == run.provenance["recalibration"] and model.classes == tuple("0123456789")
    plain = cw.calibration.evaluate(
        cw.load(folder, recalibration=False).predict_proba(raw), chosen.tensors[-1], bins=15
    )
    assert plain.nll == pytest.approx(run.test.nll, rel=1e-5)


def test_a_model_knows_the_guarantee_of_its_run(finished: tuple[Run, Path], tmp_path: Path) -> None:
    run, folder = finished
    assert cw.load(folder).guarantee == replace(run.guarantees["exact"], warnings=(SEEDED,))
    other = shutil.copytree(folder, tmp_path / "other")
    ledger = cw.Ledger.load(other / "ledger.json")
    (other / "ledger.json").write_text(cw.Ledger(ledger.events).to_json())  # the same events, by somebody else
    with pytest.raises(DataError, match="not the ledger that the model was saved with"):
        _ = cw.load(other).guarantee


def test_standardised_columns_are_scaled_again_with_the_same_numbers(tmp_path: Path) -> None:
    rows = "".join(f"{k},{100 * k},{k + 0.5}\n" for k in range(20))
    (tmp_path / "t.csv").write_text(f"a,b,y\n{rows}")
    text = """
    steps = 3
    batch_size = 8
    data = { source = "t.csv", task = "regression", standardise = true }
    model = { source = "mlp", hidden = [] }
    optimizer.learning_rate = 0.1
    privacy.private = false
    evaluation.resamples = 0
    """
    made = Config.parse(text, "t.toml", [f"data.source={tmp_path / 't.csv'}"])
    _, folder = train(made, output=tmp_path / "run", page=False)
    job = prepare(made)
    model = cw.load(folder)
    raw = cw.data.from_file(tmp_path / "t.csv", task="regression").test.tensors[0]
    expected = model.model(job.test.tensors[0]).squeeze(1)
    assert torch.equal(model.predict(raw), expected)
    assert np.array_equal(model.predict({"b": raw[:, 1].numpy(), "a": raw[:, 0].tolist()}), expected.detach().numpy())
    assert model.guarantee is None and model.features == ("a", "b") and "does not cover" in model.saved.note
    with pytest.raises(DataError, match="no probabilities"):
        model.predict_proba(raw)


SPENT = """
steps = 150
batch_size = 100
seed = 1
data = { source = "spent.csv", target = "spent", task = "regression", target_bounds = [0, 600] }
model = { source = "mlp", hidden = [] }
clip = { rule = "Abadi", R = 1.0 }
optimizer = { name = "Adam", learning_rate = 0.02 }
privacy.noise_multiplier = 1.0
evaluation = { resamples = 100, every = 150 }
"""


def spent(folder: Path) -> Path:
    """A table with a target in the hundreds."""
    noise = torch.randn(1_000, 3, generator=torch.Generator().manual_seed(0)).tolist()
    rows = "".join(f"{a:.3f},{b:.3f},{300 + 60 * a - 40 * b + 5 * c:.2f}\n" for a, b, c in noise)
    (folder / "spent.csv").write_text(f"a,b,spent\n{rows}")
    return folder / "spent.csv"


def test_a_target_with_bounds_is_learnt_scaled_and_judged_and_predicted_in_its_own_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without bounds such a model predicted 57 where the truth is 190 to 340, and nothing was said."""
    monkeypatch.chdir(spent(tmp_path).parent)
    made = Config.parse(SPENT, "spent.toml")
    run, folder = train(made, output="run", page=False)
    assert run.test.r2 > 0.9 and 4 < run.test.rmse < 30 and run.test.intervals["rmse"][0] > 3.5
    targets = prepare(made).test.tensors[-1]
    assert 250 < float(targets.mean()) < 350
    model = cw.load(folder)
    predicted = model.predict(prepare(made).test.tensors[0])
    assert float((predicted - targets).square().mean().sqrt()) == pytest.approx(run.test.rmse, rel=1e-5)
    assert model.predict(torch.tensor([[1e6, 0.0], [-1e6, 0.0]])).tolist() == [600.0, 0.0], "none is out of bounds"
    assert main(["predict", str(folder), "spent.csv"]) == 0
    shown = [float(line) for line in capsys.readouterr().out.splitlines()[1:]]
    assert shown == pytest.approx(model.predict(cw.data.read_table(tmp_path / "spent.csv", ",")).tolist())
    assert not any("target" in warning for warning in run.warnings)
    # The losses, and so the gradients, are those of targets from -1 to 1.
    job = prepare(made)
    inputs, y = job.train.tensors[0][:4], torch.tensor([0.0, 600.0, 900.0, 300.0])
    outputs = job.outputs(job.model, [inputs])
    expected = (outputs - torch.tensor([-1.0, 1.0, 1.0, 0.0])).square()
    assert torch.allclose(job.losses(job.model, [inputs, y]), expected)


def test_a_large_target_without_bounds_and_a_model_worse_than_a_mean_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(spent(tmp_path).parent)
    run, folder = train(Config.parse(SPENT.replace(", target_bounds = [0, 600]", "")), output="run", page=False)
    assert run.test.r2 < 0 and any("data.target_bounds = [low, high]" in warning for warning in run.warnings)
    said = [each.text for each in warnings_of(arms_of([run]))]
    assert any(text.startswith("R² is below 0: the mean of the targets would be a better") for text in said)
    assert "target_bounds" not in json.loads((folder / "model.json").read_text()), "as versions before wrote it"
    assert 0 < float(cw.load(folder).predict(torch.zeros(1, 2))) < 100


def test_a_run_is_not_continued_with_other_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights would mean other numbers."""
    monkeypatch.chdir(spent(tmp_path).parent)
    text = SPENT.replace("seed = 1", "")
    train(Config.parse(text, overrides=["steps=2"]), output="run", page=False)
    for bounds in ("[0, 700]", "[1, 600]"):
        with pytest.raises(DataError, match="other classes, columns or target bounds"):
            train(
                Config.parse(text.replace("[0, 600]", bounds), overrides=["continue_from=run"]),
                output="more",
                page=False,
            )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.update(target_bounds={"low": 0, "high": "1"}), "high should be a number"),
        (lambda body: body.update(target_bounds={"low": 0, "high": 1e300}), "numbers of float32"),
        (lambda body: body.update(target_bounds={"low": 5, "high": 5}), "finite numbers low < high"),
        (lambda body: body.update(target_bounds={"low": 5}), "missing or unknown fields: high"),
        (lambda body: body.update(target_bounds=None), "should be a JSON object"),
        (lambda body: body.update(target_bounds={"low": 0, "high": 1}, task="classification"), "task should be"),
    ],
)
def test_bounds_that_were_edited_are_refused(
    finished: tuple[Run, Path], tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    folder = shutil.copytree(finished[1], tmp_path / "run")

    def as_regression(body: dict[str, Any]) -> None:
        body.update(task="regression", classes=[])
        change(body)

    edited(folder, as_regression, seal=False)
    with pytest.raises(DataError, match="checksum"):
        cw.load(folder)
    edited(folder, lambda body: None, seal=True)
    with pytest.raises(DataError, match=message):
        cw.load(folder)


def test_classes_have_no_bounds(finished: tuple[Run, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(finished[1], tmp_path / "run")
    edited(folder, lambda body: body.update(target_bounds={"low": 0, "high": 1}), seal=True)
    with pytest.raises(DataError, match="target_bounds should be left out where there are classes"):
        cw.load(folder)
    with pytest.raises(InvalidConfig, match="target_bounds are for a regression"):
        prepare(config("data.target_bounds=[0, 1]"))
    part = torch.utils.data.TensorDataset(torch.zeros(3, 2), torch.tensor([0, 1, 0]))
    with pytest.raises(DataError, match="target_bounds are for a regression"):
        DataSet("x", "classification", part, part, classes=("a", "b"), target_bounds=cw.data.TargetBounds(0, 1))


def test_a_model_of_transformers_is_built_from_its_configuration_alone(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    transformers.BertModel(transformers.BertConfig(vocab_size=20, **shape)).save_pretrained(tmp_path / "bert")
    tokens, mask = torch.randint(0, 20, (12, 6)), torch.ones(12, 6, dtype=torch.int64)
    part = torch.utils.data.TensorDataset(tokens, mask, torch.arange(12) % 3)
    data = DataSet("words", "classification", part, part, classes=("a", "b", "c"))
    made = config("steps=1", "batch_size=4", "privacy={private=false}", f"model={{source='{tmp_path / 'bert'}'}}")
    _, folder = train(made, output=tmp_path / "run", data=data, page=False)
    assert str(tmp_path) not in (folder / "model.json").read_text()
    shutil.rmtree(tmp_path / "bert")
    model = cw.load(folder)
    assert model.predict_proba((tokens[:, :4], mask[:, :4])).shape == (12, 3)
    with pytest.raises(DataError, match="takes 2 tensors, got 1"):
        model.predict_proba(tokens)
    with pytest.raises(DataError, match=r"whole numbers \(torch.int64\), got torch.float32"):
        model.predict_proba((tokens.float(), mask))


# Code


def test_code_that_builds_a_model_is_run_only_when_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = "torch.nn.Flatten(), torch.nn.Linear(width, 10)"
    code = f"import torch\nprint('RUN')\ndef make(width):\n    return torch.nn.Sequential({layers})\n"
    (tmp_path / "trusted_models.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    made = config("steps=1", "privacy={private=false}", "model={source='trusted_models:make', options={width=64}}")
    _, folder = train(made, output=tmp_path / "run", page=False)
    del sys.modules["trusted_models"]
    capsys.readouterr()
    with pytest.raises(DataError, match=r"trusted_models:make\(\), and loading it would run that code"):
        cw.load(folder)
    assert "trusted_models" not in sys.modules and not capsys.readouterr().out
    assert cw.load(folder, trust_code=True).predict(torch.zeros(1, 1, 8, 8)).shape == (1,)
    del sys.modules["trusted_models"]


def test_what_cannot_be_saved_is_refused_before_training() -> None:
    data = cw.data.load("digits")
    made = SavedModel.of(data, FromFunction("a", "b", {"when": {1, 2}}), Inputs())
    with pytest.raises(DataError, match="cannot be saved"):
        made.check(nn.Linear(1, 1))


# Files that are not what was saved


def edited(folder: Path, change: Callable[[dict[str, Any]], Any], *, seal: bool) -> None:
    from clipwise._json import checksum

    body = json.loads((folder / "model.json").read_text())
    change(body)
    (folder / "model.json").write_text(json.dumps({**body, "checksum": checksum(body)} if seal else body))


EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another class": (lambda body: body["classes"].append("x"), "does not fit the model|fewer"),
    "no class": (lambda body: body.update(classes=[]), "task should be"),
    "another width": (lambda body: body["architecture"].update(hidden=[5]), "does not fit the model|fewer"),
    "a gigantic network": (lambda body: body["architecture"].update(hidden=[10**9]), "parameters"),
    "a network beyond 64 bits": (lambda body: body["architecture"].update(hidden=[2**63]), "parameters"),
    "an unknown network": (lambda body: body["architecture"].update(kind="pickle"), "kind should be one of mlp"),
    "a field too many": (lambda body: body.update(extra=1), "unknown fields: extra"),
    "a newer version": (lambda body: body.update(version=2), "has version 2, this clipwise reads 1"),
    "another format": (lambda body: body.update(format="run"), "does not describe a model"),
    "a kind of number": (lambda body: body.update(kinds=["object"]), "kinds should be"),
    "other columns": (lambda body: body["schema"].pop(), "features should be those of the schema"),
    "a schema that is none": (lambda body: body.update(schema=[["age", 3]]), "schema should be columns"),
    "a temperature of 0": (
        lambda body: body.update(
            recalibration={"method": "x", "map": {"kind": "temperature", "temperature": 0, "at_limit": False}}
        ),
        "temperature should be over 0",
    ),
    "std of 0": (lambda body: body.update(inputs=[{"pool": 1, "mean": [0], "std": [0]}]), "std should be numbers over"),
}


@pytest.mark.parametrize(("change", "message"), EDITS.values(), ids=EDITS)
def test_a_description_that_was_edited_is_refused(
    person: tuple[Path, Path], tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    folder = shutil.copytree(person[1], tmp_path / "run")
    edited(folder, change, seal=False)
    with pytest.raises(DataError, match=r"checksum|unknown fields|version|does not describe"):
        cw.load(folder)
    edited(folder, lambda body: None, seal=True)
    with pytest.raises((DataError, InvalidConfig), match=message):
        cw.load(folder)


def test_weights_of_another_run_or_cut_ones_are_refused(person: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(person[1], tmp_path / "run")
    whole = (folder / "model.safetensors").read_bytes()
    for content in (whole[:-1], whole[:-4] + b"\0\0\0\0", b""):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(DataError, match="does not hold the weights"):
            cw.load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match="cannot be read"):
        cw.load(folder)
    (folder / "model.json").unlink()
    with pytest.raises(DataError, match=r"has no model\.json"):
        cw.load(folder)


# Rows


def test_rows_that_do_not_fit_are_refused(person: tuple[Path, Path]) -> None:
    model = cw.load(person[1])
    for rows, message in (
        ({"id": ["1"]}, "there is no column 'age', 'sex'"),
        ({"ages": ["1"], "sex": ["Male"]}, r"It has ages, sex\. Did you mean 'ages'\? .* need a new training"),
        ({"age": ["old", ""], "sex": ["Male", ""]}, "2 problems"),
        ({"age": ["old"], "sex": ["Male"]}, r"change the rows\. .* \(`missing = true`\) need a new training"),
        (np.zeros((2, 4)), r"an input has shape \(4,\), the model takes \(3,\)"),
        (np.full((1, 3), np.nan), "not finite"),
        (3.0, "a single number"),
        ([["a", "b", "c"]], "numbers are needed"),
        (
            np.array([[30, "Male"]], dtype=object),
            r"array of object .* with the columns age, sex: they are then encoded",
        ),
        (np.array([["30", "Male"]]), "with the columns age, sex"),
    ):
        with pytest.raises(DataError, match=message):
            model.predict_proba(rows)  # type: ignore[arg-type]
    assert model.predict_proba(np.zeros((0, 3))).shape == (0, 4)


def test_a_model_says_what_it_is_and_which_columns_it_needs(person: tuple[Path, Path]) -> None:
    model = cw.load(person[1])
    assert model.columns == ("age", "sex") and model.features == ("age", "sex=Female", "sex=Male")
    assert repr(model).startswith("Predictor(run, trained on people: 4 classes, (3,) inputs")
    plain = cw.accounting.Guarantee(1.0, 1e-5, "upper bound", "rdp", "zero_out", "Poisson", warnings=("Seeded.",))
    assert str(plain) == f"{plain.statement()}\nwarning: Seeded." and "seconds" not in str(plain)


def test_a_data_frame_is_a_table(person: tuple[Path, Path]) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv(person[0])
    model = cw.load(person[1])
    probabilities = model.predict_proba(frame)
    assert np.allclose(probabilities.sum(axis=1), 1, atol=1e-6)
    assert model.predict(frame).tolist() == [model.classes[k] for k in probabilities.argmax(axis=1)]
    frame.loc[0, "sex"] = None
    assert model.predict_proba(frame).shape == (60, 4)


# The command


def test_the_command_writes_probabilities_under_odd_names(
    person: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, folder = person
    output = tmp_path / "predictions.csv"
    assert main(["predict", str(folder), str(table), "--keep", "id", "--output", str(output)]) == 0
    shown = capsys.readouterr()
    assert not shown.out and "60 rows; probabilities of 4 classes" in shown.err
    header, *rows = read(output)
    assert header == ["id", ODD[0], f"'{ODD[1]}", f"'{ODD[2]}", "-1"]
    assert [row[0] for row in rows] == [f"'={k}" for k in range(60)]
    expected = cw.load(folder).predict_proba(cw.data.read_table(table, ","))
    assert np.array_equal(np.array([row[1:] for row in rows], dtype=np.float32), expected)
    assert output.stat().st_mode & 0o777 == 0o600 and (folder / "model.json").stat().st_mode & 0o777 == 0o600


def test_a_long_file_is_read_a_part_at_a_time(
    person: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    table, folder = person
    assert main(["predict", str(folder), str(table)]) == 0
    whole = capsys.readouterr().out
    monkeypatch.setattr(command, "ROWS", 7)
    columns = cw.data.read_table(table, ",")
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    np.savez(tmp_path / "t.npz", **columns)
    for file in (table, tmp_path / "t.parquet", tmp_path / "t.npz"):
        assert main(["predict", str(folder), str(file)]) == 0
        assert capsys.readouterr().out == whole
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("age,sex\n" + "30,Male\n" * 9 + "old,Male\n")
    assert main(["predict", str(folder), str(wrong), "--output", str(tmp_path / "p.csv")]) == 2
    shown = capsys.readouterr().err
    assert "rows counted from 8, column 'age', row 3: the value is not a finite number" in shown and "old" not in shown
    assert not (tmp_path / "p.csv").exists()
    assert main(["predict", str(folder), str(wrong)]) == 2
    assert len(capsys.readouterr().out.splitlines()) == 8, "the header and the first part, as docs/cli.md says"


def test_nothing_is_written_when_the_first_rows_are_refused(
    person: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, folder = person
    (tmp_path / "semicolons.csv").write_text("age;sex\n30;Male\n")
    (tmp_path / "words.csv").write_text("age,sex\nold,Male\n")
    for given in ([table, "--keep", "idx"], [tmp_path / "semicolons.csv"], [tmp_path / "words.csv"]):
        assert main(["predict", str(folder), *map(str, given)]) == 2
        shown = capsys.readouterr()
        assert not shown.out, "not the header either"
        assert ("--show-values" in shown.err) is ("words.csv" in shown.err), "there is no value to show of the others"


@pytest.mark.parametrize(
    ("names", "keep", "message"),
    [
        (("a", "a"), [], "two columns 'a'"),
        (("a", "b"), ["a"], "do not --keep"),
        (("a", " b"), [], "no header keeps"),
        (("a", "\x1b[2J"), [], "control characters"),
    ],
)
def test_names_that_no_header_can_hold_are_refused(names: tuple[str, ...], keep: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        command.header_of(names, keep)


def test_an_unfinished_folder_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(tmp_path), "new.csv"]) == 2
    assert "has no model.json" in capsys.readouterr().err
    assert RunFolder(tmp_path).description.name == "model.json"


def test_a_network_that_there_is_no_room_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*layers: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1106804736 bytes.")

    made = of_people(people(tmp_path / "people.csv"))
    data = made.data.load()
    monkeypatch.setattr("clipwise.training.config.models.nn.Sequential", no_room)
    with pytest.raises(InvalidConfig, match=r"\[model\] has 36 parameters, for which this machine has no room"):
        made.model.build(data)
