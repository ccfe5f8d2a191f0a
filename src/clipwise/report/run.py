"""A run: what was trained, how, what it cost in privacy and what came out, and the folder that keeps it.

What is kept of a loop that has ended is the same for one's own loop and for that of `clipwise train`. Where files lie
on somebody's machine is taken out of what is published: the last part of a path stays.
"""

from __future__ import annotations

import inspect
import math
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

import clipwise
from clipwise._validate import is_line
from clipwise.accounting import Event, Guarantee, Ledger, privacy_panel
from clipwise.calibration import CalibrationResult, Result, Task
from clipwise.errors import DataError
from clipwise.noise import DESCRIPTION
from clipwise.private import Checked, Looked, Private
from clipwise.report.folder import RunFolder, plain
from clipwise.report.plans import UNBOUNDED, AnyPlan, Choices, WrittenPlan, has_rule
from clipwise.report.saved import FORMAT, VERSION, values_of

__all__ = ["SEEDED", "Run", "choices_of", "guarantees_of", "not_checked", "provenance_of", "without_paths"]

NEW_WEIGHTS = "new"
"""In the provenance of a run whose first weights were drawn at random."""
SEEDED = (
    "Trained with a fixed seed. Anyone who knows or guesses it can compute the noise and remove it: keep it secret, or "
    "train without one for a release."
)


