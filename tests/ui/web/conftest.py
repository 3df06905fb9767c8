"""A server for tests, and Chromium to open it in. Both are real."""

from __future__ import annotations

import shutil
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

from paceline.ui.web.answers import Answers
from paceline.ui.web.app import make_app
from paceline.ui.web.security import COOKIE, Access
from paceline.ui.web.server import listen, make_server

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP evil.example 127.0.0.1",  # a name that leads here, as after DNS rebinding
]  # fmt: skip


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
        return {COOKIE: self.access.token}


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


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """One Chromium for all tests; each gets a fresh profile of it (`page`)."""
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@dataclass
class Console:
    """What a page has complained about: violations of the policy, errors of scripts, requests to elsewhere."""

    problems: list[str] = field(default_factory=list)

    def watch(self, page: Any) -> None:
        page.on("console", lambda message: self._note(message) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("request", lambda request: self._check(request.url))

    def _note(self, message: Any) -> None:
        self.problems.append(f"{message.type}: {message.text}")

    def _check(self, url: str) -> None:
        if not url.startswith(("http://127.0.0.1:", "http://localhost:", "data:", "blob:")):
            self.problems.append(f"asks {url}")


@pytest.fixture
def console() -> Console:
    return Console()


@pytest.fixture
def page(chromium: Any, console: Console) -> Iterator[Any]:
    """An empty tab of a fresh profile. Its complaints are in `console.problems`."""
    context = chromium.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(60_000)
    tab = context.new_page()
    console.watch(tab)
    yield tab
    context.close()


@pytest.fixture
def serve() -> Callable[..., Any]:
    """`with serve(scratch, ...) as served:` serves another folder, or with other options."""
    return serve_here
