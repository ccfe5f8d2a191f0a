"""`python -m tests.fuzz --reader csv --count 1000 --seed 1`: damaged files, and what the reader makes of them.

Without `--reader` all of them are tried. Files are numbered: `--first` says where to begin, and a file is a function of
reader, seed and number (except for the dates inside checkpoints), so `--first 17 --count 1` repeats one. The file of a
defect is kept, and so is the last one of a reader that takes its process down: readers run in a process of their own.
`--results FILE` keeps the counts there and continues from them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from tests.fuzz.judge import CPU_SECONDS, MEMORY, Verdict, judge
from tests.fuzz.mutations import mutated
from tests.fuzz.readers import READERS, Reader

RESULTS = Path(__file__).resolve().parent / "results.json"
_PORTION = 2_000
"""Files that one process tries before another continues."""


def damaged(reader: Reader, name: str, seed: int, number: int) -> bytes:
    """File `number` of a reader."""
    return mutated(reader.corpus, reader.mutations, Random(f"{seed} {name} {number}"))


def verdicts(name: str, seed: int, first: int, count: int, folder: Path) -> Iterator[tuple[int, Verdict]]:
    """What a reader makes of these files. It must read the first undamaged one, else it is not tried at all."""
    with mock.patch("os.urandom", Random(0).randbytes):  # runs without a seed are whole files of the corpus: the same
        reader = READERS[name](folder)
    whole = judge(reader.read, reader.corpus[0])
    if whole.kind != "accepted":
        raise AssertionError(f"{name} does not read its own corpus: {whole.detail}")
    for number in range(first, first + count):
        content = damaged(reader, name, seed, number)
        kept = Path(tempfile.gettempdir(), f"fuzz-{name}-{seed}-{number}")
        kept.write_bytes(content)
        verdict = judge(reader.read, content)
        if verdict.kind != "DEFECT":
            kept.unlink()
        yield number, verdict


def _work(name: str, seed: int, first: int, count: int, told: Connection) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for found in verdicts(name, seed, first, count, Path(folder)):
            told.send(found)


def apart(name: str, seed: int, first: int, count: int) -> Iterator[tuple[int, Verdict]]:
    """`verdicts`, from processes of their own, of which one that dies is a defect."""
    context, stop = multiprocessing.get_context("fork"), first + count
    while first < stop:
        told, teller = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(name, seed, first, min(_PORTION, stop - first), teller))
        process.start()
        teller.close()
        with contextlib.suppress(EOFError):
            while True:
                number, verdict = told.recv()
                first = number + 1
                yield number, verdict
        process.join()
        if process.exitcode and process.exitcode > 0:
            raise SystemExit(f"the process that tries {name} failed")
        if process.exitcode:
            yield first, Verdict("DEFECT", f"the process died of signal {-process.exitcode}")
            first += 1


def main() -> int:
    """Try, count, and name the defects; 1 when there was one."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--reader", choices=READERS, action="append", help="one of the readers (default: all of them)")
    parser.add_argument("--count", type=int, default=1_000, help="files for each reader (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first file (default 0)")
    parser.add_argument("--seed", type=int, default=1, help="of the damage (default 1)")
    parser.add_argument("--results", type=Path, help="continue from the counts in this file, and keep them there")
    options = parser.parse_args()
    kept: dict[str, Any] = {}
    if options.results is not None and options.results.exists():
        kept = json.loads(options.results.read_text(encoding="utf-8"))["readers"]
    for name in options.reader or READERS:
        row = kept.setdefault(name, {"accepted": 0, "refused": 0, "defects": {}})
        done = options.first + row["accepted"] + row["refused"] + len(row["defects"])
        counts: Counter[str] = Counter()
        for number, verdict in apart(name, options.seed, done, options.first + options.count - done):
            counts[verdict.kind] += 1
            if verdict.kind == "DEFECT":
                row["defects"][str(number)] = verdict.detail
                print(f"{name} {number}: {verdict.detail}", flush=True)
            else:
                row[verdict.kind] += 1
            if options.results is not None and (sum(counts.values()) % _PORTION == 0 or verdict.kind == "DEFECT"):
                _keep(options.results, options.seed, kept)
        if options.results is not None:
            _keep(options.results, options.seed, kept)
        print(
            f"{name}: {row['accepted']} accepted, {row['refused']} refused, {len(row['defects'])} defects", flush=True
        )
    return int(any(row["defects"] for row in kept.values()))


def _keep(path: Path, seed: int, readers: dict[str, Any]) -> None:
    limits = {"cpu_seconds": CPU_SECONDS, "memory_bytes": MEMORY}
    body = {"date": date.today().isoformat(), "seed": seed, "limits": limits, "readers": readers}
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
