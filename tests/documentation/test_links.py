"""Links of every page lead to a file and a heading that exist; the site's own tools find what does not."""

from __future__ import annotations

import sys

import pytest

from tests.documentation.commands import ROOT

sys.path.insert(0, str(ROOT / "docs" / "website"))
from assemble import broken_links, pages
from links import anchors, is_external, relinked, slugify, targets
from notebook_page import as_markdown
from reference import public_modules, reference_pages
from verify import complaints

PAGES = [page for page in pages() if page.endswith(".md")]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    path = ROOT / page
    text = path.read_text("utf-8")
    assert broken_links(page, text) == []
    for target in targets(text):
        file, _, anchor = target.partition("#")
        if anchor and not is_external(target):
            there = (path.parent / file).resolve() if file else path
            assert anchor in anchors(there.read_text("utf-8")), f"{page}: {target}"


def test_a_link_that_leads_nowhere_is_found():
    page = "[a](nothing.md) [b](README.md) [c](https://example.org/nothing)\n```\n[d](code.md)\n```\n"
    assert broken_links("README.md", page) == ["nothing.md"]


def test_anchors_are_those_of_github():
    page = "# A comparison at 125M, one H200 (2026-11-16)\n## Same\n## Same\n```\n# a comment\n```\n"
    page += "## `normlab check`: [how](x.md)\n"
    assert anchors(page) == {"a-comparison-at-125m-one-h200-2026-11-16", "same", "same-1", "normlab-check-how"}
    assert slugify("Why κ?") == "why-κ"


def test_links_in_code_are_left_alone():
    page = "[a](b.md)\n````\n```\n[a](b.md)\n````\n[a](b.md#c) [x](https://b.md)\n"
    changed = "[a](!b.md)\n````\n```\n[a](b.md)\n````\n[a](!b.md#c) [x](https://b.md)\n"
    assert relinked(page, lambda target: f"!{target}") == changed


def test_a_built_page_is_checked(tmp_path):
    head = '<script src="https://cdn.example/x.js"></script><link rel="canonical" href="https://example.org">'
    (tmp_path / "a.html").write_text(
        head + '<h1 id="top"></h1><a href="b.html#no">b</a><a href="c.html">c</a><a href="#top">t</a>'
    )
    (tmp_path / "b.html").write_text('<a href="a.html#top">a</a><a href="https://example.org">out</a><img src="x.png">')
    assert complaints(tmp_path) == [
        "a.html: loads https://cdn.example/x.js", "a.html: b.html#no has no such anchor",
        "a.html: c.html does not exist", "b.html: x.png does not exist",
    ]  # fmt: skip


def test_the_reference_has_every_public_name():
    from tests.test_public_names import PUBLIC

    found = public_modules(ROOT / "normlab")
    for module, names in PUBLIC.items():
        listed = set(found[module][0])
        # Modules among the names have pages of their own.
        assert listed <= set(names)
        assert {f"normlab.{name}" for name in set(names) - listed} <= set(found), module
    shown = reference_pages(ROOT / "normlab")
    assert "::: normlab.Stack" in shown["normlab.md"]
    assert shown["index.md"].count("\n| [`normlab") == len(shown) - 1


def test_a_notebook_becomes_a_page(tmp_path):
    notebook = tmp_path / "tour.ipynb"
    notebook.write_text(
        '{"cells": [{"cell_type": "markdown", "source": ["# Tour"]}, {"cell_type": "code", "source": ["1 + 1"],'
        ' "outputs":'
        '[{"output_type": "execute_result", "data": {"text/plain": ["2"]}},'
        ' {"output_type": "display_data", "data": {"image/png": "AAAA", "text/plain": ["<Figure>"]}}]}]}'
    )
    page = as_markdown(notebook, tmp_path / "tour.md")
    assert page.startswith('# Tour\n\n```python\n1 + 1\n```\n\n```text\n2\n```\n\n<img src="tour-1.png"')
    assert (tmp_path / "tour-1.png").read_bytes() == b"\x00\x00\x00"
