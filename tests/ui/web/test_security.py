"""Who gets an answer, and who does not."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from paceline.ui.web import server as web_server
from tests.ui.web.conftest import Served, serve_here
from tests.ui.web.folders import make_run

RUN = "20260101-120000-aaaa"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server for all tests that need no folder of their own."""
    scratch = tmp_path_factory.mktemp("scratch")
    make_run(scratch)
    with serve_here(scratch) as served:
        yield served


@pytest.fixture
def client(shared: Served) -> httpx.Client:
    return httpx.Client(base_url=shared.base, cookies=shared.cookies, trust_env=False, timeout=60)


def test_the_link_sets_a_cookie_for_its_path_alone(shared: Served) -> None:
    answer = httpx.get(shared.link, trust_env=False)
    assert answer.status_code == 200
    cookie = answer.headers["set-cookie"]
    assert f"Path={shared.access.path};" in cookie
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert shared.access.token not in answer.text


@pytest.mark.parametrize(
    "path",
    [
        "?token=",
        "?token=wrong",
        "",
        "?token=é",
        "api/runs",
        "plotly.min.js",
        "api/events",
        "api/runs?token=TOKEN",
    ],
)
def test_without_the_token_nothing_is_answered(shared: Served, path: str) -> None:
    answer = httpx.get(
        f"{shared.base}{path.replace('TOKEN', shared.access.token)}", trust_env=False
    )
    assert answer.status_code == 403
    assert "token" in answer.json()["error"]
    wrong = httpx.get(f"{shared.base}{path}", cookies={"paceline": "wrong"}, trust_env=False)
    assert wrong.status_code == 403


def test_the_token_opens_no_other_path(shared: Served) -> None:
    root = f"http://127.0.0.1:{shared.port}"
    for path in ("/", "/api/runs", f"/?token={shared.access.token}"):
        assert httpx.get(root + path, cookies=shared.cookies, trust_env=False).status_code == 404


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "127.0.0.1:1@evil"]
)
def test_a_foreign_host_is_refused(client: httpx.Client, host: str) -> None:
    assert client.get("api/runs", headers={"host": host}).status_code in (400, 403)


def test_two_hosts_are_refused(shared: Served) -> None:
    request = f"GET {shared.access.path}api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil\r\nCookie: paceline="
    with socket.create_connection(("127.0.0.1", shared.port)) as connection:
        connection.sendall(f"{request}{shared.access.token}\r\nConnection: close\r\n\r\n".encode())
        assert connection.recv(100).split()[1] in (b"400", b"403")


def test_a_tunnel_may_have_another_port(client: httpx.Client) -> None:
    assert client.get("api/runs", headers={"host": "localhost:1234"}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},  # another port of this machine
    ],
)
def test_requests_of_other_pages_are_refused(client: httpx.Client, headers: dict[str, str]) -> None:
    assert client.get("api/runs", headers=headers).status_code == 403


def test_our_own_page_may_ask(client: httpx.Client, shared: Served) -> None:
    headers = {"origin": f"http://127.0.0.1:{shared.port}", "sec-fetch-site": "same-origin"}
    assert client.get("api/runs", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "../../etc/passwd",
        "static/../../../../etc/passwd",
        "static/..%2f..%2f..%2fetc%2fpasswd",
        "static/%2e%2e/%2e%2e/security.py",
        "static//etc/passwd",
        "static/%2fetc%2fpasswd",
        "..%5c..%5cetc/passwd",
        "api/runs/..%2f..%2f..%2fetc%2fpasswd",
        "api/runs/%2e%2e/log",
        "api/runs/../../../etc/passwd/log",
        "api/runs/%00",
        "api/sweeps/..%2f..",
        "api/runs/.",
        "static/../security.py",
        "security.py",
    ],
)
def test_paths_lead_nowhere(shared: Served, path: str) -> None:
    target = f"{shared.access.path}{path}"  # as it is: clients resolve dots
    request = f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nCookie: paceline={shared.access.token}"
    with socket.create_connection(("127.0.0.1", shared.port)) as connection:
        connection.sendall(f"{request}\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.split()[1] in (b"400", b"403", b"404")
    assert b"root:" not in answer


@pytest.fixture
def own_client(served: Served) -> httpx.Client:
    return httpx.Client(base_url=served.base, cookies=served.cookies, trust_env=False, timeout=60)


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "attempt-1/rank-0.log", "config.json", "attempt-2"]
)
def test_a_link_out_of_the_run_folder_is_not_followed(
    own_client: httpx.Client, scratch: Path, tmp_path: Path, name: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "rank-0.log").write_text("secret of mine\n")
    (outside / "secret").write_text('{"step": 1, "time": 1, "secret": 5}\n')
    folder = make_run(scratch)
    (folder.path / name).unlink(missing_ok=True)
    os.symlink(outside if name == "attempt-2" else outside / "secret", folder.path / name)
    for path in ("", "/curves", "/log"):
        answer = own_client.get(f"api/runs/{RUN}{path}")
        assert answer.status_code == 404
        assert "link" in answer.json()["error"]
        assert "secret" not in answer.text
    assert own_client.get(f"api/events?key={RUN}").status_code == 404


