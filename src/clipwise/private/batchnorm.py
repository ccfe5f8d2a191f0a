"""Copies of models without batch statistics: what `Private` refuses, replaced by what it takes."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from clipwise._validate import is_count
from clipwise.errors import InvalidPlan

__all__ = ["FrozenNorm", "without_batchnorm"]

_REPLACED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class FrozenNorm(nn.Module):
    """A BatchNorm whose statistics stay as they are, also in training mode; scale and shift can be trained."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        assert norm.running_mean is not None and norm.running_var is not None
        self.eps = norm.eps
        self.weight, self.bias = norm.weight, norm.bias
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)

    def forward(self, x: Tensor) -> Tensor:
        """An affine map of each channel: samples do not meet."""
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{len(self.running_mean)}, eps={self.eps}"


def without_batchnorm(model: nn.Module, *, frozen: bool = False, groups: int = 32) -> tuple[nn.Module, tuple[str, ...]]:
    """A copy of a model whose BatchNorms are replaced, and a line on each that says by what. The model stays as it is.

    Each becomes a GroupNorm of at most `groups` groups, with two channels or more in each, that keeps its scale and
    shift: the outputs change, so train the copy, or fine-tune it. With `frozen` it keeps its statistics too and stops
    gathering: the outputs are those of the model in eval mode. Such statistics must come from public data, since no
    epsilon covers them. Names of parameters stay the same.

    Guarantees: the copy has no module that computes statistics of a batch of the kinds that torch has; one of another
    kind, or with hooks, is refused rather than left.

    >>> network = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
    >>> changed, what = without_batchnorm(network)
    >>> what
    ("'1': BatchNorm2d(6) -> GroupNorm(3, 6), scale and shift kept",)
    """
    if not is_count(groups):
        raise InvalidPlan(f"groups must be a positive integer, got {groups!r}.")
    for name, module in _batch_norms(model):
        _check(name, module, frozen)
    made = copy.deepcopy(model)
    new: dict[int, nn.Module] = {}
    lines = []
    for name, module in _batch_norms(made):
        if id(module) not in new:
            new[id(module)] = _frozen(module) if frozen else _grouped(module, groups)
            lines.append(f"{name!r}: {type(module).__name__}({module.num_features}) -> {_words(new[id(module)])}")
        if not name:
            return new[id(module)], tuple(lines)
        parent, _, last = name.rpartition(".")
        setattr(made.get_submodule(parent), last, new[id(module)])
    return made, tuple(lines)


def _batch_norms(model: nn.Module) -> list[tuple[str, _BatchNorm]]:
    """All of them, one that has several names under each."""
    return [(name, m) for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, _BatchNorm)]


def _check(name: str, module: _BatchNorm, frozen: bool) -> None:
    """Refuse what a replacement would not be like."""
    kind = type(module).__name__
    if type(module) not in _REPLACED:
        raise InvalidPlan(f"{name!r} ({kind}) is not a BatchNorm of torch, or has no sizes yet: replace it yourself.")
    if any(getattr(module, hooks) for hooks in _HOOKS):
        raise InvalidPlan(f"{name!r} ({kind}) has hooks, which a replacement would lose: remove them first.")
    if frozen and module.running_mean is None:
        raise InvalidPlan(f"{name!r} ({kind}) has no statistics to keep (track_running_stats=False): use GroupNorm.")
    if not frozen and module.num_features == 1 and isinstance(module, nn.BatchNorm1d):
        raise InvalidPlan(f"{name!r} ({kind}) has one feature, of which GroupNorm would leave 0: use frozen=True.")


def _grouped(module: _BatchNorm, groups: int) -> nn.Module:
    channels = module.num_features
    most = max(1, min(groups, channels // 2))
    count = next(k for k in range(most, 0, -1) if channels % k == 0)
    norm = nn.GroupNorm(count, channels, eps=module.eps, affine=False)
    norm.affine, norm.weight, norm.bias = module.affine, module.weight, module.bias
    return norm.train(module.training)


def _frozen(module: _BatchNorm) -> nn.Module:
    return FrozenNorm(module).train(module.training)


def _words(module: nn.Module) -> str:
    if isinstance(module, nn.GroupNorm):
        return f"GroupNorm({module.num_groups}, {module.num_channels}), scale and shift kept"
    seen = isinstance(module, FrozenNorm) and not torch.equal(module.running_var, torch.ones_like(module.running_var))
    return "FrozenNorm with its statistics, scale and shift" + ("" if seen else " (statistics of a new layer: 0 and 1)")
