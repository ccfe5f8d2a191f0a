"""The table of operations: every rule has an example here, and every example agrees with the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.engine import check, per_sample_gradients
from clipwise.engine.node import COMPILED, IN_PLACE_WRITE, RECURRENCE
from clipwise.engine.ops import OPS, TABLE

from .reference import flat, loop_gradients, norms_of, relative_errors

Program: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # a parameter and data (B, 3) -> values, samples first
FIRST = torch.tensor([0, 1])
ONES = torch.arange(1.0, 7.0, dtype=torch.float64).view(2, 3)


def tokens(x: Tensor) -> Tensor:
    return (3 * x).long().clamp(max=4)


def pairs(x: Tensor) -> Tensor:
    """(B, 3) -> (2, B, 3)"""
    return torch.stack([x, x.square()])


def slope(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The derivative of a function, as in a gradient penalty."""
    x = x.requires_grad_()
    return torch.autograd.grad(function(x).square().sum(), x, create_graph=True)[0]


def written(w: Tensor, x: Tensor) -> Tensor:
    out = x.clone()
    out[:2] = w
    return out


def twice(x: Tensor) -> Tensor:
    """(B, 3) -> (2 B, 3), two rows for every sample."""
    return pairs(x).transpose(0, 1).reshape(-1, 3)


def images(x: Tensor) -> Tensor:
    """(B, 3) -> (B, 4, 3, 3)"""
    return torch.stack([x.unsqueeze(2) ** k * x.unsqueeze(1) for k in range(4)], 1)


def half_of(x: Tensor, w: Tensor) -> Tensor:
    """The data with its second column equal to the parameter's: a tie."""
    return torch.stack([x[:, 0], w.detach()[1].expand(len(x)), x[:, 2]], 1)


def one_by_one(join: Callable[[list[Tensor]], Tensor]) -> Program:
    """A loop over samples, as in code that was written for one."""
    return lambda w, x: torch.cat([join([row, w]).square().sum().view(1) for row in x]).unsqueeze(1)


