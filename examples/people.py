"""Made-up people for the README: `python examples/people.py` writes people.csv and new_people.csv beside itself.

Nobody in them exists. Members are more often older, visit more often, and have a plan.
"""

from __future__ import annotations

import csv
import io
import math
import random
from pathlib import Path

HERE = Path(__file__).resolve().parent
CITIES = ("Aarhus", "Bern", "Cork", "Dakar")
PLANS = ("free", "monthly", "yearly")
COLUMNS = ("age", "city", "visits", "plan", "member")


def people(count: int, seed: int) -> list[dict[str, str]]:
    """So many rows, the same ones for a seed; some cells are empty."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        age, visits, plan = draw.randint(18, 80), min(30, int(draw.expovariate(0.15))), draw.choice(PLANS)
        score = (age - 48) / 12 + (visits - 6) / 5 + {"free": -1.5, "monthly": 0.0, "yearly": 1.5}[plan]
        member = "yes" if draw.random() < 1 / (1 + math.exp(-score)) else "no"
        shown = "" if draw.random() < 0.03 else str(visits)
        rows.append(dict(zip(COLUMNS, (str(age), draw.choice(CITIES), shown, plan, member), strict=True)))
    return rows


def written(rows: list[dict[str, str]], columns: tuple[str, ...]) -> str:
    """The rows as CSV."""
    file = io.StringIO()
    writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


FILES = {
    "people.csv": written(people(2_000, seed=1), COLUMNS),
    "new_people.csv": written(people(5, seed=2), COLUMNS[:-1]),
}

if __name__ == "__main__":
    for name, text in FILES.items():
        (HERE / name).write_text(text, encoding="utf-8")
