"""What other pages in the same browser can do to the dashboard: nothing. In a real browser."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.ui.web.conftest import Console, Served
from tests.ui.web.folders import make_run

RUN = "20260101-120000-aaaa"


@dataclass
class Stranger:
    """Another server on this machine, such as another user's behind a forwarded port."""

    port: int
    content: str = ""
    cookies: list[str] = field(default_factory=list)  # that browsers sent to it


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.cookies += self.headers.get_all("cookie") or []
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(f"<!doctype html><meta charset=utf-8>{made.content}".encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made = Stranger(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


def is_in(page: Any, served: Served) -> bool:
    """Whether the page has the token: it can ask for runs."""
    status: int = page.evaluate(
        "async base => (await fetch(base + 'api/runs')).status", served.base
    )
    return status == 200


def test_the_link_works_once_and_its_token_leaves_the_address(page: Any, served: Served) -> None:
    asked: list[tuple[str, str]] = []
    page.on(
        "request", lambda request: asked.append((request.url, request.headers.get("referer", "")))
    )
    page.goto(served.link)
    page.wait_for_url(served.base)
    page.locator(".brand").wait_for()
    assert [url for url, _ in asked if served.access.token in url] == [served.link]
    assert {referrer for _, referrer in asked} == {""}
    assert is_in(page, served)
    (cookie,) = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (
        True,
        "Strict",
        served.access.path,
    )
    assert page.evaluate("document.cookie") == ""
    page.goto("about:blank")
    page.go_back()
    assert page.url == served.base


def test_a_wrong_token_is_refused(page: Any, served: Served) -> None:
    answer = page.goto(f"{served.base}?token=wrong")
    assert answer.status == 403
    assert "Use the link" in page.content()
    assert page.context.cookies() == []


def test_a_name_that_leads_here_is_refused(page: Any, served: Served) -> None:
    page.goto(served.link)
    page.wait_for_url(served.base)
    answer = page.goto(served.link.replace("127.0.0.1", "evil.example"))
    assert answer.status == 403
    assert not any("evil" in cookie["domain"] for cookie in page.context.cookies())


# another site, and another port of the same one
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_another_page_gets_nothing(
    page: Any, served: Served, stranger: Stranger, scratch: Path, host: str
) -> None:
    folder = make_run(scratch)
    page.goto(served.link)
    page.wait_for_url(served.base)
    page.goto("about:blank")  # our own page asks as well
    statuses: dict[str, int] = {}
    page.on("response", lambda answer: statuses.__setitem__(answer.url, answer.status))
    stranger.content = (
        f"<img src='{served.base}api/runs?image'><script src='{served.base}api/runs?script'></script>"
        f"<link rel=stylesheet href='{served.base}static/style.css'><iframe src='{served.base}?frame'></iframe>"
    )
    page.goto(f"http://{host}:{stranger.port}/", wait_until="load")
    outcomes = page.evaluate(
        """async address => {
            const ask = async options => {
                const question = address + "?" + JSON.stringify(options);
                return fetch(question, options).then(answer => answer.type, () => "refused");
            };
            const first = await ask({credentials: "include"});
            const second = await ask({credentials: "include", mode: "no-cors"});
            const third = await ask({credentials: "include", mode: "no-cors", method: "POST"});
            return [first, second, third];
        }""",
        f"{served.base}api/runs/{RUN}/cancel",
    )
    assert outcomes[0] == "refused"
    asked = {url: status for url, status in statuses.items() if url.startswith(served.base)}
    assert asked
    assert set(asked.values()) == {403}
    assert not folder.cancelled.exists()
    assert all("paceline" not in cookie for cookie in stranger.cookies)
    page.goto(served.base)
    assert is_in(page, served)


def test_the_link_works_from_another_page(page: Any, served: Served, stranger: Stranger) -> None:
    stranger.content = f"<a href='{served.link}'>look</a>"
    page.goto(f"http://localhost:{stranger.port}/")
    page.click("a")
    page.wait_for_url(served.base)
    assert is_in(page, served)


def test_charts_need_nothing_that_the_policy_forbids(
    page: Any, served: Served, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chart of each kind that the pages use, with its buttons and the picture to save."""
    (tmp_path / "index.html").write_text(
        '<!doctype html><link rel="icon" href="data:,"><script src="plotly/plotly.min.js"></script><div id="a"></div>'
    )
    monkeypatch.setattr("paceline.ui.web.app.STATIC", tmp_path)
    page.goto(served.link)
    page.wait_for_url(served.base)
    page.locator("#a").wait_for(state="attached")
    size = page.evaluate(
        """async () => {
            const data = [{y: [1, 3, 2]}, {y: [1, 2], type: "bar"}, {z: [[1, 2], [3, 4]], type: "contour"}];
            await Plotly.newPlot("a", data, {title: {text: "chart"}}, {displayModeBar: true});
            return (await Plotly.toImage("a", {format: "png"})).length;
        }"""
    )
    assert size > 1000
    bar = page.locator(".modebar-btn").first
    bar.hover()
    with page.expect_download():
        bar.click()
    # styled
    assert (
        page.evaluate("getComputedStyle(document.querySelector('.modebar')).position") == "absolute"
    )
    assert console.problems == []
