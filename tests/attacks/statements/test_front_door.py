"""What a run, its saved model or a page says, when the files that it was given say less than was done."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import clipwise as cw
from clipwise.accounting import Event, PrivateCalibration, PrivateStatistics, account
from clipwise.cli.main import main
from clipwise.errors import DataError, InvalidConfig
from clipwise.report import Run
from clipwise.report.warnings import joint_of
from clipwise.training import load, train
from clipwise.training.config.models import SavedTransformer
from tests.training.common import TINY, config

STATISTICS = PrivateStatistics(5.0)
STEPS = cw.GaussianSteps(cw.Poisson(300, 30), 2.0, 10)


def trained(folder: Path, *overrides: str, seed: str = "") -> Run:
    return train(config(*overrides, text=TINY.replace("seed = 3\n", seed)), output=folder / "run", page=False)[0]


# A schema, and the ledger that is said to have paid for it


def with_columns(folder: Path, *events: Event) -> str:
    rows = "".join(f"{k % 7},{k % 5},{'ab'[k % 2]}\n" for k in range(300))
    (folder / "table.csv").write_text(f"u,v,y\n{rows}")
    cw.Ledger(events).save(folder / "columns.json")
    columns = "{u={kind='number',low=0,high=6},v={kind='number',low=0,high=4}}"
    files = f"source='{folder / 'table.csv'}',columns_ledger='{folder / 'columns.json'}'"
    return f"data={{{files},target='y',classes=['a','b'],columns={columns}}}"


@pytest.mark.parametrize("events", [(), (STEPS,)], ids=["nothing", "steps only"])
def test_a_ledger_on_which_nobody_paid_for_the_columns_is_refused(tmp_path: Path, events: tuple[Event, ...]) -> None:
    with pytest.raises(InvalidConfig, match="has no statistics"):
        trained(tmp_path, with_columns(tmp_path, *events))


def test_an_order_on_the_ledger_of_the_columns_is_no_order_of_this_run(tmp_path: Path) -> None:
    """Equal events of two runs were counted as one sequence of epochs."""
    shuffled = cw.GaussianSteps(cw.Shuffled(240, 64), 1.0, 2)
    with pytest.raises(InvalidConfig, match="two sequences of epochs"):
        trained(tmp_path, with_columns(tmp_path, STATISTICS, shuffled), "sampling='shuffled'")


def test_what_else_is_on_the_ledger_of_the_columns_counts_in_full(tmp_path: Path) -> None:
    """A calibration counted as disjoint from this run, and steps as if they were this run's own: it could not be read.

    The smaller epsilon was that of the calibration alone.
    """
    apart = PrivateCalibration(1.0, disjoint=True)
    run = trained(tmp_path, with_columns(tmp_path, STATISTICS, STEPS, apart), "privacy.delta=1e-4")
    assert run.ledger is not None and Run.load(tmp_path / "run") == run
    own = [event for event in run.ledger.events if event.reason == "training"]
    whole = account([*own, STATISTICS, STEPS, PrivateCalibration(1.0)], 1e-4)
    assert run.guarantees["exact"].epsilon == pytest.approx(whole.epsilon, rel=1e-9)


# Classes, bounds and seeds


def some_records() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For `data.source`: the largest label stands in one record."""
    x = torch.linspace(-1, 1, 240).reshape(-1, 2)
    return x[:100], torch.arange(100) % 3, x[100:], torch.arange(20) % 3


def test_classes_of_a_function_are_said_to_be_read_off(tmp_path: Path) -> None:
    run = trained(tmp_path, f"data={{source='{__name__}:some_records'}}", "batch_size=20")
    assert any("read off the records" in warning for warning in run.warnings)


def test_the_guarantee_of_a_loaded_model_repeats_the_warnings_of_its_run(tmp_path: Path) -> None:
    source = with_columns(tmp_path, STATISTICS).replace(",classes=['a','b']", "")
    trained(tmp_path, source, seed="seed = 3\n")
    guarantee = load(tmp_path / "run").guarantee
    assert guarantee is not None
    said = " ".join(guarantee.warnings)
    assert "The classes are those in the records" in said and "fixed seed" in said


# Pages


def judged(name: str, *events: Event) -> Run:
    result = cw.calibration.evaluate(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 1]))
    ledger = cw.Ledger(events)
    guarantees = {"exact": account(events, 1e-4)}
    return Run(
        name, result, cw.Plan(STEPS.sampling, 10, cw.Abadi(1.0), 2.0), ledger=ledger, delta=1e-4, guarantees=guarantees
    )


def test_records_put_aside_by_one_run_may_be_trained_on_by_another() -> None:
    """Of two runs together, the calibration of one counted beside the training of both, and not with either."""
    costly = PrivateCalibration(0.7, disjoint=True)
    joint = joint_of([judged("aside", STEPS, costly), judged("all", STEPS)])
    truth = account([STEPS, PrivateCalibration(0.7)], 1e-4).epsilon
    assert joint is not None and joint.guarantee is not None and joint.guarantee.epsilon >= truth


def test_a_page_does_not_make_an_interrupted_run_look_finished(tmp_path: Path) -> None:
    """Its curves were replaced, and it could not be resumed."""
    (tmp_path / "p.csv").write_text("a,b,label\n0.9,0.1,a\n0.4,0.6,b\n")
    folder = tmp_path / "interrupted"
    folder.mkdir()
    (folder / "checkpoint").write_bytes(b"steps")
    arguments = ["evaluate", str(tmp_path / "p.csv"), "--resamples", "0", "--output", str(folder)]
    assert main(arguments) == 2
    assert [each.name for each in folder.iterdir()] == ["checkpoint"]


# Code that a model names

BERT = {"model_type": "bert", "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 10}
FOR = SimpleNamespace(name="data", outputs=2)


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
def test_no_attention_is_fetched_from_a_hub(name: str) -> None:
    """Transformers fetches and runs the code of a name with a slash."""
    pytest.importorskip("transformers")
    model: Any = SavedTransformer({**BERT, name: "kernels-community/flash-attn2"}).build(FOR)  # type: ignore[arg-type]
    assert "/" not in model.config._attn_implementation


def test_a_model_that_can_name_files_is_not_built() -> None:
    pytest.importorskip("transformers")
    hostile = {"model_type": "timm_wrapper", "model_args": {"checkpoint_path": "weights.pickle"}}
    with pytest.raises(DataError, match="can name files"):
        SavedTransformer(hostile).build(FOR)  # type: ignore[arg-type]
