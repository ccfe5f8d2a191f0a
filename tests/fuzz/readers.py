"""The readers, one definition each: a corpus that is made by code, what can be damaged in it, and the reading."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise._json import checksum, parse_json
from clipwise.accounting import FederatedRounds, GaussianSteps, Ledger, PrivateCalibration, ProjectedSteps
from clipwise.calibration import Temperature, Vector
from clipwise.data import Category, DataSet, Number, Schema, from_file, read_predictions
from clipwise.errors import ClipwiseError, DataError
from clipwise.federated import Server
from clipwise.private import digests_file, spent_in
from clipwise.report import Run, RunFolder, arms_of, reading_of, warnings_of
from clipwise.training import Config, load, prepare, read_weights
from clipwise.training.config import Inputs
from clipwise.training.config.models import CNN, MLP
from clipwise.training.model import SavedModel
from clipwise.training.run.begun import Begun, TrainedOn
from tests.fuzz.mutations import (
    BYTES,
    CSV,
    NPZ,
    SAFETENSORS,
    TEXT,
    TOML,
    Mutation,
    damaged_npy,
    in_archive,
    json_mutations,
)
from tests.report.samples import made_run, regression_run

__all__ = ["READERS", "Reader"]


@dataclass(frozen=True)
class Reader:
    """What is damaged, how, and who reads it."""

    corpus: tuple[bytes, ...]
    mutations: tuple[Mutation, ...]
    read: Callable[[bytes], Any]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


_DATA = TensorDataset(torch.arange(24.0).reshape(8, 3) / 24, torch.arange(8) % 2)


# Configurations

_CONFIGS = (
    """
name = "digits"
seed = 3
steps = 12
batch_size = 4
max_batch_size = 8
data = { source = "mine.csv", target = "kind", classes = ["a", "b"], test = 2, delimiter = ";", mean = [0.5], std = 2 }
model = { source = "mlp", hidden = [8, 4], activation = "relu", trainable = ["*"] }
clip = { rule = "Abadi", R = 1.0 }
optimizer = { name = "Adam", learning_rate = "0.5 / R", betas = [0.9, 0.99], weight_decay = 0.01 }
evaluation = { every = 4, bins = 15, resamples = 0, batch_size = 100 }
recalibration = { methods = ["temperature", "private-temperature"], share = 0.5, noise_multiplier = 2.0 }
[privacy]
delta = 1e-5
noise_multiplier = { 0 = 2.0, 5 = 1.0 }
""",
    """
algorithm = "dp-fedavg"
steps = 3
batch_size = 4
data.source = "digits"
model.source = "mlp"
privacy = { noise_multiplier = 1.5 }
optimizer.learning_rate = 0.1
[clip]
style = "Layerwise"
rule = "Abadi"
R = 0.5
noise = "per_layer"
[federated]
users = 8
split = "dirichlet"
concentration = 0.5
local_epochs = 2
local_batch_size = 2
weight_cap = 3.0
server = { name = "SGD", learning_rate = 0.5, momentum = 0.9 }
""",
    """
algorithm = "dp-sgld"
epochs = 2.5
batch_size = 4
sampling = "shuffled"
data.source = "a.csv"
data.columns.n = { kind = "number", low = -1, high = 9.5 }
data.columns.c = { kind = "category", categories = ["a", 3], missing = true }
model.source = "cnn"
[clip]
schedule = "MixUp"
switch_at = 0.5
small = { rule = "Abadi", R = 0.1 }
large = { style = "Groupwise", groups = { "*" = { rule = "Automatic", R = 2.0, gamma = 0.1 } } }
[privacy]
epsilon = 3.0
""",
    """
