"""The ablation over clipping norm and learning rate: many short runs, of which only the metrics are kept.

`grid.json` is written again after every cell, so an interrupted grid continues with `--resume`.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache, partial
from math import isnan, nan, sqrt
from pathlib import Path
from typing import Any

from clipwise.calibration import Estimate
from clipwise.data import DataSet
from clipwise.errors import DataError
from clipwise.experiments import Show, side_by_side
from clipwise.plots import Point
from clipwise.report import write_text
from papers.tables import BINS, calibration_of

METRICS = ("accuracy", "nll", "ece", *(f"mce{bins}" for bins in BINS))


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    style: str
    """`flat` or `layerwise`."""
    steps: int
    R: float
    rate: float
    seed: int

    def overrides(self) -> list[str]:
        """What it sets in the configuration; R is the joint sensitivity, which the head's two layers share."""
        each = self.R if self.style == "flat" else self.R / sqrt(2)
        style = "Flat" if self.style == "flat" else "Layerwise"
        return [
            f"name={json.dumps(f'{self.style}, R = {self.R:g}, rate {self.rate:g}')}",  # an arm draws from its own seed
            f"seed={self.seed}",
            f"steps={self.steps}",
            f'clip={{style="{style}",rule="Abadi",R={each!r}}}',
            f"optimizer.learning_rate={self.rate!r}",
            f"evaluation.every={self.steps}",
            "evaluation.resamples=0",
        ]


_KEYS = {*(field.name for field in fields(Cell)), *METRICS}


def measure(cell: Cell, config: Path, settings: Sequence[str]) -> dict[str, Any]:
    """Train one cell; its metrics on the test records, None where it diverged."""
    import torch

    from clipwise.training import Config, train

    torch.set_num_threads(1)  # cells are done side by side instead
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            made = Config.load(config, [*cell.overrides(), *settings])
            run, _ = train(made, output=Path(scratch, "run"), data=_records(config, tuple(settings)), page=False)
        except DataError as error:
            if "diverged" not in str(error):
                raise
            return {**asdict(cell), **dict.fromkeys(METRICS)}
    test, last = calibration_of(run), run.curves[-1]["private"]
    found = {"accuracy": test.accuracy, "nll": test.nll, "ece": test.ece}
    found |= {f"mce{bins}": test.fine_bins.merged(bins).mce for bins in BINS}
    told = {"clipped": last["fraction_clipped"], "seconds": round(time.monotonic() - begun, 2)}
    return {**asdict(cell), **found, **told}


@lru_cache(maxsize=1)
def _records(config: Path, settings: tuple[str, ...]) -> DataSet:
    """Read once in a process: reading takes longer than a cell does."""
    from clipwise.training import Config

    return Config.load(config, settings).data.load()


def complete(wanted: Sequence[Cell], path: Path, config: Path, settings: Sequence[str], jobs: int | None) -> list[Any]:
    """Train the cells that `path` does not have; all of them that it has then."""
    made_of = _made_of(config, settings)
    rows = read(path, made_of)
    done = {tuple(row[name] for name in asdict(wanted[0])) for row in rows} if wanted else set()
    todo = [cell for cell in wanted if tuple(asdict(cell).values()) not in done]
    work = partial(measure, config=config, settings=tuple(settings))
    with Show("cells of the grid") as show:
        for _, row in side_by_side(work, todo, jobs, show, "cells of the grid"):
            rows.append(row)
            rows.sort(key=lambda row: [row[name] for name in asdict(todo[0])])
            cells = ",\n".join(map(json.dumps, rows))
            write_text(path, f'{{"made_of": "{made_of}",\n"cells": [\n{cells}\n]}}\n')
    return rows


def _made_of(config: Path, settings: Sequence[str]) -> str:
    """A hash of what all cells share."""
    from clipwise.training import Config

    text = Config.load(config, settings).text
    name, _, rest = text.partition("\n")  # what a run is called changes nothing
    return hashlib.sha256((rest if name.startswith("name = ") else text).encode()).hexdigest()


def read(path: Path, made_of: str) -> list[Any]:
    """The cells there are.

    Raises: DataError if the file is damaged, or its cells were trained with other settings.
    """
    if not path.is_file():
        return []
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        rows, before = kept["cells"], kept["made_of"]
        sound = all(set(row) >= _KEYS for row in rows)
    except (ValueError, TypeError, KeyError):
        sound = False
    if not sound:
        raise DataError(f"{path} is damaged: restore it, or remove it to train the grid again.")
    if before != made_of:
        raise DataError(f"{path} was trained with other settings; remove it to train the grid again.")
    return list(rows)


def points(rows: Sequence[Any], style: str, steps: int) -> list[Point]:
    """Means over the seeds of every pair of R and learning rate; a cell where a seed diverged has none."""
    chosen = [row for row in rows if (row["style"], row["steps"]) == (style, steps)]
    made = []
    for R, rate in sorted({(row["R"], row["rate"]) for row in chosen}):
        seeds = [row for row in chosen if (row["R"], row["rate"]) == (R, rate)]
        values = {m: [nan if row[m] is None else row[m] for row in seeds] for m in METRICS}
        metrics = {m: Estimate.over_seeds(each) for m, each in values.items()}
        metrics["mce"] = metrics["mce15"]
        made.append(Point(f"R = {R:g}, rate {rate:g}", R, rate, metrics))
    return made


def accuracies(rows: Sequence[Any], style: str, point: Point) -> dict[int, float]:
    """The accuracy of a point by seed."""
    place = (style, point.clip_norm, point.learning_rate)
    return {row["seed"]: row["accuracy"] for row in rows if (row["style"], row["R"], row["rate"]) == place}


def best(rows: Sequence[Any], style: str, steps: int) -> dict[float, Point]:
    """For every R, in order, the point whose learning rate is the most accurate; what diverged does not count."""
    found: dict[float, Point] = {}
    for point in points(rows, style, steps):
        R, accuracy = point.clip_norm, point.metrics["accuracy"].mean
        if R is not None and not isnan(accuracy) and (R not in found or accuracy > found[R].metrics["accuracy"].mean):
            found[R] = point
    return found


def whole(rows: Sequence[Any]) -> bool:
    """Does layerwise clipping, which comes after flat, have the same cells? Else nothing can be said of them."""
    flat, layered = ({(row["R"], row["rate"]) for row in rows if row["style"] == s} for s in ("flat", "layerwise"))
    return bool(flat) and flat == layered
