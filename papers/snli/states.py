"""What the frozen layers make of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

TOKENS_AT_ONCE = 1024


def states_of(model: torch.nn.Module, tokens: dict[str, Any], part: str, records: Any) -> Any:
    """The float16 states of consecutive records, one after the other; records of like lengths are run together."""
    lengths = tokens[f"{part}_lengths"]
    base = int(lengths[: records[0]].sum())
    counts = lengths[records]
    starts = np.cumsum(counts) - counts
    states = None
    for chosen in _alike(counts):
        longest = int(counts[chosen].max())
        mask = np.arange(longest) < counts[chosen][:, None]
        rows = (starts[chosen][:, None] + np.arange(longest))[mask]
        inputs = []
        for name in ("ids", "types"):
            padded = np.zeros(mask.shape, dtype=np.int64)
            padded[mask] = tokens[f"{part}_{name}"][base + rows]
            inputs.append(torch.from_numpy(padded))
        with torch.inference_mode():
            made = model(
                input_ids=inputs[0], token_type_ids=inputs[1], attention_mask=torch.from_numpy(mask.astype(np.int64))
            ).last_hidden_state
        if states is None:
            states = np.empty((int(counts.sum()), made.shape[2]), dtype=np.float16)
        states[rows] = made.numpy()[mask]
    return states


def _alike(counts: Any) -> Iterator[Any]:
    """Records in groups of like length, each of about `TOKENS_AT_ONCE` tokens."""
    order = np.argsort(counts, kind="stable")
    group: list[int] = []
    for k in order:
        if group and (len(group) + 1) * counts[k] > TOKENS_AT_ONCE:
            yield np.array(group)
            group = []
        group.append(int(k))
    yield np.array(group)
