"""Steps on one device while another is the default: a tensor made without a device would end there.

No GPU is at hand where these tests run. The meta device stands for it: whoever reads a number from there fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.mechanisms import ProjectedNorms
from tests.core.common import sgd

N = 48


class Reads(TorchDispatchMode):
    """Counts what makes the processor wait for a device."""

    WAITING = ("_local_scalar_dense", "_unique2", "bincount", "equal", "masked_select", "nonzero", "unique_dim")

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.__name__.split(".")[0]
        self.counts[name] += name in self.WAITING
        return func(*args, **(kwargs or {}))


class Reader(nn.Module):
    """A transformer of one layer; it has six linear maps, some of whose norms come from Gram matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 3)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.embed(tokens)).mean(1))
        return out


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


class Bert(nn.Module):
    """Padding in its table of words; so wide that the norms of all twelve inner maps come from Gram matrices."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        self.bert = BertForSequenceClassification(
            BertConfig(vocab_size=50, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
                       max_position_embeddings=16, num_labels=3)
        )  # fmt: skip

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.bert(tokens).logits
        return logits


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(N, 8)),
    "cnn": (cnn, lambda: torch.randn(N, 1, 8, 8)),
    "transformer": (Reader, lambda: torch.randint(50, (N, 7))),
    "bert": (Bert, lambda: torch.randint(50, (N, 12))),
    "lstm": (lambda: Last(), lambda: torch.randn(N, 5, 8)),
}
MOST = 2  # whether all norms are finite and none is in doubt; and the check of the rule, always on the processor


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(x)[1][0][-1])
        return out


def plan(**changes: Any) -> cw.Plan:
    settings = {"sampling": cw.Poisson(N, 16), "steps": 8, "clip": cw.Abadi(1.0), "noise_multiplier": 1.0}
    return cw.Plan(**{**settings, **changes})


@pytest.mark.parametrize("name", MODELS)
def test_a_run_needs_no_default_device_and_waits_seldom(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr("clipwise.engine.lengths.is_waited_for", lambda tensor: True)  # as away from the processor
    build, inputs = MODELS[name]
    model = build()
    private = cw.Private(plan(), model, sgd(model))
    for x, y in private.loader(TensorDataset(inputs(), torch.randint(3, (N,)))):
        with torch.device("meta"):
            losses = F.cross_entropy(model(x), y, reduction="none")
            if private.steps_done == 7:  # nothing is planned or watched any more
                with Reads() as reads:
                    private.step(losses)
                assert 0 < sum(reads.counts.values()) <= MOST
            else:
                private.step(losses)
    assert private.ledger.steps == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"clip": cw.Layerwise(cw.Abadi(1.0))},
        {"clip": cw.AdaptiveClip(1.0, quantile=0.5, floor=0.1)},
        {"sampling": cw.CyclicPoisson(N, 8, bands=3), "correlation": cw.Banded(3)},
        {"mechanism": ProjectedNorms(4)},
    ],
)
def test_other_plans_need_none_either(changes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = mlp()

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    private = cw.Private(plan(**changes), model, sgd(model), loss_fn=loss_fn)
    for batch in private.loader(TensorDataset(torch.randn(N, 8), torch.randint(3, (N,)))):
        with torch.device("meta"):
            private.step(private.losses(batch))
    assert private.ledger.steps == 8