algorithm = "dp-sgd-jl"
rate = 0.25
batch_size = 4
steps = 5
data = { source = "x.npz", test_file = "y.npz" }
model = { source = "mlp" }
clip = { rule = "Abadi", R = 1.0 }
optimizer.learning_rate = 1.0
projections = 4
privacy = { noise_multiplier = 1.0, delta = 1e-4 }
""",
)
_OVERRIDES = (
    *("clip.R=0.5", "steps=7", "model.hidden=[8, 8]", "privacy.noise_multiplier={0 = 2.0, 5 = 1.0}", "name=other"),
    *("optimizer.betas=[0.9, 0.99]", "data.delimiter=';'", "clip = { rule = 'Automatic' }", "evaluation.bins=10"),
)


def _tiny() -> DataSet:
    return DataSet("tiny", "classification", _DATA, _DATA, classes=("a", "b"))


def _toml(folder: Path) -> Reader:
    path, data = folder / "config.toml", _tiny()

    def read(content: bytes) -> None:
        path.write_bytes(content)
        config = Config.load(path)
        if config.privacy.epsilon is None:  # a search for noise takes seconds, and reads nothing
            prepare(config, data)

    return Reader(tuple(text.encode() for text in _CONFIGS), TOML, read)


def _set(folder: Path) -> Reader:
    path, data = folder / "config.toml", _tiny()
    path.write_text(_CONFIGS[0])

    def read(content: bytes) -> None:
        config = Config.load(path, [content.decode("utf-8", "surrogateescape")])
        if config.privacy.epsilon is None:
            prepare(config, data)

    return Reader(tuple(text.encode() for text in _OVERRIDES), TEXT, read)


# Data


_SCHEMA = Schema((Number("x", 0, 9, missing=True), Category("kind", ("cat", "dog"), missing=True)))


def _schema(folder: Path) -> Reader:
    other = Schema((Category("job", ("cook", "ünder")), Number("age", -1.5, 1e6)))
    corpus = tuple(json.dumps(each.to_dict()).encode() for each in (_SCHEMA, other))
    return Reader(corpus, json_mutations(), lambda content: Schema.of(parse_json(content, "schema")).features)


def _table(folder: Path, name: str, corpus: tuple[bytes, ...], mutations: tuple[Mutation, ...]) -> Reader:
    path = folder / name
    ways: tuple[dict[str, Any], ...] = (
        {"target": "y", "task": "regression", "features": ["x"]},
        {"target": "y", "task": "classification", "test": 1},
        {"target": "kind", "features": ["x"]},
        {"target": "y", "task": "regression", "schema": _SCHEMA},
    )
    readings = [partial(from_file, path, **options) for options in ways]
    readings += [partial(read_predictions, path, "kind", classes=["x"], positive="cat")]

    def read(content: bytes) -> None:
        path.write_bytes(content)
        refused = []
        for reading in readings:
            try:
                reading()
            except DataError as error:
                refused.append(error)
        if len(refused) == len(readings):
            raise refused[-1]

    return Reader(corpus, mutations, read)


def _csv(folder: Path) -> Reader:
    rows = "".join(f"{k}.5,{k % 3},{'cat' if k % 2 else 'dog'},{k}\n" for k in range(12))
    quoted = '\ufeffx,"y",kind\r\n"1","0",a\r\n\r\n2,1,"b ""c"""\r\n3,0,"d\r\ne"\r\n'
    return _table(folder, "table.csv", (f"x,legs,kind,y\n{rows}".encode(), quoted.encode()), CSV)


def _npz(folder: Path) -> Reader:
    rng, corpus = np.random.default_rng(0), []
    x, y = rng.normal(size=(8, 3)), np.arange(8) % 2
    text = np.array(["cat", "dog"] * 4)
    for save, arrays in (
        (np.savez, {"x": x, "y": y}),
        (np.savez_compressed, {"x": x.astype("f4"), "y": y, "kind": y}),
        (np.savez, {"x": rng.integers(0, 255, (8, 1, 2, 2), dtype=np.uint8), "kind": text.astype("S3")}),
        (np.savez, {"x_train": x, "y_train": text, "x_test": x[:2], "y_test": text[:2]}),
    ):
        file = io.BytesIO()
        save(file, **cast(Any, arrays))
        corpus.append(file.getvalue())
    return _table(folder, "table.npz", tuple(corpus), NPZ)


