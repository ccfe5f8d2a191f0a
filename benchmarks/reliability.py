"""What happens to a saved run when something fails: `python -m benchmarks.reliability` tries it, and writes the table.

Every case is tried on real files of a small run without a seed: a refusal is counted with its message, and where the
run continues, its ledger is compared with the releases that were made. reliability.json has the counts; the table is in
docs/security.md. A disk that is full, cannot be written or has no locks is one whose calls fail with the error of the
system.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import clipwise as cw
from benchmarks.measure import Json
from benchmarks.report import header, row
from clipwise.errors import ClipwiseError
from papers.pages import DOCS, put
from tests.core.common import data, losses_of, mlp, plan, refused_elsewhere, sgd

HERE = Path(__file__).parent
X, Y = data().tensors
BEFORE, AFTER = 3, 2
"""Steps before a save, and since."""


class Run:
    """A run in a folder; `releases` are those of all its lives."""

    def __init__(self, folder: Path, *, witness: bool = False, seed: int | None = None) -> None:
        self.path, self.witness = folder / "run", folder.parent / f"{folder.name}.witness"
        folder.mkdir(exist_ok=True)
        self.releases = 0
        model = mlp()
        given = cw.Witness(self.witness, every=1) if witness else None
        self.private: Any = cw.Private(plan(steps=40), model, sgd(model), seed=seed, own_batches=True, witness=given)
        self.step(BEFORE)
        self.private.save(self.path)

    def step(self, count: int = 1) -> None:
        """Steps, of which those are counted that changed the model."""
        for _ in range(count):
            before = [p.clone() for p in self.private.model.parameters()]
            try:
                self.private.step(losses_of(self.private.model, X, Y))
            finally:
                self.releases += not all(map(torch.equal, before, self.private.model.parameters()))

    def resume(self) -> None:
        """As the next process does."""
        self.private = None
        model = mlp()
        self.private = cw.Private.resume(self.path, model, sgd(model))


def failing(name: str, number: int, applies: Callable[..., bool] = lambda *_: True) -> Any:
    """Calls of `os` that fail as on a disk of that kind."""
    real = getattr(os, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if applies(*arguments):
            raise OSError(number, os.strerror(number))
        return real(*arguments, **options)

    return mock.patch.object(os, name, call)


def _writes(path: Any, flags: int, *_: Any) -> bool:
    return bool(flags & (os.O_WRONLY | os.O_RDWR))


Attempt = Callable[[Run], object]


def _saved_on_a_full_disk(run: Run) -> None:
    run.step(AFTER)
    with failing("fsync", errno.ENOSPC):
        run.private.save(run.path)


def _counted_on_a_full_disk(run: Run) -> None:
    with failing("write", errno.ENOSPC):
        run.step()


def _in_a_read_only_folder(run: Run) -> None:
    run.step(AFTER)
    with failing("open", errno.EROFS, _writes):
        run.resume()


def _without_locks(run: Run) -> None:
    run.private = None
    with mock.patch("fcntl.flock", side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))):
        run.resume()


def _in_another_process(run: Run) -> None:
    run.path.read_bytes()  # which once let others in
    refused = refused_elsewhere(run.resume)
    if refused:
        raise ClipwiseError(refused)


def _twice_in_one_process(run: Run) -> None:
    first = run.private
    model = mlp()
    second = cw.Private.resume(run.path, model, sgd(model))
    second.save(run.path)
    run.private = second
    run.step(AFTER)
    try:
        run.private = first
        run.step()
    finally:
        run.private = second


def _moved_while_it_runs(run: Run) -> None:
    run.path.rename(run.path.with_name("elsewhere"))
    run.step()


def _killed(run: Run) -> None:
    run.step(AFTER)
    run.resume()


def _put_back(run: Run) -> None:
    copy = run.path.read_bytes()
    run.step(AFTER)
    run.private.save(run.path)
    run.private = None
    run.path.write_bytes(copy)
    run.resume()


def _witness_gone(run: Run) -> None:
    run.witness.unlink()
    run.step()


SINGLE: dict[str, tuple[Attempt, dict[str, Any]]] = {
    "the process is killed": (_killed, {}),
    "the disk is full when the run is saved": (_saved_on_a_full_disk, {}),
    "the disk is full when a step is counted": (_counted_on_a_full_disk, {}),
    "the folder is read-only at a resume": (_in_a_read_only_folder, {}),
    "the file system has no locks": (_without_locks, {}),
    "a second process resumes the run": (_in_another_process, {}),
    "a second object of the process resumes the run": (_twice_in_one_process, {}),
    "the checkpoint is moved while the run counts in it": (_moved_while_it_runs, {}),
    "the witness is gone": (_witness_gone, {"witness": True}),
    "an older copy is put back, with a witness": (_put_back, {"witness": True}),
    "an older copy is put back, without a witness": (_put_back, {}),
}

DAMAGED: dict[str, tuple[Callable[[Run], Path], dict[str, Any], bool]] = {
    "the checkpoint is cut, at every byte": (lambda run: run.path, {}, True),
    "a bit of the count of begun steps flips, each of them": (lambda run: run.path, {}, False),
    "the digests of a seeded run are cut, at every byte": (
        lambda run: run.path.with_name("run.digests"),
        {"seed": 3},
        True,
    ),
    "the witness is cut, at every byte": (lambda run: run.witness, {"witness": True}, True),
}


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as place:
        yield Path(place) / "folder"


def outcome(run: Run, attempt: Callable[[], object]) -> Json:
    """Whether it was refused, with which message, and how many steps are charged and released where there is a run."""
    found: Json = {}
    try:
        attempt()
    except ClipwiseError as error:
        found["refused"] = _words(str(error))
    if run.private is not None:
        found |= {"charged": run.private.ledger.steps, "released": run.releases}
    return found


def _words(message: str) -> str:
    """The first sentence, without what differs from one try to the next."""
    message = re.sub(r"/\S*/(folder/)?\.?(run|folder\.witness)(\.\w+)?", r"FILE", message)
    return re.split(r"(?<=[a-z)])[.:;] ", re.sub(r" \(.*\)", "", message))[0].rstrip(".")


def damaged(target: Callable[[Run], Path], options: dict[str, Any], cut: bool) -> list[Json]:
    """A resume for every byte at which a file ends, or every bit of the checkpoint's second line."""
    with folder() as place:
        run = Run(place, **options)
        run.step(AFTER)
        released, path = run.releases, target(run)
        run.private = None
        good, whole = path.read_bytes(), place.with_name("whole")
        shutil.copytree(place, whole)
        line = range(good.index(b"\n") + 1, good.index(b"\n", good.index(b"\n") + 1) + 1) if not cut else range(0)
        bad = [good[:end] for end in range(len(good))] if cut else []
        bad += [good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :] for at in line for bit in range(8)]
        found = []
        for content in bad:
            for name in os.listdir(whole):
                shutil.copy(whole / name, place / name)
            path.write_bytes(content)
            run.releases = released
            found.append(outcome(run, run.resume))
            if run.private is not None and run.private.seed is not None:  # it makes the steps again: the same releases
                run.step(AFTER)
                found[-1] = {"charged": run.private.ledger.steps, "released": released}
            run.private = None
        return found


