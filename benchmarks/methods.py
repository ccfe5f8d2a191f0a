"""The ways to make a training step that are measured: one small class each, all with SGD and the same clipping.

Every method makes a *whole* step: forward, backward, clipping, noise, optimizer, zero_grad. `clipped` gives its
per-sample norms and its clipped sum, without noise, for the comparison with the per-sample loop. A method that cannot
run a workload raises, and the reason is recorded as it was given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.workloads import Batch, Workload, trainable

CLIP = 1.0
NOISE = 1.0
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class ClippedSum:
    """What a method computes before noise: the norm of every sample and sum_i min(1, R/norm_i) g_i per parameter."""

    norms: Tensor
    sums: dict[str, Tensor]


class Method(ABC):
    """A way to make a step on a workload. The model is its own, with the same weights for every method."""

    name: ClassVar[str]
    title: ClassVar[str]

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.model: nn.Module = workload.model()
        self.optimizer: Any = torch.optim.SGD(trainable(self.model), lr=LEARNING_RATE)
        self.expected_batch_size = workload.batch_size

    @abstractmethod
    def step(self, batch: Batch) -> None:
        """One whole training step."""

    def clipped(self, batch: Batch) -> ClippedSum | None:
        """Norms and clipped sum of a batch, None for a method that does not clip."""
        return None

    def losses(self, batch: Batch) -> Tensor:
        """Per-sample losses of this method's model."""
        return self.workload.losses(self.model, batch)


class Plain(Method):
    """The ordinary non-private step: the unit of every ratio."""

    name, title = "plain", "plain step"

    def step(self, batch: Batch) -> None:
        self.logical([batch])

    def logical(self, batches: Sequence[Batch]) -> None:
        """One step on several physical batches."""
        for batch in batches:
            self.losses(batch).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Clipwise(Method):
    """`clipwise.Private`, as a user runs it: unmodified model, ledger, noise and optimizer included."""

    name, title = "clipwise", "clipwise"

    def __init__(self, workload: Workload) -> None:
        import clipwise as cw

        super().__init__(workload)
        plan = cw.Plan(
            sampling=cw.Poisson(sample_size=1_000 * workload.batch_size, batch_size=workload.batch_size),
            steps=1_000_000,
            clip=cw.Abadi(CLIP),
            noise_multiplier=NOISE,
        )
        self.private = cw.Private(plan, self.model, self.optimizer, own_batches=True)

    def step(self, batch: Batch) -> None:
        self.private.step(self.losses(batch))

    def logical(self, batches: Sequence[Batch]) -> None:
        """One step on several physical batches."""
        for batch in batches:
            self.private.backward(self.losses(batch))
        self.private.step()

    def clipped(self, batch: Batch) -> ClippedSum:
        import clipwise as cw

        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        result = cw.clipped_gradients(self.losses(batch), named, cw.Abadi(CLIP))
        return ClippedSum(result.norms, result.gradients)


class VmapGrad(Method):
    """Per-sample gradients with `torch.func.vmap(grad(...))`, then clip, sum, add noise."""

    name, title = "vmap", "vmap(grad)"

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        self.parameters = dict(self.model.named_parameters())
        self.fixed = {name: p.detach() for name, p in self.parameters.items() if not p.requires_grad}
        self.buffers = dict(self.model.named_buffers())

        def loss_of_one(parameters: dict[str, Tensor], sample: Batch) -> Tensor:
            state = {**parameters, **self.fixed, **self.buffers}
            model = _Functional(self.model, state)
            return workload.losses(model, {name: value.unsqueeze(0) for name, value in sample.items()})[0]

        self.gradients = torch.func.vmap(torch.func.grad(loss_of_one), in_dims=(None, 0))

    def clipped(self, batch: Batch) -> ClippedSum:
        parameters = {name: self.parameters[name].detach() for name in self.names}
        gradients: dict[str, Tensor] = self.gradients(parameters, batch)
        squared = torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in gradients.values()])
        norms = torch.linalg.vector_norm(squared, dim=0)
        factors = (CLIP / norms).clamp(max=1.0)
        return ClippedSum(norms, {name: torch.tensordot(factors, g, dims=1) for name, g in gradients.items()})

    def step(self, batch: Batch) -> None:
        sums = self.clipped(batch).sums
        for name in self.names:
            noisy = sums[name].add_(torch.randn_like(sums[name]), alpha=NOISE * CLIP)
            self.parameters[name].grad = noisy.div_(self.expected_batch_size)
        self.optimizer.step()
        self.optimizer.zero_grad()


