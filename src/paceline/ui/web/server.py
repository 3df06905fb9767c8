"""Serve the dashboard on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import threading
import webbrowser
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.errors import EnvironmentProblem

LOOPBACK = "127.0.0.1"
GRACE = 3  # seconds for answers under way when the server ends
PATIENCE = 10.0  # seconds for a whole request with the token
MOST_STRANGERS = 100  # connections that may wait without it; a browser opens six

Address = tuple[str, int]


def listen(port: int) -> socket.socket:
    """Return a socket that listens on the loopback address; port 0 chooses a free one."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.listen(128)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise EnvironmentProblem(
            f"Cannot listen on port {port}: {reason}.",
            hint="Choose another --port, or omit it to get a free one.",
        ) from None
    return listener


def serve(app: Starlette, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM."""
    with contextlib.suppress(KeyboardInterrupt):
        make_server(app).run(sockets=[listener])


def make_server(app: Starlette) -> uvicorn.Server:
    """Return a server. Pages that are open do not delay its end."""
    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        ws="none",
        http=Connection,
        loop="asyncio",
        timeout_graceful_shutdown=GRACE,
    )
    return _Server(config, app)


@contextlib.contextmanager
def opened_browser(link: str) -> Iterator[None]:
    """Open the link in a browser by way of a file that only this user can read.

    All users of a machine can read command lines, and so the browser's.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:  # mode 0700
        page = Path(folder, "open.html")
        page.write_text(
            f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(link)}">',
            encoding="utf-8",
        )
        # A browser may not return before it ends.
        threading.Thread(target=webbrowser.open, args=(page.as_uri(),), daemon=True).start()
        yield


class Strangers:
    """The connections that have not shown the token yet: anybody on this machine can open as many
    as they like.

    They compete among themselves only. Each has some seconds to send a request with the token, and
    the one that has waited longest makes room for the next. So your page always finds a connection,
    and the server a file handle.
    """

    def __init__(self) -> None:
        self._waiting: dict[Address, asyncio.Transport] = {}  # by the address of the other side

    def add(self, address: Address, transport: asyncio.Transport) -> None:
        self._waiting[address] = transport
        if len(self._waiting) > MOST_STRANGERS:
            self._end(next(iter(self._waiting)))
        asyncio.get_running_loop().call_later(PATIENCE, self._lose_patience, address, transport)

    def remove(self, address: Address | None) -> None:
        """Let a connection stay: it has shown the token. Or forget it: it is gone."""
        if address is not None:
            self._waiting.pop(address, None)

    def _lose_patience(self, address: Address, transport: asyncio.Transport) -> None:
        if self._waiting.get(address) is transport:
            self._end(address)

    def _end(self, address: Address) -> None:
        self._waiting.pop(address).abort()


class Connection(H11Protocol):
    """A connection of the server. The application has the strangers in its state, and removes
    those with the token.
    """

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self._strangers: Strangers = config.app.state.strangers

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client is not None:
            self._strangers.add(self.client, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._strangers.remove(self.client)
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, app: Starlette) -> None:
        super().__init__(config)
        self._app = app

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # Read the runs while the user opens the link, so that the first page appears at once.
        threading.Thread(target=self._app.state.events.prepare, daemon=True).start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.events.close()
        await super().shutdown(sockets)
