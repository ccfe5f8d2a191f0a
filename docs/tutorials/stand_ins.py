"""What takes the place of data and weights that are not on this machine, when a tutorial is only tried out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.errors import DataError

RECORDS = 400


def adult(folder: Path) -> Any:
    """A table with columns of Adult, of which one says something about the income."""
    import pandas as pd

    random = np.random.default_rng(0)
    table = {
        "age": random.integers(17, 91, RECORDS),
        "education-num": (learnt := random.integers(1, 17, RECORDS)),
        "capital-gain": random.integers(0, 99_999, RECORDS),
        "hours-per-week": random.integers(1, 100, RECORDS),
        "marital-status": random.choice(["Divorced", "Widowed"], RECORDS),
        "occupation": random.choice(["?", "Sales"], RECORDS),
        "sex": random.choice(["Female", "Male"], RECORDS),
        "income-per-year": np.where(learnt > 8, ">50K", "<=50K"),
    }
    pd.DataFrame(table).to_csv(folder / "adult.csv", index=False)
    return SimpleNamespace(paths={"adult.csv": folder / "adult.csv"})


def mnist(folder: Path) -> Any:
    """scikit-learn's digits, at the size of MNIST's."""
    digits = cw.data.load("digits")
    grown = [TensorDataset(F.interpolate(x, 28), y) for x, y in (digits.train.tensors, digits.test.tensors)]
    return cw.data.DataSet("mnist", "classification", *grown, digits.classes)


STAND_INS: dict[str, Callable[[Path], Any]] = {"adult": adult, "mnist": mnist}


@contextmanager
def stand_ins(folder: Path, say: Callable[[str], object]) -> Iterator[None]:
    """Let the loaders of `cw.data` return a stand-in for what they do not find, and `say` so."""

    def or_stand_in(loader: Callable[..., Any]) -> Callable[..., Any]:
        def load(wanted: Any, *arguments: Any) -> Any:
            try:
                return loader(wanted, *arguments)
            except DataError:
                name = wanted if isinstance(wanted, str) else wanted.name
                say(f"{name} is not in the cache folder: {STAND_INS[name].__doc__}")
                return STAND_INS[name](folder)

        return load

    with ExitStack() as stack:
        for name in ("load", "load_text", "load_weights", "obtain"):
            stack.enter_context(patch.object(cw.data, name, or_stand_in(getattr(cw.data, name)), create=True))
        yield
