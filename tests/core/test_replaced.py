"""A parameter that is replaced, added or removed while a run is open is trained or refused, never left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.errors import InvalidPlan, UnsupportedNode

from .common import data, losses_of, mlp, plan, sgd, weights

Change = Callable[[nn.Module], None]


def new_weight(model: nn.Module) -> None:
    model[3].weight = nn.Parameter(torch.randn(1, 4))  # type: ignore[index]


def new_layer(model: nn.Module) -> None:
    model[3] = nn.Linear(4, 1)  # type: ignore[index]


def new_parameter(model: nn.Module) -> None:
    model.register_parameter("scale", nn.Parameter(torch.ones(())))


def no_bias(model: nn.Module) -> None:
    model[0].register_parameter("bias", None)  # type: ignore[index]


CHANGES: dict[str, Change] = {
    "weight": new_weight, "layer": new_layer, "added": new_parameter, "removed": no_bias,
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("through_loader", [True, False], ids=["loader", "own_batches"])
def test_a_change_that_the_optimizer_does_not_know_is_refused(change: Change, through_loader: bool) -> None:
    model = mlp()
    private = cw.Private(plan(), model, sgd(model), seed=0, own_batches=not through_loader)
    x, y = data().tensors
    batches = private.loader(data()) if through_loader else ((x[:8], y[:8]) for _ in range(6))
    for number, (x, y) in enumerate(batches):
        if number == 2:
            change(model)
            with pytest.raises(InvalidPlan, match=r"optimizer"):
                private.step(losses_of(model, x, y))
            break
        private.step(losses_of(model, x, y))
    assert private.ledger.steps == 2


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_between_iterations_is_refused_before_a_batch_is_drawn(change: Change) -> None:
    model = mlp()
    private = cw.Private(plan(), model, sgd(model), seed=0)
    for number, (x, y) in enumerate(private.loader(data())):
        private.step(losses_of(model, x, y))
        if number == 1:
            break
    change(model)
    with pytest.raises(InvalidPlan, match="optimizer"):
        next(iter(private.loader(data())))
    assert private.ledger.steps == 2


def test_a_change_that_the_optimizer_knows_is_trained() -> None:
    model = mlp()
    optimizer = sgd(model)
    private = cw.Private(plan(), model, optimizer, seed=0, own_batches=True)
    x, y = data().tensors
    private.step(losses_of(model, x[:8], y[:8]))
    new_weight(model)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    before = weights(model)
    private.step(losses_of(model, x[:8], y[:8]))
    assert not any(torch.equal(before[name], value) for name, value in weights(model).items())


def test_a_change_within_a_logical_batch_is_refused() -> None:
    model = mlp()
    private = cw.Private(plan(), model, sgd(model), seed=0, own_batches=True)
    x, y = data().tensors
    private.backward(losses_of(model, x[:4], y[:4]))
    new_weight(model)
    with pytest.raises(InvalidPlan, match="replaced"):
        private.step(losses_of(model, x[4:8], y[4:8]))
    assert private.ledger.steps == 0


@pytest.mark.filterwarnings("ignore")  # importing the compiler warns
@pytest.mark.parametrize("where", ["whole", "part", "in_place", "called"])
def test_a_compiled_model_is_recognised_before_it_is_run(where: str) -> None:
    model = mlp()
    whole: nn.Module = model
    if where == "whole":
        whole = torch.compile(model)  # type: ignore[assignment]
    elif where == "part":
        model[0] = torch.compile(model[0])  # type: ignore[index]
    elif where == "in_place":
        model[0].compile()  # type: ignore[index]
    else:
        model.compile()
    with pytest.raises(UnsupportedNode, match=r"torch\.compile"):
        cw.Private(plan(), whole, sgd(model))


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * torch.sigmoid(x)


def compiled_nodes(root: Any) -> int:
    nodes = [root]
    for node in nodes:
        nodes.extend(child for child, _ in node.next_functions if child is not None and child not in nodes)
    return sum(node.name() == "CompiledFunctionBackward" for node in nodes)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_module_without_parameters_stays_compiled_after_watched_passes() -> None:
    """Torch never again compiles a function that was called below a mode; while one watches, nothing is compiled."""
    torch.compiler.reset()
    with torch._functorch.config.patch(donated_buffer=False):
        model = nn.Sequential(nn.Linear(6, 8), Gate(), nn.Linear(8, 3))
        model[1].compile(backend="aot_eager")
        private = cw.Private(plan(sampling=cw.Poisson(40, 16), steps=10), model, sgd(model), seed=0)
        counts, stances = [], set()
        for x, y in private.loader(TensorDataset(torch.randn(40, 6), torch.randint(3, (40,)))):
            losses = F.cross_entropy(model(x), y, reduction="none")
            counts.append(compiled_nodes(losses.grad_fn))
            private.step(losses)
            stances.add(torch._dynamo.eval_frame._stance.stance)
    assert counts[:3] == [0, 0, 0] and counts[-1] == 1
    assert stances == {"default"} and private.ledger.steps == 10
    assert private.checked.steps[:3] == (0, 1, 2)


def test_a_number_as_a_parameter_and_one_sample() -> None:
    """The gradient of a 0-dim parameter once had shape [1] for a batch of one, found only after the charge."""
    model = mlp()
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    private = cw.Private(plan(), model, sgd(model), seed=0, own_batches=True)
    x, y = data().tensors
    for size in (1, 3, 1):
        private.step(losses_of(model, x[:size], y[:size]) * model.scale)  # type: ignore[operator]
    assert private.ledger.steps == 3
