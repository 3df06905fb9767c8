"""Serve the dashboard on this machine until Ctrl-C."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
import webbrowser
from collections.abc import Iterator
from html import escape
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from paceline.errors import EnvironmentProblem

LOOPBACK = "127.0.0.1"
GRACE = 3  # seconds for answers under way when the server ends


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
            f"Cannot listen on port {port}: {reason}.", hint="Choose another --port, or omit it to get a free one."
        ) from None
    return listener


def serve(app: Starlette, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM."""
    with contextlib.suppress(KeyboardInterrupt):
        make_server(app).run(sockets=[listener])


def make_server(app: Starlette) -> uvicorn.Server:
    """Return a server. Pages that are open do not delay its end."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, proxy_headers=False, lifespan="off", ws="none",
        http="h11", loop="asyncio", timeout_graceful_shutdown=GRACE, limit_concurrency=500,
    )  # fmt: skip
    return _Server(config, app)


@contextlib.contextmanager
def opened_browser(link: str) -> Iterator[None]:
    """Open the link in a browser by way of a file that only this user can read.

    All users of a machine can read command lines, and so the browser's.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:  # mode 0700
        page = Path(folder, "open.html")
        page.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(link)}">', encoding="utf-8")
        # A browser may not return before it ends.
        threading.Thread(target=webbrowser.open, args=(page.as_uri(),), daemon=True).start()
        yield


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
