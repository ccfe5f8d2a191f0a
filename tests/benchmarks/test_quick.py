"""The pieces of the benchmark, on tiny sizes: what is measured is right, and the report says what was measured."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import calibration, kills, measure, reliability, report, run, scaling  # noqa: E402
from benchmarks.methods import METHODS, ClippedSum, Clipwise, Plain, VmapGrad  # noqa: E402
from benchmarks.workloads import WORKLOADS, Goal, Workload, bert_workload, gpt2, texts  # noqa: E402

MLP = replace(WORKLOADS["mlp"], batch_size=16)


def tiny_bert() -> Workload:
    return bert_workload(length=8, batch_size=3, width=64, layers=1, vocabulary=50)


def tiny_gpt2() -> Workload:
    build = partial(gpt2, 32, 1, 2, 40)
    return replace(WORKLOADS["gpt2_wide"], build=build, make_batch=partial(texts, 40, 6, labelled=False), batch_size=3)


@pytest.mark.parametrize("name", ["plain", "clipwise", "vmap"])
def test_a_step_changes_every_trainable_parameter(name: str) -> None:
    method = METHODS[name](MLP)
    before = [p.detach().clone() for p in method.model.parameters()]
    method.step(MLP.batch())
    assert all(not torch.equal(old, new) for old, new in zip(before, method.model.parameters(), strict=True))
    assert all(p.grad is None for p in method.model.parameters())


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap has no rule for fused attention
@pytest.mark.parametrize("workload", [MLP, tiny_bert(), tiny_gpt2()], ids=["mlp", "bert", "gpt2"])
@pytest.mark.parametrize("method", [Clipwise, VmapGrad])
def test_methods_agree_with_the_loop(workload: Workload, method: type[Clipwise] | type[VmapGrad]) -> None:
    batch = workload.batch(seed=7)
    reference = measure.loop_reference(workload, workload.model(), batch)
    error = measure.error_of(method(workload).clipped(batch), reference)
    assert error["norms"] < 1e-5
    assert error["sum"] < 1e-5


def test_an_error_is_seen() -> None:
    reference = ClippedSum(torch.ones(2).double(), {"w": torch.ones(3).double()})
    wrong = ClippedSum(torch.tensor([1.0, 1.5]), {"w": 2 * torch.ones(3)})
    assert measure.error_of(wrong, reference) == pytest.approx({"norms": 0.5, "sum": 1.0})


def test_rounds_are_ratios_to_the_plain_step() -> None:
    result = measure.interleaved({"plain": Plain(MLP), "clipwise": Clipwise(MLP)}, seconds=0.0, most=3)
    assert result["plain"]["cpu_ratio"]["median"] == 1.0
    assert result["clipwise"]["cpu_ratio"]["median"] > 1.0
    assert result["clipwise"]["rounds"] == 3


def test_the_first_step_costs_more_than_later_ones() -> None:
    found = measure.first_step(replace(MLP, batch_size=64))
    assert found["first_cpu_ms"] > found["later_cpu_ms"] > 0


def test_memory_sees_what_a_step_holds() -> None:
    class Holds(Plain):
        def step(self, batch: dict[str, torch.Tensor]) -> None:
            torch.ones(10_000_000).sum()

    assert measure.peak_between_steps(Holds(MLP), MLP.batch()) > 35e6


def test_a_method_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses(Plain):
        def step(self, batch: dict[str, torch.Tensor]) -> None:
            raise RuntimeError("no rule for this layer\nmore")

    monkeypatch.setitem(METHODS, "plain", Refuses)
    with pytest.raises(measure.CannotRun, match=r"RuntimeError: no rule for this layer$"):
        measure.prepare(MLP, "plain")


def test_position_ids_are_passed_for_every_sample() -> None:
    explicit = tiny_bert().with_explicit_ids()
    assert explicit is not None
    assert explicit.batch()["position_ids"].shape == (3, 8)
    model = explicit.model()
    torch.testing.assert_close(explicit.losses(model, explicit.batch()), explicit.losses(model, tiny_bert().batch()))
    assert MLP.with_explicit_ids() is None


def test_scaling_has_all_sizes() -> None:
    points = {point.key: point.workload for point in scaling.points()}
    assert len(points) == 20 and points["batch x16"].batch_size == 64
    assert next(iter(points["length x32"].batch().values())).shape[1] == 2048


def test_every_workload_of_the_goals_is_there() -> None:
    assert len(WORKLOADS) == 9
    assert all(isinstance(workload.goal, Goal) for workload in WORKLOADS.values())


def entry(ratio: float, memory: int) -> measure.Json:
    spread = {"median": ratio, "q1": ratio, "q3": ratio}
    timing = {
        "cpu_ratio": spread,
        "wall_ratio": spread,
        "cpu_ms": 1.0,
        "wall_ms": 1.0,
        "rounds": 3,
        "steps_per_round": 1,
    }
    return {
        "steps": {
            "time": {"clipwise": timing},
            "errors": {"clipwise": {"norms": 1e-7, "sum": 1e-7}},
            "first_step": {"extra_plain_steps": 5.0},
            "cannot_run": {"opacus_ghost": "NotImplementedError: tying"},
            "notes": {},
        },
        "memory": {"plain": {"later_bytes": 100}, "clipwise": {"later_bytes": memory, "first_bytes": memory}},
    }


def test_the_report_says_which_goals_are_missed(tmp_path: Path) -> None:
    results = {
        "machine": run.machine(),
        "versions": run.versions(),
        "settings": {"threads": 1},
        "workloads": {"vit_tiny": entry(1.05, 110), "vit_wide": entry(1.5, 150)},
    }
    (tmp_path / "README.md").write_text("# Benchmarks\n<!-- begin steps -->\n<!-- end steps -->\nthe rest\n")
    report.write(results, tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert page.startswith("# Benchmarks\n") and page.endswith("\nthe rest\n")
    assert "1.10 met" in page
    assert "1.10 **missed**" in page
    assert "1.50 (goal 1.20: **missed**)" in page
    assert "NotImplementedError: tying" in page
    assert "<svg" in (tmp_path / "time.svg").read_text()


def test_results_are_stored_and_found_again(tmp_path: Path) -> None:
    results: measure.Json = {}
    run.store(results, ("workloads", "mlp", "steps"), {"a": 1})
    assert run.lookup(results, ("workloads", "mlp", "steps")) == {"a": 1}
    assert run.lookup(results, ("workloads", "mlp", "memory", "plain")) is None
    path = tmp_path / "results.json"
    options = run.parse([])
    run.save(path, {**run.load(path, options), **results})
    assert run.lookup(run.load(path, options), ("workloads", "mlp", "steps")) == {"a": 1}
    assert run.lookup(run.load(path, run.parse(["--threads", "2"])), ("workloads", "mlp", "steps")) is None


def test_a_million_rows_of_a_thousand_classes_were_streamed_in_bounded_memory() -> None:
    report = json.loads((calibration.HERE / "calibration.json").read_text(encoding="utf-8"))
    assert {(row["samples"], row["classes"]) for row in report["stream"]} == {(1_000_000, 1_000)}
    assert max(row["added_memory_mb"] for row in report["stream"]) < 0.06 * report["stream"][0]["input_mb_float32"]


def test_the_parts_run() -> None:
    assert calibration.stream(2_000, 10, 100, "probabilities")["samples"] == 2_000
    assert calibration.intervals(200, 3, 100)["seconds"] > 0
    row = calibration.private(300, noise_multiplier=5.0, fits=1)
    assert row["ece_private"] < row["ece_before"]


def kept(name: str) -> measure.Json:
    found: measure.Json = json.loads((kills.HERE / f"{name}.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("case", reliability.SINGLE)
def test_what_fails_does_so_as_the_page_says(case: str) -> None:
    assert reliability.single(case) == kept("reliability")["cases"][case]


def test_no_failure_but_an_older_copy_without_a_witness_costs_a_charge() -> None:
    cases = kept("reliability")["cases"]
    assert list(cases) == [*reliability.SINGLE, *reliability.DAMAGED]
    assert all(case["refused"] + case["continued"] == case["tries"] for case in cases.values())
    under = {name for name, case in cases.items() if case["least_margin"] is not None and case["least_margin"] < 0}
    assert under == {"an older copy is put back, without a witness"}
    assert min(cases[name]["tries"] for name in reliability.DAMAGED) > 100


def test_a_thousand_kills_lost_no_charge() -> None:
    runs = kept("kills")["runs"]
    assert sum(each["kills"] for each in runs) >= kills.KILLS and {each["kind"] for each in runs} == set(kills.KINDS)
    assert not any(each["under_counted"] or each["twice"] for each in runs)
    assert all(each["equal"] and each["charged"] >= each["drawn"] for each in runs)
