"""Every algorithm of the registry: it trains, is resumed, is reported, and refuses the keys of the others.

A further algorithm is one row of `ROWS`.
"""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from clipwise.errors import InvalidConfig
from clipwise.plan import Plan
from clipwise.report import Run
from clipwise.training import Config, Progress, train
from clipwise.training.algorithms import ALGORITHMS, Algorithm
from clipwise.training.algorithms.base import private_loop
from clipwise.training.config import LearningRate, OptimizerChoice, TomlTable
from clipwise.training.run import Folder, Job, Trained, Watch

from .common import DIGITS, config

ROOT = Path(__file__).parents[2]

COMMON = f"""
{DIGITS}
name = "tiny"
steps = 3
batch_size = 64
checkpoint_every = 1
clip = {{ rule = "Abadi", R = 1.0 }}
privacy.noise_multiplier = 4.0
evaluation = {{ every = 1, resamples = 0 }}
"""

RATE = "optimizer.learning_rate = 0.5\n"

ROWS = {
    "dp-sgd": RATE,
    "dp-ftrl": RATE + 'sampling = "shuffled"\n',
    "dp-sgd-jl": RATE + "projections = 40\n",
    "dp-sgld": "sgld = { burn_in = 1, thin = 1 }\n",
    "dp-sgnht": "sgnht = { burn_in = 1, thin = 1 }\n",
    "dp-fedavg": RATE + "federated = { users = 100, local_batch_size = 8 }\n",
    "dp-fedsgd": RATE + 'federated = { users = 100, split = "uniform" }\n',
}
"""What each needs besides, in three steps of a tiny network."""

pytestmark = pytest.mark.usefixtures("exact_only", "figures_in_words")


def text_of(name: str) -> str:
    return f'algorithm = "{name}"\n{ROWS[name]}{COMMON}'


def test_every_algorithm_has_a_row() -> None:
    assert ROWS.keys() == ALGORITHMS.keys()


SLOW = ("dp-sgd-jl", "dp-fedavg")  # seconds each


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in ROWS])
def test_it_trains_is_resumed_and_is_reported(name: str, tmp_path: Path) -> None:
    made = config(text=text_of(name))
    whole, folder = train(made, output=tmp_path / "whole")
    assert (folder / "report.html").stat().st_size > 10_000
    assert Run.load(folder).choices.algorithm == name
    assert whole.ledger is not None and sum(event.count for event in whole.ledger.events) == 3

    def pull_the_plug(progress: Progress) -> None:
        if progress.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(made, output=tmp_path / "cut", page=False, watch=pull_the_plug)
    again, _ = train(made, output=tmp_path / "cut", page=False, resume=True)
    assert (again.test, again.recalibrated, again.curves) == (whole.test, whole.recalibrated, whole.curves)
    assert again.ledger == whole.ledger
    weights = [load_file(tmp_path / each / "model.safetensors") for each in ("whole", "cut")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.mark.parametrize("name", ROWS)
def test_it_is_a_frozen_value_that_the_configuration_holds(name: str) -> None:
    made = config(text=text_of(name)).algorithm
    assert type(made) is ALGORITHMS[name] and made.name == name
    assert made == config(text=text_of(name)).algorithm
    with pytest.raises(FrozenInstanceError):
        made.optimizer = None  # type: ignore[attr-defined]


KEYS = sorted({key for kind in ALGORITHMS.values() for key in kind.keys})
FOREIGN = [(name, key) for name, kind in ALGORITHMS.items() for key in KEYS if key not in kind.keys]


@pytest.mark.parametrize(("name", "key"), FOREIGN)
def test_the_keys_of_others_are_refused(name: str, key: str) -> None:
    owners = [repr(other) for other, kind in ALGORITHMS.items() if key in kind.keys]
    with pytest.raises(InvalidConfig) as refused:
        config(f"{key}={{x=1}}", text=text_of(name))
    if key == "optimizer":  # says what to give in its place
        assert f"optimizer: is not for {name}: " in str(refused.value)
    else:
        assert str(refused.value) == f"--set {key}={{x=1}}: {key}: is for algorithm = {' or '.join(owners)} only."


@pytest.mark.parametrize("name", ROWS)
def test_a_misspelt_key_is_named(name: str) -> None:
    key = ALGORITHMS[name].keys[-1]
    with pytest.raises(InvalidConfig, match=f"did you mean '{key}'"):
        Config.parse(f"{key}x = 5\n" + text_of(name))


def test_the_documented_table_is_the_registry() -> None:
    document = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(dp-[\w-]+)` \| (.+?) \| (.+?) \|$", document, flags=re.MULTILINE)
    expected = [(kind.name, kind.about, ", ".join(f"`{key}`" for key in kind.keys)) for kind in ALGORITHMS.values()]
    assert rows == expected


@dataclass(frozen=True)
class Halved(Algorithm):
    """One that is not in the package, as somebody would add it."""

    name: ClassVar[str] = "halved"
    about: ClassVar[str] = "half of every learning rate"
    keys: ClassVar[tuple[str, ...]] = ("half_of",)

    rate: float

    @classmethod
    def read(cls, root: TomlTable) -> Halved:
        return cls(root.number("half_of"))

    def moves(self, plan: Plan, model: nn.Module) -> OptimizerChoice:
        return OptimizerChoice("SGD", LearningRate(self.rate / 2), {})

    def train(self, job: Job, folder: Folder, watch: Watch, resume: bool) -> Trained:
        return private_loop(job, folder, watch, resume, job.optimizer.build(job.parameters.values()))


def test_a_further_algorithm_is_one_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, Halved.name, Halved)
    text = f'algorithm = "halved"\nhalf_of = 1.0\n{COMMON}'
    run, folder = train(config(text=text), output=tmp_path / "run", page=False)
    same, _ = train(config(text=text_of("dp-sgd")), output=tmp_path / "same", page=False)
    assert run.test == same.test and run.choices.algorithm == "halved" and run.choices.learning_rate == 0.5
    assert Config.load(folder / "config.toml").algorithm == Halved(1.0)
    with pytest.raises(InvalidConfig, match="half_of: is for algorithm = 'halved' only"):
        config("half_of=1.0", text=text_of("dp-sgd"))
    with pytest.raises(InvalidConfig, match="optimizer: is for algorithm = 'dp-sgd' or 'dp-ftrl' or 'dp-sgd-jl' or"):
        config("optimizer.learning_rate=0.5", text=text)
