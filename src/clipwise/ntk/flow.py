"""Gradient flows of clipped training: what gradient descent and its relatives become as the step goes to zero.

With G = (1/n) sum_i C_i g_i, the clipped mean gradient, whatever the noise (Fact 4.1 and its extension to other
optimizers):

    gd           dw/dt = -G
    heavy ball   dw/dt = -m                   dm/dt = G - r m
    nesterov     dw/dt = -m                   dm/dt = G - (3/t) m
    adam         dw/dt = -m / sqrt(v + xi)    dm/dt = G - m/alpha1    dv/dt = (G^2 - v)/alpha2
    adagrad      dw/dt = -G / sqrt(v + xi)    dv/dt = G^2
    rmsprop      dw/dt = -G / sqrt(v + xi)    dv/dt = (G^2 - v)/alpha

Integrated in float64 by scipy's Runge-Kutta methods with error control.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields
from math import prod
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor, nn

from clipwise._validate import is_count, is_positive
from clipwise.clipping import Clip, Rule, Style, as_style
from clipwise.errors import DataError, NotConverged
from clipwise.ntk.dynamics import clipped_sum
from clipwise.ntk.network import (
    Inputs,
    LossFunction,
    call,
    gradients,
    map_inputs,
    refuse_not_finite,
    sample_count,
    sample_losses,
    trainable,
)

__all__ = [
    "FLOWS", "AdaGradFlow", "AdamFlow", "GdFlow", "GradientFlow", "HeavyBallFlow", "NesterovFlow", "RMSpropFlow",
    "gradient_flow",
]  # fmt: skip

Array: TypeAlias = Any  # of numpy, float64
Gradient: TypeAlias = Callable[[Array], Array]  # w -> G


@dataclass(frozen=True)
class _Positive:
    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if not (np.isfinite(value) and (value > 0 or (f.name in ("xi", "v0") and value == 0))):
                raise DataError(f"{type(self).__name__}({f.name}=...) must be positive, got {value!r}.")


@dataclass(frozen=True)
class GdFlow:
    """Gradient descent: dw/dt = -G (equation 4.2)."""

    parts: ClassVar[int] = 1

    def start(self, w: Array) -> Array:
        """The initial state."""
        return w

    def rate(self, t: float, state: Array, gradient: Gradient) -> Array:
        """The time derivative of the state, dw/dt first."""
        return -gradient(state)


class _Momentum:
    """w and m, both of the flow dw/dt = -m, dm/dt = G - r(t) m."""

    parts: ClassVar[int] = 2

    def start(self, w: Array) -> Array:
        """The initial state: no momentum."""
        return np.concatenate([w, np.zeros_like(w)])

    def _rate(self, state: Array, gradient: Gradient, friction: float) -> Array:
        w, m = np.split(state, 2)
        return np.concatenate([-m, gradient(w) - friction * m])


@dataclass(frozen=True)
class HeavyBallFlow(_Positive, _Momentum):
    """Polyak's momentum with friction r: the limit of SGD with lr = h^2 and momentum = 1 - r h at time t = k h."""

    r: float = 1.0

    def rate(self, t: float, state: Array, gradient: Gradient) -> Array:
        """The time derivative of the state, dw/dt first."""
        return self._rate(state, gradient, self.r)


@dataclass(frozen=True)
class NesterovFlow(_Momentum):
    """Nesterov's acceleration: friction 3/t."""

    def rate(self, t: float, state: Array, gradient: Gradient) -> Array:
        """The time derivative of the state, dw/dt first; at t = 0 its limit, as m grows like G t/4."""
        if t == 0.0:
            w, m = np.split(state, 2)
            return np.concatenate([-m, gradient(w) / 4])
        return self._rate(state, gradient, 3.0 / t)


@dataclass(frozen=True)
class AdamFlow(_Positive):
    """Adam without bias correction; alpha1 and alpha2 are the memories of the moments, v0 the first second moment."""

    alpha1: float = 1.0
    alpha2: float = 1.0
    xi: float = 1e-3
    v0: float = 0.0
    parts: ClassVar[int] = 3

    def start(self, w: Array) -> Array:
        """The initial state: no momentum, second moment v0."""
        return np.concatenate([w, np.zeros_like(w), np.full_like(w, self.v0)])

    def rate(self, t: float, state: Array, gradient: Gradient) -> Array:
        """The time derivative of the state, dw/dt first."""
        w, m, v = np.split(state, 3)
        g = gradient(w)
        scale = np.sqrt(np.maximum(v, 0.0) + self.xi)
        return np.concatenate([-m / scale, g - m / self.alpha1, (g**2 - v) / self.alpha2])


