"""The weights of a network as a safetensors file: tensors, and nothing that could run."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from clipwise.errors import DataError, MissingExtra
from clipwise.files import replacing

__all__ = ["read_weights", "write_weights"]


def write_weights(model: nn.Module, path: Path) -> None:
    """The weights, in a file that its owner alone can read."""
    from safetensors.torch import save_model

    with replacing(path, DataError) as file:
        save_model(model, file.name)  # into the file that is open: it is there, and private, before the first weight


def read_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Fill a network from the model.safetensors of a run; one that is damaged or of another network is refused."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_model
    except ImportError:
        raise MissingExtra("weights are read with safetensors: pip install 'clipwise[train]'.") from None
    try:
        load_model(model, str(path))
    except OSError as error:
        raise DataError(f"the weights {os.fspath(path)} cannot be read: {error.strerror or error}.") from error
    except (SafetensorError, ValueError) as error:
        raise DataError(f"{os.fspath(path)} is damaged, or not a safetensors file: {error}. Copy it again.") from error
    except (RuntimeError, TypeError) as error:
        raise DataError(
            f"{os.fspath(path)} does not fit the model of this configuration: {error}. Name the weights of a run with "
            "the same [model]."
        ) from error
