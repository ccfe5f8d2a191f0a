"""`clipwise demo`: a short run of the real thing, and its calibration error against cases done by hand."""

from __future__ import annotations

import json

import pytest
import torch

from clipwise.cli.demo import Score, _verdict, calibration_error
from clipwise.cli.main import main

SHORT = ["demo", "--steps", "12", "--runs", "1"]


def test_short_demo_reports_what_it_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["scores"]) == 6
    assert 0.9 * 5 < result["epsilon"]["exact"] <= 5.0
    assert result["epsilon"]["gdp"] < result["epsilon"]["exact"]
    for score in result["scores"]:
        assert 0 <= score["ece"] <= 1 and score["nll"] > 0
    trained = [score["accuracy"] for score in result["scores"] if score["model"] == "not private"]
    assert trained[0] > 0.5, "twelve steps without privacy learn more than guessing"


def test_demo_prints_a_table_and_both_epsilons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "--epsilon", "2"]) == 0
    out = capsys.readouterr().out
    for text in ("not private", "private, R = 0.1", "private, R = 5", "ECE", "numerically exact", "approximation"):
        assert text in out


def test_same_seed_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    def scores(seed: str) -> object:
        assert main([*SHORT, "--json", "--seed", seed]) == 0
        return json.loads(capsys.readouterr().out)["scores"]

    assert scores("1") == scores("1") != scores("2")


@pytest.mark.parametrize("argv", [["--runs", "0"], ["--steps", "-1"], ["--epsilon", "x"]])
def test_bad_option_is_2(argv: list[str]) -> None:
    assert main(["demo", *argv]) == 2


@pytest.mark.parametrize(
    ("confidence", "correct", "expected"),
    [
        ([1.0, 1.0], [True, True], 0.0),
        ([0.9, 0.9], [True, False], 0.4),
        ([0.5, 1.0], [True, False], 0.75),  # two bins: gaps 0.5 and 1.0, half of the samples each
        ([0.61, 0.65], [True, False], 0.13),  # one bin: accuracy 0.5, confidence 0.63
    ],
)
def test_calibration_error_by_hand(confidence: list[float], correct: list[bool], expected: float) -> None:
    assert calibration_error(torch.tensor(confidence), torch.tensor(correct)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("small_ece", "large_ece", "expected"),
    [
        (0.12, 0.04, "the large clipping norm"),
        (0.02, 0.11, "the small clipping norm"),
        (0.05, 0.04, "too close to call"),
    ],
)
def test_verdict_follows_the_numbers(small_ece: float, large_ece: float, expected: str) -> None:
    scores = [Score("digits", name, 0.7, 0.9, ece, 0.7) for name, ece in (("", 0.0), ("", small_ece), ("", large_ece))]
    assert expected in _verdict(scores)
