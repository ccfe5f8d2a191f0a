"""The README's example is run as a reader would run it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_quickstart_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks, "the README has no Python example"
    script = tmp_path / "quickstart.py"
    script.write_text(blocks[0], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", script], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"accuracy ([\d.]+)% at epsilon ([\d.]+), delta 1e-04\n", done.stdout)
    assert found, done.stdout
    assert float(found[1]) > 80
    assert 2.5 < float(found[2]) <= 3.0
