"""The universal bound at user level: whatever one user has, does or sends, the sum moves by at most its sensitivity.

Both algorithms equal the paper's pseudo-code, written as plain loops, in float64 and without noise.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.clipping import Style
from clipwise.entropy import Entropy
from clipwise.federated import (
    Failure,
    LocalGradient,
    LocalTraining,
    Reply,
    Server,
    Task,
    clip_update,
    run,
    select,
    shorten,
)  # fmt: skip
from tests.federated.common import (
    SEED,
    ClipFn,
    federated_plan,
    flat,
    flat_clip,
    global_clip,
    loss_fn,
    main_loop,
    make_model,
    make_users,
    user_update_fedavg,
    user_update_fedsgd,
)  # fmt: skip

ROUNDING = 1 + 1e-6
CAP = 3.0
STYLES: list[Style] = [
    cw.Flat(cw.Abadi(0.5)),
    cw.Flat(cw.GlobalScaled(R=0.5, Z=2.0)),
    cw.Flat(cw.GlobalScaled(R=2.0, Z=0.5)),
    cw.Flat(cw.Global(0.5)),
    cw.Flat(cw.Automatic(0.5)),
    cw.Flat(cw.Normalize(0.5)),
    cw.Layerwise(cw.Abadi(0.5)),
    cw.Layerwise({"a": cw.Abadi(0.1), "b": cw.Global(3.0)}, noise="per_layer"),
    cw.Groupwise({"a.*": cw.Normalize(0.1), "*": cw.Abadi(0.2)}),
]


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """Thousands of bad replies would be logged here."""
    log = logging.getLogger("clipwise.federated")
    before = log.level
    log.setLevel(logging.ERROR)
    yield
    log.setLevel(before)


class Parts(nn.Module):
    """Two layers, of three parameters, in the precision of the test."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a = nn.Linear(2, 1, dtype=dtype)
        self.b = nn.Linear(1, 1, bias=False, dtype=dtype)


def sensitivity(style: Style) -> float:
    return style.sensitivity(["a", "b"] if isinstance(style, cw.Layerwise) else list(getattr(style, "rules", "1")))


numbers = st.floats(width=64) | st.sampled_from([0.0, 1e-320, 1e-162, 1e-45, 1e30, 1e200, -1.7e308, math.inf, math.nan])