@dataclass(frozen=True)
class Run:
    """One training run as values; `save` writes its folder, `load` reads it, and `of` makes it from a finished loop.

    Everything computed from the private training data without noise stands under "private" in the rows of `curves`,
    in `seed`, `config`, `fingerprint` and in the provenance's "command", "seeds" and "seconds" (anyone who knows the
    seed can remove the noise, a fingerprint confirms a guess of the data, and time depends on the sizes of the
    batches); `publishable` leaves all of that out. Warnings must not contain such numbers.
    """

    name: str
    """The label; runs with equal names are seeds of one arm."""
    test: Result
    """Metrics on held-out data."""
    plan: AnyPlan
    """The plan; of a file that has a rule of one's own, or no whole plan, what is written there."""
    choices: Choices = field(default_factory=Choices)
    """What else was chosen: learning rate, optimizer, algorithm."""
    seed: int | None = None
    recalibrated: Mapping[str, CalibrationResult] = field(default_factory=dict)
    """Metrics on the same held-out data after recalibration, by method."""
    curves: tuple[Mapping[str, Any], ...] = ()
    """Rows of metrics.jsonl: "step", "epoch", "epsilon", "test" {metric: value}, "private" {statistic: value}; with an
    adaptive norm also "released" {"clipping_norm": value}, which epsilon covers."""
    ledger: Ledger | None = None
    """What was released; None for a run that is not private."""
    delta: float | None = None
    guarantees: Mapping[str, Guarantee] = field(default_factory=dict)
    """By accountant, as `privacy_panel` gives them."""
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
        if not isinstance(self.name, str) or not self.name.strip() or not is_line(self.name):
            raise DataError(f"a run needs a name of one line that can be printed, got {self.name!r}.")
        stated = any(math.isfinite(guarantee.epsilon) for guarantee in self.guarantees.values())
        if stated and has_rule(self.plan.clip, UNBOUNDED):
            raise DataError(
                f"the run {self.name!r} has the clipping {self.plan.clip!r}, which bounds nothing, and an epsilon: one "
                "of the two is of another run."
            )

    @property
    def task(self) -> Task:
        """What was learnt: classes or numbers."""
        return self.test.task

    @property
    def is_private(self) -> bool:
        """Whether there was a release, noise in all of them, and no clipping without a bound."""
        events = () if self.ledger is None else self.ledger.events
        noisy = bool(events) and all(event.noise_multiplier > 0 for event in events)
        return noisy and not has_rule(self.plan.clip, UNBOUNDED)

    @property
    def is_known(self) -> bool:
        """Whether anything is known of the training; of predictions that were only judged, nothing is."""
        return self.ledger is not None or self.plan != WrittenPlan({})

    @property
    def draws_from(self) -> tuple[int, str | None] | None:
        """The seed of the run's coins and noise; None: the operating system's entropy, or it is not known."""
        return None if self.seed is None else (self.seed, self.provenance.get("arm"))

    @classmethod
    def of(cls, private: Private, test: Result, *, delta: float | None, name: str = "run") -> Run:
        """The run of one's own loop, when it has ended: everything that `private` knows of it, with these metrics.

        It has what a run of `clipwise train` has, made by the same code: plan, ledger, every accountant's answer at
        `delta` (None where the run is not private), seed, versions, and what was not checked. What only the loop knows
        is added with `dataclasses.replace`: `recalibrated`, `curves`, `config`, the data's name in `provenance`.

        >>> import clipwise as cw, torch
        >>> model, x, y = torch.nn.Linear(3, 1), torch.randn(50, 3), torch.randn(50)
        >>> plan = cw.Plan(cw.FullBatch(50), steps=2, clip=cw.Abadi(1.0), noise_multiplier=9.0)
        >>> private = cw.Private(plan, model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> for a, b in private.loader(torch.utils.data.TensorDataset(x, y)):
        ...     done = private.step((model(a).squeeze(1) - b).square())
        >>> test = cw.calibration.evaluate_regression(model(x).detach().squeeze(1), y)
        >>> run = cw.report.Run.of(private, test, delta=1e-5)
        >>> run.guarantees["exact"].printed, run.choices.optimizer, run.warnings
        ('0.558', 'SGD(lr=0.1)', ())
        """
        ledger = private.ledger.kept()  # the guarantees are of what stands there now
        if not ledger.events:
            raise DataError("the run has made no step: there is nothing to report. Call Run.of after the loop.")
        records = private.plan.sampling.sample_size
        groups = private.optimizer.param_groups
        return cls(
            name=name,
            test=test,
            plan=private.plan,
            choices=choices_of(private.optimizer),
            seed=private.seed,
            ledger=ledger,
            delta=delta,
            guarantees={} if delta is None else dict(guarantees_of(ledger.events, delta)),
            provenance=provenance_of(
                seed=private.seed,
                arm=None,
                data={**({} if records is None else {"records": records}), "held_out": test.count},
                looked=private.looked,
                checked=private.checked,
                model=type(private.model).__name__,
                parameters=sum(p.numel() for group in groups for p in group["params"]),
            ),
            warnings=not_checked(private.checked),
        )

    @classmethod
    def judged(cls, name: str, test: Result, *, data: str | None = None, warnings: Iterable[str] = ()) -> Run:
        """Predictions of whatever model, to be shown beside others: nothing is known of how it was trained.

        >>> import clipwise as cw
        >>> Run.judged("theirs", cw.calibration.evaluate([[0.9, 0.1], [0.2, 0.8]], [0, 1])).is_known
        False
        """
        origin = {"held_out": test.count} if data is None else {"name": data, "held_out": test.count}
        return cls(name, test, WrittenPlan({}), provenance={"data": origin}, warnings=tuple(warnings))

    def publishable(self) -> Run:
        """The same run without anything that epsilon does not cover.

        Guarantees: a run that is private keeps nothing that was computed from its training data without noise, nor
        its seed, of which it says only that there was one, nor where on a machine its files lie. A run that is not
        private loses its "private" statistics only: nothing protects it.
        """
        curves = tuple({key: value for key, value in row.items() if key != "private"} for row in self.curves)
        bare = replace(self, curves=curves, fingerprint=None)
        if not self.is_private:
            return bare
        provenance = without_paths(_without(self.provenance, {"command", "seconds", "seeds"}))
        choices = Choices(**without_paths({f.name: getattr(self.choices, f.name) for f in fields(self.choices)}))
        warnings = without_paths((*self.warnings, *([] if self.seed is None else [SEEDED])))
        return replace(bare, seed=None, config=None, provenance=provenance, choices=choices, warnings=warnings)

    def to_dict(self) -> dict[str, Any]:
        """What result.json holds: everything but the curves, the ledger and the configuration."""
        body = {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "task": self.task,
            "seed": self.seed,
            "plan": {**self.plan.to_dict(), **self.choices.to_dict()},
            "delta": self.delta,
            "guarantees": {name: guarantee.to_dict() for name, guarantee in self.guarantees.items()},
            "provenance": self.provenance,
            "test": self.test.to_dict(),
            "recalibrated": {name: result.to_dict() for name, result in self.recalibrated.items()},
            "warnings": self.warnings,
        }
        return {name: plain(value) for name, value in body.items()}

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write metrics.jsonl, ledger.json, config.toml, data.digest and result.json, the last one last.

        Returns the folder. Every file can be read by its owner alone.
        """
        place = RunFolder(folder)
        place.save(self.to_dict(), curves=self.curves, ledger=self.ledger, config=self.config, digest=self.fingerprint)
        return place.path

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Run:
        """Read what `save` wrote; a folder that is missing, cut or of another version is a `DataError`.

        Guarantees: every epsilon of the run is computed from its ledger.json, whatever its result.json says; two that
        do not agree are refused.
        """
        return cls.from_record(cls.record(folder), os.fspath(folder))

    @staticmethod
    def record(folder: str | os.PathLike[str]) -> dict[str, Any]:
        """All files of a run's folder as one JSON value, to keep many runs in one file; `from_record` reads it.

        It holds everything that the folder holds, also what `publishable` leaves out; of more than 2,048 rows of
        curves, as many of them.
        """
        return RunFolder(folder).record()

    @classmethod
    def from_record(cls, record: Mapping[str, Any], where: str) -> Run:
        """The run that `record` made a value of; an error names `where` it stands.

        Raises: DataError, or LedgerError, if the record was edited, cut or written by another version.

        >>> import tempfile
        >>> import clipwise as cw
        >>> plan = cw.Plan(cw.FullBatch(100), steps=10, clip=cw.Abadi(1.0), noise_multiplier=2.0)
        >>> made = Run("small", cw.calibration.evaluate_regression([1.0, 2.0], [1.0, 2.5]), plan)
        >>> Run.from_record(Run.record(made.save(tempfile.mkdtemp())), "here") == made
        True
        """
        return cls(**values_of(record, where))


def _without(value: Any, names: set[str]) -> Any:
    """A nested mapping without these keys, at whatever depth."""
    if not isinstance(value, Mapping):
        return value
    return {key: _without(item, names) for key, item in value.items() if key not in names}


_PACKAGES = ("torch", "numpy", "scipy", "transformers")


@lru_cache(maxsize=16)
def guarantees_of(events: tuple[Event, ...], delta: float) -> Mapping[str, Guarantee]:
    """What every accountant says; the seeds of an experiment share it."""
    return privacy_panel(events, delta)


def not_checked(checked: Checked | None) -> tuple[str, ...]:
    """The warnings of what was not checked in a run; None: samples are not clipped one by one there."""
    if checked is None:
        return ()
    if checked.steps:
        return tuple(
            f"Whether samples mix was checked, except this: {note}. See docs/soundness.md." for note in checked.unclear
        )
    return (f"Whether a sample's loss depends on other samples was {checked}. See docs/soundness.md.",)


def provenance_of(
    *,
    seed: int | None,
    arm: str | None,
    data: Mapping[str, Any],
    looked: Looked,
    checked: Checked | None,
    model: str,
    parameters: int,
) -> dict[str, Any]:
    """Seeds, data, model, versions, and whether a sample's gradient was seen to depend on that sample alone."""
    return {
        "seeds": [seed],
        "arm": arm,
        "data": {**data, "since_the_start": looked.state},
        "model": model,
        "parameters": parameters,
        "noise": DESCRIPTION if seed is None else f"{DESCRIPTION}; labelled seeds",
        "versions": _versions(),
        **({} if checked is None else {"other_samples": str(checked)}),
    }


