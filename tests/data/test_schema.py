"""A schema: public descriptions of columns, how cells are encoded by them, and one error for all that is wrong.

Schemas and moments under differential privacy: what one record can change, what is charged, and when.
"""

from __future__ import annotations

import json
import math
import re
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
from clipwise.clipping import Abadi, Flat
from clipwise.data import Category, Number, PrivateMoments, PrivateSchema, Schema, TargetBounds, from_file, read_table
from clipwise.data import private_statistics as statistics
from clipwise.errors import DataError, InvalidPlan, LedgerError
from clipwise.noise import GaussianNoise
from clipwise.training import Config, prepare, proposal, train
from clipwise.training.config import DataChoice
from clipwise.training.config.starting import Start, left_out_of

PEOPLE = "id,age,job,income\n7,30,cook,low\n8,?,clerk,high\n9,99,,low\n10,20,cook,high\n"
SCHEMA = Schema((Number("age", 20, 60, missing=True), Category("job", ("clerk", "cook"), missing=True)))

KINDS: dict[str, tuple[Any, list[str], list[list[float]]]] = {
    "number": (Number("x", 0, 10), ["0", "2.5", "99", "-1e308"], [[-1], [-0.5], [1], [-1]]),
    "number, missing": (Number("x", 0, 10, True), ["10", "", "NaN"], [[1, 0], [0, 1], [0, 1]]),
    "category": (Category("x", ("a", "3")), ["a", "3", "3.0"], [[1, 0], [0, 1], [0, 1]]),
    "category, missing": (Category("x", ("a", "None"), True), ["None", "", "z"], [[0, 1], [0, 0], [0, 0]]),
}


def file(folder: Path, text: str = PEOPLE) -> Path:
    path = folder / "people.csv"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_encodes_its_cells(kind: str) -> None:
    column, cells, expected = KINDS[kind]
    schema = Schema((column,))
    assert schema.encode({"x": cells}, "t.csv").tolist() == expected
    assert schema.width == len(expected[0]) == len(schema.features)
    assert Schema.of(json.loads(json.dumps(schema.to_dict()))) == schema


def test_a_table_with_text_and_gaps_becomes_tensors(tmp_path: Path) -> None:
    data = from_file(file(tmp_path), target="income", schema=SCHEMA, test=1)
    assert data.features == ("age", "age is missing", "job=clerk", "job=cook") and data.schema == SCHEMA
    rows = torch.cat([data.train.tensors[0], data.test.tensors[0]]).tolist()
    assert sorted(rows) == sorted([[-0.5, 0, 0, 1], [0, 1, 1, 0], [1, 0, 0, 0], [-1, 0, 0, 1]])
    assert data.classes == ("high", "low") and data.train.tensors[0].dtype == torch.float32


CELL = st.one_of(st.floats(allow_nan=True).map(str), st.sampled_from(["a", "b", "", "?"]))


@given(st.lists(st.tuples(CELL, CELL), min_size=1, max_size=6), st.data())
def test_a_code_depends_on_its_own_record_and_is_within_one(rows: list[tuple[str, str]], data: st.DataObject) -> None:
    """Guarantees: a record's code depends on that record and this schema alone, and every number is in [-1, 1]."""
    schema = Schema((Number("n", -1e300, 3.0, True), Category("c", ("a", "b"), True)))
    rows = [(n if n not in ("a", "b", "inf", "-inf") else "1", c) for n, c in rows]
    whole = schema.encode({"n": [n for n, _ in rows], "c": [c for _, c in rows]}, "t.csv")
    assert bool(torch.isfinite(whole).all()) and float(whole.abs().max()) <= 1
    k = data.draw(st.integers(0, len(rows) - 1))
    assert torch.equal(schema.encode({"n": [rows[k][0]], "c": [rows[k][1]]}, "t.csv")[0], whole[k])


def test_all_problems_of_both_files_are_one_message_that_quotes_no_record(tmp_path: Path) -> None:
    wrong = file(tmp_path, "age,job,income\nsecret1,cook,low\n,secret2,high\n30,cook,\n,cook,high\n")
    other = tmp_path / "other.csv"
    other.write_text("job,income\ncook,secret3\n")
    schema = Schema((Number("age", 20, 60), Category("job", ("clerk", "cook"))))
    with pytest.raises(DataError) as caught:
        from_file(wrong, target="income", schema=schema, classes=["low", "high"], test_file=other)
    said = str(caught.value)
    for part in (
        *("people.csv has 4 problems", "column 'age', row 1: the value is not a finite number"),
        *("column 'age', rows 2 and 4: the value is missing", "column 'job', row 2: the value is none of the 2"),
        *("column 'income', row 3: the class is missing", "other.csv has 2 problems", "there is no column 'age'"),
        *("column 'income', row 1: the value is none of the 2 classes", "missing = true"),
    ):
        assert part in said, said
    assert "secret" not in said and {"secret1", "secret2", "secret3"} <= set(
        caught.value.found.replace("'", " ").split()
    )


