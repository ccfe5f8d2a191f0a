"""A thousand kills: `python -m benchmarks.kills` writes kills.json, and its table in docs/security.md.

The programs of the tests (`tests/core/crash_runs.py`, `tests/training/crash_runs.py`) are killed with SIGKILL at random
moments and resumed, again and again: the library alone, with and without a witness, a configured run of
`clipwise train`, and a federated server. Each row of the table is one of these. It continues where it stopped.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch

import clipwise as cw
from benchmarks.measure import Json
from benchmarks.report import header, row
from papers.pages import DOCS, put
from tests.core import crash_runs as library
from tests.core.common import elsewhere, same
from tests.training import crash_runs as configured
from tests.training.common import TINY

HERE = Path(__file__).parent
KILLS = 1_000
AT_ONCE = 20
"""Kills of one run."""
EVERY = 4
"""Steps that the witness charges at a time."""


def of_library(folder: Path, moments: int, seed: int | None = None, witnessed: bool = False) -> Json:
    """One run of `Private` in a loop."""
    whole, killed = folder / "whole", folder / "killed"
    whole.mkdir()
    killed.mkdir()
    found = library.main(killed, seed, AT_ONCE, moments, cw.Witness(folder / "witness", EVERY) if witnessed else None)
    if seed is not None:
        library.live(whole, seed, log=False)
    return {
        "kills": found["killed"],
        "charged": found["ledger"],
        "drawn": found["steps_released"] if seed is not None else found["releases"],
        "under_counted": found["under_counted"],
        "twice": found["different_releases_of_a_step"] > 1,
        "equal": seed is None or same(torch.load(whole / "final.pt"), torch.load(killed / "final.pt")),
    }


def of_training(folder: Path, moments: int, seeded: bool, base: str = TINY) -> Json:
    """One run as a configuration says."""
    rng = random.Random(moments)
    steps = sorted(rng.sample(range(1, configured.STEPS), AT_ONCE))
    deaths = [rng.choice([step, step, rng.uniform(0.0, 0.3), f"row {-(-step // 5) * 5}"]) for step in steps]
    found = configured.main(folder, seeded, base, deaths)
    charged = sum(count for _, count in found["events"][1])
    drawn: dict[str, set[str]] = {}
    for step, sha in found["seen"]:
        drawn.setdefault(step, set()).add(sha)
    return {
        "kills": found["killed"],
        "charged": charged,
        "drawn": sum(map(len, drawn.values())),
        "under_counted": int(charged < sum(map(len, drawn.values()))),
        "twice": any(len(each) > 1 for each in drawn.values()),
        "equal": not seeded or found["equal"],
    }


KINDS: dict[str, Callable[[Path, int], Json]] = {
    "`Private`, no seed": of_library,
    "`Private`, no seed, with a witness": lambda folder, moments: of_library(folder, moments, witnessed=True),
    "`Private`, seeded": lambda folder, moments: of_library(folder, moments, seed=7),
    "`clipwise train`, no seed": lambda folder, moments: of_training(folder, moments, False),
    "`clipwise train`, seeded": lambda folder, moments: of_training(folder, moments, True),
    "federated server, no seed": lambda folder, moments: of_training(folder, moments, False, configured.FEDERATED),
    "federated server, seeded": lambda folder, moments: of_training(folder, moments, True, configured.FEDERATED),
}


def forked(kind: str, moments: int) -> Json:
    """One run in a process of its own, so that what a run changes in the classes it watches stays there."""

    def killed() -> str:
        with tempfile.TemporaryDirectory() as folder:
            return json.dumps(KINDS[kind](Path(folder), moments))

    found: Json = json.loads(elsewhere(killed))
    return found


def rounds(done: list[Json], kills: int) -> Iterator[Json]:
    """Runs of all kinds in turns, after those that are done, until there are enough kills."""
    count = sum(each["kills"] for each in done)
    names = list(KINDS)
    number = len(done)
    while count < kills:
        kind = names[number % len(names)]
        found = {"kind": kind, "moments": number, **forked(kind, number)}
        count, number = count + found["kills"], number + 1
        yield found


def markdown(body: Json) -> str:
    """The table of the page."""
    count = sum(each["kills"] for each in body["runs"])
    lines = [
        f"`python -m benchmarks.kills` on {body['date']}, torch {body['torch']}: {count:,} kills at random moments, up "
        f"to {AT_ONCE} of one run. A step (of a server: a round) is drawn when its noise is. What was charged and not "
        f"drawn was begun by a process that died then, or charged ahead by the witness, {EVERY} steps at a time.",
        "",
        *header("program", "runs", "kills", "charged", "drawn", "charged, not drawn", "drawn, not charged", "ends"),
    ]
    for kind in KINDS:
        runs = [each for each in body["runs"] if each["kind"] == kind]
        kills, charged, drawn, lost = (
            sum(each[name] for each in runs) for name in ("kills", "charged", "drawn", "under_counted")
        )
        ends = f"{sum(each['equal'] for each in runs)} of {len(runs)} as if not killed" if "seeded" in kind else ""
        numbers = (len(runs), kills, charged, drawn, charged - drawn, lost)
        lines.append(row(kind, *(f"{number:,}" for number in numbers), ends))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--again", action="store_true", help="forget the runs that are done")
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = HERE / "kills.json"
    body: dict[str, Any] = {"runs": []}
    if path.exists() and not options.again:
        body = json.loads(path.read_text(encoding="utf-8"))
    for found in rounds(body["runs"], options.kills):
        body["runs"].append(found)
        body |= {"date": date.today().isoformat(), "torch": torch.__version__}
        path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(found), flush=True)
    put(DOCS / "security.md", "kills", markdown(body))
    print(markdown(body))


if __name__ == "__main__":
    main()
