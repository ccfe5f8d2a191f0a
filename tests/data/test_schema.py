"""A schema: public descriptions of columns, how cells are encoded by them, and one error for all that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clipwise.data import Category, Number, Schema, from_file, read_table
from clipwise.errors import DataError

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
    assert Schema.of(json.loads(json.dumps(schema.as_dict()))) == schema


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
