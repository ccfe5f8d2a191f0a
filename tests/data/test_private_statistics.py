"""Schemas and moments under differential privacy: what one record can change, what is charged, and when."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clipwise.accounting import Ledger, PrivateStatistics
from clipwise.cli.main import main
from clipwise.data import Category, Number, PrivateMoments, PrivateSchema
from clipwise.data import private_statistics as statistics
from clipwise.errors import DataError, InvalidPlan, LedgerError
from clipwise.noise import GaussianNoise
from clipwise.training import Config, prepare, train

CELL = st.one_of(
    st.sampled_from(["", "?", "-nan", "+NaN", "inf", "-1e400", "1_0", "0x10", "\u0661", "1e-9", "cook", "clerk", "co"]),
    st.floats().map(str),
    st.text(max_size=4),
)
ROW = st.tuples(CELL, CELL, CELL)


@given(st.lists(ROW, max_size=5), ROW)
def test_one_record_is_in_one_cell_of_every_column(rows: list[tuple[str, ...]], one: tuple[str, ...]) -> None:
    """Guarantees: a record is in exactly one cell of every column."""

    def counted(records: list[tuple[str, ...]]) -> Any:
        return statistics.histogram([[row[k] for row in records] for k in range(3)])

    change = counted([*rows, one]) - counted(rows)
    assert change.min() >= 0 and change.sum(axis=1).tolist() == [1, 1, 1], "whatever the other records hold"
    assert np.linalg.norm(change) <= math.sqrt(3) + 1e-12


@given(
    st.lists(ROW, max_size=5),
    ROW,
    st.lists(st.lists(st.binary(min_size=2, max_size=2), unique=True), min_size=3, max_size=3),
)
def test_one_record_continues_one_text_of_every_column(
    rows: list[tuple[str, ...]], one: tuple[str, ...], live: list[list[bytes]]
) -> None:
    """Guarantees: a record is in at most one cell of every column, because of texts of one length only one ..."""
    live = [[*prefixes, b"co"] if b"co" not in prefixes else prefixes for prefixes in live]

    def counted(records: list[tuple[str, ...]]) -> Any:
        return statistics.continuations([Counter(row[k] for row in records) for k in range(3)], live)

    change = counted([*rows, one]) - counted(rows)
    first = 0
    for prefixes in live:
        part = change[first : first + len(prefixes)]
        assert part.min() >= 0 and part.sum() <= 1
        first += len(prefixes)


@given(st.lists(st.lists(st.floats(width=32), min_size=3, max_size=3), min_size=1, max_size=5))
def test_one_record_changes_moments_by_no_more_than_the_noise_is_made_for(rows: list[list[float]]) -> None:
    x = torch.tensor(rows)
    change = statistics.moments(x) - statistics.moments(x[:-1])
    assert np.linalg.norm(change) <= math.sqrt(1 + 2 * 3) + 1e-9


def people(count: int = 4_000) -> dict[str, Any]:
    jobs = ["cook", "clerk", "", "cooks"]
    return {
        "age": [str(20 + k % 40) for k in range(count)],
        "job": [jobs[k % 4] for k in range(count)],
        "income": [["low", "high"][k % 2] for k in range(count)],
    }


def test_what_is_frequent_is_found_and_paid_for() -> None:
    ledger = Ledger()
    chosen = PrivateSchema.within(epsilon=1.0, delta=1e-6)
    schema = PrivateSchema(chosen.noise_multiplier, seed=3).propose(people(), "income", ledger)
    assert schema.columns == (Number("age", 20, 60, True), Category("job", ("clerk", "cook", "cooks"), True))
    assert ledger.events == (chosen.event,) and ledger.events[0].count == 1 + statistics.LENGTH
    assert 0.99 < ledger.epsilon(1e-6) <= 1.0


def test_one_record_can_put_nothing_into_a_schema() -> None:
    """A category, a bound or a kind of column that one record brings is not there, whatever the noise."""
    for seed in range(5):
        ledger, table = Ledger(), people()
        table["age"][0], table["job"][0] = "999999999", "informant"
        schema = PrivateSchema(1.0, seed).propose(table, "income", ledger)
        assert schema.columns[0] == Number("age", 20, 60, True) and "informant" not in schema.columns[1].features[0]
        assert all("informant" not in name for name in schema.features)
        table["age"][0] = "not a number at all"
        assert PrivateSchema(1.0, seed).propose(table, "income", Ledger()).columns[0].kind == "number"


def test_the_ledger_and_its_file_are_charged_before_noise_is_drawn(tmp_path: Path, monkeypatch: Any) -> None:
    path, ledger = tmp_path / "ledger.json", Ledger()

    def broken(self: Any, *args: Any) -> None:
        assert Ledger.load(path).events == ledger.events != ()
        raise RuntimeError("the machine stopped")

    monkeypatch.setattr(GaussianNoise, "release", broken)
    with pytest.raises(RuntimeError, match="the machine stopped"):
        PrivateSchema(2.0).propose(people(), "income", ledger, path)
    with pytest.raises(RuntimeError, match="the machine stopped"):
        PrivateMoments(2.0).find(torch.zeros(4, 2), ledger, path)
    assert [event.count for event in Ledger.load(path).events] == [33, 1]


def test_two_looks_with_a_seed_have_noise_of_their_own() -> None:
    ledger, x = Ledger(), torch.zeros(1000, 2)
    means = [PrivateMoments(5.0, seed=1).find(x, ledger)[0] for _ in range(2)]
    assert not torch.equal(*means) and ledger.events == (PrivateStatistics(5.0, 2),)


def test_a_ledger_that_somebody_else_continued_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    Ledger([PrivateStatistics(1.0)]).save(path)
    with pytest.raises(LedgerError, match="not on this ledger"):
        PrivateSchema(1.0).propose(people(), "income", Ledger(), path)


def test_what_has_no_noise_or_no_columns_is_refused() -> None:
    with pytest.raises(InvalidPlan, match="positive"):
        PrivateSchema(0.0)
    with pytest.raises(InvalidPlan, match="positive"):
        PrivateMoments(0)
    with pytest.raises(DataError, match="stands out of the noise"):
        PrivateSchema(100.0, seed=0).propose(people(20), "income", Ledger())
    with pytest.raises(DataError, match="no column"):
        PrivateSchema(1.0).propose({"y": ["1"]}, "y", Ledger())
    with pytest.raises(DataError, match="table of features"):
        PrivateMoments(1.0).find(torch.zeros(3), Ledger())


def write(folder: Path) -> Path:
    table, path = people(), folder / "people.csv"
    rows = zip(*table.values(), strict=True)
    path.write_text("\n".join([",".join(table), *map(",".join, rows)]))
    return path


def test_a_run_includes_what_its_columns_cost(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["data", "schema", str(write(tmp_path)), "--target", "income", "--output", "mine.toml"]
    assert main([*command, "--epsilon", "0.5", "--delta", "1e-6"]) == 2 and "--task" in capsys.readouterr().err
    assert not (tmp_path / "mine.ledger.json").exists(), "nothing was looked at"
    assert main([*command, "--task", "classification", "--epsilon", "0.5", "--delta", "1e-6"]) == 0
    paid = Ledger.load("mine.ledger.json")
    assert 0.49 < paid.epsilon(1e-6) <= 0.5
    short = ["epochs=0.2", "evaluation.resamples=0", "seed=1"]
    config = Config.load("mine.toml", short)
    assert prepare(config).plan.epsilon(1e-4) < 2.99, "a part of the 3 is spent already"
    run, _ = train(config, page=False)
    assert run.ledger is not None and paid.events[0] in run.ledger.events
    assert 2.99 < run.ledger.epsilon(1e-4) <= 3.0 and run.curves[-1]["epsilon"] == pytest.approx(3.0, abs=0.01)
    assert main([*command, "--task", "classification"]) == 2 and "exists and is kept" in capsys.readouterr().err
    (tmp_path / "mine.ledger.json").unlink()
    with pytest.raises(LedgerError):
        prepare(config)


def test_what_was_read_off_the_records_is_said(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["data", "schema", str(write(tmp_path)), "--target", "income"]
    assert main([*command, "--output", "mine.toml"]) == 0 and "epsilon does not cover" in capsys.readouterr().out
    assert (tmp_path / "mine.toml").stat().st_mode & 0o077 == 0, "it has bounds of private records"
    note = Config.load("mine.toml").data.load().note
    assert "[data.columns] were read off the records, which epsilon does not cover" in note
    assert main(command) == 0 and 'job = { kind = "category"' in capsys.readouterr().out
    assert main([*command, "--epsilon", "1"]) == 2 and "together" in capsys.readouterr().err


def test_unscaled_features_are_noticed_by_the_held_out_records_alone(tmp_path: Path) -> None:
    def note(train_value: float, test_value: float, extra: str = "") -> str:
        for name, value in (("train.csv", train_value), ("test.csv", test_value)):
            (tmp_path / name).write_text("a,b,y\n" + "".join(f"{k % 2},{value * (k % 3)},{k % 2}\n" for k in range(12)))
        options = f'target="y"\ntask="classification"\ntest_file="{tmp_path}/test.csv"\n{extra}'
        text = f'[data]\nsource="{tmp_path}/train.csv"\n{options}\n[model]\nsource="mlp"\n[privacy]\nepsilon=3'
        rest = 'steps=1\nbatch_size=4\nclip={rule="Abadi",R=1}\noptimizer={name="SGD",learning_rate=0.1}\n'
        return Config.parse(rest + text).data.load().note

    assert "not scaled" in note(1, 5_000) and "clipwise data schema" in note(1, 5_000)
    assert "not scaled" not in note(5_000, 1), "nothing is said that training records decide"
    assert "not scaled" not in note(1, 5_000, "std = 1") and "not scaled" not in note(1, 5_000, "standardise = true")