# name -> shape of the parameter, program
EXAMPLES: dict[str, tuple[tuple[int, ...], Program]] = {
    "MmBackward0": ((3, 2), lambda w, x: x @ w),
    "BmmBackward0": ((2, 3, 2), lambda w, x: torch.bmm(pairs(x), w).transpose(0, 1)),
    "AddmmBackward0": ((3, 2), lambda w, x: torch.addmm(x[:, :2], x, w, alpha=2)),
    "BaddbmmBackward0": ((2, 3, 2), lambda w, x: torch.baddbmm(pairs(x)[..., :2], pairs(x), w).transpose(0, 1)),
    "MvBackward0": ((3,), lambda w, x: torch.mv(x, w).unsqueeze(1)),
    "AddmvBackward0": ((3,), lambda w, x: torch.addmv(x[:, 0], x, w).unsqueeze(1)),
    "ConvolutionBackward0": ((2, 1, 2), lambda w, x: F.conv1d(x.unsqueeze(1), w)),
    "ConvolutionBackwardBackward0": ((2, 1, 2), lambda w, x: slope(lambda y: F.conv1d(y.unsqueeze(1), w), x)),
    "NativeLayerNormBackward0": ((3,), lambda w, x: F.layer_norm(x, (3,), w)),
    "NativeGroupNormBackward0": ((3,), lambda w, x: F.group_norm(pairs(x).permute(1, 2, 0), 3, w)),
    "NativeBatchNormBackward0": ((3,), lambda w, x: F.batch_norm(x, x.new_ones(3), x.new_ones(3), w)),
    "NativeLayerNormBackwardBackward0": ((3,), lambda w, x: slope(lambda y: F.layer_norm(y, (3,), w), x)),
    "EmbeddingBackward0": ((5, 2), lambda w, x: F.embedding(tokens(x), w)),
    "EmbeddingBagBackward0": ((5, 2), lambda w, x: F.embedding_bag(tokens(x), w)),
    "IndexBackward0": ((5, 2), lambda w, x: w[tokens(x)]),
    "IndexSelectBackward0": ((5, 2), lambda w, x: w.index_select(0, tokens(x)[:, 0])),
    "GatherBackward0": ((5, 3), lambda w, x: w.gather(0, tokens(x))),
    "TakeBackward0": ((5,), lambda w, x: w.take(tokens(x))),
    "IndexAddBackward0": ((2, 3), lambda w, x: x.index_add(0, FIRST, w)),
    "IndexCopyBackward0": ((2, 3), lambda w, x: x.index_copy(0, FIRST, w)),
    "IndexPutBackward0": ((2, 3), lambda w, x: x.index_put((FIRST,), w)),
    "MaskedScatterBackward0": ((30,), lambda w, x: x.masked_scatter(x > 1, w)),
    "ScatterAddBackward0": ((2, 3), lambda w, x: x.scatter_add(0, tokens(x[:2]).clamp(max=2), w)),
    "ScatterBackward0": ((2, 3), lambda w, x: x.scatter(0, FIRST.unsqueeze(1).expand(2, 3), w)),
    IN_PLACE_WRITE: ((2, 3), written),
    "CatBackward0": ((2,), one_by_one(torch.cat)),
    "StackBackward0": ((3,), one_by_one(torch.stack)),
    "ConstantPadNdBackward0": ((1, 3), lambda w, x: F.pad(w, (0, 0, 0, len(x) - 1)) + x),
    "RepeatBackward0": ((3,), lambda w, x: w.repeat(len(x), 1) * x),
    "ExpandBackward0": ((3,), lambda w, x: w.expand_as(x) * x),
    "AddBackward0": ((3,), lambda w, x: torch.add(x, w, alpha=2)),
    "SubBackward0": ((3,), lambda w, x: torch.sub(x, w, alpha=2)),
    "RsubBackward0": ((3,), lambda w, x: torch.rsub(w, x, alpha=2)),
    "MulBackward0": ((3,), lambda w, x: x * w),
    "DivBackward0": ((3,), lambda w, x: x / w),
    "WhereBackward0": ((3,), lambda w, x: torch.where(x > 1, x, w)),
    "MaskedFillBackward1": ((), lambda w, x: x.masked_fill(x > 1, w)),
    "PreluKernelBackward0": ((3,), lambda w, x: F.prelu(x - 1, w)),
    "LerpBackward0": ((3,), lambda w, x: torch.lerp(x, w, 0.3)),
    "LerpBackward1": ((3,), lambda w, x: torch.lerp(x, 2 * x, w)),
    "AddcmulBackward0": ((3,), lambda w, x: torch.addcmul(x, x, w, value=2)),
    "PowBackward1": ((3,), lambda w, x: x**w),
    "MaximumBackward0": ((3,), lambda w, x: torch.maximum(x, w)),
    "MinimumBackward0": ((3,), lambda w, x: torch.minimum(x, w)),
    "AddcdivBackward0": ((3,), lambda w, x: torch.addcdiv(x, x, w)),
    "Atan2Backward0": ((3,), lambda w, x: torch.atan2(x, w)),
    "ClampBackward0": ((3,), lambda w, x: x.clamp(w, w + 0.5)),
    "ClampMaxBackward1": ((3,), lambda w, x: x.clamp_max(w)),
    "ClampMinBackward1": ((3,), lambda w, x: x.clamp_min(w)),
    "CopysignBackward0": ((3,), lambda w, x: torch.copysign(w, x - 1)),
    "XlogyBackward0": ((3,), lambda w, x: torch.xlogy(x, w)),
    "FmaxBackward0": ((3,), lambda w, x: torch.fmax(x, w)),
    "FminBackward0": ((3,), lambda w, x: torch.fmin(x, w)),
    "HypotBackward0": ((3,), lambda w, x: torch.hypot(x, w)),
    "LogaddexpBackward0": ((3,), lambda w, x: torch.logaddexp(x, w)),
    "RemainderBackward1": ((3,), lambda w, x: torch.remainder(3 * x, w)),
    "CdistBackward0": ((4, 3), lambda w, x: torch.cdist(x, w)),
    "TrilinearBackward0": ((2, 3, 3), lambda w, x: F.bilinear(x, x, w)),
}  # fmt: skip
FURTHER: dict[str, tuple[str, tuple[int, ...], Program]] = {
    "two rows of a sample": ("MvBackward0", (3,), lambda w, x: torch.mv(twice(x), w).view(len(x), 2)),
    "roots of zeros": ("PowBackward1", (3,), lambda w, x: (x * torch.tensor([1.0, 0.0, 0.0])) ** (w / 2)),
    "two axes repeated": ("RepeatBackward0", (2, 3), lambda w, x: w.repeat(len(x), 2, 2) * x.repeat(1, 2).unsqueeze(1)),
    # Products: the other factor, scaled, with what is added, several rows of a sample.
    "left factor": ("MmBackward0", (2, 3), lambda w, x: (w @ x.T).T),
    "rows of a product": ("MmBackward0", (3, 2), lambda w, x: (twice(x) @ w).view(len(x), 4)),
    "columns of a product": ("MmBackward0", (2, 3), lambda w, x: (w @ twice(x).T).view(2, len(x), 2).transpose(0, 1)),
    "left factors": ("BmmBackward0", (2, 2, 3), lambda w, x: torch.bmm(w, pairs(x).mT).permute(2, 0, 1)),
    "one stack": ("BmmBackward0", (1, 3, 2), lambda w, x: torch.bmm(x.unsqueeze(0), w)[0]),
    "scaled factor": ("AddmmBackward0", (2, 3), lambda w, x: torch.addmm(ONES[:, :1], w, x.T, alpha=3).T),
    "scaled rows": ("AddmmBackward0", (3, 2), lambda w, x:
        torch.addmm(ONES[0, :2], twice(x), w, alpha=3).view(len(x), 4)),
    "added to a product": ("AddmmBackward0", (2,), lambda w, x: torch.addmm(w, x, ONES.T, beta=3).square()),
    "added as it is": ("AddmmBackward0", (2,), lambda w, x: torch.addmm(w, x, ONES.T)),
    "added to rows": ("AddmmBackward0", (1, 2), lambda w, x: torch.addmm(w, twice(x), ONES.T).view(len(x), 4)),
    "scaled stacks": ("BaddbmmBackward0", (2, 3, 2), lambda w, x:
        torch.baddbmm(pairs(x)[..., :2], pairs(x), w, alpha=3).transpose(0, 1)),
    "scaled left stacks": ("BaddbmmBackward0", (2, 2, 3), lambda w, x:
        torch.baddbmm(ONES.view(2, 3, 1)[:, :2], w, pairs(x).mT, alpha=3).permute(2, 0, 1)),
    "added to stacks": ("BaddbmmBackward0", (2, 1, 2), lambda w, x:
        torch.baddbmm(w, pairs(x), ONES.T.expand(2, 3, 2), beta=3).transpose(0, 1)),
    "scaled vector": ("AddmvBackward0", (3,), lambda w, x: torch.addmv(x[:, 0], x, w, alpha=3).unsqueeze(1)),
    "added to a vector": ("AddmvBackward0", (1,), lambda w, x: torch.addmv(w, x, ONES[0], beta=3).unsqueeze(1)),
    # Element by element: each operand in each place.
    "first summand": ("AddBackward0", (3,), lambda w, x: torch.add(w, x, alpha=2)),
    "added as one": ("AddBackward0", (3,), lambda w, x: x + w),
    "subtracted from": ("SubBackward0", (3,), lambda w, x: torch.sub(w, x, alpha=2)),
    "reversed": ("RsubBackward0", (3,), lambda w, x: torch.rsub(x, w, alpha=2)),
    "first factor": ("MulBackward0", (3,), lambda w, x: w * x),
    "numerator": ("DivBackward0", (3,), lambda w, x: w / x),
    "where true": ("WhereBackward0", (3,), lambda w, x: torch.where(x > 1, w, x)),
    "what is filled": ("MaskedFillBackward1", (3,), lambda w, x: w.masked_fill(x > 1, torch.tensor(0.5).double())),
    "from": ("LerpBackward0", (3,), lambda w, x: torch.lerp(w, x, 0.3)),
    "from, by the data": ("LerpBackward1", (3,), lambda w, x: torch.lerp(w, x, x / 3)),
    "to, by the data": ("LerpBackward1", (3,), lambda w, x: torch.lerp(x, w, x / 3)),
    "added to products": ("AddcmulBackward0", (3,), lambda w, x: torch.addcmul(w, x, x, value=2)),
    "first of a product": ("AddcmulBackward0", (3,), lambda w, x: torch.addcmul(x, w, x, value=2)),
    "base": ("PowBackward1", (3,), lambda w, x: w**x),
    "larger of equals": ("MaximumBackward0", (3,), lambda w, x: torch.maximum(w, half_of(x, w))),
    "smaller of equals": ("MinimumBackward0", (3,), lambda w, x: torch.minimum(half_of(x, w), w)),
    "larger, second": ("MaximumBackward0", (3,), lambda w, x: torch.maximum(half_of(x, w), w)),
    "a slope for all": ("PreluKernelBackward0", (1,), lambda w, x: F.prelu(x - 1, w)),
    "a number": ("MulBackward0", (), lambda w, x: x * w),
    "over positions": ("MulBackward0", (2, 1), lambda w, x: pairs(x).transpose(0, 1) * w),
    "over samples inside": ("AddBackward0", (2, 1, 3), lambda w, x: (pairs(x) + w).transpose(0, 1)),
    "two rows of a sample each": ("AddBackward0", (3,), lambda w, x: (twice(x) + w).view(len(x), 6)),
    "expanded inside": ("ExpandBackward0", (2, 1, 3), lambda w, x: (w.expand(2, len(x), 3) * pairs(x)).transpose(0, 1)),
    # Normalization.
    "shift of a layer norm": ("NativeLayerNormBackward0", (3,), lambda w, x: F.layer_norm(x, (3,), ONES[0], w)),
    "layer norm inside": ("NativeLayerNormBackward0", (3,), lambda w, x:
        F.layer_norm(pairs(x), (3,), w).transpose(0, 1)),
    "layer norm of two axes": ("NativeLayerNormBackward0", (2, 3), lambda w, x:
        F.layer_norm(pairs(x).transpose(0, 1), (2, 3), w)),
    "shift of a group norm": ("NativeGroupNormBackward0", (3,), lambda w, x:
        F.group_norm(pairs(x).permute(1, 2, 0), 3, ONES[0], w)),
    "group norm, in order": ("NativeGroupNormBackward0", (4,), lambda w, x:
        F.group_norm(images(x).contiguous(), 2, w)),
    "shift of a group norm, in order": ("NativeGroupNormBackward0", (4,), lambda w, x:
        F.group_norm(images(x).contiguous(), 2, torch.ones(4, dtype=x.dtype), w)),
    "group norm of several rows": ("NativeGroupNormBackward0", (4,), lambda w, x:
        F.group_norm(images(twice(x)), 2, w).view(len(x), -1)),
    "batch norm of images": ("NativeBatchNormBackward0", (4,), lambda w, x:
        F.batch_norm(images(x), torch.arange(4.0).double(), torch.arange(1.0, 5.0).double(), w, eps=0.5)),
    "shift of a batch norm": ("NativeBatchNormBackward0", (3,), lambda w, x:
        F.batch_norm(x, ONES[0], ONES[0], ONES[0], w)),
    # Tables.
    "padding": ("EmbeddingBackward0", (5, 2), lambda w, x: F.embedding(tokens(x), w, padding_idx=1)),
    "padding from the end": ("EmbeddingBackward0", (5, 2), lambda w, x: F.embedding(tokens(x), w, padding_idx=-1)),
    "first row as padding": ("EmbeddingBackward0", (5, 2), lambda w, x: F.embedding(tokens(x) // 3, w, padding_idx=0)),
    "looked up inside": ("EmbeddingBackward0", (5, 2), lambda w, x: F.embedding(tokens(x).T, w).transpose(0, 1)),
    "two indices": ("IndexBackward0", (5, 4, 2), lambda w, x: w[tokens(x), tokens(x) - 3]),
    "from the end": ("IndexBackward0", (5, 2), lambda w, x: w[tokens(x) - 5]),
    "bags in sums": ("EmbeddingBagBackward0", (5, 2), lambda w, x: F.embedding_bag(tokens(x), w, mode="sum")),
    "bags of maxima": ("EmbeddingBagBackward0", (5, 2), lambda w, x: F.embedding_bag(tokens(x), w, mode="max")),
    "bags with padding": ("EmbeddingBagBackward0", (5, 2), lambda w, x:
        F.embedding_bag(tokens(x), w, mode="mean", padding_idx=2)),
    "weighted bags": ("EmbeddingBagBackward0", (5, 2), lambda w, x:
        F.embedding_bag(tokens(x), w, mode="sum", per_sample_weights=x)),
    "bags of several lengths": ("EmbeddingBagBackward0", (5, 2), lambda w, x: F.embedding_bag(
        tokens(x).flatten(), w, torch.arange(len(x)).square().clamp(max=3 * len(x)), mode="mean")),
    "maxima of bags, some of them empty": ("EmbeddingBagBackward0", (5, 2), lambda w, x: F.embedding_bag(
        tokens(x).flatten(), w, 3 * (torch.arange(len(x)) // 2), mode="max")),
    "two bags of a sample": ("EmbeddingBagBackward0", (5, 2), lambda w, x:
        F.embedding_bag(tokens(twice(x)), w, mode="sum").view(len(x), 4)),
    # Convolutions.
    "shift of images": ("ConvolutionBackward0", (2,), lambda w, x: F.conv1d(x.unsqueeze(1), ONES.view(2, 1, 3), w)),
    "shift of several images": ("ConvolutionBackward0", (2,), lambda w, x:
        F.conv1d(twice(x).unsqueeze(1), ONES[:, :2].unsqueeze(1), w).view(len(x), -1)),
    "several images": ("ConvolutionBackward0", (2, 1, 2), lambda w, x:
        F.conv1d(twice(x).unsqueeze(1), w, padding=1, stride=2).view(len(x), -1)),
}  # fmt: skip
WITHOUT_EXAMPLE = {
    "GroupedMmBackward0": "experts, in the zoo",
    "LinearBackward0": "made on other devices than the CPU",
    "MkldnnRnnLayerBackward0": "in single precision only: test_recurrent.py",
    "CudnnRnnBackward0": "of a GPU: test_gpu_recurrent.py",
    "MiopenRnnBackward0": "of a GPU: test_gpu_recurrent.py",
    "ThnnFusedGruCellBackward0": "of a GPU: test_gpu_recurrent.py",
    "ThnnFusedLstmCellBackward0": "of a GPU: test_gpu_recurrent.py",
    RECURRENCE: "many nodes of torch: test_packed.py",
    "RollBackward0": "its one operand is shared, or after a meeting",
}


@pytest.mark.parametrize("example", [*EXAMPLES, *FURTHER])
def test_an_operation_agrees_with_the_loop(example: str) -> None:
    """The first batch makes the plan, the others use it."""
    name, shape, program = FURTHER[example] if example in FURTHER else (example, *EXAMPLES[example])
    torch.manual_seed(0)
    w = nn.Parameter(torch.rand(shape, dtype=torch.float64) + 0.5)
    for step in range(3):
        x = torch.rand(4 + step // 2, 3, dtype=torch.float64) + 0.5
        losses = program(w, x).flatten(1).square().sum(1)
        loop = loop_gradients(losses, {"w": w})
        assert name in {node.name for node in check(losses, {"w": w}).nodes}
        error = relative_errors(
            flat(per_sample_gradients(losses, {"w": w})), flat(loop), norms_of(loop), torch.float64
        ).max()
        assert error <= 1e-10, f"step {step}: off by {float(error):.1e}"


def test_every_rule_has_an_example() -> None:
    rules = {name for name, op in OPS.items() if op.rule is not None}
    assert rules == EXAMPLES.keys() | WITHOUT_EXAMPLE.keys()
    assert not EXAMPLES.keys() & WITHOUT_EXAMPLE.keys()


def test_a_name_is_one_row_and_torch_has_it() -> None:
    """A misspelt name would never be met, and the operation be treated as unknown."""
    names = [name for op in TABLE for name in op.names.split()]
    assert len(names) == len(set(names))
    made_in_python = {
        IN_PLACE_WRITE,
        COMPILED,
        RECURRENCE,
    }  # not in C++
    unknown = [name for name in names if not hasattr(torch._C._functions, name) and name not in made_in_python]
    assert not unknown


def test_what_reads_nothing_but_its_input_saves_no_other_tensor() -> None:
    """Views do, and two more; where the batch cannot enter, nobody has to look for it."""
    views = {name for op in TABLE if op.view is not None for name in op.names.split()}
    found = {name for op in TABLE if op.only_input for name in op.names.split()}
    assert found == views | {"AsStridedBackward0", "AsStridedBackward1", "ExpandBackward0"}
    for name in found:
        assert not any(member.startswith("_raw_saved_") for member in dir(getattr(torch._C._functions, name)))
