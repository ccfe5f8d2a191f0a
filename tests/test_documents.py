"""What the documents promise: the README's script runs, and printed epsilons are what the package computes."""

from __future__ import annotations

import json
import math
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import clipwise as cw
import papers.__main__
from benchmarks import (
    accounting,
    accounting_grid,
    calibration,
    correlated,
    evidence,
    full,
    jl,
    kills,
    noise,
    ntk,
    packed,
    products,
    reliability,
    report,
)
from clipwise.cli.main import COMMANDS, main
from docs import options
from docs.tutorials import __main__ as tutorials
from papers.epsilons import __main__ as epsilons
from papers.pages import BENCHMARKS, DOCS, put, shown, wrapped
from papers.theory import monitor, search, table
from tests.conftest import HANG

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_quickstart_runs(tmp_path: Path) -> None:
    """The blocks are one script; what it prints stands below them, the accuracy as one of many runs had it."""
    blocks = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == len(re.findall("```python", README)) == 2
    script = tmp_path / "quickstart.py"
    script.write_text("".join(code for code, _ in blocks), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", script], cwd=tmp_path, capture_output=True, text=True, timeout=HANG, check=False
    )
    assert done.returncode == 0, done.stderr
    printed = re.sub(r"accuracy (8\d|9[0-4])\.\d%", "accuracy 8x%", done.stdout)
    assert printed == "".join(re.sub(r"accuracy 8\d\.\d%", "accuracy 8x%", promised) for _, promised in blocks)


@pytest.mark.slow
def test_a_table_goes_from_records_to_predictions_in_three_commands(tmp_path: Path) -> None:
    block = re.search(r"```sh\n\. .venv/bin/activate\n(.*?)```\n+```text\n(.*?)```", README, flags=re.DOTALL)
    assert block
    commands, promised = block.groups()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    lines = [line.partition("#")[0].split() for line in commands.splitlines()]
    assert [line[:1] for line in lines] == [["clipwise"]] * 3
    for line in lines:
        command = [sys.executable, "-m", *line]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG)
        assert done.returncode == 0, done.stderr
    header, *predicted = (tmp_path / "predictions.csv").read_text("utf-8").splitlines()
    assert header == promised.splitlines()[0]
    assert len(predicted) == len(promised.splitlines()) - 1 == 5
    assert [sum(map(float, row.split(","))) for row in predicted] == pytest.approx([1] * 5, abs=1e-6)


def test_the_readme_names_every_extra() -> None:
    table = re.search(r"^\| extra \| for \|\n(.*?)\n\n", README, flags=re.DOTALL | re.MULTILINE)
    assert table
    named = re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in table[1].splitlines()))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert {*named} == {*project["project"]["optional-dependencies"]} - {"bench", "dev", "docs"}


def test_the_citation_has_the_version() -> None:
    assert f"\nversion: {cw.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


FROM_OPACUS = (ROOT / "docs" / "from-opacus.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("library", ["opacus", "clipwise"])
def test_the_same_script_with_either_library(library: str, tmp_path: Path) -> None:
    """And with what is printed below it: the epsilon to the last digit, the accuracy to what the noise leaves of it."""
    pytest.importorskip(library)
    scripts = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", FROM_OPACUS, flags=re.DOTALL)
    ((script, promised),) = (each for each in scripts if re.search(rf"^(import|from) {library}", each[0], re.MULTILINE))
    path = tmp_path / "script.py"
    path.write_text(script, encoding="utf-8")
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=HANG)
    found, expected = (re.fullmatch(r"accuracy (.+)% (at epsilon .+)\n", each) for each in (done.stdout, promised))
    assert found and expected, done.stderr
    assert found[2] == expected[2] and float(found[1]) == pytest.approx(float(expected[1]), abs=5)


def opacus_rows() -> list[list[str]]:
    rows = [re.split(r" \| ", line.strip("| ")) for line in FROM_OPACUS.splitlines() if re.match(r"\| [\d.]+ \|", line)]
    assert rows
    return rows


