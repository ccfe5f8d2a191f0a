"""What a third look at the checks found: places and sizes as tensors, values read out of sight, logs refused."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

import clipwise as cw
from clipwise.private import Checked

from .programs import Listed
from .test_mixing import modes
from .test_second_look import Body, losses_of, mlp, points, private_of, train

Table = dict[str, Body]
ENCODING = torch.sin(torch.arange(100.0)[:, None] * torch.arange(1.0, 7.0))


def with_x(model: nn.Module, batch: Any, x: Tensor) -> Tensor:
    return losses_of(model, (x, batch[1]))


# The place of a sample in its batch


def column_of_places(model: nn.Module, batch: Any, step: int) -> Tensor:
    x = batch[0].clone()
    x[:, 0] = torch.arange(float(len(x)))
    return with_x(model, batch, x)


def classes_by_place(model: nn.Module, batch: Any, step: int) -> Tensor:
    return F.cross_entropy(model(batch[0]), torch.arange(len(batch[0])) % 3, reduction="none")


def weights_by_place(batch: Any) -> Tensor:
    return torch.linspace(0.5, 3.0, len(batch[0]))


PLACES: Table = {
    "weights": lambda m, b, k: losses_of(m, b) * torch.arange(1.0, 1 + len(b[0])),
    "encoding_along_the_samples": lambda m, b, k: with_x(m, b, b[0] + 3 * ENCODING[: len(b[0])]),
    "feature": lambda m, b, k: with_x(m, b, torch.cat([b[0][:, 1:], torch.arange(float(len(b[0])))[:, None]], 1)),
    "column": column_of_places,
    "class": classes_by_place,
    "half": lambda m, b, k: torch.where(torch.arange(len(b[0])) < 4, 3.0, 1.0) * losses_of(m, b),
    "in_place_of_values": lambda m, b, k: with_x(m, b, torch.where(b[0] > 0, b[0], ENCODING[: len(b[0])])),
    "chosen_by_class": lambda m, b, k: torch.where(b[1] > 0, weights_by_place(b), 1.0) * losses_of(m, b),
    "times_a_mask": lambda m, b, k: (1 + weights_by_place(b) * (b[1] > 0)) * losses_of(m, b),
    "times_a_class": lambda m, b, k: weights_by_place(b) * b[1] * losses_of(m, b),
    "compared_with_classes": lambda m, b, k: (b[1] == torch.arange(len(b[1])) % 3).float() * losses_of(m, b),
}


@pytest.mark.parametrize("body", PLACES.values(), ids=PLACES)
def test_losses_do_not_depend_on_the_place_in_the_batch(body: Body) -> None:
    with pytest.raises(cw.NotSeparable, match="place of a sample"):
        train(body)


def test_a_place_moves_everybody_behind_it() -> None:
    """Why this is refused: without the first record the sum moves by far more than R."""
    x, y = points()[:]

    def total(first: int) -> Tensor:
        model, rows = mlp(), (x[first:], y[first:])
        losses = PLACES["encoding_along_the_samples"](model, rows, 0)
        found = cw.clipped_gradients(losses, dict(model.named_parameters()), cw.Abadi(0.05)).gradients
        return torch.cat([g.flatten() for g in found.values()])

    assert float((total(0) - total(1)).norm()) > 5 * 0.05


NO_PLACES: Table = {
    "noise": lambda m, b, k: with_x(m, b, b[0] + torch.randn(len(b[0]), 6)),
    "drawn_from_a_table": lambda m, b, k: with_x(m, b, b[0] + ENCODING[torch.randint(100, (len(b[0]),))]),
    "the_same_for_all": lambda m, b, k: with_x(m, b, b[0] * torch.full((len(b[0]), 1), 0.7)),
    "own_class": lambda m, b, k: -m(b[0]).log_softmax(1)[torch.arange(len(b[0])), b[1]],
    "own_class_of_all_in_a_row": lambda m, b, k: -m(b[0]).log_softmax(1).flatten()[3 * torch.arange(len(b[1])) + b[1]],
    "own_class_by_comparison": lambda m, b, k: -(m(b[0]).log_softmax(1) * (b[1][:, None] == torch.arange(3))).sum(1),
    "a_mask_of_lengths": lambda m, b, k: with_x(m, b, b[0] * (torch.arange(6) < 2 + b[1][:, None])),
    "on_the_log": lambda m, b, k: (v := losses_of(m, b), v.detach() * torch.arange(len(v)))[0],
}


@pytest.mark.parametrize("body", NO_PLACES.values(), ids=NO_PLACES)
def test_random_and_equal_rows_are_honest(body: Body) -> None:
    assert train(body).checked.steps == (0, 1, 2)


# The number of samples as a tensor

SIZES: Table = {
    "tensor": lambda m, b, k: losses_of(m, b) / torch.tensor(float(len(b[0]))),
    "whole_tensor": lambda m, b, k: losses_of(m, b) / torch.tensor(len(b[0])),
    "sum_of_ones": lambda m, b, k: (v := losses_of(m, b)) / torch.ones_like(v).sum(),
    "filled": lambda m, b, k: (v := losses_of(m, b)) * torch.full_like(v, 1 / len(v)),
    "softmax_of_zeros": lambda m, b, k: losses_of(m, b) * torch.softmax(torch.zeros(len(b[0])), 0),
    "power": lambda m, b, k: losses_of(m, b) ** (1 / len(b[0])),
    "temperature": lambda m, b, k: F.cross_entropy(
        m(b[0]) * torch.tensor(math.sqrt(len(b[0]))), b[1], reduction="none"
    ),
}


@pytest.mark.parametrize("body", SIZES.values(), ids=SIZES)
def test_the_number_of_samples_is_seen_as_a_tensor(body: Body) -> None:
    with pytest.raises(cw.NotSeparable, match="number of samples"):
        train(body)


@pytest.mark.parametrize("seed", range(4))
def test_a_weight_that_grows_with_the_step_is_honest(seed: int) -> None:
    model = mlp()
    private = private_of(model, 8, cw.Poisson(48, 4), seed)
    for batch in private.loader(points()):
        private.step(losses_of(model, batch) * ((private.steps_done + 1) / 10))
    assert private.ledger.steps == 8


# Values that were read out of sight


def counted_by_ones(model: nn.Module, batch: Any, step: int) -> Tensor:
    return losses_of(model, batch) / (1 + torch.ones_like(batch[0][batch[1] == 0]).sum())


def centred_by_a_list_of_means(model: nn.Module, batch: Any, step: int) -> Tensor:
    return with_x(model, batch, batch[0] - torch.tensor(list(batch[0].mean(0))))


def scaled_by_a_number_of_inference_mode(model: nn.Module, batch: Any, step: int) -> Tensor:
    with torch.inference_mode():
        spread = batch[0].std().item()
    return losses_of(model, batch) * spread


def quantised_over_the_batch(model: nn.Module, batch: Any, step: int) -> Tensor:
    return with_x(model, batch, torch.quantize_per_tensor_dynamic(batch[0], torch.qint8, False).dequantize())


def branched_by_allclose(model: nn.Module, batch: Any, step: int) -> Tensor:
    return losses_of(model, batch) * (1.0 if torch.allclose(batch[0].mean(0), torch.zeros(6), atol=1.0) else 3.0)


@pytest.mark.parametrize("body", [counted_by_ones, centred_by_a_list_of_means, scaled_by_a_number_of_inference_mode])
def test_values_that_were_read_out_of_sight_are_followed(body: Body) -> None:
    with pytest.raises(cw.NotSeparable, match="samples mix"):
        train(body)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("body", [quantised_over_the_batch, branched_by_allclose])
def test_what_cannot_be_followed_is_not_called_checked(body: Body) -> None:
    private = train(body)
    assert 0 not in private.checked.steps and private.checked.unclear  # later steps try other forms, two at a time


def test_a_record_of_a_list_is_known_again() -> None:
    records = Listed([points()[i] for i in range(48)])
    with pytest.raises(cw.NotSeparable, match="unknown origin"):
        train(lambda m, b, k: with_x(m, b, b[0] + records[0][0]), records)


def test_records_that_the_loop_reads_as_arrays_are_noted() -> None:
    rows = points().tensors[0].numpy()
    private = train(lambda m, b, k: with_x(m, b, b[0] + torch.tensor(rows[7 * k])))
    assert "differ from step to step" in str(private.checked)


# Logs and other honest habits


def logged(log: Callable[[Tensor, Tensor], Any]) -> Body:
    """All simple numbers are used after the log, so that one of them is on it."""

    def body(model: nn.Module, batch: Any, step: int) -> Tensor:
        logits = model(batch[0])
        log(logits, batch[1])
        weight = model[2].weight * torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0])
        out = logits + torch.tanh(model[0](batch[0])) @ weight.T
        losses = F.cross_entropy(out, batch[1], weight=torch.tensor([1.0, 2.0, 3.0]), reduction="none")
        for eighths in range(9):
            losses = losses * (eighths / 8) + losses * (1.0 - eighths / 8)
        return losses.pow(2) + losses.pow(3) * 4

    return body


LOGS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "accuracy": lambda logits, y: (logits.argmax(1) == y).float().mean().item(),
    "correct": lambda logits, y: (logits.argmax(1) == y).sum().item(),
    "worst": lambda logits, y: logits.amax(1).argmax().item(),
    "list": lambda logits, y: logits.tolist(),
    "array": lambda logits, y: logits.detach().cpu().numpy().mean(),
    "rows_of_a_class": lambda logits, y: [float(row.detach().max()) for row in logits[y == 0]],
    "pieces": lambda logits, y: len(logits[y == 0].split(1)),
    "file": lambda logits, y: torch.save({"logits": logits}, io.BytesIO()),
    "text": lambda logits, y: f"{logits} {logits.mean():.3f}",
}


@pytest.mark.parametrize("log", LOGS.values(), ids=LOGS)
def test_a_log_never_leads_to_a_refusal(log: Callable[[Tensor, Tensor], Any]) -> None:
    assert train(logged(log)).ledger.steps == 4
    assert not modes()


def test_a_checkpoint_may_be_loaded_in_the_loop() -> None:
    file = io.BytesIO()
    torch.save(mlp().state_dict(), file)

    def body(model: nn.Module, batch: Any, step: int) -> Tensor:
        file.seek(0)
        torch.load(file)
        return losses_of(model, batch)

    assert train(body).checked.steps == (0, 1, 2)


def changed_in_place_with_numpy(model: nn.Module, batch: Any, step: int) -> Tensor:
    values = batch[0].numpy()
    np.clip(values, -1, 1, out=values)
    return losses_of(model, batch)


def nested(model: nn.Module, batch: Any, step: int) -> Tensor:
    return with_x(model, batch, torch.nested.to_padded_tensor(torch.nested.nested_tensor(list(batch[0])), 0.0))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("body", [changed_in_place_with_numpy, nested])
def test_what_cannot_be_followed_is_not_called_mixing(body: Body) -> None:
    private = train(body)
    assert private.ledger.steps == 4 and not private.checked.steps and private.checked.unclear


def time_first(records: list[Any]) -> Any:
    x = pad_sequence([x for x, _ in records])
    return x, torch.tensor([len(x) for x, _ in records]), torch.tensor([int(y) for _, y in records])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.RNN(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = (torch.arange(x.shape[0])[:, None] < lengths)[..., None]
        out: Tensor = self.head((self.rnn(x)[0] * mask).sum(0) / lengths[:, None])
        return out


@pytest.mark.parametrize("lengths", [(2, 7), (6, 7), (8, 9)], ids=["ragged", "as_many_as_tried", "as_many_as_samples"])
def test_time_before_samples_is_honest_in_a_collate_function(lengths: tuple[int, int]) -> None:
    torch.manual_seed(6)
    records = Listed([(torch.randn(int(torch.randint(*lengths, ())), 4), torch.randint(3, ())) for _ in range(48)])
    body: Body = lambda m, b, k: F.cross_entropy(m(b[0], b[1]), b[2], reduction="none")  # noqa: E731
    options: dict[str, Any] = {"collate_fn": time_first, "sampling": cw.FixedSize(48, 8)}
    assert train(body, records, Recurrent(), **options).checked.steps == (0, 1, 2)

    def mixed(parts: list[Any]) -> Any:
        x, *rest = time_first(parts)
        return x - x.mean(1, keepdim=True), *rest

    with pytest.raises(cw.NotSeparable, match="collate"):
        train(body, records, Recurrent(), **{**options, "collate_fn": mixed})


def test_a_checkpoint_that_hides_the_parameters_is_named() -> None:
    def body(model: nn.Module, batch: Any, step: int) -> Tensor:
        return F.cross_entropy(
            checkpoint(model, batch[0].requires_grad_(), use_reentrant=True), batch[1], reduction="none"
        )

    with pytest.raises(cw.InvalidLosses, match="use_reentrant"):
        train(body)
    assert not modes()


def test_after_a_refusal_the_next_steps_are_watched() -> None:
    """A loop that mends every refused batch, and mixes again with the next one, is refused every time."""
    model, refused = mlp(), 0
    private = private_of(model, 8)
    for batch in private.loader(points()):
        try:
            private.step(with_x(model, batch, batch[0] - batch[0].mean(0)))
        except cw.NotSeparable:
            refused += 1
            with private.watch(batch):
                losses = losses_of(model, batch)
            private.step(losses)
    assert refused == private.ledger.steps == 8


@pytest.mark.parametrize("how", ["dropped iterator", "after a break"])
def test_a_batch_whose_loop_was_left_is_not_taken_without_a_check(how: str) -> None:
    """The pass was no longer watched when the iterator was gone, and every step of such a loop was accepted."""
    model = mlp()
    private = private_of(model, 8)
    if how == "dropped iterator":
        batch = next(iter(private.loader(points())))
        losses = with_x(model, batch, batch[0] - batch[0].mean(0))
    else:
        for batch in private.loader(points()):
            losses = with_x(model, batch, batch[0] - batch[0].mean(0))
            break
    with pytest.raises(cw.NotSeparable, match="keep the iterator"):
        private.step(losses)
    assert not private.ledger.events and not modes()
    with private.watch(batch):
        losses = losses_of(model, batch)
    private.step(losses)
    assert private.checked.steps == (0,)


@pytest.mark.parametrize("seed", [None, 0])
def test_records_that_are_read_a_whole_batch_at_once_are_exchanged_too(seed: int | None) -> None:
    """A loss over the longest record of its batch passed: such a data set's records were not read one by one."""
    x = points().tensors[0].clone()
    x[::2, 3:] = 0.0
    data = cw.data.TensorRecords(x, torch.zeros(len(x)))

    def train_with(width: Callable[[Tensor], float]) -> cw.Private:
        model = mlp()
        plan = cw.Plan(cw.FullBatch(len(x)), 2, cw.Abadi(1.0), 1.0)

        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            return model(batch[0]).square().sum(1) / width(batch[0])

        private = cw.Private(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), seed=seed, loss_fn=loss_fn)
        for batch in private.loader(data, collate_fn=data.collate):
            private.step(private.losses(batch))
        return private

    with pytest.raises(cw.NotSeparable, match="shorter records in place of all others"):
        train_with(lambda x: int((x != 0).any(0).sum()))
    assert train_with(lambda x: x.shape[1]).checked == Checked((0, 1), ())
