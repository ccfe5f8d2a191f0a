"""An experiment of the paper: one configuration, several arms, several seeds of each; trained, kept, compared.

Every run is a folder of `clipwise.training.train` in `runs/`, written when it ends, so a study that was interrupted
continues with `--resume`: finished runs are kept, a run that was cut continues from its checkpoint. In the end all
finished runs are packed into two files (`papers.packed`), which count as the folders do; the folders are not committed.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from clipwise.cli.arguments import count
from clipwise.report import ArmResults, Run, arms_of
from papers import packed
from papers.packed import Record
from papers.work import advance, side_by_side, told

METRICS = ("accuracy", "nll", "ece", "mce")
_AGAIN = "To train it again, remove its folder in runs/, if there is one, and add --again."


@dataclass(frozen=True)
class Variant:
    """An arm: its name, and what it sets in the study's configuration (as `clipwise train --set` takes it)."""

    name: str
    settings: tuple[str, ...] = ()
    seeds: int | None = None
    """At most so many runs of it, where the study has more; None: as many as the study."""


@dataclass(frozen=True)
class Study:
    """What is trained: one configuration in every variant, with the seeds 0, 1, ..."""

    folder: Path
    variants: tuple[Variant, ...]
    seeds: int
    quick: tuple[str, ...]
    """Settings of the scaled-down form, which shows that everything works and nothing else."""
    config: Path | None = None
    """The configuration; None is `config.toml` of the recipe's folder."""

    @property
    def name(self) -> str:
        return self.folder.name


@dataclass(frozen=True)
class Job:
    """One run of a study."""

    config: Path
    variant: Variant
    seed: int
    settings: tuple[str, ...]
    output: Path

    @property
    def name(self) -> str:
        """Of its folder, and of the run where it is packed."""
        return self.output.name

    @property
    def begun(self) -> bool:
        """Is there a run to keep, whole or cut? One that was cut before its first checkpoint is none."""
        return self.finished or (self.output / "checkpoint").exists()

    @property
    def finished(self) -> bool:
        return (self.output / "result.json").is_file()

    def __str__(self) -> str:
        return f"{self.variant.name}, seed {self.seed}"

    def overrides(self) -> list[str]:
        return [f"name={json.dumps(self.variant.name)}", f"seed={self.seed}", *self.variant.settings, *self.settings]


def carry_out(job: Job) -> None:
    """Train one run in this process, from its checkpoint when it was begun before."""
    import torch

    from clipwise.training import Config, Progress, train

    torch.set_num_threads(1)  # runs are done side by side instead
    if job.finished:  # by another process, meanwhile
        return
    config = Config.load(job.config, job.overrides())

    def watch(at: Progress) -> None:
        advance(1 / (at.steps - at.first))

    train(config, output=job.output, resume=job.begun, force=not job.begun, page=False, watch=watch)


def parser_of(name: str, seeds: int) -> argparse.ArgumentParser:
    """The command line that every recipe has, to which it may add."""
    parser = argparse.ArgumentParser(prog=f"clipwise reproduce {name}")
    parser.add_argument("--quick", action="store_true", help="a scaled-down form: shows that it works, nothing else")
    parser.add_argument("--seeds", type=count, default=None, help=f"runs of each arm (default {seeds})")
    parser.add_argument("--only", nargs="+", metavar="ARM", help="only these arms")
    parser.add_argument("--resume", action="store_true", help="continue an unfinished set; finished runs are kept")
    parser.add_argument("--again", action="store_true", help="train packed runs again; the new ones take their place")
    parser.add_argument("--jobs", type=count, default=os.cpu_count() or 1, help="runs at a time (default: cores)")
    parser.add_argument("--draw", action="store_true", help="train nothing: tables and figures of the runs there are")
    return parser


def jobs(study: Study, folder: Path, args: argparse.Namespace) -> list[Job]:
    """Every run of the set, seed by seed, so that an unfinished set has as many arms as possible."""
    known = {variant.name: variant for variant in study.variants}
    unknown = [name for name in args.only or () if name not in known]
    if unknown:
        raise SystemExit(f"no arm is called {unknown[0]!r}; there are {', '.join(map(repr, known))}.")
    seeds = args.seeds or (1 if args.quick else study.seeds)
    chosen = [known[name] for name in dict.fromkeys(args.only)] if args.only else study.variants
    return [
        _job(study, variant, seed, folder, args.quick)
        for seed in range(seeds)
        for variant in chosen
        if variant.seeds is None or seed < variant.seeds
    ]


def _job(study: Study, variant: Variant, seed: int, folder: Path, quick: bool) -> Job:
    config = study.config or study.folder / "config.toml"
    output = folder / "runs" / f"{_slug(variant.name)}-{seed}"
    return Job(config, variant, seed, study.quick if quick else (), output)