@pytest.mark.parametrize("row", opacus_rows(), ids=lambda row: str(row[1]))
def test_epsilons_beside_those_of_opacus(row: list[str]) -> None:
    noise, settings, rate, _, _, same_rate, own, own_rate = row
    n, size, steps, delta = (float(each.replace(",", "")) for each in settings.split(", "))
    batches = math.ceil(n / size)
    assert rate == f"1/{batches:,}" and own == f"{size:.0f}/{n:,.0f}"
    theirs, ours = cw.Poisson(rate=1 / batches, batch_size=int(size)), cw.Poisson(int(n), int(size))
    assert rounded_up(cw.epsilon(float(noise), theirs, int(steps), delta)) == same_rate
    assert rounded_up(cw.epsilon(float(noise), ours, int(steps), delta)) == own_rate


@pytest.mark.parametrize("row", opacus_rows(), ids=lambda row: str(row[1]))
def test_epsilons_of_opacus(row: list[str]) -> None:
    accountants = pytest.importorskip("opacus.accountants", reason="make bench installs it")
    noise, settings, _, prv, rdp, *_ = row
    n, size, steps, delta = (float(each.replace(",", "")) for each in settings.split(", "))
    for kind, printed in (("PRV", prv), ("RDP", rdp)):
        accountant = getattr(accountants, f"{kind}Accountant")()
        accountant.history = [(float(noise), 1 / math.ceil(n / size), int(steps))]
        assert rounded_up(accountant.get_epsilon(delta)) == printed


@pytest.mark.slow
def test_the_demo_prints_the_table_of_the_readme(tmp_path: Path) -> None:
    """The same rows; each mean is within the interval that the README has for it, whatever the machine."""
    if not cw.data.find(cw.data.entry("mnist")):
        pytest.skip("MNIST is not in the cache")
    command = [sys.executable, "-m", "clipwise", "demo", "--output", tmp_path / "demo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    promised, printed = (
        re.findall(r"^  ((?:not )?private.*?)  +(\d.*)$", text, re.MULTILINE) for text in (README, done.stdout)
    )
    assert promised and [name for name, _ in promised] == [name for name, _ in printed]
    for (_, expected), (_, found) in zip(promised, printed, strict=True):
        cells = re.findall(r"([\d.]+) \(([\d.]+) to ([\d.]+)\)", expected)
        means = re.findall(r"([\d.]+) \(", found)
        assert len(cells) == len(means) == 3
        assert all(float(low) <= float(mean) <= float(high) for (_, low, high), mean in zip(cells, means, strict=True))