def test_an_empty_cell_of_a_category_is_said_to_be_missing() -> None:
    schema = Schema((Category("job", ("clerk", "cook")),))
    with pytest.raises(DataError, match=r"column 'job', rows 1 and 3: the value is missing\. Allow empty") as caught:
        schema.encode({"job": ["", "cook", "?"]}, "people.csv")
    assert not caught.value.found
    with pytest.raises(DataError, match=r"row 1: the value is missing\.\n.*row 2: the value is none of the 2 cat"):
        schema.encode({"job": ["", "baker"]}, "people.csv")


def test_many_problems_are_counted_and_the_first_twenty_shown(tmp_path: Path) -> None:
    names = [f"c{k}" for k in range(30)]
    path = file(tmp_path, f"{','.join(names)},y\n" + "\n".join(f"{','.join('?' * 30)},{k}" for k in range(9)))
    with pytest.raises(DataError, match="has 30 problems") as caught:
        from_file(path, task="regression")
    said = str(caught.value)
    assert "'c19', rows 1, 2, 3, 4 and 5 more: the value is missing" in said and "'c20'" not in said
    assert "and 10 more." in said and "clipwise data schema" in said


def test_rows_with_too_few_cells_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"2 cells, but the header has 4 columns; 2 other lines \(4 and 5\)"):
        read_table(file(tmp_path, "a,b,c,d\n1,2,3,4\n1,2\n1\n1,2,3,4,5\n"), ",")


