"""A run: what was trained, how, what it cost in privacy and what came out, and the folder that keeps it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from clipwise.accounting import Ledger, restated
from clipwise.errors import DataError, LedgerError
from clipwise.files import replacing

if TYPE_CHECKING:
    from clipwise.calibration import CalibrationResult, RegressionResult

    Result: TypeAlias = CalibrationResult | RegressionResult

__all__ = ["COMPARISON", "FINGERPRINT", "SEEDED", "Run", "is_run", "plain", "write_text"]

VERSION = 1
_FORMAT = "clipwise run"
COMPARISON = "clipwise comparison"
FINGERPRINT = "data.digest"
"""The file of a run's folder with the digest of its data, which is in no other one."""
SEEDED = (
    "Trained with a fixed seed. Anyone who knows or guesses it can compute the noise and remove it: keep it secret, or "
    "train without one for a release."
)
_IN_RESULT = ("name", "task", "seed", "plan", "delta", "guarantees", "provenance")
_IN_RECORD = {"result", "ledger", "config", "fingerprint", "curves"}


@dataclass(frozen=True)
class Run:
    """One training run as plain values; `save` writes its folder and `load` reads it.

    Everything computed from the private training data without noise stands under "private" in the rows of `curves`,
    in `seed`, `config`, `fingerprint` and in the provenance's "command", "seeds" and "seconds" (anyone who knows the
    seed can remove the noise, a fingerprint confirms a guess of the data, and time depends on the sizes of the
    batches); `publishable` leaves all of that out. Warnings must not contain such numbers.
    """

    name: str
    """The label; runs with equal names are seeds of one arm."""
    task: Literal["classification", "regression"]
    test: Result
    """Metrics on held-out data."""
    plan: Mapping[str, Any]
    """The plan as JSON (`Plan.to_dict()`), with whatever else was chosen: "learning_rate", "optimizer"."""
    seed: int | None = None
    recalibrated: Mapping[str, CalibrationResult] = field(default_factory=dict)
    """Metrics on the same held-out data after recalibration, by method."""
    curves: tuple[Mapping[str, Any], ...] = ()
    """Rows of metrics.jsonl: "step", "epoch", "epsilon", "test" {metric: value}, "private" {statistic: value}."""
    ledger: Ledger | None = None
    """What was released; None for a run that is not private."""
    delta: float | None = None
    guarantees: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """`Guarantee.to_dict()` by accountant, as `privacy_panel` gives them."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Versions, seeds, command, started, seconds, data set, model, parameters.

    "arm": the name that the seed of the draws was derived with (`clipwise.noise.arm_seed`), where it was.
    """
    warnings: tuple[str, ...] = ()
    config: str | None = None
    """The text of config.toml."""
    fingerprint: str | None = field(default=None, repr=False)
    """A digest of the data, to see whether runs had the same. It is private data: in a separate file, on no page."""

    def __post_init__(self) -> None:
        if self.task not in ("classification", "regression"):
            raise DataError(f"task must be 'classification' or 'regression', got {self.task!r}.")
        if not isinstance(self.name, str) or not self.name.strip():
            raise DataError(f"a run needs a name that is not empty, got {self.name!r}.")

    @property
    def is_private(self) -> bool:
        """Whether there was a release, and noise in all of them."""
        events = () if self.ledger is None else self.ledger.events
        return bool(events) and all(event.noise_multiplier > 0 for event in events)

    @property
    def draws_from(self) -> tuple[int, str | None] | None:
        """The seed of the run's coins and noise; None: the operating system's entropy, or it is not known."""
        return None if self.seed is None else (self.seed, self.provenance.get("arm"))

    def publishable(self) -> Run:
        """The same run without anything that epsilon does not cover.

        Guarantees: a run that is private keeps nothing that was computed from its training data without noise, nor
        its seed, of which it says only that there was one. A run that is not private loses its "private" statistics
        only: nothing protects it.
        """
        curves = tuple({key: value for key, value in row.items() if key != "private"} for row in self.curves)
        bare = replace(self, curves=curves, fingerprint=None)
        if not self.is_private:
            return bare
        provenance = _without(self.provenance, {"command", "seconds", "seeds"})
        stripped = replace(bare, seed=None, config=None, provenance=provenance)
        return stripped if self.seed is None else replace(stripped, warnings=(*self.warnings, SEEDED))

    def to_dict(self) -> dict[str, Any]:
        """What result.json holds: everything but the curves, the ledger and the configuration."""
        body: dict[str, Any] = {"format": _FORMAT, "version": VERSION}
        body.update({name: plain(getattr(self, name)) for name in _IN_RESULT})
        body["test"] = plain(self.test.to_dict())
        body["recalibrated"] = {name: plain(result.to_dict()) for name, result in self.recalibrated.items()}
        body["warnings"] = list(self.warnings)
        return body

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write metrics.jsonl, ledger.json, config.toml, data.digest and result.json, the last one last.

        Returns the folder. Every file can be read by its owner alone.
        """
        path = Path(folder)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"the run's folder {path} cannot be made: {error}.") from error
        rows = [json.dumps(plain(row), allow_nan=False) for row in self.curves]
        write_text(path / "metrics.jsonl", "".join(row + "\n" for row in rows))
        if self.ledger is not None:
            self.ledger.save(path / "ledger.json")
        if self.config is not None:
            write_text(path / "config.toml", self.config)
        if self.fingerprint is not None:
            write_text(path / FINGERPRINT, self.fingerprint)
        write_text(path / "result.json", json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")
        return path

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Run:
        """Read what `save` wrote; a folder that is missing, cut or of another version is a `DataError`."""
        return cls.from_record(cls.record(folder), str(Path(folder) / "result.json"))

    @staticmethod
    def record(folder: str | os.PathLike[str]) -> dict[str, Any]:
        """All files of a run's folder as one JSON value, to keep many runs in one file; `from_record` reads it.

        It holds everything that the folder holds, also what `publishable` leaves out.
        """
        path = Path(folder)
        if not (path / "result.json").is_file():
            raise DataError(f"{path} is not a finished run: it has no result.json.")
        if (path / "ledger.json").exists():
            Ledger.load(path / "ledger.json")  # an edited one is refused, with its name
        return {
            "result": _read_json(path / "result.json"),
            "ledger": _read_json(path / "ledger.json") if (path / "ledger.json").exists() else None,
            "config": _read(path / "config.toml") if (path / "config.toml").exists() else None,
            "fingerprint": _read(path / FINGERPRINT) if (path / FINGERPRINT).exists() else None,
            "curves": list(_rows(path / "metrics.jsonl")),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], where: str) -> Run:
        """The run that `record` made a value of; an error names `where` it stands.

        Raises: DataError, or LedgerError, if the record was edited, cut or written by another version.

        >>> import tempfile
        >>> from clipwise.calibration import evaluate_regression
        >>> made = Run("small", "regression", evaluate_regression([1.0, 2.0], [1.0, 2.5]), plan={})
        >>> Run.from_record(Run.record(made.save(tempfile.mkdtemp())), "here") == made
        True
        """
        if not isinstance(record, Mapping) or set(record) != _IN_RECORD:
            raise DataError(f"{where} is not the record of a run.")
        body = record["result"]
        _check_body(body, where)
        try:
            ledger = None if record["ledger"] is None else Ledger.from_json(json.dumps(record["ledger"]))
        except LedgerError as error:
            raise LedgerError(f"{where}: {error}") from error
        if body["guarantees"] and ledger is None:
            raise DataError(f"{where} has no ledger.json beside it: nothing can be said of the privacy of its run.")
        events = () if ledger is None else ledger.events
        try:
            provenance, before = _without_fingerprint(body["provenance"])
            guarantees = {name: restated(saved, events) for name, saved in body["guarantees"].items()}
            judged = {name: _result("classification", item) for name, item in body["recalibrated"].items()}
            return cls(
                **{name: body[name] for name in _IN_RESULT if name not in ("guarantees", "provenance")},
                guarantees=guarantees,
                provenance=provenance,
                test=_result(body["task"], body["test"]),
                recalibrated=judged,
                curves=tuple(record["curves"]),
                ledger=ledger,
                warnings=tuple(body["warnings"]),
                config=record["config"],
                fingerprint=record["fingerprint"] or before,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{where} has a field that is not as it was written: {error}.") from error


def _check_body(body: Any, where: str) -> None:
    """Refuse what is not the content of a result.json that this version reads."""
    if not isinstance(body, dict) or body.get("format") != _FORMAT:
        raise DataError(f"{where} does not hold a clipwise run.")
    if body.get("version") != VERSION:
        raise DataError(f"{where} has version {body.get('version')!r}, this clipwise reads {VERSION}.")
    expected = {"format", "version", "test", "recalibrated", "warnings", *_IN_RESULT}
    if set(body) != expected:
        raise DataError(f"{where} has missing or unknown fields: {', '.join(sorted(set(body) ^ expected))}.")


def _without_fingerprint(provenance: Mapping[str, Any]) -> tuple[Mapping[str, Any], str | None]:
    """Take the digest of the data out of the provenance: earlier versions wrote it there."""
    data = provenance.get("data")
    if not isinstance(data, dict) or "fingerprint" not in data:
        return provenance, None
    rest = {name: value for name, value in data.items() if name != "fingerprint"}
    return {**provenance, "data": rest}, data["fingerprint"]


def is_run(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a run's own result.json, and not that of a page on several."""
    try:
        body = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True  # a damaged one: `Run.load` says what is wrong with it
    return not isinstance(body, dict) or body.get("format") != COMPARISON


