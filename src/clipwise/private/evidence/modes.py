"""The two modes of a watched pass: every kernel below autograd, and every call of torch above it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, ClassVar, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.overrides import _pop_mode as pop_function_mode
from torch.overrides import _push_mode as push_function_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _pop_mode as pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as push_dispatch_mode


class Watcher(Protocol):
    """Receives kernels and calls, and runs them."""

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

    _active: ClassVar[list[Modes]] = []

    def __init__(self, watcher: Watcher) -> None:
        self._calls, self._kernels = _Calls(watcher), _Kernels(watcher)
        self._thread: int | None = None

    def enter(self) -> None:
        """Put the modes on the stacks of this thread."""
        self._calls.__enter__()  # type: ignore[no-untyped-call]
        self._kernels.__enter__()  # type: ignore[no-untyped-call]
        self._thread = get_ident()
        self._active.append(self)
        _Uncompiled.hold(self)

    def leave(self) -> None:
        """Take them off, also when others were entered above them and not left. On another thread they fall silent."""
        if self in self._active:
            self._active.remove(self)
        _Uncompiled.release(self)
        if self._thread == get_ident():
            _remove(self._kernels, *_DISPATCH_STACK)
            _remove(self._calls, *_FUNCTION_STACK)
            self._thread = None
        elif self._thread is not None:
            self._calls.watcher = self._kernels.watcher = _Silent()


class _Uncompiled:
    """While a pass is watched, functions given to `torch.compile` run as they were written.

    A mode does not see into compiled code. Torch would not compile below a mode either, and would never again compile
    what was called there once.
    """

    _holders: ClassVar[set[Modes]] = set()
    _stance: ClassVar[Any] = None

    @classmethod
    def hold(cls, modes: Modes) -> None:
        """From here on; nothing is compiled where the compiler was not even imported."""
        if not cls._holders and "torch._dynamo" in sys.modules:
            cls._stance = torch.compiler.set_stance("force_eager")
        cls._holders.add(modes)

    @classmethod
    def release(cls, modes: Modes) -> None:
        """Until the last pass that is watched has ended."""
        cls._holders.discard(modes)
        if not cls._holders and cls._stance is not None:
            cls._stance.__exit__(None, None, None)
            cls._stance = None


@contextmanager
def none_watching() -> Iterator[None]:
    """Take all such modes off this thread for a while, whichever run they belong to."""
    active = [modes for modes in Modes._active if modes._thread == get_ident()]
    for modes in reversed(active):
        modes.leave()
    try:
        yield
    finally:
        for modes in active:
            modes.enter()


class _Silent:
    """Runs what it receives, and nothing else."""

    def kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


_DISPATCH_STACK: Any = (
    torch._C._len_torch_dispatch_stack, torch._C._get_dispatch_stack_at, pop_dispatch_mode, push_dispatch_mode,
)  # fmt: skip
_FUNCTION_STACK: Any = (
    torch._C._len_torch_function_stack, torch._C._get_function_stack_at, pop_function_mode, push_function_mode,
)  # fmt: skip


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
