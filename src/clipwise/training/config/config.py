"""The configuration of one run as frozen values; `docs/configuration.md` shows every key.

An unknown key is an error that names the nearest known one; so is a value of the wrong kind or out of range.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import torch

from clipwise.accounting import Steps
from clipwise.calibration import check_resamples, equal_edges
from clipwise.clipping import Clip, Flat, NoClip
from clipwise.errors import DataError, InvalidPlan, InvalidSampling
from clipwise.private import Witness
from clipwise.sampling import BallsInBins, CyclicPoisson, FixedSize, FullBatch, Poisson, Sampling, Shuffled
from clipwise.training.config.datasets import DataChoice, read_data
from clipwise.training.config.models import Architecture, WeightsChoice, read_model, read_weights_choice
from clipwise.training.config.steps import read_clip
from clipwise.training.config.toml import TomlTable, TomlText, nearest

if TYPE_CHECKING:
    from clipwise.training.algorithms import Algorithm

__all__ = ["Batches", "Config", "Evaluation", "Privacy", "Recalibration"]

SAMPLINGS = ("balls-in-bins", "cyclic-poisson", "fixed-size", "full-batch", "poisson", "shuffled")
PUBLIC_METHODS = ("isotonic", "temperature", "vector")
PRIVATE_METHODS = ("private-temperature",)
_STEP = re.compile(r"0|[1-9][0-9]{0,17}")


@dataclass(frozen=True)
class Privacy:
    """`[privacy]`: a target epsilon, or noise (a number, or a schedule of them); 0 for a run that is not private."""

    epsilon: float | None
    noise_multiplier: float | Steps | None
    """With an epsilon only a schedule, whose shape is kept."""
    delta: float | None
    """None: `clipwise.accounting.default_delta` of the number of records."""
    allow_large_delta: bool = False
    """Whether a delta over 1/n is accepted, which promises next to nothing."""

    @property
    def is_private(self) -> bool:
        """Whether there is to be noise."""
        return self.noise_multiplier != 0.0

    @classmethod
    def read(cls, table: TomlTable) -> Privacy:
        """Read the table: exactly one of epsilon, noise_multiplier and private = false; epsilon scales a schedule."""
        private = table.flag("private", True)
        epsilon, noise = table.number("epsilon", None), _read_noise(table)
        delta, allowed = table.number("delta", None, below=1.0), table.flag("allow_large_delta", False)
        table.close()
        chosen = [name for name in ("epsilon", "noise_multiplier") if name in table]
        if not private and (chosen or delta is not None):
            table.fail(None, "private = false goes with nothing else: such a run has no epsilon and no delta.")
        if private and (not chosen or (len(chosen) > 1 and not isinstance(noise, Steps))):
            table.fail(
                None,
                "give exactly one of epsilon, noise_multiplier and private = false; only a schedule of noise goes with "
                "an epsilon.",
            )
        return cls(epsilon, noise if private else 0.0, delta, allowed)


def _read_noise(table: TomlTable) -> float | Steps | None:
    """A positive number, or a table of them by the step at which each begins."""
    if not isinstance(table.raw("noise_multiplier"), dict):
        return table.number("noise_multiplier", None)
    schedule = table.table("noise_multiplier")
    wrong = next((name for name in schedule.values if not _STEP.fullmatch(name)), None)
    if wrong is not None:
        schedule.fail(wrong, "a schedule of noise has step numbers as its keys, such as {0 = 2.0, 500 = 1.0}.")
    noise = {int(name): schedule.number(name) for name in schedule.values}
    try:
        return Steps(noise)
    except InvalidPlan as error:
        table.fail("noise_multiplier", str(error))


@dataclass(frozen=True)
class Batches:
    """How batches are drawn, and for how many steps."""

    sampling: str
    batch_size: float | None
    """Of Poisson sampling the expected one, which may be a fraction."""
    rate: float | None
    """With it the rate is public and the number of records is not: nothing of a run is made from that number."""
    max_batch_size: int | None
    largest: int | None
    """With a rate and a cap: the data never have more records."""
    physical_batch_size: int | None
    steps: int | None
    epochs: float | None
    bands: int | None = None
    """Of cyclic Poisson sampling: the groups that are drawn from in turns."""
    reshuffle: bool = True
    """Of shuffled batches: whether each epoch has an order of its own."""

    @classmethod
    def read(cls, table: TomlTable) -> Batches:
        """Read the keys of the configuration's top level."""
        sampling = table.text("sampling", "poisson", SAMPLINGS)
        size, cap = _batch_size(table, sampling), table.integer("max_batch_size", None)
        rate, largest = table.number("rate", None), table.integer("largest", None)
        physical = table.integer("physical_batch_size", None)
        steps, epochs = table.integer("steps", None), table.number("epochs", None)
        if (size is None) != (sampling == "full-batch"):
            table.fail(None, "batch_size is required, except with sampling = 'full-batch', where it must be omitted.")
        if cap is not None and sampling != "poisson":
            table.fail("max_batch_size", "is for sampling = 'poisson' only.")
        if (steps is None) == (epochs is None):
            table.fail(None, "give exactly one of steps (optimizer steps) and epochs.")
        if rate is not None and sampling != "poisson":
            table.fail("rate", "is for sampling = 'poisson' only.")
        if rate is not None and epochs is not None:
            table.fail("epochs", "would be made from the number of records, which rate keeps to itself: give steps.")
        if rate is None and largest is not None:
            table.fail("largest", "goes with rate and max_batch_size: otherwise the number of records is public.")
        bands, reshuffle = table.integer("bands", None), table.flag("reshuffle", True)
        if (bands is None) == (sampling == "cyclic-poisson"):
            table.fail("bands", "is the number of groups of sampling = 'cyclic-poisson', and for that only.")
        if not reshuffle and sampling != "shuffled":
            table.fail("reshuffle", "is for sampling = 'shuffled' only.")
        batches = cls(sampling, size, rate, cap, largest, physical, steps, epochs, bands, reshuffle)
        if rate is not None:
            try:
                batches.scheme(0)
            except InvalidSampling as error:
                table.fail("rate", str(error))
        return batches

    def scheme(self, sample_size: int) -> Sampling:
        """The sampling of this many records; with a rate their number is not looked at."""
        if self.batch_size is None:
            return FullBatch(sample_size)
        if self.rate is not None:
            cut = {"max_batch_size": self.max_batch_size, "largest": self.largest}
            return Poisson(rate=self.rate, batch_size=self.batch_size, **cut)
        if self.sampling == "poisson":
            return Poisson(sample_size, self.batch_size, self.max_batch_size)
        if self.bands is not None:
            return CyclicPoisson(sample_size, self.batch_size, self.bands)
        if self.sampling == "balls-in-bins":
            return BallsInBins(sample_size, self.batch_size)
        size: Any = self.batch_size
        return (
            Shuffled(sample_size, size, self.reshuffle) if self.sampling == "shuffled" else FixedSize(sample_size, size)
        )

    def count(self, sampling: Sampling) -> int:
        """Optimizer steps: as many as the epochs need in expectation (balls in bins: have), rounded up."""
        if self.steps is not None:
            return self.steps
        assert sampling.sample_size is not None  # a rate goes with steps
        # As the decimals that were written, not their binary neighbours.
        if isinstance(sampling, BallsInBins):
            return math.ceil(Fraction(repr(self.epochs)) * sampling.batches_per_epoch)
        return math.ceil(Fraction(repr(self.epochs)) * sampling.sample_size / Fraction(repr(sampling.batch_size)))


