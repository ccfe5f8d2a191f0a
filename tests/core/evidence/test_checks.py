"""When passes are watched, what a refusal leads to, and what the state of the checks says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.engine import Origin, walk
from clipwise.entropy import Entropy
from clipwise.private.evidence import Checked, Checks, LossFn
from clipwise.private.evidence.collate import PADDED
from clipwise.private.parts import PhysicalBatch

SIZE = 6


def batch(size: int = SIZE) -> Tensor:
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(0))


class Run:
    """The checks of a run, and a model whose passes are watched."""

    def __init__(self, counted: bool = False, loss_fn: LossFn | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.checks = Checks(self.model, (), counted, Entropy(0), loss_fn)
        self.parameters = list(self.model.parameters())

    def losses(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x).square().sum(1)
        return out

    def close(self, losses: Tensor) -> Any:
        return self.checks.close(losses, {id(p): k for k, p in enumerate(self.parameters)}, self.parameters)

    def watched(self, step: int = 0, body: Callable[[Tensor], Tensor] | None = None, x: Any = None) -> Any:
        """One pass from its batch to `accept`."""
        x = batch() if x is None else x
        with self.checks.watching(x, SIZE, step):
            losses = (body or self.losses)(x)
        seen = self.close(losses)
        self.checks.accept(step)
        return seen


def modes() -> int:
    return len(_get_current_dispatch_mode_stack()) + len(_get_current_function_mode_stack())


# What is said


def test_the_state_in_words() -> None:
    clean = "no sample moved another's loss or gradient"
    assert str(Checked((), ())) == "not checked" and str(Checked((), ("a", "b"))) == "not checked: a; b"
    assert str(Checked((0, 1), ())) == f"checked with other records at steps 0, 1: {clean}"
    assert str(Checked(tuple(range(6)), ())).startswith("checked with other records at steps 0, 1, 2, 3, 4, 5: ")
    assert str(Checked(tuple(range(7)), ())).startswith("checked with other records at steps 0, 1, 2, 3, 4, 5, ...: ")
    assert str(Checked((3,), ("a", "b"))) == f"checked with other records at steps 3: {clean}. Not checked: a; b"


def test_clean_steps_and_reasons_are_noted_once() -> None:
    checks = Run().checks
    for _ in range(2):
        checks.note_clean(4)
        checks.not_checked("a reason")
    assert checks.found == Checked((4,), ("a reason",)) and not checks.has_watched


def test_what_a_collate_function_leaves_open_is_noted() -> None:
    checks, dataset = Run().checks, TensorDataset(torch.rand(9, 3))
    checks.add_data(dataset, None)
    checks.add_data(dataset, lambda records: torch.stack([record[0] for record in records]))
    assert checks.found.unclear == () and checks.memory.is_record(dataset.tensors[0])
    checks.add_data(
        dataset, lambda records: (torch.stack([r[0] for r in records]), int(1e6 * records[0][0].sum()) // 7)
    )
    checks.add_data(dataset, lambda records: (torch.stack([r[0] for r in records]), hash(str(records))))
    assert checks.found.unclear == ("whole numbers of the batch, such as lengths, are not compared",)


def test_what_a_batch_holds_besides_tensors_is_noted() -> None:
    run = Run()
    with run.checks.watching((batch(), "text"), SIZE, 0):
        pass
    assert run.checks.found.unclear == ("what the batch holds besides tensors (numbers, texts, arrays): twins keep it",)


def test_an_own_batch_that_is_not_in_rows_is_not_checked() -> None:
    run = Run()
    run.watched(body=lambda x: run.losses(x[:SIZE]), x=torch.randn(SIZE + 1, 3))
    why = "the batch is not in rows of one per sample, and its records cannot be read (they are not known)"
    assert run.checks.found == Checked((), (why,))
    equal = Run()
    equal.watched(x=torch.zeros(SIZE, 3))
    assert equal.checks.found == Checked((), ("the batch has no rows of different samples",))


# The loss function


class Again:
    """The batch as it is."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def scaled(self, kept: list[bool], scale: float) -> Tensor:
        return torch.where(torch.tensor(kept)[:, None], self.x, self.x * scale)

    def replaced(self, kept: list[bool], longest: bool) -> Tensor:
        return self.x


def test_the_loss_function_answers_for_padding_once() -> None:
    calls: list[int] = []

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        calls.append(len(x))
        return model(x).square().sum(1)

    run = Run(loss_fn=loss_fn)
    run.checks.not_checked(PADDED)
    run.checks.not_checked("another reason")
    run.checks.look_at_losses(batch(2), 2, Again(batch(2)))
    assert not calls and PADDED in run.checks.found.unclear
    run.checks.look_at_losses(batch(3), 3, Again(batch(3)))
    assert calls and run.checks.found.unclear == ("another reason",)
    calls.clear()
    run.checks.look_at_losses(batch(), SIZE, Again(batch()))
    assert not calls, "once"


