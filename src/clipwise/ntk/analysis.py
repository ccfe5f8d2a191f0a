"""The matrix that clipping makes of the tangent kernel, its properties, and the rate of the loss that follows.

Three properties of a matrix determine the loss: symmetry, positive quadratic form, positive eigenvalues. Definitions of
section 4.2: A is positive in quadratic form if x^T A x >= 0 for every x, which is to say that the symmetric part
(A + A^T)/2 has no negative eigenvalue. A is positive in eigenvalues if all its eigenvalues are real and >= 0. For a
symmetric matrix they are the same; in general neither implies the other (Facts A.1 to A.3).

Up to `DENSE_LIMIT` rows the whole spectrum is computed. Above, the extreme eigenvalues are found by Lanczos iteration,
and by Arnoldi iteration where the matrix is not symmetric.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import linalg
from scipy.sparse import linalg as sparse_linalg
from torch import Tensor, nn

from clipwise.clipping import Clip, Flat, Rule, Style, as_style
from clipwise.errors import DataError, InvalidLosses, NotConverged
from clipwise.ntk.dynamics import clipped_sum
from clipwise.ntk.kernels import Route, clipped_kernel, kernel
from clipwise.ntk.network import (
    Inputs,
    LossFunction,
    call,
    evaluating,
    output_gradient,
    refuse_not_finite,
    sample_count,
    sample_losses,
    trainable,
)

__all__ = ["DENSE_LIMIT", "NTKAnalysis", "Properties", "analyse", "product_properties", "properties"]

DENSE_LIMIT = 2000
_RELATIVE = {torch.float64: 1e-10}  # of the matrix's norm; what rounding can do to a kernel
_RELATIVE_SINGLE = 1e-5
_TOLERANCE = 1e-5  # of the iterations, relative to the largest eigenvalue
_ROUNDS = 2000


@dataclass(frozen=True, eq=False)
class Properties:
    """The three properties, the numbers behind them, and a witness for each that fails.

    Each holds within `tolerance`, an absolute number: entries A_ij and A_ji differ by at most that, and no
    eigenvalue is below its negative, nor has an imaginary part above it.
    """

    symmetric: bool
    positive_quadratic: bool
    positive_eigenvalues: bool
    tolerance: float
    asymmetry: float
    """The largest absolute difference of A_ij and A_ji."""
    min_quadratic: float
    """The smallest eigenvalue of the symmetric part: the least x^T A x over unit vectors x."""
    min_eigenvalue: float
    """The smallest real part of an eigenvalue."""
    max_imaginary: float
    """The largest imaginary part of an eigenvalue."""
    asymmetry_witness: tuple[int, int] | None
    """Row and column of the entry that differs most from its mirror image, if not symmetric."""
    quadratic_witness: Tensor | None
    """A unit vector x with x^T A x < 0, if there is one."""
    eigenvalue_witness: Tensor | None
    """A complex unit vector v with A v = z v for a z that is negative or not real, if there is one."""
    method: str
    """How the eigenvalues were found: "dense", or the iteration that found the extreme ones."""

    def __str__(self) -> str:
        said = {True: "yes", False: "no"}
        return (
            f"symmetric: {said[self.symmetric]}, positive in quadratic form: {said[self.positive_quadratic]} "
            f"(least {self.min_quadratic:.4g}), positive in eigenvalues: {said[self.positive_eigenvalues]} "
            f"(least real part {self.min_eigenvalue:.4g}, largest imaginary part {self.max_imaginary:.4g}); "
            f"tolerance {self.tolerance:.2g}, {self.method}"
        )


def properties(matrix: Tensor, *, tolerance: float | None = None) -> Properties:
    """Symmetry and both kinds of positivity of any square matrix.

    `tolerance` is absolute; left out, it is 1e-10 (1e-5 for float32) of the matrix's Frobenius norm.

    >>> found = properties(torch.tensor([[-1.0, 3.0], [-3.0, 8.0]], dtype=torch.float64))  # Fact A.2
    >>> found.positive_eigenvalues, found.positive_quadratic, found.quadratic_witness
    (True, False, tensor([1., 0.], dtype=torch.float64))
    """
    values, tolerance = _prepared(matrix, tolerance)
    asymmetry, pair = _asymmetry(values)
    quadratic = _least_symmetric(_symmetric_part(values))
    if asymmetry <= tolerance:
        eigen = _Eigen(quadratic[0], 0.0, quadratic[1].astype(complex), quadratic[2])
    else:
        eigen = _general(values, tolerance)
    return _judge(asymmetry, pair, quadratic, eigen, tolerance)


def product_properties(
    kernel: Tensor, factors: Tensor, product: Tensor, *, tolerance: float | None = None
) -> Properties:
    """The properties of H C for a positive semi-definite H and a diagonal C >= 0, given as the vector of its entries.

    H C has the eigenvalues of the symmetric C^(1/2) H C^(1/2) (Fact A.1), so they are real and found without a
    non-symmetric solver.

    >>> H = torch.tensor([[1.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    >>> c = torch.tensor([1.0, 0.1], dtype=torch.float64)
    >>> found = product_properties(H, c, H * c)
    >>> found.symmetric, found.positive_quadratic, found.positive_eigenvalues
    (False, False, True)
    """
    values, tolerance = _prepared(product, tolerance)
    asymmetry, pair = _asymmetry(values)
    quadratic = _least_symmetric(_symmetric_part(values))
    root = factors.detach().to(kernel.dtype).sqrt()
    similar, _ = _prepared(kernel * root * root[:, None], tolerance)
    least, vector, method = _least_symmetric(_Symmetric.of(similar))
    found = np.asarray(
        kernel.detach().cpu().numpy() @ (root.cpu().numpy() * vector)
    )  # C^(1/2)HC^(1/2)v=zv: HC(HC^(1/2)v)
    length = np.linalg.norm(found)
    eigen = _Eigen(least, 0.0, (found / length if length else vector).astype(complex), method)
    return _judge(asymmetry, pair, quadratic, eigen, tolerance)


@dataclass(frozen=True)
class _Eigen:
    """The eigenvalue furthest from being real and positive: least real part, largest imaginary part, an eigenvector."""

    least: float
    imaginary: float
    vector: Any
    method: str


def _prepared(matrix: Tensor, tolerance: float | None) -> tuple[Any, float]:
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.numel():
        raise DataError(f"expected a square matrix, got shape {tuple(matrix.shape)}.")
    if not bool(torch.isfinite(matrix).all()):
        raise DataError("the matrix holds numbers that are not finite, so it has no eigenvalues.")
    if matrix.is_complex():
        raise DataError("expected a real matrix, got a complex one.")
    matrix = matrix if matrix.is_floating_point() else matrix.double()
    relative = _RELATIVE.get(matrix.dtype, _RELATIVE_SINGLE)
    values = matrix.detach().cpu()
    if tolerance is None:
        tolerance = relative * float(torch.linalg.matrix_norm(values))
    if len(values) <= DENSE_LIMIT or matrix.dtype not in (torch.float32, torch.float64):
        values = values.double()
    return values.numpy(), tolerance


def _asymmetry(values: Any, rows: int = 512) -> tuple[float, tuple[int, int]]:
    """The largest absolute difference of A_ij and A_ji and where, some rows at a time."""
    largest, pair = 0.0, (0, 0)
    for start in range(0, len(values), rows):
        gap = np.abs(values[start : start + rows] - values[:, start : start + rows].T)
        i, j = np.unravel_index(int(gap.argmax()), gap.shape)
        if gap[i, j] > largest:
            largest, pair = float(gap[i, j]), (start + int(i), int(j))
    return largest, pair


@dataclass(frozen=True)
class _Symmetric:
    """A symmetric matrix: as a product with vectors, and whole if it is small."""

    size: int
    apply: Callable[[Any], Any]
    whole: Any = None

    @classmethod
    def of(cls, values: Any) -> _Symmetric:
        return cls(len(values), lambda v: _times(values, v), values if len(values) <= DENSE_LIMIT else None)


def _symmetric_part(values: Any) -> _Symmetric:
    if len(values) <= DENSE_LIMIT:
        return _Symmetric.of(0.5 * (values + values.T))
    return _Symmetric(len(values), lambda v: 0.5 * (_times(values, v) + _times(values.T, v)))


def _times(values: Any, vector: Any) -> Any:
    """The product in the matrix's own precision: numpy would copy a float32 matrix to float64 at every product."""
    return (values @ vector.ravel().astype(values.dtype)).astype(np.float64)


def _least_symmetric(matrix: _Symmetric) -> tuple[float, Any, str]:
    """The smallest eigenvalue of a symmetric matrix, its vector, and how it was found."""
    if matrix.whole is not None:
        least, vectors = linalg.eigh(matrix.whole, subset_by_index=[0, 0])
        return float(least[0]), _turned(vectors[:, 0]), "dense"
    start = np.random.default_rng(0).standard_normal(matrix.size)
    top = _lanczos(matrix.apply, matrix.size, start)[0]
    # Turned upside down: iteration is accurate relative to the largest eigenvalue, so the least must become it.
    turned, vector = _lanczos(lambda v: top * v - matrix.apply(v), matrix.size, start)
    return top - turned, _turned(vector), "lanczos"


def _lanczos(apply: Callable[[Any], Any], size: int, start: Any) -> tuple[float, Any]:
    operator = sparse_linalg.LinearOperator((size, size), matvec=lambda v: apply(v.ravel()), dtype=np.float64)
    try:
        values, vectors = sparse_linalg.eigsh(
            operator, k=1, which="LA", v0=start, ncv=min(size, 60), tol=_TOLERANCE, maxiter=_ROUNDS
        )
    except sparse_linalg.ArpackNoConvergence as error:
        raise _not_converged(size) from error
    return float(values[0]), vectors[:, 0]


def _not_converged(size: int) -> NotConverged:
    return NotConverged(
        f"the extreme eigenvalues of a matrix with {size} rows did not converge in {_ROUNDS} rounds. "
        f"Take fewer samples: up to {DENSE_LIMIT} rows the whole spectrum is computed."
    )


def _turned(vector: Any) -> Any:
    """Of the two signs of an eigenvector, the one whose largest entry is positive."""
    return vector * (1.0 if vector[np.abs(vector).argmax()] > 0 else -1.0)


def _general(values: Any, tolerance: float) -> _Eigen:
    """The worst eigenvalue of a matrix that is not symmetric."""
    if len(values) <= DENSE_LIMIT:
        found, vectors = linalg.eig(values)
        method = "dense"
    else:
        found, vectors = _arnoldi(values)
        method = "arnoldi"
    least, imaginary = float(found.real.min()), float(np.abs(found.imag).max())
    worst = int(found.real.argmin()) if least < -tolerance else int(np.abs(found.imag).argmax())
    return _Eigen(least, imaginary, vectors[:, worst], method)


def _arnoldi(values: Any) -> tuple[Any, Any]:
    """Eigenvalues with the least real parts and the largest imaginary ones, with vectors."""
    size = len(values)
    start = np.random.default_rng(0).standard_normal(size)
    shift = float(np.linalg.norm(values))  # turns the spectrum upside down: the least real part becomes the largest
    turned = sparse_linalg.LinearOperator(
        (size, size), matvec=lambda v: shift * v.ravel() - _times(values, v), dtype=np.float64
    )
    plain = sparse_linalg.LinearOperator((size, size), matvec=lambda v: _times(values, v), dtype=np.float64)
    options = dict(k=6, ncv=min(size - 1, 120), v0=start, tol=_TOLERANCE, maxiter=_ROUNDS)
    try:
        low, low_vectors = sparse_linalg.eigs(turned, which="LR", **options)
        wide, wide_vectors = sparse_linalg.eigs(plain, which="LI", **options)
    except sparse_linalg.ArpackNoConvergence as error:
        raise _not_converged(size) from error
    return np.concatenate([shift - low, wide]), np.hstack([low_vectors, wide_vectors])


def _judge(
    asymmetry: float, pair: tuple[int, int], quadratic: tuple[float, Any, str], eigen: _Eigen, tolerance: float
) -> Properties:
    least, vector, method = quadratic
    symmetric, positive_quadratic = asymmetry <= tolerance, least >= -tolerance
    positive_eigenvalues = eigen.least >= -tolerance and eigen.imaginary <= tolerance
    return Properties(
        symmetric,
        positive_quadratic,
        positive_eigenvalues,
        tolerance,
        asymmetry,
        least,
        eigen.least,
        eigen.imaginary,
        asymmetry_witness=None if symmetric else pair,
        quadratic_witness=None if positive_quadratic else torch.from_numpy(np.array(vector)),
        eigenvalue_witness=None if positive_eigenvalues else torch.from_numpy(np.array(eigen.vector)),
        method=method if method == eigen.method else f"{method}, {eigen.method}",
    )


@dataclass(frozen=True, eq=False)
class NTKAnalysis(Properties):
    """The matrix M of a clipping style at one point: H, H C or sum_r H_r C_r, with dL/dt = -(dL/df) M (dL/df)^T.

    Its symmetry and positivity are those of `Properties`: where x^T M x >= 0 for every x, the loss cannot rise.
    """

    matrix: Tensor
    """M, of shape (nK, nK), samples first."""
    loss: float
    loss_rate: float
    """dL/dt by the formula above (equations 4.3 and 4.4)."""
    factors: Tensor | dict[str, Tensor]
    """The factors C_i, (n,); for a style with groups, of each group."""
    output_gradient: Tensor
    """dL/df, (nK,)."""
    clip: Style

    @property
    def fraction_clipped(self) -> float:
        """The fraction of factors below 1."""
        parts = [self.factors] if isinstance(self.factors, Tensor) else list(self.factors.values())
        return float((torch.cat(parts) < 1).double().mean())


def _refuse_other_ways(loss_fn: LossFunction, outputs: Tensor, y: Any, weights: dict[str, Tensor]) -> None:
    """The formula knows the loss by its outputs alone: a loss that sees the weights beside them is refused."""
    beside = loss_fn(outputs.detach(), y)
    if not beside.requires_grad:
        return
    found = torch.autograd.grad(beside.sum(), list(weights.values()), allow_unused=True)
    if any(part is not None for part in found):
        raise InvalidLosses(
            "the losses depend on the weights in other ways than through the outputs (a penalty on the weights?), of "
            "which the kernel knows nothing. Leave that part out of loss_fn."
        )


def analyse(
    model: nn.Module,
    loss_fn: LossFunction,
    x: Inputs,
    y: Any,
    clip: Rule | Clip,
    *,
    route: Route | None = None,
    block: int = 128,
    tolerance: float | None = None,
) -> NTKAnalysis:
    """What a clipping rule or style makes of the tangent kernel at the model's present weights.

    `loss_fn(outputs, y)` gives per-sample losses; L is their mean. `route` and `block` are as for `kernel`, `tolerance`
    as for `properties`. The model is run in evaluation mode and left as it was.

    >>> from clipwise.clipping import Abadi, Layerwise, NoClip
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    >>> x, y = torch.randn(4, 2).double(), torch.randn(4).double()
    >>> loss = lambda outputs, y: (outputs.squeeze(1) - y).square()
    >>> for clip in (NoClip(), Abadi(0.1), Layerwise(Abadi(0.1))):
    ...     found = analyse(model, loss, x, y, clip)
    ...     print(found.symmetric, found.positive_quadratic, found.positive_eigenvalues)
    True True True
    False False True
    False False True
    """
    style, weights = as_style(clip), trainable(model)
    sample_count(x)
    with evaluating(model):
        outputs = call(model, x)
        losses = sample_losses(loss_fn, outputs, y)
        refuse_not_finite(losses)
        gradient = output_gradient(losses, outputs).detach()
        _, factors = clipped_sum(losses, weights, style)
        _refuse_other_ways(loss_fn, outputs, y, weights)
    if isinstance(style, Flat):
        H = kernel(model, x, route=route, block=block)
        columns = factors[""].to(H.dtype).repeat_interleave(len(H) // len(losses))
        matrix = H * columns
        found = product_properties(H, columns, matrix, tolerance=tolerance)
    else:
        groups = style.groups(weights)
        matrix = clipped_kernel(model, x, groups, factors, route=route, block=block)
        found = properties(matrix, tolerance=tolerance)
    slope = gradient.to(matrix.dtype)
    return NTKAnalysis(
        matrix=matrix,
        **vars(found),
        loss=float(losses.detach().double().mean()),
        loss_rate=-float(slope.double() @ (matrix @ slope).double()),
        factors=factors[""] if isinstance(style, Flat) else factors,
        output_gradient=gradient,
        clip=style,
    )