def _batch_size(table: TomlTable, sampling: str) -> float | None:
    """An expected batch size, or a whole one."""
    if sampling.endswith("poisson") or sampling == "balls-in-bins":
        return table.number("batch_size", None)
    if isinstance(table.raw("batch_size"), float):
        table.fail(
            "batch_size",
            f"must be an integer with sampling = {sampling!r}, whose batches have exactly so many records; only the "
            "expected batch size of 'poisson' may be a fraction.",
        )
    return table.integer("batch_size", None)


@dataclass(frozen=True)
class Evaluation:
    """`[evaluation]`: how often the model is measured on held-out records, and how."""

    every: int | None
    """Steps between evaluations; None: a tenth of the run."""
    bins: int
    resamples: int
    """Bootstrap resamples for the intervals of the last evaluation."""
    batch_size: int
    std: float | None
    """Of a regression: the standard deviation of every prediction, whose Gaussian intervals are then judged."""

    @classmethod
    def read(cls, table: TomlTable) -> Evaluation:
        """Read the table."""
        evaluation = cls(
            every=table.integer("every", None),
            bins=table.integer("bins", 15),
            resamples=table.integer("resamples", 1000, least=0),
            batch_size=table.integer("batch_size", 1000),
            std=table.number("std", None),
        )
        table.close()
        try:  # reported now, not after the training that they would end
            equal_edges(evaluation.bins)
            check_resamples(evaluation.resamples, seed=0)
        except DataError as error:
            table.fail(None, str(error))
        return evaluation


