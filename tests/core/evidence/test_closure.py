"""The checks of a loss function: what is tried, how closely it is compared, and what is left as it was."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clipwise as cw
from clipwise.private.evidence.closure import batch_size, check_losses, take
from clipwise.private.evidence.memory import Memory
from tests.core.common import layer, squares

Pair = namedtuple("Pair", ("x", "y"))


def batch(size: int = 5) -> Tensor:
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(0))


class Again:
    """The batch of other records: `other` in place of those that are not kept."""

    def __init__(self, x: Tensor, longer: Tensor | None = None, shorter: Tensor | None = None) -> None:
        self.x, self.longer, self.shorter = x, longer, shorter

    def _with(self, kept: list[bool], other: Tensor | None) -> Tensor:
        return self.x if other is None else torch.where(torch.tensor(kept)[:, None], self.x, other)

    def scaled(self, kept: list[bool], scale: float) -> Tensor:
        return self._with(kept, self.x * scale)

    def replaced(self, kept: list[bool], longest: bool) -> Tensor:
        return self._with(kept, self.longer if longest else self.shorter)


@pytest.mark.parametrize("size", [2, 3])
def test_three_samples_are_enough(size: int) -> None:
    if size == 3:
        cw.check_model(layer(), squares, batch(size))
    else:
        with pytest.raises(cw.InvalidLosses, match="at least three samples, got 2"):
            cw.check_model(layer(), squares, batch(size))


BAD: dict[str, tuple[Callable[[nn.Module, Tensor], Any], str]] = {
    "one number": (lambda m, x: squares(m, x).mean(), r"shape \(5,\), got \(\)"),
    "a column": (lambda m, x: squares(m, x)[:, None], r"shape \(5,\), got \(5, 1\)"),
    "fewer": (lambda m, x: squares(m, x)[1:], r"shape \(5,\), got \(4,\)"),
    "no tensor": (lambda m, x: 3.0, r"shape \(5,\), got float"),
    "infinite": (lambda m, x: squares(m, x) / torch.tensor([1.0, 0, 1, 1, 1]), "needs finite losses"),
    "NaN": (lambda m, x: squares(m, x) * torch.tensor([1.0, 1, 1, 1, torch.nan]), "needs finite losses"),
}


@pytest.mark.parametrize(("loss_fn", "what"), BAD.values(), ids=BAD)
def test_losses_are_one_finite_number_for_each_sample(loss_fn: Any, what: str) -> None:
    with pytest.raises(cw.InvalidLosses, match=what):
        cw.check_model(layer(), loss_fn, batch())


def test_the_size_of_a_batch_is_the_first_axis_of_all_its_tensors() -> None:
    x, y = torch.ones(4, 2), torch.ones(4)
    for value in (x, (x, y), [x, {"y": y, "text": "a"}], {"x": x, "more": (y, [x])}, Pair(x, y)):
        assert batch_size(value) == 4
    with pytest.raises(cw.InvalidLosses, match=r"share their first axis, got sizes \[3, 4\]"):
        batch_size((x, torch.ones(3)))
    with pytest.raises(cw.InvalidLosses, match=r"got sizes \[\]"):
        batch_size(("text",))
    with pytest.raises(cw.InvalidLosses, match=r"tensor of shape \(\), which has no axis of samples"):
        batch_size((x, torch.tensor(1.0)))


def test_samples_are_taken_from_every_tensor() -> None:
    x, index = torch.arange(4.0), torch.tensor([2, 0])
    found = take({"x": x, "pair": Pair(x, "text"), "list": [x], "tuple": (x, 3)}, index)
    assert found["x"].tolist() == [2, 0] and type(found["pair"]) is Pair and found["pair"].x.tolist() == [2, 0]
    assert found["pair"].y == "text" and type(found["list"]) is list and found["tuple"][1] == 3
    assert found["tuple"][0].tolist() == [2, 0] and type(found["tuple"]) is tuple


class Scaled(nn.Module):
    """A layer, and what a sample's presence does to all losses."""

    def __init__(self, effect: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.effect = nn.Linear(3, 2), effect

    def forward(self, x: Tensor) -> Tensor:
        return self.effect(self.layer(x).square().sum(1), x)


def forward(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out


EFFECTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "divided by the number": lambda losses, x: losses / len(x),
    "a little of the number": lambda losses, x: losses * (1 + 1e-6 / len(x)),
    "the first sample's presence": lambda losses, x: losses * (1.0 if float(x[0, 0]) == float(batch()[0, 0]) else 2.0),
    "the last sample's presence": lambda losses, x: losses * (1.0 if float(x[-1, 0]) == float(batch()[-1, 0]) else 2.0),
}


@pytest.mark.parametrize("effect", EFFECTS.values(), ids=EFFECTS)
def test_a_sample_that_is_missed_is_noticed(effect: Callable[[Tensor, Tensor], Tensor]) -> None:
    """In double precision, where a part in a million is far above rounding."""
    x = batch()
    model = Scaled(effect)
    with pytest.raises(cw.NotSeparable, match=r"removing sample \d moves another sample's loss by .*samples mix"):
        cw.check_model(model, forward, x)


def test_rounding_is_not_taken_for_mixing() -> None:
    cw.check_model(Scaled(lambda losses, x: losses * (1 + 1e-15 * len(x))), forward, batch())
    cw.check_model(Scaled(lambda losses, x: losses * 0), forward, batch())


@pytest.mark.parametrize("seed", [8, 63, 141])
def test_a_loss_near_zero_is_rounded_as_the_numbers_that_it_is_the_difference_of(seed: int) -> None:
    """One target in 64 is met by chance: its squared error is 1e-8 or less, and rounding of outputs is all of it."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    x = torch.randn(64, 2)
    y = torch.sin(x.sum(1)) * 0.3
    cw.check_model(model, lambda model, both: (model(both[0]).squeeze(1) - both[1]).square(), (x, y))


def test_a_model_that_stays_in_single_precision_is_compared_as_closely_as_that_allows() -> None:
    def effect(share: float) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda losses, x: losses.float() * (1 + share / len(x))

    cw.check_model(Scaled(effect(0.0)), forward, batch())
    with pytest.raises(cw.NotSeparable, match="removing sample"):
        cw.check_model(Scaled(effect(1e-2)), forward, batch())


def test_a_model_that_does_not_run_in_double_precision_is_compared_as_it_is() -> None:
    def narrow(losses: Tensor, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise TypeError("single precision only")
        return losses / len(x)

    with pytest.raises(cw.NotSeparable, match="removing sample"):
        cw.check_model(Scaled(narrow), forward, batch())


def test_a_constant_of_the_program_is_one_in_a_loss_function_too() -> None:
    table = torch.linspace(0.5, 1.5, 3)
    cw.check_model(layer(), lambda model, x: squares(model, x * table.to(x)), batch())


def test_random_losses_are_tried_in_evaluation_mode() -> None:
    """Dropout is off; noise of another kind draws other numbers for fewer samples."""

    class Noisy(nn.Module):
        def __init__(self, always: bool, mixes: bool) -> None:
            super().__init__()
            self.layer, self.drop = nn.Linear(3, 2), nn.Dropout(0.5)
            self.always, self.mixes = always, mixes

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.rand(len(x)).to(x) if self.training or self.always else 0.0
            losses = self.drop(self.layer(x)).square().sum(1) + noise
            return losses / len(x) if self.mixes else losses

    for always in (False, True):
        model = Noisy(always, False)
        cw.check_model(model, forward, batch())
        assert model.training and model.drop.training
    with pytest.raises(cw.NotSeparable, match="removing sample"):
        cw.check_model(Noisy(False, True), forward, batch())
    cw.check_model(Noisy(True, True), forward, batch())  # nobody can tell


def test_model_and_generators_are_left_as_they_were() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.frozen = nn.Linear(3, 2), nn.Dropout(0.5).eval()
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1  # type: ignore[operator]
            return self.layer(x).square().sum(1) + 0 * torch.rand(()).to(x)

    model = Counting()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    cw.check_model(model, forward, batch())
    assert torch.equal(torch.rand(3), expected) and not model.frozen.training and model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("how", ["longer", "shorter", "larger"])
def test_other_records_are_put_in_place_of_all_samples_but_one(how: str) -> None:
    x = batch().clone()
    x[:, 2] = 0
    longer, shorter = torch.ones(5, 3), torch.tensor([[1.0, 0.0, 0.0]]).expand(5, 3)
    again = Again(x, longer if how == "longer" else None, shorter if how == "shorter" else None)

    def branches(model: nn.Module, x: Tensor) -> Tensor:
        many = {"longer": bool((x[:, 2] == 1).sum() > 3), "shorter": bool((x[:, 0] == 1).sum() > 3),
                "larger": bool(x.abs().sum() > 2 * float(batch()[:, :2].abs().sum()))}[how]  # fmt: skip
        return squares(model, x) * (2.0 if many else 1.0)

    with pytest.raises(cw.NotSeparable, match=f"putting {how} records in place of all others moves the loss of .* 2"):
        check_losses(Memory(layer(), ()), branches, x, 5, again)
    assert check_losses(Memory(layer(), ()), squares, x, 5, again) == ""


def test_what_cannot_be_read_again_is_said() -> None:
    found = check_losses(Memory(layer(), ()), squares, batch(), 5, Again(batch() + 1))
    assert found.startswith("longer and shorter records in loss_fn") and "others the second time" in found


def test_memory_that_is_newer_than_what_is_known_may_come_from_a_batch() -> None:
    memory = Memory(layer(), ())
    memory.look_around(0)
    newer = batch(1).square().sum()

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return squares(model, x) * newer

    with pytest.raises(cw.NotSeparable, match="unknown origin"):
        check_losses(memory.apart(), loss_fn, batch(), 5, None)
    assert check_losses(memory.apart(), squares, batch(), 5, None) == ""
    assert check_losses(Memory(layer(), ()), loss_fn, batch(), 5, None) == "", "it looks around itself, and finds it"


def test_batches_that_are_not_in_rows_lose_no_sample() -> None:
    def loss_fn(model: nn.Module, given: Any) -> Tensor:
        x, counts = given
        return torch.stack([part.square().sum() for part in model(x).split(counts)])

    assert check_losses(Memory(layer(), ()), loss_fn, (batch(5), [2, 1, 2]), 3, None) == ""
    with pytest.raises(cw.NotSeparable):
        check_losses(Memory(layer(), ()), lambda m, x: squares(m, x) / len(x), batch(), 5, None)
    assert (
        check_losses(Memory(layer(), ()), lambda m, b: squares(m, b[0]) / len(b[0]), (batch(), "text"), 5, None) == ""
    )


class Padded(nn.Module):
    """Sentences as numbers over 0, padded with 0: the mean of their words, with dropout that is no module."""

    def __init__(self, masked: bool, always: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)
        self.masked, self.always = masked, always

    def forward(self, x: Tensor) -> Tensor:
        words = nn.functional.dropout(self.words(x), 0.5, training=self.training or self.always)
        mask = (x > 0).to(words)[:, :, None] if self.masked else torch.ones_like(words[:, :, :1])
        out: Tensor = self.head((words * mask).sum(1) / mask.sum(1)).square().sum(1)
        return out


class Longer(Again):
    """Other sentences are two words longer, and this one is padded to their length."""

    def replaced(self, kept: list[bool], longest: bool) -> Tensor:
        padded = nn.functional.pad(self.x, (0, 2)) if longest else self.x
        other = torch.ones_like(padded)
        return torch.where(torch.tensor(kept)[:, None], padded, other)

    def scaled(self, kept: list[bool], scale: float) -> Tensor:
        return self.x


def test_dropout_of_a_longer_batch_is_not_taken_for_mixing() -> None:
    """Models of `transformers` drop attention out by a function: a batch of another length gets other numbers."""
    x = torch.randint(1, 9, (5, 3), generator=torch.Generator().manual_seed(0))
    model = Padded(masked=True).train()
    assert check_losses(Memory(model, ()), forward, x, 5, Longer(x)) == "" and model.training
    with pytest.raises(cw.NotSeparable, match="putting longer records in place of all others moves the loss"):
        check_losses(Memory(Padded(masked=False).train(), ()), forward, x, 5, Longer(x))
    said = check_losses(Memory(Padded(masked=True, always=True).train(), ()), forward, x, 5, Longer(x))
    assert "the losses draw random numbers in evaluation mode too" in said


def test_mixing_in_training_mode_alone_is_noticed_beside_dropout() -> None:
    """Batches of the same shape get the same random numbers, and are compared as they are trained on."""

    def mixing(model: nn.Module, x: Tensor) -> Tensor:
        losses: Tensor = model(x)
        return losses * (1 + int(x.sum()) * model.training)

    x = torch.randint(2, 9, (5, 3), generator=torch.Generator().manual_seed(0))
    with pytest.raises(cw.NotSeparable):
        check_losses(Memory(Padded(masked=True).train(), ()), mixing, x, 5, Longer(x))
