"""What is refused, and with what words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from clipwise.calibration import Evaluator, evaluate, evaluate_regression
from clipwise.errors import ClipwiseError, DataError

P, Y = np.array([[0.7, 0.3], [0.2, 0.8]]), np.array([0, 1])
Z = np.array([[1.0, -1.0], [0.0, 2.0]])
INF = float("inf")

REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "neither": (lambda: evaluate(labels=Y), "either probabilities or logits=.*neither"),
    "both": (lambda: evaluate(P, Y, logits=Z), "both"),
    "no labels": (lambda: evaluate(P), "labels are missing"),
    "NaN": (lambda: evaluate([[0.5, 0.5], [float("nan"), 1.0]], Y), "not finite. It is row 1;"),
    "inf": (lambda: evaluate([[0.5, 0.5], [INF, 1.0]], Y), "not finite"),
    "negative": (lambda: evaluate([[1.2, -0.2], [0.5, 0.5]], Y), "negative number; pass logits"),
    "sum": (lambda: evaluate([[0.5, 0.5], [0.5, 0.6]], Y), "does not sum to 1.* It is row 1;"),
    "logits as probabilities": (lambda: evaluate(Z, Y), "logits"),
    "sum in float32": (lambda: evaluate(torch.tensor([[0.5, 0.499]]), torch.tensor([0])), "does not sum to 1"),
    "NaN logits": (lambda: evaluate(logits=[[0.0, float("nan")], [0.0, 0.0]], labels=Y), "NaN or [+]inf.*row 0;"),
    "+inf logits": (lambda: evaluate(logits=[[0.0, INF], [0.0, 0.0]], labels=Y), "NaN or [+]inf"),
    "-inf rows": (lambda: evaluate(logits=[[-INF, -INF], [0.0, 0.0]], labels=Y), "only -inf"),
    "label too large": (lambda: evaluate(P, np.array([0, 2])), "from 0 to 1 for 2 classes; that of row 1 is not"),
    "label negative": (lambda: evaluate(P, np.array([0, -100])), "that of row 1 is not"),
    "float labels": (lambda: evaluate(P, np.array([0.0, 1.0])), "labels must be integers"),
    "one-hot labels": (lambda: evaluate(P, np.array([[1, 0], [0, 1]])), "take argmax"),
    "fewer labels": (lambda: evaluate(P, np.array([0])), "2 samples but 1 labels"),
    "empty": (lambda: evaluate(np.empty((0, 3)), np.empty(0, int)), "empty: the shape is"),
    "no classes": (lambda: evaluate(np.empty((3, 0)), np.zeros(3, int)), "empty"),
    "vector": (lambda: evaluate(np.array([0.3, 0.7]), Y), r"stack them: \[1 - p, p\]"),
    "integers": (lambda: evaluate(np.array([[1, 0], [0, 1]]), Y), "swapped"),
    "text": (lambda: evaluate(np.array([["a", "b"]]), Y), "array of numbers"),
    "names without classes": (lambda: evaluate(P, ["a", "b"]), "names of the classes, in the order .* classes="),
    "a name too few": (lambda: evaluate(P, ["a", "b"], classes=["a"]), "2 different names, one for each column"),
    "a name twice": (lambda: evaluate(P, ["a", "b"], classes=["a", "a"]), "2 different names"),
    "an unknown name": (lambda: evaluate(P, ["a", "c"], classes=["a", "b"]), "1 of 2 are not, the first in row 1"),
    "no bins": (lambda: evaluate(P, Y, bins=0), "bins must be an integer from 1"),
    "half a bin": (lambda: evaluate(P, Y, bins=2.5), "bins must be an integer"),  # type: ignore[arg-type]
    "level": (lambda: evaluate(P, Y, level=95), "level must be a number between 0 and 1"),
    "resamples": (lambda: evaluate(P, Y, resamples=10), "at least 100"),
    "resamples below 0": (lambda: evaluate(P, Y, resamples=-1), "at least 0"),
    "nothing seen": (lambda: Evaluator().result(), "update with a batch first"),
    "targets empty": (lambda: evaluate_regression([], []), "empty"),
    "targets NaN": (lambda: evaluate_regression([1.0], [float("nan")]), "targets must be finite; number 0"),
    "predictions fewer": (lambda: evaluate_regression([1.0], [1.0, 2.0]), "one per sample, got 1"),
    "targets matrix": (lambda: evaluate_regression(np.ones((2, 2)), np.ones((2, 2))), r"shape \(samples,\)"),
    "std zero": (lambda: evaluate_regression([1.0], [1.0], std=0.0), "std must be positive, got 0"),
    "coverage level": (lambda: evaluate_regression([1.0], [1.0], std=1.0, levels=[95]), "between 0 and 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusal(case: str) -> None:
    call, words = REFUSED[case]
    with pytest.raises(DataError, match=words) as caught:
        call()
    assert isinstance(caught.value, ClipwiseError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rounded_rows_are_accepted(dtype: torch.dtype) -> None:
    probabilities = torch.softmax(torch.randn(50, 1000, generator=torch.Generator().manual_seed(0)), dim=1)
    assert evaluate(probabilities.to(dtype), torch.zeros(50, dtype=torch.int64)).count == 50


def test_a_class_ruled_out_by_minus_infinity_has_probability_zero() -> None:
    result = evaluate(logits=[[0.0, -INF, 0.0], [1.0, 0.0, -INF]], labels=Y)
    assert result.confidence == pytest.approx((0.5 + np.e / (1 + np.e)) / 2)


def test_tensors_with_a_gradient_are_read() -> None:
    logits = torch.randn(4, 3, requires_grad=True)
    assert evaluate(logits=logits, labels=torch.zeros(4, dtype=torch.int32)).count == 4


def test_a_refused_update_changes_nothing() -> None:
    evaluator = Evaluator(resamples=100)
    evaluator.update(P, Y)
    before: Any = evaluator.result()
    for probabilities, labels in (([[0.5, 0.5], [0.9, 0.9]], Y), (P, [0, 7]), ([[0.2, 0.3, 0.5]], [0])):
        with pytest.raises(DataError):
            evaluator.update(probabilities, labels)
    assert evaluator.result() == before


@pytest.mark.parametrize("labels", [["b", "a"], np.array(["b", "a"]), np.array(["b", "a"], dtype=object)])
def test_labels_may_be_names(labels: Any) -> None:
    assert evaluate(P, labels, classes=("a", "b")) == evaluate(P, [1, 0])
    evaluator = Evaluator(classes=[10, 20])
    evaluator.update(P, np.array([20, 10]))
    assert evaluator.result() == evaluate(P, [1, 0])