@dataclass(frozen=True)
class Recalibration:
    """`[recalibration]`: fitted after training, on public records, or on private ones at a price in epsilon."""

    methods: tuple[str, ...]
    share: float
    """Of the held-out records, for the methods on public data; no metric then uses them."""
    noise_multiplier: float | None
    """Of the private methods."""
    private_share: float | None
    """Of the training records, put aside for the private methods; None: they see those that were trained on."""

    @property
    def public(self) -> tuple[str, ...]:
        """The methods that are fitted on held-out records."""
        return tuple(method for method in self.methods if method in PUBLIC_METHODS)

    @property
    def private(self) -> tuple[str, ...]:
        """The methods that are fitted on training records, with noise."""
        return tuple(method for method in self.methods if method in PRIVATE_METHODS)

    @classmethod
    def read(cls, table: TomlTable, privacy: Privacy) -> Recalibration:
        """Read the table; without one there is no recalibration."""
        methods = table.texts("methods", ())
        for method in methods:
            if method not in (*PUBLIC_METHODS, *PRIVATE_METHODS):
                table.fail(
                    "methods", f"{method!r} is not known; {nearest(method, (*PUBLIC_METHODS, *PRIVATE_METHODS))}"
                )
        made = cls(
            methods,
            table.number("share", 0.5, below=1.0),
            table.number("noise_multiplier", None),
            table.number("private_share", None, below=1.0),
        )
        table.close()
        if len(set(methods)) < len(methods):
            table.fail("methods", "names a method twice.")
        if table.values and not methods:
            table.fail(None, "'methods' is missing or empty.")
        if made.private and made.noise_multiplier is None:
            table.fail(None, f"{made.private[0]} needs a noise_multiplier, the noise of its release.")
        if not made.private and (made.noise_multiplier is not None or made.private_share is not None):
            table.fail(None, f"noise_multiplier and private_share are for {', '.join(PRIVATE_METHODS)} only.")
        if made.private and not privacy.is_private:
            table.fail("methods", f"{made.private[0]} makes no sense in a run that is not private; use temperature.")
        if not made.public and "share" in table:
            table.fail("share", f"is for {', '.join(PUBLIC_METHODS)} only.")
        return made