def _parquet(folder: Path) -> Reader:
    import pyarrow as pa
    import pyarrow.parquet as pq

    bad = pa.Array.from_buffers(pa.string(), 8, pa.array([b"a\xff"] * 8, pa.binary()).buffers())
    numbers, words = [0.5 * k for k in range(8)], ["cat", "dog"] * 4
    corpus = []
    for columns, how in (
        ({"x": numbers, "y": numbers, "kind": words}, "snappy"),
        (
            {"x": pa.array(range(8), pa.int8()), "kind": pa.array(words).dictionary_encode(), "y": [True, False] * 4},
            "gzip",
        ),
        ({"x": [1.0, None] * 4, "y": numbers, "when": pa.array(range(8), pa.timestamp("s")), "kind": bad}, "none"),
        ({"x": [[1.0, 2.0]] * 8, "y": numbers, "kind": words}, "zstd"),
    ):
        path = folder / "made.parquet"
        pq.write_table(pa.table(columns), path, compression=how)
        corpus.append(path.read_bytes())
    return _table(folder, "table.parquet", tuple(corpus), ())


def _safetensors(folder: Path) -> Reader:
    from safetensors.torch import save

    path = folder / "model.safetensors"
    weights = {name: value.clone() for name, value in _model().state_dict().items()}

    def read(content: bytes) -> None:
        path.write_bytes(content)
        read_weights(_model(), path)

    return Reader((save(weights), save(weights, {"format": "pt"})), SAFETENSORS, read)


def _description(folder: Path) -> Reader:
    """A model.json beside its weights."""
    architectures = (MLP((4,)), MLP((4,), "relu"), CNN((2,), (3,)))
    maps = (None, ("vector", Vector((1.0, 2.0), (0.0, 0.5))), ("temperature", Temperature(2.0)))
    corpus, weights = [], {}
    place = RunFolder(folder)
    for architecture, chosen in zip(architectures, maps, strict=True):
        image = isinstance(architecture, CNN)
        part = TensorDataset(torch.zeros(2, 1, 4, 4), torch.arange(2)) if image else _DATA
        schema = None if image else Schema((Number("age", 0, 9), Category("sex", ("f", "m"))))
        names = () if schema is None else schema.features
        data = DataSet("tiny", "classification", part, part, classes=("a", "b"), features=names, schema=schema)
        made = replace(SavedModel.of(data, architecture, Inputs(mean=(0.5,))), recalibration=chosen)
        made.save(place, architecture.build(data), None)
        corpus.append(place.description.read_bytes())
        weights[made.weights] = weights[json.loads(corpus[-1])["weights"]] = place.model.read_bytes()

    def read(content: bytes) -> None:
        place.description.write_bytes(content)
        fitting = next((file for sha, file in weights.items() if sha and sha.encode() in content), b"")
        place.model.write_bytes(fitting)
        model = load(folder)
        model.predict_proba(torch.zeros(2, *model.saved.shape))

    def seal(body: Any) -> Any:
        return {**body, "checksum": checksum(body)}

    return Reader(tuple(corpus), json_mutations(seal), read)


def _first_weights(folder: Path) -> Reader:
    """A begun_with.json."""
    place, corpus = RunFolder(folder), []
    seen = TrainedOn(frozenset(["0" * 64]), frozenset(["digits"]))
    about = {"from": "the run 'a' on digits", "sha256": "0" * 64, "tensors": "4 of 4 tensors", "privacy": "none"}
    for begun in (Begun(about, seen), Begun(charged=seen), Begun(about)):
        begun.save(place)
        corpus.append((folder / "begun_with.json").read_bytes())

    def read(content: bytes) -> None:
        (folder / "begun_with.json").write_bytes(content)
        begun = Begun.saved_in(place)
        assert begun is not None
        begun.note.encode()

    def seal(body: Any) -> Any:
        return {**body, "checksum": checksum(body)}

    return Reader(tuple(corpus), json_mutations(seal), read)


# What was released, and saved runs


