"""The runs of a study: trained where they are missing, kept where they are whole, refused where they are of another.

Every run is a folder of `clipwise.training.train` in `runs/`, written when it ends, so that an interrupted study
continues: finished runs are kept, a run that was cut continues from its checkpoint. `pack` puts all finished runs into
two files, which count as the folders do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from clipwise.data import DataSet
from clipwise.errors import DataError
from clipwise.experiments import packed
from clipwise.experiments.packed import Record
from clipwise.experiments.study import Study, Trial
from clipwise.experiments.workers import Watch, advance, side_by_side, silent
from clipwise.report import ArmResults, Run, RunFolder, arms_of
from clipwise.training import Config, Progress, train

__all__ = ["pack", "run_all", "runs_of"]

_AGAIN = "To train it again, remove its folder in runs/, if there is one, and add --again."


def run_all(
    study: Study,
    *,
    jobs: int | None = None,
    resume: bool = False,
    force: bool = False,
    command: str = "",
    watch: Watch = silent,
) -> tuple[Run, ...]:
    """Train what is missing of a study, on all cores or in `jobs` processes; its runs, arm by arm.

    A study of which runs are there, in folders or packed, is refused, unless `resume` keeps them and continues, or
    `force` trains them again. With both, runs in folders are kept and packed ones trained again: so continues a study
    that is trained again. `command` is kept with the runs; `watch` sees every run that ends.

    Guarantees: a run that is kept was trained with the settings that it has now. A run that fails, or whose process is
    killed, stops no other; Ctrl-C begins no further run.

    Raises: DataError for runs that are in the way, damaged, or of other settings; ClipwiseError when all others are
    done, if a run failed.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from clipwise.experiments import Arm
    >>> here = Path(tempfile.mkdtemp())
    >>> _ = (here / "config.toml").write_text('''
    ... batch_size = 64
    ... steps = 3
    ... data.source = "digits"
    ... model = { source = "mlp", hidden = [4] }
    ... clip = { rule = "Abadi", R = 1.0 }
    ... optimizer.learning_rate = "1 / R"
    ... privacy.noise_multiplier = 1.0
    ... evaluation.resamples = 0
    ... ''')
    >>> arms = (Arm("R = 1"), Arm("R = 10", ("clip.R=10.0",)))
    >>> runs = run_all(Study(here / "config.toml", arms, seeds=1, folder=here), jobs=1)
    >>> [run.name for run in runs]
    ['R = 1', 'R = 10']
    """
    kept = packed.packed_runs(study.folder)  # before anything is trained: a damaged file must not cost hours
    kept = {} if force else kept
    again, trials = force and not resume, study.trials
    there = [] if again else [trial for trial in trials if trial.begun or trial.name in kept]
    if there and not resume:
        raise DataError(
            f"{study.folder} holds {len(there)} runs of this set: --resume keeps them and continues; to start again, "
            "remove runs/ and add --again."
        )
    for trial in there:
        _check_settings(trial, *_configuration(trial, kept))
    todo = trials if again else [trial for trial in trials if not trial.finished and trial.name not in kept]
    for _ in side_by_side(partial(_carry_out, again=again, command=command), todo, jobs, watch):
        pass  # `watch` has seen it
    return tuple(
        _read(trial, kept)[1]
        for arm in study.arms
        for trial in trials
        if trial.arm == arm  # arm by arm
    )


_records: tuple[Any, DataSet] | None = None


def _data(config: Config) -> DataSet:
    """The records of a run; a process that runs several on the same data reads them once."""
    global _records
    if _records is None or _records[0] != config.data:
        _records = None  # not two at a time in memory
        _records = config.data, config.data.load()
    return _records[1]


def _carry_out(trial: Trial, again: bool, command: str) -> Run:
    """Train one run in this process, from its checkpoint when it was begun before."""
    import torch

    torch.set_num_threads(1)  # runs are done side by side instead
    if trial.finished and not again:  # by another process, meanwhile
        return Run.load(trial.folder)
    config, begun = trial.config(), trial.begun and not again

    def watch(at: Progress) -> None:
        advance(1 / (at.steps - at.first))

    run, _ = train(
        config,
        output=trial.folder,
        resume=begun,
        force=not begun,
        command=command,
        watch=watch,
        data=_data(config),
        page=False,
        note=trial.study.note,
    )
    return run


def runs_of(study: Study) -> tuple[Run, ...]:
    """All finished runs of a study's arms, in the order of the arms: those in `runs/`, and those that are packed.

    Seeds beyond those of the study count too.

    Raises: DataError if one was trained with other settings, or is not whole.

    >>> from pathlib import Path
    >>> runs_of(Study(Path("config.toml"), (), seeds=1, folder=Path("nowhere")))
    ()
    """
    return tuple(run for _, _, run in _finished(study))


def pack(study: Study) -> tuple[ArmResults, ...]:
    """Put all finished runs of a study into `results.json` and `curves.json.xz` of its folder; their arms.

    The folders in `runs/` may be removed then: packed runs count as finished.

    Raises: DataError if there is no run, or one of other settings, or one that is not whole.

    >>> from pathlib import Path
    >>> pack(Study(Path("config.toml"), (), seeds=1, folder=Path("nowhere")))
    Traceback (most recent call last):
    clipwise.errors.DataError: nowhere holds no finished run.
    """
    found = list(_finished(study))
    if not found:
        raise DataError(f"{study.folder} holds no finished run.")
    arms = arms_of(run for _, _, run in found)
    packed.write(study.folder, {name: record for name, record, _ in found}, arms)
    return arms


def _finished(study: Study) -> Iterator[tuple[str, Record, Run]]:
    """Name, record and run of each; where a run is packed and has a folder too, the folder counts."""
    kept = packed.packed_runs(study.folder)
    names = {*kept, *(path.name for path in study.folder.glob("runs/*"))}
    for arm in study.arms:
        seeds = (name.removeprefix(f"{arm.slug}-") for name in names if name.startswith(f"{arm.slug}-"))
        for seed in sorted({int(seed) for seed in seeds if seed.isdecimal()}):
            trial = Trial(study, arm, seed)
            if trial.finished or trial.name in kept:
                record, run = _read(trial, kept)
                if run.name == arm.name:
                    where = _place(trial)
                    _check_settings(trial, run.config, where)
                    if not run.curves or run.curves[-1]["step"] != run.plan.steps:
                        raise DataError(f"{where}: metrics.jsonl is cut. {_AGAIN}")
                    yield trial.name, record, run


def _place(trial: Trial) -> str:
    """Where a run is, for a message."""
    return str(trial.folder) if trial.finished else f"{trial.study.folder / packed.RESULTS}, {trial.name}"


def _read(trial: Trial, kept: Mapping[str, Record]) -> tuple[Record, Run]:
    """A finished run, from its folder or packed."""
    record = Run.record(trial.folder) if trial.finished or trial.name not in kept else kept[trial.name]
    return record, Run.from_record(record, _place(trial))


def _configuration(trial: Trial, kept: Mapping[str, Record]) -> tuple[str | None, str]:
    """The configuration of a run that is there, whole or cut; and where that is."""
    if trial.name in kept and not trial.finished:
        return kept[trial.name]["config"], _place(trial)
    try:
        return RunFolder(trial.folder).config.read_text(encoding="utf-8"), str(trial.folder)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{trial.folder} is not a whole run: {error}. {_AGAIN}") from error


def _check_settings(trial: Trial, config: str | None, where: str) -> None:
    """Refuse to count a run as one of this study that was trained with another configuration."""
    if config != trial.config().text:
        raise DataError(
            f"{where} was trained with other settings than {trial} has now: compare its configuration with "
            f"{trial.study.config}. {_AGAIN}"
        )
