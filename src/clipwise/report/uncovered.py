"""The section of a page that must not be published: exact statistics of the private training data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from clipwise._show import number, percent
from clipwise.report.arms import ArmResults
from clipwise.report.content import arm_row

__all__ = ["uncovered"]


def uncovered(arms: Sequence[ArmResults]) -> dict[str, Any]:
    """The content of the section that must not be published, except its figures."""
    layers = [_layers(place, arm) for place, arm in enumerate(arms)]
    return {"layers": [each for each in layers if each is not None]}


def _layers(place: int, arm: ArmResults) -> dict[str, Any] | None:
    """Per layer: the share of samples clipped and their median norm, averaged over steps and seeds, and at the end."""
    tables = [[row["private"]["layers"] for row in run.curves if _has_layers(row)] for run in arm.runs]
    over_all = _gather(layers for table in tables for layers in table)
    at_end = _gather(layers for table in tables for layers in table[-1:])
    if not over_all:
        return None
    rows = []
    for name, numbers in over_all.items():
        clipped, norms = numbers.get("fraction_clipped"), numbers.get("norm_median")
        last = at_end.get(name, {})
        row = {"name": name, "clipped": _mean_text(clipped, share=True), "norm": _mean_text(norms)}
        row["clipped_last"] = _mean_text(last.get("fraction_clipped"), share=True)
        rows.append({**row, "norm_last": _mean_text(last.get("norm_median")), "width": 100 * _mean(clipped)})
    return {**arm_row(place, arm), "rows": rows}


def _has_layers(row: Mapping[str, Any]) -> bool:
    return bool((row.get("private") or {}).get("layers"))


def _gather(tables: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, list[float]]]:
    """{layer: {statistic: all its values}}."""
    found: dict[str, dict[str, list[float]]] = {}
    for table in tables:
        for layer, numbers in table.items():
            for name, value in numbers.items():
                if isinstance(value, (int, float)):
                    found.setdefault(layer, {}).setdefault(name, []).append(float(value))
    return found


def _mean(values: Sequence[float] | None) -> float:
    return sum(values) / len(values) if values else 0.0


def _mean_text(values: Sequence[float] | None, share: bool = False) -> str:
    if not values:
        return "–"
    return percent(_mean(values)) if share else number(_mean(values))
