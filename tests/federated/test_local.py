"""What clients do: any optimizer, clipping after every batch, and mistakes that are told."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import clipwise as cw
from clipwise.federated import LocalGradient, LocalTraining, Reply, Server, Task, run
from tests.federated.common import federated_plan, flat, loss_fn, make_model, make_users

DATA = make_users(3)[2]
OPTIMIZERS = [
    partial(torch.optim.SGD, lr=0.1),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    partial(torch.optim.Adam, lr=0.1),
    partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1),
    partial(torch.optim.Adagrad, lr=0.1),
    partial(torch.optim.RMSprop, lr=0.1),
    partial(torch.optim.Adadelta, lr=1.0),
    partial(torch.optim.Rprop, lr=0.1),
    partial(torch.optim.LBFGS, lr=0.1, max_iter=3),
]


def make_task(model: nn.Module, clip: Any = None, **rest: Any) -> Task:
    return Task(0, 0, model.state_dict(), cw.Flat(cw.Abadi(1e6) if clip is None else clip), **rest)


def joint(update: Any) -> Tensor:
    return torch.cat([t.flatten() for t in update.values()])


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.func.__name__ + str(o.keywords))
def test_every_optimizer_trains_as_in_an_ordinary_loop(optimizer: Any) -> None:
    model, plain = make_model(), make_model()
    work = LocalTraining(loss_fn, optimizer, epochs=3, batch_size=100, seed=0)
    reply = work(make_model(7), DATA, make_task(model))

    x, y = DATA.tensors
    ordinary = optimizer(plain.parameters())
    for _ in range(3):

        def closure() -> Tensor:
            ordinary.zero_grad()
            loss = loss_fn(plain, (x, y)).mean()
            loss.backward()
            return loss

        ordinary.step(closure)
    torch.testing.assert_close(joint(reply.update), flat(plain) - flat(model), rtol=1e-8, atol=1e-12)
    assert float(joint(reply.update).norm()) > 1e-3 and reply.weight == len(DATA)


def test_global_clip_after_every_batch_shrinks_every_time() -> None:
    """The reason why it is not the default: with zero gradients but one push, R/Z is applied once per batch."""
    model = nn.Linear(1, 1, bias=False).double()
    data = TensorDataset(torch.tensor([[1.0], [0.0], [0.0]], dtype=torch.float64))

    def loss(m: nn.Module, batch: Any) -> Tensor:
        return m(batch[0]).squeeze(1)  # gradient 1 for the first example, 0 for the others

    task = make_task(model, cw.GlobalScaled(R=0.5, Z=1.0))

    def update(clip_every: Any, seed: int) -> float:
        optimizer = partial(torch.optim.SGD, lr=0.8)
        work = LocalTraining(loss, optimizer, batch_size=1, clip_every=clip_every, seed=seed)
        return float(joint(work(nn.Linear(1, 1, bias=False).double(), data, task).update))

    assert {round(update("round", seed), 9) for seed in range(12)} == {-0.4}
    # The push comes in the last, the second or the first of three batches, and is shrunk from then on.
    assert {round(update("batch", seed), 9) for seed in range(12)} == {-0.4, -0.2, -0.1}


def test_frozen_parameters_are_neither_trained_nor_sent() -> None:
    model = make_model()
    model[0].requires_grad_(False)  # type: ignore[index]
    reply = LocalTraining(loss_fn, partial(torch.optim.SGD, lr=0.1))(model, DATA, make_task(model))
    assert set(reply.update) == {"2.weight", "2.bias"}
    plan = federated_plan(sampling=cw.FullBatch(1), steps=1, clip=cw.Abadi(1.0), noise_multiplier=1.0)
    before = model[0].weight.clone()  # type: ignore[index, union-attr, operator]
    list(run(Server(plan, model), model, [DATA], LocalTraining(loss_fn, partial(torch.optim.SGD, lr=0.1))))
    assert torch.equal(model[0].weight, before)  # type: ignore[index, arg-type]


@pytest.mark.parametrize(
    "work", [LocalTraining(loss_fn, partial(torch.optim.SGD, lr=0.1)), LocalGradient(loss_fn, 0.1)]
)
def test_a_user_without_examples_weighs_nothing(work: Any) -> None:
    model = make_model()
    empty = TensorDataset(torch.zeros(0, 3).double(), torch.zeros(0).long())
    reply = work(make_model(1), empty, make_task(model))
    assert reply.weight == 0 and float(joint(reply.update).abs().max()) == 0


def test_updates_that_blow_up_are_sent_as_they_are_and_left_out() -> None:
    model = make_model()
    broken = TensorDataset(DATA.tensors[0] * float("nan"), DATA.tensors[1])
    task = make_task(model, cw.Abadi(1.0))
    for work in (LocalTraining(loss_fn, partial(torch.optim.SGD, lr=0.1)), LocalGradient(loss_fn, lr=0.1)):
        assert bool(joint(work(make_model(1), broken, task).update).isnan().any())


def test_an_update_with_one_infinite_layer_is_sent_as_it_is() -> None:
    """The server leaves it out and says so; zeros would be taken for an honest update."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    style = cw.Layerwise(cw.Abadi(1.0))

    def loss(m: nn.Module, batch: Any) -> Tensor:
        return 0.5 * m[0].weight.sum() + batch[0] * m[1].weight.sum()  # type: ignore[index, operator, no-any-return]

    for value in (float("inf"), float("nan")):
        task = Task(0, 0, model.state_dict(), style, asks_within=True)
        reply = LocalGradient(loss, lr=1.0)(model, TensorDataset(torch.tensor([value]).double()), task)
        assert float(reply.update["0.weight"]) == -0.5 and not torch.isfinite(reply.update["1.weight"]).any()
        assert reply.within is False and reply.weight == 1


