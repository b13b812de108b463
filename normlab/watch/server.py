"""Local web server of `normlab watch`: two addresses, read-only, for this machine alone.

It binds 127.0.0.1. No address is ever made into a path: there is the page, and what the watcher knows. A request whose
Host header names another machine is refused: a page of another site whose name was rebound to 127.0.0.1 (DNS rebinding)
would carry its own name there.
"""

from __future__ import annotations

import json
import socketserver
import sys
import webbrowser
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from normlab.errors import NormLabError
from normlab.utils.text import counted
from normlab.watch.page import watch_page
from normlab.watch.watcher import Watcher

ADDRESS = "127.0.0.1"
_HOSTS = (ADDRESS, "localhost")
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class WatchServer(ThreadingHTTPServer):
    """Serves the page and the runs of a watcher on 127.0.0.1. `port` 0 takes a free one."""

    daemon_threads = True

    def __init__(self, watcher: Watcher, port: int = 0):
        if not 0 <= port <= 65535:
            raise NormLabError(f"watch: --port must lie in 0 to 65535, got {port}; 0 takes any free one")
        self.watcher = watcher
        self.page = watch_page(watcher.root).encode("utf-8", "replace")
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            reason = error.strerror or error
            raise NormLabError(f"cannot listen on {ADDRESS}:{port}: {reason}; try --port 0, any free one") from None

    def server_bind(self) -> None:
        # HTTPServer would look up the machine's full name, which can take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A tab that was closed while it was answered.
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD for / and /runs.json."""

    protocol_version, server_version, sys_version = "HTTP/1.1", "normlab", ""
    timeout = 60
    server: WatchServer  # pyright: ignore[reportIncompatibleVariableOverride]  # no other makes it

    def do_GET(self) -> None:
        if not self._is_local():
            return self._refuse(HTTPStatus.FORBIDDEN, "this page is for the machine it runs on; open it as localhost")
        asked = urlsplit(self.path)
        if asked.netloc:
            # The absolute form of an address, as for a proxy: it names a machine of its own.
            return self._refuse(HTTPStatus.NOT_FOUND, "this is no proxy")
        if asked.path == "/":
            return self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page)
        if asked.path == "/runs.json":
            return self._send(HTTPStatus.OK, "application/json", self._runs(asked.query))
        return self._refuse(HTTPStatus.NOT_FOUND, "there is nothing here but / and /runs.json")

    do_HEAD = do_GET  # noqa: N815 (http.server's names)

    def do_POST(self) -> None:
        # What the body holds is not read, so the connection cannot be used again.
        self.close_connection = True
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "this page can only be read", Allow="GET, HEAD")

    do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = do_POST  # noqa: N815

    def _is_local(self) -> bool:
        """Whether the one Host header names this machine. Any port: it may be forwarded by ssh."""
        given = self.headers.get_all("Host") or []
        return len(given) == 1 and given[0].strip().lower().partition(":")[0] in _HOSTS

    def _runs(self, query: str) -> bytes:
        asked = parse_qs(query)
        since = asked.get("since", ["0"])[0]
        known = int(since) if since.isascii() and since.isdigit() and len(since) < 16 else 0
        answer = self.server.watcher.answer(asked.get("epoch", [""])[0], known)
        return json.dumps(answer, allow_nan=False, separators=(",", ":")).encode()

    def _refuse(self, status: HTTPStatus, words: str, **headers: str) -> None:
        self._send(status, "text/plain; charset=utf-8", f"{words}\n".encode(), **headers)

    def _send(self, status: HTTPStatus, kind: str, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name is the base class's)
        """Nothing: a page asks every two seconds."""


def serve(watcher: Watcher, port: int, *, browser: bool = False) -> None:
    """Serve until Ctrl-C."""
    with WatchServer(watcher, port) as server:
        runs = counted(len(watcher.lines()), "run")
        print(f"watching {runs} in {watcher.root}\n{server.url}  (Ctrl-C ends)", flush=True)
        if browser:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(file=sys.stderr)
