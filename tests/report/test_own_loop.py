"""A report on one's own loop in one line: what `private` knows is in the run, on its page and on its card."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.errors import DataError
from clipwise.report import Run, card
from clipwise.report.content import content
from clipwise.report.warnings import warnings_of

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
    assert made["data"] == {"records": N, "held_out": N, "while_training": "not looked at"}
    assert (made["model"], made["parameters"]) == ("Linear", 15) and made["versions"]["torch"] == torch.__version__
    assert made["other_samples"].startswith("checked with other records at steps 0")


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


def test_a_seed_is_kept_and_warned_of_and_never_published() -> None:
    run = Run.of(*loop(seed=987_654_321), delta=DELTA)
    assert run.seed == 987_654_321 and run.draws_from == (987_654_321, None)
    assert "Trained with a fixed seed" in said(run)
    assert "987654321" not in str(run.publishable().to_dict()) and "fixed seed" in said(run.publishable())
    assert run.provenance["data"]["while_training"] == "unchanged"


def test_the_number_of_records_is_left_out_where_it_is_not_public() -> None:
    run = Run.of(*loop(cw.Poisson(rate=1 / 3, batch_size=20)), delta=DELTA)
    assert run.provenance["data"] == {"held_out": N, "while_training": "not looked at"}


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
    from clipwise.report.ended import choices_of

    weight, bias = (torch.zeros(1, requires_grad=True) for _ in range(2))
    two = torch.optim.Adam([{"params": [weight], "lr": 0.1}, {"params": [bias]}], lr=0.01, betas=(0.8, 0.9))
    assert choices_of(two) == cw.report.Choices("0.1 and 0.01", "Adam(lr=0.1 and 0.01, betas=(0.8, 0.9))")
    moved = torch.optim.SGD([weight], lr=0.1)
    torch.optim.lr_scheduler.StepLR(moved, 1)
    assert choices_of(moved).learning_rate == "0.1, scheduled"