def test_an_update_is_within_if_all_its_layers_are_no_longer_than_their_norms() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()

    def loss(m: nn.Module, batch: Any) -> Tensor:
        return (m[0].weight.sum() + 2.0 * m[1].weight.sum()) * torch.ones(len(batch[0]))  # type: ignore[index, operator, no-any-return]

    data = TensorDataset(torch.zeros(3, 1).double())
    for first, second, within in ((1.0, 2.0, True), (0.9, 2.0, False), (1.0, 1.9, False), (5.0, 5.0, True)):
        style = cw.Layerwise({"0": cw.Abadi(first), "1": cw.Abadi(second)})
        task = Task(0, 0, model.state_dict(), style, asks_within=True)
        reply = LocalGradient(loss, lr=1.0)(model, data, task)
        assert reply.within is within
        assert float(reply.update["1.weight"]) == pytest.approx(-min(second, 2.0), rel=1e-12)


def test_a_parameter_that_the_loss_does_not_use_stays() -> None:
    model = make_model()
    model.register_parameter("idle", nn.Parameter(torch.ones(2).double()))
    for work in (LocalGradient(loss_fn, lr=0.1), LocalTraining(loss_fn, partial(torch.optim.SGD, lr=0.1))):
        update = work(model, DATA, make_task(model)).update
        assert not update["idle"].any() and update["2.bias"].any()


@pytest.mark.parametrize("batch_size", [None, 1, 3, 100])
def test_one_gradient_is_that_of_so_many_examples(batch_size: int | None) -> None:
    """Its examples are chosen anew in every round, and are all of the user's where there are no more."""
    model, data = nn.Linear(1, 1, bias=False), TensorDataset(2.0 ** torch.arange(8.0)[:, None])

    def loss(m: nn.Module, batch: Any) -> Tensor:
        return m(batch[0])[:, 0]

    taken = min(8, batch_size or 8)
    found = set()
    for number in range(10):
        task = Task(number, 0, model.state_dict(), cw.Flat(cw.Abadi(1e6)))
        reply = LocalGradient(loss, lr=1.0, batch_size=batch_size, seed=1)(model, data, task)
        total = round(-float(reply.update["weight"]) * taken)
        assert total.bit_count() == taken and reply.weight == 8  # a sum of so many different powers of two
        found.add(total)
    assert (len(found) > 1) == (taken < 8)


