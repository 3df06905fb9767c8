"""The first paint of the runs page: from the link to the first row on the screen, in Chromium."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from watch_parts.runs import make_runs

from machine import show

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
]


def measure(folder: Path, count: int, active: int, repeats: int) -> None:
    from playwright.sync_api import sync_playwright

    scratch = make_runs(folder, count, active)
    temporary = folder / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "PACELINE_SCRATCH": str(scratch), "TMPDIR": str(temporary)}
    subprocess.run(
        [sys.executable, "-m", "paceline", "ps", "--all"],
        env=environment,
        cwd=folder,
        capture_output=True,
    )
    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        first, again = [], []
        for _ in range(repeats):
            with _served(environment, folder) as link:
                first.append(_time_page(browser, link))
                again.append(_time_page(browser, link))
        browser.close()
    rows = [
        ("the server has just started", f"{median(first):.2f}", f"{max(first):.2f}"),
        ("the page was open before", f"{median(again):.2f}", f"{max(again):.2f}"),
    ]
    show((f"first paint, {count:,} runs, {active} active", "seconds", "longest"), rows)


@contextmanager
def _served(environment: dict[str, str], folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "paceline", "ui"]
    with subprocess.Popen(
        command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = ""
        while "Ctrl-C" not in said:
            said += process.stdout.readline()
        yield re.findall(r"http://\S+", said)[0]
        process.send_signal(signal.SIGINT)


def _time_page(browser: Any, link: str) -> float:
    """Return the seconds until the first row is visible, in a fresh profile."""
    context = browser.new_context()
    page = context.new_page()
    began = time.perf_counter()
    page.goto(link, wait_until="commit")
    page.locator("tbody tr").first.wait_for()
    took = time.perf_counter() - began
    context.close()
    return took
