"""What `pip install` gives: the wheel and the source archive, in a new environment that has nothing else in it.

`make package` builds both, installs the wheel with what it asks for (torch, numpy, scipy) and no extras, and tries it;
then the source archive in its place; then it follows the advice of the message about a missing extra, and trains.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from pathlib import Path

import clipwise
from tests.conftest import HANG

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 2_000_000
"""Of an archive."""

QUESTION = "epsilon --noise-multiplier 1.1 --sample-size 60000 --batch-size 256 --steps 14040 --delta 1e-5"
RUN = "train config.toml --output run"
CONFIG = """\
steps = 3
batch_size = 16
data = {source = "table.csv", target = "y", task = "classification"}
model = {source = "mlp", hidden = [4]}
clip = {rule = "Abadi", R = 1.0}
optimizer = {name = "SGD", learning_rate = 0.1}
privacy = {noise_multiplier = 1.0, delta = 1e-3}
"""

NAMES = """\
import importlib, pkgutil
import clipwise
from clipwise.errors import MissingExtra

for found in pkgutil.iter_modules(clipwise.__path__, "clipwise."):
    if found.name.endswith("__main__"):
        continue
    try:
        module = importlib.import_module(found.name)
    except MissingExtra as error:
        print(error)
        continue
    for name in getattr(module, "__all__", ()):
        getattr(module, name)
for name in clipwise.__all__:
    getattr(clipwise, name)
"""
"""Imports every package and every public name; prints why one cannot be had without an extra."""


class Environment:
    """A virtual environment in a folder, and commands in it."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "venv", with_pip=True)
        self.folder, self.bin = folder, folder / "venv" / "bin"
        # Nothing of the checkout is to be found from here.
        self._variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}

    def run(self, *command: str | Path, code: int = 0) -> str:
        """What a command printed, on both streams; the exit code is `code`."""
        program, *arguments = command
        done = subprocess.run(
            [self.bin / program, *arguments], cwd=self.folder, env=self._variables, timeout=HANG,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if done.returncode != code:
            raise SystemExit(f"{shlex.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}")
        return done.stdout

    def install(self, *what: str | Path) -> None:
        """With pip, and the pins that the project is tested with."""
        pins = ("--constraint", ROOT / "constraints.txt")
        self.run("python", "-m", "pip", "install", "-qq", "--no-compile", "--disable-pip-version-check", *pins, *what)


def build(folder: Path) -> tuple[Path, Path]:
    """The wheel and the source archive of the checkout."""
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True, stdout=subprocess.DEVNULL)
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    for archive in (wheel, source):
        size = archive.stat().st_size
        assert size <= MOST_BYTES, f"{archive.name} has {size:,} bytes; {MOST_BYTES:,} are enough"
        print(f"{archive.name}: {size / 1e6:.2f} MB")
    return wheel, source


def check_contents(wheel: Path, source: Path) -> None:
    """The wheel has the package and nothing else; what tests and documents need is in the source archive."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    there = subprocess.check_output(["git", "ls-files", "src"], cwd=ROOT, text=True).split()
    assert packed == {name.removeprefix("src/") for name in there}, packed.symmetric_difference(there)
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "CITATION.cff", "CHANGELOG.md", "docs/index.md", "tests/package.py"} <= names


def check_installed(environment: Environment) -> None:
    """The package that is installed now, without extras."""
    said = environment.run("clipwise", "--version")
    assert said.startswith(f"clipwise {clipwise.__version__} (torch "), said
    assert "numerically exact    2.380" in environment.run("clipwise", *QUESTION.split())
    missing = environment.run("python", "-W", "error", "-c", NAMES).splitlines()
    assert [re.findall(r"pip install 'clipwise\[(\w+)\]'\.$", line) for line in missing] == [["sklearn"]], missing
    home = environment.run("python", "-c", "import clipwise; print(clipwise.__file__)")
    assert home.startswith(str(environment.folder)), home
    message = environment.run("clipwise", *RUN.split(), code=2)
    assert "a run's folder is made with" in message and not (environment.folder / "run").exists(), message


def follow_advice(environment: Environment) -> None:
    """The command that the message names installs what is missing, and then the run is made."""
    message = environment.run("clipwise", *RUN.split(), code=2)
    advised = re.search(r"pip install '(clipwise\[\w+\])'", message)
    assert advised, message
    environment.install(advised[1])
    environment.run("clipwise", *RUN.split())
    assert (environment.folder / "run" / "report.html").stat().st_size > 10_000


def main() -> None:
    """Build, install, try."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel, source = build(folder / "dist")
        check_contents(wheel, source)
        environment = Environment(folder)
        rows = (f"{k},{k % 7},{'yes' if k % 3 else 'no'}" for k in range(100))
        (folder / "table.csv").write_text("\n".join(["a,b,y", *rows]), encoding="utf-8")
        (folder / "config.toml").write_text(CONFIG, encoding="utf-8")
        environment.install(wheel)
        check_installed(environment)
        environment.install("--force-reinstall", "--no-deps", source)
        check_installed(environment)
        follow_advice(environment)
    print(f"wheel and source archive work in {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
