"""Write docs/paper.md and a page for every experiment in docs/paper/: `python -m papers`."""

from __future__ import annotations

import re
from pathlib import Path

from papers.tables import findings_table

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
EXPERIMENTS = ("mnist", "rules", "cifar10", "snli", "wine", "california", "federated")
_HEADER = findings_table(()).split("\n", 1)[0]


def pages() -> dict[Path, str]:
    """The text of every page: the summary, and the experiments' own pages with the figures where they are."""
    found = {name: (HERE / name / "README.md").read_text(encoding="utf-8") for name in EXPERIMENTS}
    own = {DOCS / "paper" / f"{name}.md": _moved(name, text) for name, text in found.items()}
    return {DOCS / "paper.md": _summary(found), **own}


def _summary(found: dict[str, str]) -> str:
    """What is typed by hand, the list of the pages, and what holds of the paper's claims."""
    toctree = "\n".join(["```{toctree}", ":hidden:", "", *(f"paper/{name}" for name in found), "```"])
    listed = "\n".join(f"- [{_title(text)}](paper/{name}.md)" for name, text in found.items())
    parts = [
        (HERE / "summary.md").read_text(encoding="utf-8").replace("](../docs/", "]("),
        f"## The experiments\n\n{listed}\n\n{toctree}",
        "## What holds, and what does not\n\n" + _findings(found),
    ]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _title(text: str) -> str:
    return text.split("\n", 1)[0].removeprefix("# ")


def _findings(found: dict[str, str]) -> str:
    """The claims in words of all experiments, in one table."""
    lines = ["| experiment | claim | here | seeds | holds |", "| --- | --- | --- | --- | --- |"]
    for name, text in found.items():
        if _HEADER in text:
            table = text.split(_HEADER + "\n", 1)[1].split("\n\n", 1)[0]
            lines += [f"| [{_title(text)}](paper/{name}.md) {line}" for line in table.strip().split("\n")[1:]]
    return "\n".join(lines) + "\n"


def _moved(name: str, text: str) -> str:
    return re.sub(r"\]\(figures/", f"](../../papers/{name}/figures/", text)


def main() -> None:
    """Write all of them."""
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(HERE.parent))


if __name__ == "__main__":
    main()
