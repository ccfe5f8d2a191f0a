"""One configuration, one run: train, measure, recalibrate, and leave a folder that holds everything."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from clipwise import report
from clipwise._extras import need
from clipwise.accounting import Event, account
from clipwise.calibration import RecalibrationMap
from clipwise.data import DataSet
from clipwise.errors import CheckpointError, DataError
from clipwise.mechanisms import AdaptiveClip
from clipwise.private import digests_file
from clipwise.report import NEW_WEIGHTS, Choices, Run, guarantees_of, lost_steps, not_checked, provenance_of
from clipwise.training.config import Config
from clipwise.training.model import SavedModel
from clipwise.training.run.begun import Begun
from clipwise.training.run.folder import Earlier, Folder, warned_before
from clipwise.training.run.job import Job, Trained, prepare, private_scaling
from clipwise.training.run.measure import Watch, evaluate, recalibrate, silent

__all__ = ["train"]

PACKAGES = ("torch", "numpy", "scipy", "transformers")


def train(
    config: Config,
    *,
    output: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    changed_data: bool = False,
    command: str = "",
    watch: Watch = silent,
    data: DataSet | None = None,
    page: bool = True,
    note: str = "",
    tell: Callable[[str], None] = lambda line: None,
) -> tuple[Run, Path]:
    """Carry out a configuration; the run and its folder.

    The folder is refused when a finished run is in it (`force` replaces it), or an interrupted one, which `resume`
    continues: on the same records, or with `changed_data` on others, which ledger and page then say. `data` are the
    records that the configuration names, where many runs share them; `page=False` leaves the report, its figures and
    the card out; `note` is added to the run's warnings. `tell` hears what a run that continues another one costs with
    it, before anything is released.
    """
    folder = Folder(Path(config.output if output is None else output))
    if config.continue_from is not None and _is_same(config.continue_from, folder.path):
        raise DataError(
            f"a run is not continued in its own folder, {folder.path}: give the new one another name with "
            f"--set name={config.name}-more, or another folder with --output."
        )
    folder.check(config.text, resume=resume, force=force)
    need("train", "a run's folder")
    started = datetime.now(UTC).isoformat(timespec="seconds")
    data = config.data.load() if data is None else data
    earlier = None if resume or config.continue_from is None else Earlier.read(config.continue_from)
    before = () if earlier is None else earlier.on(data.fingerprint, changed_data=changed_data)
    charged = _charged_at_first(config, folder) if resume else (*config.data.charged(), *before)
    job = prepare(config, data, charged, resumed=resume)
    if config.continue_from is not None:
        methods = config.recalibration.methods
        warned = (
            warned_before(config.continue_from, folder, methods) if earlier is None else earlier.warnings_for(methods)
        )
        job = replace(job, warnings=tuple(dict.fromkeys((*job.warnings, *warned))))
    if resume:
        job = replace(job, begun=Begun.resumed(folder, config))
        _tell_lost(folder, tell)
    elif earlier is not None:
        job = replace(job, begun=earlier.fill(job.model, data, config.data))
        for line in (_announced(job, earlier), *earlier.left_behind(config.recalibration.methods)):
            tell(line)
    elif job.begun is not None:
        tell(f"{job.begun.note} ({job.begun.about['tensors']})")
    saved = SavedModel.of(job.data, config.model, config.data.inputs)
    saved.check(job.model)
    with (
        folder.trained_in(config.text, job.data.fingerprint, resume=resume, changed_data=changed_data and resume),
        nullcontext() if earlier is None else earlier.continued_by(folder),
    ):
        if not resume and job.charged:
            folder.charged = job.charged
        if not resume and job.begun is not None:
            job.begun.save(folder)
        trained = config.algorithm.train(job, folder, watch, resume)
        run, in_force = _run(job, folder, trained, {"command": command, "started": started})
        run = replace(run, warnings=(*run.warnings, note)) if note else run
        replace(saved, recalibration=in_force).save(folder, job.model, run.ledger)
        run.save(folder.path)
        folder.checkpoint.unlink()
        digests_file(folder.checkpoint).unlink(missing_ok=True)
        if config.witness is not None:
            Path(config.witness.path).unlink(missing_ok=True)
        if page:
            report.write(run, folder.path)
    return run, folder.path


def _tell_lost(folder: Folder, tell: Callable[[str], None]) -> None:
    """How many steps an interruption has cost."""
    spent = folder.spent()
    lost = lost_steps(spent.ledger.events)
    if lost:
        tell(
            f"of {spent.planned:,} steps {spent.steps:,} are spent, {lost:,} of them in vain: they were begun after "
            "the last checkpoint. A smaller checkpoint_every loses fewer."
        )


def _is_same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _charged_at_first(config: Config, folder: Folder) -> tuple[Event, ...]:
    """What the run was begun with; refused where that is gone, since its epsilon would be too small."""
    charged = folder.charged
    if not charged and (config.continue_from is not None or config.data.columns_ledger is not None):
        raise CheckpointError(
            f"{folder.path} does not say any more what was released before the run (charged.json is gone), and that is "
            "part of its epsilon. Restore the file, or start another run with --output."
        )
    return charged


def _announced(job: Job, earlier: Earlier) -> str:
    """What the earlier run has spent, and both together."""
    assert job.delta is not None  # a run that continues another is private
    scaling = private_scaling(job.config)
    planned = (*job.plan.events, *(() if scaling is None else (scaling.event,)))
    spent, total = account(job.charged, job.delta), account((*job.charged, *planned), job.delta)
    return (
        f"continues {earlier.run.name} ({earlier.folder.path}), which has spent epsilon {spent.printed}; with these "
        f"{job.plan.steps:,} steps it will be {total.printed} in total, at delta {job.delta:g}."
    )


def _run(
    job: Job, folder: Folder, trained: Trained, origin: Mapping[str, Any]
) -> tuple[Run, tuple[str, RecalibrationMap] | None]:
    """Everything that is to be kept of a run that has been trained, and the recalibration in force."""
    test = evaluate(job, job.config.evaluation.resamples)
    ledger = trained.ledger
    for event in job.charged:
        ledger.record(event)
    recalibrated = recalibrate(job, ledger)
    private = job.delta is not None
    run = Run(
        name=job.config.name,
        seed=job.config.seed,
        test=test,
        recalibrated={**trained.further, **recalibrated.results},
        curves=folder.rows(),
        plan=job.plan,
        choices=_choices(job),
        ledger=ledger if private else None,
        delta=job.delta,
        guarantees={} if job.delta is None else dict(guarantees_of(ledger.events, job.delta)),
        provenance={**origin, **_provenance(job, folder, trained), "recalibration": recalibrated.method},
        warnings=(*job.warnings, *_begun_note(job), *recalibrated.problems, *not_checked(trained.checked)),
        config=job.config.text,
        fingerprint=job.data.fingerprint,
    )
    return run, recalibrated.in_force


def _begun_note(job: Job) -> tuple[str, ...]:
    return () if job.begun is None or not job.begun.note else (job.begun.note,)


def _choices(job: Job) -> Choices:
    """What else was chosen, beside the plan; the learning rate as a number where it is one."""
    rule, names = job.optimizer.learning_rate, list(job.parameters)
    rates = {rule.at(job.plan.style(step), names) for step in (0, job.plan.steps - 1)}
    follows = rule.over_R and isinstance(job.plan.clip, AdaptiveClip)
    return Choices(
        learning_rate=rates.pop() if len(rates) == 1 and not follows else str(rule),
        optimizer=str(job.optimizer),
        algorithm=job.config.algorithm.name,
        **job.config.algorithm.described(),
    )


def _first_weights(job: Job) -> str | dict[str, str]:
    """Where they come from, in words."""
    if job.begun is None:
        return NEW_WEIGHTS
    earlier = job.config.continue_from
    return {**job.begun.about, **({} if earlier is None else {"continues": f"the run {Path(earlier).name}"})}


def _provenance(job: Job, folder: Folder, trained: Trained) -> dict[str, Any]:
    data = job.data
    return {
        "seconds": round(folder.seconds, 3),
        "first_weights": _first_weights(job),
        **provenance_of(
            seed=job.config.seed,
            arm=None if job.config.seed is None else job.config.name,
            data={
                "name": data.name,
                **({} if job.public_records is None else {"records": job.public_records}),
                "held_out": len(job.test),
                "source": data.source,
                "licence": data.licence,
                "note": data.note,
                "inputs": str(job.config.data.inputs),
            },
            looked=trained.looked,
            checked=trained.checked,
            model=repr(job.config.model),
            parameters=sum(p.numel() for p in job.parameters.values()),
        ),
    }
