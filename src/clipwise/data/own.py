"""The user's own data: CSV, NPZ and Parquet files into tensors, with one error that names every column and row.

Nothing is guessed: text in the target column means classes, but whether numbers are classes or quantities has to be
said, and a column that is not a number is refused rather than left out, unless a schema describes it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from clipwise._validate import is_count
from clipwise.data.dataset import DataSet, Task, split
from clipwise.data.readers import LONG, Column, Problems, Table, all_numbers, no_column, numbers, read_table, texts
from clipwise.data.schema import Schema
from clipwise.errors import DataError

__all__ = ["class_names", "from_file", "inputs_of"]

_CLASSES_READ = (
    "The classes are those in the records, which epsilon does not cover: name them by `classes = [...]`, in a "
    "configuration under [data]."
)

_REMEDY = (
    "Leave the column out with features=[...], or put numbers in; or describe the table with a schema, which takes "
    "text and empty cells (`clipwise data schema` proposes one)."
)

_TRAINED = (
    "The model takes the columns as they were described when it was trained: change the rows. Other columns, other "
    "categories and empty cells (`missing = true`) need a new training."
)


def from_file(
    path: str | os.PathLike[str],
    target: str = "y",
    *,
    task: Task | None = None,
    features: Sequence[str] | None = None,
    schema: Schema | None = None,
    classes: Sequence[str] | None = None,
    test: float | int = 0.2,
    test_file: str | os.PathLike[str] | None = None,
    seed: int = 0,
    delimiter: str = ",",
) -> DataSet:
    r"""A data set from a CSV (with a header), Parquet or NPZ file.

    - `path`: the file; its ending says what it is.
    - `target`: the column to predict; in an NPZ file the array.
    - `task`: "classification" or "regression"; may be left out when the target is text.
    - `features`: the columns to predict from; all others by default. An NPZ file has one array `x`.
    - `schema`: which columns to predict from, with public bounds or categories, by which they are encoded and scaled.
    - `classes`: the names of the classes in their order. Left out, they are the values that occur in training, sorted,
      which epsilon does not cover: name them when a class may be so rare that its existence is a secret.
    - `test`: the share (below 1) or number of records that is held out, unless there is a `test_file`. An NPZ file with
      the arrays x_train, y_train, x_test and y_test has its own test part.
    - `test_file`: a file of the same form whose records are held out.
    - `seed`: of the random choice of held-out records.
    - `delimiter`: between the columns of a CSV file.

    Without a schema numbers become float32 as they are; nothing is scaled (`DataSet.standardised` does that), and
    empty cells are refused.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "pets.csv")
    >>> _ = path.write_text("weight,legs,kind\n4.1,4,cat\n0.03,2,bird\n5.0,4,cat\n0.04,2,bird\n")
    >>> data = from_file(path, target="kind", test=1)
    >>> data.classes, data.features, len(data.train)
    (('bird', 'cat'), ('weight', 'legs'), 3)
    """
    source = Path(path)
    if test_file is not None and test != 0.2:
        raise DataError("give either test_file= or test=, not both.")
    if not is_count(test, least=0) and not (isinstance(test, float) and 0 < test < 1):
        raise DataError(f"test is a share between 0 and 1 or a whole number of records, not {test!r}.")
    if schema is not None and features is not None:
        raise DataError("give either schema= or features=, not both: a schema names the columns that are used.")
    tables = _tables(source, test_file, target, delimiter)
    chosen = features if schema is None else [column.name for column in schema.columns]
    _check_columns(tables, target, chosen, absent_allowed=schema is not None)
    if chosen is None:
        chosen = _all_but(target, source, tables[0][1])
    names = _classes(tables[0], target, task, classes)
    parts = _parts(tables, target, names, tuple(chosen), schema)
    if len(parts) == 1:
        count = test if isinstance(test, int) else round(test * len(parts[0][0]))
        train, held_out = split(*parts[0], test=count, seed=seed)
    else:
        train, held_out = (TensorDataset(*part) for part in parts)
        if train[0][0].shape != held_out[0][0].shape:
            raise DataError(f"inputs of {tables[1][0]} are not of the shape that training has.")
    return DataSet(
        name=source.stem,
        task="classification" if names else "regression",
        train=train,
        test=held_out,
        classes=names,
        features=_feature_names(schema, tuple(chosen), train),
        source=source.name,
        note="" if classes or not names else _CLASSES_READ,
        schema=schema,
    )


def inputs_of(file: str, table: Table, features: Sequence[str], schema: Schema | None) -> Tensor:
    """The inputs of new records, as `from_file` made those of a data set with these features and this schema.

    Other columns are not looked at. Without features the table must have one array, or one that is called `x`. All that
    is wrong with the table is one `DataError`; `file` names it.

    >>> inputs_of("new.csv", {"legs": ["4", "2"], "id": ["a", "b"]}, ("legs",), None)
    tensor([[4.],
            [2.]])
    """
    if schema is not None:
        return schema.encode(table, file, _TRAINED)
    chosen = tuple(features) or (("x",) if "x" in table else tuple(table))
    if not features and len(chosen) != 1:
        raise DataError(
            f"{file} should have one array `x`: the data that the model was trained on had no named columns."
        )
    problems = Problems(_TRAINED)
    absent = [name for name in chosen if name not in table]
    problems.add_absent(file, absent, table, "The model was trained with it.")
    made = _inputs(file, table, tuple(name for name in chosen if name in table), problems) if table else None
    problems.check()
    assert made is not None
    return made


def _all_but(target: str, source: Path, table: Table) -> list[str]:
    """The columns that are features unless others are named."""
    chosen = [name for name in table if name != target]
    if not chosen:
        raise DataError(f"{source} has no column beside the target {target!r}.")
    if "" in chosen:
        raise DataError(
            f"{source} has a column without a name, perhaps row numbers that another program wrote. Name it in the "
            "file if it is a feature, or choose the columns with features=[...]."
        )
    return chosen


def _feature_names(schema: Schema | None, chosen: tuple[str, ...], train: TensorDataset) -> tuple[str, ...]:
    if schema is not None:
        return schema.features
    return chosen if train[0][0].shape == (len(chosen),) else ()


def _parts(
    tables: Sequence[tuple[str, Table]],
    target: str,
    classes: tuple[str, ...],
    chosen: tuple[str, ...],
    schema: Schema | None,
) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of each file; one error reports everything that is wrong with them."""
    problems = Problems()
    parts = []
    for file, table in tables:
        x = _inputs(file, table, chosen, problems) if schema is None else schema.gather(table, file, problems)
        y = _targets(file, target, table[target], classes, problems)
        parts.append((x, y))
    problems.check()
    made = [(x, y) for x, y in parts if x is not None and y is not None]
    for (file, _), (x, y) in zip(tables, made, strict=True):
        if len(x) != len(y):
            raise DataError(f"{file} has arrays of different lengths: {len(x)} inputs, but {len(y)} targets.")
    return made


