"""`clipwise ntk` and `clipwise reproduce`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clipwise.cli.main import main
from clipwise.cli.ntk import parse_clip
from clipwise.clipping import Abadi, Automatic, Flat, Layerwise, NoClip
from clipwise.errors import InvalidPlan

MODULE = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    x, y = torch.randn(6, 2), 3 * torch.randn(6)
    return model, lambda outputs, y: (outputs.squeeze(1) - y).square(), x, y

def wrong():
    return 1, 2
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "small_network.py").write_text(MODULE)
    return str(tmp_path / "small_network.py")


def test_table_of_a_function(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ntk", f"{source}:make", "--clip", "NoClip()", "--clip", "Abadi(0.1)", "--t-end", "0"]) == 0
    shown = capsys.readouterr().out
    assert "6 samples, 1 output(s)" in shown and "Not covered by epsilon" in shown
    rows = {line.split()[0]: line.split()[1:4] for line in shown.splitlines() if "()" in line or "0.1" in line[:14]}
    assert rows["NoClip()"] == ["yes", "yes", "yes"] and rows["Abadi(0.1)"][0] == "no"
    assert "loss at t" not in shown


@pytest.mark.slow
def test_figures_and_numbers_are_saved(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = ["--samples", "4", "--t-end", "0.5", "--optimizer", "heavy_ball", "--output", str(out), "--json"]
    assert main(["ntk", f"{source}:make", *arguments]) == 0
    printed = json.loads(capsys.readouterr().out)
    saved = json.loads((out / "ntk.json").read_text())
    assert printed == saved and saved["samples"] == 4 and saved["covered_by_epsilon"] is False
    assert [row["clip"] for row in saved["rows"]] == ["NoClip()", "Abadi(1.0)", "Layerwise(Abadi(1.0))"]
    assert len(saved["spectrum"]) == 4 and set(saved["clipped_spectra"]) == {row["clip"] for row in saved["rows"]}
    assert {path.name for path in out.iterdir()} == {"ntk.json", "spectrum.svg", "clipped.svg", "flow.svg"}


def test_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    config = tmp_path / "run.toml"
    config.write_text(
        'seed = 0\nbatch_size = 64\nsteps = 10\ndata.source = "digits"\nmodel.source = "mlp"\nmodel.hidden = [8]\n'
        'clip = { rule = "Abadi", R = 1.0 }\noptimizer.learning_rate = 0.5\nprivacy.noise_multiplier = 1.0\n'
    )
    assert main(["ntk", str(config), "--samples", "3", "--t-end", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["samples"], found["outputs"]) == (3, 10)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Abadi(1)", Abadi(1)),
        ("Layerwise(Abadi(R=0.5), noise='per_layer')", Layerwise(Abadi(0.5), "per_layer")),
        ("Flat(Automatic(1.0, gamma=0.1))", Flat(Automatic(1.0, 0.1))),
        ("NoClip()", NoClip()),
    ],
)
def test_clips_are_written_as_in_python(text: str, value: object) -> None:
    assert parse_clip(text) == value


@pytest.mark.parametrize("text", ["Abadi", "Abadi(", "Abadi(x)", "print(1)", "Abadi(1, 2)", "Abadi(-1)", "open('x')"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidPlan):
        parse_clip(text)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--samples", "0"], "--samples"),
        (["--t-end", "-1"], "--t-end"),
        (["--weights", "x.safetensors"], "--weights"),
        (["--clip", "Magic(1)"], "Magic"),
    ],
)
def test_bad_options_are_one_line(
    source: str, extra: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ntk", f"{source}:make", *extra]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_wrong_functions_and_files(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ntk", f"{source}:wrong"]) == 2
    assert "(model, loss_fn, x, y)" in capsys.readouterr().err
    assert main(["ntk", "no-such.toml"]) == 2


# -- reproduce


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    recipe = tmp_path / "papers" / "tiny"
    recipe.mkdir(parents=True)
    (recipe / "__init__.py").write_text('"""A tiny recipe."""\n')
    (recipe / "__main__.py").write_text(
        "import sys\nfrom pathlib import Path\n"
        "Path('ran.txt').write_text(' '.join(sys.argv[1:]))\nprint('said')\nsys.exit(3)\n"
    )
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    return tmp_path


def test_recipes_are_listed(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce"]) == 0
    assert "tiny" in (shown := capsys.readouterr().out) and "A tiny recipe." in shown
    assert main(["reproduce", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"tiny": "A tiny recipe."}


def test_a_recipe_runs_where_the_user_is_with_its_options(checkout: Path) -> None:
    assert main(["reproduce", "tiny", "--quick", "--seeds", "2"]) == 3, "the recipe's exit code"
    assert (checkout / "a" / "b" / "ran.txt").read_text() == "--quick --seeds 2"


def test_outcome_as_json(checkout: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--json", "tiny"]) == 3
    out, error = capfd.readouterr()
    assert json.loads(out)["exit_code"] == 3 and "said" in error


def test_unknown_recipe(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "none"]) == 2
    assert "there are: tiny" in capsys.readouterr().err


def test_without_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("clipwise.cli.reproduce.__file__", str(tmp_path / "x" / "y" / "z" / "reproduce.py"))
    assert main(["reproduce", "theory"]) == 2
    assert "checkout" in capsys.readouterr().err
