"""Memory that something other than torch may write while a pass is watched: NumPy, ctypes, an alias of it.

Kernels show who wrote memory, and what it holds passes for theirs. So memory that left the tensors, was made of arrays,
or was there before and is written by a kernel, is compared with a copy from after its last kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from clipwise.engine import backing, memory_of


class Outside:
    """What memory held when it was last known. It is kept alive until the pass is judged."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}

    def __contains__(self, memory: int) -> bool:
        return memory in self._held

    def hold(self, tensor: Tensor) -> None:
        """Memory holds what it should."""
        try:
            storage = backing(tensor).untyped_storage()
            self._held[memory_of(tensor)] = storage, _bytes(storage).clone()
        except (NotImplementedError, RuntimeError):  # it has no memory
            return

    def changed(self, memory: int) -> bool:
        """Whether memory that is looked at holds anything else now."""
        if memory not in self._held:
            return False
        storage, before = self._held[memory]
        return storage.nbytes() > 0 and not torch.equal(_bytes(storage), before)

    def all_changed(self) -> Iterator[Tensor]:
        """The bytes of all memory that does."""
        return (_bytes(self._held[memory][0]) for memory in filter(self.changed, self._held))


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
