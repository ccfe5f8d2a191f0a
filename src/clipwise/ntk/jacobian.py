"""The Jacobian route: features of a block of samples by `torch.func`, which forms every row df_ik/dw."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from clipwise.errors import NotSeparable
from clipwise.ntk.features import Feature, Rows
from clipwise.ntk.network import Inputs, call, flat_outputs, map_inputs, trainable


def jacobian(model: nn.Module, x: Inputs) -> dict[str, Tensor]:
    """df_ik/dp for every parameter p, {name: (b, K, *p.shape)}.

    Samples are run one at a time (in one batch by `vmap`); a model whose outputs then differ is refused.
    """
    weights = {name: p.detach() for name, p in trainable(model).items()}

    def single(values: dict[str, Tensor], sample: Any) -> tuple[Tensor, Tensor]:
        batch_of_one = map_inputs(sample, lambda part: part.unsqueeze(0))
        outputs = call(lambda *a, **k: functional_call(model, values, a, k), batch_of_one).reshape(-1)
        return outputs, outputs

    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():  # vmap cannot batch the fused attention kernels
        warnings.filterwarnings("ignore", "There is a performance drop")  # and tells where it falls back to a loop
        rows, alone = vmap(jacrev(single, has_aux=True), in_dims=(None, 0))(weights, x)
    together = flat_outputs(model, x).detach()
    tolerance = 1e4 * torch.finfo(together.dtype).eps * (1 + float(together.abs().max()))
    if float((alone - together).abs().max()) > tolerance:
        raise NotSeparable(
            "a sample's output changes with the other samples of the batch, so there is no kernel of samples. Typical "
            "cause: a statistic over the batch."
        )
    return dict(rows)


def jacobian_features(model: nn.Module, x: Inputs) -> tuple[dict[str, Feature], int]:
    """The same, as features, and the number of outputs."""
    rows = jacobian(model, x)
    K = next(iter(rows.values())).shape[1]
    return {name: Rows(part.flatten(2).flatten(0, 1)) for name, part in rows.items()}, K
