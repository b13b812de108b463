"""The page of runs in progress in a real browser: a run grows while it is open, and the page follows."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from normlab.watch.server import WatchServer
from normlab.watch.watcher import Watcher
from tests.browser import browsing
from tests.watch import made


@pytest.fixture
def serve() -> Iterator[Callable[[Path], WatchServer]]:
    servers: list[WatchServer] = []

    def serve(root: Path) -> WatchServer:
        server = WatchServer(Watcher(root))
        threading.Thread(target=lambda: server.serve_forever(0.05), daemon=True).start()
        servers.append(server)
        return server

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open a server's page. A complaint, or a request for anything but this server, fails the test."""
    complaints: list[str] = []
    contexts: list[Any] = []

    def visit(server: WatchServer, **options: Any) -> Any:
        context = browser.new_context(**{"reduced_motion": "reduce"} | options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        page.on("request", lambda asked: _only_from(server, asked.url, complaints))
        page.goto(server.url)
        until(page, "Watch.known.runs.length > 0")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert complaints == []


def _only_from(server: WatchServer, url: str, complaints: list[str]) -> None:
    if not url.startswith((server.url, "data:", "blob:")):
        complaints.append(f"request: {url}")


def until(page: Any, condition: str) -> None:
    for _ in range(300):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(condition)


def traces(page: Any, plot: str) -> list[dict[str, Any]]:
    return json.loads(page.evaluate(f"JSON.stringify(document.getElementById('plot-{plot}').data)"))


@pytest.mark.full
@browsing
def test_a_run_grows_while_the_page_is_open(tmp_path: Path, serve: Any, visit: Any) -> None:
    folder = made.run(tmp_path / "a", [made.profile(0), *map(made.step, range(1, 51))], state="running", step=0)
    page = visit(serve(tmp_path))
    assert traces(page, "loss")[0]["x"][-1] == 50
    assert traces(page, "hidden_rms")[-1]["y"] == [1, 1, 1, 1, 1]
    assert page.locator(".state").text_content() == "training"
    log = folder / "metrics.jsonl"
    made.write(log, map(made.step, range(51, 81)))
    until(page, "document.getElementById('plot-loss').data[0].x.at(-1) === 80")
    spike = made.event(81, "nonfinite", f"step 81: loss is nan {made.HOSTILE}")
    made.write(log, [made.evaluation(80, 2.5), made.profile(80, growth=2.0), spike])
    until(page, "document.getElementById('plot-loss').data.length === 2")
    assert traces(page, "loss")[1]["y"] == [2.5]
    assert traces(page, "hidden_rms")[-1]["y"] == [1, 2, 4, 8, 16]
    assert page.locator("#alarm-rows td").last.text_content() == f"step 81: loss is nan {made.HOSTILE}"
    # Half a line, a second run, and the end of the first.
    with log.open("a") as file:
        file.write('{"kind": "step", "st')
    made.run(tmp_path / made.HOSTILE.replace("/", ""), [made.step(1)], state="running")
    ended = {"state": "failed", "of": 400, "reason": "loss is nan", "result": {"diverged": 81}}
    (folder / "status.json").write_text(json.dumps(ended))
    until(page, "document.querySelector('.state[data-state=diverged]') !== null")
    until(page, "document.querySelectorAll('#run-rows tr').length === 2")
    assert page.locator("#run-rows img, #alarm-rows img").count() == 0
    assert "1 diverged" in page.locator("#summary").text_content()


@pytest.mark.full
@browsing
def test_every_state_is_shown_and_runs_can_be_left_out(tmp_path: Path, serve: Any, visit: Any) -> None:
    page = visit(serve(made.zoo(tmp_path)), viewport={"width": 1280, "height": 900})
    states = page.eval_on_selector_all(".state", "words => words.map(w => w.dataset.state)")
    assert states == ["diverged", "finished", "starting", "stopped", "stuck", "training"]
    drawn = {trace["meta"]["run"] for trace in traces(page, "loss")}
    assert len(drawn) == 6
    page.locator("#run-rows tr", has_text="finished").locator("input").uncheck()
    assert len({trace["meta"]["run"] for trace in traces(page, "loss")}) == 5
    # The tick stays as its reader has put it when the next answer comes.
    page.evaluate("Watch.ask()")
    assert not page.locator("#run-rows tr", has_text="finished").locator("input").is_checked()
    page.locator("input[name=loss-kind][value=grad_norm]").check(force=True)
    assert page.evaluate("document.getElementById('plot-loss').layout.yaxis.title.text") == "Gradient norm"
    assert page.locator("#profiled option").all_text_contents() == ["training", "finished"]
    page.locator("#profiled").select_option(label="finished")
    assert page.locator("#newest").text_content() == "newest profile, step 200"


@pytest.mark.full
@browsing
@pytest.mark.parametrize("width", [1280, 400, 320])
def test_nothing_needs_sideways_scrolling(tmp_path: Path, serve: Any, visit: Any, width: int) -> None:
    page = visit(serve(made.zoo(tmp_path)), viewport={"width": width, "height": 740})
    page.evaluate("new Promise(done => setTimeout(done, 300))")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    unnamed = "e => !(e.ariaLabel || e.textContent.trim() || e.labels?.length)"
    reachable = "button, input, select, summary, [role=img], [role=region], [tabindex]"
    assert page.evaluate(f"[...document.querySelectorAll('{reachable}')].filter({unnamed}).length") == 0


@pytest.mark.full
@browsing
def test_a_server_that_has_ended_is_said(tmp_path: Path, serve: Any, browser: Any) -> None:
    server = serve(made.zoo(tmp_path))
    context = browser.new_context()
    page = context.new_page()
    page.goto(server.url)
    until(page, "Watch.known.runs.length > 0")
    assert page.locator("#lost").is_hidden()
    page.route("**/runs.json*", lambda route: route.abort())
    until(page, "!document.getElementById('lost').hidden")
    assert page.locator("#run-rows tr").count() == 6
    page.unroute("**/runs.json*")
    until(page, "document.getElementById('lost').hidden")
    context.close()
