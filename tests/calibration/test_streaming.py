"""Batch by batch is the same as all at once, and needs no memory for what went by."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from clipwise.calibration import Evaluator, evaluate
from clipwise.calibration.bootstrap import GROUPS
from clipwise.calibration.inputs import _CHUNK_ELEMENTS
from clipwise.calibration.sums import ClassSums, Kept
from tests.calibration.reference import reference, samples
from tests.conftest import HANG


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
