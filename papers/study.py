"""An experiment of the paper: one configuration, several arms, several seeds of each; trained, kept, compared.

Every run is a folder of `clipwise.training.train`, written when it ends, so a study that was interrupted goes on with
`--resume`: finished runs are kept, a run that was cut goes on from its checkpoint.
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
from clipwise.report import Arm, Run, arms_of
from papers.work import advance, side_by_side, told

METRICS = ("accuracy", "nll", "ece", "mce")


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

    from clipwise.training.config import Config
    from clipwise.training.train import train
    from clipwise.training.watch import Progress

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
    parser.add_argument("--resume", action="store_true", help="go on with an unfinished set; finished runs are kept")
    parser.add_argument("--jobs", type=count, default=os.cpu_count() or 1, help="runs at a time (default: cores)")
    parser.add_argument("--draw", action="store_true", help="train nothing: tables and figures of the runs there are")
    return parser


def jobs(study: Study, root: Path, args: argparse.Namespace) -> list[Job]:
    """Every run of the set, seed by seed, so that an unfinished set has as many arms as possible."""
    known = {variant.name: variant for variant in study.variants}
    unknown = [name for name in args.only or () if name not in known]
    if unknown:
        raise SystemExit(f"no arm is called {unknown[0]!r}; there are {', '.join(map(repr, known))}.")
    seeds = args.seeds or (1 if args.quick else study.seeds)
    chosen = [known[name] for name in dict.fromkeys(args.only)] if args.only else study.variants
    return [
        _job(study, variant, seed, root, args.quick)
        for seed in range(seeds)
        for variant in chosen
        if variant.seeds is None or seed < variant.seeds
    ]


def _job(study: Study, variant: Variant, seed: int, root: Path, quick: bool) -> Job:
    config = study.config or study.folder / "config.toml"
    return Job(config, variant, seed, study.quick if quick else (), root / f"{_slug(variant.name)}-{seed}")


def _slug(name: str) -> str:
    return "-".join("".join(c if c.isalnum() or c == "." else " " for c in name).split()).lower()


def train_all(todo: Sequence[Job], processes: int) -> None:
    """Carry the jobs out, telling of each when it ends."""
    for done, (job, _) in enumerate(side_by_side("runs", carry_out, todo, processes), start=1):
        test = Run.load(job.output).test.to_dict()
        numbers = ", ".join(f"{m} {test[m]:.4g}" for m in (*METRICS, "mse") if test.get(m) is not None)
        print(f"[{done}/{len(todo)}] {job}: {numbers}", flush=True)


def runs_of(study: Study, root: Path, quick: bool = False) -> Iterator[Run]:
    """The finished runs, in the order of the variants.

    Raises: SystemExit if one was trained with other settings, or is not whole.
    """
    for variant in study.variants:
        beginning = f"{_slug(variant.name)}-"
        seeds = (path.name.removeprefix(beginning) for path in root.glob(f"{beginning}[0-9]*"))
        for seed in sorted(int(seed) for seed in seeds if seed.isdecimal()):
            job = _job(study, variant, seed, root, quick)
            if job.finished and (run := Run.load(job.output)).name == variant.name:
                _check_settings(job)
                if not run.curves or run.curves[-1]["step"] != run.plan["steps"]:
                    raise SystemExit(f"{job.output / 'metrics.jsonl'} is cut; remove the folder to train the run anew.")
                yield run


@contextmanager
def place(folder: Path, quick: bool) -> Iterator[Path]:
    """Where runs, figures and tables go: the folder, or for the scaled-down form one that is gone afterwards."""
    with tempfile.TemporaryDirectory() as scratch:
        alone = Path(scratch, folder.name)  # of the same name, with no other recipe beside it
        alone.mkdir()
        yield alone if quick else folder


def _check_settings(job: Job) -> None:
    """Refuse to count a run as one of this set that was trained with other settings."""
    from clipwise.training.config import Config

    if (job.output / "config.toml").read_text(encoding="utf-8") != Config.load(job.config, job.overrides()).text:
        raise SystemExit(
            f"{job.output} was trained with other settings than {job} has now: compare its config.toml with "
            f"{job.config}, and remove the folder to train it anew."
        )


def complete(study: Study, root: Path, args: argparse.Namespace) -> tuple[Arm, ...]:
    """Train the runs that are missing in `root`; the arms of all that are there."""
    every = [] if args.draw else jobs(study, root, args)
    begun = [job for job in every if job.begun]
    if begun and not args.resume:
        raise SystemExit(
            f"{root} holds {len(begun)} runs of this set: --resume keeps them and goes on; remove them to start anew."
        )
    for job in begun:
        _check_settings(job)
    todo = [job for job in every if not job.finished]
    if todo:
        train_all(todo, args.jobs)
    found = list(runs_of(study, root, args.quick))
    if not found:
        raise SystemExit(f"{root} holds no finished run.")
    return arms_of(found)


@told()
def main(study: Study, write: Callable[[Sequence[Arm], Path], str], arguments: Sequence[str] | None = None) -> None:
    """Train what is missing, then `write(arms, folder)` tables and figures; its text is printed."""
    args = parser_of(study.name, study.seeds).parse_args(arguments)
    with place(study.folder, args.quick) as folder:
        print(write(complete(study, folder / "runs", args), folder))
