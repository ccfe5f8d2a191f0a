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

    The pooler reads the first token only, so one query is needed, and keys and values need not be made for every token:
    q (W h + b) = (q W) h + q b, and a mean of W h + b is W times the mean of h, plus b times its weights. The same
    function of the same parameters, at a small part of the cost.
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
        seen_BSD = self._attend(hidden_BTD, mask_BT).unsqueeze(1)
        after_BSD = attention.output(seen_BSD, hidden_BTD[:, :1])
        states_BSD = self.layer.output(self.layer.intermediate(after_BSD), after_BSD)
        logits: Tensor = self.classifier(self.dropout(self.pooler(states_BSD)))
        return logits

    def _attend(self, hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """What the first token gathers from all: the heads' outputs side by side, (B, D)."""
        attention = self.layer.attention.self
        query_BHK = self._heads(attention.query(hidden_BTD[:, 0]), 1)
        asked_BHD = torch.einsum("bhk,hkd->bhd", query_BHK, self._heads(attention.key.weight, 0))
        offset_BH = (query_BHK * self._heads(attention.key.bias, 0)).sum(2)
        scores_BHT = (asked_BHD @ hidden_BTD.transpose(1, 2) + offset_BH[:, :, None]) / math.sqrt(query_BHK.shape[2])
        shares_BHT = scores_BHT.masked_fill(~mask_BT[:, None], -torch.inf).softmax(dim=2)
        shares_BHT = attention.dropout(shares_BHT)
        value_BHK = torch.einsum("bhd,hkd->bhk", shares_BHT @ hidden_BTD, self._heads(attention.value.weight, 0))
        return (value_BHK + shares_BHT.sum(2, keepdim=True) * self._heads(attention.value.bias, 0)).flatten(1)

    def _heads(self, tensor: Tensor, axis: int) -> Tensor:
        return tensor.unflatten(axis, (self.heads, -1))


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
