"""The weights that a run begins with (`[model] weights`): where they come from, and which records they have seen.

What they were trained on is not in the epsilon of the run. That is right for other records than its own, so records
that are known to be the same are refused, along a whole chain of runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from clipwise._json import RESTORE, Fields, checksum
from clipwise.data import DataSet
from clipwise.errors import CheckpointError, DataError
from clipwise.report import Run, RunFolder
from clipwise.training.config import Config, DataChoice, TomlText, WeightsChoice, read_data
from clipwise.training.model import Filled, SavedModel, read_weights, sha256_of

__all__ = ["Begun", "TrainedOn", "begin"]

FORMAT, VERSION = "clipwise first weights", 1
_ABOUT = ("from", "sha256", "tensors", "privacy")


@dataclass(frozen=True)
class TrainedOn:
    """Records that weights were trained on: digests of data sets, and the sources that they were read from."""

    digests: frozenset[str] = frozenset()
    sources: frozenset[str] = frozenset()

    @classmethod
    def by(cls, folder: RunFolder) -> TrainedOn:
        """Those of a finished run itself."""
        choice = read_data(TomlText.read(folder.config).root().table("data"))
        return cls(frozenset(folder.digests) - {""}, frozenset([choice.origin]))

    def __or__(self, other: TrainedOn) -> TrainedOn:
        return TrainedOn(self.digests | other.digests, self.sources | other.sources)

    def has(self, data: DataSet, choice: DataChoice) -> bool:
        """Whether these records, or others from the same source, are among them."""
        return data.fingerprint in self.digests or choice.origin in self.sources

    def to_dict(self) -> dict[str, list[str]]:
        """As JSON."""
        return {"digests": sorted(self.digests), "sources": sorted(self.sources)}

    @classmethod
    def from_fields(cls, fields: Fields) -> TrainedOn:
        """What `to_dict` made."""
        return cls(frozenset(fields.texts("digests")), frozenset(fields.texts("sources")))


@dataclass(frozen=True)
class Begun:
    """What a run was begun with.

    Guarantees: `uncharged` has the records of every run that its weights came from and whose epsilon is not part of
    its own, as far as folders of clipwise say; `charged` those of the runs on its ledger.
    """

    about: Mapping[str, str] = field(default_factory=dict)
    """Of weights that are not charged: "from", "sha256", "tensors" and "privacy", in words; nothing here is private."""
    uncharged: TrainedOn = TrainedOn()
    charged: TrainedOn = TrainedOn()

    @property
    def note(self) -> str:
        """What anyone who reads the epsilon of the run has to know; nothing where all was charged."""
        if not self.about:
            return ""
        return f"The run begins with the weights of {self.about['from']}: {self.about['privacy']}."

    @classmethod
    def continuing(cls, folder: RunFolder) -> Begun:
        """For a run that continues the one in this folder, and has its events on the ledger."""
        before = cls.saved_in(folder) or cls()
        return cls(before.about, before.uncharged, before.charged | TrainedOn.by(folder))

    def check(self, data: DataSet, choice: DataChoice) -> None:
        """Refuse to train on records that the weights have seen without being charged for."""
        if self.uncharged.has(data, choice):
            raise DataError(
                f"the weights come from {self.about.get('from', 'a run')}, and on the way to them these records were "
                "trained on, or others from the same source. That would not be in this epsilon: begin with other "
                "weights."
            )

    def save(self, folder: RunFolder) -> None:
        """Keep it with the run."""
        body = {
            "format": FORMAT,
            "version": VERSION,
            "about": dict(self.about),
            "uncharged": self.uncharged.to_dict(),
            "charged": self.charged.to_dict(),
        }
        folder.begun_with = {**body, "checksum": checksum(body)}

    @classmethod
    def saved_in(cls, folder: RunFolder) -> Begun | None:
        """What `save` wrote; None where a run was begun with new weights."""
        record = folder.begun_with
        if record is None:
            return None
        names = ("format", "version", "about", "uncharged", "charged", "checksum")
        fields = Fields(record, f"{folder.path}: what the run was begun with", names)
        if (record["format"], record["version"], record["checksum"]) != (FORMAT, VERSION, checksum(record)):
            raise DataError(f"{folder.path} does not say any more what its run was begun with. {RESTORE}")
        about = fields.object("about")
        seen = [TrainedOn.from_fields(fields.object(name, ("digests", "sources"))) for name in ("uncharged", "charged")]
        return cls({name: about.text(name) for name in about.closed(_ABOUT if about.value else ()).value}, *seen)

    @classmethod
    def resumed(cls, folder: RunFolder, config: Config) -> Begun | None:
        """What an interrupted run was begun with; refused where that is gone and was not nothing."""
        begun = cls.saved_in(folder)
        if begun is None and config.weights is not None:
            raise CheckpointError(
                f"{folder.path} does not say any more what its weights came from. Restore the file, or start another "
                "run with --output."
            )
        return begun


def begin(model: nn.Module, config: Config, data: DataSet) -> Begun | None:
    """Fill a network with the weights that the configuration names, if it names any."""
    choice = config.weights
    if choice is None:
        return None
    folder = _run_of(choice.path)
    begun = _with_file(model, choice) if folder is None else _with_run(model, choice, folder, config, data)
    wrong = [name for name, p in model.named_parameters() if not bool(torch.isfinite(p).all())]
    if wrong:
        raise DataError(f"the weights {choice.path} are not finite in {wrong[0]!r}: training cannot begin there.")
    if config.privacy.is_private:
        begun.check(data, config.data)
    return begun


def _run_of(path: Path) -> RunFolder | None:
    """The run that a path names by its folder or by the model in it; None for a file of other weights."""
    if path.is_dir():
        return RunFolder(path)
    folder = RunFolder(path.resolve().parent)
    is_run = folder.finished or folder.description.exists()
    return folder if is_run and path.resolve() == folder.model.resolve() else None


def _with_file(model: nn.Module, choice: WeightsChoice) -> Begun:
    sha256 = sha256_of(choice.path)  # first: it reads ordinary files only
    filled = read_weights(model, choice.path, partial=choice.partial)
    privacy = (
        "what they were trained on is not known here and not in this epsilon. If records of this run were among it, or "
        "others that need protection, no number here covers that"
    )
    return Begun(_about(f"the file {choice.path.name}", sha256, filled, privacy))


def _with_run(model: nn.Module, choice: WeightsChoice, folder: RunFolder, config: Config, data: DataSet) -> Begun:
    if not folder.finished:
        raise DataError(
            f"model.weights = {str(choice.path)!r} is a folder, but not that of a finished run. Name a safetensors "
            "file, or a run of clipwise train."
        )
    run, own = Run.load(folder.path), TrainedOn.by(folder)
    saved = SavedModel.read(folder, trust_code=True)  # the weights are those of the run; no network is built from it
    if saved.ledger is not None and sha256_of(folder.ledger) != saved.ledger:
        raise DataError(f"{folder.ledger} is not the ledger that the weights beside it were saved with. {RESTORE}")
    if config.privacy.is_private and own.has(data, config.data):
        raise DataError(
            f"the run in {folder.path} was trained on these records, or on others from the same source, and that would "
            f"not be in this epsilon. {_remedy(run, folder)}"
        )
    before = Begun.saved_in(folder) or Begun()
    filled = read_weights(model, folder.model, partial=choice.partial)
    origin = f"the run {run.name!r} on {_data_of(run)}"
    about = _about(origin, saved.weights, filled, _privacy_of(run, before))
    return Begun(about, own | before.uncharged | before.charged)


def _remedy(run: Run, folder: RunFolder) -> str:
    if run.is_private:
        return (
            f"Use --continue-from {folder.path} instead of model.weights: it charges both runs together (with "
            "--changed-data, on other records from there)."
        )
    return "It is not private, so nothing protects them any more: begin with other weights."


def _about(origin: str, sha256: str, filled: Filled, privacy: str) -> dict[str, str]:
    return dict(zip(_ABOUT, (origin, sha256, str(filled), privacy), strict=True))


def _data_of(run: Run) -> str:
    data = run.provenance.get("data")
    return str(data.get("name", "other data")) if isinstance(data, Mapping) else "other data"


def _privacy_of(run: Run, before: Begun) -> str:
    """What protects the records of the run that the weights are from, and what does not."""
    exact = next(iter(run.guarantees.values()), None)
    if not run.is_private or exact is None:
        said = "that run is not private, so nothing protects its records, and this epsilon does not either"
    else:
        said = (
            f"that run has epsilon = {exact.printed} at delta {exact.delta:g} ({exact.kind}, one {exact.unit}) for its "
            "own records, which is not part of this epsilon. For a record that is in both data sets both count"
        )
    return f"{said}. It began with the weights of {before.about['from']}" if before.about else said
