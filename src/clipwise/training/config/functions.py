"""The user's own code, named as `module:function` or `file.py:function`."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clipwise.errors import ClipwiseError, DataError

__all__ = ["guarded", "imported", "split_target"]


def split_target(text: str) -> tuple[str, str] | None:
    """Module (or file) and function of `module:function`; None for anything else.

    >>> split_target("package.models:make"), split_target("mnist")
    (('package.models', 'make'), None)
    """
    module, colon, function = text.rpartition(":")
    return (module, function) if module and colon and function.isidentifier() else None


def guarded(what: str, call: Callable[[], Any], *, reads: bool = False) -> Any:
    """Call the user's code; if it fails, say where in one line. What code says that `reads` records may quote one."""
    try:
        return call()
    except ClipwiseError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.relpath(frame.filename)}:{frame.lineno}"
        if reads:
            raise DataError(f"{what} failed at {where}: {type(error).__name__}.", str(error)) from error
        raise DataError(f"{what} failed at {where}: {type(error).__name__}: {error}") from error


def imported(module: str, function: str) -> Callable[..., Any]:
    """The user's function; the current folder counts, as it does for `python -m`."""
    if module.endswith(".py"):
        path = Path(module).resolve()
        if not os.path.isfile(path):
            raise DataError(f"there is no file {module}.")
        sys.path.insert(0, str(path.parent))
        home = guarded(f"importing {module}", lambda: importlib.import_module(path.stem))
    else:
        sys.path.insert(0, os.getcwd())
        home = guarded(f"importing {module}", lambda: importlib.import_module(module))
    found = getattr(home, function, None)
    if not callable(found):
        raise DataError(f"{module} has no function {function}.")
    made: Callable[..., Any] = found
    return made
