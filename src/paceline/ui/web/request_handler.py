"""The ASGI application: it judges each request, then answers it in a thread, because answers read
files.
"""

from __future__ import annotations

import gzip
import re
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.errors import PacelineError
from paceline.ui.web import security
from paceline.ui.web.api import Answers, NotAllowed
from paceline.ui.web.assets import find_asset, style_hashes
from paceline.ui.web.events import Events
from paceline.ui.web.json_text import encode
from paceline.ui.web.lookup import NoSuchRun
from paceline.ui.web.security import HEADERS, Access, is_entrance, judge, make_policy
from paceline.ui.web.server import Strangers
from paceline.watch import origin

_UNSAFE = re.compile(r"[^\x20-\x7e\n]")
# the header with the time by which a page counts ages: the browser's may be wrong
CLOCK = "x-paceline-clock"
SMALL = 1000  # bytes that are not worth compressing
# A page of its own, because a browser sends the new cookie only with requests that come from us.
ENTRANCE = (
    '<!doctype html><meta charset="utf-8"><title>Paceline</title><link rel="icon" href="data:,">'
    '<meta http-equiv="refresh" content="0; url=./">'
)


def make_app(answers: Answers, access: Access) -> Starlette:
    """Return the application. Its `state` has the open pages (`events`) and the connections
    without the token.
    """
    events, strangers = Events(answers), Strangers()

    async def action(request: Request) -> Response:
        key, verb = request.path_params["key"], request.path_params["verb"]
        return await _answer(request, lambda: answers.act(key, verb))

    async def api(request: Request) -> Response:
        path, query = request.path_params["path"], _query(request)
        return await _answer(request, lambda: answers.find(f"api/{path}", query))

    async def live(request: Request) -> Response:
        if events.is_full:
            return _error(request, 503, "Too many pages are open.")
        key = request.query_params.get("key") or None
        since = request.headers.get("last-event-id") or request.query_params.get("since") or "0"
        position = int(since) if since.isascii() and since.isdigit() and len(since) < 16 else 0
        if key is not None:
            # an unknown run is an error, and not an empty stream
            await run_in_threadpool(answers.reader, key)
        return StreamingResponse(events.stream(key, position), media_type="text/event-stream")

    async def page(request: Request) -> Response:
        if is_entrance(_plain(request.scope), access):
            return HTMLResponse(ENTRANCE, headers={"set-cookie": access.cookie})
        return await asset(request)

    async def asset(request: Request) -> Response:
        found = await run_in_threadpool(find_asset, request.path_params.get("path", ""))
        if found is None:
            raise HTTPException(404, "There is no such page.")
        headers = {
            "etag": found.tag,
            "cache-control": "private, no-cache",
            "vary": "accept-encoding",
        }
        if request.headers.get("if-none-match") == found.tag:
            return Response(status_code=304, headers=headers)
        if _takes_gzip(request):
            headers["content-encoding"] = "gzip"
        content = found.compressed if _takes_gzip(request) else found.content
        return Response(content, headers=headers, media_type=found.media_type)

    routes = [
        Route("/", page),
        Route("/api/events", live),
        Route("/api/runs/{key}/{verb}", action, methods=["POST"]),
        Route("/api/{path:path}", api),
        Route("/{path:path}", asset),
    ]
    app = Starlette(
        routes=[Mount(access.path.rstrip("/"), routes=routes)],
        exception_handlers={HTTPException: _on_http_error, PacelineError: _on_error},
    )
    app.state.events, app.state.strangers = events, strangers
    headers = {**HEADERS, "content-security-policy": make_policy(style_hashes())}
    app.add_middleware(Guard, access=access, headers=headers, strangers=strangers)
    return app


class Guard:
    """Refuses what `judge` refuses, and adds headers to every answer. A connection that is refused
    ends.
    """

    def __init__(
        self, app: ASGIApp, access: Access, headers: Mapping[str, str], strangers: Strangers
    ) -> None:
        self.app = app
        self.access = access
        self.headers = headers
        self.strangers = strangers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self.headers.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
                if refusal is not None:
                    headers["connection"] = "close"
            await send(message)

        refusal = judge(_plain(scope), self.access)
        if refusal is not None:
            await _error(Request(scope), refusal.status, refusal.reason)(
                scope, receive, send_guarded
            )
            return
        self.strangers.remove(scope.get("client"))
        await self.app(scope, receive, send_guarded)


def _plain(scope: Scope) -> security.Request:
    headers: dict[str, list[str]] = defaultdict(list)
    for name, value in scope["headers"]:
        headers[name.decode("latin-1").lower()].append(value.decode("latin-1"))
    query = scope.get("query_string", b"").decode("latin-1")
    return security.Request(scope["method"], scope["path"], query, headers)


def _query(request: Request) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name, value in request.query_params.multi_items():
        found[name].append(value)
    return found


async def _answer(request: Request, question: Callable[[], dict[str, Any] | bytes]) -> Response:
    """Answer in a thread: what reads files, and what turns ten thousand rows into JSON."""

    def work() -> Response:
        try:
            answer = _json(request, question())
            answer.headers[CLOCK] = encode(origin.clock()).decode()
            return answer
        # such as a folder of another user, or one that has just been removed
        except OSError as error:
            return _error(
                request,
                404,
                f"{error.strerror or 'It cannot be read'}: {error.filename or ''}".rstrip(": "),
            )
        except PacelineError:
            raise
        # it must not end in silence, nor may what a run contains act on the terminal
        except Exception:
            print(_UNSAFE.sub("?", traceback.format_exc()), file=sys.stderr)
            return _error(
                request,
                500,
                "Paceline could not read this. The terminal of `paceline ui` says why.",
            )

    return await run_in_threadpool(work)


def _json(request: Request, answer: Any, status: int = 200) -> Response:
    content, headers = (
        answer if isinstance(answer, bytes) else encode(answer),
        {"vary": "accept-encoding"},
    )
    if len(content) > SMALL and _takes_gzip(request):
        content, headers["content-encoding"] = gzip.compress(content, 1), "gzip"
    return Response(content, status, headers=headers, media_type="application/json")


def _takes_gzip(request: Request) -> bool:
    return "gzip" in request.headers.get("accept-encoding", "")


def _error(request: Request, status: int, text: str) -> Response:
    return _json(request, {"error": text}, status)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(request, error.status_code, error.detail)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PacelineError)
    status = 404 if isinstance(error, NoSuchRun) else 403 if isinstance(error, NotAllowed) else 400
    return _error(request, status, " ".join(part for part in (error.message, error.hint) if part))