@dataclass(frozen=True)
class Config:
    """Everything that a run is made from.

    >>> text = '''
    ... batch_size = 64
    ... steps = 100
    ... data.source = "digits"
    ... model.source = "mlp"
    ... clip = { rule = "Abadi", R = 1.0 }
    ... optimizer.learning_rate = 0.5
    ... privacy.epsilon = 3.0
    ... '''
    >>> Config.parse(text, "example.toml").clip
    Flat(rule=Abadi(R=1.0))
    """

    name: str
    algorithm: Algorithm
    """With the choices that are its own, such as the optimizer."""
    seed: int | None
    output: Path
    device: str
    checkpoint_every: int | None
    """Steps between checkpoints; None: as often as there are evaluations."""
    continue_from: Path | None
    """The folder of a finished run whose weights and ledger this one begins with."""
    witness: Witness | None
    """A file on other storage that keeps an older copy of the folder from being continued."""
    batches: Batches
    data: DataChoice
    model: Architecture
    trainable: tuple[str, ...]
    weights: WeightsChoice | None
    """What the network begins with; None: new weights."""
    clip: Clip
    privacy: Privacy
    evaluation: Evaluation
    recalibration: Recalibration
    text: str
    """The configuration in force, as TOML, with the run's name: what a folder keeps is enough to resume its run."""

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Config:
        """Read a file, with `overrides` such as `clip.R=0.5` in force."""
        return cls._of(TomlText.read(path, overrides))

    @classmethod
    def parse(cls, text: str, name: str = "configuration", overrides: Sequence[str] = ()) -> Config:
        """Read a text; `name` stands for the file in messages."""
        return cls._of(TomlText.parse(text, name, overrides))

    @classmethod
    def _of(cls, source: TomlText) -> Config:
        """Read everything, and refuse what nobody asked for."""
        # An algorithm can train, with what is built on configurations: at the top of this module it would be a circle.
        from clipwise.training.algorithms import read_algorithm

        source = source.preferring("steps", "epochs")
        root = source.root()
        name = _name(root, Path(source.name).stem)
        model, privacy = root.table("model"), Privacy.read(root.table("privacy"))
        config = cls(
            name=name,
            algorithm=read_algorithm(root),
            seed=root.integer("seed", None, least=0),
            output=Path(root.text("output", f"runs/{name}")),
            device=_device(root),
            checkpoint_every=root.integer("checkpoint_every", None),
            continue_from=_continue_from(root),
            witness=_witness(root),
            batches=Batches.read(root),
            data=read_data(root.table("data")),
            model=read_model(model),
            trainable=model.texts("trainable", ("*",)),
            weights=read_weights_choice(model),
            clip=_clip(root, privacy),
            privacy=privacy,
            evaluation=Evaluation.read(root.table("evaluation")),
            recalibration=Recalibration.read(root.table("recalibration"), privacy),
            text=source.effective(name=name),
        )
        model.close()
        root.close()
        config.algorithm.check(config, root)
        _check_rate(root, config)
        _check_continued(root, config)
        return config


def _name(root: TomlTable, default: str) -> str:
    """The name of the run, which is also that of its folder in runs/."""
    name = root.text("name", default)
    if PurePath(name).anchor or PurePath(name).parts in ((), ("~",)) or ".." in PurePath(name).parts:
        root.fail("name", f"{name!r} leads out of runs/. Give a plain name; `output` says where the run goes.")
    return name


def _clip(root: TomlTable, privacy: Privacy) -> Clip:
    if "clip" in root or privacy.is_private:
        return read_clip(root.table("clip"))
    return Flat(NoClip())


def _check_rate(root: TomlTable, config: Config) -> None:
    """With a public rate, refuse what would be made from the number of records."""
    if config.batches.rate is None:
        return
    if config.privacy.is_private and config.privacy.delta is None:
        root.fail("rate", "keeps the number of records to itself, so delta has no default: give privacy.delta.")
    if config.recalibration.private_share is not None:
        root.fail("rate", "does not go with recalibration.private_share, a part of the number of records.")
    if config.data.is_cut_from_one_file:
        root.fail(
            "rate", "needs held-out records in a separate file (data.test_file): a part of one file reveals its size."
        )


def _continue_from(root: TomlTable) -> Path | None:
    path = root.text("continue_from", None)
    return None if path is None else Path(path)


def _check_continued(root: TomlTable, config: Config) -> None:
    """Refuse what would make the joint epsilon of a run and the one that it continues too small."""
    if config.continue_from is None:
        return
    if config.weights is not None:
        root.fail("continue_from", "begins with the weights of that run: omit model.weights.")
    if not config.privacy.is_private:
        root.fail("continue_from", "needs noise: a run without it would undo the privacy of the one it continues.")
    if config.recalibration.private_share is not None:
        root.fail("continue_from", "does not go with recalibration.private_share: all records were trained on before.")
    if config.batches.sampling in ("balls-in-bins", "shuffled"):
        named = f"sampling = {config.batches.sampling!r}"
        root.fail("continue_from", f"does not go with {named}: two sequences of epochs have no epsilon.")


def _witness(root: TomlTable) -> Witness | None:
    path, every = root.text("witness", None), root.integer("witness_every", None)
    if path is None:
        if every is not None:
            root.fail("witness_every", "goes with witness, the file that counts ahead.")
        return None
    return Witness(path) if every is None else Witness(path, every)


def _device(root: TomlTable) -> str:
    name = root.text("device", "cpu")
    try:
        torch.empty(0, device=name)
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        root.fail("device", f"{name!r} cannot be used: {str(error).splitlines()[0]}")
    return name
