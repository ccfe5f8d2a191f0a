"""The kernel by every route, in blocks of every size, against one backward pass per row of the Jacobian.

Facts A.1 to A.4 of the paper, with the erratum of A.4, and the properties of any matrix.
"""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import clipwise as cw
from clipwise.errors import DataError, NotSeparable, UnsupportedNode
from clipwise.ntk import kernels
from clipwise.ntk.analysis import product_properties
from tests.ntk.common import MODELS, Opaque, Tied, Transformer, TwoHeads, gap, inputs, plain_jacobian


def plain_kernel(model: nn.Module, x: Tensor) -> Tensor:
    J = torch.cat(list(plain_jacobian(model, x).values()), 1)
    return J @ J.T


@pytest.mark.parametrize("route", ["gram", "jacobian"])
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_kernel_is_the_jacobian_product(kind: str, outputs: int, route: kernels.Route) -> None:
    torch.manual_seed(1)
    model, x = MODELS[kind](outputs).double(), inputs(kind, 6)
    H = cw.ntk.kernel(model, x, route=route)
    assert H.shape == (6 * outputs, 6 * outputs) and not H.requires_grad
    assert gap(H, plain_kernel(model, x)) < 1e-10


@pytest.mark.parametrize("kind", MODELS)
def test_layer_kernels_are_those_of_the_layers_and_add_up(kind: str) -> None:
    torch.manual_seed(2)
    model, x = MODELS[kind](2).double(), inputs(kind, 5)
    layers = cw.ntk.layer_kernels(model, x)
    expected: dict[str, Tensor] = {}
    for name, rows in plain_jacobian(model, x).items():
        layer = name.rpartition(".")[0]
        expected[layer] = expected.get(layer, torch.zeros_like(rows @ rows.T)) + rows @ rows.T
    assert layers.keys() == expected.keys()
    assert all(gap(layers[layer], expected[layer]) < 1e-10 for layer in layers)
    assert gap(sum(layers.values()), cw.ntk.kernel(model, x)) < 1e-10


