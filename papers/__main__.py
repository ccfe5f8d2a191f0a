"""Put docs/paper.md together from the pages of all experiments: `python -m papers`."""

from __future__ import annotations

import re
from pathlib import Path

from papers.tables import findings_table

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "paper.md"
EXPERIMENTS = ("mnist", "rules", "cifar10", "snli", "wine", "california", "federated")
_HEADER = findings_table(()).split("\n", 1)[0]


def assembled() -> str:
    """The whole page: what holds, privacy, theory, then every experiment."""
    found = {name: (HERE / name / "README.md").read_text(encoding="utf-8") for name in EXPERIMENTS}
    parts = [
        (HERE / "summary.md").read_text(encoding="utf-8").replace("](../docs/", "]("),
        "## What holds, and what does not\n\n" + _findings(found),
        "## Privacy\n\nThe paper states epsilon by the central limit theorem. Beside it here: the exact value and "
        "other accountants, written by `clipwise reproduce epsilons` (see [Accounting](accounting.md)). The last two "
        "columns: how many times the stated delta the claimed epsilon really costs, and the noise multiplier with "
        "which the claim would be true.\n\n" + (HERE / "epsilons" / "epsilons.md").read_text(encoding="utf-8"),
        "## The table of section 4\n\n✓ is what the theorems promise, with the number of networks on which it held; ✗ "
        "is what may fail, with the number of networks on which it held all the same and the name of an instance in "
        "`papers/theory/instances.json` on which it does fail. By `clipwise reproduce theory`, whose figures are in "
        "[The theory](theory.md).\n\n" + (HERE / "theory" / "table.md").read_text(encoding="utf-8"),
        *(_section(name, text) for name, text in found.items()),
    ]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _title(text: str) -> str:
    return text.split("\n", 1)[0].removeprefix("# ")


def _findings(found: dict[str, str]) -> str:
    """The claims in words of all experiments, in one table."""
    lines = ["| experiment | claim | here | seeds | holds |", "| --- | --- | --- | --- | --- |"]
    for text in found.values():
        if _HEADER in text:
            table = text.split(_HEADER + "\n", 1)[1].split("\n\n", 1)[0]
            lines += [f"| {_title(text)} {line}" for line in table.strip().split("\n")[1:]]
    return "\n".join(lines) + "\n"


def _section(name: str, text: str) -> str:
    """A page of its own as a section: its headings one level down, its figures where they are."""
    lowered = re.sub(r"^#", "##", text, flags=re.MULTILINE)
    return re.sub(r"\]\(figures/", f"](../papers/{name}/figures/", lowered)


if __name__ == "__main__":
    PAGE.write_text(assembled(), encoding="utf-8")
    print(f"{PAGE.relative_to(HERE.parent)}: {len(EXPERIMENTS)} experiments.")
