"""The shape of the code: layers, documentation, what an import costs, and what the repository may say.

Every test draws the same numbers from the global generators, whatever ran before it or made what it uses.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pkgutil
import random
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clipwise
from clipwise._extras import EXTRAS
from docs.counts import code_of
from tests.conftest import HANG

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "clipwise"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MODULES = sorted(SOURCE.rglob("*.py"))
MODULE_NAMES = sorted(m.name for m in pkgutil.walk_packages(clipwise.__path__, "clipwise.") if "__main__" not in m.name)
OPTIONAL = ("dp_accounting", "flwr", "matplotlib", "opacus", "peft", "ray", "sklearn", "transformers")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def code(path: Path) -> str:
    """A module of the package without its comments and docstrings."""
    return code_of(path.read_text(encoding="utf-8"))


@dataclass
class Found:
    """What is asked of a file: top-level packages that it imports at whatever depth, where it prints, its classes."""

    packages: set[str] = field(default_factory=set)
    prints: list[int] = field(default_factory=list)
    classes: list[tuple[str, int]] = field(default_factory=list)


@cache
def found_in(path: Path) -> Found:
    found = Found()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found.packages |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.packages.add(node.module.split(".")[0])
        elif isinstance(node, ast.Name) and node.id == "print":
            found.prints.append(node.lineno)
        elif isinstance(node, ast.ClassDef):
            found.classes.append((node.name, node.lineno))
    return found


def documented_modules() -> set[str]:
    reference = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\.\. (?:currentmodule|automodule):: (\S+)$", reference, flags=re.MULTILINE))


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=HANG
    ).stdout.strip()


def test_imports_go_downwards_only() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-logo", "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout + done.stderr


WITHOUT_DOOR = {"cli"}
"""Nobody imports the command line."""


def contracts(kind: str) -> list[dict[str, Any]]:
    return [each for each in PROJECT["tool"]["importlinter"]["contracts"] if each["type"] == kind]


def test_the_layers_are_drawn_in_contributing() -> None:
    (drawn,) = (each for each in contracts("layers") if each["containers"] == ["clipwise"])
    named = [re.findall(r"\w+", layer) for layer in drawn["layers"]]
    there = {path.stem for path in SOURCE.iterdir()} - {"__main__"}
    expected = [row for row in ([name for name in layer if name in there] for layer in named) if row]
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = re.search(r"^\| layer, top first .*?\n\n", text, flags=re.MULTILINE | re.DOTALL)
    assert table is not None
    assert [re.findall(r"`(\w+)/?`", row) for row in table.group().splitlines()[2:] if row] == expected


def test_every_package_has_a_door() -> None:
    """And the modules inside that others may import all the same are documented ones."""
    doors = {inside: each for each in contracts("protected") for inside in each["protected_modules"]}
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")} - WITHOUT_DOOR
    for inside in (f"clipwise.{name}.*" for name in packages):
        assert inside in doors, f"pyproject.toml has no contract for {inside}"
        assert doors[inside]["allowed_importers"] == [inside.removesuffix(".*")]
        shown = {ignored.removeprefix("clipwise.** -> ") for ignored in doors[inside].get("ignore_imports", [])}
        assert shown <= documented_modules()


@pytest.mark.parametrize("name", ["clipwise", *MODULE_NAMES])
def test_public_names_exist_and_are_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    public = getattr(module, "__all__", [])
    for item in public:
        value = getattr(module, item)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert inspect.getdoc(value), f"{name}.{item} has no docstring"


def lines_of(path: Path) -> list[str]:
    """The lines of a file that are not blank."""
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_module_is_short_and_silent(path: Path) -> None:
    lines = lines_of(path)
    assert len(lines) <= 400, f"{relative(path)} has {len(lines)} lines that are not blank; split it"
    if "cli" not in path.parts:
        printed = found_in(path).prints
        assert not printed, f"{relative(path)} prints in line(s) {printed}; only the command line may"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_package_uses_nothing_that_is_not_installed_with_it(path: Path) -> None:
    assert not {"benchmarks", "examples", "papers", "tests"} & found_in(path).packages


def test_no_class_name_stands_twice() -> None:
    homes: dict[str, list[str]] = {}
    for path in MODULES:
        for name, line in found_in(path).classes:
            homes.setdefault(name, []).append(f"{relative(path)}:{line}")
    twice = {name: places for name, places in homes.items() if len(places) > 1}
    assert not twice, f"one name is one thing: {twice}"


BY_HAND = re.compile(
    r"isinstance\((\S+), bool\) or \(?not isinstance\(\1,|isinstance\((\S+), [^)]+\)+ and \(?not isinstance\(\2, bool\)"
)
"""What `_validate` has a name for: a number, and neither True nor False."""


def test_numbers_are_told_from_booleans_in_one_place() -> None:
    found = {relative(path): BY_HAND.findall(code(path)) for path in MODULES}
    assert found.pop("src/clipwise/_validate.py"), "the pattern recognises nothing"
    assert not any(found.values()), {path: names for path, names in found.items() if names}


NODE_INTERNALS = {
    "node.py": re.compile(r"_saved_|_raw_saved|_input_metadata"),
    "ops.py": re.compile(r"Backward\d"),
}
"""What is not a promised interface of torch, by the one file of the engine that may name it."""


@pytest.mark.parametrize("home", NODE_INTERNALS)
def test_torchs_nodes_are_named_in_one_place(home: str) -> None:
    internal = NODE_INTERNALS[home]
    found = {relative(path): internal.findall(code(path)) for path in MODULES}
    assert found.pop(f"src/clipwise/engine/{home}"), "the pattern recognises nothing"
    assert not any(found.values()), {path: names for path, names in found.items() if names}


def requirements(extra: str) -> Iterator[str]:
    """What an extra asks of other packages, through the extras that it names."""
    for line in PROJECT["project"]["optional-dependencies"][extra]:
        if named := re.fullmatch(r"clipwise\[(.+)\]", line):
            yield from chain.from_iterable(map(requirements, named[1].split(",")))
        else:
            yield line


def test_nothing_holds_a_user_to_old_versions() -> None:
    """Of the packages that are asked for, dp-accounting and Flower do; they are installed by name."""
    asked = [*PROJECT["project"]["dependencies"], *requirements("all")]
    assert len(asked) > 10 and not [each for each in asked if re.search("<|==|~=|!=", each)]
    assert not {"dp-accounting", "flwr"} & {re.split(r"[^\w-]", each)[0] for each in asked}
    everything = set(PROJECT["project"]["optional-dependencies"]) - {"all", "bench", "dev", "docs", "flower", "pld"}
    assert set(requirements("all")) == {each for extra in everything for each in requirements(extra)}


MODULE_OF = {"scikit-learn": "sklearn"}


@pytest.mark.parametrize("extra", EXTRAS)
def test_what_is_asked_for_before_work_begins_is_what_the_extra_installs(extra: str) -> None:
    named = {re.split(r"[^\w-]", each)[0] for each in requirements(extra)}
    assert set(EXTRAS[extra]) == {MODULE_OF.get(name, name) for name in named}


def short_waits(code: str) -> Iterator[str]:
    """Where a program waits for something else, with a limit in numbers that is below `HANG`."""
    if not re.search(r"timeout|wait|join|monotonic", code):
        return
    for node in ast.walk(ast.parse(code)):
        limits: list[ast.expr] = []
        if isinstance(node, ast.Call):
            limits = [each.value for each in node.keywords if each.arg == "timeout"]
            if isinstance(node.func, ast.Attribute) and node.func.attr in ("wait", "join"):
                limits += node.args
        elif isinstance(node, ast.BinOp) and isinstance(node.left, ast.Call):
            limits = [node.right] if ast.unparse(node.left) == "time.monotonic()" else []
        for limit in limits:
            if isinstance(limit, ast.Constant) and isinstance(limit.value, int | float) and limit.value < HANG:
                yield f"line {node.lineno}: {ast.unparse(node)}"


def test_no_test_fails_because_the_machine_is_busy() -> None:
    """A limit of time only bounds a hang: it is `tests.conftest.HANG`."""
    found = {relative(path): [*short_waits(path.read_text("utf-8"))] for path in sorted((ROOT / "tests").rglob("*.py"))}
    assert not {path: waits for path, waits in found.items() if waits}


@pytest.mark.parametrize(
    "code", ["run([], timeout=60)", "process.wait(60)", "thread.join(5.0)", "end = time.monotonic() + 20"]
)
def test_a_short_wait_is_recognised(code: str) -> None:
    assert [*short_waits(code)] and not [*short_waits(re.sub(r"[\d.]+(?=\)?$)", "HANG", code))]


def test_import_is_light() -> None:
    loaded = run_python(f"import sys, clipwise; print([m for m in {OPTIONAL} if m in sys.modules])")
    assert loaded == "[]", f"`import clipwise` brings {loaded}, which are extras"


def test_help_and_accounting_do_not_import_torch() -> None:
    code = (
        "import sys, io, contextlib\n"
        "from clipwise.cli.main import COMMANDS, main\n"
        "def loaded(*arguments):\n"
        "    with contextlib.redirect_stdout(io.StringIO()): assert main(arguments) == 0\n"
        "    return [m for m in ('torch', 'scipy') if m in sys.modules]\n"
        "print(loaded('--help'))\n"
        "print([name for name in COMMANDS if 'torch' in loaded(name, '--help')])\n"
        "print('torch' in loaded('epsilon', '--paper', 'wine', '--accountant', 'exact'))"
    )
    by_help, by_help_of, by_accounting = run_python(code).splitlines()
    assert by_help == "[]", f"`clipwise --help` imports {by_help}; import them where they are used"
    assert by_help_of == "[]", f"--help of {by_help_of} imports torch"
    assert by_accounting == "False", "`clipwise epsilon` imports torch"


RECIPES = sorted((ROOT / "papers").glob("*/*.py"))
"""What recipes share is in `papers` itself."""


@pytest.mark.parametrize("path", RECIPES, ids=relative)
def test_recipes_use_the_public_interface_only(path: Path) -> None:
    modules = documented_modules()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "clipwise":
            assert node.module in modules, f"{relative(path)}: docs/api.md does not show {node.module}"
            module = importlib.import_module(node.module)
            public = getattr(module, "__all__", [n for n in vars(module) if not n.startswith("_")])
            private = {alias.name for alias in node.names} - set(public)
            private -= {name for name in private if f"{node.module}.{name}" in modules}
            assert not private, f"{relative(path)} imports {private}, which {node.module} does not offer"


# Paths of one machine have no place in a public repository.
MACHINE_PATH = re.compile(r"(?<![\w.:/])/(?:work|root|home|Users)/[\w.]")


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, timeout=HANG)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [name for name in listed.stdout.decode().split("\0") if name]


def repository_texts() -> Iterator[tuple[str, str]]:
    for name in tracked():
        path = ROOT / name
        if path.is_file():
            try:
                yield name, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def test_repository_names_no_machine() -> None:
    found = [f"{name}: {match.group()}" for name, text in repository_texts() for match in MACHINE_PATH.finditer(text)]
    assert not found


def test_repository_is_small_enough_to_look_through() -> None:
    """Decision 0022 says what is tracked and why."""
    names = tracked()
    logs = [name for name in names if Path(name).name in ("metrics.jsonl", "result.json", "ledger.json")]
    assert not logs, f"{logs[0]} is a file of a run's folder; `clipwise reproduce` packs runs"
    others = [name for name in names if not name.startswith("tests/")]
    assert len(others) <= 488, f"{len(others)} files are tracked beside the tests"


def images_of(page: str, text: str) -> Iterator[str]:
    """The image files that a page shows, from the root of the repository."""
    for shown in re.findall(r"""(?:\]\(|src=")([^)"\s]+\.(?:png|svg))[)"]""", text):
        yield os.path.normpath(Path(page).parent / shown)