def _tables(
    path: Path, test_file: str | os.PathLike[str] | None, target: str, delimiter: str
) -> list[tuple[str, Table]]:
    """The training table and, if there is one, the test table, each with the name of its file."""
    first = read_table(path, delimiter)
    if path.suffix == ".npz" and {"x_train", "y_train", "x_test", "y_test"} <= first.keys():
        if test_file is not None:
            raise DataError(f"{path} has its own test part; omit test_file=.")
        parts = ("train", "test")
        return [(f"{path} ({part})", {"x": first[f"x_{part}"], target: first[f"y_{part}"]}) for part in parts]
    tables = [(str(path), first)]
    return tables if test_file is None else [*tables, (str(test_file), read_table(Path(test_file), delimiter))]


def _check_columns(
    tables: Sequence[tuple[str, Table]], target: str, features: Sequence[str] | None, absent_allowed: bool
) -> None:
    """Refuse files without the target or a feature (unless a schema reports those), or with different features."""
    for file, table in tables:
        for name in (target, *(() if absent_allowed else features or ())):
            if name not in table:
                raise no_column(file, [name], table)
    if features is not None and target in features:
        raise DataError(f"the target {target!r} cannot be a feature too.")
    first, *others = (set(features or table) for _, table in tables)
    if any(first != other for other in others):
        differing = ", ".join(sorted(map(repr, first ^ others[0])))
        raise DataError(f"the training and the test file have different columns: {differing}.")


def _classes(
    named: tuple[str, Table], target: str, task: Task | None, classes: Sequence[str] | None
) -> tuple[str, ...]:
    """The names of the classes; none for regression."""
    file, table = named
    column = table[target]
    text = not all_numbers(column) if isinstance(column, list) else column.dtype.kind in "US"
    if task not in (None, "classification", "regression"):
        raise DataError(f"task is 'classification' or 'regression', not {task!r}.")
    if task is None and not text and classes is None:
        raise DataError(f"column {target!r} of {file} holds numbers: say task='classification' or task='regression'.")
    if task == "regression":
        if classes is not None:
            raise DataError("a regression has no classes; leave classes= out.")
        return ()
    if classes is not None:
        if len(set(classes)) != len(classes) or len(classes) < 2:
            raise DataError(f"classes should be two or more different names, not {list(classes)}.")
        return tuple(map(str, classes))
    return class_names(file, target, column)


