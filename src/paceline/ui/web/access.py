"""Who may ask the server, and what browsers may do with its answers.

The server listens on this machine's loopback address only, but everybody who is logged in here can
connect to that, and every page that is open in your browser can send requests to it. Therefore:

- every request needs the token. The link has it, and the first answer moves it into a cookie;
- the cookie belongs to a path with a random name, and has this name itself: browsers send it to
  every port of this host, but only for this path;
- the Host header has to name this machine: another name that leads here is a page that lets itself
  be rebound;
- requests that another page has caused (Origin, Sec-Fetch-Site) are rejected.
"""

from __future__ import annotations

import hmac
import re
import secrets
from dataclasses import dataclass, field

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.ASCII)
# Nothing from elsewhere and no script that is not ours. Plotly styles its charts inline, and
# pictures of them, to save, are data and blob URLs.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True)
class Access:
    """The secrets of one start of the server."""

    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    name: str = field(default_factory=lambda: f"paceline-{secrets.token_hex(8)}")

    @property
    def path(self) -> str:
        return f"/{self.name}/"

    def link(self, port: int) -> str:
        return f"http://127.0.0.1:{port}{self.path}?token={self.token}"

    @property
    def cookie(self) -> str:
        """The value of the Set-Cookie header."""
        return f"{self.name}={self.token}; Path={self.path}; HttpOnly; SameSite=Strict"

    def is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(errors="replace"), self.token.encode())

    def is_entrance(self, request: Request) -> bool:
        """Return whether the request is the printed link, with the right token."""
        is_link = request.method == "GET" and request.url.path == self.path
        return is_link and self.is_token(request.query_params.get("token", ""))

    def judge(self, request: Request) -> tuple[int, str] | None:
        """Return why a request is refused; None if it is answered."""
        headers = request.headers
        host = ", ".join(headers.getlist("host"))
        if not _HOST.fullmatch(host):
            return 403, "This server answers only to 127.0.0.1 and localhost."
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        # A link in another page may lead to ours, which then needs its token; nothing else may come
        # from there.
        fetch = headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")
        is_ours = site in (None, "same-origin", "none") or fetch == ("navigate", "document")
        if origin not in (None, f"http://{host}") or not is_ours:
            return 403, "Requests from other pages are rejected."
        if request.method not in ("GET", "HEAD") and origin is None:
            return 403, "A request that changes something needs an Origin header."
        if not request.url.path.startswith(self.path):
            return 404, "There is nothing here. Use the link that `paceline ui` printed."
        if self.is_entrance(request) or self.is_token(request.cookies.get(self.name, "")):
            return None
        return 403, "The token is missing or wrong. Use the link that `paceline ui` printed."


class Guard:
    """Refuses what `judge` refuses, and adds headers to every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        # what a browser may keep, it asks about each time
        keeping = "no-store" if "/api/" in scope["path"] else "private, no-cache"

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update({**HEADERS, "cache-control": keeping})
            await send(message)

        refusal = self.access.judge(Request(scope))
        app = JSONResponse({"error": refusal[1]}, refusal[0]) if refusal else self.app
        await app(scope, receive, send_guarded)
