"""A run's folder: what is written is read back, what is damaged is refused, what is secret can be left out."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from clipwise.errors import DataError, LedgerError
from clipwise.report import Run
from clipwise.report.run import is_run
from tests.report.samples import judged, made_run, regression_run


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = made_run(
        recalibrated={"temperature": judged(0, 1.0)}, warnings=("the learning rate was chosen on this data",)
    )
    folder = run.save(tmp_path / "runs" / "one")
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.toml",
        "data.digest",
        "ledger.json",
        "metrics.jsonl",
        "result.json",
    ]
    assert Run.load(folder) == replace(run, plan=json.loads(json.dumps(run.plan)))


def test_a_record_is_one_json_value_with_the_whole_run(tmp_path: Path) -> None:
    run = made_run(recalibrated={"temperature": judged(0, 1.0)})
    record = Run.record(run.save(tmp_path))
    assert Run.from_record(json.loads(json.dumps(record)), "here") == Run.load(tmp_path)


def test_reading_a_record_leaves_it_as_it_is(tmp_path: Path) -> None:
    data = {"name": "made-up digits", "fingerprint": "sha256:0ld"}
    record = Run.record(made_run(fingerprint=None, provenance={"data": data}).save(tmp_path))
    before = json.dumps(record)
    run = Run.from_record(record, "here")
    assert run.fingerprint == "sha256:0ld" and "fingerprint" not in run.provenance["data"]
    assert json.dumps(record) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"more": 1}, "runs.json, one is not the record of a run"),
        ({"result": []}, "runs.json, one does not hold a clipwise run"),
        ({"ledger": None}, "runs.json, one has no ledger"),
        ({"ledger": {"format": "clipwise ledger"}}, "runs.json, one: The ledger"),
        ({"curves": 3}, "runs.json, one has a field"),
    ],
)
def test_a_damaged_record_is_refused_with_its_place(tmp_path: Path, change: dict[str, object], message: str) -> None:
    record = Run.record(made_run().save(tmp_path))
    with pytest.raises((DataError, LedgerError), match=re.escape(message)):
        Run.from_record({**record, **change}, "runs.json, one")


def test_a_regression_run_and_one_without_ledger(tmp_path: Path) -> None:
    for k, run in enumerate((regression_run(), made_run(clip_norm=None, config=None))):
        assert Run.load(run.save(tmp_path / str(k))) == run


def test_numbers_that_json_does_not_have_become_null(tmp_path: Path) -> None:
    rows = ({"step": 0, "private": {"norm_median": float("nan"), "loss": float("inf")}},)
    folder = made_run(curves=rows).save(tmp_path)
    assert json.loads((folder / "metrics.jsonl").read_text()) == {
        "step": 0,
        "private": {"norm_median": None, "loss": None},
    }


def test_a_value_without_json_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be saved"):
        made_run(provenance={"model": object()}).save(tmp_path)


def test_result_json_holds_nothing_of_the_private_statistics(tmp_path: Path) -> None:
    folder = made_run().save(tmp_path)
    assert "fraction_clipped" in (folder / "metrics.jsonl").read_text()
    assert "fraction_clipped" not in (folder / "result.json").read_text()


def test_a_folder_that_holds_another_runs_ledger_is_not_overwritten(tmp_path: Path) -> None:
    made_run().save(tmp_path)
    with pytest.raises(LedgerError, match="not on this ledger"):
        made_run().save(tmp_path)


def test_a_last_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    run = made_run()
    metrics = run.save(tmp_path) / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 15')
    assert Run.load(tmp_path).curves == run.curves


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("result.json", "{", "not complete JSON"),
        ("result.json", "[]", "does not hold a clipwise run"),
        ("result.json", '{"format": "clipwise run", "version": 99}', "version 99"),
        ("result.json", '{"format": "clipwise run", "version": 1, "name": "x"}', "missing or unknown fields"),
        ("metrics.jsonl", "{\n{}\n", "line 1"),
        ("ledger.json", "{}", "not a clipwise ledger"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path: Path, file: str, text: str, message: str) -> None:
    made_run().save(tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises((DataError, LedgerError), match=message):
        Run.load(tmp_path)


def test_a_private_run_without_its_ledger_is_refused(tmp_path: Path) -> None:
    made_run().save(tmp_path)
    (tmp_path / "ledger.json").unlink()
    with pytest.raises(DataError, match=r"has no ledger\.json"):
        Run.load(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"), [("test", {}), ("name", ""), ("task", "ranking"), ("recalibrated", []), ("warnings", 3)]
)
def test_a_field_of_the_wrong_kind_is_refused(tmp_path: Path, field: str, value: object) -> None:
    made_run().save(tmp_path)
    body = json.loads((tmp_path / "result.json").read_text())
    (tmp_path / "result.json").write_text(json.dumps({**body, field: value}))
    with pytest.raises(DataError):
        Run.load(tmp_path)


def test_a_folder_without_result_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a finished run"):
        Run.load(tmp_path)
    assert not is_run(tmp_path)


def test_publishable_leaves_out_what_epsilon_does_not_cover() -> None:
    run = made_run(seed=987_654_321)
    public = run.publishable()
    before, after = (json.dumps([each.to_dict(), *each.curves]) for each in (run, public))
    for secret in ("987654321", "fraction_clipped", "norm_median", "bad_samples", "config.toml"):
        assert secret in before
        assert secret not in after
    assert "5ec2e7" not in before
    assert public.seed is None and public.config is None and public.fingerprint is None
    assert public.test == run.test and public.guarantees == run.guarantees and public.curves[0]["test"]


def test_a_private_run_has_noise_in_every_release() -> None:
    assert made_run().is_private
    assert not made_run(clip_norm=None).is_private
    assert not made_run(ledger=None).is_private
