"""What a second look at the checks found: attacks that passed once, honest programs that did not, what was left."""

from __future__ import annotations

import io
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

import clipwise as cw
from tests.core.common import classified

from .test_mixing import modes

Body = Callable[[nn.Module, Any, int], Tensor]
N = 48


def points() -> TensorDataset:
    return classified(N, seed=1)


def mlp() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def private_of(model: nn.Module, steps: int = 4, sampling: Any = None, seed: int = 0) -> cw.Private:
    plan = cw.Plan(sampling or cw.Poisson(N, 8), steps, cw.Abadi(1.0), noise_multiplier=1.0)
    return cw.Private(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), seed=seed)


def train(
    body: Body, dataset: Dataset[Any] | None = None, model: nn.Module | None = None, **options: Any
) -> cw.Private:
    model = model or mlp()
    private = private_of(model, options.pop("steps", 4), options.pop("sampling", None))
    for step, batch in enumerate(private.loader(dataset or points(), **options)):
        private.step(body(model, batch, step))
    return private


def losses_of(model: nn.Module, batch: Any, step: int = 0) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


SCALED: dict[str, Body] = {
    "len": lambda m, b, k: losses_of(m, b) / len(b[0]),
    "share_of_the_expected_size": lambda m, b, k: losses_of(m, b) * (8 / len(b[0])),
    "root": lambda m, b, k: losses_of(m, b) / math.sqrt(b[0].shape[0]),
    "plain_float": lambda m, b, k: losses_of(m, b) / float(b[0].shape[0]),
    "shape": lambda m, b, k: losses_of(m, b) / b[0].shape[0],
}


@pytest.mark.parametrize("body", SCALED.values(), ids=SCALED)
def test_losses_are_not_scaled_by_the_number_of_samples(body: Body) -> None:
    with pytest.raises(cw.NotSeparable, match="number of samples"):
        train(body)


def test_a_public_scale_is_honest() -> None:
    assert train(lambda m, b, k: losses_of(m, b) / 8).checked.steps == (0, 1, 2)


def test_a_refused_batch_is_not_accepted_at_a_second_try() -> None:
    model = mlp()
    private = private_of(model)
    for batch in private.loader(points()):
        for scale in (1.0, 2.0):
            losses = losses_of(model, batch)
            with pytest.raises(cw.NotSeparable):
                private.step(scale * losses * torch.softmax(-losses.detach(), 0))
        with pytest.raises(cw.NotSeparable, match="not watched"):
            private.step(losses_of(model, batch) * 3)
        break
    assert private.ledger.steps == 0


def test_a_refused_batch_is_accepted_when_it_is_watched_again() -> None:
    model = mlp()
    private = private_of(model, steps=3)
    for batch in private.loader(points()):
        with pytest.raises(cw.InvalidLosses):
            private.step(losses_of(model, batch).mean())
        if private.ledger.steps:
            with pytest.raises(cw.NotSeparable, match="not watched"):
                private.step(losses_of(model, batch))
            with private.watch(batch):
                losses = losses_of(model, batch)
            private.step(losses)
        else:
            private.step(losses_of(model, batch))  # forgiven once, and noted
    assert private.ledger.steps == 3 and "after an error" in str(private.checked)


def counted_in_python(model: nn.Module, batch: Any, step: int) -> Tensor:
    counts = Counter(batch[1].tolist())
    return losses_of(model, batch) * torch.tensor([1 / counts[label] for label in batch[1].tolist()])


def counted_in_numpy(model: nn.Module, batch: Any, step: int) -> Tensor:
    shares = 1 / np.bincount(batch[1].numpy(), minlength=3).clip(1)
    return losses_of(model, batch) * torch.tensor(shares[batch[1].numpy()], dtype=torch.float32)


def scaled_in_place(model: nn.Module, batch: Any, step: int) -> Tensor:
    losses = losses_of(model, batch)
    losses *= 0.5 + 1 / (1 + float(losses.detach().mean()))
    return losses


UNCLEAR = {"python": counted_in_python, "numpy": counted_in_numpy, "in_place": scaled_in_place}


@pytest.mark.parametrize("body", UNCLEAR.values(), ids=UNCLEAR)
def test_what_leaves_the_tensors_is_refused_or_not_called_checked(body: Body) -> None:
    try:
        private = train(body)
    except cw.NotSeparable:
        return
    assert not private.checked.steps and private.checked.unclear


def arrays(records: list[Any]) -> Any:
    return np.stack([x.numpy() for x, _ in records]), torch.stack([y for _, y in records])


