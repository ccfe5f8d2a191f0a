"""From runs to report.html, result.json, card.md and the figures beside them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import clipwise
from clipwise._extras import need
from clipwise.errors import DataError
from clipwise.files import private_folder
from clipwise.report.arms import ArmResults, arms_of
from clipwise.report.card import card
from clipwise.report.content import content, result, uncovered
from clipwise.report.figures import CAPTIONS, Drawing, kind_of, private_drawings, public_drawings
from clipwise.report.folder import CARD, FIGURES, LEDGER, LEDGERS, PAGE, RESULT, is_run, plain, write_json, write_text
from clipwise.report.reading import advice_of
from clipwise.report.run import Run
from clipwise.report.warnings import Joint, joint_of

__all__ = ["write"]

_PAGE = Path(__file__).with_name("page")


def write(runs: Run | Iterable[Run], path: str | os.PathLike[str], publishable: bool = False) -> Path:
    """Write one self-contained page on a run or a comparison of runs; returns its path.

    `path` names the page or its folder. Beside the page it writes card.md (a privacy and calibration card for each
    model), figures/ (each figure as SVG with its values as JSON) and, outside a run's own folder, result.json and
    ledgers/, by which every epsilon can be computed again.

    Guarantees: with `publishable=True` nothing that epsilon does not cover is read into the page, its embedded data or
    the files beside it: no statistics of the private training data, no seed of a private run, no run without privacy.
    """
    need("report", "a report")
    given = [runs] if isinstance(runs, Run) else list(runs)
    joint = joint_of(given)  # here, where it is still known which runs draw from one seed
    left_out: list[str] = []
    if publishable:
        left_out = list(dict.fromkeys(run.name for run in given if not run.is_private))
        given = [run.publishable() for run in given if run.is_private]
        if not given:
            raise DataError("none of these runs is private, so no epsilon covers anything of them: nothing to publish.")
    arms = arms_of(given)
    page = _target(path)
    if publishable and is_run(page.parent):
        raise DataError(
            f"{page.parent} is a run's folder, with files that epsilon does not cover. Name another with --output."
        )
    public, private = public_drawings(arms), [] if publishable else private_drawings(arms)
    data = result(arms, {each.name: each.values for each in public})
    if not publishable:
        data["not_covered_by_epsilon"] = {"figures": {each.name: each.values for each in private}}
    data = plain(data)
    write_text(page, _render(arms, joint, public, private, data, publishable, left_out))
    _save_figures(page.parent / FIGURES, [*public, *private])
    ledgers = _save_ledgers(page.parent, arms)
    cards = [card(arm.runs, ledger) for arm, ledger in zip(arms, ledgers, strict=True)]
    write_text(page.with_name(CARD), "\n---\n\n".join(cards))
    if not is_run(page.parent):
        write_json(page.with_name(RESULT), data)
    return page


def _target(path: str | os.PathLike[str]) -> Path:
    page = Path(path)
    if page.suffix.lower() not in (".html", ".htm"):
        page = page / PAGE
    try:
        private_folder(page.parent)
    except OSError as error:
        raise DataError(f"the folder {page.parent} cannot be made: {error}.") from error
    return page


def _render(
    arms: Sequence[ArmResults],
    joint: Joint | None,
    public: Sequence[Drawing],
    private: Sequence[Drawing],
    data: dict[str, Any],
    publishable: bool,
    left_out: Sequence[str],
) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_PAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["tied"] = _tied
    choices = sorted({panel.bins for each in public for panel in each.panels if panel.bins is not None})
    first = arms[0].first.test
    return environment.get_template("page.html").render(
        **content(arms, joint),
        version=clipwise.__version__,
        publishable=publishable,
        left_out=left_out,
        advice=() if publishable else advice_of(arms),
        figures=public,
        private_figures=private,
        uncovered=uncovered(arms) if not publishable and any(arm.first.is_known for arm in arms) else None,
        bins={"choices": choices, "chosen": len(first.bins) if hasattr(first, "bins") else None},
        data=data,
        style=(_PAGE / "style.css").read_text(encoding="utf-8"),
        script=(_PAGE / "page.js").read_text(encoding="utf-8"),
    )


def _tied(text: str) -> str:
    """Numbers stay on the line of their sign and name: no break in "94.0 %" and "R = 1"."""
    return re.sub(r"(?<=\d) (?=%)|(?<=\bR) (?==)|(?<=\bR =) (?=\d)|(?<=ECE) (?=[\d−+])", "\u00a0", text)


def _save_ledgers(place: Path, arms: Sequence[ArmResults]) -> list[str]:
    """Where beside the card the ledger of each arm's dearest run is; copied unless the place is the run's own.

    Nothing in a ledger depends on the records: it may be published.
    """
    if is_run(place) and len(arms) == 1 and len(arms[0].runs) == 1:
        return [LEDGER]
    folder = place / LEDGERS
    for old in folder.glob("ledger-*.json"):  # of an earlier page
        old.unlink()
    for k, arm in enumerate(arms, 1):
        if arm.dearest.ledger is not None and arm.dearest.is_private:
            private_folder(folder)
            write_text(folder / f"ledger-{k}.json", arm.dearest.ledger.to_json())
    return [f"{LEDGERS}/ledger-{k}.json" for k in range(1, len(arms) + 1)]


def _save_figures(folder: Path, drawings: Sequence[Drawing]) -> None:
    """Write the figures; those of an earlier page that this one does not have must not stay beside it."""
    private_folder(folder)
    names = {each.name for each in drawings}
    for old in folder.iterdir():
        if old.suffix in (".svg", ".json") and old.stem not in names and kind_of(old.stem) in CAPTIONS:
            old.unlink()
    for each in drawings:
        write_text(folder / f"{each.name}.svg", each.as_svg())
        write_json(folder / f"{each.name}.json", each.values)