@pytest.mark.parametrize("held", [0, 1 << 30], ids=["computed again", "held"])
@pytest.mark.parametrize("block", [1, 2, 4, 100])
@pytest.mark.parametrize("route", ["gram", "jacobian"])
@pytest.mark.parametrize("kind", MODELS)
def test_blocks_make_no_difference(
    kind: str, route: kernels.Route, block: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_HELD_BYTES", held)
    torch.manual_seed(3)
    model, x = MODELS[kind](2).double(), inputs(kind, 5)
    assert gap(cw.ntk.kernel(model, x, route=route, block=block), plain_kernel(model, x)) < 1e-10


@pytest.mark.parametrize("model", [Tied(), TwoHeads()], ids=["tied", "two heads"])
def test_parameters_with_several_uses_or_few_outputs(model: nn.Module) -> None:
    torch.manual_seed(4)
    model = model.double()
    x = torch.randint(0, 7, (5, 6)) if isinstance(model, Tied) else torch.randn(5, 3, dtype=torch.float64)
    for route in ("gram", "jacobian"):
        assert gap(cw.ntk.kernel(model, x, route=route, block=3), plain_kernel(model, x)) < 1e-10  # type: ignore[arg-type]


def test_one_sample() -> None:
    model, x = MODELS["cnn"](2).double(), inputs("cnn", 1)
    assert gap(cw.ntk.kernel(model, x), plain_kernel(model, x)) < 1e-10


def test_clipped_kernel_is_the_sum_of_products() -> None:
    torch.manual_seed(5)
    model, x = MODELS["mlp"](3).double(), inputs("mlp", 5)
    groups = {"0": ["0.weight", "0.bias"], "2": ["2.weight", "2.bias"]}
    factors = {group: torch.rand(5, dtype=torch.float64) for group in groups}
    layers = cw.ntk.layer_kernels(model, x)
    expected = sum(layers[group] @ torch.diag(factors[group].repeat_interleave(3)) for group in groups)
    assert gap(cw.ntk.clipped_kernel(model, x, groups, factors, block=2), expected) < 1e-12


def test_inputs_may_be_several_tensors() -> None:
    class TwoInputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.layer(a * b)

    model, a, b = TwoInputs().double(), torch.randn(4, 3).double(), torch.randn(4, 3).double()
    expected = plain_kernel(model.layer, a * b)
    for x in ((a, b), {"a": a, "b": b}):
        for route in ("gram", "jacobian"):
            assert gap(cw.ntk.kernel(model, x, route=route, block=3), expected) < 1e-10  # type: ignore[arg-type]


def test_model_is_left_as_it_was() -> None:
    torch.manual_seed(6)
    model, x = Transformer(2).double(), inputs("transformer", 4)
    model.train()
    model.encoder.dropout.eval()
    modes = [module.training for module in model.modules()]
    before = {name: p.clone() for name, p in model.state_dict().items()}
    first, second = cw.ntk.kernel(model, x), cw.ntk.kernel(model, x)
    assert torch.equal(first, second), "dropout is off"
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_frozen_parameters_do_not_count() -> None:
    model, x = MODELS["mlp"](1).double(), inputs("mlp", 4)
    model[0].requires_grad_(False)
    assert gap(cw.ntk.kernel(model, x), cw.ntk.kernel(model[2], model[1](model[0](x)))) < 1e-12


def test_falls_back_to_torch_func_where_the_engine_has_no_rule() -> None:
    model, x = Opaque().double(), torch.randn(4, 3, dtype=torch.float64)
    with pytest.raises(UnsupportedNode):
        cw.ntk.kernel(model, x, route="gram")
    assert gap(cw.ntk.kernel(model, x), plain_kernel(model, x)) < 1e-10


def test_samples_that_mix_are_refused() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) - self.layer(x).mean(0)

    for route in ("gram", "jacobian"):
        with pytest.raises(NotSeparable):
            cw.ntk.kernel(Mixing(), torch.randn(5, 3), route=route)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cw.ntk.kernel(nn.Linear(2, 1), torch.randn(3, 2), route="fast"), "route"),  # type: ignore[arg-type]
        (lambda: cw.ntk.kernel(nn.Linear(2, 1), torch.randn(3, 2), block=0), "block"),
        (lambda: cw.ntk.kernel(nn.Linear(2, 1).requires_grad_(False), torch.randn(3, 2)), "no trainable parameter"),
        (lambda: cw.ntk.kernel(nn.Linear(2, 1), torch.randn(0, 2)), "samples"),
        (lambda: cw.ntk.kernel(nn.Linear(2, 1), (torch.randn(2, 2), torch.randn(3, 2))), "same number of samples"),
        (lambda: cw.ntk.kernel(nn.Linear(2, 1), []), "x must be"),
        (lambda: cw.ntk.kernel(nn.LSTM(2, 2), torch.randn(3, 2, 2)), "logits"),
        (lambda: cw.ntk.kernel(nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)), torch.randn(3, 4, 2)), "first axis"),
    ],
)
def test_what_makes_no_sense_is_refused(call: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        call()  # type: ignore[operator]


def matrix(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def spd(size: int, seed: int) -> Tensor:
    A = torch.randn(size, size + 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return A @ A.T


def factors(size: int, seed: int) -> Tensor:
    return 0.01 + torch.rand(size, generator=torch.Generator().manual_seed(1000 + seed), dtype=torch.float64)


# -- the facts


def test_fact_a1_example() -> None:
    A = matrix([[1.0, 1.0], [1.0, 2.0]]) @ torch.diag(matrix([[1.0, 0.1]])[0])
    assert torch.allclose(A, matrix([[1.0, 0.1], [1.0, 0.2]]))
    x = matrix([[1.0, -2.0]])[0]
    assert float(x @ A @ x) == pytest.approx(-0.4)
    found = cw.ntk.properties(A)
    assert (found.symmetric, found.positive_quadratic, found.positive_eigenvalues) == (False, False, True)


@given(size=st.integers(1, 8), seed=st.integers(0, 10_000))
def test_fact_a1_products_are_positive_in_eigenvalues(size: int, seed: int) -> None:
    """H C has the eigenvalues of C^(1/2) H C^(1/2), and is symmetric for a constant C only."""
    H, c = spd(size, seed), factors(size, seed)
    found = cw.ntk.properties(H * c)
    assert found.positive_eigenvalues and found.min_eigenvalue > 0
    expected = float(torch.linalg.eigvalsh(H * c.sqrt() * c.sqrt()[:, None])[0])
    assert found.min_eigenvalue == pytest.approx(expected, rel=1e-6, abs=1e-12)
    assert found.symmetric == (size == 1)
    assert cw.ntk.properties(0.3 * H).symmetric


def test_fact_a2_positive_eigenvalues_without_quadratic_form() -> None:
    found = cw.ntk.properties(matrix([[-1.0, 3.0], [-3.0, 8.0]]))
    assert found.positive_eigenvalues and found.min_eigenvalue == pytest.approx(0.5 * (7 - 3 * 5**0.5))
    assert not found.positive_quadratic and found.quadratic_witness is not None
    assert float(found.quadratic_witness.abs() @ matrix([[1.0, 0.0]])[0]) == pytest.approx(1.0)


def test_fact_a3_quadratic_form_without_real_eigenvalues() -> None:
    found = cw.ntk.properties(matrix([[1.0, 1.0], [-1.0, 1.0]]))
    assert found.positive_quadratic and found.min_quadratic == pytest.approx(1.0)
    assert not found.positive_eigenvalues
    assert (found.min_eigenvalue, found.max_imaginary) == pytest.approx((1.0, 1.0))


@given(seed=st.integers(0, 10_000), size=st.integers(1, 6))
def test_fact_a3_real_parts_are_positive(seed: int, size: int) -> None:
    """Where the quadratic form is positive, every eigenvalue has a positive real part."""
    twist = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    A = spd(size, seed) + 5 * (twist - twist.T)
    found = cw.ntk.properties(A)
    assert found.positive_quadratic and found.min_eigenvalue > 0


def fact_a4(corner: float) -> Tensor:
    first = matrix([[corner, 2.0], [2.0, 7.0]]) @ torch.diag(matrix([[0.9, 0.4]])[0])
    return first + matrix([[3.0, 2.0], [2.0, 2.0]]) @ torch.diag(matrix([[0.1, 0.6]])[0])


def test_fact_a4_as_printed_has_no_zero_eigenvalue() -> None:
    """Erratum: with the printed 8/9 the sum is [[1.1, 2], [2, 4]] with determinant 0.4."""
    A = fact_a4(8 / 9)
    assert torch.allclose(A, matrix([[1.1, 2.0], [2.0, 4.0]]))
    found = cw.ntk.properties(A)
    assert found.positive_eigenvalues and found.min_eigenvalue > 0.07


def test_fact_a4_holds_for_seven_ninths() -> None:
    A = fact_a4(7 / 9)
    assert torch.allclose(A, matrix([[1.0, 2.0], [2.0, 4.0]]))
    assert cw.ntk.properties(A).min_eigenvalue == pytest.approx(0.0, abs=1e-12)
    assert float(torch.linalg.eigvalsh(matrix([[7 / 9, 2.0], [2.0, 7.0]]))[0]) > 0, "H_1 is still positive definite"


def test_fact_a4_second_claim() -> None:
    found = cw.ntk.properties(fact_a4(0.7))
    assert not found.positive_eigenvalues and found.min_eigenvalue < 0
    assert float(torch.linalg.eigvalsh(matrix([[0.7, 2.0], [2.0, 7.0]]))[0]) > 0


# -- witnesses and tolerances


@pytest.mark.parametrize("seed", range(5))
def test_witnesses_show_what_they_witness(seed: int) -> None:
    A = torch.randn(7, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = cw.ntk.properties(A)
    assert found.asymmetry_witness is not None
    i, j = found.asymmetry_witness
    assert abs(float(A[i, j] - A[j, i])) == found.asymmetry == float((A - A.T).abs().max())
    x = found.quadratic_witness
    assert x is not None and float(x @ A @ x) == pytest.approx(found.min_quadratic) and found.min_quadratic < 0
    v = found.eigenvalue_witness
    assert v is not None
    value = torch.vdot(v, A.to(v.dtype) @ v)
    assert torch.allclose(A.to(v.dtype) @ v, value * v, atol=1e-9)
    assert value.real < -found.tolerance or abs(value.imag) > found.tolerance


def test_witness_of_a_product_is_an_eigenvector_of_it() -> None:
    H = spd(5, 1) - 8 * torch.eye(5, dtype=torch.float64)  # no kernel: it has negative eigenvalues
    c = factors(5, 1)
    found = product_properties(H, c, H * c)
    v = found.eigenvalue_witness
    assert v is not None and not found.positive_eigenvalues
    product = (H * c).to(v.dtype) @ v
    assert torch.allclose(product, found.min_eigenvalue * v, atol=1e-9)


def test_tolerance_is_stated_and_used() -> None:
    A = torch.diag(matrix([[1.0, -1e-12]])[0])
    assert cw.ntk.properties(A).positive_quadratic
    assert cw.ntk.properties(A).tolerance == pytest.approx(1e-10)
    assert not cw.ntk.properties(A, tolerance=1e-13).positive_quadratic
    assert cw.ntk.properties(A.float()).tolerance == pytest.approx(1e-5)


def test_all_ticks_have_no_witness() -> None:
    found = cw.ntk.properties(spd(4, 0))
    assert found.symmetric and found.positive_quadratic and found.positive_eigenvalues
    assert found.asymmetry_witness is found.quadratic_witness is found.eigenvalue_witness is None
    assert "symmetric: yes" in str(found)


# -- large matrices, by iteration


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_iterations_agree_with_the_whole_spectrum(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    H, c = spd(120, 3).to(dtype), factors(120, 3).to(dtype)
    twisted = H * c + 3 * torch.randn(120, 120, generator=torch.Generator().manual_seed(9)).to(dtype)
    dense = [product_properties(H, c, H * c), cw.ntk.properties(twisted), cw.ntk.properties(H)]
    monkeypatch.setattr(sys.modules["clipwise.ntk.analysis"], "DENSE_LIMIT", 50)
    iterated = [product_properties(H, c, H * c), cw.ntk.properties(twisted), cw.ntk.properties(H)]
    assert [found.method for found in iterated] == ["lanczos", "lanczos, arnoldi", "lanczos"]
    scale = float(H.norm())
    for a, b in zip(dense, iterated, strict=True):
        assert (a.symmetric, a.positive_quadratic, a.positive_eigenvalues) == (
            b.symmetric, b.positive_quadratic, b.positive_eigenvalues,
        )  # fmt: skip
        assert b.min_quadratic == pytest.approx(a.min_quadratic, abs=1e-5 * scale)
        assert b.min_eigenvalue == pytest.approx(a.min_eigenvalue, abs=1e-5 * scale)
        assert b.max_imaginary == pytest.approx(a.max_imaginary, abs=1e-5 * scale)


@pytest.mark.parametrize("bad", [torch.ones(2, 3), torch.ones(3), torch.empty(0, 0), torch.tensor([[float("nan")]])])
def test_what_is_no_square_matrix_is_refused(bad: Tensor) -> None:
    with pytest.raises(DataError):
        cw.ntk.properties(bad)
