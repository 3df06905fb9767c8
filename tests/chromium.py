"""One Chromium for all tests of pages. It is real, and only one can be driven in a process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    # a name that leads here, as after DNS rebinding
    "--host-resolver-rules=MAP evil.example 127.0.0.1",
]


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
