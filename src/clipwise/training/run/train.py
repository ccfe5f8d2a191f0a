"""One configuration, one run: train, measure, recalibrate, and leave a folder that tells everything."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

import clipwise
from clipwise import report
from clipwise.accounting import Event, privacy_panel
from clipwise.data import DataSet
from clipwise.errors import MissingExtra
from clipwise.noise import DESCRIPTION
from clipwise.private import digests_file
from clipwise.report import Run
from clipwise.training.config import Config
from clipwise.training.run.folder import Folder
from clipwise.training.run.job import Job, Trained, prepare
from clipwise.training.run.measure import evaluate
from clipwise.training.run.recalibrate import recalibrate
from clipwise.training.run.watch import Watch, silent

__all__ = ["train"]

PACKAGES = ("torch", "numpy", "scipy", "transformers")


def train(
    config: Config,
    *,
    output: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    command: str = "",
    watch: Watch = silent,
    data: DataSet | None = None,
    page: bool = True,
    note: str = "",
) -> tuple[Run, Path]:
    """Carry out a configuration; the run and its folder.

    The folder is refused when a finished run is in it (`force` replaces it), or an interrupted one, which `resume`
    continues. `data` are the records that the configuration names, where many runs share them; `page=False` leaves
    the report, its figures and the card out; `note` is added to the run's warnings.
    """
    folder = Folder(Path(config.output if output is None else output))
    folder.check(config.text, resume=resume, force=force)
    _check_extras()
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    job = prepare(config, data)
    with folder.claimed(config.text, resume=resume):
        trained = config.algorithm.train(job, folder, watch, resume)
        run = _run(job, folder, trained, {"command": command, "started": started})
        run = replace(run, warnings=(*run.warnings, note)) if note else run
        _save_weights(job.model, folder.path / "model.safetensors")
        run.save(folder.path)
        folder.checkpoint.unlink()
        digests_file(folder.checkpoint).unlink(missing_ok=True)
        if page:
            report.write(run, folder.path)
    return run, folder.path


def _check_extras() -> None:
    """What the end of a run needs is asked for at its beginning."""
    missing = [name for name in ("jinja2", "matplotlib", "safetensors") if find_spec(name) is None]
    if missing:
        raise MissingExtra(f"a run's folder is written with {' and '.join(missing)}: pip install 'clipwise[train]'.")


def _run(job: Job, folder: Folder, trained: Trained, origin: Mapping[str, Any]) -> Run:
    """Everything that is to be kept of a run that has been trained."""
    test = evaluate(job, job.config.evaluation.resamples)
    ledger = trained.ledger
    recalibrated, problems = recalibrate(job, ledger)
    private = job.delta is not None
    return Run(
        name=job.config.name,
        task=job.data.task,
        seed=job.config.seed,
        test=test,
        recalibrated={**trained.further, **recalibrated},
        curves=folder.rows(),
        plan={**job.plan.to_dict(), **_choices(job)},
        ledger=ledger if private else None,
        delta=job.delta,
        guarantees={} if job.delta is None else _guarantees(ledger.events, job.delta),
        provenance={**origin, **_provenance(job, folder, trained), **_other_samples(trained)},
        warnings=(*job.warnings, *problems, *_unchecked(trained)),
        config=job.config.text,
        fingerprint=job.data.fingerprint,
    )


def _other_samples(trained: Trained) -> dict[str, Any]:
    """Whether a sample's gradient was seen to depend on that sample alone."""
    return {} if trained.checked is None else {"other_samples": str(trained.checked)}


def _unchecked(trained: Trained) -> tuple[str, ...]:
    if trained.checked is None or trained.checked.steps:
        return ()
    return (f"Whether a sample's loss depends on other samples was {trained.checked}. See docs/soundness.md.",)


@lru_cache(maxsize=16)
def _guarantees(events: tuple[Event, ...], delta: float) -> dict[str, dict[str, Any]]:
    """What every accountant says; the seeds of an experiment share it."""
    return {name: guarantee.to_dict() for name, guarantee in privacy_panel(events, delta).items()}


def _choices(job: Job) -> dict[str, Any]:
    """What else was chosen, beside the plan; the learning rate as a number where it is one."""
    rule, names = job.optimizer.learning_rate, list(job.parameters)
    rates = {rule.at(job.plan.style(step), names) for step in (0, job.plan.steps - 1)}
    return {
        "learning_rate": rates.pop() if len(rates) == 1 else str(rule),
        "optimizer": str(job.optimizer),
        "algorithm": job.config.algorithm.name,
        **job.config.algorithm.described(),
    }


def _provenance(job: Job, folder: Folder, trained: Trained) -> dict[str, Any]:
    data = job.data
    return {
        "seconds": round(folder.seconds, 3),
        "seeds": [job.config.seed],
        "arm": None if job.config.seed is None else job.config.name,
        "data": {
            "name": data.name,
            **({} if job.public_records is None else {"records": job.public_records}),
            "held_out": len(job.test),
            "source": data.source,
            "licence": data.licence,
            "note": data.note,
            "inputs": str(job.config.data.inputs),
            "while_training": trained.looked.state,
        },
        "model": repr(job.config.model),
        "parameters": sum(p.numel() for p in job.parameters.values()),
        "noise": DESCRIPTION,
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    found = {"clipwise": clipwise.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        if name in sys.modules:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                continue
    return found


def _save_weights(model: nn.Module, path: Path) -> None:
    from safetensors.torch import save_model

    save_model(model, str(path))