def _ledger(folder: Path) -> Reader:
    path = folder / "ledger.json"
    poisson = cw.Poisson(1_000, 10)
    several = [
        [GaussianSteps(poisson, 1.0, 10), GaussianSteps(poisson, 2.0, 3, own_batches=True), PrivateCalibration(2.0)],
        [FederatedRounds(cw.Poisson(rate=0.1, batch_size=10), 1.0, 5), ProjectedSteps(cw.FullBatch(50), 1.5, 8)],
        [GaussianSteps(cw.Shuffled(100, 10), 1.0, 4), GaussianSteps(cw.FixedSize(100, 10), 1.0, 4)],
    ]

    def read(content: bytes) -> None:
        path.write_bytes(content)
        repr(Ledger.load(path))

    def seal(body: Any) -> Any:
        return {**body, "checksum": checksum(body)}

    return Reader(tuple(Ledger(events).to_json().encode() for events in several), json_mutations(seal), read)


_CHECKPOINT = (
    *4 * (in_archive("manifest.json", json_mutations()),),
    *(in_archive(member, BYTES) for member in ("manifest.json", "tensors/0")),
)


def _losses(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def _begun(sampling: cw.Sampling, clip: Any, seed: int | None) -> cw.Private:
    model = _model()
    plan = cw.Plan(sampling, steps=4, clip=clip, noise_multiplier=1.0)
    private = cw.Private(plan, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), seed=seed)
    for x, y in private.loader(_DATA):
        private.step(_losses(model, x, y))
        if private.steps_done >= 2:
            break
    return private


