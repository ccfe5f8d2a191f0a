"""A run's folder: what is written is read back, what is damaged is refused, what is secret can be left out.

A report on one's own loop in one line: what `private` knows is in the run, on its page and on its card.
"""

from __future__ import annotations

import itertools
import json
import re
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise import report
from clipwise._json import Fields
from clipwise.errors import DataError, LedgerError
from clipwise.mechanisms import ProjectedNorms, Rounds
from clipwise.private.evidence import Checked
from clipwise.report import Choices, Run, WrittenPlan, arms_of, card, not_checked
from clipwise.report.arms import differing
from clipwise.report.content import content
from clipwise.report.folder import RunFolder, is_run
from clipwise.report.plans import read_plan
from clipwise.report.warnings import warnings_of
from clipwise.report.wording import clip_norm, plan_rows
from tests.core.doubles import Own
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
        ("metrics.jsonl", '{"step": 1, "private": {"layers": [3]}}\n', "layers"),
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


def test_a_plan_with_a_rule_of_ones_own_is_read_as_what_is_written(tmp_path: Path) -> None:
    plan = replace(made_run().plan, clip=Own(2.0))  # type: ignore[type-var]
    run = made_run(plan=plan)
    again = Run.load(run.save(tmp_path))
    assert isinstance(again.plan, WrittenPlan) and again.plan.to_dict() == json.loads(json.dumps(plan.to_dict()))
    assert (again.plan.steps, again.plan.noise_multiplier) == (plan.steps, plan.noise_multiplier)
    assert clip_norm(again.plan) == clip_norm(plan) == 2.0
    assert plan_rows(again.plan, again.choices) == plan_rows(run.plan, run.choices)
    assert "Own, R = 2" in dict(plan_rows(again.plan, again.choices))["clipping"]
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


N, DELTA = 60, 1e-4


def loop(sampling: cw.Sampling | None = None, noise: float = 2.0, **options: Any) -> tuple[cw.Private, Any]:
    """The loop of a user: ten lines, and the metrics."""
    torch.manual_seed(0)
    x, y = torch.randn(N, 4), torch.randint(0, 3, (N,))
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    clip = cw.Abadi(1.0) if noise else cw.NoClip()
    plan = cw.Plan(sampling=sampling or cw.Poisson(N, 20), steps=3, clip=clip, noise_multiplier=noise)
    private = cw.Private(plan, model, optimizer, **options)
    own = [(x[:20], y[:20])] * 3
    for a, b in own if options.get("own_batches") else private.loader(TensorDataset(x, y)):
        private.step(F.cross_entropy(model(a), b, reduction="none"))
    return private, cw.calibration.evaluate(logits=model(x).detach(), labels=y)


def said(run: Run) -> str:
    return " ".join(warned.text for warned in warnings_of(cw.report.arms_of([run])))


def test_one_line_makes_the_run_and_its_folder_is_read_back(tmp_path: Path) -> None:
    private, test = loop()
    run = Run.of(private, test, delta=DELTA, name="mine")
    assert Run.load(run.save(tmp_path)) == run
    assert run.plan == private.plan and run.ledger == private.ledger and run.test == test and run.is_private
    assert run.guarantees.keys() == cw.privacy_panel(private.ledger, DELTA).keys()
    assert run.guarantees["exact"].epsilon == private.epsilon(DELTA)
    assert run.choices == cw.report.Choices(0.5, "SGD(lr=0.5, momentum=0.9)")
    assert run.seed is None and run.warnings == ()
    made = run.provenance
    assert made["data"] == {"records": N, "held_out": N, "since_the_start": "not compared"}
    assert (made["model"], made["parameters"]) == ("Linear", 15) and made["versions"]["torch"] == torch.__version__
    assert made["other_samples"].startswith("checked with other records at steps 0")
    assert "seeds" not in made["noise"] and "decision" not in made["noise"], "it stands on the card"


def test_its_page_and_card_say_what_was_spent_and_what_was_chosen(tmp_path: Path) -> None:
    run = replace(Run.of(*loop(), delta=DELTA, name="mine"), curves=({"step": 3, "test": {"ece": 0.5}},))
    page = cw.report.write(run, tmp_path).read_text(encoding="utf-8")
    for text in (page, card(run)):
        assert run.guarantees["exact"].printed in text and "SGD(lr=0.5, momentum=0.9)" in text
    assert "checked with other records" in page and "Trained with a fixed seed" not in page


