"""The pictures of docs/images, taken from the page of `make demo`: `python -m docs.pictures runs/demo/report.html`.

Needs chromium and the extra `dev`. Colours are cut down to a palette, which makes the files smaller.
"""

from __future__ import annotations

import argparse
import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

IMAGES = Path(__file__).with_name("images")
WIDTH, COLOURS = 1180, 64
FLAGS = ["--no-sandbox", "--disable-lcd-text"]  # grey edges of letters need fewer colours
# From the top of one part of the page to the bottom of another; at most that many pixels.
PICTURES = {
    "report-top": ("html", ".arms", 1200),
    "report-figures": ("#toolbar", "#figure-reliability", 900),
    "report-uncovered": ("#uncovered", "#uncovered", 1250),
}


def taken(page: Page, first: str, last: str, most: int) -> Image.Image:
    """A picture of a stretch of a page."""
    begin, end = page.locator(first).bounding_box(), page.locator(last).bounding_box()
    assert begin is not None and end is not None, f"{first} or {last} is not on the page"
    top, bottom = begin["y"], end["y"] + end["height"]
    area = {"x": 0, "y": top, "width": WIDTH, "height": min(bottom - top, most)}
    shot = page.screenshot(full_page=True, clip=area)
    return Image.open(io.BytesIO(shot)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.pictures", description=__doc__)
    parser.add_argument("page", type=Path, help="the report of the demo, such as runs/demo/report.html")
    options = parser.parse_args()
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
        page.goto(options.page.resolve().as_uri())
        for name, (first, last, most) in PICTURES.items():
            path = IMAGES / f"{name}.png"
            taken(page, first, last, most).save(path, optimize=True)
            print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")
        browser.close()


if __name__ == "__main__":
    main()
