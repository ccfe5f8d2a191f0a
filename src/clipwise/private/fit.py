"""Does a model and its optimizer fit private training? Checked in full once, and cheaply at every step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.optim import Optimizer

from clipwise.engine import widened
from clipwise.errors import InvalidPlan, NotSeparable, UnsupportedNode

__all__ = ["Fit"]

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
_VALUES = methodcaller("values")
_REFUSED = {
    "LBFGS": "it evaluates the gradient several times within one step, and each time would be one more release",
    "SparseAdam": "it needs sparse gradients, and noise is dense",
}


@dataclass(frozen=True)
class Fit:
    """The private parameters of a model, by name, and what must stay as it was when they were found."""

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    frozen: tuple[Tensor, ...]
    watched: tuple[tuple[str, Tensor], ...]
    mixing: tuple[tuple[str, nn.Module], ...]
    optimized: tuple[int, ...]  # identities of the tensors in the optimizer's groups
    kinds: tuple[tuple[torch.dtype, torch.device, torch.Size], ...]
    tables: tuple[Mapping[str, object], ...]  # every module's own parameters and modules, which may be replaced
    entries: list[int]  # identities of what they held
    places: dict[int, int]
    """Identity of a private parameter -> its place among them."""
    wide: tuple[torch.dtype, ...]
    """What each one's gradients are summed in."""

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer) -> Fit:
        """Find the private parameters; refuse a model and an optimizer that do not fit."""
        if not isinstance(model, nn.Module):
            raise InvalidPlan(f"model must be a torch.nn.Module, got {type(model).__name__}.")
        _check_optimizer(optimizer)
        _check_not_compiled(model)
        _check_not_distributed(model)
        named = list(model.named_parameters())  # tied parameters once, under their first name
        known = {id(p): name for name, p in named}
        _check_embeddings(model)
        optimized = [p for group in optimizer.param_groups for p in group["params"]]
        strangers = [p for p in optimized if id(p) not in known]
        if strangers:
            shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:3])
            raise InvalidPlan(
                f"the optimizer has {len(strangers)} tensors that are not parameters of the model (shapes {shapes}). "
                "Their gradients would be used without clipping and noise. Leave them out; where a parameter of the "
                "model was replaced, give the optimizer the new one instead."
            )
        ids = {id(p) for p in optimized}
        missing = [name for name, p in named if p.requires_grad and id(p) not in ids]
        if missing:
            raise InvalidPlan(
                f"trainable parameters are missing in the optimizer: {_some(missing)}. Add them, or freeze them with "
                "requires_grad_(False)."
            )
        trainable = [(name, p) for name, p in named if p.requires_grad]
        if not trainable:
            raise InvalidPlan("the model has no trainable parameter.")
        tables = tuple(table for m in model.modules() for table in (m._parameters, m._modules) if table is not None)
        return cls(
            names=tuple(name for name, _ in trainable),
            tensors=tuple(p for _, p in trainable),
            frozen=tuple(p for _, p in named if not p.requires_grad),
            watched=tuple((name, p) for name, p in named if not p.requires_grad and id(p) in ids),
            mixing=tuple((name, m) for name, m in model.named_modules() if isinstance(m, (_BatchNorm, _InstanceNorm))),
            optimized=_identities(optimizer),
            kinds=tuple((p.dtype, p.device, p.shape) for _, p in trainable),
            tables=tables,
            entries=_entries(tables),
            places={id(p): place for place, (_, p) in enumerate(trainable)},
            wide=tuple(widened(p.dtype) for _, p in trainable),
        )

    @property
    def named(self) -> dict[str, Tensor]:
        """The private parameters by name."""
        return dict(zip(self.names, self.tensors, strict=True))

    def zeros(self) -> list[Tensor]:
        """The sum over no sample."""
        return [torch.zeros_like(p, dtype=dtype) for p, dtype in zip(self.tensors, self.wide, strict=True)]

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether the same parameters are still the trainable ones, as they were (cheap: asked at every step)."""
        for p, kind in zip(self.tensors, self.kinds, strict=True):
            if not p.requires_grad or kind != (p.dtype, p.device, p.shape):
                return False
        for p in self.frozen:
            if p.requires_grad:
                return False
        return self.optimized == _identities(optimizer) and self.entries == _entries(self.tables)

    def check_step(self) -> None:
        """Refuse what may change between steps: batch statistics, and gradients that did not come through here."""
        for name, module in self.mixing:
            _check_normalisation(name, module)
        for name, p in self.watched:
            if p.grad is not None:
                raise InvalidPlan(
                    f"frozen parameter {name!r} has a gradient from elsewhere, which the optimizer would use without "
                    "clipping and noise. Set it to None."
                )


def _identities(optimizer: Optimizer) -> tuple[int, ...]:
    return tuple(id(p) for group in optimizer.param_groups for p in group["params"])


def _entries(tables: Iterable[Mapping[str, object]]) -> list[int]:
    """Who is in the tables; 50 ns an entry, and a replaced parameter or module is another object."""
    return list(map(id, chain.from_iterable(map(_VALUES, tables))))


def _check_not_compiled(model: nn.Module) -> None:
    """Refuse compiled modules with parameters now, rather than after minutes of compiling."""
    for name, module in model.named_modules():
        compiled = (
            type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
        )
        if compiled and any(True for _ in module.parameters()):
            raise UnsupportedNode(
                f"{name or 'the model'} is compiled (torch.compile): a compiled graph hides where its parameters are "
                "used. Give the model as it was before torch.compile, or build it without module.compile(). Functions "
                "and modules without parameters may be compiled (activations, losses, the core of attention)."
            )


def _check_not_distributed(model: nn.Module) -> None:
    """Refuse wrappers that spread a model over ranks: what the other ranks add is neither clipped nor known here."""
    for name, module in model.named_modules():
        wrapper = next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _WRAPPERS), None)
        if wrapper is not None:
            raise InvalidPlan(
                f"{name or 'the model'} is wrapped for several ranks ({wrapper}). Private runs in one process: give it "
                "the bare model (model.module), and its parameters to the optimizer."
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise InvalidPlan(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    for name, reason in _REFUSED.items():
        refused = getattr(torch.optim, name)
        if isinstance(optimizer, refused):
            raise InvalidPlan(f"torch.optim.{name} cannot be used privately: {reason}. Any other optimizer can.")


def _check_embeddings(model: nn.Module) -> None:
    """Refuse embeddings whose forward pass rewrites the rows of the private tokens."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise InvalidPlan(
                f"{name!r} ({type(module).__name__}) has max_norm={module.max_norm}: its forward pass rewrites the "
                "rows of the samples' tokens, without noise. Use max_norm=None."
            )


def _check_normalisation(name: str, module: Any) -> None:
    kind = type(module).__name__
    if isinstance(module, _InstanceNorm):
        if module.training and module.track_running_stats:
            raise NotSeparable(
                f"{name!r} ({kind}) gathers statistics of the private inputs in its buffers, without noise. Use "
                "track_running_stats=False, or put it in eval mode."
            )
    elif module.training or not module.track_running_stats:
        how = "is in training mode" if module.training else "has track_running_stats=False"
        raise NotSeparable(
            f"{name!r} ({kind}) {how}: it normalises with statistics of the whole batch, so a sample's gradient "
            "depends on the others. Use GroupNorm or LayerNorm, or a trained BatchNorm in eval mode (model.train(), "
            "then module.eval()). model, replaced = cw.without_batchnorm(model) gives a copy with GroupNorm."
        )