def _slug(name: str) -> str:
    return "-".join("".join(c if c.isalnum() or c == "." else " " for c in name).split()).lower()


def train_all(todo: Sequence[Job], processes: int) -> None:
    """Carry the jobs out, telling of each when it ends."""
    for done, (job, _) in enumerate(side_by_side("runs", carry_out, todo, processes), start=1):
        test = Run.load(job.output).test.to_dict()
        numbers = ", ".join(f"{m} {test[m]:.4g}" for m in (*METRICS, "mse") if test.get(m) is not None)
        print(f"[{done}/{len(todo)}] {job}: {numbers}", flush=True)


def runs_of(study: Study, folder: Path, quick: bool = False) -> Iterator[Run]:
    """The finished runs of a folder, in the order of the variants: those in `runs/`, and those that are packed.

    Raises: SystemExit if one was trained with other settings, or is not whole.
    """
    for _, _, run in _finished(study, folder, quick):
        yield run


def _finished(study: Study, folder: Path, quick: bool) -> Iterator[tuple[str, Record, Run]]:
    """Name, record and run of each; where a run is packed and has a folder too, the folder counts."""
    kept = packed.read(folder)
    names = {*kept, *(path.name for path in folder.glob("runs/*"))}
    for variant in study.variants:
        beginning = f"{_slug(variant.name)}-"
        seeds = (name.removeprefix(beginning) for name in names if name.startswith(beginning))
        for seed in sorted({int(seed) for seed in seeds if seed.isdecimal()}):
            job = _job(study, variant, seed, folder, quick)
            if job.finished:
                record, where = Run.record(job.output), str(job.output)
            elif job.name in kept:
                record, where = kept[job.name], _packed_at(job)
            else:
                continue
            run = Run.from_record(record, where)
            if run.name == variant.name:
                _check_settings(job, run.config, where)
                if not run.curves or run.curves[-1]["step"] != run.plan.steps:
                    raise SystemExit(f"{where}: metrics.jsonl is cut. {_AGAIN}")
                yield job.name, record, run


def _packed_at(job: Job) -> str:
    return f"{job.output.parents[1] / packed.RESULTS}, {job.name}"


@contextmanager
def place(folder: Path, quick: bool) -> Iterator[Path]:
    """Where runs, figures and tables go: the folder, or for the scaled-down form one that is gone afterwards."""
    with tempfile.TemporaryDirectory() as scratch:
        alone = Path(scratch, folder.name)  # of the same name, with no other recipe beside it
        alone.mkdir()
        yield alone if quick else folder


def _check_settings(job: Job, config: str | None, where: str) -> None:
    """Refuse to count a run as one of this set that was trained with another configuration."""
    from clipwise.training import Config

    if config != Config.load(job.config, job.overrides()).text:
        raise SystemExit(
            f"{where} was trained with other settings than {job} has now: compare its configuration with "
            f"{job.config}. {_AGAIN}"
        )


def complete(study: Study, folder: Path, args: argparse.Namespace) -> tuple[ArmResults, ...]:
    """Train the runs that are missing in `folder`, and pack all that are there; their arms."""
    every = [] if args.draw else jobs(study, folder, args)
    there = packed.read(folder)  # before anything is trained: a damaged file must not cost hours
    kept = {} if args.again else there
    begun = [job for job in every if job.begun or job.name in kept]
    if begun and not args.resume:
        raise SystemExit(
            f"{folder} holds {len(begun)} runs of this set: --resume keeps them and continues; to start again, remove "
            "runs/ and add --again."
        )
    for job in begun:
        if job.name in kept and not job.finished:
            _check_settings(job, kept[job.name]["config"], _packed_at(job))
        else:
            _check_settings(job, (job.output / "config.toml").read_text(encoding="utf-8"), str(job.output))
    todo = [job for job in every if not job.finished and job.name not in kept]
    if todo:
        train_all(todo, args.jobs)
    found = list(_finished(study, folder, args.quick))
    if not found:
        raise SystemExit(f"{folder} holds no finished run.")
    arms = arms_of(run for _, _, run in found)
    packed.write(folder, {name: record for name, record, _ in found}, arms)
    return arms


@told()
def main(
    study: Study, write: Callable[[Sequence[ArmResults], Path], str], arguments: Sequence[str] | None = None
) -> None:
    """Train what is missing, then `write(arms, folder)` tables and figures; its text is printed."""
    args = parser_of(study.name, study.seeds).parse_args(arguments)
    with place(study.folder, args.quick) as folder:
        print(write(complete(study, folder, args), folder))
