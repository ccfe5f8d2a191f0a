"""A run's folder: what is written is read back, what is damaged is refused, what is secret can be left out."""

from __future__ import annotations

import json
import re
import stat
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from clipwise._json import Fields
from clipwise.errors import DataError, LedgerError
from clipwise.mechanisms import ProjectedNorms, Rounds
from clipwise.report import Choices, Run, WrittenPlan, arms_of
from clipwise.report.describe import clip_norm, plan_rows
from clipwise.report.folder import RunFolder, is_run
from clipwise.report.likeness import differing
from clipwise.report.plans import read_plan
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
    assert Run.load(folder) == run


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
        ({"more": 1}, "runs.json, one has missing or unknown fields: more"),
        ({"result": []}, "runs.json, one, result.json does not hold a clipwise run"),
        ({"ledger": None}, "runs.json, one has no ledger"),
        ({"ledger": {"format": "clipwise ledger"}}, "runs.json, one, ledger.json: The ledger"),
        ({"curves": 3}, "runs.json, one: curves should be a list of objects, got 3"),
    ],
)
def test_a_damaged_record_is_refused_with_its_place(tmp_path: Path, change: dict[str, object], message: str) -> None:
    record = Run.record(made_run().save(tmp_path))
    with pytest.raises((DataError, LedgerError), match=re.escape(message)):
        Run.from_record({**record, **change}, "runs.json, one")


def test_a_regression_run_and_one_without_ledger(tmp_path: Path) -> None:
    for k, run in enumerate((regression_run(), made_run(clip_norm=None, config=None))):
        assert Run.load(run.save(tmp_path / str(k))) == run
        assert (tmp_path / str(k) / "metrics.jsonl").is_file()


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
        ("result.json", "{", "not JSON as clipwise writes it"),
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


@dataclass(frozen=True)
class Mine:
    """A rule of one's own, which no file can make again."""

    R: float

    def __call__(self, norms: torch.Tensor) -> torch.Tensor:
        return (self.R / norms).clamp(max=1.0)

    @property
    def sensitivity(self) -> float:
        return self.R


def test_a_plan_with_a_rule_of_ones_own_is_read_as_what_is_written(tmp_path: Path) -> None:
    plan = replace(made_run().plan, clip=Mine(2.0))  # type: ignore[type-var]
    run = made_run(plan=plan)
    again = Run.load(run.save(tmp_path))
    assert isinstance(again.plan, WrittenPlan) and again.plan.to_dict() == json.loads(json.dumps(plan.to_dict()))
    assert (again.plan.steps, again.plan.noise_multiplier) == (plan.steps, plan.noise_multiplier)
    assert clip_norm(again.plan) == clip_norm(plan) == 2.0
    assert plan_rows(again.plan, again.choices) == plan_rows(run.plan, run.choices)
    assert "Mine, R = 2" in dict(plan_rows(again.plan, again.choices))["clipping"]
    (arm,) = arms_of([run, replace(again, seed=1)])  # still seeds of one arm
    assert arm.clip_norm == 2.0 and not differing([run, again])
    assert Run.load(again.save(tmp_path / "again")) == again


@pytest.mark.parametrize("record", [{}, {"steps": 5}, {"version": 99, "steps": "many"}, {"clip": {"kind": "Flat"}}])
def test_a_plan_that_is_not_whole_is_kept_as_it_is(record: dict[str, object]) -> None:
    plan, choices = read_plan(Fields({**record, "learning_rate": "1 / R", "cosine": True}, "here"))
    assert plan == WrittenPlan(record) and choices == Choices("1 / R", further={"cosine": True})
    assert plan.noise_multiplier is None and clip_norm(plan) is None


def test_plans_of_earlier_versions_have_their_mechanism() -> None:
    plan = made_run().plan.to_dict()
    users = {"users": 50, "weight_cap": 2.0}
    assert read_plan(Fields({**plan, "federated": users}, "here"))[0].mechanism == Rounds(2.0)  # type: ignore[union-attr]
    assert read_plan(Fields({**plan, "projections": 40}, "here"))[0].mechanism == ProjectedNorms(40)  # type: ignore[union-attr]


def test_curves_of_many_rows_are_thinned_in_memory_and_whole_in_the_file(tmp_path: Path) -> None:
    """A run that was measured after every step, and saved and cut again: no row is lost, few are kept as values."""
    folder = RunFolder(tmp_path)
    lines = [json.dumps({"step": step, "test": {"nll": 1.0}}) for step in range(10_000)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    rows = folder.rows()
    assert 1_000 < len(rows) <= 2_049 and [rows[0]["step"], rows[1]["step"], rows[-1]["step"]] == [0, 5, 9_999]
    made_run(curves=rows).save(tmp_path)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 10_000
    assert Run.load(tmp_path).curves == rows
    folder.cut_rows(8_000)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == lines[:8_001]


def test_the_rows_of_a_run_are_its_owners_alone_from_the_first_on(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in range(3):
        folder.append({"step": step})
    assert stat.S_IMODE((tmp_path / "metrics.jsonl").stat().st_mode) == 0o600
    folder.cut_rows(1)
    assert folder.rows() == ({"step": 0}, {"step": 1}) and folder.files() == ({"metrics.jsonl"}, set())
    (tmp_path / "mine.txt").touch()
    folder.discard()
    assert folder.files() == (set(), {"mine.txt"})


def test_a_folder_that_cannot_be_claimed_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = RunFolder(tmp_path / "file" / "run")
    with pytest.raises(DataError, match="cannot continue"), folder.claimed("", resume=False):
        pass
