"""What stands on a page, as plain values for the template and for result.json.

The section that must not be published has exact statistics of the private training data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from clipwise._show import number, percent
from clipwise._validate import is_number
from clipwise.calibration import Estimate, estimates_of, metric_named
from clipwise.plots.style import look
from clipwise.report.arms import ArmResults
from clipwise.report.folder import COMPARISON
from clipwise.report.reading import UNKNOWN, read
from clipwise.report.run import Run
from clipwise.report.warnings import Joint, warnings_of
from clipwise.report.wording import deviation_text, event_row, interval_text, plan_rows, value_text

__all__ = ["arm_row", "content", "headline", "result", "table_rows", "uncovered"]

_READING = {
    "numerically exact": "the tight value, rounded up",
    "upper bound": "never below the true value",
    "approximation": "no bound: the true value may be larger",
}


def result(arms: Sequence[ArmResults], figures: Mapping[str, Any]) -> dict[str, Any]:
    """The whole comparison as one JSON object: every run, the estimates over the seeds, what the figures show."""
    rows = [
        {
            "name": arm.name,
            "clip_norm": arm.clip_norm,
            "learning_rate": arm.learning_rate,
            "epsilon": arm.epsilon,
            "estimates": {name: value.to_dict() for name, value in arm.estimates.items()},
            "runs": [run.to_dict() for run in arm.runs],
        }
        for arm in arms
    ]
    return {"format": COMPARISON, "version": 1, "arms": rows, "figures": dict(figures)}


def content(arms: Sequence[ArmResults], joint: Joint | None) -> dict[str, Any]:
    """Everything the template prints, except the figures; `joint` is what the private runs cost together."""
    shown = headline(arms)
    rest = [name for name in dict.fromkeys(name for arm in arms for name in arm.estimates) if name not in shown]
    return {
        "reading": read(arms),
        "arms": [arm_row(place, arm) for place, arm in enumerate(arms)],
        "mistakes": _mistakes(arms),
        "headline": _table(arms, shown),
        "more": _table(arms, rest) if rest else None,
        "interval": _interval_note(arms),
        "recalibrated": _recalibrated(arms),
        "privacy": _privacy(arms, joint),
        "warnings": warnings_of(arms, joint),
        "seeds": _seeds(arms),
        "task": arms[0].first.task,
        "made": _made(arms),
    }


def table_rows(arm: ArmResults) -> list[tuple[str, Mapping[str, Estimate]]]:
    """The rows of an arm in a table of metrics: as trained and, where the saved model is recalibrated, as it predicts.

    A reader who compares models compares those that are there to be used.
    """
    rows: list[tuple[str, Mapping[str, Estimate]]] = [(arm.name, arm.estimates)]
    if arm.saved is None:
        return rows
    method, after = arm.saved
    return [(f"{arm.name}, as trained", arm.estimates), (f"{arm.name}, saved ({method})", after)]


def headline(arms: Sequence[ArmResults]) -> list[str]:
    """The metrics that come first; not every arm need have them all."""
    places = {name: metric_named(name, arm.first.task).place for arm in arms for name in arm.estimates}
    first = {name: place for name, place in places.items() if place is not None}
    return sorted(first, key=lambda name: first[name])


def _seeds(arms: Sequence[ArmResults]) -> str:
    counts = sorted({len(arm.runs) for arm in arms})
    each = "" if len(arms) == 1 else " each"
    return f"one run{each}" if counts == [1] else f"{' or '.join(map(str, counts))} seeds{each}"


def arm_row(place: int, arm: ArmResults) -> dict[str, Any]:
    """How the page tells an arm from the others."""
    first = arm.first
    open_ = first.is_known and not first.is_private
    return {"place": place, "name": arm.name, "colour": look(place).colour, "open": open_}


def _mistakes(arms: Sequence[ArmResults]) -> list[dict[str, Any]]:
    """Mistakes in 1,000 predictions, expected and made, with the lengths of their bars."""
    if "confidence" not in arms[0].estimates:
        return []
    counts = []
    for arm in arms:
        shares = [1 - arm.estimates[name].mean for name in ("confidence", "accuracy")]
        counts.append([round(1000 * share) for share in shares])
    top = max(1, *(count for pair in counts for count in pair))
    return [
        {"expected": expected, "made": made, "expected_width": 100 * expected / top, "made_width": 100 * made / top}
        for expected, made in counts
    ]


def _cell(metric: str, estimate: Estimate | None) -> dict[str, str]:
    if estimate is None:
        return {"value": "–", "deviation": "", "interval": ""}
    spread = deviation_text(metric, estimate)
    return {"value": value_text(metric, estimate), "deviation": spread, "interval": interval_text(metric, estimate)}


def _table(arms: Sequence[ArmResults], metrics: Sequence[str]) -> dict[str, Any]:
    rows = []
    for place, arm in enumerate(arms):
        for name, estimates in table_rows(arm):
            cells = [_cell(metric, estimates.get(metric)) for metric in metrics]
            rows.append({**arm_row(place, arm), "name": name, "epsilon": arm.epsilon_text, "cells": cells})
    return {"columns": [metric_named(metric).heading for metric in metrics], "rows": rows}


def _interval_note(arms: Sequence[ArmResults]) -> str:
    if any(len(arm.runs) > 1 for arm in arms):
        return "Mean ± standard deviation over the seeds; below it a 95 % interval of the mean (Student)."
    if any(arm.first.test.intervals for arm in arms):
        return "Below each number its 95 % interval, by bootstrap over the held-out samples; one run each."
    return "One run each, without intervals."


def _recalibrated(arms: Sequence[ArmResults]) -> dict[str, Any] | None:
    """Metrics before and after recalibration, for the arms that have it."""
    metrics = [name for name in headline(arms) if metric_named(name).better]
    rows = []
    for place, arm in enumerate(arms):
        methods = [name for name in arm.first.recalibrated if all(name in run.recalibrated for run in arm.runs)]
        if methods:
            rows.append({**arm_row(place, arm), "method": "as trained", "cells": _cells(arm.estimates, metrics)})
        for method in methods:
            after = estimates_of([run.recalibrated[method] for run in arm.runs])
            rows.append({**arm_row(place, arm), "method": method, "cells": _cells(after, metrics)})
    return {"columns": [metric_named(metric).heading for metric in metrics], "rows": rows} if rows else None


def _cells(estimates: Mapping[str, Estimate], metrics: Sequence[str]) -> list[dict[str, str]]:
    return [_cell(metric, estimates[metric]) for metric in metrics]


def _privacy(arms: Sequence[ArmResults], joint: Joint | None) -> dict[str, Any]:
    """Every different guarantee with the arms it holds for, and what all private runs cost together."""
    groups: dict[str, dict[str, Any]] = {}
    for place, arm in enumerate(arms):
        run = arm.dearest
        if not run.is_private:
            continue
        rows = [
            {"accountant": name, "printed": g.printed, "kind": g.kind, "reading": _READING[g.kind]}
            for name, g in run.guarantees.items()
        ]
        statement = next((g.statement() for g in run.guarantees.values()), "")
        key = repr([(row["accountant"], row["printed"]) for row in rows] + [run.delta, statement])
        group = groups.setdefault(key, {"arms": [], "rows": rows, "statement": statement, "delta": run.delta})
        group["arms"].append(arm_row(place, arm))
    deltas = list(dict.fromkeys(group["delta"] for group in groups.values()))
    return {
        "groups": list(groups.values()),
        "deltas": deltas,
        "together": None if joint is None else str(joint),
        "none": "Nothing on this page is private." if any(arm.first.is_known for arm in arms) else UNKNOWN,
    }


def _made(arms: Sequence[ArmResults]) -> list[dict[str, Any]]:
    """How each arm was made: plan, ledger, provenance, configuration."""
    rows = []
    for place, arm in enumerate(arms):
        first, ledger = arm.first, arm.dearest.ledger
        seeds = [str(run.seed) for run in arm.runs if run.seed is not None]
        seconds = [run.provenance.get("seconds") for run in arm.runs]
        known = [float(value) for value in seconds if is_number(value)]
        provenance = _flat(first.provenance, {"seeds", "seconds", "versions", "command"})
        rows.append(
            {
                **arm_row(place, arm),
                "plan": plan_rows(first.plan, first.choices),
                "ledger": [event_row(event) for event in ledger.events] if ledger is not None else [],
                "ledger_of": _ledger_of(arm),
                "provenance": [
                    *provenance,
                    *([("seed" if len(seeds) == 1 else "seeds", ", ".join(seeds))] if seeds else []),
                    *([("time", f"{sum(known):,.1f} s")] if known else []),
                ],
                "versions": ", ".join(f"{k} {v}" for k, v in first.provenance.get("versions", {}).items()),
                "commands": _commands(arm.runs),
                "config": first.config,
            }
        )
    return rows


def _ledger_of(arm: ArmResults) -> str:
    ledgers = {run.ledger.events for run in arm.runs if run.ledger is not None}
    if len(arm.runs) == 1:
        return "the run"
    return "each run" if len(ledgers) == 1 else "the run that released most"


def _commands(runs: Sequence[Run]) -> list[str]:
    found = [run.provenance.get("command") for run in runs]
    texts = [" ".join(map(str, c)) if isinstance(c, (list, tuple)) else str(c) for c in found if c]
    return list(dict.fromkeys(texts))


def _flat(record: Mapping[str, Any], without: set[str], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in record.items():
        if key in without or value is None or value == "":
            continue
        label = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, Mapping):
            rows += _flat(value, without, f"{label} ")
        else:
            rows.append((label, f"{value:,}" if isinstance(value, int) else str(value)))
    return rows


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
                if is_number(value):
                    found.setdefault(layer, {}).setdefault(name, []).append(float(value))
    return found


def _mean(values: Sequence[float] | None) -> float:
    return sum(values) / len(values) if values else 0.0


def _mean_text(values: Sequence[float] | None, share: bool = False) -> str:
    if not values:
        return "–"
    return percent(_mean(values)) if share else number(_mean(values))
