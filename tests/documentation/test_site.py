"""The site is built strictly, has no broken link, loads nothing from elsewhere, and is searched from a disk."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.browser import browsing
from tests.documentation.commands import ROOT

sys.path.insert(0, str(ROOT / "docs" / "website"))
import assemble
from verify import complaints

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_spec("zensical") is None, reason='zensical is not installed: pip install "normlab[docs]"'),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("website")
    assemble.main(folder)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return folder / "site"


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site):
    assert complaints(site) == []


def test_every_kind_of_page_is_there(site):
    for page in (
        "index",
        "start",
        "concepts",
        "claims",
        "log",
        "architecture",
        "benchmarks",
        "schemes/peri",
        "api/normlab",
    ):
        assert (site / f"{page}.html").is_file(), page
    assert "certificate" in (site / "api" / "normlab.html").read_text("utf-8")
    assert "Stack" in (site / "source" / "normlab" / "stack.py.html").read_text("utf-8")


@browsing
def test_search_works_from_a_disk(site, open_page):
    page = open_page((site / "index.html").as_uri())
    page.keyboard.press("Control+k")
    box = page.get_by_placeholder("Search").last
    box.fill("certificate")
    page.get_by_text("results").first.wait_for()
    assert page.locator("a", has_text="ertificate").count() > 0


@browsing
def test_the_moving_pictures_are_shown(site, open_page):
    page = open_page((site / "concepts.html").as_uri())
    widths = page.eval_on_selector_all("article img", "images => images.map(image => image.naturalWidth)")
    assert len(widths) == 2
    assert all(width > 0 for width in widths)


@browsing
@pytest.mark.parametrize("width", [400, 1280])
def test_pages_fit_the_screen(site, open_page, width):
    for name in ("index", "claims", "schemes/geonorm", "guides/checking"):
        page = open_page((site / f"{name}.html").as_uri(), viewport={"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name


@browsing
def test_what_the_terminal_shows_is_not_cut_off(site, open_page):
    page = open_page((site / "guides/checking.html").as_uri(), viewport={"width": 1280, "height": 900})
    card = page.locator("pre > code", has_text="post  scheme, 48 blocks").first
    assert card.evaluate("code => code.scrollWidth <= code.clientWidth")


@browsing
def test_names_and_bars_in_tables_are_whole(site, open_page):
    page = open_page((site / "index.html").as_uri(), viewport={"width": 400, "height": 900})
    name = page.locator("td code", has_text="layerscale").first
    # One line: as high as the shortest name.
    assert name.evaluate("code => code.getClientRects().length") == 1
    assert "|α|" in page.locator("tr", has_text="ngpt").first.inner_text()
