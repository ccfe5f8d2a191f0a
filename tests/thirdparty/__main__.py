"""`python -m tests.thirdparty`: measure every model of the table and write results.json and RESULTS.md."""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

from .row import table

HERE = Path(__file__).resolve().parent
RESULTS, PAGE = HERE / "results.json", HERE / "RESULTS.md"
GOOD = ("exact", "mixing, refused")
Result = dict[str, Any]


def main() -> int:
    """Measure, print, compare with the committed result, write. 1 when a row was lost or is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.thirdparty", description=__doc__)
    parser.add_argument("--only", metavar="NAME", action="append", help="rows whose name contains this; writes nothing")
    parser.add_argument("--json", metavar="FILE", type=Path, help=f"write there (default {RESULTS.name}, if no --only)")
    parser.add_argument("--limit", metavar="SECONDS", type=float, default=300.0, help="time for one row (default 300)")
    parser.add_argument("--jobs", metavar="N", type=int, default=2, help="processes at a time (default 2)")
    parser.add_argument("--update", action="store_true", help=f"with --only: put these rows into {RESULTS.name}")
    parser.add_argument("--accept", action="store_true", help="write the result although rows were lost")
    options = parser.parse_args()

    chosen = {
        family: names
        for family, rows in table().items()
        if (names := [row.name for row in rows if not options.only or any(part in row.name for part in options.only)])
    }
    start = time.perf_counter()
    found: dict[str, Result] = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs = [pool.submit(lambda f=f, n=n: list(family_results(f, n, options.limit))) for f, n in chosen.items()]
        for family, job in zip(chosen, jobs, strict=True):
            found |= {result.pop("name"): {"family": family} | result for result in job.result()}
    seconds = round(time.perf_counter() - start)

    committed = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"rows": {}}
    before = committed["rows"]
    lost = [name for name, result in found.items() if is_lost(before.get(name, {}), result)]
    if not options.only:
        lost += [name for name, result in before.items() if name not in found and result["status"] in GOOD]
    updated: list[str] = []
    counts = Counter(result["status"] for result in found.values())
    print(f"\n{len(found)} models: " + ", ".join(f"{n} {kind}" for kind, n in counts.most_common()) + f" ({seconds} s)")
    print("lost since the committed result: " + (", ".join(lost) or "none"))

    if options.only and options.update:
        merged = before | found
        updated = sorted({*committed.get("updated", []), *found})
        found = {row.name: merged[row.name] for rows in table().values() for row in rows if row.name in merged}
        seconds = committed["seconds"]
    target = options.json or (None if options.only and not options.update else RESULTS)
    if target == RESULTS and lost and not options.accept:
        print(f"{RESULTS.name} is left as it was; --accept writes it all the same")
    elif target is not None:
        document = {"date": date.today().isoformat(), "seconds": seconds, "updated": updated}
        document |= {"versions": versions(found), "rows": found}
        target.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        if target == RESULTS:
            PAGE.write_text(page(document), encoding="utf-8")
    return 1 if lost or counts["wrong"] else 0


def is_lost(before: Result, now: Result) -> bool:
    """Whether a row is worse than in the committed result: as a whole, or the engine or the loop of an honest model."""
    if before.get("status") in GOOD and now["status"] not in GOOD:
        return True
    fine = {"engine": "exact", "private": "accepted"}
    return not before.get("mixes") and any(
        before.get(part, {}).get("outcome") == good and now.get(part, {}).get("outcome") != good
        for part, good in fine.items()
    )


def family_results(family: str, names: list[str], limit: float) -> Iterator[Result]:
    """Results of a family's rows from a process of their own, and another one after each row that ends it."""
    left = list(names)
    while left:
        for result in batch_of(family, left, limit):
            left.remove(result["name"])
            print(line(result), flush=True)
            yield result


def batch_of(family: str, names: list[str], limit: float) -> Iterator[Result]:
    """Results until the process ends or a row takes longer than `limit`, which is the last result then."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", f"{__package__}.worker", family, *names]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment)
        assert process.stdout is not None
        try:
            for name in names:
                ready, _, _ = select.select([process.stdout], [], [], limit + 60 * (name == names[0]))
                if not ready:
                    yield {"name": name, "package": "", "status": "time limit", "message": f"more than {limit:.0f} s"}
                    return
                text = process.stdout.readline()
                if not text:
                    process.wait()
                    errors.seek(0)
                    last = (errors.read().strip().splitlines() or [""])[-1][:300]
                    message = f"the process ended with {process.returncode}: {last}"
                    yield {"name": name, "package": "", "status": "process ended", "message": message}
                    return
                yield json.loads(text)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def line(result: Result) -> str:
    """A row of the printed table."""
    engine, private = result.get("engine", {}), result.get("private", {})
    message = result.get("message") or engine.get("message") or private.get("message") or ""
    told = f"{result.get('seconds', 0):6.1f} s  {engine.get('error', float('nan')):8.1e}"
    return f"{result['name']:34} {result['status']:17} {told}  {message[:150]}".rstrip()


def versions(found: dict[str, Result]) -> dict[str, str]:
    """Python, torch and the packages of the rows."""
    of_module = metadata.packages_distributions()
    names = {"torch", "clipwise"}
    for result in found.values():
        names.update(of_module.get(result["package"], []))
    installed = {name: metadata.version(name) for name in sorted(names, key=str.lower)}
    return {"python": ".".join(map(str, sys.version_info[:3])), **installed}


def page(document: dict[str, Any]) -> str:
    """The result as a page."""
    rows: dict[str, Result] = document["rows"]
    counts = Counter(result["status"] for result in rows.values())
    lines = [
        "# Unmodified models of other people's packages",
        "",
        f"Written by `make third-party` on {document['date']}, which takes {document['seconds']} s; do not edit. Each",
        "model is as its package ships it, small and with random weights. *exact*: norms and clipped sum of",
        "`clipped_gradients` equal the per-sample loop at batch sizes 4, 1 and 3, and a plain loop with `Private` and",
        "its loader makes 3 steps. *mixing*: a sample's loss or gradient moves when the others of its batch, or the",
        "batch before, are replaced; this is measured. Such a model must be refused.",
        *(
            [f"Measured again since the last full run: {', '.join(document['updated'])}."]
            if document["updated"]
            else []
        ),
        "",
        f"{len(rows)} models: " + ", ".join(f"**{n} {kind}**" for kind, n in counts.most_common()) + ".",
        "",
        "| family | model | status | error | moved by others | message |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, result in rows.items():
        engine, private = result.get("engine", {}), result.get("private", {})
        told = [result.get("message"), engine.get("message"), private.get("message")]
        message = "; ".join(dict.fromkeys(text.replace("|", "\\|")[:160] for text in told if text))
        message = message or result.get("mixes", "")
        moved = max(result.get("moved_by_others", 0), result.get("moved_by_earlier", 0))
        cells = [result["family"], name, result["status"], engine.get("error", ""), moved]
        lines.append("| " + " | ".join(str(cell) for cell in [*cells, message]) + " |")
    lines += ["", "Versions: " + ", ".join(f"{name} {version}" for name, version in document["versions"].items()) + "."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
