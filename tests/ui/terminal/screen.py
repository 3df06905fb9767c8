"""Drive `paceline top` without a terminal, and read its screen as text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from paceline.ui.terminal import app as top

TIMEOUT = 90.0  # seconds; a busy machine starts a run late


class Screen:
    """The screen of a running program."""

    def __init__(self, pilot: Pilot[None]) -> None:
        self.pilot = pilot
        self.app: Any = pilot.app

    @property
    def text(self) -> str:
        strips = self.app.screen._compositor.render_strips()
        return "\n".join("".join(segment.text for segment in strip) for strip in strips)

    async def until(self, *wanted: str, gone: str = "") -> str:
        """Wait until all of these texts are on the screen, and return it."""
        deadline = time.monotonic() + TIMEOUT
        while not all(each in self.text for each in wanted) or (gone and gone in self.text):
            assert time.monotonic() < deadline, f"not {wanted} (without {gone!r}):\n{self.text}"
            await self.pilot.pause(0.05)
        return self.text

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def type(self, text: str) -> None:
        await self.press(*("space" if each == " " else each for each in text), "enter")


def drive(
    scratch: Path,
    work: Callable[[Screen], Awaitable[None]],
    *,
    size: tuple[int, int] = (80, 24),
    **options: Any,
) -> None:
    """Run the program on a screen of this size while `work` uses it."""

    async def run() -> None:
        program = top.TopApp(scratch, **options)
        async with program.run_test(size=size) as pilot:
            await work(Screen(pilot))

    with ThreadPoolExecutor(1) as thread:  # the main thread may have the event loop of a browser
        thread.submit(asyncio.run, run()).result()
