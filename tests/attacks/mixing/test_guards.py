"""Guards that look at the whole batch, which no record that was tried sets off; and honest ones, of one sample each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clipwise as cw

from .test_second_look import Body, losses_of, mlp, points, private_of, train

SIZE = cw.FixedSize(48, 8)
Table = dict[str, Body]


def with_x(model: nn.Module, batch: Any, x: Tensor) -> Tensor:
    return losses_of(model, (x, batch[1]))


def dropped_if_one_is_no_number(model: nn.Module, batch: Any, step: int = 0) -> Tensor:
    losses = losses_of(model, batch)
    return torch.where(torch.isfinite(losses).all(), losses, 0 * losses)


def forgotten_if_one_is_no_number(model: nn.Module, batch: Any, step: int) -> Tensor:
    losses = losses_of(model, batch)
    return losses.masked_fill(losses.isnan().any(), 0.0)


GUARDS: Table = {
    "dropped_if_one_is_no_number": dropped_if_one_is_no_number,
    "forgotten_if_one_is_no_number": forgotten_if_one_is_no_number,
    "dropped_if_one_is_large": lambda m, b, k: losses_of(m, b) * (b[0].abs().max() < 1e4),
    "clipped_by_the_norm_of_all": lambda m, b, k: with_x(m, b, b[0] * torch.clamp(500 / b[0].norm(), max=1)),
    "clipped_by_the_largest": lambda m, b, k: with_x(m, b, b[0] / b[0].abs().amax().clamp(min=1000.0)),
}


@pytest.mark.parametrize("physical", [None, 4])
@pytest.mark.parametrize("body", GUARDS.values(), ids=GUARDS)
def test_a_guard_over_the_batch_is_refused(body: Body, physical: int | None) -> None:
    with pytest.raises(cw.NotSeparable, match="guard looks at the whole batch"):
        train(body, sampling=SIZE, physical_batch_size=physical)


def test_with_physical_batches_nothing_is_released_before() -> None:
    model = mlp()
    private = private_of(model, 4, SIZE)
    batches = private.loader(points(), physical_batch_size=4)

    def step() -> None:
        for batch in batches:
            private.step(dropped_if_one_is_no_number(model, batch))

    with pytest.raises(cw.NotSeparable):
        step()
    assert not private.ledger.events


def test_one_record_takes_everybodys_gradient() -> None:
    """Why this is refused."""
    x, y = (t.clone() for t in points()[:])

    def total() -> Tensor:
        model = mlp()
        losses = dropped_if_one_is_no_number(model, (x, y))[1:]
        found = cw.clipped_gradients(losses, dict(model.named_parameters()), cw.Abadi(0.05)).gradients
        return torch.cat([g.flatten() for g in found.values()])

    before = total()
    x[0] = torch.nan
    assert float((total() - before).norm()) > 5 * 0.05


def asserted(model: nn.Module, batch: Any, step: int) -> Tensor:
    assert torch.isfinite(batch[0]).all()
    losses = losses_of(model, batch)
    if losses.isnan().any() or losses.max().item() > 1e4:
        raise FloatingPointError
    return losses


def logged(model: nn.Module, batch: Any, step: int) -> Tensor:
    """A clamped norm on the log, and its number in the losses."""
    float(batch[0].norm().clamp(max=3.0))
    int(batch[0].isnan().sum())
    return losses_of(model, batch) * 3.0


def own_rows_of_pairs(model: nn.Module, batch: Any, step: int) -> Tensor:
    """Zero times a number that is none: no losses, but no mixing of numbers either."""
    scores = model(batch[0]).log_softmax(1) @ (batch[1] == torch.arange(3)[:, None]).float()
    return -(scores * torch.eye(len(batch[0]))).sum(1)


def solved(model: nn.Module, batch: Any, step: int) -> Tensor:
    matrices = batch[0][:, :, None] * batch[0][:, None] + torch.eye(6)
    return with_x(model, batch, torch.linalg.solve(matrices, batch[0][:, :, None])[:, :, 0])


def in_unit_interval(model: nn.Module, batch: Any, step: int) -> Tensor:
    return F.binary_cross_entropy(model(batch[0])[:, 0].sigmoid(), (batch[1] > 0).float(), reduction="none")


def ordered(model: nn.Module, batch: Any, step: int) -> Tensor:
    """Sorted by a feature, and put back."""
    values, order = batch[0][:, 0].sort()
    x = torch.cat([values[:, None], batch[0][order][:, 1:]], 1)
    return with_x(model, batch, x[order.argsort()])


def binned(model: nn.Module, batch: Any, step: int) -> Tensor:
    bins = (batch[0].sigmoid() * 6).long()
    return with_x(model, batch, torch.linspace(-1, 1, 6)[bins])


def chosen(model: nn.Module, batch: Any, step: int) -> Tensor:
    x = torch.zeros_like(batch[0])
    x[batch[0] > 0] = batch[0][batch[0] > 0]
    return with_x(model, batch, x)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Conv1d(1, 4, 3, padding=1), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.max_pool1d(self.layer(x[:, None]).relu(), 2).flatten(1))
        return out


HONEST: Table = {
    "asserted": asserted,
    "logged": logged,
    "own_rows_of_pairs": own_rows_of_pairs,
    "solved": solved,
    "in_unit_interval": in_unit_interval,
    "ordered": ordered,
    "binned": binned,
    "chosen": chosen,
    "dropped_by_itself": lambda m, b, k: (v := losses_of(m, b), torch.where(torch.isfinite(v), v, 0 * v.detach()))[1],
    "clipped_by_itself": lambda m, b, k: with_x(m, b, b[0] * torch.clamp(500 / b[0].norm(dim=1, keepdim=True), max=1)),
    "only_finite_features": lambda m, b, k: with_x(m, b, b[0].nan_to_num().clamp(-5, 5)),
    "best_class": lambda m, b, k: (v := m(b[0]), v.topk(2).values[:, 0] - v.gather(1, v.argmin(1)[:, None])[:, 0])[1],
}
NOT_FOLLOWED = {"chosen", "logged"}  # shapes that follow the records, numbers that left: by other forms, too


@pytest.mark.parametrize("name", HONEST)
def test_guards_of_one_sample_and_everyday_programs_are_honest(name: str) -> None:
    for physical in (None, 4):
        private = train(HONEST[name], sampling=SIZE, physical_batch_size=physical)
        assert private.ledger.steps == 4
        if name not in NOT_FOLLOWED:
            assert private.checked == cw.private.Checked((0, 1, 2), ())


def test_pooling_and_recurrent_layers_are_honest() -> None:
    assert train(losses_of, model=Pooled(), sampling=SIZE).checked == cw.private.Checked((0, 1, 2), ())

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.rnn(x[:, :, None])[0][:, -1])
            return out

    assert train(losses_of, model=Recurrent(), sampling=SIZE).checked == cw.private.Checked((0, 1, 2), ())
