"""Optional dependencies, asked for before the work that needs them."""

from __future__ import annotations

from importlib.util import find_spec

from clipwise.errors import MissingExtra

__all__ = ["EXTRAS", "need"]

EXTRAS = {
    "plots": ("matplotlib",),
    "report": ("jinja2", "matplotlib"),
    "train": ("jinja2", "matplotlib", "safetensors"),
    "demo": ("jinja2", "matplotlib", "safetensors", "sklearn"),
}
"""The modules of extras that are first used at the end of long work."""


def need(extra: str, what: str) -> None:
    """Raise `MissingExtra` unless the modules of an extra are installed; `what` is about to be made with them.

    Nothing is imported.

    >>> need("plots", "a figure")
    """
    missing = [name for name in EXTRAS[extra] if find_spec(name) is None]
    if missing:
        raise MissingExtra(f"{what} is made with {' and '.join(missing)}: pip install 'clipwise[{extra}]'.")
