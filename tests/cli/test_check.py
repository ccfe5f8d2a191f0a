"""`clipwise check`: a verdict, the rules, the memory, and errors that say where."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from clipwise.cli.main import main

USER_CODE = """
import torch
from torch import nn
from torch.nn import functional as F

def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")

def data():
    torch.manual_seed(0)
    return torch.randn(8, 1, 6, 6), torch.randint(0, 3, (8,))

def cnn():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    return model, loss_fn, data()

def spare():
    model, loss, batch = cnn()
    model.register_parameter("spare", nn.Parameter(torch.zeros(5)))
    return model, loss, batch

def batch_norm():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3)), loss_fn, data()

def hidden_mixing():
    model = nn.Sequential(nn.BatchNorm2d(1, affine=False), nn.Flatten(), nn.Linear(36, 3))
    return model, loss_fn, data()

def pair():
    model, loss, batch = cnn()
    return loss(model, batch), dict(model.named_parameters())

def unnamed_pair():
    model, loss, batch = cnn()
    return loss(model, batch), list(model.parameters())

def mean_loss():
    model, loss, batch = cnn()
    return loss(model, batch).mean(), dict(model.named_parameters())

def broken():
    raise KeyError("no such layer")

def broken_loss():
    model, loss, batch = cnn()
    return model, lambda model, batch: 1 / 0, batch

def wrong():
    return 3
"""


@pytest.fixture(autouse=True)
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_models.py").write_text(USER_CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "user_models", raising=False)


def check(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["check", *argv])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("target", ["user_models:cnn", "user_models.py:cnn"])
def test_supported_model(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = check(capsys, target)
    assert code == 0
    assert "can be trained privately" in out and "changed or removed" in out and "MiB" in out
    for parameter in ("0.weight", "0.bias", "3.weight", "3.bias"):
        assert parameter in out
    assert "ConvolutionBackward0" in out and "AddmmBackward0" in out


def test_json_has_the_same_facts(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = check(capsys, "user_models:cnn", "--json")
    result = json.loads(out)
    assert code == 0 and result["ok"] and result["rerun"]
    assert result["batch_size"] == 8 and result["unreached"] == []
    named = {name for node in result["nodes"] for name in node["parameters"]}
    assert named == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert all(size > 0 for size in result["bytes"].values())


@pytest.mark.parametrize("target", ["user_models:pair", "user_models:unnamed_pair"])
def test_losses_alone_say_what_was_not_checked(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = check(capsys, target)
    assert code == 0 and "as far as the graph shows" in out


def test_unreached_parameter_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = check(capsys, "user_models:spare")
    assert code == 0 and "spare is reached by no sample" in out


@pytest.mark.parametrize("target", ["user_models:batch_norm", "user_models:hidden_mixing"])
def test_mixing_samples_are_a_finding(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = check(capsys, target)
    assert code == 1 and "cannot be trained" in out and "NotSeparable" in out
    code, out, _ = check(capsys, target, "--json")
    result = json.loads(out)
    assert code == 1 and result["ok"] is False and result["error"] == "NotSeparable" and result["reason"]


def test_reduced_loss_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = check(capsys, "user_models:mean_loss")
    assert code == 1 and "reduction" in out


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("user_models:absent", "has no function absent"),
        ("user_models:wrong", "must return (model, loss_fn, batch) or (losses, params), got int"),
        ("user_models:broken", "broken() failed at user_models.py:"),
        ("user_models:broken_loss", "ZeroDivisionError"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("no_such_file.py:f", "there is no file no_such_file.py"),
        ("not-a-target", "expected module:function"),
    ],
)
def test_unusable_function_is_2(target: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = check(capsys, target)
    assert code == 2 and message in err and out == ""
