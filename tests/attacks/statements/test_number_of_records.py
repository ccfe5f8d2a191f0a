"""With a public rate the number of records is private: it is looked for in every file and message of a run."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.accounting import account
from clipwise.cli import train as train_command
from clipwise.data import DataSet
from clipwise.errors import ClipwiseError, InvalidConfig, InvalidSampling
from clipwise.report import Run, arms_of, card
from clipwise.report.content import content
from clipwise.training import Config, Progress, prepare, train

N, BATCH, STEPS = 7_919, 40, 8
CONFIG = f"""
name = "rate"
rate = 0.006
batch_size = {BATCH}
steps = {STEPS}
checkpoint_every = 4
data.source = "digits"
model = {{ source = "mlp", hidden = [4] }}
clip = {{ rule = "Abadi", R = 1.0 }}
optimizer.learning_rate = 0.1
privacy = {{ noise_multiplier = 1.0, delta = 1e-6 }}
evaluation = {{ every = 2, resamples = 0 }}
"""


def config(text: str = CONFIG, *overrides: str) -> Config:
    return Config.parse(text, "rate.toml", overrides)


def data() -> DataSet:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N + 300, 3, generator=generator)
    y = (x.sum(1) > 0).long()
    return DataSet(
        "people",
        "classification",
        TensorDataset(x[:N], y[:N]),
        TensorDataset(x[N:], y[N:]),
        classes=("no", "yes"),
        source="people.csv",
    )


def numbers(value: Any) -> Iterator[float]:
    """Every number of a JSON value, and the length of every list."""
    if isinstance(value, dict):
        for item in value.values():
            yield from numbers(item)
    elif isinstance(value, list):
        yield len(value)
        for item in value:
            yield from numbers(item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


TELLING = (
    [float(n) for n in (N - 1, N, N + 1)]
    + [1 / N, BATCH / N, N / BATCH, 0.006 * N]  # a rate, an expected batch size, batches per epoch
    + [step * BATCH / N for step in range(1, STEPS + 1)]  # epochs
)
SPELLED = re.compile(rf"(?<!\d)(?:7[,_.\u00a0\u202f' ]?919|7\.919e\+?0?3|0x1eef|{1 / N:.4g}|{BATCH / N:.4g})(?!\d)")


def tells(text: str) -> str | None:
    found = SPELLED.search(text)
    return None if found is None else text[max(0, found.start() - 60) : found.end() + 20]


def assert_silent(path: Path) -> None:
    """No spelling of the number, no number that it can be computed from, no list of that length."""
    raw = path.read_bytes()
    text = raw.decode("utf-8", "replace")
    if path.suffix == ".safetensors":
        assert struct.pack("<q", N) not in raw
        text = text[: text.index("}}")]
    if path.suffix == ".svg":  # coordinates of drawings are no numbers of the run; its words are
        text = " ".join(re.findall(r">([^<>]*)<", text))
    if path.suffix in (".json", ".jsonl"):
        for line in text.splitlines() if path.suffix == ".jsonl" else [text]:
            for value in numbers(json.loads(line)):
                assert not any(abs(value - bad) <= 1e-9 * bad for bad in TELLING), (path.name, value)
    assert tells(text) is None, (path.name, tells(text))


def assert_silent_checkpoint(path: Path) -> None:
    """The manifest of a checkpoint: all that is not weights."""
    from clipwise.private import checkpoint

    record, _, _ = checkpoint.read(path)
    plain = {k: v for k, v in record.items() if k not in ("model", "optimizer")}
    assert not any(float(n) in (N - 1, N, N + 1) for n in _leaves(plain) if isinstance(n, (int, float)))
    shapes = [tuple(t.shape) for t in _leaves(record) if isinstance(t, torch.Tensor)]
    assert all(N not in shape for shape in shapes)
    assert all(tells(t) is None for t in _leaves(plain) if isinstance(t, str) and not re.fullmatch(r"[0-9a-f]{64}", t))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


@pytest.fixture(autouse=True)
def _exact_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other accountants say the same of sampling and relation, and take seconds."""
    monkeypatch.setattr(
        "clipwise.training.run.train.guarantees_of", lambda events, delta: {"exact": account(events, delta)}
    )


def test_no_file_of_a_run_tells_the_number_of_its_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, looked_at = tmp_path / "run", []

    def watch(progress: Progress) -> None:
        assert_silent_checkpoint(folder / "checkpoint")
        looked_at.append(progress.step)

    made, _ = train(config(), output=folder, data=data(), watch=watch)
    assert looked_at == list(range(1, STEPS + 1))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"ledger.json", "result.json", "report.html", "card.md", "metrics.jsonl"} <= {path.name for path in files}
    for path in files:
        assert_silent(path)
    assert tells(json.dumps(train_command._summary(made), default=str)) is None
    train_command._print(made, folder, ())
    said = capsys.readouterr().out
    assert tells(said) is None and "adding or removing one example" in said
    assert made.provenance["data"]["held_out"] == 300  # of other people: a number of its own
    for text in (folder / "card.md", folder / "report.html"):
        assert "adding or removing one example" in text.read_text(encoding="utf-8")