class _Functional(nn.Module):
    """A module called with given parameters; attribute access goes nowhere else."""

    def __init__(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        super().__init__()
        self._call = (model, state)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        model, state = self._call
        return torch.func.functional_call(model, state, args, kwargs)


class OpacusHooks(Method):
    """Opacus with per-sample gradients in `p.grad_sample` (`GradSampleModule`, `DPOptimizer`)."""

    name, title = "opacus_hooks", "Opacus hooks"

    def __init__(self, workload: Workload) -> None:
        from opacus import GradSampleModule
        from opacus.optimizers import DPOptimizer

        super().__init__(workload)
        self.plain_model = self.model
        self.model = GradSampleModule(self.model, strict=False)
        self.optimizer = DPOptimizer(
            self.optimizer, noise_multiplier=NOISE, max_grad_norm=CLIP, expected_batch_size=self.expected_batch_size
        )

    def step(self, batch: Batch) -> None:
        self.losses(batch).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clipped(self, batch: Batch) -> ClippedSum:
        self.optimizer.zero_grad()
        self.losses(batch).mean().backward()
        gradients = {name: p for name, p in self.plain_model.named_parameters() if p.requires_grad}
        flat = [p.grad_sample.flatten(1).norm(dim=1) for p in gradients.values()]  # type: ignore[attr-defined]
        norms = torch.stack(flat).norm(dim=0)
        self.optimizer.clip_and_accumulate()
        sums = {name: p.summed_grad.clone() for name, p in gradients.items()}  # type: ignore[attr-defined]
        self.optimizer.zero_grad()
        return ClippedSum(norms, sums)


class OpacusGhost(Method):
    """Opacus with ghost norms and a second backward (`GradSampleModuleFastGradientClipping`).

    Where a layer has no ghost rule Opacus falls back to instantiation by itself. Parameter tying is refused by ghost
    norms; then the same class is tried with `use_ghost_clipping=False` ("fast gradient clipping").
    """

    name, title = "opacus_ghost", "Opacus ghost"
    ghost: ClassVar[bool] = True

    def __init__(self, workload: Workload) -> None:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizerFastGradientClipping

        super().__init__(workload)
        self.plain_model = self.model
        self.wrapped = GradSampleModuleFastGradientClipping(
            self.model, strict=False, max_grad_norm=CLIP, use_ghost_clipping=self.ghost
        )
        self.model = self.wrapped
        self.optimizer = DPOptimizerFastGradientClipping(
            self.optimizer, noise_multiplier=NOISE, max_grad_norm=CLIP, expected_batch_size=self.expected_batch_size
        )

    def _backward(self, batch: Batch) -> None:
        from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

        DPTensorFastGradientClipping(self.wrapped, self.optimizer, self.losses(batch), "mean").backward()

    def step(self, batch: Batch) -> None:
        self._backward(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clipped(self, batch: Batch) -> ClippedSum:
        self.optimizer.zero_grad()
        self._backward(batch)
        norms = self.wrapped.per_sample_gradient_norms.detach().clone()
        named = {name: p for name, p in self.plain_model.named_parameters() if p.requires_grad}
        sums = {name: p.grad.detach().clone() for name, p in named.items() if p.grad is not None}
        self.optimizer.zero_grad()
        return ClippedSum(norms, sums)


class OpacusFastClipping(OpacusGhost):
    """The same without ghost norms: norms of instantiated gradients, then a second backward."""

    name, title = "opacus_fast", "Opacus fast gradient clipping"
    ghost = False


class FastDP(Method):
    """fastDP's book-keeping ("MixOpt"), where a copy of it can be imported: it is in no package registry.

    It leaves parameters that it has no rule for as they are.
    """

    name, title = "fastdp", "fastDP"

    def __init__(self, workload: Workload) -> None:
        from fastDP import PrivacyEngine

        super().__init__(workload)
        with redirect_stdout(None):  # it prints what it does
            engine = PrivacyEngine(
                self.model,
                batch_size=self.expected_batch_size,
                sample_size=1_000 * self.expected_batch_size,
                epochs=1,
                noise_multiplier=NOISE,
                max_grad_norm=CLIP,
                clipping_fn="Abadi",
                clipping_mode="MixOpt",
            )
        engine.attach(self.optimizer)

    def step(self, batch: Batch) -> None:
        self.losses(batch).mean().backward()
        with redirect_stdout(None):
            self.optimizer.step()
        self.optimizer.zero_grad()


METHODS: dict[str, type[Method]] = {
    method.name: method for method in (Plain, Clipwise, VmapGrad, OpacusHooks, OpacusGhost, OpacusFastClipping, FastDP)
}
MEASURED = ("plain", "clipwise", "vmap", "opacus_hooks", "opacus_ghost")
FALLBACK = {"opacus_ghost": "opacus_fast"}
