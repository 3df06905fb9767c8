"""A server for tests, and Chromium to open it in. Both are real."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from paceline.ui.web.access import Access
from paceline.ui.web.app import Answers, listen, make_app, make_server
from tests.ui.conftest import Console

__all__ = ["Console", "Served", "serve_here"]


@dataclass
class Served:
    """A dashboard that is being served."""

    port: int
    access: Access
    server: Any = field(repr=False)

    @property
    def link(self) -> str:
        return self.access.link(self.port)

    @property
    def base(self) -> str:
        """The address of the page, without the token."""
        return f"http://127.0.0.1:{self.port}{self.access.path}"

    @property
    def cookies(self) -> dict[str, str]:
        return {self.access.name: self.access.token}


@contextmanager
def serve_here(scratch: Path, **options: Any) -> Iterator[Served]:
    """Serve a scratch folder from a thread of this process."""
    access, listener = Access(), listen(0)
    server = make_server(make_app(Answers(scratch, **options), access))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield Served(listener.getsockname()[1], access, server)
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def served(scratch: Path) -> Iterator[Served]:
    """The scratch folder of the test, served."""
    with serve_here(scratch) as served:
        yield served


@pytest.fixture
def serve() -> Callable[..., Any]:
    """`with serve(scratch, ...) as served:` serves another folder, or with other options."""
    return serve_here
