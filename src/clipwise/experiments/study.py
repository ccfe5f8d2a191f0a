"""What a study trains, as frozen values: one configuration, several arms, several seeds of each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from clipwise._validate import is_count
from clipwise.errors import InvalidConfig
from clipwise.report import RunFolder
from clipwise.training import Config

__all__ = ["Arm", "Study", "Trial"]


@dataclass(frozen=True)
class Arm:
    """One of the things that a study compares.

    >>> Arm("R = 10", ("clip.R=10.0",)).slug
    'r-10'
    """

    name: str
    """The name of its runs."""
    overrides: tuple[str, ...] = ()
    """What it sets in the study's configuration, as `clipwise train --set` takes it."""
    seeds: int | None = None
    """At most so many runs of it, where the study has more; None: as many as the study."""

    @property
    def slug(self) -> str:
        """The name as the beginning of a folder's name."""
        return "-".join("".join(c if c.isalnum() or c == "." else " " for c in self.name).split()).lower()


@dataclass(frozen=True)
class Study:
    """One configuration in every arm, with the seeds 0, 1, ...; and the folder where the results go.

    >>> study = Study(Path("config.toml"), (Arm("R = 1"), Arm("R = 10", ("clip.R=10.0",))), 2, Path("study"))
    >>> [str(trial) for trial in study.trials]
    ['R = 1, seed 0', 'R = 10, seed 0', 'R = 1, seed 1', 'R = 10, seed 1']
    """

    config: Path
    """The TOML file that `clipwise train` would take."""
    arms: tuple[Arm, ...]
    seeds: int
    folder: Path
    """The folders of the runs are in `runs/` of it."""
    overrides: tuple[str, ...] = ()
    """What all runs set in the configuration; it counts more than what their arms set."""
    note: str = ""
    """A warning that every run has, and so every page on them."""

    @classmethod
    def beside(cls, script: str | Path, arms: tuple[Arm, ...], seeds: int) -> Study:
        """The study of a script with `config.toml` in its folder, where the results go too.

        >>> Study.beside("study/__main__.py", (Arm("R = 1"),), seeds=1).config.as_posix()
        'study/config.toml'
        """
        folder = Path(script).parent
        return cls(folder / "config.toml", arms, seeds, folder)

    def __post_init__(self) -> None:
        if not is_count(self.seeds):
            raise InvalidConfig(f"a study has at least one seed, as a whole number; got {self.seeds!r}.")
        slugs = [arm.slug for arm in self.arms]
        if not all(slugs) or len(set(slugs)) < len(slugs):
            names = ", ".join(repr(arm.name) for arm in self.arms)
            raise InvalidConfig(f"the arms of a study need names that differ in letters or numbers; got {names}.")

    @property
    def trials(self) -> tuple[Trial, ...]:
        """Every run, seed by seed, so that an unfinished study has as many arms as possible."""
        return tuple(
            Trial(self, arm, seed)
            for seed in range(self.seeds)
            for arm in self.arms
            if arm.seeds is None or seed < arm.seeds
        )


@dataclass(frozen=True)
class Trial:
    """One run of a study: an arm with a seed.

    >>> trial = Study(Path("config.toml"), (Arm("R = 1"),), 1, Path("study")).trials[0]
    >>> trial.name, trial.folder.as_posix(), trial.finished
    ('r-1-0', 'study/runs/r-1-0', False)
    """

    study: Study
    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        """The name of its folder, and of the run where it is packed."""
        return f"{self.arm.slug}-{self.seed}"

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.study.folder / "runs" / self.name

    @property
    def finished(self) -> bool:
        """Whether a whole run is in its folder."""
        return RunFolder(self.folder).finished

    @property
    def begun(self) -> bool:
        """Whether there is a run to keep, whole or cut. One that was cut before its first checkpoint is none."""
        return self.finished or RunFolder(self.folder).checkpoint.exists()

    def config(self) -> Config:
        """The configuration of the run."""
        own = (f"name={json.dumps(self.arm.name)}", f"seed={self.seed}")
        return Config.load(self.study.config, [*own, *self.arm.overrides, *self.study.overrides])

    def __str__(self) -> str:
        return f"{self.arm.name}, seed {self.seed}"
