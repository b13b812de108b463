"""A real browser for the tests of pages: whatever a page logs, throws, asks or fetches fails the test at its end."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
browsing = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        # Root has no sandbox in a container; the page is our own.
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """`open_page(address, **options of the context)`."""
    complaints: list[str] = []
    contexts: list[Any] = []

    def request(route: Any) -> None:
        if route.request.url.startswith("file:"):
            route.continue_()
        else:
            complaints.append(f"request: {route.request.url}")
            route.abort()

    def open_page(address: str, **options: Any) -> Any:
        # A page that glides to where it is clicked cannot be clicked reliably.
        context = browser.new_context(**{"reduced_motion": "reduce"} | options)
        contexts.append(context)
        page = context.new_page()
        page.route("**/*", request)
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
