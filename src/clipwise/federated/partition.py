"""Make users out of a data set, for studies: who holds which records, alike or with few classes each."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from clipwise._validate import is_count
from clipwise.entropy import Entropy
from clipwise.errors import InvalidConfig

__all__ = ["dirichlet", "shards", "uniform"]

Indices = NDArray[np.int64]


def uniform(records: int, users: int, seed: int = 0) -> list[Indices]:
    """Records dealt at random: every user has the same mixture, and as many records as the others, or one more.

    >>> [len(part) for part in uniform(10, users=3)]
    [4, 3, 3]
    """
    _check(records, users)
    order = Entropy(seed).generator("users").permutation(records)
    return [np.sort(part) for part in np.array_split(order, users)]


def shards(labels: Tensor, users: int, shards_per_user: int = 2, seed: int = 0) -> list[Indices]:
    """Records sorted by label, cut into equal shards, and so many shards dealt to each user (McMahan et al., 2017).

    A user then has hardly more classes than shards.

    >>> import torch
    >>> parts = shards(torch.arange(10).repeat(20), users=10)
    >>> sorted({len(part) for part in parts}), max(len({int(i) % 10 for i in part}) for part in parts)
    ([20], 2)
    """
    _check(len(labels), users, shards_per_user)
    random = Entropy(seed).generator("shards")
    order = random.permutation(len(labels))
    order = order[np.argsort(labels.numpy()[order], kind="stable")]
    pieces = np.array_split(order, users * shards_per_user)
    dealt = random.permutation(len(pieces)).reshape(users, shards_per_user)
    return [np.sort(np.concatenate([pieces[k] for k in row])) for row in dealt]


def dirichlet(labels: Tensor, users: int, concentration: float = 0.5, seed: int = 0) -> list[Indices]:
    """Every class is dealt to the users in shares from a Dirichlet distribution: sizes and mixtures both differ.

    A small `concentration` gives a class to few users; a large one makes users alike. Some may have no records at all.

    >>> import torch
    >>> parts = dirichlet(torch.arange(10).repeat(20), users=5, concentration=0.1)
    >>> sum(len(part) for part in parts), len({len(part) for part in parts}) > 1
    (200, True)
    """
    _check(len(labels), users)
    if not 0 < concentration < np.inf:
        raise InvalidConfig(f"concentration must be a positive finite number, got {concentration!r}.")
    random = Entropy(seed).generator("dirichlet")
    owner = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels.numpy()):
        members = random.permutation(np.flatnonzero(labels.numpy() == label))
        share = random.dirichlet(np.full(users, concentration))
        ends = np.round(np.cumsum(share) * len(members)).astype(np.int64)
        owner[members] = np.searchsorted(ends, np.arange(len(members)), side="right").clip(max=users - 1)
    return [np.flatnonzero(owner == user) for user in range(users)]


def _check(records: int, users: int, parts_each: int = 1) -> None:
    for count in (users, parts_each):
        if not is_count(count):
            raise InvalidConfig(f"users, and the parts of each, must be positive integers, got {count!r}.")
    if users * parts_each > records:
        raise InvalidConfig(f"{records} records cannot be cut into {users * parts_each} parts.")