class _Adaptive:
    parts: ClassVar[int] = 2
    xi: float
    v0: float

    def start(self, w: Array) -> Array:
        """The initial state: second moment v0."""
        return np.concatenate([w, np.full_like(w, self.v0)])

    def _rate(self, state: Array, gradient: Gradient, p: float, q: float) -> Array:
        """dw/dt = -G/sqrt(v + xi), dv/dt = p G^2 - q v."""
        w, v = np.split(state, 2)
        g = gradient(w)
        return np.concatenate([-g / np.sqrt(np.maximum(v, 0.0) + self.xi), p * g**2 - q * v])


@dataclass(frozen=True)
class AdaGradFlow(_Positive, _Adaptive):
    """AdaGrad: squared gradients are added up without end."""

    xi: float = 1e-3
    v0: float = 0.0

    def rate(self, t: float, state: Array, gradient: Gradient) -> Array:
        """The time derivative of the state, dw/dt first."""
        return self._rate(state, gradient, 1.0, 0.0)


@dataclass(frozen=True)
class RMSpropFlow(_Positive, _Adaptive):
    """RMSprop: squared gradients are forgotten with memory alpha."""

    alpha: float = 1.0
    xi: float = 1e-3
    v0: float = 0.0

    def rate(self, t: float, state: Array, gradient: Gradient) -> Array:
        """The time derivative of the state, dw/dt first."""
        return self._rate(state, gradient, 1.0 / self.alpha, 1.0 / self.alpha)


METHODS = ("RK45", "RK23", "DOP853", "Radau", "BDF", "LSODA")
Dynamics: TypeAlias = GdFlow | HeavyBallFlow | NesterovFlow | AdamFlow | AdaGradFlow | RMSpropFlow
FLOWS: dict[str, Dynamics] = {
    "gd": GdFlow(),
    "heavy_ball": HeavyBallFlow(),
    "nesterov": NesterovFlow(),
    "adam": AdamFlow(),
    "adagrad": AdaGradFlow(),
    "rmsprop": RMSpropFlow(),
}


@dataclass(frozen=True, eq=False)
class GradientFlow:
    """A flow at the times t: loss, its rate dL/dt, its speed, the length of dw/dt, and the weights."""

    t: Tensor
    loss: Tensor
    loss_rate: Tensor
    speed: Tensor
    weights: Tensor
    """w at each time, (times, parameters), float64."""
    shapes: dict[str, torch.Size]
    """The parameters in the order in which `weights` holds them."""
    evaluations: int
    """How many clipped gradients the integration took."""

    def at(self, k: int) -> dict[str, Tensor]:
        """The parameters at the k-th time, by name; `model.load_state_dict(..., strict=False)` takes them."""
        sizes = [prod(shape) for shape in self.shapes.values()]
        parts = self.weights[k].split(sizes)
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}