def test_what_local_training_does_unless_told() -> None:
    assert LocalTraining(loss_fn, torch.optim.SGD) == LocalTraining(
        loss_fn, torch.optim.SGD, epochs=1, batch_size=32, clip_every="round", collate_fn=None, seed=None
    )


def test_within_is_said_only_when_asked() -> None:
    model = make_model()
    work = LocalGradient(loss_fn, lr=0.1)
    assert work(model, DATA, make_task(model)).within is None
    assert work(model, DATA, make_task(model, asks_within=True)).within is True
    assert work(model, DATA, make_task(model, cw.Abadi(1e-9), asks_within=True)).within is False


def test_seeded_work_repeats_and_differs_between_users_and_rounds() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2)).double()
    data = make_users(8)[2]
    work = LocalTraining(loss_fn, partial(torch.optim.SGD, lr=0.1), batch_size=2, seed=4)

    def result(number: int, user: int) -> list[float]:
        return joint(work(model, data, Task(number, user, start, cw.Flat(cw.Abadi(9.0)))).update).tolist()  # type: ignore[no-any-return]

    start = {name: value.clone() for name, value in model.state_dict().items()}
    assert result(0, 0) == result(0, 0)
    assert result(0, 0) != result(0, 1) and result(0, 0) != result(1, 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LocalTraining(loss_fn, torch.optim.SGD, epochs=0),
        lambda: LocalTraining(loss_fn, torch.optim.SGD, batch_size=1.5),
        lambda: LocalTraining(loss_fn, torch.optim.SGD, clip_every="epoch"),
        lambda: LocalTraining(loss_fn, torch.optim.SGD, seed=-1),
        lambda: LocalGradient(loss_fn, lr=0.1, seed=-1),
        lambda: LocalGradient(loss_fn, lr=0.0),
        lambda: LocalGradient(loss_fn, lr=float("inf")),
        lambda: LocalGradient(loss_fn, lr=1.0, batch_size=0),
    ],
)  # type: ignore[arg-type]
def test_settings_that_make_no_sense_are_refused(make: Any) -> None:
    with pytest.raises(cw.InvalidPlan):
        make()


def test_losses_must_be_one_per_example() -> None:
    model = make_model()
    for wrong in (lambda m, b: 1.0, lambda m, b: m(b[0]), lambda m, b: loss_fn(m, b)[:0]):
        with pytest.raises(cw.InvalidLosses, match="one loss per example"):
            LocalTraining(wrong, partial(torch.optim.SGD, lr=0.1))(model, DATA, make_task(model))  # type: ignore[arg-type]
    with pytest.raises(cw.InvalidLosses, match="one loss per example"):
        LocalGradient(lambda m, batch: loss_fn(m, batch).mean(), lr=1.0)(model, DATA, make_task(model))


def test_the_runner_changes_the_model_only_by_rounds() -> None:
    """Users work on a copy: what one leaves behind, in weights or buffers, neither the model nor the next user sees."""
    model = make_model()
    model.register_buffer("seen", torch.zeros(1))
    found = []

    def work(bench: nn.Module, dataset: Dataset[Any], task: Task) -> Reply:
        bench.load_state_dict(task.weights)
        found.append(float(bench.seen))  # type: ignore[arg-type]
        bench.seen += 1  # type: ignore[operator, assignment]
        for p in bench.parameters():
            p.data.zero_()
        return Reply({name: torch.zeros_like(p) for name, p in bench.named_parameters()}, 1)

    before = flat(model)
    plan = federated_plan(sampling=cw.FullBatch(3), steps=2, clip=cw.Abadi(1.0), noise_multiplier=0.0)
    list(run(Server(plan, model), model, make_users(3), work))
    assert found == [0.0] * 6 and torch.equal(flat(model), before)
