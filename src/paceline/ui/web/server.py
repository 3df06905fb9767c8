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
    try:
        return socket.create_server((LOOPBACK, port), backlog=128)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise EnvironmentProblem(
            f"Cannot listen on port {port}: {reason}.",
            hint="Choose another --port, or omit it to get a free one.",
        ) from None


def make_server(app: Starlette) -> uvicorn.Server:
    """Return a server. Pages that are open do not delay its end: they see it in the state."""
    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        ws="none",
        loop="asyncio",
        timeout_graceful_shutdown=GRACE,
    )
    server = app.state.server = uvicorn.Server(config)
    return server


@contextlib.contextmanager
def opened_browser(link: str) -> Iterator[None]:
    """Open the link in a browser by way of a file that only this user can read.

    All users of a machine can read command lines, and so the browser's.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:  # mode 0700
        page = Path(folder, "open.html")
        address = escape(link)
        page.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={address}">')
        # A browser may not return before it ends.
        threading.Thread(target=webbrowser.open, args=(page.as_uri(),), daemon=True).start()
        yield
