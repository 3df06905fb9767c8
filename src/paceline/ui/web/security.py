"""Who may ask the server, and what browsers may do with its answers.

The server listens on this machine's loopback address only, but everybody who is logged in here can
connect to that, and every page that is open in your browser can send requests to it. Therefore:

- every request needs the token. The link has it, and the first answer moves it into a cookie;
- the cookie belongs to a path with a random name: browsers send it to every port of this host, but
  only for this path;
- the Host header has to name this machine: another name that leads here is a page that lets itself
  be rebound;
- requests that another page has caused (Origin, Sec-Fetch-Site) are rejected.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import parse_qs

COOKIE = "paceline"
MAX_PATH = 1000  # characters
MAX_QUERY = 4000
_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.ASCII)

HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def make_policy(style_hashes: Sequence[str]) -> str:
    """Return the Content-Security-Policy: nothing inline but these styles, nothing from elsewhere,
    no `eval`.

    Pictures of charts, to save them, are data and blob URLs.
    """
    parts = (
        "default-src 'none'",
        "script-src 'self'",
        f"style-src 'self' 'unsafe-hashes' {' '.join(style_hashes)}",
        "img-src 'self' data: blob:",
        "font-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return "; ".join(parts)


@dataclass(frozen=True)
class Access:
    """The secrets of one start of the server."""

    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    path: str = field(default_factory=lambda: f"/{secrets.token_hex(8)}/")

    def link(self, port: int) -> str:
        return f"http://127.0.0.1:{port}{self.path}?token={self.token}"

    @property
    def cookie(self) -> str:
        """The value of the Set-Cookie header."""
        return f"{COOKIE}={self.token}; Path={self.path}; HttpOnly; SameSite=Strict"

    def is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(errors="replace"), self.token.encode())


@dataclass(frozen=True)
class Request:
    """What the decision is made from. Header names are in lower case; a header may come several
    times.
    """

    method: str
    path: str
    query: str
    headers: Mapping[str, Sequence[str]]

    def header(self, name: str) -> str | None:
        found = self.headers.get(name)
        return ", ".join(found) if found else None


@dataclass(frozen=True)
class Refusal:
    status: int
    reason: str


def judge(request: Request, access: Access) -> Refusal | None:
    """Return why a request is refused; None if it is answered."""
    if len(request.path) > MAX_PATH or len(request.query) > MAX_QUERY:
        return Refusal(414, "The address is too long.")
    host = request.header("host") or ""
    if not _HOST.fullmatch(host):
        return Refusal(403, "This server answers only to 127.0.0.1 and localhost.")
    if refusal := _judge_origin(request, host):
        return refusal
    if not request.path.startswith(access.path):
        return Refusal(404, "There is nothing here. Use the link that `paceline ui` printed.")
    if is_entrance(request, access) or _has_cookie(request, access):
        return None
    return Refusal(403, "The token is missing or wrong. Use the link that `paceline ui` printed.")


def _judge_origin(request: Request, host: str) -> Refusal | None:
    origin, site = request.header("origin"), request.header("sec-fetch-site")
    if origin is not None and origin != f"http://{host}":
        return Refusal(403, "Requests from other pages are rejected.")
    if request.method not in ("GET", "HEAD") and origin is None:
        return Refusal(403, "A request that changes something needs an Origin header.")
    # A link in another page may lead to ours, which then needs its token; nothing else may come
    # from there.
    is_visit = (
        request.header("sec-fetch-mode") == "navigate"
        and request.header("sec-fetch-dest") == "document"
    )
    if site not in (None, "same-origin", "none") and not is_visit:
        return Refusal(403, "Requests from other pages are rejected.")
    return None


def is_entrance(request: Request, access: Access) -> bool:
    """Return whether the request is the printed link, with the right token."""
    if request.method != "GET" or request.path != access.path:
        return False
    tokens = parse_qs(request.query, max_num_fields=10).get("token", [])
    return len(tokens) == 1 and access.is_token(tokens[0])


def _has_cookie(request: Request, access: Access) -> bool:
    """Return whether any cookie of our name has the token: another port of this host may have set
    more.
    """
    pairs = (
        pair.strip().partition("=")
        for text in request.headers.get("cookie", ())
        for pair in text.split(";")
    )
    return any(access.is_token(value) for name, _, value in pairs if name == COOKIE)
