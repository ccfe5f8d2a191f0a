"""Sphinx configuration; `make docs` builds with warnings as errors."""

import re
from typing import Any

import clipwise

project = "clipwise"
author = "The clipwise developers"
project_copyright = "2026, the clipwise developers"
version = release = clipwise.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"clipwise {version}"

# Docstrings mark code with single backticks.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_display_short_literal_types = True
maximum_signature_line_length = 100


def fences_to_blocks(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are Markdown-like where reStructuredText is not: turn their fenced blocks into code blocks."""
    inside = False
    for k, line in enumerate(lines):
        if line.strip().startswith("```"):
            language = re.sub(r"\W", "", line) or "text"
            lines[k] = "" if inside else f".. code-block:: {language}\n"
            inside = not inside
        elif inside:
            lines[k] = f"   {line}"
    lines[:] = "\n".join(lines).split("\n")


def setup(app: Any) -> None:
    """Register the docstring filter."""
    app.connect("autodoc-process-docstring", fences_to_blocks)
