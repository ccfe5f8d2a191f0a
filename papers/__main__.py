"""Write the list of the experiments and the table of what holds into docs/paper.md: `python -m papers`."""

from __future__ import annotations

from pathlib import Path

from papers.pages import DOCS, put
from papers.tables import findings_table

HERE = Path(__file__).parent
EXPERIMENTS = ("mnist", "rules", "cifar10", "snli", "wine", "california", "federated", "correlated")
_HEADER = findings_table(()).split("\n", 1)[0]


def parts() -> dict[str, str]:
    """What docs/paper.md shows of the experiments' own pages, by name."""
    found = {name: (HERE / name / "README.md").read_text(encoding="utf-8") for name in EXPERIMENTS}
    listed = "".join(f"- {_link(name, text)}\n" for name, text in found.items())
    return {"experiments": listed, "findings": _findings(found)}


def _link(name: str, text: str) -> str:
    title = text.split("\n", 1)[0].removeprefix("# ")
    return f"[{title}](../papers/{name}/README.md)"


def _findings(found: dict[str, str]) -> str:
    """The claims in words of all experiments, in one table."""
    lines = ["| experiment | claim | here | seeds | holds |", "| --- | --- | --- | --- | --- |"]
    for name, text in found.items():
        if _HEADER in text:
            table = text.split(_HEADER + "\n", 1)[1].split("\n\n", 1)[0]
            lines += [f"| {_link(name, text)} {line}" for line in table.strip().split("\n")[1:]]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write both."""
    for name, text in parts().items():
        put(DOCS / "paper.md", name, text)


if __name__ == "__main__":
    main()
