"""The server: two addresses, read-only, this machine alone; nothing of the file system can be reached."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest

from normlab.errors import NormLabError
from normlab.watch.server import WatchServer
from normlab.watch.watcher import Watcher
from tests.command import normlab
from tests.watch import made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchServer]:
    with WatchServer(Watcher(made.zoo(tmp_path_factory.mktemp("zoo")))) as server:
        thread = threading.Thread(target=lambda: server.serve_forever(0.01))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: WatchServer, path: str = "/", method: str = "GET", **headers: str) -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def test_the_page_and_its_runs(server: WatchServer) -> None:
    answer, page = ask(server)
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert page.count(b"plotly.js v") <= 1
    assert b"connect-src 'self'" in page
    answer, body = ask(server, "/runs.json")
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["Access-Control-Allow-Origin"] is None
    found = json.loads(body)
    assert len(found["runs"]) == 6
    again = json.loads(ask(server, f"/runs.json?epoch={found['epoch']}&since={found['version']}")[1])
    assert again["changed"] == {}


@pytest.mark.parametrize(
    "query", ["since=-1", "since=x", "since=" + "9" * 5000, "since=%C2%B2", "epoch=%00&since=", "%"]
)
def test_odd_questions_get_everything(server: WatchServer, query: str) -> None:
    answer, body = ask(server, f"/runs.json?{query}")
    assert answer.status == 200
    assert len(json.loads(body)["changed"]) == 6


def test_a_question_for_the_head_alone_has_no_body(server: WatchServer) -> None:
    answer, body = ask(server, method="HEAD")
    assert (answer.status, body) == (200, b"")
    assert int(answer.headers["Content-Length"]) == len(ask(server)[1])


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
def test_nothing_can_be_written(server: WatchServer, method: str) -> None:
    answer, _ = ask(server, method=method)
    assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "path",
    [
        "/runs/training/metrics.jsonl", "/../../../../etc/passwd", "/..%2f..%2fetc%2fpasswd", "//etc/passwd",
        "/config.json", "/page.html", "/runs.json/", "http://localhost/", "http://localhost/runs.json", "//localhost/",
        "*", "/\\..\\x",
    ],
)  # fmt: skip
def test_no_file_can_be_reached(server: WatchServer, path: str) -> None:
    answer, body = ask(server, path, Host="localhost")
    assert answer.status == 404
    assert body in (b"there is nothing here but / and /runs.json\n", b"this is no proxy\n")


@pytest.mark.parametrize("host", ["localhost", "localhost:9000", "127.0.0.1:1", "LocalHost:80"])
def test_this_machine_is_served_under_any_port(server: WatchServer, host: str) -> None:
    assert ask(server, "/runs.json", Host=host)[0].status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io:80", "", "[::1]", "10.0.0.1"]
)
def test_other_hosts_are_refused(server: WatchServer, host: str) -> None:
    """DNS rebinding: a foreign site whose name points to 127.0.0.1 still carries its name."""
    for path in ("/", "/runs.json"):
        answer, body = ask(server, path, Host=host)
        assert answer.status == 403
        assert b"training" not in body


def test_a_second_host_header_is_refused(server: WatchServer) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as raw:
        raw.sendall(b"GET /runs.json HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 403")


def test_it_listens_on_this_machine_alone(server: WatchServer) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"


def test_a_port_in_use_is_said_in_one_line(server: WatchServer) -> None:
    with pytest.raises(NormLabError, match="try --port 0"):
        WatchServer(server.watcher, server.server_port)
    with pytest.raises(NormLabError, match="0 to 65535"):
        WatchServer(server.watcher, 65536)


def test_names_of_folders_stay_text(tmp_path: Path) -> None:
    root = tmp_path / made.HOSTILE
    made.run(root / "a", [made.step(1)])
    with WatchServer(Watcher(root)) as server:
        own = server.page.partition(b"\n<script>\n")[0]
    assert made.HOSTILE.encode() not in own
    assert b"&lt;img src=x" in own


def test_the_terminal_gets_a_table(tmp_path: Path) -> None:
    found = normlab("watch", str(made.zoo(tmp_path)), "--once")
    assert found.returncode == 0, found.stderr
    for words in ("training", "200 of 400", "diverged at step 120", "stuck, still", "diverged: loss is nan"):
        assert words in found.stdout


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    made.run(tmp_path / "a", [made.step(1)], state="stopped", reason="\x1b]0;owned\x07[red]no markup[/red]")
    found = normlab("watch", str(tmp_path), "--once")
    assert "\x1b]" not in found.stdout
    assert "[red]no markup[/red]" in found.stdout


@pytest.mark.parametrize("arguments", [("nowhere",), (".", "--port", "70000")])
def test_bad_input_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    made.run(tmp_path / "a", [made.step(1)])
    monkeypatch.chdir(tmp_path)
    found = normlab("watch", *arguments)
    assert found.returncode == 2
    assert found.stderr.startswith("normlab: ")
    assert found.stderr.count("\n") == 1


def test_control_c_ends_it_and_torch_is_never_loaded(tmp_path: Path) -> None:
    """The command in its own process: it says where it is, serves, and ends with 0."""
    made.run(tmp_path / "a", [made.step(1)])
    code = (
        "import sys; from normlab.cli.main import main; sys.argv = ['normlab', 'watch', sys.argv[1], '--port', '0']\n"
        "main(); assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    # A shell's background job ignores Ctrl-C, and so would its children.
    start = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **start
    ) as process:
        assert process.stdout is not None
        assert "one run" in process.stdout.readline()
        port = int(process.stdout.readline().partition("127.0.0.1:")[2].partition("/")[0])
        connection = HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", "/runs.json")
        assert json.loads(connection.getresponse().read())["runs"][0]["name"] == "a"
        connection.close()
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert errors.strip() == ""