def _continued(path: Path) -> None:
    """Resume a run, and draw its next batch."""
    model = _model()
    private = cw.Private.resume(path, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    next(iter(private.loader(_DATA)), None)


def _spent(path: Path) -> None:
    """What a run has spent, or a refusal: the same file is then resumed, which may refuse for another reason."""
    with suppress(ClipwiseError):
        spent_in(path)


def _checkpoint(folder: Path) -> Reader:
    path, corpus = folder / "checkpoint", []
    mapped = cw.Layerwise({"": cw.Abadi(1.0)})
    for sampling, clip, seed in ((cw.Poisson(8, 4), cw.Abadi(1.0), None), (cw.Shuffled(8, 4), mapped, 1)):
        _begun(sampling, clip, seed).save(path, extra={"epoch": 1, "best": float("inf"), "at": (1, 2)})
        corpus.append(path.read_bytes())

    def read(content: bytes) -> None:
        digests_file(path).unlink(missing_ok=True)
        path.write_bytes(content)
        _spent(path)
        _continued(path)

    return Reader(tuple(corpus), _CHECKPOINT, read)


def _digests(folder: Path) -> Reader:
    path, made = folder / "checkpoint", folder / "made"

    _begun(cw.FullBatch(8), cw.Abadi(1.0), 1).save(made)

    def read(content: bytes) -> None:
        path.write_bytes(made.read_bytes())
        digests_file(path).write_bytes(content)
        _continued(path)

    whole = digests_file(made).read_bytes()
    return Reader((whole, whole.replace(b'"records": 0', b'"records": 1') + bytes(24) * 3), TEXT, read)


def _federated_plan(**changes: Any) -> cw.Plan:
    settings = {"sampling": cw.Poisson(8, 4), "clip": cw.AdaptiveClip(R=1.0), "noise_multiplier": 1.0, **changes}
    return cw.Plan(steps=4, mechanism=cw.mechanisms.Rounds(), **settings)


def _federated(folder: Path) -> Reader:
    path, corpus = folder / "checkpoint", []
    for seed in (None, 1):
        model = _model()
        server = Server(_federated_plan(), model, seed=seed)
        server.open([])
        server.close([])
        server.save(path, model, torch.optim.SGD(model.parameters(), lr=0.1))
        corpus.append(path.read_bytes())

    def read(content: bytes) -> None:
        digests_file(path).unlink(missing_ok=True)
        path.write_bytes(content)
        _spent(path)
        model = _model()
        server = Server(_federated_plan(), model, seed=1 if b'["seed", 1]' in content else None)
        server.resume(path, model, torch.optim.SGD(model.parameters(), lr=0.1))
        server.open(range(8))
        server.close([])

    return Reader(tuple(corpus), _CHECKPOINT, read)


# Reports


def _run_file(folder: Path, name: str, mutations: tuple[Mutation, ...]) -> Reader:
    """One file of a run's folder, the others as they were written."""
    corpus = []
    for made in (replace(regression_run(), curves=made_run().curves), made_run(clip_norm=None), made_run()):
        RunFolder(folder).clear()
        corpus.insert(0, (made.save(folder) / name).read_bytes())

    def read(content: bytes) -> None:
        (folder / name).write_bytes(content)
        arms = arms_of([Run.load(folder)])
        reading_of(arms)
        warnings_of(arms)

    return Reader(tuple(corpus), mutations, read)


def _result(folder: Path) -> Reader:
    return _run_file(folder, "result.json", json_mutations())


def _metrics(folder: Path) -> Reader:
    def row(data: bytes, random: Random) -> bytes:
        rows = data.splitlines(keepends=True)
        if rows:
            k = random.randrange(len(rows))
            rows[k] = random.choice(json_mutations())(rows[k], random).replace(b"\n", b"") + b"\n"
        return b"".join(rows)

    return _run_file(folder, "metrics.jsonl", (*TEXT, row, row, row, row))


# Messages


def _reply(folder: Path) -> Reader:
    """A client's message, written as JSON here; the bytes of an array stand in it as Latin-1."""
    from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict

    from clipwise.federated.flower import DPFedAvg

    def described(array: Array) -> dict[str, Any]:
        data = array.data.decode("latin-1")
        return {"dtype": array.dtype, "shape": list(array.shape), "stype": array.stype, "data": data}

    arrays = {name: described(Array(value.numpy())) for name, value in _model().state_dict().items()}
    whole = {"arrays": arrays, "metrics": {"num-examples": 8, "within": 1}}
    model = _model()

    def array_bytes(data: bytes, random: Random) -> bytes:
        try:
            message = json.loads(data)
            chosen = random.choice(list(message["arrays"].values()))
            whole = chosen["data"].encode("latin-1")
            chosen["data"] = random.choice((damaged_npy, *BYTES))(whole, random).decode("latin-1")
            return json.dumps(message).encode()
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return data

    def record_of(message: Any) -> RecordDict:
        sent = {
            name: Array(each["dtype"], tuple(each["shape"]), each["stype"], each["data"].encode("latin-1"))
            for name, each in message["arrays"].items()
        }
        return RecordDict({"arrays": ArrayRecord(sent), "metrics": MetricRecord(message["metrics"])})

    def read(content: bytes) -> None:
        try:
            record = record_of(json.loads(content))
        except Exception:  # Flower's own classes refuse the content: it does not reach a server
            return
        strategy = DPFedAvg(_federated_plan(sampling=cw.FullBatch(2), noise_multiplier=0.0), model)
        strategy.server.open([1, 2])
        replies = [
            SimpleNamespace(metadata=SimpleNamespace(src_node_id=node), has_error=lambda: False, content=each)
            for node, each in ((1, record), (2, record_of(whole)))
        ]
        strategy.aggregate_train(1, cast(Any, replies))
        assert strategy.server.last is not None
        problems = dict(strategy.server.last.problems)
        if 2 in problems:
            raise AssertionError(f"the message of one client costs another's: {problems[2]}")
        if "MemoryError" in problems.get(1, ""):
            raise MemoryError(problems[1])
        if 1 in problems:
            raise DataError(problems[1])

    return Reader((json.dumps(whole).encode(),), (*json_mutations(), *(array_bytes for _ in range(8))), read)


READERS: dict[str, Callable[[Path], Reader]] = {
    "toml": _toml,
    "set": _set,
    "schema": _schema,
    "csv": _csv,
    "npz": _npz,
    "parquet": _parquet,
    "safetensors": _safetensors,
    "model": _description,
    "begun_with": _first_weights,
    "ledger": _ledger,
    "checkpoint": _checkpoint,
    "digests": _digests,
    "federated": _federated,
    "result": _result,
    "metrics": _metrics,
    "reply": _reply,
}
"""By name; each is made in an empty folder of its own."""
