"""The monitor in real training: the paper's MNIST network with small and large clipping norms, flat and layerwise.

The probe set is held out, but private all the same: its numbers are marked as not covered by epsilon.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import clipwise as cw
from papers.figures import save
from papers.mnist.network import network

BATCH, NOISE, RATE = 256, 1.1, 0.15  # of section 5.3; the learning rate is RATE over the sensitivity
MEAN, STD = 0.1307, 0.3081
PROBE = 32
ARMS = {
    "R = 1, flat": cw.Flat(cw.Abadi(1.0)),
    "R = 1, layerwise": cw.Layerwise(cw.Abadi(1.0)),
    "R = 200, flat": cw.Flat(cw.Abadi(200.0)),
}


def cross_entropy(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, y, reduction="none")


def mnist() -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    """The training part, and a probe set from the test part, with public constants for the scale."""
    data = cw.data.load("mnist")
    (x, y), (x_test, y_test) = data.train.tensors, data.test.tensors
    return TensorDataset((x - MEAN) / STD, y), (x_test[:PROBE] - MEAN) / STD, y_test[:PROBE]


def train(clip: Any, steps: int, every: int, seed: int = 0) -> tuple[cw.ntk.NTKMonitor, float, float]:
    """One private run with a monitor; also the seconds of the whole run, and its epsilon."""
    data, x_probe, y_probe = mnist()
    torch.manual_seed(seed)
    model = network()
    sensitivity = clip.sensitivity(sum(bool(list(layer.parameters())) for layer in model))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE / sensitivity)
    plan = cw.Plan(cw.Poisson(len(data), BATCH), steps=steps, clip=clip, noise_multiplier=NOISE)
    private = cw.Private(plan, model, optimizer, seed=seed)
    start = time.perf_counter()
    monitor = cw.ntk.NTKMonitor(model, cross_entropy, x_probe, y_probe, plan.clip, every=every)
    for x, y in private.loader(data):
        if private.step(cross_entropy(model(x), y)):
            monitor.update()
    return monitor, time.perf_counter() - start, private.epsilon(delta=1e-5)


def run(out: Path, steps: int, every: int) -> dict[str, Any]:
    """Every arm; monitor.json and figures/monitor.svg in `out`."""
    monitors, result = {}, {}
    for name, clip in ARMS.items():
        monitor, seconds, epsilon = train(clip, steps, every)
        monitors[name] = monitor
        result[name] = {
            **monitor.to_dict(),
            "steps": steps,
            "epsilon_of_the_weights": epsilon,
            "seconds": round(seconds, 2),
            "seconds_of_the_monitor": round(monitor.seconds, 2),
            "overhead": monitor.seconds / (seconds - monitor.seconds),
        }
        print(f"monitor, {name}: {seconds:.0f} s, of them {monitor.seconds:.1f} s", file=sys.stderr, flush=True)
    save(out, "monitor", cw.plots.ntk_monitor(monitors))
    return result


def markdown(result: dict[str, Any]) -> str:
    """What the monitor saw, from the first to the last measurement, and what it cost."""
    header = ["clipping", "loss", "dL/dt < 0", "alignment", "clipped", "quadratic form ≥ 0", "monitor / training time"]
    lines = [header, ["---"] * len(header)]
    for name, run in result.items():
        records = run["records"]
        count = len(records)
        first, last = records[0], records[-1]
        lines.append(
            [
                name,
                f"{first['loss']:.2f} → {last['loss']:.2f}",
                f"{sum(record['loss_rate'] < 0 for record in records)}/{count}",
                f"{min(record['alignment'] for record in records):.2f} to {max(r['alignment'] for r in records):.2f}",
                f"{first['fraction_clipped']:.0%} → {last['fraction_clipped']:.0%}",
                f"{sum(record['positive_quadratic'] for record in records)}/{count}",
                f"{100 * run['overhead']:.1f} %",
            ]
        )
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