def class_names(file: str, target: str, column: Column) -> tuple[str, ...]:
    """The classes that occur in the column `target` of a file, in their order; epsilon does not cover them.

    >>> class_names("pets.csv", "kind", ["10", "9", "cat", "9"])
    ('9', '10', 'cat')
    """
    values = set(_labels(file, target, column))
    if len(values) < 2:
        raise DataError(
            f"column {target!r} of {file} has a single value; there is nothing to learn.", repr(min(values))
        )
    return tuple(sorted((value for value in values if not _no_class(value)), key=_in_order))


def _no_class(label: str) -> bool:
    """Whether a label is missing; "none" and "?" may be classes."""
    return label.lower() in ("", "nan")


def _in_order(label: str) -> tuple[float, str]:
    """Numbers by value, and before text."""
    try:
        return float(label), label
    except ValueError:
        return float("inf"), label


def _labels(file: str, name: str, column: Column) -> list[str]:
    """The value of each record's class as text; 3.0 is "3"."""
    try:
        return texts(np.array(column, dtype=np.float64) if isinstance(column, list) and all_numbers(column) else column)
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: the target {name!r} is not text in UTF-8.", str(error)) from None
    except ValueError as error:
        raise DataError(
            f"{file}: the target {name!r} is {error}; one class a record is needed, as number or text."
        ) from None


def _targets(file: str, name: str, column: Column, classes: tuple[str, ...], problems: Problems) -> Tensor | None:
    if not classes:
        found = _numbers(file, name, column, problems)
        if found is not None and found.ndim != 1:
            raise DataError(f"{file}: the target {name!r} has shape {found.shape}; one number a record is needed.")
        return None if found is None else torch.from_numpy(found)
    number = {label: k for k, label in enumerate(classes)}
    labels = _labels(file, name, column)
    unknown = [(row, label) for row, label in enumerate(labels, 1) if label not in number]
    empty = [row for row, label in unknown if _no_class(label)]
    others = [(row, label) for row, label in unknown if not _no_class(label)]
    if empty:
        problems.add(file, f"column {name!r}", "the class is missing", rows=empty)
    if others:
        problems.add(
            *(file, f"column {name!r}", f"the value is none of the {len(classes)} classes"),
            rows=[row for row, _ in others],
            remedy="Name all of the classes with classes=[...].",
            found=others[0][1],
        )
    return None if unknown else torch.tensor([number[label] for label in labels])


def _inputs(file: str, table: Table, features: tuple[str, ...], problems: Problems) -> Tensor | None:
    found = [_numbers(file, name, table[name], problems) for name in features]
    columns = [column for column in found if column is not None]
    if len(columns) < len(found):
        return None
    if len(columns) == 1 and columns[0].ndim > 1:
        return torch.from_numpy(columns[0])
    if any(column.ndim != 1 for column in columns):
        raise DataError(f"{file}: several arrays can be features only if each has one number for each record.")
    lengths = {name: len(column) for name, column in zip(features, columns, strict=True)}
    if len(set(lengths.values())) > 1:
        raise DataError(f"{file} has arrays of different lengths: {lengths}.")
    return torch.from_numpy(np.stack(columns, axis=1))


def _numbers(file: str, name: str, column: Column, problems: Problems) -> NDArray[np.float32] | None:
    """A column as float32; None, and a problem for each kind, unless all of it is finite."""
    if not isinstance(column, list) and column.dtype.kind not in "biufUS":
        raise DataError(f"{file}: {name!r} is an array of type {column.dtype}; numbers are needed.")
    found = numbers(column)
    with np.errstate(over="ignore", invalid="ignore"):
        made = found.values.astype(np.float32)
    large = ~np.isfinite(made) & ~found.missing & ~found.wrong
    kinds = {"missing": found.missing, "not a number": found.wrong, "not a finite float32 number": large}
    for what, where in kinds.items():
        rows = np.unique(np.argwhere(where)[:, 0])
        if len(rows):
            problems.add(
                *(file, f"column {name[:LONG]!r}", f"the value is {what}"),
                rows=[int(row) + 1 for row in rows],
                remedy=_REMEDY,
                found=np.ravel(np.asarray(column)[rows[0]])[0],
            )
    return made if np.isfinite(made).all() else None
