"""Tabs of Chromium, for tests of pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass
class Console:
    """What a page has complained about: violations of the policy, errors of scripts, requests to elsewhere."""

    problems: list[str] = field(default_factory=list)

    def watch(self, page: Any) -> None:
        page.on(
            "console",
            lambda message: self._note(message) if message.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("request", lambda request: self._check(request.url))

    def _note(self, message: Any) -> None:
        # Plotly draws parallel coordinates with WebGL, which is slow without a GPU.
        if "GL Driver Message (OpenGL, Performance" not in message.text:
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