def _versions() -> dict[str, str]:
    found = {"clipwise": clipwise.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        if name in sys.modules:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                continue
    return found


def choices_of(optimizer: Optimizer) -> Choices:
    """Learning rate and optimizer of a loop; of a rate that a scheduler moves, the one it began with.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
    >>> choices_of(optimizer)
    Choices(learning_rate=0.1, optimizer='SGD(lr=0.1, momentum=0.9)', ...)
    """
    groups = optimizer.param_groups
    begun = list(dict.fromkeys(float(group.get("initial_lr", group["lr"])) for group in groups if "lr" in group))
    scheduled = any("initial_lr" in group for group in groups)
    rate = " and ".join(f"{each:g}" for each in begun) + (", scheduled" if scheduled else "")
    usual = {name: parameter.default for name, parameter in inspect.signature(type(optimizer)).parameters.items()}
    others = {k: v for k, v in groups[0].items() if k in usual and k not in ("params", "lr") and v != usual[k]}
    words = ", ".join(f"{name}={value}" for name, value in ({"lr": rate} | others if begun else others).items())
    return Choices(
        learning_rate=begun[0] if len(begun) == 1 and not scheduled else rate or None,
        optimizer=f"{type(optimizer).__name__}({words})",
    )


_ADDRESS = re.compile(r"((?!file:)\b[a-z][a-z0-9+.-]+://[^\s'\"]+)")
_QUOTED = re.compile(r"(['\"])([^'\"]*)\1")
_ROOTED = re.compile(r"(?:file://|[A-Za-z]:|~\w*|\.{1,2})?[/\\]")
_WORD = re.compile(r"[^\s'\"(),;\[\]<>|]+")
_FRACTION = re.compile(r"(?:[\d.,]+|std)/[\d.,nR]+|add/remove")


def without_paths(value: Any) -> Any:
    """The same value, in which every path in a text is its last part; addresses of the web stay.

    >>> without_paths({"source": "/srv/J. Doe/heart.csv", "model": "HuggingFace(folder='my weights/bert')"})
    {'source': 'heart.csv', 'model': "HuggingFace(folder='bert')"}
    >>> without_paths(["~/code/mine.py:load", "https://example.org/mnist.gz", "2 / R", "512/60,000", "is in /tmp/x/y"])
    ['mine.py:load', 'https://example.org/mnist.gz', '2 / R', '512/60,000', 'is in y']
    >>> without_paths("noise on a grid of about std/1024, a delta over 1/n, in runs/1024")
    'noise on a grid of about std/1024, a delta over 1/n, in 1024'
    """
    if isinstance(value, str):
        return "".join(part if _ADDRESS.fullmatch(part) else _bare(part) for part in _ADDRESS.split(value))
    if isinstance(value, Mapping):
        return {without_paths(key): without_paths(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(without_paths(item) for item in value)
    return value


def _bare(text: str) -> str:
    if _ROOTED.match(text):  # all of it is a path, which may have spaces
        return _last(text)
    quoted = _QUOTED.sub(lambda found: found[1] + _last(found[2]) + found[1], text)
    return _WORD.sub(lambda found: _last(found[0]), quoted)


def _last(text: str) -> str:
    """The last part of a path; a fraction, of what the library names too, and a bar between spaces, is none."""
    if not re.search(r"[/\\]\S", text) or _FRACTION.fullmatch(text) or re.search(r"\s/\s", text):
        return text
    return re.split(r"[/\\]", text.rstrip("/\\"))[-1]
