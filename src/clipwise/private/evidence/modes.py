"""The two modes of a watched pass: every kernel below autograd, and every call of torch above it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.overrides import _pop_mode as pop_function_mode
from torch.overrides import _push_mode as push_function_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _pop_mode as pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as push_dispatch_mode


class Watcher(Protocol):
    """Who is told of kernels and calls, and runs them."""

    def kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A kernel below autograd."""
        ...

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A function or method of torch, as the user called it."""
        ...


class _Kernels(TorchDispatchMode):
    def __init__(self, watcher: Watcher) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watcher = watcher

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self.watcher.kernel(func, args, kwargs or {})


class _Calls(TorchFunctionMode):
    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self.watcher = watcher

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.watcher.call(func, args, kwargs or {})


class Modes:
    """Both modes on this thread, from `enter` to `leave`."""

    def __init__(self, watcher: Watcher) -> None:
        self._calls, self._kernels, self._on = _Calls(watcher), _Kernels(watcher), False

    def enter(self) -> None:
        """Put the modes on the stacks of this thread."""
        self._calls.__enter__()  # type: ignore[no-untyped-call]
        self._kernels.__enter__()  # type: ignore[no-untyped-call]
        self._on = True

    def leave(self) -> None:
        """Take them off, also when others were entered above them and not left."""
        if self._on:
            self._on = False
            stack = torch._C._len_torch_dispatch_stack, torch._C._get_dispatch_stack_at
            _remove(self._kernels, *stack, pop_dispatch_mode, push_dispatch_mode)
            stack = torch._C._len_torch_function_stack, torch._C._get_function_stack_at
            _remove(self._calls, *stack, pop_function_mode, push_function_mode)


def _remove(
    mode: Any, length: Callable[[], int], at: Callable[[int], Any], pop: Callable[[], Any], push: Callable[[Any], Any]
) -> None:
    """Take a mode out of the middle of its stack."""
    if not any(at(i) is mode for i in range(length())):
        return
    above = []
    while (top := pop()) is not mode:
        above.append(top)
    for other in reversed(above):
        push(other)