def test_arrays_of_the_batch_are_not_called_checked() -> None:
    def body(model: nn.Module, batch: Any, step: int) -> Tensor:
        x = (batch[0] - batch[0].mean(0)) / batch[0].std(0)
        return losses_of(model, (torch.from_numpy(x), batch[1]))

    assert not train(body, collate_fn=arrays).checked.steps


def test_a_collate_function_that_standardises_arrays_is_refused() -> None:
    def collate(records: list[Any]) -> Any:
        x, y = arrays(records)
        return (x - x.mean(0)) / x.std(0), y

    with pytest.raises(cw.NotSeparable, match="collate"):
        train(lambda m, b, k: losses_of(m, (torch.from_numpy(b[0]), b[1])), collate_fn=collate)


def test_two_views_of_one_tensor_keep_both_their_twins() -> None:
    def collate(records: list[Any]) -> Any:
        rows = torch.stack([torch.cat([x, y[None].float()]) for x, y in records])
        return rows[:, :-1], rows[:, -1]

    def body(model: nn.Module, batch: Any, step: int) -> Tensor:
        x, y = batch
        return losses_of(model, ((x - x.mean(0)) / x.std(0), y.long()))

    with pytest.raises(cw.NotSeparable):
        train(body, collate_fn=collate)


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: float(torch.rand(()))])
def test_mixup_now_and_then_in_a_collate_function_is_refused(draw: Callable[[], float]) -> None:
    def collate(records: list[Any]) -> Any:
        x, y = default_collate(records)
        y = F.one_hot(y, 3).float()
        if draw() < 0.5:
            other = torch.randperm(len(x))
            x, y = 0.7 * x + 0.3 * x[other], 0.7 * y + 0.3 * y[other]
        return x, y

    with pytest.raises(cw.NotSeparable, match="collate"):
        train(losses_of, collate_fn=collate)


@pytest.mark.parametrize("shift", [1, 2, 3, 4])
def test_shifts_along_the_batch_are_seen_at_any_distance(shift: int) -> None:
    def body(model: nn.Module, batch: Any, step: int) -> Tensor:
        return losses_of(model, (0.6 * batch[0] + 0.4 * batch[0].roll(shift, 0), batch[1]))

    with pytest.raises(cw.NotSeparable):
        train(body, sampling=cw.FixedSize(N, 8))


def test_watched_steps_are_drawn_at_random() -> None:
    private = [private_of(mlp(), steps=110, seed=seed) for seed in range(6)]
    seen = set()
    for run in private:
        for batch in run.loader(points()):
            run.step(losses_of(run._model, batch))
        seen.add(run.checked.steps)
    assert len(seen) > 3 and all(steps[:3] == (0, 1, 2) for steps in seen)


def test_a_small_share_of_the_batch_is_seen_under_autocast() -> None:
    def body(model: nn.Module, batch: Any, step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(batch[0])
        losses = F.cross_entropy(out.float(), batch[1], reduction="none")
        return losses * (1 + 0.015 * torch.sigmoid(batch[0].abs().max() - 4))

    with pytest.raises(cw.NotSeparable):
        train(body)


def test_two_runs_in_one_loop_are_both_checked() -> None:
    first, second = mlp(), mlp()
    one, two = private_of(first, sampling=cw.FixedSize(N, 8)), private_of(second, sampling=cw.FixedSize(N, 8))

    def both() -> None:
        for a, b in zip(one.loader(points()), two.loader(points()), strict=True):
            one.step(losses_of(first, a))
            two.step(losses_of(second, (b[0] - b[0].mean(0) * (two.steps_done > 0), b[1])))

    with pytest.raises(cw.NotSeparable):
        both()
    assert one.checked.steps == (0, 1) and two.checked.steps == (0,)
    assert not modes()


# Honest programs


class Bags(Dataset[Any]):
    def __init__(self) -> None:
        torch.manual_seed(3)
        lengths = torch.randint(2, 6, (N,)).tolist()
        self.records = [(torch.randint(20, (length,)), int(torch.randint(3, ()))) for length in lengths]

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return self.records[i]


def flat(records: list[Any]) -> Any:
    lengths = torch.tensor([0] + [len(tokens) for tokens, _ in records[:-1]])
    return torch.tensor([y for _, y in records]), torch.cat([tokens for tokens, _ in records]), lengths.cumsum(0)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(20, 6), nn.Linear(6, 3)

    def forward(self, tokens: Tensor, offsets: Tensor) -> Tensor:
        out: Tensor = self.head(self.bag(tokens, offsets))
        return out


def test_bags_of_words_with_offsets_are_honest() -> None:
    body: Body = lambda m, b, k: F.cross_entropy(m(b[1], b[2]), b[0], reduction="none")  # noqa: E731
    assert train(body, Bags(), Bag(), collate_fn=flat).ledger.steps == 4


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        with torch.backends.mkldnn.flags(enabled=False):
            out: Tensor = self.head(self.rnn(packed)[1][0][-1])
        return out


def test_packed_sequences_are_honest() -> None:
    torch.manual_seed(4)
    dataset = TensorDataset(torch.randn(N, 5, 4), torch.randint(1, 6, (N,)), torch.randint(3, (N,)))
    body: Body = lambda m, b, k: F.cross_entropy(m(b[0], b[1]), b[2], reduction="none")  # noqa: E731
    assert train(body, dataset, Packed()).ledger.steps == 4


def test_random_numbers_of_any_generator_are_honest_and_drawn_once() -> None:
    ours, theirs = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)

    def noisy(generator: torch.Generator) -> Body:
        def body(model: nn.Module, batch: Any, step: int) -> Tensor:
            x = torch.normal(batch[0], torch.ones_like(batch[0]), generator=generator)
            return losses_of(model, (x + torch.poisson(batch[0].abs()), batch[1]))

        return body

    train(noisy(ours))
    for batch in private_of(mlp()).loader(points()):
        torch.normal(batch[0], torch.ones_like(batch[0]), generator=theirs)
    assert torch.equal(ours.get_state(), theirs.get_state())


