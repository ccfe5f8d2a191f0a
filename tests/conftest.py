"""Settings of the whole suite: one thread per process, and the warnings of other packages that we cannot act on."""

from __future__ import annotations

import pytest
import torch

# One thread, so that runs are reproducible and several test processes do not fight for the cores.
torch.set_num_threads(1)

NOT_OURS = [
    "ignore:TF32 acceleration on top of oneDNN:UserWarning",  # torch, on any use of torch.backends.mkldnn.flags
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning",  # transformers, on importing DeBERTa
    "ignore:enable_nested_tensor is True:UserWarning",  # torch, on building nn.Transformer(norm_first=True)
]


def pytest_configure(config: pytest.Config) -> None:
    """Warnings are errors, but for these."""
    for line in NOT_OURS:
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture
def fine_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases are rounded, but hardly: for tests that compare a step with a formula, which has no grid."""
    monkeypatch.setattr("clipwise.noise.release.GRID_POINTS", 1 << 46)
