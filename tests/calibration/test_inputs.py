"""What is refused, and with what words.

Batch by batch is the same as all at once, and needs no memory for what went by.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from clipwise.calibration import Evaluator, evaluate, evaluate_regression
from clipwise.calibration.estimators import GROUPS
from clipwise.calibration.inputs import _CHUNK_ELEMENTS
from clipwise.calibration.sums import ClassSums, Kept
from clipwise.errors import ClipwiseError, DataError
from tests.calibration.reference import reference, samples
from tests.conftest import HANG

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


@pytest.mark.parametrize("sizes", [[2500], [1, 2499], [999, 1, 1, 1499], [100] * 25])
def test_batches_do_not_change_the_answer(sizes: list[int]) -> None:
    probabilities, labels = samples(0, 2500, classes=4)
    whole = evaluate(probabilities, labels, resamples=200, seed=3)
    evaluator = Evaluator(resamples=200, seed=3)
    for part in np.split(np.arange(2500), np.cumsum(sizes)[:-1]):
        evaluator.update(probabilities[part], labels[part])
    result = evaluator.result()
    assert result.metrics == pytest.approx(whole.metrics, abs=1e-12)
    assert result.bins.count == whole.bins.count and result.true_class_histogram == whole.true_class_histogram
    assert result.intervals is not None and whole.intervals is not None
    for name, interval in result.intervals.items():
        assert interval == pytest.approx(whole.intervals[name], abs=1e-9), name


def test_a_result_can_be_asked_for_on_the_way() -> None:
    probabilities, labels = samples(1, 60)
    evaluator = Evaluator()
    evaluator.update(probabilities[:20], labels[:20])
    assert evaluator.result().ece == pytest.approx(reference(probabilities[:20], labels[:20], 15)["ece"])
    evaluator.update(probabilities[20:], labels[20:])
    assert evaluator.result().ece == pytest.approx(reference(probabilities, labels, 15)["ece"])
    assert evaluator.result() == evaluator.result()


def test_rows_are_read_in_parts() -> None:
    classes = 3_000
    n = 2 * (_CHUNK_ELEMENTS // classes) + 5
    logits = torch.randn(n, classes, generator=torch.Generator().manual_seed(0)) * 4
    labels = torch.arange(n) % classes
    result = evaluate(logits=logits, labels=labels)
    log_probability = torch.log_softmax(logits.double(), dim=1)
    assert result.nll == pytest.approx(float(-log_probability[torch.arange(n), labels].mean()))
    confidence = log_probability.exp().amax(dim=1)
    assert result.confidence == pytest.approx(float(confidence.mean()))


def test_many_classes_share_fewer_groups() -> None:
    assert ClassSums(classes=10, bins=15, groups=GROUPS).groups == GROUPS
    assert ClassSums(classes=1_000, bins=15, groups=GROUPS).groups == 279
    assert ClassSums(classes=10_000, bins=15, groups=GROUPS).groups == 50
    assert ClassSums(classes=10_000, bins=15, groups=1).groups == 1


def test_past_its_limit_the_reservoir_is_a_uniform_sample() -> None:
    random, shares = np.random.default_rng(0), []
    for seed in range(60):
        kept = Kept(limit=50, seed=seed)
        for part in np.split(np.arange(400.0), np.sort(random.integers(0, 400, 6))):
            kept.add(part, part > 0, np.zeros(len(part), np.int64))
        confidence = kept._columns[0]
        assert kept.seen == 400 and not kept.complete
        assert len(np.unique(confidence)) == 50  # no sample twice
        shares.append(np.histogram(confidence, bins=4, range=(0, 400))[0])
    counts = np.sum(shares, axis=0)  # 3000 samples, 750 in each quarter of the stream
    assert np.abs(counts - 750).max() < 4 * np.sqrt(750)


def test_the_result_says_when_confidences_were_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipwise.calibration.evaluator.KEEP", 500)
    probabilities, labels = samples(2, 2000)
    sampled = evaluate(probabilities, labels, resamples=100)
    assert sampled.notes == ("Adaptive ECE is from a uniform sample of 500 of the 2,000 samples.",)
    assert sum(sampled.adaptive_bins.count) == 500
    monkeypatch.undo()
    whole = evaluate(probabilities, labels)
    assert whole.notes == ()
    assert sampled.ece == pytest.approx(whole.ece) and sampled.smooth_ece == pytest.approx(whole.smooth_ece)
    assert sampled.adaptive_ece == pytest.approx(whole.adaptive_ece, abs=0.05)


STREAM = """
import resource, sys, torch
from clipwise.calibration import Evaluator
torch.set_num_threads(1)
torch.manual_seed(0)
logits = torch.randn(1000, 200)
labels = torch.randint(0, 200, (1000,))
evaluator = Evaluator(resamples=100)
evaluator.update(logits=logits, labels=labels)
evaluator.result()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(int(sys.argv[1])):
    evaluator.update(logits=logits, labels=labels)
assert evaluator.result().count == 1000 * (1 + int(sys.argv[1]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in kilobytes on Linux only")
def test_memory_stays_while_the_stream_goes_on() -> None:
    """40,000 x 200 probabilities are 64 MB in float64; the stream may add a small part of that."""
    done = subprocess.run(
        [sys.executable, "-c", STREAM, "40"], capture_output=True, text=True, check=True, timeout=HANG
    )
    assert int(done.stdout) < 8_000, f"peak memory grew by {done.stdout.strip()} kB"