def test_neither_does_the_checkpoint_of_a_seeded_run(tmp_path: Path) -> None:
    def watch(progress: Progress) -> None:
        assert_silent_checkpoint(tmp_path / "checkpoint")

    train(config(CONFIG, "seed=5"), output=tmp_path, data=data(), watch=watch, page=False)
    for path in tmp_path.iterdir():
        assert_silent(path)


def test_the_search_finds_the_number_where_it_is_public(tmp_path: Path) -> None:
    """So that the tests above can fail: the same run with a public number."""
    text = CONFIG.replace("rate = 0.006\n", "")
    run, _ = train(config(text), output=tmp_path, data=data(), page=False)
    (tmp_path / "card.md").write_text(card(run), encoding="utf-8")
    for name in ("ledger.json", "result.json", "metrics.jsonl", "card.md"):
        with pytest.raises(AssertionError):
            assert_silent(tmp_path / name)
    assert "blanking one example" in card(run)


def test_no_message_tells_it(caplog: pytest.LogCaptureFixture) -> None:
    records = TensorDataset(torch.zeros(N, 1))
    model = nn.Linear(1, 1)

    def begun(sampling: cw.Poisson) -> cw.Private:
        plan = cw.Plan(sampling, steps=3, clip=cw.Abadi(1.0), noise_multiplier=1.0)
        return cw.Private(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), seed=1)

    messages = []
    with pytest.raises(InvalidSampling, match="more records than largest=7000") as refused:
        begun(cw.Poisson(rate=0.01, batch_size=40, max_batch_size=200, largest=7_000)).loader(records)
    messages.append(str(refused.value))
    private = begun(cw.Poisson(rate=0.01, batch_size=40))
    batches = iter(private.loader(records))
    (x,) = next(batches)
    for wrong in (lambda: private.step(model(x[:3]).squeeze(1)), lambda: private.step()):
        with pytest.raises(ClipwiseError) as error:
            wrong()
        messages.append(str(error.value))
    messages += [repr(private.plan), repr(private.ledger), json.dumps(private.plan.to_dict()), *caplog.messages]
    assert all(tells(text) is None for text in messages)
    assert private.ledger.guarantee(1e-6).relation == "add_remove"


FROM_A_FILE = CONFIG.replace('"digits"', '"people.csv"\ndata.target = "y"\ndata.task = "classification"')


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        (CONFIG.replace(f"steps = {STEPS}", "epochs = 2"), (), "epochs.*give steps"),
        (CONFIG.replace(", delta = 1e-6", ""), (), "rate.*privacy.delta"),
        (CONFIG, ("max_batch_size=90",), "largest"),
        (CONFIG, ("largest=9000",), "largest= goes with"),
        (CONFIG, ("rate=1.5",), "rate.*at most 1"),
        (CONFIG, ('sampling="shuffled"',), "rate.*poisson"),
        (CONFIG.replace("rate = 0.006\n", ""), ("largest=9000",), "largest.*goes with rate"),
        (
            CONFIG,
            ("recalibration={methods=['private-temperature'],noise_multiplier=9.0,private_share=0.1}",),
            "private_share",
        ),
        (CONFIG.replace("optimizer.learning_rate = 0.1\n", ""), ('algorithm="dp-sgld"',), "posterior depends on"),
        (CONFIG, ('algorithm="dp-fedavg"', "federated.users=10"), "federated.users is a public number"),
        (FROM_A_FILE, (), "data.test_file"),
    ],
)
def test_what_would_be_made_from_the_number_is_refused(text: str, overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        config(text, *overrides)


def test_whether_a_delta_is_refused_depends_on_rate_and_batch_size_alone() -> None:
    """40 / 0.006 speak of 6,667 records and there are 7,919: a delta between their inverses is accepted."""
    assert prepare(config(CONFIG, "privacy.delta=1.4e-4"), data()).delta == 1.4e-4 > 1 / N
    with pytest.raises(InvalidConfig, match=r"over 1/n = 0.00015 \(n = 6,667, as rate and batch_size say\)") as refused:
        prepare(config(CONFIG, "privacy.delta=1.6e-4"), data())
    assert tells(str(refused.value)) is None


def test_held_out_records_in_a_file_of_their_own_are_accepted() -> None:
    assert config(FROM_A_FILE, 'data.test_file="others.csv"').batches.scheme(0) == cw.Poisson(
        rate=0.006, batch_size=BATCH
    )


def test_a_cap_with_its_public_limit_is_an_upper_bound_on_card_and_page(tmp_path: Path) -> None:
    train(config(CONFIG, "max_batch_size=90", "largest=9000", "steps=2"), output=tmp_path, data=data(), page=False)
    run = Run.load(tmp_path)
    assert run.guarantees["exact"].kind == "upper bound" and run.guarantees["exact"].relation == "add_remove"
    for text in (card(run), json.dumps(content(arms_of([run]), None), default=str)):
        assert "an upper bound" in text and "the tight value" not in text and "9000 records" in text
        assert tells(text) is None