def test_what_is_proposed_can_be_used(tmp_path: Path) -> None:
    table = read_table(file(tmp_path), ",")
    schema = Schema.propose(table, "income")
    assert schema.columns == (
        *(Number("id", 7, 10), Number("age", 20, 99, True), Category("job", ("clerk", "cook"), True)),
    )
    assert schema.encode(table, "people.csv").shape == (4, schema.width)
    arrays: dict[str, Any] = {"x": np.arange(3.0), "flag": np.array([True, False, True]), "im": np.ones((3, 2))}
    assert [column.name for column in Schema.propose(arrays).columns] == ["x", "flag"]
    with pytest.raises(DataError, match="no column to describe"):
        Schema.propose({"same": ["1", "1"], "y": ["0", "1"]}, "y")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "one column at least"),
        ({"a": 3}, "should be a table"),
        ({"a": {"kind": ["number"]}}, "kind should be one of"),
        ({"a": {"kind": "number", "low": 0}}, "missing or unknown is high"),
        ({"a": {"kind": "number", "low": True, "high": 2}}, "finite numbers low < high"),
        ({"a": {"kind": "number", "low": -1e308, "high": 1e308}}, "too far apart"),
        ({"a": {"kind": "number", "low": 0, "high": 1, "missing": 1}}, "true or false"),
        ({"a": {"kind": "category", "categories": "ab"}}, "a list of texts"),
        ({"a": {"kind": "category", "categories": ["x", "x"]}}, "different names"),
        ({"a": {"kind": "category", "categories": ["x "]}}, "blanks"),
        ({"a\n": {"kind": "number", "low": 0, "high": 1}}, "on one line"),
        (
            {"a=b": {"kind": "number", "low": 0, "high": 1}, "a": {"kind": "category", "categories": ["b"]}},
            "'a=b' names two columns",
        ),
        ({"a": {"kind": "category", "categories": list(range(100_001))}}, "more than 100000"),
    ],
)
def test_a_description_that_makes_no_sense_is_refused(given: Any, expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        Schema.of(given)


def test_arrays_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for table in ({"age": np.ones((2, 2)), "job": ["cook"]}, {"age": np.ones(2), "job": np.array([b"\xff", b"a"])}):
        with pytest.raises(DataError, match=r"it holds (an array of shape|text that is not UTF-8)"):
            SCHEMA.encode(table, "t.npz")
    with pytest.raises(DataError, match="different lengths"):
        SCHEMA.encode({"age": ["1"], "job": ["cook", "cook"]}, "t.npz")
    with pytest.raises(DataError, match="not both"):
        from_file(file(tmp_path), target="income", schema=SCHEMA, features=["age"])


ODD_CELL = st.one_of(
    st.sampled_from(["", "?", "-nan", "+NaN", "inf", "-1e400", "1_0", "0x10", "\u0661", "1e-9", "cook", "clerk", "co"]),
    st.floats().map(str),
    st.text(max_size=4),
)
ROW = st.tuples(ODD_CELL, ODD_CELL, ODD_CELL)


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
    text = (tmp_path / "mine.toml").read_text()
    assert "classes = [...]" in capsys.readouterr().err and "# the classes are not described: name those" in text
    assert "\nclasses" not in text, "they would be read off the records"
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
    assert "[data.columns] were read off the records, which epsilon does not cover. So were data.classes." in note
    public = (tmp_path / "mine.toml").read_text().replace("columns_public = false\n", "")
    assert 'classes = ["high", "low"]' in public and not Config.parse(public).data.load().note, "all is public now"
    unnamed = public.replace('classes = ["high", "low"]\n', "")
    assert "which epsilon does not cover: name them by `classes = [...]`" in Config.parse(unnamed).data.load().note
    assert main(command) == 0 and 'job = { kind = "category"' in capsys.readouterr().out
    assert main([*command, "--epsilon", "1"]) == 2 and "together" in capsys.readouterr().err


def customers(folder: Path, rows: int = 3_000) -> Path:
    """A table with an identifier, free text, a constant, row numbers and a quantity."""
    generator, path = np.random.default_rng(0), folder / "customers.csv"
    numbers = zip(generator.integers(18, 90, rows), generator.lognormal(10, 1, rows), strict=True)
    lines = [f"C{k:05},{k + 7},{age},{income:.2f},eur,{5 * age + k % 3}" for k, (age, income) in enumerate(numbers)]
    path.write_text("\n".join(["customer_id,row,age,income,currency,spend", *lines]))
    return path


def test_columns_that_are_left_out_are_named_with_the_reason(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """An identifier vanished without a word."""
    monkeypatch.chdir(tmp_path)
    assert main(["data", "schema", str(customers(tmp_path)), "--target", "spend", "--output", "mine.toml"]) == 0
    task = "task = regression (the target has 216 different numbers); --task changes it"
    expected = [
        "left out: 'customer_id' (text, every row different)",
        "left out: 'row' (a number for every row, one after the other)",
        "left out: 'currency' (the same in every row)",
    ]
    shown, text = capsys.readouterr().err, (tmp_path / "mine.toml").read_text()
    assert [line.removeprefix("clipwise: ") for line in shown.splitlines()] == [task, *expected]
    assert [line.removeprefix("# ") for line in text.splitlines() if "left out" in line] == expected
    assert Config.load("mine.toml").data.load().features == ("age", "income")


def test_columns_that_are_lost_in_the_noise_are_named_too(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    made = PrivateSchema(PrivateSchema.within(0.5, 1e-6).noise_multiplier, seed=1)
    monkeypatch.setattr(PrivateSchema, "within", lambda *_: made)
    command = ["data", "schema", str(customers(tmp_path)), "--target", "spend", "--output", "mine.toml"]
    assert main([*command, "--task", "regression", "--epsilon", "0.5", "--delta", "1e-6"]) == 0
    shown = capsys.readouterr().err
    assert "left out: 'income' (too spread out, or too many different texts, for this epsilon)" in shown
    assert "3,000 records are few for this epsilon: describe these columns in [data.columns]" in shown
    text = (tmp_path / "mine.toml").read_text()
    assert all(f"# {line.removeprefix('clipwise: ')}\n" in text for line in shown.splitlines())


def test_bounds_without_most_of_the_records_are_called_narrow(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Ages from 18 to 89 became bounds of 60 and 80, without a word."""
    monkeypatch.chdir(tmp_path)
    rows = zip(*drawn(2_000).values(), ["ab"[k % 2] for k in range(2_000)], strict=True)
    (tmp_path / "t.csv").write_text("\n".join(["age,income,visits,score,y", *map(",".join, rows)]))
    made = PrivateSchema(PrivateSchema.within(0.5, 1e-5).noise_multiplier, seed=1)
    monkeypatch.setattr(PrivateSchema, "within", lambda *_: made)
    command = ["data", "schema", "t.csv", "--target", "y", "--task", "classification", "--output", "t.toml"]
    assert main([*command, "--epsilon", "0.5", "--delta", "1e-5"]) == 0
    shown, text = capsys.readouterr().err, (tmp_path / "t.toml").read_text()
    for line in ("bounds may be narrow: 'age' (only about ", "cells beyond bounds count as the bound: widen narrow"):
        assert f"clipwise: {line}" in shown and f"\n# {line}" in text
    _, surely = made.proposed(people(), "income", Ledger())
    assert 2_000 < surely["age"] < 4_000 and [*surely] == ["age"], "categories have no bounds"


def test_as_many_records_are_within_the_bounds_as_the_documentation_says() -> None:
    """`pytest tests/data/test_schema.py -k documentation` makes the table of docs/data.md again."""
    said = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    rows = re.findall(r"^\| ([\d,]+) records \| (\d+) % \| (\d+) % \| (\d+) % \|$", said, re.MULTILINE)
    expected = {int(row[0].replace(",", "")): list(map(int, row[1:])) for row in rows}
    found = {count: [round(100 * within_bounds(count, epsilon)) for epsilon in (0.5, 1, 2)] for count in expected}
    assert found == expected and len(found) == 4


def drawn(count: int, seed: int = 0) -> dict[str, list[str]]:
    generator = np.random.default_rng(seed)
    columns = {
        "age": generator.integers(18, 90, count),
        "income": generator.lognormal(10.2, 0.5, count).round(2),
        "visits": generator.poisson(4, count),
        "score": generator.normal(0, 1, count).round(3),
    }
    return {name: column.astype(str).tolist() for name, column in columns.items()}


def within_bounds(count: int, epsilon: float) -> float:
    """The share of cells within the bounds that are found, over four columns and five tables; none where none are."""
    noise, shares = PrivateSchema.within(epsilon, 1e-5).noise_multiplier, []
    for seed in range(5):
        table = drawn(count, seed)
        try:
            found = PrivateSchema(noise, seed).propose(table, None, Ledger()).columns
        except DataError:
            found = ()
        for column in found:
            assert isinstance(column, Number)
            values = np.array(table[column.name], dtype=float)
            shares.append(float(((column.low <= values) & (values <= column.high)).mean()))
    return sum(shares) / (4 * 5)


def test_a_name_of_a_column_cannot_leave_its_comment() -> None:
    """It would be a line of the configuration."""
    (line,) = left_out_of({"id\nprivacy.private = false #\u2028\x85": "empty"})
    assert line.isprintable() and line.isascii()


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_what_a_configuration_begins_with_depends_on_public_numbers_alone(task: str, tmp_path: Path) -> None:
    """Twenty epochs of a small table left models that had hardly begun to learn."""
    texts = []
    for k in range(2):
        rows = "".join(f"{(k + 1) * j % 7},{j % (k + 2)}\n" for j in range(1_000))
        (tmp_path / "t.csv").write_text(f"a,y\n{rows}")
        text = proposal(str(tmp_path / "t.csv"), "y", task=task)
        texts.append([line for line in text.splitlines() if not line.startswith(("a = ", "classes", "target_bounds"))])
    assert texts[0] == texts[1]
    columns = "\n[data.columns]\na = { kind = 'number', low = 0, high = 7 }\n"
    config = Config.parse("\n".join(texts[0]).replace("\n[data.columns]\n", columns))
    plan = config.batches.scheme(800)
    assert config.batches.count(plan) == 640 and config.batches.epochs == 40
    assert config.clip == Flat(Abadi({"classification": 3.0, "regression": 1.0}[task]))
    large = Start.of(1_000_000, task)
    assert (large.epochs, large.batch_size, large.norm) == (
        20,
        512,
        10.0 if task == "classification" else 1.0,
    ) and Start.of(3, task).batch_size == 1


def test_too_many_classes_are_not_listed(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,y\n" + "".join(f"{k % 7},{k}\n" for k in range(101)))
    text = proposal(str(tmp_path / "t.csv"), "y", task="classification")
    assert "\nclasses" not in text and "[data] classes = [...]" in text


def test_bounds_of_a_quantity_are_proposed(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["data", "schema", str(customers(tmp_path)), "--target", "spend"]
    assert main([*command, "--output", "mine.toml"]) == 0
    data = Config.load("mine.toml").data
    spent = [float(value) for value in read_table(tmp_path / "customers.csv", ",")["spend"]]
    assert data.target_bounds == TargetBounds(min(spent), max(spent))
    assert "So were data.target_bounds" in data.load().note


def test_bounds_of_a_quantity_are_paid_for(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """With --epsilon the target is one of the columns that are looked at, and charged with them."""
    monkeypatch.chdir(tmp_path)
    looked: list[int] = []
    counted = statistics.histogram
    monkeypatch.setattr(statistics, "histogram", lambda columns: looked.append(len(columns)) or counted(columns))
    rows = customers(tmp_path)
    command = ["data", "schema", str(rows), "--target", "spend", "--task", "regression", "--delta", "1e-6"]
    assert main([*command, "--epsilon", "4", "--output", "mine.toml"]) == 0
    data = Config.load("mine.toml").data
    assert data.target_bounds is not None and 80 <= data.target_bounds.low < 200 < data.target_bounds.high <= 500
    assert "target_bounds leave out ends that few records have" in capsys.readouterr().err
    assert looked == [6] and "target_bounds" not in data.load().note and len(data.charged()) == 1
    found = Schema((Number("age", 0, 100),))
    monkeypatch.setattr(PrivateSchema, "proposed", lambda self, *others: (found, {}))
    assert main([*command, "--epsilon", "4", "--output", "lost.toml"]) == 0
    assert "the bounds of the target were not found: give [data] target_bounds" in capsys.readouterr().err
    assert Config.load("lost.toml").data.target_bounds is None


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


def described(folder: Path, text: str, *options: str) -> list[str]:
    (folder / "t.csv").write_text(text)
    return ["data", "schema", str(folder / "t.csv"), *options]


def test_a_wrong_target_is_answered_with_the_columns_and_the_one_that_was_meant(tmp_path: Path, capsys: Any) -> None:
    assert main(described(tmp_path, "age,tier\n30,a\n40,b\n", "--target", "teir")) == 2
    said = capsys.readouterr().err
    assert "no column 'teir' to predict. It has age, tier. Did you mean 'tier'? Name it with --target." in said
    assert main(described(tmp_path, "30,17.75\n40,18\n", "--target", "tier")) == 2
    said = capsys.readouterr().err
    assert "Its first line has numbers, no names." in said and "17.75" not in said, "a record, which is not quoted"


@pytest.mark.parametrize(
    ("targets", "options", "said"),
    [
        (["0", "1", "2"] * 20, (), "task = classification (the target has 3 different numbers); --task changes it"),
        ([f"{k}.5" for k in range(60)], (), "task = regression (the target has 60 different numbers)"),
        (["a", "b"] * 30, (), "task = classification (the target has 2 different texts)"),
        ([f"{k}.5" for k in range(60)], ("--task", "classification"), "warning: 60 classes for 60 records"),
    ],
)
def test_a_task_that_was_guessed_or_is_doubtful_is_said(
    targets: list[str], options: tuple[str, ...], said: str, tmp_path: Path, capsys: Any
) -> None:
    text = "x,y\n" + "".join(f"{k * k % 31},{target}\n" for k, target in enumerate(targets))
    assert main(described(tmp_path, text, *options)) == 0
    found = capsys.readouterr()
    assert said in found.err and found.out.startswith("#"), "standard output is the configuration alone"
    assert ("task =" in found.err) == (not options)


def test_a_quantity_that_is_trained_on_as_classes_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("x,y\n" + "".join(f"{k % 2},{k % 70}.5\n" for k in range(140)))
    few = from_file(tmp_path / "t.csv", task="classification")
    choice = DataChoice(str(tmp_path / "t.csv"), {"task": "classification"})
    assert len(few.classes) == 70 and "70 classes for 28 held-out records" in choice.load().note
    assert 'data.task = "regression"' in choice.load().note
    (tmp_path / "t.csv").write_text("x,y\n" + "".join(f"{k % 2},{k % 10}\n" for k in range(140)))
    assert "classes for" not in choice.load().note


def test_every_action_has_its_own_help(capsys: Any) -> None:
    assert main(["data", "--help"]) == 0
    assert "--target" not in capsys.readouterr().out
    assert main(["data", "schema", "--help"]) == 0
    said = capsys.readouterr().out
    assert "--target" in said and "schema:" not in said and "NAME" not in said
    assert main(["data", "list", "--target", "y"]) == 2
