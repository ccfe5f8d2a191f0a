"""The page in a real browser: nothing fails, all is seen, the controls work, also without script and in print."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clipwise import report

from .samples import made_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed (Debian: apt-get install chromium)")
QUIET = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra `dev`)")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield launched
        launched.close()


class Opened:
    """A page with everything that went wrong on it."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.page.on("console", lambda message: self.problems.append(f"console {message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.page.on("request", lambda request: self._asked(request.url))
        self.page.goto(path.as_uri())

    def _asked(self, url: str) -> None:
        if not url.startswith(("file:", "blob:")):
            self.problems.append(f"request: {url}")

    def seen(self, selector: str) -> int:
        return len([each for each in self.page.query_selector_all(selector) if each.is_visible()])


@pytest.fixture
def opened(browser: Any, compared: Path) -> Iterator[Opened]:
    found = Opened(browser, compared)
    yield found
    found.context.close()
    assert not found.problems


def test_every_figure_is_seen(opened: Opened) -> None:
    for name in ("reliability", "confidence", "true-class"):
        assert opened.seen(f"#figure-{name} svg") == 4
    for name in ("clipping-norm", "training", "privacy", "private-training"):
        assert opened.seen(f"#figure-{name} svg") == 1
    for drawn in opened.page.query_selector_all("figure:not([hidden]) svg"):
        box = drawn.bounding_box()
        assert box["width"] > 200 and box["height"] > 150
        assert len(drawn.query_selector_all("path")) > 10


def test_no_text_of_a_figure_is_cut(opened: Opened) -> None:
    cut = opened.page.evaluate(
        """() => [...document.querySelectorAll("figure:not([hidden]) svg")].flatMap(svg => {
          const edge = svg.getBoundingClientRect();
          return [...svg.querySelectorAll("text")].filter(text => {
            const box = text.getBoundingClientRect();
            return box.width > 0 && (box.left < edge.left - 1 || box.right > edge.right + 1
              || box.top < edge.top - 1 || box.bottom > edge.bottom + 1);
          }).map(text => text.textContent);
        })"""
    )
    assert cut == []


def test_a_run_can_be_hidden_and_shown(opened: Opened) -> None:
    everything = opened.seen('[data-arm="1"]')
    assert everything > 10
    button = opened.page.get_by_role("button", name="R = 1", exact=True)
    button.click()
    assert opened.seen('[data-arm="1"]') == 0 and button.get_attribute("aria-pressed") == "false"
    assert opened.seen('[data-arm="2"]') == everything
    button.click()
    assert opened.seen('[data-arm="1"]') == everything and button.get_attribute("aria-pressed") == "true"


def test_the_number_of_bins_can_be_chosen(opened: Opened) -> None:
    assert opened.seen('[data-bins="15"]') == opened.seen("[data-bins]") == 8
    opened.page.get_by_role("button", name="30", exact=True).click()
    assert opened.seen('[data-bins="30"]') == opened.seen("[data-bins]") == 8
    texts = [
        opened.page.locator(f'#figure-reliability [data-arm="1"][data-bins="{bins}"]').text_content()
        for bins in (15, 30)
    ]
    assert all("ECE" in text for text in texts)


def test_the_users_words_do_not_run(opened: Opened) -> None:
    assert opened.page.evaluate("window.hacked") is None
    assert opened.page.get_by_text("<script>window.hacked").count() > 0


def test_the_numbers_can_be_saved(opened: Opened, compared: Path) -> None:
    with opened.page.expect_download() as saved:
        opened.page.get_by_role("button", name="Save the numbers").click()
    assert json.loads(Path(saved.value.path()).read_text()) == json.loads(compared.with_name("result.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 800, 390])
def test_the_page_is_no_wider_than_the_window(opened: Opened, width: int) -> None:
    opened.page.set_viewport_size({"width": width, "height": 900})
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width


def test_without_script_everything_is_there_but_the_controls(browser: Any, compared: Path) -> None:
    opened = Opened(browser, compared, java_script_enabled=False)
    assert opened.seen('[data-bins="15"]') == opened.seen("[data-bins]") == 8
    assert opened.seen("#toolbar") == 0 and opened.seen("#download") == 0
    assert not opened.problems
    opened.context.close()


@pytest.mark.slow
def test_in_print_the_controls_are_gone(opened: Opened) -> None:
    opened.page.emulate_media(media="print")
    assert opened.seen("#toolbar") == 0 and opened.seen("#figure-reliability svg") == 4
    assert len(opened.page.pdf(format="A4")) > 20_000


@pytest.mark.parametrize("width", [360, 500])
def test_a_narrow_screen_shows_every_column_with_its_name(browser: Any, compared: Path, width: int) -> None:
    found = Opened(browser, compared)
    found.page.set_viewport_size({"width": width, "height": 844})
    cells = found.page.evaluate(
        """() => [...document.querySelectorAll("#results tbody tr:first-child td")].map(cell => {
          const box = cell.getBoundingClientRect();
          return [cell.dataset.label, box.left >= 0 && box.right <= innerWidth && cell.scrollWidth <= cell.clientWidth];
        })"""
    )
    assert cells == [[name, True] for name in ("Epsilon", "Accuracy", "Confidence", "ECE", "MCE", "NLL")]
    assert found.page.evaluate("document.documentElement.scrollWidth") == width
    found.context.close()


@pytest.mark.slow
def test_a_tablet_shows_whole_tables(browser: Any, tmp_path: Path) -> None:
    found = Opened(browser, report.write(made_run(), tmp_path))
    for width in (721, 768, 900):
        found.page.set_viewport_size({"width": width, "height": 900})
        cut = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
        assert found.page.evaluate(cut) == 0
    found.context.close()


AXE = Path(os.environ.get("AXE_CORE", "node_modules/axe-core/axe.min.js"))


@pytest.mark.slow
@pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not there (npm install axe-core; AXE_CORE=.../axe.min.js)")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1440])
def test_axe_finds_no_fault(browser: Any, compared: Path, scheme: str, width: int) -> None:
    found = Opened(browser, compared, color_scheme=scheme, bypass_csp=True)
    found.page.set_viewport_size({"width": width, "height": 900})
    found.page.evaluate(AXE.read_text(encoding="utf-8"))
    faults = found.page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    assert [(fault["id"], fault["nodes"][0]["html"]) for fault in faults] == []
    found.context.close()


CONTRASTS = """() => {
  const light = colour => {
    const linear = v => v <= 0.04 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const most = colour.startsWith("color(") ? 1 : 255;
    const [r, g, b] = colour.match(/[\\d.]+/g).map(v => linear(v / most));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = element => {
    const own = getComputedStyle(element).backgroundColor;
    return /, 0\\)$/.test(own) ? paper(element.parentElement) : own;
  };
  const contrast = (element, colour) => {
    const [low, high] = [light(colour), light(paper(element))].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const texts = [...document.querySelectorAll("main p, main th, main td, main h2, main .tag, main button")];
  const drawn = [...document.querySelectorAll("figure:not([hidden]) svg text")];
  const arms = drawn.filter(text => contrast(text, getComputedStyle(text).fill) < 4.5).map(text => text.textContent);
  const words = texts.filter(text => contrast(text, getComputedStyle(text).color) < 4.5).map(text => text.textContent);
  const bars = [...document.querySelectorAll(".bar.expected")];
  const dashes = Math.min(...bars.map(bar => contrast(bar, getComputedStyle(bar).borderTopColor)));
  return [texts.length, drawn.length, light(paper(document.querySelector("main"))), arms, words, dashes];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_word_can_be_read_on_light_and_on_dark_paper(browser: Any, compared: Path, scheme: str) -> None:
    found = Opened(browser, compared, color_scheme=scheme)
    texts, drawn, paper, faint_drawn, faint, dashes = found.page.evaluate(CONTRASTS)
    assert texts > 50 and drawn > 100
    assert paper > 0.9 if scheme == "light" else paper < 0.02
    assert faint_drawn == [] and faint == []
    assert dashes > (2 if scheme == "light" else 6), "thin dashes are fainter than text of their colour"
    found.context.close()