def test_own_batches_and_unwatched_losses_are_said() -> None:
    run = Run.of(*loop(own_batches=True), delta=DELTA)
    assert "was not checked" in run.warnings[0] and "was not checked" in said(run) and "was not checked" in card(run)
    assert run.provenance["other_samples"].startswith("not checked")
    assert "drawn by the caller" in content(cw.report.arms_of([run]), None)["made"][0]["ledger"][0][-1]
    assert any("own_batches=True" in warning for warning in run.guarantees["exact"].warnings)


def test_what_was_not_checked_is_a_warning() -> None:
    assert not_checked(Checked((0, 1), ())) == ()
    (said,) = not_checked(Checked((0, 1), ("records are padded",)))
    assert said.startswith("Whether samples mix was checked, except this: records are padded.")


def test_a_seed_is_kept_and_warned_of_and_never_published() -> None:
    run = Run.of(*loop(seed=987_654_321), delta=DELTA)
    assert run.seed == 987_654_321 and run.draws_from == (987_654_321, None)
    assert "Trained with a fixed seed" in said(run) and "labelled seeds" in card(run)
    assert "987654321" not in str(run.publishable().to_dict()) and "fixed seed" in said(run.publishable())
    assert run.provenance["data"]["since_the_start"] == "unchanged"


def test_the_number_of_records_is_left_out_where_it_is_not_public() -> None:
    run = Run.of(*loop(cw.Poisson(rate=1 / 3, batch_size=20)), delta=DELTA)
    assert run.provenance["data"] == {"held_out": N, "since_the_start": "not compared"}


def test_a_run_without_noise_is_not_private(tmp_path: Path) -> None:
    run = Run.of(*loop(noise=0.0), delta=None)
    assert not run.is_private and run.guarantees == {} and "Trained without noise" in said(run)
    assert Run.load(run.save(tmp_path)) == run


def test_a_loop_that_has_not_begun_is_refused() -> None:
    model = torch.nn.Linear(2, 1)
    plan = cw.Plan(cw.FullBatch(4), steps=3, clip=cw.Abadi(1.0), noise_multiplier=1.0)
    private = cw.Private(plan, model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(DataError, match="made no step"):
        Run.of(private, cw.calibration.evaluate_regression([1.0, 2.0], [1.0, 2.5]), delta=DELTA)


def test_rates_that_differ_or_move_are_given_in_words() -> None:
    from clipwise.report.run import choices_of

    weight, bias = (torch.zeros(1, requires_grad=True) for _ in range(2))
    two = torch.optim.Adam([{"params": [weight], "lr": 0.1}, {"params": [bias]}], lr=0.01, betas=(0.8, 0.9))
    assert choices_of(two) == cw.report.Choices("0.1 and 0.01", "Adam(lr=0.1 and 0.01, betas=(0.8, 0.9))")
    moved = torch.optim.SGD([weight], lr=0.1)
    torch.optim.lr_scheduler.StepLR(moved, 1)
    assert choices_of(moved).learning_rate == "0.1, scheduled"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.5, "0.5"),
        (1e-7, "1e-07"),
        (12_345, "12,345"),
        ("1 / R", "1 / R"),
        (None, "None"),
        (cw.Flat(cw.Abadi(0.5)), "Abadi, R = 0.5"),
        (cw.Automatic(2.0, 0.5), "Automatic, R = 2, gamma = 0.5"),
        (cw.NoClip(), "no clipping"),
        (cw.Unclipped(2.0), "no clipping, noise of standard deviation 2 on the sum of a batch: not private"),
        (cw.Layerwise(cw.Abadi(1.0)), "Layerwise, rule = Abadi, R = 1, noise = joint"),
        (
            cw.Layerwise({"a": cw.Abadi(1.0), "b": cw.NoClip()}),
            "Layerwise, rule = a: Abadi, R = 1; b: no clipping, noise = joint",
        ),
        (
            cw.MixUp(cw.Abadi(1.0), cw.Abadi(9.0), switch_at=0.95),
            "mix-up: Abadi, R = 1, then Abadi, R = 9 from 95 % of the steps on",
        ),
        (cw.MixUp(cw.Abadi(1.0), cw.Abadi(9.0), switch_at=7), "mix-up: Abadi, R = 1, then Abadi, R = 9 from step 7 on"),
        (
            cw.AdaptiveClip(1.0, 0.7, 0.1),
            "adaptive norm, from 1 towards the 0.7-quantile of the norms, not below 0.1",
        ),
        (cw.Steps({0: 2.0, 500: 1.5}), "2 from step 0 on, 1.5 from step 500 on"),
        (cw.FullBatch(1_000), "all 1,000 records in every step"),
        (cw.Shuffled(1_000, 10), "shuffled batches of 10 from 1,000 records"),
        (cw.FixedSize(1_000, 10), "batches of exactly 10 from 1,000 records"),
        (
            cw.Poisson(1_000, 10, max_batch_size=20),
            "Poisson: each of 1,000 records with probability 10/1,000, at most 20 of them",
        ),
        (Rounds(2.0), "Rounds, weight_cap = 2"),
        (Rounds(2.0, 50.0), "Rounds, weight_cap = 2, total_weight = 50"),
        (ProjectedNorms(40), "ProjectedNorms, projections = 40"),
    ],
    ids=str,
)
def test_what_was_chosen_is_said_in_words(value: object, words: str) -> None:
    assert report.describe(value) == words


