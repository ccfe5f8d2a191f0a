"""Files that somebody edited, cut or damaged: each is refused with its place, and none says more than its ledger."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import clipwise as cw
from clipwise._json import Fields, parse_json, read_json
from clipwise.accounting import GaussianSteps, Ledger, PrivateCalibration, account
from clipwise.errors import ClipwiseError, DataError, LedgerError
from clipwise.experiments import CURVES, packed_runs
from clipwise.report import Choices, Run, arms_of, card
from clipwise.report.content import uncovered
from clipwise.report.figures import private_drawings
from clipwise.report.folder import RunFolder
from tests.report.samples import DELTA, SAMPLING, STEPS, ledger, made_run

NOT_JSON: dict[str, str | bytes] = {
    "cut": '{"a": 1',
    "empty": "",
    "a constant": '{"a": NaN}',
    "infinite": "[1e999]",
    "5,000 digits": "1" * 5_000,
    "400 digits": "[-" + "1" * 400 + "]",
    "deep": "[" * 100_000,
    "deep, yet parsed": "[" * 300 + "]" * 300,
    "a field twice": '{"a": 1, "a": 2}',
    "not UTF-8": b'{"a": "\xff"}',
    "half a character": '{"a": "\\ud800"}',
    "half a character in a name": '{"\\udfff": 1}',
}


@pytest.mark.parametrize("text", NOT_JSON.values(), ids=NOT_JSON)
def test_json_that_clipwise_does_not_write_is_refused_with_its_place(text: str | bytes) -> None:
    with pytest.raises(LedgerError, match=r"^here .* restore it"):
        parse_json(text, "here", LedgerError)


def test_what_clipwise_writes_is_read() -> None:
    text = '{"a": [1, -2.5e300, null, true, "\\u00e9\\ud83d\\ude00"], "b": {}}'
    assert parse_json(text, "here") == {"a": [1, -2.5e300, None, True, "é\U0001f600"], "b": {}}
    assert parse_json("[" * 200 + "]" * 200, "here")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_only_ordinary_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # nobody writes to it: reading would wait for ever
    for place in (tmp_path / "pipe", tmp_path, tmp_path / "nowhere", tmp_path / "a\0b"):
        with pytest.raises(DataError, match="cannot be read"):
            read_json(place)


@pytest.mark.parametrize("value", [None, "1", True, -1, 1.5, [], 10**299])
def test_a_field_is_of_the_kind_that_is_asked_for(value: object) -> None:
    fields = Fields({"a": value}, "here")
    if value != 10**299:
        with pytest.raises(DataError, match="here: a should be an integer of at least 0, got"):
            fields.count("a")
    for ask in (fields.text, fields.object, lambda name: fields.number(name, 0.0, 1.0)):
        if value != "1" or ask != fields.text:
            with pytest.raises(DataError, match="here: a should be"):
                ask("a")


# The epsilon of a result, and the ledger beside it

EDITS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a smaller epsilon": (lambda body: body["guarantees"]["exact"].update(epsilon=0.01), "epsilon = 0.01 .* is worth"),
    "a larger epsilon": (lambda body: body["guarantees"]["exact"].update(epsilon=9.0), "epsilon = 9 .* is worth"),
    "no epsilon": (lambda body: body["guarantees"]["exact"].update(epsilon=None), "epsilon = inf .* is worth"),
    "a smaller bound": (lambda body: body["guarantees"]["rdp"].update(epsilon=0.01), "rdp accountant is said"),
    "a smaller approximation": (lambda body: body["guarantees"]["gdp"].update(epsilon=0.01), "gdp accountant is said"),
    "another delta": (lambda body: body.update(delta=1e-3), "delta should be that of the run, 0.001"),
    "no delta": (lambda body: body.update(delta=None), "delta should be the delta of the guarantees"),
    "an unknown accountant": (
        lambda body: body["guarantees"].update(mine=body["guarantees"]["exact"]),
        "'mine' is not an accountant",
    ),
    "fewer steps": (lambda body: body["plan"].update(steps=150), "steps is 150, but the ledger has 1,500"),
    "more noise": (
        lambda body: body["plan"].update(noise_multiplier=4.0),
        "noise_multiplier is 4.0, .* has 1.1",
    ),
    "another rate": (lambda body: body["plan"]["sampling"].update(batch_size=64), "sampling is .* but the ledger has"),
    "no noise": (lambda body: body["plan"].update(noise_multiplier=0.0), "noise_multiplier is 0.0"),
    "an approximation alone": (
        lambda body: body.update(guarantees={"gdp": body["guarantees"]["gdp"]}),
        "guarantees should be those of all accountants",
    ),
    "a larger accuracy": (lambda body: body["test"].update(accuracy=0.99), "accuracy should be 0.735333"),
    "less confidence": (lambda body: body["test"].update(confidence=0.7), "confidence should be 0.85"),
    "a smaller ECE": (lambda body: body["test"].update(ece=0.01), "ece should be 0.1255"),
    "a smaller MCE": (lambda body: body["test"].update(mce=0.2), "mce should be 0.75"),
    "time that ran backwards": (lambda body: body["provenance"].update(seconds=-1.0), "seconds should be"),
    "more held-out records": (lambda body: body["test"].update(count=15_000), "count should be 1,500"),
}


def edited(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    body = json.loads((folder / "result.json").read_text())
    change(body)
    (folder / "result.json").write_text(json.dumps(body))


@pytest.mark.parametrize(("change", "message"), EDITS.values(), ids=EDITS)
def test_a_result_that_its_ledger_does_not_bear_out_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    made_run().save(tmp_path)
    Run.load(tmp_path)
    edited(tmp_path, change)
    with pytest.raises(DataError, match=message) as caught:
        Run.load(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}, result.json")


def test_another_ledger_with_a_valid_checksum_is_refused_beside_the_result(tmp_path: Path) -> None:
    made_run().save(tmp_path)
    for other in (ledger(3.0), Ledger([GaussianSteps(SAMPLING, 1.1, 150)]), Ledger([PrivateCalibration(20.0)])):
        (tmp_path / "ledger.json").write_text(other.to_json())
        with pytest.raises(DataError, match="ledger"):
            Run.load(tmp_path)


def test_the_exact_accountant_is_put_forward_whatever_the_order_in_the_file(tmp_path: Path) -> None:
    made_run().save(tmp_path)
    edited(tmp_path, lambda body: body.update(guarantees=dict(reversed(body["guarantees"].items()))))
    run = Run.load(tmp_path)
    assert next(iter(run.guarantees)) == "exact" and card(run) == card(made_run())


def test_the_ledger_of_a_shorter_run_is_noticed_by_the_curves(tmp_path: Path) -> None:
    shorter = Ledger([GaussianSteps(SAMPLING, 1.1, 150)])
    made_run(ledger=shorter, guarantees={"exact": shorter.guarantee(DELTA)}).save(tmp_path)
    assert "The curves continue to step 1,500, but the ledger has 150" in card(Run.load(tmp_path))
    assert "The curves continue" not in card(made_run())


def test_repeated_steps_have_the_noise_of_the_plan_too(tmp_path: Path) -> None:
    quieter = Ledger([*ledger().events, GaussianSteps(SAMPLING, 5.0, 3, reason="repeated")])
    made_run(ledger=quieter, guarantees={"exact": quieter.guarantee(DELTA)}).save(tmp_path)
    with pytest.raises(DataError, match=r"plan: noise_multiplier is 1\.1, but the ledger has 5\.0"):
        Run.load(tmp_path)


def test_an_error_that_is_not_the_root_of_its_square_is_refused() -> None:
    body = cw.calibration.evaluate_regression([1.0, 2.0], [1.0, 2.5]).to_dict()
    with pytest.raises(DataError, match=r"rmse should be 0\.353553"):
        cw.calibration.RegressionResult.from_dict({**body, "rmse": 0.1})


def test_a_slow_accountants_number_is_kept_only_if_it_is_a_bound(tmp_path: Path) -> None:
    exact = ledger().guarantee(DELTA)
    bound = {"exact": exact, "pld": replace(exact, accountant="pld", kind="upper bound")}
    folder = made_run(guarantees=bound).save(tmp_path)
    assert Run.load(folder).guarantees == bound
    edited(folder, lambda body: body["guarantees"]["pld"].update(epsilon=0.5))
    with pytest.raises(DataError, match=r"pld accountant is said to give epsilon = 0.5 .* worth at least"):
        Run.load(folder)


def test_words_of_a_result_about_its_privacy_are_made_again(tmp_path: Path) -> None:
    run = made_run()
    folder = run.save(tmp_path)
    lie = {"kind": "approximation", "statement": "perfectly private", "warnings": [], "printed": "0.001", "unit": "x"}
    edited(folder, lambda body: [each.update(lie) for each in body["guarantees"].values()])
    assert Run.load(folder).guarantees == run.guarantees


def test_a_schedule_that_was_moved_is_refused(tmp_path: Path) -> None:
    plan = replace(made_run().plan, noise_multiplier=cw.Steps({0: 2.0, 500: 1.0}))  # type: ignore[type-var]
    run = made_run(plan=plan, ledger=Ledger(plan.events), guarantees={})
    assert Run.load(run.save(tmp_path / "kept")) == run
    moved = replace(plan, noise_multiplier=cw.Steps({0: 2.0, 1_400: 1.0}))
    with pytest.raises(DataError, match="the same noise in other steps"):
        Run.load(replace(run, plan=moved).save(tmp_path / "moved"))


def test_a_run_that_was_interrupted_repeated_or_ended_early_is_read(tmp_path: Path) -> None:
    begun = GaussianSteps(SAMPLING, 1.1, STEPS - 100)
    for k, more in enumerate((("interrupted", 100), ("repeated", 30), ("repeated, in full", 30), ("training", 50))):
        further = GaussianSteps(SAMPLING, 1.1, more[1], reason=more[0].partition(",")[0])
        if "full" in more[0]:  # as it is charged today
            further = further.on_the_same_batch(more[1])
        events = [begun, further, PrivateCalibration(20.0)]
        released = Ledger(events)
        run = made_run(ledger=released, guarantees={"exact": released.guarantee(DELTA)})
        again = Run.load(run.save(tmp_path / str(k)))
        assert again == run
        assert ("The plan has 1,500 steps, the ledger has" in card(again)) is (more[0] != "interrupted")


# Runs that were made when add/remove was written everywhere: they are read, and the relation is put right

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


# Files of any other content

BROKEN: list[Any] = [None, True, -1, 1.5, 10**299, 1e300, "", "text", [], [[]], {}, {"kind": "mapping"}, [None], ["a"]]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything in a JSON value, long lists at their ends only."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    kept = [(key, each) for key, each in inner if not isinstance(key, int) or key in (0, len(value) - 1)]
    return [path, *(found for key, each in kept for found in places(each, (*path, key)))]


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    changed = copy.deepcopy(value)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return changed


def test_a_record_with_any_value_changed_is_read_or_refused_by_its_place(tmp_path: Path) -> None:
    """One value in every place of every file: nothing but an error of clipwise, and what is read can be shown."""
    run = made_run(choices=Choices(0.1, "SGD", further={"cosine": True}), guarantees={})
    record = json.loads(json.dumps(Run.record(run.save(tmp_path))))
    record["curves"] = record["curves"][:2]
    read = 0
    for k, path in enumerate(places(record)[1:]):
        changed = put(record, path, BROKEN[k % len(BROKEN)])
        refused = ""
        try:
            card(Run.from_record(changed, "here"))
            read += 1
        except ClipwiseError as error:
            refused = str(error)
        assert not refused or refused.startswith("here"), (path, refused)
    assert read > 20


@pytest.mark.parametrize("value", BROKEN, ids=repr)
def test_a_row_of_the_curves_that_is_no_row_is_refused_with_its_line(tmp_path: Path, value: object) -> None:
    folder = RunFolder(tmp_path)
    lines = [json.dumps(value), json.dumps({"step": 2})]
    for text, odd in (lines, 1), (reversed(lines), 2), ([json.dumps({"step": value}), lines[1]], 1):
        (tmp_path / "metrics.jsonl").write_text("\n".join(text))
        if text is not lines and odd == 1 and isinstance(value, (int, float)) and value not in (True, -1):
            assert folder.rows()
            continue
        with pytest.raises(DataError, match=f"line {odd}.* restore it"):
            folder.rows()


def test_a_figure_shows_no_epsilon_of_the_curves(tmp_path: Path) -> None:
    rows = [{"step": 1, "private": {"epsilon": 0.01}}, {"step": 2, "test": {"epsilon": 0.01}}]
    for row in rows:
        (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({"step": 3}))
        with pytest.raises(DataError, match=r"line 1: .*epsilon should be beside"):
            RunFolder(tmp_path).rows()


def test_curves_are_drawn_of_numbers_at_the_edge_of_what_they_can_be(tmp_path: Path) -> None:
    rows = ({"step": 0, "private": {"loss": 1e300}}, {"step": 1e300, "private": {"loss": -1e300, "x": "y"}})
    run = made_run(curves=({"step": 1, "test": {"nll": None}, "private": None}, *rows), seed=10**30)
    arms = arms_of([Run.load(run.save(tmp_path))])
    assert len(private_drawings(arms)) == 1 and uncovered(arms) == {"layers": []}
