"""The reference of every engine test: autograd, one sample at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.clipping import Abadi, Style
from clipwise.engine import clipped_gradients, per_sample_gradients, per_sample_norms
from tests.zoo import Case

Gradients = Mapping[str, Tensor]


class Times(torch.autograd.Function):
    """A function of a user's own, `x * w`; what its backward answers is the subclass's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * w


def loop_gradients(losses: Tensor, params: Gradients) -> dict[str, Tensor]:
    """Per-sample gradients (B, *shape) by name; zeros where a sample does not reach a parameter."""
    leaves = list(params.values())
    rows = [torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True) for loss in losses.unbind()]
    per_sample = {}
    for k, (name, p) in enumerate(params.items()):
        entries = [torch.zeros_like(p) if row[k] is None else row[k].to_dense() for row in rows]
        per_sample[name] = torch.stack(entries) if entries else p.new_zeros((0, *p.shape))
    return per_sample


def flat(gradients: Gradients) -> Tensor:
    """All per-sample gradients side by side in float64: (B, number of parameters)."""
    return torch.cat([g.detach().double().reshape(g.shape[0], -1) for g in gradients.values()], dim=1)


def flat_sum(gradients: Gradients) -> Tensor:
    """One gradient per parameter as one float64 vector."""
    return torch.cat([g.detach().double().reshape(-1) for g in gradients.values()])


def norms_of(gradients: Gradients) -> Tensor:
    """Norms (B,), accumulated in float64."""
    return flat(gradients).norm(dim=1)


def groups_of(style: Style, params: Gradients) -> dict[str, list[str]]:
    """Clipping group -> the names of its parameters."""
    groups: dict[str, list[str]] = {}
    for name in params:
        groups.setdefault(style.group_of(name.rpartition(".")[0], name), []).append(name)
    return groups


def clipped_loop(per_sample: Gradients, style: Style) -> dict[str, Tensor]:
    """Each sample's clipped gradient, (B, *shape) float64, by definition: factor of its group's norm x gradient."""
    clipped = {}
    for group, names in groups_of(style, per_sample).items():
        members = {name: per_sample[name].double() for name in names}
        factors = style.rule_of(group)(norms_of(members))
        for name, g in members.items():
            clipped[name] = factors.view(-1, *[1] * (g.dim() - 1)) * g
    return {name: clipped[name] for name in per_sample}


def relative_errors(actual: Tensor, expected: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance of rows in units of `scale`; the floor lets rows of zeros be zero up to rounding of the largest row."""
    floor = 10 * torch.finfo(dtype).eps * scale.max().clamp(min=1e-30)
    distance = (actual.detach().double() - expected).reshape(len(scale), -1).norm(dim=1)
    return distance / scale.clamp(min=floor)


def assert_agrees_with_the_loop(losses: Tensor, params: Gradients, tolerance: float) -> None:
    """Per-sample gradients, their norms and the clipped sum."""
    loop = loop_gradients(losses, params)
    found = per_sample_gradients(losses, params, retain_graph=True)
    assert relative_errors(flat(found), flat(loop), norms_of(loop), losses.dtype).max() <= tolerance
    norms = per_sample_norms(losses, params, retain_graph=True)
    assert torch.allclose(norms.double(), norms_of(loop), rtol=tolerance)
    clipped = clipped_gradients(losses, params, Abadi(0.5)).gradients
    expected = (flat(loop) * (0.5 / norms_of(loop)).clamp(max=1).unsqueeze(1)).sum(0)
    assert torch.allclose(flat_sum(clipped), expected, atol=tolerance)


def tolerance(case: Case, losses: Tensor, dtype: torch.dtype) -> float:
    """How far the engine may be from the loop, relative to the sample's gradient norm."""
    if dtype == torch.float32:
        return case.tolerance32
    return 1e-6 if rounds_inside(losses) else 1e-10


def rounds_inside(losses: Tensor) -> bool:
    """Whether a float64 model computes a part in float32 all the same, as many norms and attentions do."""
    stack, seen = [losses.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(meta.dtype == torch.float32 for meta in node._input_metadata):
            return True
        stack.extend(child for child, _ in node.next_functions)
    return False


def precision(case: Case) -> torch.dtype:
    """The best precision in which a case runs."""
    single = {"float32_only", "autocast"} & case.tags
    return torch.float32 if single else torch.float64


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Fail when anything on the model, its parameters or torch's global state differs afterwards."""
    before = _photograph(model)
    try:
        yield
    finally:
        after = _photograph(model)
        different = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
        assert not different, f"left behind or changed: {sorted(different)}"


def _photograph(model: nn.Module) -> dict[str, object]:
    picture: dict[str, object] = {
        "grad mode": torch.is_grad_enabled(),
        "random state": _bytes(torch.get_rng_state()),
        "mkldnn": torch.backends.mkldnn.enabled,  # type: ignore[attr-defined]
        "state_dict keys": tuple(model.state_dict()),
    }
    for name, module in model.named_modules(remove_duplicate=False):
        picture[f"attributes of {name or 'the model'}"] = tuple(vars(module))
        hooks = {key: len(value) for key, value in vars(module).items() if "hook" in key and hasattr(value, "__len__")}
        picture[f"hooks of {name or 'the model'}"] = hooks
        picture[f"training mode of {name or 'the model'}"] = module.training
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        picture[f"value of {name}"] = (id(tensor), _bytes(tensor))
        picture[f"attributes of {name}"] = tuple(vars(tensor))
        picture[f"hooks of {name}"] = (tensor._backward_hooks and len(tensor._backward_hooks), _later_hooks(tensor))
        picture[f"grad of {name}"] = None if tensor.grad is None else (id(tensor.grad), _bytes(tensor.grad))
        picture[f"requires_grad of {name}"] = tensor.requires_grad
    return picture


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().flatten().contiguous().view(torch.uint8).numpy().tobytes()


def _later_hooks(tensor: Tensor) -> int:
    hooks = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return len(hooks) if hooks else 0
