"""Chromium, for tests of pages. It is real."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP evil.example 127.0.0.1",  # a name that leads here, as after DNS rebinding
]  # fmt: skip


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