def test_a_run_folder_that_is_a_link_is_not_shown(
    own_client: httpx.Client, scratch: Path, tmp_path: Path
) -> None:
    real = make_run(tmp_path / "elsewhere")
    make_run(scratch, "20260101-120000-bbbb")
    os.symlink(real.path, scratch / "digits" / "first" / RUN)
    assert own_client.get(f"api/runs/{RUN}").status_code == 404
    assert own_client.get("api/runs/20260101-120000-bbbb").status_code == 200


def test_long_addresses_are_refused(client: httpx.Client) -> None:
    assert client.get(f"api/runs/{'a' * 5000}").status_code == 414
    assert client.get(f"api/runs?x={'a' * 5000}").status_code == 414


def test_every_answer_says_what_browsers_may_do(client: httpx.Client, shared: Served) -> None:
    refused = httpx.get(shared.base, trust_env=False)
    for answer in (
        client.get("api/runs"),
        client.get("plotly.min.js"),
        client.get("api/nothing"),
        refused,
    ):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy
        assert "http" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
    assert client.get("api/runs").headers["cache-control"] == "no-store"
    assert "server" not in refused.headers


def test_other_methods_and_actions_are_refused(client: httpx.Client, shared: Served) -> None:
    own = {"origin": f"http://127.0.0.1:{shared.port}"}
    assert client.post(f"api/runs/{RUN}/cancel").status_code == 403
    assert client.post(f"api/runs/{RUN}/cancel", headers=own).status_code in (403, 405)
    assert client.put("api/runs", headers=own).status_code == 405
    assert client.delete("api/runs", headers=own).status_code == 405


@pytest.fixture
def strangers(shared: Served) -> Iterator[list[socket.socket]]:
    """Connections that are closed after the test."""
    opened: list[socket.socket] = []
    yield opened
    for each in opened:
        each.close()


def connect(served: Served, opened: list[socket.socket], text: bytes = b"") -> socket.socket:
    opened.append(socket.create_connection(("127.0.0.1", served.port), timeout=60))
    opened[-1].sendall(text)
    return opened[-1]


def test_connections_without_the_token_leave_room_for_yours(
    shared: Served, client: httpx.Client, strangers: list[socket.socket]
) -> None:
    """Another user of the machine opens many connections and sends nothing, or requests that never end."""
    before = connect(shared, strangers)
    for number in range(3 * web_server.MOST_STRANGERS):
        connect(
            shared,
            strangers,
            b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: " if number % 2 else b"",
        )
    assert client.get("api/runs").status_code == 200
    with client.stream("GET", "api/events") as mine:
        for _ in range(2 * web_server.MOST_STRANGERS):
            connect(shared, strangers)
        assert client.get("api/runs").status_code == 200
        assert next(mine.iter_lines())  # what has shown the token stays
    assert before.recv(100) == b""  # the oldest has made room


def test_a_request_that_never_ends_is_ended(
    shared: Served, strangers: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_server, "PATIENCE", 0.2)
    slow = connect(shared, strangers, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
    try:
        while not slow.recv(100):
            break
    except ConnectionResetError:
        pass


def test_a_refused_connection_is_closed(shared: Served, strangers: list[socket.socket]) -> None:
    refused = connect(shared, strangers, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    answer = b"".join(iter(lambda: refused.recv(4096), b""))  # until it is closed
    assert answer.startswith(b"HTTP/1.1 404")
    assert b"connection: close" in answer.lower()


@pytest.mark.parametrize(
    "request_text",
    [
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 40_000 + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01" + b"\x00" * 500,  # TLS
        b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n",
        b"GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n",
    ],
    ids=["huge header", "many headers", "tls", "proxy", "absolute", "two hosts"],
)
def test_strange_requests_are_refused(
    request_text: bytes, shared: Served, client: httpx.Client, strangers: list[socket.socket]
) -> None:
    answer = b""
    try:
        stranger = connect(shared, strangers, request_text)
        while part := stranger.recv(4096):
            answer += part
    except (ConnectionResetError, BrokenPipeError):
        pass
    assert not answer or answer.startswith((b"HTTP/1.1 40", b"HTTP/1.1 43")), answer[:200]
    assert shared.access.path.encode() not in answer
    assert client.get("api/runs").status_code == 200
