"""What a saved run must hold before anything of it is believed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import clipwise as cw
from clipwise.accounting import CHANGED_DATA
from clipwise.private.saving import Saved, _alike, is_hex
from tests.core.common import data, mlp, plan, sgd, train

ALIKE: list[tuple[Any, Any, bool]] = [
    (0.1, 0.2, True), (0.1, 3, True), (1, 0.5, True), (None, 0.1, True), (0.1, None, True), (None, None, True),
    (0.1, float("nan"), False), (0.1, float("inf"), False), (0.1, 2.0**63, False), (0.1, -(2.0**63), False),
    (0.1, 2.0**62, True), (None, 2.0**63, False), (0.1, "0.1", False), ("a", 0.1, False), (0.1, True, False),
    (True, 0.1, False), (True, False, True), ("a", "b", True), ("a", None, True), (None, "a", True), ("a", True, False),
    ((0.9, 0.99), (0.5, 0.5), True), ((0.9, 0.99), [0.5, 0.5], True), ((0.9, 0.99), (0.5,), False),
    ((0.9, 0.99), (0.5, "a"), False), ((0.9,), 0.9, False), (0.9, (0.9,), False),
]  # fmt: skip


@pytest.mark.parametrize(("ours", "theirs", "alike"), ALIKE)
def test_settings_of_an_optimizer_that_could_stand_in_each_others_place(ours: Any, theirs: Any, alike: bool) -> None:
    assert _alike(ours, theirs) is alike


def test_bytes_in_hexadecimal() -> None:
    assert all(map(is_hex, ("", "00", "0aff")))
    assert not any(map(is_hex, ("0", "0g", "0A", "00\n", " 00", b"00", None, 0)))


# The state


def state(**changes: Any) -> dict[str, Any]:
    model = mlp()
    made = cw.Private(plan(), model, sgd(model), seed=3).state_dict()
    return {**made, **changes}


def refusal(saved: Any) -> str:
    model = mlp()
    private = cw.Private(plan(), model, sgd(model), seed=3)
    try:
        private.load_state_dict(saved)
    except cw.CheckpointError as error:
        assert private.steps_done == 0 and not private.ledger.events
        return str(error)
    return ""


WRONG: dict[str, Any] = {
    "plan": "text", "ledger": 3, "steps": -1, "seed": -1, "label": "0g", "own_batches": 1, "parameters": (),
    "weights": 3, "order": "0", "loader": {"physical_batch_size": 0}, "generator": torch.zeros(3),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_every_field_of_a_state_makes_sense(name: str) -> None:
    assert refusal(state()) == ""
    assert refusal(state(**{name: WRONG[name]})) == f"the saved run has no {name!r} that makes sense: it is damaged."


LOADERS: list[tuple[Any, bool]] = [
    (None, True), ({"physical_batch_size": None}, True), ({"physical_batch_size": 3}, True), ({}, False), (3, False),
    ({"physical_batch_size": "3"}, False), ({"physical_batch_size": 3, "more": 1}, False), ({"other": 3}, False),
]  # fmt: skip


@pytest.mark.parametrize(("loader", "fits"), LOADERS)
def test_the_loader_of_a_state(loader: Any, fits: bool) -> None:
    assert (refusal(state(loader=loader)) == "") is fits


def test_a_state_has_these_fields_and_this_version() -> None:
    whole = state()
    for wrong in ({**whole, "more": 1}, {k: v for k, v in whole.items() if k != "label"}, {}):
        assert "a saved run has the keys" in refusal(wrong)
    assert "got list" in refusal([1])
    for version in (1, 3):
        assert f"has version {version}, this clipwise reads 2" in refusal(state(version=version))


def test_the_ledger_has_at_least_the_steps_that_were_made() -> None:
    model = mlp()
    private = cw.Private(plan(), model, sgd(model), seed=3)
    train(private, model, data())
    made = private.state_dict()
    assert made["steps"] == 6
    assert "the ledger has 6 steps, but 7 were made: it was edited" in refusal({**made, "steps": 7})
    assert refusal({**made, "steps": 5}) == "" == refusal(made)


def test_a_state_of_another_run_is_refused() -> None:
    model = mlp()
    others: dict[str, cw.Private] = {
        "another plan": cw.Private(plan(steps=7), model, sgd(model), seed=3),
        "another seed": cw.Private(plan(), model, sgd(model), seed=4),
        "no seed": cw.Private(plan(), model, sgd(model)),
        "own_batches=True": cw.Private(plan(), model, sgd(model), seed=3, own_batches=True),
    }
    for what, other in others.items():
        assert f"the saved run has {what}" in refusal(other.state_dict())
    wide = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.0), nn.Linear(4, 2))
    assert "first at ['3.weight', [2, 4]" in refusal(cw.Private(plan(), wide, sgd(wide), seed=3).state_dict())
    longer = nn.Sequential(*mlp(), nn.Linear(1, 1))
    assert "first at ['4.weight'" in refusal(cw.Private(plan(), longer, sgd(longer), seed=3).state_dict())


# Model and optimizer


def saved_with(made: nn.Module, stepped: Any, /, **changes: Any) -> Saved:
    values: dict[str, Any] = {
        "path": Path("run"), "journal": None, "state": {"seed": None}, "model": dict(made.state_dict()),
        "optimizer": {"class": type(stepped).__name__, "state": stepped.state_dict()}, "extra": None, "witness": None,
    }  # fmt: skip
    return Saved(**values | changes)


def adam() -> tuple[nn.Module, Any]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def with_state(optimizer: Any, **changes: Any) -> dict[str, Any]:
    return {"class": "Adam", "state": {**optimizer.state_dict(), **changes}}


def with_group(optimizer: Any, **changes: Any) -> dict[str, Any]:
    group = optimizer.state_dict()["param_groups"][0]
    return with_state(optimizer, param_groups=[{**group, **changes}])


def test_an_optimizer_is_as_it_was_saved() -> None:
    model, optimizer = adam()
    damaged = "does not hold the state of its optimizer: it is damaged"
    entry = optimizer.state_dict()["state"][0]
    cases: dict[str, tuple[Any, str]] = {
        "another class": ({"class": "SGD", "state": optimizer.state_dict()}, "the saved optimizer is SGD, got Adam"),
        "no state": ({"class": "Adam", "state": None}, damaged),
        "more in it": (with_state(optimizer, more=1), damaged),
        "a list": (with_state(optimizer, state=[entry]), damaged),
        "no groups": (with_state(optimizer, param_groups={}), "does not hold the groups of its optimizer"),
        "groups that are none": (with_state(optimizer, param_groups=[3]), "does not hold the groups of its optimizer"),
        "fewer groups": (with_state(optimizer, param_groups=[]), r"groups have sizes \[2\], the saved ones differ"),
        "other parameters": (with_group(optimizer, params=[0]), r"groups have sizes \[2\], the saved ones differ"),
        "a text": (with_group(optimizer, lr="0.1"), "has 'lr' of its optimizer as str"),
        "a negative place": (with_state(optimizer, state={-1: entry}), damaged),
        "a place behind": (with_state(optimizer, state={2: entry}), damaged),
        "no place": (with_state(optimizer, state={"0": entry}), damaged),
        "no values": (with_state(optimizer, state={0: 3}), damaged),
    }
    for state, what in cases.values():
        with pytest.raises(cw.CheckpointError, match=what):
            saved_with(model, optimizer, optimizer=state)._check_optimizer(optimizer)
    for fine in (with_group(optimizer, initial_lr="of a scheduler"), with_state(optimizer, state={1: entry})):
        saved_with(model, optimizer, optimizer=fine)._check_optimizer(optimizer)
    saved_with(model, optimizer, optimizer=None)._check_optimizer(None)
    with pytest.raises(cw.CheckpointError, match="was saved without an optimizer"):
        saved_with(model, optimizer, optimizer=None)._check_optimizer(optimizer)
    with pytest.raises(cw.CheckpointError, match="was saved with an optimizer"):
        saved_with(model, optimizer)._check_optimizer(None)


def test_a_model_is_as_it_was_saved() -> None:
    model, optimizer = adam()
    weights = dict(model.state_dict())
    saved_with(model, optimizer)._check_model(model)
    for wrong in (
        {**weights, "more": torch.ones(1)}, {"weight": weights["weight"]}, {**weights, "bias": torch.ones(2)},
        {**weights, "bias": weights["bias"].double()}, {**weights, "bias": None}, {**weights, "more": None},
    ):  # fmt: skip
        with pytest.raises(cw.CheckpointError, match=r"does not fit this model.*at '(bias|more)'"):
            saved_with(model, optimizer, model=wrong)._check_model(model)


def test_values_that_cannot_be_compared_or_loaded_are_a_damaged_file(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = adam()
    asked: list[str] = []

    def check(saved: Any) -> None:
        raise ValueError("which of them?")

    run: Any = SimpleNamespace(check=check)
    with pytest.raises(cw.CheckpointError, match=r"does not hold the values of a run: it is damaged \(which of them"):
        saved_with(model, optimizer).continue_in(run, model, optimizer)

    def load_state_dict(state: Any) -> None:
        raise KeyError("step")

    release = SimpleNamespace(check_witness=lambda mark: asked.append("witness"))
    run = SimpleNamespace(check=lambda saved: asked.append("state"), release=release)
    monkeypatch.setattr(optimizer, "load_state_dict", load_state_dict)
    with pytest.raises(cw.CheckpointError, match="has a state that the optimizer refuses: 'step'"):
        saved_with(model, optimizer).continue_in(run, model, optimizer)
    assert asked == ["state", "witness"]


@pytest.mark.parametrize("seed", [None, 3])
def test_changed_data_stand_on_the_ledger_and_a_seeded_run_refuses_them(seed: int | None, tmp_path: Path) -> None:
    model = mlp()
    private = cw.Private(plan(), model, sgd(model), seed=seed)
    private.save(tmp_path / "run")
    if seed is not None:
        with pytest.raises(cw.CheckpointError, match="a seeded run repeats its steps"):
            cw.Private.resume(tmp_path / "run", model, sgd(model), changed_data=True)
        return
    resumed = cw.Private.resume(tmp_path / "run", model, sgd(model), changed_data=True)
    train(resumed, model, data(seed=1))
    assert {event.reason for event in resumed.ledger.events} == {CHANGED_DATA} and resumed.ledger.steps == 6
