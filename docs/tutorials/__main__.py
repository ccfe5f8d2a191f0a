"""Run the tutorials: `python -m docs.tutorials [NAME ...]` writes what they print, `--small` compares it.

A tutorial is a page of Markdown. Its Python blocks run in their order, with one set of names and in an empty folder;
a text block after one is what it printed. `--small` (`make tutorials`) runs with little work and fetches nothing: a
comment `<!-- small: STEPS = 5 -->` after a block runs too, and `stand_ins` takes the place of what is not in the cache
folder. The page stays as it is then, and what is printed must agree with it in everything but the numbers.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, chdir, redirect_stdout
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from docs.tutorials.stand_ins import stand_ins

PAGES = {page.stem: page for page in sorted(Path(__file__).parent.glob("*.md")) if page.stem != "index"}
PART = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<printed>.*?)^```\n)?|^<!-- small: (?P<small>.*?) -->\n",
    flags=re.MULTILINE | re.DOTALL,
)
NUMBER = re.compile(r"[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


class Different(Exception):
    """A block printed something else than the page shows."""


@dataclass(frozen=True)
class Block:
    """Code with what it printed, or what is run after it when the settings are small."""

    code: str
    printed: str = ""
    small: bool = False


def blocks(text: str) -> Iterator[Block]:
    """What there is to run in a page.

    >>> page = "Prose.\\n\\n```python\\nprint(7)\\n```\\n\\n```text\\n7\\n```\\n\\n<!-- small: N = 1 -->\\n"
    >>> [(block.code, block.printed, block.small) for block in blocks(page)]
    [('print(7)\\n', '7\\n', False), ('N = 1', '', True)]
    """
    for part in PART.finditer(text):
        small = part["small"]
        yield Block(part["code"], part["printed"] or "") if small is None else Block(small, small=True)


def form(printed: str) -> str:
    """What is printed, with one sign for every number and one blank between words.

    >>> form("ECE   0.012 (1e-05 to 26,049)")
    'ECE # (# to #)'
    """
    return " ".join(NUMBER.sub("#", printed).split())


def run(text: str, name: str, small: bool) -> str:
    """Run a page; return it with what was printed, or compare this if the settings are small."""
    names: dict[str, Any] = {"__name__": name}
    outputs: list[str] = []
    for block in blocks(text):
        if block.small and not small:
            continue
        with redirect_stdout(io.StringIO()) as stream:
            exec(compile(block.code, f"<{name}>", "exec"), names)
        printed = stream.getvalue()
        if small and form(printed) != form(block.printed):
            raise Different(f"{name}: this block\n\n{block.code}\nprinted\n\n{printed}\nbut shows\n\n{block.printed}")
        if not block.small:
            outputs.append(f"```python\n{block.code}```\n" + (f"\n```text\n{printed}```\n" if printed else ""))
    if small:
        return text
    rest = iter(outputs)
    return PART.sub(lambda part: part[0] if part["code"] is None else next(rest), text)


def stamped(text: str, name: str, seconds: float) -> str:
    """The page with its last line, which says what wrote the outputs."""
    day = datetime.now(UTC).date()
    line = f"*Printed by `python -m docs.tutorials {name}` on {day}, torch {torch.__version__}, in {seconds:.0f} s.*"
    return re.sub(r"(\n\*Printed by .*\*)?\n*\Z", f"\n\n{line}\n", text, count=1)


def main(arguments: list[str] | None = None) -> int:
    """Run the tutorials that are named, or all of them."""
    parser = argparse.ArgumentParser(prog="python -m docs.tutorials", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PAGES))
    parser.add_argument("--small", action="store_true", help="little work, nothing fetched; compare what is printed")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(PAGES):
        parser.error(f"there is no tutorial {', '.join(sorted(unknown))}; there are {', '.join(PAGES)}")
    for name in options.names or PAGES:
        start, page = time.perf_counter(), PAGES[name]
        text = page.read_text(encoding="utf-8")
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(chdir(folder))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("error")
            if options.small:
                os.environ["CLIPWISE_OFFLINE"] = "1"
                stack.enter_context(stand_ins(Path(folder), lambda said: print(f"  {said}", file=sys.stderr)))
            try:
                text = run(text, name, options.small)
            except Different as error:
                print(error, file=sys.stderr)
                return 1
        seconds = time.perf_counter() - start
        if not options.small:
            page.write_text(stamped(text, name, seconds), encoding="utf-8")
        print(f"{name}: {seconds:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