def _result(task: str, record: Mapping[str, Any]) -> Any:
    from clipwise.calibration import CalibrationResult, RegressionResult

    return (CalibrationResult if task == "classification" else RegressionResult).from_dict(record)


def _without(value: Any, names: set[str]) -> Any:
    """A nested mapping without these keys, at whatever depth."""
    if not isinstance(value, Mapping):
        return value
    return {key: _without(item, names) for key, item in value.items() if key not in names}


def plain(value: Any) -> Any:
    """As JSON has it: lists, objects, numbers; a number that is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    if hasattr(value, "tolist"):  # arrays and scalars of NumPy and torch
        return plain(value.tolist())
    raise DataError(f"{value!r} cannot be saved with a run: use numbers, strings, lists and dictionaries.")


def write_text(path: Path, text: str) -> None:
    """A whole file, or the old one and an error that says why."""
    try:
        with replacing(path, DataError) as file:
            file.write(text.encode())
    except OSError as error:  # a full disk, a quota
        raise DataError(f"{path} cannot be written: {error}.") from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error


def _read_json(path: Path) -> Any:
    try:
        return json.loads(_read(path))
    except ValueError as error:
        raise DataError(f"{path} is not complete JSON: {error}.") from error


def _rows(path: Path) -> tuple[Mapping[str, Any], ...]:
    """The rows of a metrics file; a last line that was cut by a crash is left out."""
    if not path.exists():
        return ()
    lines = _read(path).splitlines()
    rows = []
    for k, line in enumerate(lines):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if k == len(lines) - 1:
                break
            raise DataError(f"{path}, line {k + 1}, is not JSON: {error}.") from error
    return tuple(rows)
