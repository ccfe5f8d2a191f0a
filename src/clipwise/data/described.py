"""Tables that a public schema encodes: Adult, German credit, COMPAS and credit-card fraud.

Categories are those of the published descriptions, also where no record has them. Bounds of numbers are round ones that
the meaning of the column suggests, and no statistics: a number beyond them counts as the bound.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import torch
from torch.utils.data import TensorDataset

from clipwise.data.dataset import split
from clipwise.data.readers import Table
from clipwise.data.schema import Category, Number, Schema
from clipwise.errors import DataError

__all__ = ["DESCRIBED", "Described"]

_AT_ONCE = 20_000
"""Records that are text at the same time."""
_SEED = 0


@dataclass(frozen=True)
class Described:
    r"""How the CSV file of a data set becomes tensors: which columns, by which schema, and what its classes are.

    >>> toy = Described("toy.csv", Schema((Number("age", 0, 100),)), "ill", {"0": "no", "1": "yes"})
    >>> train, test = toy.parts(b"age,ill,age\n" + b"50,1,7\n" * 5)
    >>> len(train), test.tensors
    (4, (tensor([[0.]]), tensor([1])))
    """

    file: str
    schema: Schema
    target: str
    labels: Mapping[str, str]
    """What stands in the column `target`, and the name of that class, in the order of their numbers."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes."""
        return tuple(self.labels.values())

    def parts(self, text: bytes) -> tuple[TensorDataset, TensorDataset]:
        """The records to train on, and a fifth held out. Of two columns of one name the first is read."""
        rows = csv.reader(io.TextIOWrapper(io.BytesIO(text), "utf-8", newline=""))
        header = next(rows, [])
        names = [*(column.name for column in self.schema.columns), self.target]
        if absent := [name for name in names if name not in header]:
            raise DataError(f"{self.file} has no column {absent[0]!r}.")
        places = [header.index(name) for name in names]
        number = {label: k for k, label in enumerate(self.labels)}
        inputs, targets = [], []
        for some in iter(lambda: list(islice(rows, _AT_ONCE)), []):
            table: Table = {name: [row[k] for row in some] for name, k in zip(names, places, strict=True)}
            inputs.append(self.schema.encode(table, self.file))
            targets += [number[label] for label in table[self.target]]
        return split(torch.cat(inputs), torch.tensor(targets), test=round(0.2 * len(targets)), seed=_SEED)


def _numbers(bounds: dict[str, tuple[float, float]]) -> Iterator[Number]:
    """Columns of numbers, each between public bounds."""
    return (Number(name, low=low, high=high) for name, (low, high) in bounds.items())


_ADULT = Schema(
    (
        *_numbers({"age": (17, 90), "education-num": (1, 16), "capital-gain": (0, 20_000), "capital-loss": (0, 4_000)}),
        Number("hours-per-week", low=1, high=99),
        Category(
            "workclass",
            (
                *("Private", "Self-emp-not-inc", "Self-emp-inc", "Federal-gov", "Local-gov", "State-gov"),
                *("Without-pay", "Never-worked"),
            ),
            missing=True,
        ),
        Category(
            "marital-status",
            (
                *("Married-civ-spouse", "Divorced", "Never-married", "Separated", "Widowed", "Married-spouse-absent"),
                "Married-AF-spouse",
            ),
        ),
        Category(
            "occupation",
            (
                *("Tech-support", "Craft-repair", "Other-service", "Sales", "Exec-managerial", "Prof-specialty"),
                *("Handlers-cleaners", "Machine-op-inspct", "Adm-clerical", "Farming-fishing", "Transport-moving"),
                *("Priv-house-serv", "Protective-serv", "Armed-Forces"),
            ),
            missing=True,
        ),
        Category("relationship", ("Wife", "Own-child", "Husband", "Not-in-family", "Other-relative", "Unmarried")),
        Category("race", ("White", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other", "Black")),
        Category("sex", ("Female", "Male")),
    )
)
"""The weight of the survey, the name of the education (whose number is there) and the country are left out."""


def _codes(values: dict[str, tuple[int, range]]) -> Iterator[Category]:
    """Columns of UCI's German credit, whose cells are codes: A, the number of the attribute, the number of a value."""
    for name, (attribute, numbers) in values.items():
        yield Category(name, tuple(f"A{attribute}{value}" for value in numbers))


_GERMAN = Schema(
    (
        *_numbers({"month": (0, 72), "credit_amount": (0, 20_000), "investment_as_income_percentage": (1, 4)}),
        *_numbers(
            {"residence_since": (1, 4), "age": (18, 80), "number_of_credits": (1, 4), "people_liable_for": (1, 2)}
        ),
        *_codes(
            {
                "status": (1, range(1, 5)),
                "credit_history": (3, range(5)),
                "purpose": (4, range(11)),
                "savings": (6, range(1, 6)),
                "employment": (7, range(1, 6)),
                "personal_status": (9, range(1, 6)),
                "other_debtors": (10, range(1, 4)),
                "property": (12, range(1, 5)),
                "installment_plans": (14, range(1, 4)),
                "housing": (15, range(1, 4)),
                "skill_level": (17, range(1, 5)),
                "telephone": (19, range(1, 3)),
                "foreign_worker": (20, range(1, 3)),
            }
        ),
    )
)
"""All 20 attributes. UCI's description has what a code means: A11 is a checking account below 0 DM."""

_COMPAS = Schema(
    (
        Number("age", low=18, high=80),
        Number("juv_fel_count", low=0, high=5),
        Number("juv_misd_count", low=0, high=5),
        Number("juv_other_count", low=0, high=5),
        Number("priors_count", low=0, high=20),
        Category("c_charge_degree", ("F", "M")),
        Category("sex", ("Female", "Male")),
        Category("race", ("African-American", "Asian", "Caucasian", "Hispanic", "Native American", "Other")),
    )
)
"""What was known when the person was charged. Names, dates, cases and free text, COMPAS's own scores, and all that
happened afterwards are left out. The file has the columns `decile_score` and `priors_count` twice, with the same
values.
"""

_FRAUD = Schema((*(Number(f"V{k}", low=-10, high=10) for k in range(1, 29)), Number("Amount", low=0, high=1_000)))
"""Principal components, of which nothing else is published, and euros. The time is left out: it counts from the first
record of the file, so it is nothing that a record has by itself.
"""

DESCRIBED = {
    "adult": Described("adult.csv", _ADULT, "income-per-year", {"<=50K": "<=50K", ">50K": ">50K"}),
    "german": Described("german.csv", _GERMAN, "credit", {"1": "good", "2": "bad"}),
    "compas": Described(
        "propublica-recidivism.csv", _COMPAS, "two_year_recid", {"0": "no recidivism", "1": "recidivism"}
    ),
    "credit_card_fraud": Described("creditcard.csv", _FRAUD, "Class", {"0": "genuine", "1": "fraud"}),
}
"""By the name in the catalogue."""