@st.composite
def tensors(draw: st.DrawFn, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    values = draw(st.lists(numbers, min_size=count, max_size=count))
    return torch.tensor(values, dtype=torch.float64).to(dtype).reshape(shape)


@st.composite
def updates(draw: st.DrawFn, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "a.weight": draw(tensors(2, (1, 2), dtype)),
        "a.bias": draw(tensors(1, (1,), dtype)),
        "b.weight": draw(tensors(1, (1, 1), dtype)),
    }


rubbish = st.sampled_from(
    [
        None, "text", 3.0, {}, Failure("gone"), Reply({}, 1), Reply({"a.weight": torch.ones(1, 2)}, 1),
        Reply(None, 1), Reply({"a.weight": torch.ones(2, 1), "a.bias": torch.ones(1), "b.weight": torch.ones(1, 1)}, 1),
        Reply({"a.weight": torch.ones(1, 2), "a.bias": "x", "b.weight": torch.ones(1, 1)}, 1),
        Reply({"a.weight": torch.ones(1, 2), "a.bias": torch.ones(1).long(), "b.weight": torch.ones(1, 1)}, 1),
        Reply({"a.weight": torch.ones(1, 2).to_sparse(), "a.bias": torch.ones(1), "b.weight": torch.ones(1, 1)}, 1),
        Reply({"a.weight": torch.ones(1, 2) * 1j, "a.bias": torch.ones(1), "b.weight": torch.ones(1, 1)}, 1),
    ]  # type: ignore[arg-type]
)  # fmt: skip
weights = st.one_of(
    st.floats(), st.integers(-5, 10), st.sampled_from([10**400, math.inf, math.nan, "8", None, True, [1.0]])
)

answers = st.sampled_from([True, False, None, 1e9, "yes", torch.ones(3)])


@st.composite
def replies(draw: st.DrawFn, dtype: torch.dtype) -> Any:
    if draw(st.integers(0, 4)) == 0:
        return draw(rubbish)
    return Reply(draw(updates(draw(st.sampled_from([dtype, torch.float64])))), draw(weights), draw(answers))


def joint_norm(update: dict[str, Tensor]) -> float:
    return math.hypot(*(x for t in update.values() for x in t.double().flatten().tolist()))


@pytest.mark.parametrize("style", STYLES, ids=repr)
@settings(max_examples=60)
@given(data=st.data())
def test_clipped_and_shortened_updates_are_bounded(style: Style, data: st.DataObject) -> None:
    update = data.draw(updates(data.draw(st.sampled_from([torch.float32, torch.float64]))))
    for result in (clip_update(update, style), shorten(update, style)):
        assert joint_norm(result) <= sensitivity(style) * ROUNDING


@pytest.mark.parametrize("size", [5e-324, 1e-320, 2.7e-162, 2e-161, 1e-45, 1.0, 1e155, 1e200, 1e308])
@pytest.mark.parametrize("style", STYLES, ids=repr)
def test_norms_hold_at_the_ends_of_the_range(style: Style, size: float) -> None:
    """Squares of such numbers are zero, have few digits, or are infinite."""
    ones = {"a.weight": torch.ones(1, 2), "a.bias": torch.ones(1), "b.weight": torch.ones(1, 1)}
    update = {name: t.double() * size for name, t in ones.items()}
    for result in (clip_update(update, style), shorten(update, style)):
        assert joint_norm(result) <= sensitivity(style) * ROUNDING


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("style", STYLES, ids=repr)
@settings(max_examples=60)
@given(data=st.data())
def test_any_reply_moves_the_sum_by_at_most_the_sensitivity(
    style: Style, dtype: torch.dtype, data: st.DataObject
) -> None:
    """A round with a user and the same round without it, for whatever that user sends; the others behave."""
    plan = federated_plan(
        sampling=cw.FullBatch(3), steps=1, clip=style, noise_multiplier=0.0, weight_cap=CAP, total_weight=1.0
    )
    honest = {"a.weight": torch.full((1, 2), 0.1), "a.bias": torch.zeros(1), "b.weight": torch.ones(1, 1)}
    others = [(0, Reply(honest, 2)), (1, Reply({n: -t for n, t in honest.items()}, 1))]
    sums = []
    for sent in ([*others, (2, data.draw(replies(dtype)))], others):
        server = Server(plan, Parts(dtype))
        server.open([0, 1, 2])
        sums.append(server.close(sent))  # q W = 1: the mean is the sum
    moved = {name: (sums[0][name].double() - sums[1][name].double()) for name in sums[0]}
    slack = 1e-6 if dtype == torch.float32 else 1e-12  # the others' share is rounded, too
    assert joint_norm(moved) <= CAP * sensitivity(style) * ROUNDING + slack


@pytest.mark.parametrize("clip_every", ["round", "batch"])
@pytest.mark.parametrize("style", STYLES[:6], ids=repr)
@settings(max_examples=15)
@given(scale=st.sampled_from([0.0, 1e-8, 1.0, 1e4, 1e30, math.nan]), lr=st.sampled_from([1e-6, 1.0, 1e6]))
def test_honest_clients_are_bounded_whatever_their_data(style: Style, clip_every: Any, scale: float, lr: float) -> None:
    model = make_model()
    x = scale * torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, torch.tensor([0, 1, 1, 0]))
    task = Task(0, 0, model.state_dict(), style)
    training = LocalTraining(loss_fn, partial(torch.optim.SGD, lr=lr), batch_size=2, clip_every=clip_every, seed=0)
    for work in (training, LocalGradient(loss_fn, lr=lr, seed=0)):
        sent = work(make_model(1), data, task).update
        finite = all(bool(t.isfinite().all()) for t in sent.values())
        assert not finite or joint_norm(dict(sent)) <= sensitivity(style) * ROUNDING
        assert joint_norm(shorten(sent, style)) <= sensitivity(style) * ROUNDING


