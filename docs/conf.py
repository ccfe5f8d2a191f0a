"""Sphinx configuration; `make docs` builds with warnings as errors."""

import re
from pathlib import Path
from typing import Any

import clipwise

project = "clipwise"
author = "The clipwise developers"
project_copyright = "2026, the clipwise developers"
version = release = clipwise.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"clipwise {version}"
html_static_path = ["_static"]
html_css_files = ["clipwise.css"]

# Docstrings mark code with single backticks.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_display_short_literal_types = True
maximum_signature_line_length = 100


def markdown_to_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are Markdown-like: turn fenced blocks into code blocks and keep single asterisks as they are."""
    inside = False
    for k, line in enumerate(lines):
        if line.strip().startswith("```"):
            language = re.sub(r"\W", "", line) or "text"
            lines[k] = "" if inside else f".. code-block:: {language}\n"
            inside = not inside
        elif inside:
            lines[k] = f"   {line}"
        elif not line.lstrip().startswith((">>>", "...")):
            lines[k] = escape_asterisks(line)
    lines[:] = "\n".join(lines).split("\n")


def escape_asterisks(line: str) -> str:
    """Escape asterisks that are outside backticks and no part of a double one."""
    parts = line.split("`")
    parts[::2] = [re.sub(r"(?<!\*)\*(?!\*)", r"\\*", part) for part in parts[::2]]
    return "`".join(parts)


def copy_experiments(app: Any) -> None:
    """The recipes write the pages of their experiments into papers/; the site has copies in paper/."""
    copies = Path(app.srcdir, "paper")
    copies.mkdir(exist_ok=True)
    for page in Path(app.srcdir, "..", "papers").glob("*/README.md"):
        name = page.parent.name
        text = page.read_text(encoding="utf-8").replace("](figures/", f"](../../papers/{name}/figures/")
        copies.joinpath(f"{name}.md").write_text(text, encoding="utf-8")


def link_copies(app: Any, name: str, source: list[str]) -> None:
    """A link to the page of an experiment leads to the copy."""
    source[0] = re.sub(r"\]\(\.\./papers/(\w+)/README\.md", r"](paper/\1.md", source[0])


def make_accessible(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """What screen readers and keyboards need: a level for the captions of the navigation, code that can be scrolled."""
    for name in ("body", "furo_navigation_tree"):
        if context.get(name):
            levelled = context[name].replace('role="heading">', 'role="heading" aria-level="2">')
            context[name] = levelled.replace("<pre>", '<pre tabindex="0">')


def setup(app: Any) -> None:
    """Register what prepares docstrings and pages."""
    app.connect("autodoc-process-docstring", markdown_to_rst)
    app.connect("builder-inited", copy_experiments)
    app.connect("source-read", link_copies)
    app.connect("html-page-context", make_accessible, priority=900)  # after the theme's own