@pytest.mark.parametrize(
    ("clip", "norm"),
    [
        (cw.Abadi(2), 2.0),
        (cw.GlobalScaled(R=2.0, Z=5.0), 2.0),
        (cw.NoClip(), None),
        (cw.BatchClip(2.0), None),
        (cw.Unclipped(2.0), None),
        (cw.Layerwise(cw.Abadi(2.0)), None),
        (cw.MixUp(cw.Abadi(1.0), cw.Abadi(2.0), switch_at=0.5), None),
    ],
    ids=str,
)
def test_a_plan_has_a_norm_where_it_has_a_single_one(clip: object, norm: float | None) -> None:
    found = report.clip_norm(replace(made_run(clip_norm=None).plan, clip=clip))  # type: ignore[type-var]
    assert found == norm and isinstance(found, (float, type(None)))


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ((("training", 0.0),), "**Not private.** Trained without noise: no epsilon"),
        ((("training", 1.0), ("update", 0.0), ("restored", 0.0)), "Not all updates had noise (update, restored): no"),
        ((("training", 0.0), ("update", 0.0)), "Not all updates had noise (training, update): no epsilon"),
        ((("update", 0.0),), "Not all updates had noise (update): no epsilon"),
        ((), "**Not private.** Trained without noise: no epsilon"),
    ],
    ids=str,
)
def test_a_card_says_why_a_run_is_not_private(events: tuple[tuple[str, float], ...], said: str) -> None:
    ledger = cw.Ledger([cw.GaussianSteps(cw.FullBatch(10), noise, 1, reason) for reason, noise in events])
    run = made_run(clip_norm=None, ledger=ledger)
    assert not run.is_private and said in report.card(run)
    (warned, *_) = report.warnings_of(arms_of([run]))
    assert warned.text.startswith(said.removeprefix("**Not private.** ").split(": no")[0])


@pytest.mark.parametrize("count", [1, 2_047])
def test_curves_of_few_rows_are_kept_whole(count: int, tmp_path: Path) -> None:
    lines = [json.dumps({"step": step}) for step in range(count)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert [row["step"] for row in RunFolder(tmp_path).rows()] == list(range(count))


@pytest.mark.parametrize("count", [4_096, 4_097, 6_144])
def test_curves_of_many_rows_end_with_their_last(count: int, tmp_path: Path) -> None:
    lines = [json.dumps({"step": step}) for step in range(count)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    steps = [row["step"] for row in RunFolder(tmp_path).rows()]
    assert steps[0] == 0 and steps[-1] == count - 1 and len(steps) <= 2_049
    assert len({after - before for before, after in itertools.pairwise(steps[:-1])}) == 1
