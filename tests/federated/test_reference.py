"""Both algorithms equal the paper's pseudo-code, written as plain loops, in float64 and without noise."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import clipwise as cw
from clipwise.entropy import Entropy
from clipwise.federated import LocalGradient, LocalTraining, Server, run, select
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
