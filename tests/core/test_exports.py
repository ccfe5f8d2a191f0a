"""The public package: everything is there, sorted, documented, and loaded only when it is used."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import clipwise as cw


def test_the_names_are_sorted_and_found() -> None:
    assert cw.__all__ == sorted(cw.__all__)
    assert set(cw.__all__) == set(cw._MODULE_OF)
    for name in cw.__all__:
        value = getattr(cw, name)
        assert inspect.getdoc(value), f"{name} has no docstring"
        assert name in dir(cw)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Abbadi'"):
        _ = cw.Abbadi


def test_every_error_is_exported() -> None:
    import clipwise.errors as errors

    raised = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert raised <= set(cw.__all__)


def test_importing_the_package_loads_neither_torch_nor_scipy() -> None:
    code = "import sys, clipwise; sys.exit(any(m in sys.modules for m in ('torch', 'scipy', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
