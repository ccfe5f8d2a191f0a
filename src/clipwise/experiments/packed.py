"""The finished runs of a study in two files, which can stand in a repository in the place of their folders.

`results.json`: the estimates of every arm, then one line per run with everything that is not a curve or a bin: metrics,
plan, guarantees, ledger, configuration, provenance. `curves.json.xz`: the rows of metrics.jsonl and the bins of every
run, as compressed JSON. Together they are the files of the folders, and equal runs make equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from clipwise._json import parse_json, read_json
from clipwise.errors import DataError
from clipwise.files import locked, replacing
from clipwise.report import ArmResults, has_rule

__all__ = ["CURVES", "RESULTS", "Record", "noise_of", "packed_runs", "write"]

Record: TypeAlias = dict[str, Any]
"""A run as `Run.record` gives it."""
RESULTS, CURVES = "results.json", "curves.json.xz"
FLOAT32 = "float32 numbers of torch, which end at 5.8 deviations (replaced since: decision 0012)"
"""What runs were made with that do not name their noise."""


def noise_of(arm: ArmResults) -> str | None:
    """Which noise made the runs of an arm; None when it has none.

    >>> import clipwise as cw
    >>> from clipwise.calibration import evaluate_regression
    >>> from clipwise.report import Run, arms_of
    >>> plan = cw.Plan(cw.FullBatch(10), steps=5, clip=cw.NoClip(), noise_multiplier=0.0)
    >>> (arm,) = arms_of([Run("not private", evaluate_regression([1.0, 2.0], [1.0, 2.5]), plan)])
    >>> noise_of(arm) is None
    True
    """
    plan = arm.first.plan
    if not plan.noise_multiplier and not has_rule(plan.clip, ("Unclipped",)):
        return None
    return " and ".join(sorted({str(run.provenance.get("noise", FLOAT32)) for run in arm.runs}))


def write(folder: Path, records: Mapping[str, Record], arms: Sequence[ArmResults]) -> None:
    """Write both files of a folder: the runs by name, and the estimates of their arms."""
    parts = {name: _split(record) for name, record in records.items()}
    curves = _lines({name: large for name, (_, large) in parts.items()})
    digest = hashlib.sha256(curves.encode()).hexdigest()
    estimates = {
        arm.name: {"noise": noise_of(arm), **{name: value.to_dict() for name, value in arm.estimates.items()}}
        for arm in arms
    }
    runs = _lines({name: small for name, (small, _) in parts.items()})
    text = f'{{"arms": {json.dumps(estimates, indent=1)},\n"curves": "{digest}",\n"runs": {runs}}}\n'
    with locked(folder, lambda: None):
        if _digest(folder) != digest:
            with replacing(folder / CURVES, DataError) as file:
                file.write(lzma.compress(curves.encode(), preset=9))
        with replacing(folder / RESULTS, DataError) as file:
            file.write(text.encode())


def packed_runs(folder: Path) -> dict[str, Record]:
    """The records of the runs that `pack` put into two files of a folder, by name; none where neither file is.

    `Run.from_record` makes a run of one.

    Raises: DataError if a file is missing, cut or damaged, or not of the same runs as the other.

    >>> packed_runs(Path("nowhere"))
    {}
    """
    if not (folder / RESULTS).exists() and not (folder / CURVES).exists():
        return {}
    name = RESULTS
    try:
        saved = read_json(folder / RESULTS)
        runs, digest = saved["runs"], saved["curves"]
        name = CURVES
        curves = lzma.decompress((folder / CURVES).read_bytes())
        if hashlib.sha256(curves).hexdigest() != digest:
            raise ValueError(f"it does not belong to {RESULTS}")
        large = parse_json(curves, CURVES)
        name = RESULTS
        return {run: _joined(small, large[run]) for run, small in runs.items()}
    except (OSError, ValueError, EOFError, KeyError, TypeError, AttributeError, lzma.LZMAError) as error:
        raise DataError(
            f"{folder / name} is missing or damaged ({error}). Restore {RESULTS} and {CURVES} of {folder}, or remove "
            "both: runs whose folders are in runs/ are packed again, all others must be trained again."
        ) from error


def _digest(folder: Path) -> str | None:
    """That of the curves in the folder, by its results; None when there are none to be kept."""
    try:
        saved = read_json(folder / RESULTS)
        return str(saved["curves"]) if (folder / CURVES).is_file() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _lines(values: Mapping[str, Any]) -> str:
    """A JSON object with a line for every item."""
    items = (f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in values.items())
    return "{\n" + ",\n".join(items) + "\n}"


def _split(record: Record) -> tuple[Record, Record]:
    """What `results.json` holds of a run, and what the other file holds of it; `_joined` puts them together."""
    result = record["result"]
    test, judged = _apart(result["test"]), {m: _apart(each) for m, each in result["recalibrated"].items()}
    scalars = {**result, "test": test[0], "recalibrated": {m: each[0] for m, each in judged.items()}}
    small = {**record, "result": scalars}
    large = {"curves": small.pop("curves"), "test": test[1], "recalibrated": {m: each[1] for m, each in judged.items()}}
    return small, large


def _apart(metrics: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The single numbers of what was measured, and its bins, histograms and intervals."""
    nested = {name: value for name, value in metrics.items() if isinstance(value, (dict, list))}
    return {name: value for name, value in metrics.items() if name not in nested}, nested


def _joined(small: Record, large: Record) -> Record:
    result = small["result"]
    judged = {m: {**each, **large["recalibrated"][m]} for m, each in result["recalibrated"].items()}
    whole = {**result, "test": {**result["test"], **large["test"]}, "recalibrated": judged}
    return {**small, "result": whole, "curves": large["curves"]}
