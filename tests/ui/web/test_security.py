"""Who gets an answer, and who does not."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest

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
        "plotly/plotly.min.js",
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
    wrong = httpx.get(
        f"{shared.base}{path}", cookies={shared.access.name: "wrong"}, trust_env=False
    )
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


@pytest.mark.parametrize(
    "path",
    [
        "../../etc/passwd",
        "static/../../../../etc/passwd",
        "static/..%2f..%2f..%2fetc%2fpasswd",
        "static/%2e%2e/report.py",
        "static//etc/passwd",
        "static/%2fetc%2fpasswd",
        "..%5c..%5cetc/passwd",
        "api/runs/..%2f..%2f..%2fetc%2fpasswd",
        "api/runs/%2e%2e/log",
        "api/runs/../../../etc/passwd/log",
        "api/runs/%00",
        "api/sweeps/..%2f..",
        "api/runs/.",
        "static/../report.py",
        "report.py",
    ],
)
def test_paths_lead_nowhere(shared: Served, path: str) -> None:
    target = f"{shared.access.path}{path}"  # as it is: clients resolve dots
    request = f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nCookie: {shared.access.name}={shared.access.token}"
    with socket.create_connection(("127.0.0.1", shared.port)) as connection:
        connection.sendall(f"{request}\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.split()[1] in (b"400", b"403", b"404", b"405")
    assert b"root:" not in answer


def test_every_answer_says_what_browsers_may_do(client: httpx.Client, shared: Served) -> None:
    refused = httpx.get(shared.base, trust_env=False)
    for answer in (
        client.get("api/runs"),
        client.get("plotly/plotly.min.js"),
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


def test_other_methods_are_refused(client: httpx.Client, shared: Served) -> None:
    own = {"origin": f"http://127.0.0.1:{shared.port}"}
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