def test_an_image_is_tracked_because_a_page_shows_it() -> None:
    shown = {image for page, text in repository_texts() if page.endswith(".md") for image in images_of(page, text)}
    images = [name for name in tracked() if name.endswith((".png", ".svg"))]
    assert images and not set(images) - shown, f"no page shows {sorted(set(images) - shown)}"
    most = Counter(str(Path(name).parent) for name in images).most_common(1)
    assert most[0][1] <= 5, f"figures that belong together are panels of one (papers/figures.py): {most}"


def test_few_modules_are_too_small_to_be_a_subject() -> None:
    """A module of a few lines belongs to the neighbour that uses it, unless it is a door or needs an extra."""
    lines = {
        path: sum(bool(line.strip()) for line in path.read_text(encoding="utf-8").splitlines()) for path in MODULES
    }
    small = [relative(path) for path in MODULES if lines[path] < 40 and not path.stem.startswith("__")]
    assert len(small) <= 10, f"one subject, one module: {small}"


def test_machine_path_is_recognised() -> None:
    assert MACHINE_PATH.search("see " + "/wo" + "rk/x") and not MACHINE_PATH.search("a/work/b, docs.org/home/x")


def offered(name: str) -> set[str]:
    module = importlib.import_module(name)
    return set(getattr(module, "__all__", [each for each in vars(module) if not each.startswith("_")]))