@settings(max_examples=100)
@given(data=st.data())
def test_any_answer_moves_the_count_by_at_most_a_half(data: st.DataObject) -> None:
    """The adaptive norm moves by exp(-rate * change of the share), and one user changes the sum by 1/2 at most."""
    clip = cw.AdaptiveClip(R=1.0, learning_rate=1.0)
    plan = federated_plan(sampling=cw.FullBatch(3), steps=1, clip=clip, noise_multiplier=0.0)
    zero = {"a.weight": torch.zeros(1, 2), "a.bias": torch.zeros(1), "b.weight": torch.zeros(1, 1)}
    others = [(0, Reply(zero, 1, within=True)), (1, Reply(zero, 1, within=False))]
    bounds = []
    for sent in ([*others, (2, data.draw(replies(torch.float32)))], others):
        server = Server(plan, Parts(torch.float32))
        server.open([0, 1, 2])
        server.close(sent)
        assert server.last is not None and server.last.bound is not None
        bounds.append(server.last.bound)
    assert abs(math.log(bounds[0] / bounds[1])) * 3 <= 0.5 * (1 + 1e-9)


class Remembering(nn.Module):
    """Keeps what it saw in a buffer that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False).double()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().sum()
        return self.layer(x) * (1 + self.seen)


def test_what_a_user_leaves_in_the_model_does_not_reach_the_others() -> None:
    """Else the updates of all users that come later would depend on it: far more than one sensitivity."""
    large = TensorDataset(torch.full((3, 2), 5.0, dtype=torch.float64))
    small = TensorDataset(torch.tensor([[0.1, -0.2]], dtype=torch.float64))
    moved = []
    for users in ([large, small, small, small], [small, small, small]):
        torch.manual_seed(0)
        model = Remembering()
        start = model.layer.weight.detach().clone()
        plan = federated_plan(
            sampling=cw.FullBatch(len(users)), steps=1, clip=cw.Abadi(1.0), noise_multiplier=0.0, total_weight=1.0
        )
        work = LocalGradient(lambda m, batch: m(batch[0])[:, 0].square(), lr=1.0)
        list(run(Server(plan, model), model, users, work))
        moved.append(model.layer.weight.detach() - start)
    assert float((moved[0] - moved[1]).norm()) <= ROUNDING


USERS, ROUNDS = 9, 4
CLIPS: list[tuple[cw.Abadi | cw.GlobalScaled, ClipFn]] = [
    (cw.Abadi(0.05), flat_clip(0.05)),  # shortens all
    (cw.Abadi(50.0), flat_clip(50.0)),  # shortens none
    (cw.GlobalScaled(R=0.1, Z=0.6), global_clip(0.1, 0.6)),  # leaves some out
    (cw.GlobalScaled(R=1.0, Z=60.0), global_clip(1.0, 60.0)),
]


def plan_with(clip: cw.Abadi | cw.GlobalScaled) -> cw.Plan:
    return federated_plan(
        sampling=cw.Poisson(USERS, 4),
        steps=ROUNDS,
        clip=clip,
        noise_multiplier=0.0,
        weight_cap=4.0,
        total_weight=30.0,
    )


def selections(plan: cw.Plan) -> list[list[int]]:
    server = Server(plan, make_model(), seed=SEED)
    entropy = Entropy(SEED).labelled(server._position.begin())
    return [list(select(range(USERS), server.rate, entropy, number)) for number in range(ROUNDS)]


@pytest.mark.parametrize("every_batch", [False, True], ids=["clip once", "clip every batch"])
@pytest.mark.parametrize(("clip", "clip_fn"), CLIPS, ids=lambda c: repr(c) if not callable(c) else "")
def test_fedavg_is_the_plain_loop(clip: cw.Abadi | cw.GlobalScaled, clip_fn: ClipFn, every_batch: bool) -> None:
    plan, users, model, plain = plan_with(clip), make_users(USERS), make_model(), make_model()
    work = LocalTraining(
        loss_fn,
        partial(torch.optim.SGD, lr=0.3),
        epochs=2,
        batch_size=3,
        clip_every="batch" if every_batch else "round",
        seed=SEED,
    )
    for _ in run(Server(plan, model, seed=SEED), model, users, work):
        pass

    def update(m: torch.nn.Module, k: int, data: torch.utils.data.TensorDataset, t: int) -> torch.Tensor:
        return user_update_fedavg(m, k, data, t, clip_fn, lr=0.3, epochs=2, batch_size=3, every_batch=every_batch)

    main_loop(plain, users, selections(plan), update, q=4 / 9, W=30.0, w_max=4.0)
    assert not torch.equal(flat(plain), flat(make_model()))
    torch.testing.assert_close(flat(model), flat(plain), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("clip", "clip_fn"), CLIPS, ids=lambda c: repr(c) if not callable(c) else "")
def test_fedsgd_is_the_plain_loop(clip: cw.Abadi | cw.GlobalScaled, clip_fn: ClipFn) -> None:
    plan, users, model, plain = plan_with(clip), make_users(USERS), make_model(), make_model()
    work = LocalGradient(loss_fn, lr=0.7, batch_size=3, seed=SEED)
    for _ in run(Server(plan, model, seed=SEED), model, users, work):
        pass

    def update(m: torch.nn.Module, k: int, data: torch.utils.data.TensorDataset, t: int) -> torch.Tensor:
        return user_update_fedsgd(m, k, data, t, clip_fn, lr=0.7, batch_size=3)

    main_loop(plain, users, selections(plan), update, q=4 / 9, W=30.0, w_max=4.0)
    torch.testing.assert_close(flat(model), flat(plain), rtol=1e-12, atol=1e-14)


def test_fedavg_of_one_full_batch_step_is_fedsgd() -> None:
    users = make_users(USERS)
    plan = plan_with(cw.Abadi(0.05))
    average, gradient = make_model(), make_model()
    training = LocalTraining(loss_fn, partial(torch.optim.SGD, lr=0.7), batch_size=100, seed=SEED)
    list(run(Server(plan, average, seed=SEED), average, users, training))
    list(run(Server(plan, gradient, seed=SEED), gradient, users, LocalGradient(loss_fn, lr=0.7, seed=SEED)))
    torch.testing.assert_close(flat(average), flat(gradient), rtol=1e-12, atol=1e-14)


def test_adaptive_norm_is_the_plain_loop() -> None:
    """R follows exp(-rate (share within - quantile)); the rounds are FlatClip with that R."""
    users, model, plain = make_users(USERS), make_model(), make_model()
    clip = cw.AdaptiveClip(R=0.01, quantile=0.7, learning_rate=0.9)
    plan = federated_plan(sampling=cw.Poisson(USERS, 4), steps=ROUNDS, clip=clip, noise_multiplier=0.0)
    server = Server(plan, model, seed=SEED)
    work = LocalTraining(loss_fn, partial(torch.optim.SGD, lr=0.3), batch_size=100, seed=SEED)
    bounds = [report.bound for report in run(server, model, users, work)]

    R, expected = 0.01, []
    for number, selected in enumerate(selections(plan)):
        settings = dict(lr=0.3, epochs=1, batch_size=100, every_batch=False)
        raw = {k: user_update_fedavg(plain, k, users[k], number, lambda d: d, **settings) for k in selected}  # type: ignore[arg-type]
        total = sum((flat_clip(R)(d) for d in raw.values()), torch.zeros_like(flat(plain)))
        within = 0.5 + sum((1.0 if float(d.norm()) <= R else 0.0) - 0.5 for d in raw.values()) / 4
        torch.nn.utils.vector_to_parameters(flat(plain) + total / 4, plain.parameters())
        R *= float(torch.exp(torch.tensor(-0.9 * (within - 0.7), dtype=torch.float64)))
        expected.append(R)
    assert bounds == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(flat(model), flat(plain), rtol=1e-12, atol=1e-14)
