"""Runs that were made when add/remove was written everywhere: they are read, and the relation is put right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clipwise.accounting import account
from clipwise.experiments import CURVES, packed_runs
from clipwise.report import Run, card

PAPERS = Path(__file__).resolve().parents[3] / "papers"


@pytest.mark.parametrize(
    ("experiment", "name"), [("mnist", "r-1-0"), ("federated", "r-1-0"), ("wine", "r-2-0"), ("california", "r-1-0")]
)
def test_a_committed_run_says_the_relation_that_holds(experiment: str, name: str, tmp_path: Path) -> None:
    if not (PAPERS / experiment / CURVES).is_file():
        pytest.skip("the curves are in the repository, not in the source distribution")
    record = packed_runs(PAPERS / experiment)[name]
    written = record["result"]["guarantees"]
    assert written["exact"]["relation"] == "add_remove" and "adding or removing" in written["exact"]["statement"]
    for file, value in {"result.json": record["result"], "ledger.json": record["ledger"]}.items():
        (tmp_path / file).write_text(json.dumps(value))
    run = Run.load(tmp_path)
    assert run.guarantees == Run.from_record(record, name).guarantees
    assert run.ledger is not None and run.delta is not None and run.ledger.relation == "zero_out"
    for accountant, guarantee in run.guarantees.items():
        assert guarantee.relation == "zero_out" and "blanking one" in guarantee.statement()
        made_again = {"relation", "statement", "epsilon"}
        assert {k: v for k, v in guarantee.to_dict().items() if k not in made_again} == {
            k: v for k, v in written[accountant].items() if k not in made_again
        }
        assert guarantee.epsilon == pytest.approx(written[accountant]["epsilon"], rel=1e-9)
    today = account(run.ledger.events, run.delta)
    assert today.printed == run.guarantees["exact"].printed
    assert today.statement() == run.guarantees["exact"].statement()
    assert "blanking one" in card(run) and "adding or removing" not in card(run)
