"""The monitor in a training loop."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.errors import DataError
from tests.ntk.common import cross_entropy, mlp, problem


def trained(monitored: bool) -> tuple[torch.Tensor, cw.ntk.NTKMonitor | None]:
    """Twelve private steps, with and without a monitor."""
    torch.manual_seed(0)
    model = mlp(3)
    data = TensorDataset(torch.randn(40, 4), torch.randint(0, 3, (40,)))
    plan = cw.Plan(sampling=cw.Poisson(40, 8), steps=12, clip=cw.Abadi(0.5), noise_multiplier=1.0)
    private = cw.Private(plan, model, torch.optim.SGD(model.parameters(), lr=0.5), seed=3)
    x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
    monitor = cw.ntk.NTKMonitor(model, cross_entropy, x, y, plan.clip, every=5) if monitored else None
    for xb, yb in private.loader(data, physical_batch_size=4):
        if private.step(cross_entropy(model(xb), yb)) and monitor is not None:
            monitor.update()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach(), monitor


def test_training_is_the_same_with_a_monitor() -> None:
    watched, monitor = trained(True)
    alone, _ = trained(False)
    assert torch.equal(watched, alone)
    assert monitor is not None and [record.step for record in monitor.records] == [0, 5, 10]


def test_records_are_what_the_analysis_says() -> None:
    model, loss_fn, x, y = problem("mlp", 3, "cross_entropy")
    seen: list[cw.ntk.NTKRecord] = []
    style = cw.Layerwise(cw.Abadi(0.2))
    monitor = cw.ntk.NTKMonitor(model, loss_fn, x, y, style, every=1, on_record=seen.append)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1
    record = monitor.update()
    assert record is not None and seen == list(monitor.records) and seen[0] != record
    found, at = cw.ntk.analyse(model, loss_fn, x, y, style), cw.ntk.descent(model, loss_fn, x, y, style)
    assert record.loss_rate == pytest.approx(found.loss_rate, rel=1e-9)
    assert (record.loss, record.alignment, record.unclipped_rate) == (at.loss, at.alignment, at.unclipped_rate)
    assert (record.min_quadratic, record.min_eigenvalue) == (found.min_quadratic, found.min_eigenvalue)
    assert record.fraction_clipped == found.fraction_clipped == 1.0
    assert monitor.seconds >= record.seconds > 0


@pytest.mark.parametrize("public", [False, True])
def test_private_probes_are_marked(public: bool, tmp_path: Path) -> None:
    model, loss_fn, x, y = problem("mlp", 1, "mse")
    options = {"public": True} if public else {}
    monitor = cw.ntk.NTKMonitor(model, loss_fn, x, y, cw.Abadi(1.0), **options)
    monitor.save(tmp_path / "monitor.json")
    assert os.name == "nt" or stat.S_IMODE((tmp_path / "monitor.json").stat().st_mode) == 0o600  # private numbers
    saved = json.loads((tmp_path / "monitor.json").read_text())
    assert saved["covered_by_epsilon"] is monitor.covered_by_epsilon is public
    assert (saved["note"] == cw.ntk.NOT_COVERED) is not public
    assert saved["records"][0]["step"] == 0


def test_a_schedule_is_followed() -> None:
    model, loss_fn, x, y = problem("mlp", 1, "mse")
    clip = cw.MixUp(small=cw.Abadi(1e-3), large=cw.Abadi(1e6), switch_at=0.5)
    with pytest.raises(DataError, match="steps="):
        cw.ntk.NTKMonitor(model, loss_fn, x, y, clip)
    monitor = cw.ntk.NTKMonitor(model, loss_fn, x, y, clip, every=1, steps=4)
    for _ in range(4):
        monitor.update()
    assert [record.fraction_clipped for record in monitor.records] == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert [record.symmetric for record in monitor.records] == [False, False, True, True, True]


def test_every_must_be_positive() -> None:
    model, loss_fn, x, y = problem("mlp", 1, "mse")
    with pytest.raises(DataError, match="every"):
        cw.ntk.NTKMonitor(model, loss_fn, x, y, cw.Abadi(1.0), every=0)