def test_a_collate_function_with_a_generator_of_its_own_is_honest() -> None:
    generator = np.random.default_rng(0)

    def collate(records: list[Any]) -> Any:
        return default_collate([(x + torch.as_tensor(generator.normal(size=6), dtype=x.dtype), y) for x, y in records])

    private = train(losses_of, collate_fn=collate)
    assert private.ledger.steps == 4 and "of its own" in str(private.checked)


@dataclass
class Slotted:
    __slots__ = ("x", "y")
    x: Tensor
    y: Tensor


def test_batches_that_are_objects_are_looked_into() -> None:
    private = train(lambda m, b, k: losses_of(m, (b.x, b.y)), collate_fn=lambda r: Slotted(*default_collate(r)))
    assert private.checked.steps == (0, 1, 2)
    with pytest.raises(cw.NotSeparable):
        train(lambda m, b, k: losses_of(m, (b.x - b.x.mean(0), b.y)), collate_fn=lambda r: Slotted(*default_collate(r)))


def test_expanded_masks_and_rare_types_are_honest() -> None:
    def collate(records: list[Any]) -> Any:
        x, y = default_collate(records)
        return x, y, torch.ones(1, 6).expand(len(x), 6), (100 * x.abs()).to(torch.uint16)

    private = train(lambda m, b, k: losses_of(m, (b[0] * b[2] + b[3].float(), b[1])), collate_fn=collate)
    assert private.checked.steps[:2] == (0, 1)


# What is left behind


def test_numbers_on_the_log_are_plain() -> None:
    history: list[Any] = []

    def body(model: nn.Module, batch: Any, step: int) -> Tensor:
        losses = losses_of(model, batch)
        history.extend([losses.mean().item(), batch[0].shape[0], len(batch[0])])
        return losses

    assert train(body).checked.steps == (0, 1, 2)
    assert {type(number) for number in history} == {int, float}
    file = io.BytesIO()
    torch.save({"history": history}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["history"] == history


def test_an_iterator_closed_on_another_thread_falls_silent() -> None:
    private = private_of(mlp())
    iterator = iter(private.loader(points()))
    next(iterator)
    thread = Thread(target=iterator.close)
    thread.start()
    thread.join()
    assert torch.ones(3).sum() == 3
    while modes():
        dispatch = torch._C._len_torch_dispatch_stack() > 0
        (torch.utils._python_dispatch if dispatch else torch.overrides)._pop_mode()  # type: ignore[attr-defined]


def test_a_pass_that_the_engine_refuses_is_not_called_clean() -> None:
    def body(model: nn.Module, batch: Any, step: int) -> Tensor:
        hidden = model[0](batch[0])
        hidden.register_hook(lambda g: g / (g.norm() + 1e-6))
        return F.cross_entropy(model[2](model[1](hidden)), batch[1], reduction="none")

    model = mlp()
    private = private_of(model)
    batch = next(iterator := iter(private.loader(points())))
    losses = body(model, batch, 0)
    with pytest.raises(cw.ClipwiseError):
        private.step(losses)
    assert not private.checked.steps
    iterator.close()


def test_physical_batches_count_a_step_once() -> None:
    assert train(losses_of, physical_batch_size=3).checked.steps == (0, 1, 2)
