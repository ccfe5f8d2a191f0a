"""What is trained: a BERT's last encoder layer, its pooler and a classification head, on the states that enter it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from papers.snli.bert import classifier
from papers.snli.frozen import Choice, Hidden, hidden


class LastLayer(nn.Module):
    """Logits from the states that enter the last encoder layer.

    The pooler reads the first token only, so the others need keys and values and nothing else: the same function as
    the whole layer, at a fraction of its cost.
    """

    def __init__(self, bert: Any) -> None:
        super().__init__()
        self.layer = bert.bert.encoder.layer[-1]
        self.pooler = bert.bert.pooler
        self.dropout = bert.dropout
        self.classifier = bert.classifier
        self.heads = int(bert.config.num_attention_heads)

    def forward(self, hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        attention = self.layer.attention
        first_BSD = hidden_BTD[:, :1]
        query, key, value = (
            part(states).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part, states in (
                (attention.self.query, first_BSD),
                (attention.self.key, hidden_BTD),
                (attention.self.value, hidden_BTD),
            )
        )
        scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[3])
        shares = scores.masked_fill(~mask_BT[:, None, None, :], -torch.inf).softmax(dim=3)
        seen = (attention.self.dropout(shares) @ value).transpose(1, 2).flatten(2)
        after = attention.output(seen, first_BSD)
        states = self.layer.output(self.layer.intermediate(after), after)
        logits: Tensor = self.classifier(self.dropout(self.pooler(states)))
        return logits


class FromCache(nn.Module):
    """`LastLayer` for records that are named by their places in the cache, padded per batch."""

    def __init__(self, top: LastLayer, states: Hidden) -> None:
        super().__init__()
        self.top, self.states = top, states

    def forward(self, places_B4: Tensor) -> Tensor:
        device = self.top.classifier.weight.device
        logits: Tensor = self.top(*(tensor.to(device) for tensor in self.states.batch(places_B4.cpu())))
        return logits


def network(**options: Any) -> nn.Module:
    """The function that `[model]` names."""
    states = hidden(Choice(**options))
    bert = classifier(states.weights.folder, len(states.text.classes))
    return FromCache(LastLayer(bert), states)
