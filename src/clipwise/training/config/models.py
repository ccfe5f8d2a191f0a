"""`[model]`: the built-in networks, a local Hugging Face folder, or the user's `module:function`."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from clipwise._json import Fields
from clipwise._validate import is_count
from clipwise.errors import DataError, InvalidConfig, MissingExtra
from clipwise.training.config.functions import guarded, imported, split_target
from clipwise.training.config.toml import TomlTable, nearest

__all__ = ["Architecture", "WeightsChoice", "freeze", "read_model", "read_weights_choice", "saved_architecture"]

_MOST_PARAMETERS = 2**31
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU, "silu": nn.SiLU, "tanh": nn.Tanh}


class MadeFor(Protocol):
    """What a network is made for: a data set, or what is saved of one."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def outputs(self) -> int: ...


class Architecture(Protocol):
    """A frozen value that makes a network for a data set and knows how to call it."""

    def build(self, data: MadeFor) -> nn.Module:
        """A network with one output per class, or one for regression."""
        ...

    def forward(self, model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
        """Its outputs (logits, or predictions) for a batch."""
        ...

    def to_dict(self, model: nn.Module) -> dict[str, Any]:
        """What a saved model says of how it was built, with the "kind"; `saved_architecture` reads it."""
        ...


def _call(model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    outputs = model(*inputs)
    logits: Tensor = getattr(outputs, "logits", outputs)
    return logits


@dataclass(frozen=True)
class MLP:
    """Fully connected layers `hidden1`, `hidden2`, ..., `output`, with an activation between them."""

    hidden: tuple[int, ...] = (64,)
    activation: str = "tanh"

    def build(self, data: MadeFor) -> nn.Module:
        """A network for one flat input."""
        flatten: list[tuple[str, nn.Module]] = [("flatten", nn.Flatten())]
        return _made(lambda: flatten + self.head(_size(data.shape), data.outputs))

    def head(self, size: int, outputs: int) -> list[tuple[str, nn.Module]]:
        """The layers after an input of `size` numbers."""
        layers: list[tuple[str, nn.Module]] = []
        for k, width in enumerate(self.hidden, start=1):
            layers += [(f"hidden{k}", nn.Linear(size, width)), (f"activation{k}", ACTIVATIONS[self.activation]())]
            size = width
        return [*layers, ("output", nn.Linear(size, outputs))]

    def forward(self, model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
        """The outputs for a batch."""
        return _call(model, inputs)

    def to_dict(self, model: nn.Module) -> dict[str, Any]:
        """Its sizes."""
        return {"kind": "mlp", "hidden": list(self.hidden), "activation": self.activation}


@dataclass(frozen=True)
class CNN:
    """3x3 convolutions `conv1`, `conv2`, ..., each halved by pooling, then the layers of an `MLP`."""

    channels: tuple[int, ...] = (16, 32)
    hidden: tuple[int, ...] = (32,)
    activation: str = "tanh"

    def build(self, data: MadeFor) -> nn.Module:
        """A network for images of shape (channels, height, width)."""
        if len(data.shape) != 3 or min(data.shape[1:]) < 2 ** len(self.channels):
            raise InvalidConfig(
                f"model.source = 'cnn' with {len(self.channels)} convolutions needs images (channels, height, width) "
                f"of at least {2 ** len(self.channels)} pixels a side, but {data.name} has inputs {data.shape}."
            )
        return _made(lambda: self._layers(data))

    def _layers(self, data: MadeFor) -> list[tuple[str, nn.Module]]:
        before, height, width = data.shape
        layers: list[tuple[str, nn.Module]] = []
        for k, after in enumerate(self.channels, start=1):
            convolution = nn.Conv2d(before, after, 3, padding=1)
            layers += [
                (f"conv{k}", convolution),
                (f"act{k}", ACTIVATIONS[self.activation]()),
                (f"pool{k}", nn.MaxPool2d(2)),
            ]
            before, height, width = after, height // 2, width // 2
        layers.append(("flatten", nn.Flatten()))
        return layers + MLP(self.hidden, self.activation).head(before * height * width, data.outputs)

    def forward(self, model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
        """The outputs for a batch."""
        return _call(model, inputs)

    def to_dict(self, model: nn.Module) -> dict[str, Any]:
        """Its sizes."""
        sizes = {"channels": list(self.channels), "hidden": list(self.hidden)}
        return {"kind": "cnn", **sizes, "activation": self.activation}


def _made(layers: Callable[[], list[tuple[str, nn.Module]]]) -> nn.Module:
    """The network of these layers, whose parameters are counted before there is room for them."""
    try:
        with torch.device("meta"):
            count: float = sum(p.numel() for _, layer in layers() for p in layer.parameters())
    except (RuntimeError, TypeError):  # more bytes than there are addresses, or sizes beyond 64 bits
        count = math.inf
    if count > _MOST_PARAMETERS:
        raise InvalidConfig(f"[model] has {count:.3g} parameters, more than {_MOST_PARAMETERS:.3g}: make it smaller.")
    made: nn.Module | None = None
    with contextlib.suppress(RuntimeError):  # torch's, where there is no room
        made = nn.Sequential(OrderedDict(layers()))
    if made is None:
        raise InvalidConfig(f"[model] has {count:.3g} parameters, for which this machine has no room: make it smaller.")
    return made


class _Transformer:
    """A network of `transformers`: how it is called, and what is saved of it."""

    def forward(self, model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
        """The logits for input ids (and attention mask, and token types), or for pixel values."""
        names = (str(model.main_input_name), "attention_mask", "token_type_ids")
        logits: Tensor = model(**dict(zip(names, inputs, strict=False))).logits
        return logits

    def to_dict(self, model: nn.Module) -> dict[str, Any]:
        """Its configuration, without the place that it was loaded from and without code to be fetched."""
        config: dict[str, Any] = json.loads(cast(Any, model.config).to_json_string(use_diff=False))
        return {"kind": "transformers", "config": {k: v for k, v in config.items() if k not in _NOT_SAVED}}


_NOT_SAVED = {"_name_or_path", "auto_map"}


def _auto(kind: object, what: str) -> Any:
    """The class of `transformers` that makes classifiers of this type of model."""
    try:
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES as IMAGES
    except ImportError:
        raise MissingExtra(f"{what} is loaded with transformers: pip install 'clipwise[hf]'.") from None
    return getattr(transformers, f"AutoModelFor{'Image' if kind in IMAGES else 'Sequence'}Classification")


@dataclass(frozen=True)
class HuggingFace(_Transformer):
    """A local folder with config.json and weights, loaded with `transformers` and nothing from the network."""

    folder: str

    def build(self, data: MadeFor) -> nn.Module:
        """The network with a classification head of the data's size (new, where the folder has another)."""
        about = Path(self.folder, "config.json")
        kind = guarded(f"reading {about}", lambda: json.loads(about.read_text(encoding="utf-8")).get("model_type"))
        auto = _auto(kind, self.folder)
        model: nn.Module = guarded(
            f"loading {self.folder}",
            lambda: auto.from_pretrained(
                self.folder, num_labels=data.outputs, local_files_only=True, ignore_mismatched_sizes=True
            ),
        )
        return model


@dataclass(frozen=True)
class SavedTransformer(_Transformer):
    """A network of `transformers` from its configuration alone; its weights come from the saved model."""

    config: Mapping[str, Any]

    def build(self, data: MadeFor) -> nn.Module:
        """The network with new weights; code that the configuration may name is not run."""
        rest = {name: value for name, value in self.config.items() if name not in ("model_type", *_NOT_SAVED)}
        kind = str(self.config.get("model_type"))
        if kind.startswith("timm"):
            raise DataError(f"a saved model of type {kind!r} is not built: its configuration can name files to load.")
        auto = _auto(kind, data.name)
        import transformers

        def made() -> nn.Module:
            config = transformers.AutoConfig.for_model(kind, **rest)
            # No other way to compute attention: it may name code on a hub, which would be fetched and run.
            model: nn.Module = auto.from_config(config, trust_remote_code=False, attn_implementation=None)
            return model

        model: nn.Module = guarded(f"building the {kind!r} model", made)
        return model


@dataclass(frozen=True)
class FromFunction:
    """The network that the user's function returns when it is called with the options of the table."""

    module: str
    function: str
    options: Mapping[str, Any]

    def build(self, data: MadeFor) -> nn.Module:
        """Call the function."""
        make = imported(self.module, self.function)
        model = guarded(f"{self.function}()", lambda: make(**self.options))
        if not isinstance(model, nn.Module):
            raise DataError(f"{self.function}() must return a torch.nn.Module, got {type(model).__name__}.")
        return model

    def forward(self, model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
        """The outputs for a batch; of an object with `logits`, these."""
        return _call(model, inputs)

    def to_dict(self, model: nn.Module) -> dict[str, Any]:
        """The name of the function and its options: anyone who loads the model needs the code."""
        options = dict(self.options)
        return {"kind": "function", "module": self.module, "function": self.function, "options": options}


def saved_architecture(record: Fields, *, trust_code: bool) -> Architecture:
    """What `Architecture.to_dict` wrote; one that is built by the user's code only with `trust_code`.

    Guarantees: without `trust_code`, nothing that the record names is imported or run.
    """
    kind = record.text("kind")
    if kind not in _SAVED:
        record.fail("kind", f"one of {', '.join(_SAVED)}")
    fields = record.closed(("kind", *_SAVED[kind]))
    if kind == "transformers":
        return SavedTransformer(fields.object("config").value)
    if kind == "function":
        module, function = fields.text("module"), fields.text("function")
        if not trust_code:
            raise DataError(
                f"the model is built by {module}:{function}(), and loading it would run that code. If you trust it, "
                "pass trust_code=True (--trust-code)."
            )
        return FromFunction(module, function, fields.object("options").value)
    sizes = [tuple(fields.many(name, is_count, "integers of at least 1")) for name in _SAVED[kind][:-1]]
    if fields.text("activation") not in ACTIVATIONS:
        fields.fail("activation", f"one of {', '.join(ACTIVATIONS)}")
    built_in: type[Any] = MLP if kind == "mlp" else CNN
    made: Architecture = built_in(*sizes, fields.text("activation"))
    return made


_SAVED = {
    "mlp": ("hidden", "activation"),
    "cnn": ("channels", "hidden", "activation"),
    "transformers": ("config",),
    "function": ("module", "function", "options"),
}
"""The kinds of architectures in a saved model, with their fields."""


def read_model(table: TomlTable) -> Architecture:
    """The architecture that a table describes.

    >>> from clipwise.training.config.toml import TomlText
    >>> read_model(TomlText.parse('source = "mlp"').root())
    MLP(hidden=(64,), activation='tanh')
    """
    source = table.text("source")
    target = split_target(source)
    model: Architecture
    if source == "mlp":
        model = MLP(table.integers("hidden", (64,)), _activation(table))
    elif source == "cnn":
        model = CNN(table.integers("channels", (16, 32)), table.integers("hidden", (32,)), _activation(table))
    elif target is not None:
        model = FromFunction(*target, table.table("options").rest())
    elif os.path.isfile(os.path.join(source, "config.json")):  # no error where the name is too long for one
        model = HuggingFace(source)
    else:
        table.fail(
            "source",
            f"{source!r} is neither a built-in network, nor a folder with a config.json, nor module:function; "
            f"{nearest(source, ('mlp', 'cnn'))}",
        )
    return model


@dataclass(frozen=True)
class WeightsChoice:
    """`weights`: a safetensors file, or the folder of a finished run, that the network begins with."""

    path: Path
    partial: bool = False
    """Whether tensors that the file lacks, or has in another shape, may stay as they were initialised."""


def read_weights_choice(table: TomlTable) -> WeightsChoice | None:
    """The initial weights that a table names; None without.

    >>> from clipwise.training.config.toml import TomlText
    >>> read_weights_choice(TomlText.parse('weights = "public.safetensors"').root()).partial
    False
    """
    path, partial = table.text("weights", None), table.flag("weights_partial", False)
    if path is None:
        if "weights_partial" in table:
            table.fail("weights_partial", "goes with weights, a safetensors file or the folder of a run.")
        return None
    return WeightsChoice(Path(path), partial)


def _activation(table: TomlTable) -> str:
    return table.text("activation", "tanh", ACTIVATIONS)


def _size(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def freeze(model: nn.Module, trainable: Sequence[str]) -> list[nn.Parameter]:
    """Freeze what no pattern names; the parameters that are left to train."""
    for pattern in trainable:
        if not any(fnmatchcase(name, pattern) for name, _ in model.named_parameters()):
            names = [name for name, _ in model.named_parameters()]
            raise InvalidConfig(f"model.trainable: {pattern!r} matches no parameter; {nearest(pattern, names)}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in trainable))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