def single(name: str) -> Json:
    """A case that is tried once."""
    attempt, options = SINGLE[name]
    with folder() as place:
        run = Run(place, **options)
        found = outcome(run, lambda: attempt(run))
        run.private = None
    return summary([found])


def tried() -> Json:
    """All cases."""
    cases = {name: single(name) for name in SINGLE}
    cases |= {name: summary(damaged(*case)) for name, case in DAMAGED.items()}
    return {"date": date.today().isoformat(), "cases": cases}


def summary(found: list[Json]) -> Json:
    """How often a case was refused, with which words, and the least difference of charges and releases."""
    words = sorted({each["refused"] for each in found if "refused" in each})
    margins = [each["charged"] - each["released"] for each in found if "charged" in each]
    refused = sum("refused" in each for each in found)
    return {
        "tries": len(found),
        "refused": refused,
        "continued": len(found) - refused,
        "least_margin": min(margins, default=None),
        "words": words,
    }


def markdown(body: Json) -> str:
    """The table of the page."""
    lines = [
        f"`python -m benchmarks.reliability` on {body['date']}: one try of each case, or one for every byte or bit.",
        "",
        *header("what happens", "tries", "refused", "continues", "charged - released", "message"),
    ]
    for name, case in body["cases"].items():
        margin = case["least_margin"]
        charged = "" if margin is None else f"{margin:+d}" if margin else "0"
        if margin is not None and margin < 0:
            charged = f"**{charged}**: not prevented"
        words = "; ".join(f"*{each}*" for each in case["words"])
        lines.append(row(name, *(f"{case[key]:,}" for key in ("tries", "refused", "continued")), charged, words))
    return "\n".join(lines) + "\n"


def main() -> None:
    torch.set_num_threads(1)
    body = tried()
    (HERE / "reliability.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    put(DOCS / "security.md", "failures", markdown(body))
    print(markdown(body))


if __name__ == "__main__":
    main()
