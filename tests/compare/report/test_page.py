"""The page as text and the Markdown: whatever is missing, there is a page, and user text stays text."""

from __future__ import annotations

import builtins
import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from normlab.cli import main
from normlab.compare.report import build, markdown
from normlab.compare.report.page import reproduce_commands
from normlab.compare.report.results import load_results
from normlab.errors import NormLabError
from normlab.pages.markdown import escape
from normlab.pages.page import embed, install_command, render, section
from normlab.pages.tables import Cell, Column, Table
from tests.compare.report import synthetic


class Tags(HTMLParser):
    """Collects scripts, and every attribute through which a page could reach outside."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[dict[str, str | None]] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "script":
            self.scripts.append(dict(attrs))
        self.outside += [v for k, v in attrs if k in ("src", "href") and v and not v.startswith(("#", "data:"))]


def embedded(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.comparison(tmp_path_factory.mktemp("report") / "c", running=True)


def test_the_page_is_one_file_that_asks_for_nothing(folder: Path) -> None:
    path = build(folder)
    assert path == folder / "report.html"
    text = path.read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(text)
    assert tags.outside == []
    assert [attrs for attrs in tags.scripts if attrs] == [{"type": "application/json", "id": "data"}]
    assert text.count("plotly.js v") == 1
    assert len(text) < 8e6
    assert not list(folder.glob(".*.part"))


def test_user_text_is_escaped_everywhere(folder: Path) -> None:
    text = build(folder).read_text(encoding="utf-8")
    assert "<script>alert(1)" not in text
    assert "<i>," not in text
    assert "<u>inf" not in text
    assert "books/<b>" not in text
    assert embedded(text)["schemes"][1]["label"] == synthetic.HOSTILE


def test_embedded_data_can_neither_end_its_script_nor_break_json() -> None:
    hostile = {"</script><!--": ["<", ">", "&", "\u2028", "\u2029", math.nan, math.inf, -math.inf, 1.5, None, True]}
    text = embed(hostile)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"</script><!--": ["<", ">", "&", "\u2028", "\u2029", None, None, None, 1.5, None, True]}


def test_any_section_can_use_the_shell() -> None:
    table = Table("Depths", [Column("Depth", True)], [[Cell("<b>12", 12.0)]])
    text = render("A <check>", [section("depth", "Depth", "table.html", table=table)], {"schemes": []})
    assert "A &lt;check&gt;" in text
    assert "&lt;b&gt;12" in text


def test_out_and_smoothing(folder: Path, tmp_path: Path) -> None:
    path = build(folder, out=tmp_path / "page.html", smoothing=0.25)
    assert path == tmp_path / "page.html"
    assert embedded(path.read_text(encoding="utf-8"))["smoothing"] == 0.25
    with pytest.raises(NormLabError, match="smoothing"):
        build(folder, smoothing=1.0)
    with pytest.raises(NormLabError, match="is a folder"):
        build(folder, out=tmp_path)
    with pytest.raises(NormLabError, match=r"page\.md must end in \.html; try .*page\.html"):
        build(folder, out=tmp_path / "page.md")


def test_commands_are_those_that_were_recorded(folder: Path, tmp_path: Path) -> None:
    install, compare, report = reproduce_commands(load_results(folder))
    assert install == "pip install normlab==0.1.0 torch==2.13.0"
    assert compare == "normlab compare --schemes pre post peri geonorm --lrs 0.0006 0.0012 --seeds 3"
    assert report == "normlab report c"
    assert reproduce_commands(load_results(synthetic.run(tmp_path / "r"))) == []
    # A build of torch for one kind of device is not on PyPI; the version without it also installs that build.
    assert install_command({"torch": "2.13.0+cpu"}) == ["pip install torch==2.13.0"]
    assert install_command({}) == []


def damaged(folder: Path, damage: str) -> None:
    if damage == "no metrics":
        shutil.rmtree(folder / "runs")
    elif damage == "torn status":
        for path in folder.glob("runs/*/status.json"):
            path.write_text('{"state": "do')
    elif damage == "no compare.json":
        (folder / "compare.json").unlink()
    elif damage == "odd compare.json":
        (folder / "compare.json").write_text('{"schemes": "pre", "baseline": ["pre"], "level": "x", "versions": null}')
    elif damage == "no rows":
        (folder / "rows.jsonl").unlink()
    elif damage == "nothing finite":
        for path in folder.glob("runs/*/metrics.jsonl"):
            path.write_text(re.sub(r'(loss|seconds|hidden_rms)": [^,\]]+', r'\1": NaN', path.read_text()))
    elif damage == "odd profiles":
        for path in folder.glob("runs/*/metrics.jsonl"):
            path.write_text('{"kind": "profile", "step": 1, "layers": "x", "hidden_rms": [null]}\n')


@pytest.mark.parametrize(
    "damage",
    ["no metrics", "torn status", "no compare.json", "odd compare.json", "no rows", "nothing finite", "odd profiles"],
)
def test_what_is_missing_becomes_a_sentence(tmp_path: Path, damage: str) -> None:
    folder = synthetic.comparison(tmp_path / "c", schemes=["pre", "peri"], steps=24)
    damaged(folder, damage)
    text = build(folder).read_text(encoding="utf-8")
    embedded(text)
    assert markdown(folder)
    if damage == "no metrics":
        assert "No loss has been recorded yet." in text
        assert "recorded no profiles" in text


@pytest.mark.parametrize(
    "options",
    [{"judge": ()}, {"judge": (1,)}, {"tune": ()}, {"profiles": False}, {"schemes": ["pre"]}, {"lrs": [1e-3]}],
)
def test_small_comparisons_have_pages(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = synthetic.comparison(tmp_path / "c", steps=24, **options)
    assert "Verdict" in build(folder).read_text(encoding="utf-8")
    assert markdown(folder)


@pytest.mark.parametrize("state", ["done", "failed", "running", "stopped"])
def test_a_run_has_a_page(tmp_path: Path, state: str) -> None:
    folder = synthetic.run(tmp_path / "r", state=state)
    text = build(folder).read_text(encoding="utf-8")
    assert 'id="curves"' in text
    assert 'id="ranking"' not in text
    assert "over seeds" not in text
    assert "| peri |" in markdown(folder)


@pytest.mark.parametrize("config", ["{}", '{"config": 3}'])
def test_an_empty_run_has_a_page(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    assert "No loss has been recorded yet." in build(tmp_path).read_text(encoding="utf-8")
    assert markdown(tmp_path)


def test_half_a_surrogate_pair_does_not_stop_the_page(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"scheme": "a\\ud800b"}')
    assert "a?b" in build(tmp_path).read_text(encoding="utf-8")


def test_markdown_holds_what_a_paper_needs(folder: Path) -> None:
    lines = markdown(folder).splitlines()
    assert lines[0].startswith("**peri reaches the lowest validation loss")
    header = next(line for line in lines if line.startswith("| Scheme"))
    rows = [line for line in lines if line.startswith("| ") and "---" not in line and line != header]
    assert len(rows) == 4
    # Every row has the cells of the header: a pipe in a label did not open one.
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in [header, *rows]} == {10}
    peri = next(line for line in rows if line.startswith("| peri"))
    for part in ("4.128", "−0.050", "−0.058 to −0.042", "better", "1.2e-3", "| 3 |"):
        assert part in peri
    assert lines[-1] == "492k tokens a run; device Test GPU &amp; co; normlab 0.1.0; torch 2.13.0; python 3.11.2"


def test_markdown_goes_into_a_file_that_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.md"
    monkeypatch.setattr("sys.argv", ["normlab", "report", str(folder), "--markdown", "--out", str(table)])
    main.main()
    assert capsys.readouterr().out == f"table: {table}\n"
    assert table.read_text() == markdown(folder)
    monkeypatch.setattr("sys.argv", ["normlab", "report", str(folder), "--markdown", "--out", "table.txt"])
    with pytest.raises(SystemExit, match="2"):
        main.main()
    assert "table.txt must end in .md" in capsys.readouterr().err


def test_markdown_escapes_user_text() -> None:
    hostile = "a|b <img src=x> `c` *d* _e_ [f](g)\n# h \\ &"
    assert escape(hostile) == "a\\|b &lt;img src=x&gt; \\`c\\` \\*d\\* \\_e\\_ \\[f\\](g) \\# h \\\\ &amp;"


@pytest.mark.parametrize("package", ["jinja2", "plotly"])
def test_a_missing_package_names_the_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from normlab.pages import page

    original = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(name)
        return original(name, *rest, **more)

    load_it = {"jinja2": page._environment, "plotly": page._plotly}[package]
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(NormLabError, match=rf"{package}.*pip install {package}"):
        load_it.__wrapped__()