def test_records_that_cannot_be_read_again_leave_padding_open() -> None:
    run = Run(loss_fn=lambda model, x: model(x).square().sum(1))
    run.checks.not_checked(PADDED)
    run.checks.look_at_losses(batch(), SIZE, Again(batch() + 1))
    why = "longer and shorter records in loss_fn: the records of a batch cannot be read again (they are others the "
    assert run.checks.found.unclear == (PADDED, f"{why}second time)")


def test_a_run_whose_norms_are_checked_elsewhere_is_not_watched() -> None:
    run = Run(loss_fn=lambda model, x: 1 / 0)  # type: ignore[return-value]
    run.checks.watches = False
    run.checks.look_at_losses(batch(), SIZE, Again(batch()))
    run.checks.open(batch(), SIZE, 0)
    assert not modes() and not run.close(run.losses(batch())).watched


# When


def test_the_first_steps_are_watched_and_then_those_whose_turn_has_come() -> None:
    run = Run()
    checks = run.checks
    assert checks.is_due(50), "none was watched so far"
    for step in range(3):
        run.watched(step)
    assert checks.found.steps == (0, 1, 2) and checks.has_watched
    assert checks.is_due(2) and not checks.is_due(3) and checks.is_due(10_000)


def test_gaps_are_64_and_later_512_steps_on_average() -> None:
    for number, gap in ((1, 64), (3, 64), (4, 512), (9, 512)):
        found = []
        for seed in range(200):
            checks = Checks(nn.Linear(1, 1), (), False, Entropy(seed))
            checks._number = number
            checks._schedule(1000)
            found.append(checks._next - 1000)
        assert min(found) >= gap // 2 and max(found) < gap // 2 + gap
        assert min(found) < 0.6 * gap and max(found) > 1.4 * gap and abs(sum(found) / 200 - gap) < 0.1 * gap


def test_a_batch_of_two_is_watched_where_its_turn_has_come() -> None:
    for size, step, watched in ((1, 0, False), (2, 0, True), (2, 3, False)):
        run = Run()
        if step:
            run.watched()
            run.checks._next = 100
        run.checks.open_if_due(batch(size), PhysicalBatch(step, 0, size, last=True), step, Again(batch(size)))
        assert bool(modes()) is watched
        run.checks.abandon()
        assert not modes() and run.checks.is_due(50) is (watched or not step)


def test_where_few_samples_are_watched_the_rest_of_the_step_is_spared_and_a_whole_batch_follows_soon() -> None:
    nexts, x = set(), batch(4)
    for seed in range(60):
        run = Run()
        run.checks._entropy = Entropy(seed)
        few, rest = (PhysicalBatch(2, k, 4, last=bool(k), few=1) for k in range(2))
        for part in (few, rest):
            run.checks.open_if_due(x, part, 2, Again(x))
            assert bool(modes()) is (part is few)
            if modes():
                run.close(run.losses(x))
                run.checks.accept(2)
        nexts.add(run.checks._next - 2)
    assert min(nexts) == 4 and max(nexts) == 11
    run.checks.open_if_due(x, PhysicalBatch(13, 0, 4, last=True), 13, Again(x))
    run.close(run.losses(x))
    run.checks.accept(13)
    assert run.checks._next >= 13 + 32


def test_where_there_is_no_memory_whole_batches_are_not_watched_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, x = Run(), batch(4)
    for part in (PhysicalBatch(0, 0, 4, last=False, few=1), PhysicalBatch(100, 0, 4, last=True)):
        run.checks.open_if_due(x, part, part.step, Again(x))
        assert bool(modes()) is (part.step == 0)
        if modes():
            run.close(run.losses(x))
            run.checks.accept(0)
        monkeypatch.setattr("clipwise.private.evidence.checks.free_bytes", lambda device: 100)
    said = "whole physical batches: beside them there is no memory for other records"
    assert run.checks.found == Checked((0,), (said,)) and run.checks._next > 100
    run.checks._again = True
    run.checks.open_if_due(x, PhysicalBatch(100, 0, 4, last=True), 100, Again(x))
    assert modes(), "after something new a pass is watched all the same"
    run.checks.abandon()


# A pass that came to nothing


def test_an_error_inside_leaves_nothing_behind_and_is_raised() -> None:
    run = Run()
    run.watched()
    with pytest.raises(ZeroDivisionError), run.checks.watching(batch(), SIZE, 1):
        raise ZeroDivisionError
    assert not modes() and run.checks.is_due(50), "the next pass is watched instead"
    assert not run.close(run.losses(batch())).watched


def test_after_a_refusal_nothing_is_accepted_until_a_pass_is_watched() -> None:
    run = Run()
    with run.checks.watching(batch(), SIZE, 0):
        losses = run.losses(batch())
    run.checks.block()
    assert run.checks.is_due(50) and not modes()
    with pytest.raises(cw.NotSeparable, match="the losses of this batch were refused, and these losses were computed"):
        run.close(losses)
    for step in range(3):
        assert run.checks.is_due(50)
        run.watched(step)
    assert not run.checks.is_due(4)