@pytest.mark.slow
def test_the_home_page_trains_and_prints_its_epsilon(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    home = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", home, flags=re.DOTALL)
    script = tmp_path / "home.py"
    script.write_text(block, encoding="utf-8")
    done = subprocess.run([sys.executable, "-W", "error", script], capture_output=True, text=True, timeout=HANG)
    promised = re.search(r"print\(.*#\s+(epsilon [\d.]+)$", block, flags=re.MULTILINE)
    assert promised
    assert done.stdout == f"{promised[1]}\n", done.stderr


@pytest.mark.slow
def test_the_page_on_correlated_noise_prints_what_it_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "correlated-noise.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) == len(re.findall("```python", page)) == 2
    script = tmp_path / "correlated.py"
    script.write_text("".join(code for code, _ in blocks), encoding="utf-8")
    done = subprocess.run([sys.executable, "-W", "error", script], capture_output=True, text=True, timeout=HANG)
    assert done.stdout == "".join(promised for _, promised in blocks), done.stderr


def rounded_up(value: float) -> str:
    return f"{math.ceil(value * 1000) / 1000:.3f}"


def errata_rows() -> list[list[str]]:
    text = (ROOT / "docs" / "errata.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return rows[2:]


@pytest.mark.parametrize("row", errata_rows(), ids=lambda row: str(row[0]))
def test_epsilons_of_the_errata(row: list[str]) -> None:
    _, noise, samples, batch, steps, delta, _, exact = row
    n, size = int(samples), int(batch)
    sampling = cw.FullBatch(n) if size == n else cw.Poisson(n, size)
    deltas = {"1e-5": 1e-5, "1/n": 1 / n, "1/(1.1n)": 1 / (1.1 * n)}
    assert rounded_up(cw.epsilon(float(noise), sampling, int(steps), deltas[delta])) == exact


@pytest.mark.parametrize("accountant", ["exact", "rdp", "gdp", "edgeworth"])
def test_epsilons_of_the_readme(accountant: str) -> None:
    printed = re.search(rf"^  {accountant} .*?~?([\d.]+)  +[\d.]+$", README, flags=re.MULTILINE)
    assert printed
    computed = cw.epsilon(0.4, cw.Poisson(550_152, 32), 51_576, 1.8e-6, accountant=accountant)
    assert float(printed[1]) == pytest.approx(computed, abs=0.001)


def test_the_readme_has_what_epsilon_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Word for word, except for the seconds, and for the row of an extra where it is not installed."""
    block = re.search(r"^(clipwise epsilon .*)\n```\n.*?```text\n(.*?)```", README, flags=re.DOTALL | re.MULTILINE)
    assert block
    assert main(block[1].split()[1:]) == 0
    both = [re.sub(r"(?m)^(  \w.*) \d+\.\d+$", r"\1", text).split("\n") for text in (block[2], capsys.readouterr().out)]
    promised, printed = (" ".join(" ".join(lines).split()) for lines in both)
    if not any(line.startswith("  pld") for line in both[1]):
        promised = promised.replace(" pld upper bound 5.136", "")
    assert re.sub("-{3,}", "-", promised) == re.sub("-{3,}", "-", printed)


def test_the_sample_is_what_its_program_makes() -> None:
    made: dict[str, str] = runpy.run_path(str(ROOT / "examples" / "people.py"))["FILES"]
    assert made == {name: (ROOT / "examples" / name).read_text(encoding="utf-8") for name in made}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_loop_of_a_hugging_face_model_runs(tmp_path: Path) -> None:
    transformers, tokenizers = (pytest.importorskip(name) for name in ("transformers", "tokenizers"))
    section = (ROOT / "docs" / "loop.md").read_text(encoding="utf-8").split("## Hugging Face models")[1]
    words = {word: k for k, word in enumerate(("[PAD]", "[UNK]", *"abcdefgh"))}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]")
    sizes = {"vocab_size": len(words), "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, intermediate_size=8)).train()
    names: dict[str, Any] = {
        "F": torch.nn.functional,
        "cw": cw,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "plan": cw.Plan(cw.Poisson(64, 16), 3, cw.Abadi(1.0), 1.0),
        "dataset": [{**tokenizer("a " * (1 + k % 5) + "b"), "labels": k % 2} for k in range(64)],
        "tokenizer": tokenizer,
        "DataCollatorWithPadding": transformers.DataCollatorWithPadding,
    }
    exec(re.search(r"```python\n(.*?)```", section, flags=re.DOTALL)[1], names)  # type: ignore[index]
    private = names["private"]
    assert private.steps_done == 3 and "no sample moved" in str(private.checked)
    batch = names["DataCollatorWithPadding"](tokenizer)(names["dataset"][:4])
    with pytest.raises(cw.InvalidLosses, match="Hugging Face"):  # what everybody writes first
        cw.check(model(**batch).loss, dict(model.named_parameters()))


def kept(path: str) -> Any:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def _tables_of_calibration(part: str) -> str:
    return calibration.tables(kept("benchmarks/calibration.json"))[part]


def _tables_of_jl(part: str) -> str:
    return jl.parts(kept("benchmarks/jl.json"))[part]


def _parts_of_the_paper(part: str) -> str:
    return papers.__main__.parts()[part]


PARTS: dict[tuple[Path, str], Callable[[str], str]] = {
    (DOCS / "accounting.md", "epsilons"): lambda _: epsilons.markdown(kept("papers/epsilons/epsilons.json")),
    (DOCS / "accounting.md", "accountants"): lambda _: accounting.markdown(kept("benchmarks/accounting.json")),
    (DOCS / "accounting.md", "grid"): lambda _: accounting_grid.markdown(kept("benchmarks/accounting_grid.json")),
    **{(DOCS / "calibration.md", part): _tables_of_calibration for part in ("coverage", "stream", "private")},
    **{(DOCS / "optimizers.md", part): _tables_of_jl for part in ("jl-privacy", "jl-cost", "jl-memory")},
    **{(DOCS / "paper.md", part): _parts_of_the_paper for part in ("experiments", "findings")},
    **{(options.PAGE, f"options of {name}"): lambda part: options.table(part.split()[-1]) for name in COMMANDS},
    (DOCS / "security.md", "failures"): lambda _: reliability.markdown(kept("benchmarks/reliability.json")),
    (DOCS / "security.md", "kills"): lambda _: kills.markdown(kept("benchmarks/kills.json")),
    (DOCS / "theory.md", "table"): lambda _: table.markdown(kept("papers/theory/results.json")["table"]),
    (DOCS / "theory.md", "searched"): lambda _: search.markdown(kept("papers/theory/instances.json")),
    (DOCS / "theory.md", "monitor"): lambda _: monitor.markdown(kept("papers/theory/monitor.json")),
    (DOCS / "theory.md", "ntk"): lambda _: ntk.markdown(kept("benchmarks/ntk.json")),
    (BENCHMARKS, "steps"): lambda _: report.page(kept("benchmarks/results.json")),
    (BENCHMARKS, "evidence"): lambda _: evidence.markdown(kept("benchmarks/evidence.json")),
    (BENCHMARKS, "noise"): lambda _: noise.tables(kept("benchmarks/noise.json")),
    (BENCHMARKS, "correlated"): lambda _: correlated.tables(kept("benchmarks/correlated.json")),
    (BENCHMARKS, "full"): lambda _: full.tables(kept("benchmarks/full.json")),
    (BENCHMARKS, "packed"): lambda _: packed.tables(kept("benchmarks/packed.json")),
    (BENCHMARKS, "products"): lambda _: products.tables(kept("benchmarks/products.json")),
}
"""What stands between marks in a page, by page and name, and what makes it from kept numbers."""


@pytest.mark.parametrize(("page", "part"), PARTS, ids=lambda value: getattr(value, "stem", value))
def test_tables_of_a_page_are_those_of_the_kept_numbers(page: Path, part: str) -> None:
    assert shown(page, part) == wrapped(PARTS[page, part](part))


def test_all_that_stands_between_marks_is_compared() -> None:
    pages = [*DOCS.glob("*.md"), BENCHMARKS]
    marked = {(page, part) for page in pages for part in re.findall("<!-- begin (.+?) -->", page.read_text("utf-8"))}
    assert marked == set(PARTS)


def test_the_command_line_page_has_one_section_for_each_command() -> None:
    headings = re.findall(r"^## clipwise (\w+)$", options.PAGE.read_text("utf-8"), flags=re.MULTILINE)
    assert sorted(headings) == sorted(COMMANDS)


def test_a_part_takes_the_place_of_the_old_one_and_a_page_without_its_marks_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- begin table -->\nold\n<!-- end table -->\nafter\n", encoding="utf-8")
    put(page, "table", "| new |\n")
    assert shown(page, "table") == "| new |\n"
    assert page.read_text("utf-8").split("<!--")[0] == "before\n" and page.read_text("utf-8").endswith("-->\nafter\n")
    with pytest.raises(ValueError, match="must have the lines <!-- begin other -->"):
        put(page, "other", "text")


WIDTH = 120
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "papers/**/*.md", "benchmarks/*.md")
    for path in ROOT.glob(pattern)
    if not {"_build", "paper", "runs"} & set(path.relative_to(ROOT).parts)
)


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Lines and their numbers, without code blocks, tables and figures, which cannot be broken."""
    fence = ""
    for number, line in enumerate(text.splitlines(), start=1):
        mark = re.match(r"\s*(`{3,}|:{3,})", line)
        if mark and (not fence or line.strip() == fence):
            fence = "" if fence else mark[1]
        elif not fence and not line.lstrip().startswith(("|", "![")):
            yield number, line


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_is_wrapped(path: Path) -> None:
    for number, line in prose(path.read_text(encoding="utf-8")):
        breakable = " " in line.removeprefix("- ").strip()
        assert len(line) <= WIDTH or not breakable, f"line {number} has {len(line)} characters; wrap it at {WIDTH}"


HABITS = re.compile(
    r"\b(?:(?:is|are|was|were) told\b(?! apart)|tells? of|told of|to be had|(?:can|could|cannot) be had|anew|"
    r"whoever|in earnest|an own|turn(?:s|ed)? out|belongs? into|left away|decides? over|for ever)\b",
    re.IGNORECASE,
)
"""Phrases that slow readers, where English has a usual word: reported, available, again, anyone who, its own, is."""


def habits(text: str) -> list[str]:
    return HABITS.findall(" ".join(text.split()))  # a phrase may be on two lines


def test_english_is_the_usual_one() -> None:
    read = [*DOCUMENTS, *sorted((ROOT / "src").rglob("*.py"))]
    found = {str(path.relative_to(ROOT)): habits(path.read_text(encoding="utf-8")) for path in read}
    assert not {path: phrases for path, phrases in found.items() if phrases}


def test_habits_are_recognised() -> None:
    assert habits("Whoever asks is\ntold anew.") == ["Whoever", "is told", "anew"]
    assert not habits("They are told apart.")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = {target for target in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in target}
    missing = sorted(target for target in targets if not (path.parent / target).exists())
    assert not missing


def test_pages_that_the_code_names_exist() -> None:
    sources = [path for folder in ("src", "examples", "papers") for path in (ROOT / folder).rglob("*.py")]
    named = {page for path in sources for page in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text(encoding="utf-8"))}
    assert named and not sorted(page for page in named if not (ROOT / page).exists())


@pytest.mark.parametrize("name", tutorials.PAGES)
def test_a_tutorial_shows_what_it_printed_and_when(name: str) -> None:
    text = tutorials.PAGES[name].read_text(encoding="utf-8")
    found = list(tutorials.blocks(text))
    code = [block for block in found if not block.small]
    assert any(block.printed for block in code) and len(code) == text.count("```python")
    assert all("print(" in block.code for block in code if block.printed)
    assert re.search(rf"\n\n\*Printed by `python -m docs\.tutorials {name}` on \d{{4}}-\d\d-\d\d, .*\*\n\Z", text)
    assert f"]({name}.md)" in (ROOT / "docs" / "tutorials" / "index.md").read_text(encoding="utf-8")


TUTORIAL = """Prose.

```python
N = 100
```

<!-- small: N = 2 -->

```python
print(f"N is {N}")
```

```text
N is 77
```
"""


def test_a_tutorial_is_written_with_what_it_prints_and_tried_out_in_small() -> None:
    written = tutorials.run(TUTORIAL, "page", small=False)
    assert written == TUTORIAL.replace("77", "100")
    assert tutorials.run(TUTORIAL, "page", small=True) == TUTORIAL
    with pytest.raises(tutorials.Different, match="N is 2\n\nbut shows\n\nM is 77"):
        tutorials.run(TUTORIAL.replace("N is 77", "M is 77"), "page", small=True)
    twice = tutorials.stamped(tutorials.stamped(TUTORIAL, "page", 1.0), "page", 2.0)
    assert twice.count("*Printed by") == 1 and ", in 2 s.*" in twice


def promised_tests() -> list[str]:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    return sorted(set(re.findall(r"`(tests/[^`]+)`", text)))


@pytest.mark.parametrize("named", promised_tests())
def test_every_promise_of_the_security_page_has_its_test(named: str) -> None:
    path, _, function = named.partition("::")
    assert (ROOT / path).exists()
    assert not function or f"def {function}(" in (ROOT / path).read_text(encoding="utf-8")