class _Field:
    """A copy of the model in float64 whose weights are one vector, and its clipped gradient there."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction, x: Inputs, y: Any, style: Style, limit: int) -> None:
        self._model = copy.deepcopy(model).double().eval()
        self._loss_fn, self._style, self._limit = loss_fn, style, limit
        sample_count(x)
        self._x, self._y = map_inputs(x, _as_double), _as_double(y)
        self._weights = trainable(self._model)
        self.shapes = {name: p.shape for name, p in self._weights.items()}
        self._vector = torch.cat([p.detach().flatten() for p in self._weights.values()])
        self.start = self._vector.cpu().numpy().copy()
        offset = 0
        for p in self._weights.values():
            p.data = self._vector[offset : offset + p.numel()].view(p.shape)
            offset += p.numel()
        self.evaluations = 0
        with torch.no_grad():
            refuse_not_finite(self._losses(self.start))

    def _losses(self, w: Array) -> Tensor:
        self._vector.copy_(torch.from_numpy(np.ascontiguousarray(w)))
        return sample_losses(self._loss_fn, call(self._model, self._x), self._y)

    def clipped(self, w: Array) -> Array:
        """G at w."""
        self.evaluations += 1
        if self.evaluations > self._limit:
            raise NotConverged(
                f"the flow took more than {self._limit} gradients. It may be stiff, or its clipping rule jumps (a "
                "discontinuous rule has no smooth flow): shorten t_end, loosen rtol, or raise max_evaluations."
            )
        with torch.enable_grad():
            losses = self._losses(w)
            sums, _ = clipped_sum(losses, self._weights, self._style)
        return _joined(sums.values()) / len(losses)

    def loss_and_gradient(self, w: Array) -> tuple[float, Array]:
        """L and dL/dw at w."""
        with torch.enable_grad():
            loss = self._losses(w).mean()
            found = gradients(loss, self._weights)
        return float(loss.detach()), _joined(found)


def _joined(parts: Any) -> Array:
    return torch.cat([part.detach().flatten() for part in parts]).cpu().numpy()


def _as_double(values: Any) -> Any:
    return values.double() if isinstance(values, Tensor) and values.is_floating_point() else values


def gradient_flow(
    model: nn.Module,
    loss_fn: LossFunction,
    x: Inputs,
    y: Any,
    clip: Rule | Clip,
    t_end: float,
    optimizer: str | Dynamics = "gd",
    *,
    points: int = 101,
    rtol: float = 1e-6,
    atol: float = 1e-9,
    method: str = "RK45",
    max_evaluations: int = 20_000,
) -> GradientFlow:
    """The deterministic flow of clipped training from the model's present weights to time `t_end`, at `points` times.

    `optimizer` is one of "gd", "heavy_ball", "nesterov", "adam", "adagrad", "rmsprop", or a value such as
    `HeavyBallFlow(r=0.5)`. `rtol`, `atol` and `method` go to scipy's `solve_ivp`; a flow that needs more than
    `max_evaluations` clipped gradients is given up. The flow is that of DP-GD for every noise multiplier. The model is
    left unchanged.

    >>> from clipwise.clipping import NoClip
    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.ones_(model.weight)
    >>> flow = gradient_flow(model, lambda f, y: f.squeeze(1) ** 2 / 2, torch.ones(1, 1), None, NoClip(), 1.0, points=2)
    >>> flow.loss[-1].item() * 2  # w(t) = exp(-t)
    0.13533...
    """
    if isinstance(optimizer, str) and optimizer not in FLOWS:
        raise DataError(
            f"optimizer must be one of {', '.join(FLOWS)} or a flow such as HeavyBallFlow(), got {optimizer!r}."
        )
    dynamics = FLOWS[optimizer] if isinstance(optimizer, str) else optimizer
    if not (is_positive(t_end) and is_count(points, least=2)):
        raise DataError(f"t_end must be positive and points a number from 2 on, got {t_end!r} and {points!r}.")
    if method not in METHODS:
        raise DataError(f"method must be one of scipy's {', '.join(METHODS)}, got {method!r}.")
    field = _Field(model, loss_fn, x, y, as_style(clip), max_evaluations)
    times = np.linspace(0.0, t_end, points)
    done = solve_ivp(
        lambda t, state: dynamics.rate(t, state, field.clipped),
        (0.0, t_end),
        dynamics.start(field.start),
        method=method,
        t_eval=times,
        rtol=rtol,
        atol=atol,
    )
    if not done.success or not np.isfinite(done.y).all():
        raise NotConverged(f"the flow could not be followed to t = {t_end:g}: {done.message}")
    return _read(field, dynamics, times, done.y.T)


def _read(field: _Field, dynamics: Dynamics, times: Array, states: Array) -> GradientFlow:
    """Loss, rate and speed along the states."""
    taken, size = field.evaluations, len(field.start)
    losses, rates, speeds = [], [], []
    for t, state in zip(times, states, strict=True):
        field.evaluations = 0
        velocity = dynamics.rate(float(t), state, field.clipped)[:size]
        loss, gradient = field.loss_and_gradient(state[:size])
        if not np.isfinite(loss):
            raise NotConverged(f"the loss of the flow is not finite at t = {t:g}: shorten t_end.")
        losses.append(loss)
        rates.append(float(gradient @ velocity))
        speeds.append(float(np.linalg.norm(velocity)))
    return GradientFlow(
        t=torch.from_numpy(times),
        loss=torch.tensor(losses, dtype=torch.float64),
        loss_rate=torch.tensor(rates, dtype=torch.float64),
        speed=torch.tensor(speeds, dtype=torch.float64),
        weights=torch.from_numpy(states[:, :size].copy()),
        shapes=field.shapes,
        evaluations=taken,
    )