def documented_names(module: str) -> set[str]:
    """What docs/api.md shows of a module, or lists as shared between packages."""
    reference = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    shared = re.search(rf"^\| `{re.escape(module)}` \| (.*) \|$", reference, flags=re.MULTILINE)
    found = set(re.findall(r"`(\w+)`", shared[1])) if shared else set()
    current = "clipwise"
    for kind, name in re.findall(r"^\.\. (currentmodule|auto\w+):: (\S+)$", reference, flags=re.MULTILINE):
        if kind == "currentmodule":
            current = name
        elif kind == "automodule":
            found |= offered(name) if name == module else set()
        elif current == module and not name.startswith("clipwise."):
            found.add(name)
    return found


@pytest.mark.parametrize("name", sorted({"clipwise", *documented_modules()}))
def test_every_public_name_is_in_the_reference(name: str) -> None:
    """Shown there, or shown with another module from which it comes; and the reference names nothing else."""
    shown, public = documented_names(name), offered(name)
    elsewhere = {each for other in {"clipwise", *documented_modules()} - {name} for each in documented_names(other)}
    assert not public - shown - elsewhere, f"docs/api.md does not show {sorted(public - shown - elsewhere)} of {name}"
    assert not {each for each in shown if not hasattr(importlib.import_module(name), each)}


@pytest.fixture(scope="module")
def shared() -> float:
    return random.random()


@pytest.mark.parametrize("turn", range(2))
def test_the_generators_start_anew(turn: int, shared: float) -> None:
    assert shared == random.Random(1).random()
    assert random.random() == random.Random(0).random()
    assert np.random.random() == np.random.RandomState(0).random_sample()  # noqa: NPY002
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))