def test_a_block_without_a_watched_pass_changes_nothing() -> None:
    run = Run()
    run.watched()
    run.checks.block()
    assert not run.close(run.losses(batch())).watched and not run.checks.is_due(4)


def test_losses_of_a_loop_that_was_left_are_not_taken() -> None:
    run = Run()
    run.checks.lose()
    run.close(run.losses(batch()))  # none was watched
    run.checks.open(batch(), SIZE, 0)
    losses = run.losses(batch())
    run.checks.lose()
    assert not modes()
    with pytest.raises(cw.NotSeparable, match=r"the loop over the loader had ended.*was not watched"):
        run.close(losses)
    assert run.watched().watched


def test_losses_from_outside_the_pass_are_forgiven_once() -> None:
    run = Run()
    run.watched()
    for step in (1, 2):
        elsewhere = run.losses(batch())
        with run.checks.watching(batch(), SIZE, step):
            pass
        if step == 1:
            assert not run.close(elsewhere).watched and run.checks.is_due(50)
            assert run.checks.found.unclear == ("losses of one step that were computed after an error",)
        else:
            with pytest.raises(cw.NotSeparable, match="this step is checked, and these losses were computed"):
                run.close(elsewhere)


def test_a_pass_is_not_accepted_before_the_engine_accepts_it() -> None:
    run = Run()
    with run.checks.watching(batch(), SIZE, 0):
        losses = run.losses(x := batch())
    assert x is not None and run.close(losses).watched and run.checks.found.steps == ()
    run.checks.block()
    run.checks.accept(0)
    assert run.checks.found.steps == () and not run.checks.has_watched


def test_what_the_engine_will_refuse_is_not_judged() -> None:
    run = Run()
    for body in (lambda x: run.losses(x).sum(), lambda x: run.losses(x).detach(), lambda x: x.requires_grad_().sum(1)):
        x = batch()
        with run.checks.watching(x, SIZE, 0):
            losses = body(x)
        assert run.close(losses).watched
        run.checks.accept(0)
        assert not run.checks.has_watched


# Numbers and structures


def test_sizes_and_places_matter_where_the_number_of_samples_is_private() -> None:
    weights = torch.arange(1.0, 1.0 + SIZE)
    Run().watched(body=lambda x: Run().losses(x))
    for counted in (False, True):
        run = Run(counted)

        def body(x: Tensor, run: Run = run) -> Tensor:
            return run.losses(x) * weights

        if counted:
            with pytest.raises(cw.NotSeparable, match="place of a sample"):
                run.watched(body=body)
        else:
            run.watched(body=body)
            assert run.checks.found.steps == (0,)


def test_tensors_of_plain_values_that_differ_from_pass_to_pass_are_noted() -> None:
    run = Run()
    for step, value in enumerate((0.3, 0.3, 0.4)):
        run.watched(step, lambda x, value=value: run.losses(x) * torch.tensor([value, value]).sum())
        noted = any("differ from step to step" in why for why in run.checks.found.unclear)
        assert noted is (step == 2)


def test_numbers_that_change_after_others_were_taken_out_are_noted() -> None:
    text = "numbers that change from step to step, after others were taken out of earlier batches"
    for taken in (False, True):
        run = Run()
        for step in range(3):
            scale = 0.3 + 0.1 * step

            def body(x: Tensor, scale: float = scale, run: Run = run, taken: bool = taken) -> Tensor:
                losses = run.losses(x) * scale
                if taken:
                    losses.detach().sum().item()
                return losses

            run.watched(step, body)
        assert (text in run.checks.found.unclear) is taken


def test_a_structure_that_was_seen_is_known_again() -> None:
    run = Run()
    x, table = batch(), torch.ones(2)

    def losses(x: Tensor, factor: Tensor) -> Tensor:
        out: Tensor = (run.model(x) + (run.model.bias * factor).tanh()).square().sum(1)  # type: ignore[operator]
        return out

    def origins(losses: Tensor) -> dict[str, Origin]:
        graph = walk(losses, {id(p): k for k, p in enumerate(run.parameters)}, run.parameters)
        return dict(zip(graph.names, run.checks.remembered(graph), strict=True))

    run.watched(body=lambda x: losses(x, table), x=x)
    assert not run.checks.is_due(4)
    found = origins(losses(x, table))
    assert found["TanhBackward0"] is Origin.CONSTANT and found["AddmmBackward0"] is Origin.BATCH
    assert run.checks.is_due(4), "a new plan has the next pass watched"
    assert origins((run.model(x) + (run.model.bias * table).exp()).sum(1))["ExpBackward0"] is Origin.UNSEEN
    run.watched(1, lambda x: losses(x, x.mean(0)[:2] * 0 + 1), x)
    assert origins(losses(x, table))["TanhBackward0"] is Origin.BATCH, "once of the batch, always of the batch"
    run.watched(2, lambda x: losses(x, table), x)
    assert origins(losses(x, table))["TanhBackward0"] is Origin.BATCH
