"""Tell open pages what has changed, with server-sent events. One task reads for all pages, while
there are any.

    api/events?since=P           `runs`: {"time", "position", "runs": [rows that changed], "sweeps",
    "gone": [paths]} api/events?key=KEY&since=P   `details`: RunDetails; `curves`: {"position",
    "whole", "curves": [new points]};
                                 `log`: {"position", "whole", "lines": [new lines]}
    both                         `clock`: {"now", "runs": whether the clock advances or is stopped}

`since` is the `position` of the answer that the page has (0: it has none). A connection that breaks
resumes by itself, because the position is the id of the event. New points replace those of the same
and of later steps; `whole` says that they replace everything that the page has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from paceline.ui.web.api import Answers
from paceline.ui.web.json_text import encode
from paceline.watch import origin

INTERVAL = 1.0  # seconds between reads
DETAILS, DETAILS_OF_ENDED = 2.0, 10.0  # seconds between reads of a run's details, at least
IDLE_SHARE = 10  # reading that takes long is followed by a pause of so many times its duration
HEARTBEAT = 15.0  # seconds without an event, after which the time is sent
MAX_PAGES = 200
MAX_WAITING = 64  # events


def format_event(name: str, data: dict[str, Any] | bytes, position: int | None = None) -> bytes:
    head = f"id: {position}\n" if position is not None else ""
    text = data if isinstance(data, bytes) else encode(data)
    return f"{head}event: {name}\ndata: ".encode() + text + b"\n\n"


async def _clock_event() -> bytes:
    return format_event("clock", await asyncio.to_thread(origin.clock))


@dataclass(eq=False)
class Page:
    """An open page. `key` is the run that it shows, or None for all runs."""

    key: str | None
    position: int
    queue: asyncio.Queue[bytes | None] = field(default_factory=lambda: asyncio.Queue(MAX_WAITING))
    details: bytes = b""  # what it was sent last

    def send(self, event: bytes) -> None:
        """Send an event. A page that does not take them is disconnected; it comes back if it is
        alive.
        """
        if self.queue.full():
            self.end()
        else:
            self.queue.put_nowait(event)

    def end(self) -> None:
        while self.queue.full():
            self.queue.get_nowait()
        self.queue.put_nowait(None)


class Events:
    """The open pages and the task that reads for them."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.pages: set[Page] = set()
        self._task: asyncio.Task[None] | None = None
        self._next_details: dict[str, float] = {}
        self._closed = False

    @property
    def is_full(self) -> bool:
        return len(self.pages) >= MAX_PAGES

    async def stream(self, key: str | None, since: int) -> AsyncIterator[bytes]:
        """Yield events until the page is closed or the server ends."""
        if self._closed:
            return
        page = Page(key, since)
        self.pages.add(page)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._read())
        try:
            yield b"retry: 2000\n\n" + await _clock_event()
            while True:
                try:
                    event = await asyncio.wait_for(page.queue.get(), HEARTBEAT)
                except (asyncio.TimeoutError, TimeoutError):
                    event = await _clock_event()
                if event is None:
                    return
                yield event
        finally:
            self.pages.discard(page)

    def prepare(self) -> None:
        """Read the rows for the first page. Whatever is wrong, the page is told when it asks."""
        with suppress(Exception):
            self.answers.runs()

    def close(self) -> None:
        """End all streams, so that the server can end."""
        self._closed = True
        for page in list(self.pages):
            page.end()

    async def _read(self) -> None:
        is_live = not origin.status()
        while self.pages and not self._closed:
            began = time.monotonic()
            if is_live == bool(origin.status()):
                is_live, event = not is_live, await _clock_event()
                for page in list(self.pages):
                    page.send(event)
            for key in {page.key for page in self.pages}:
                pages = [page for page in self.pages if page.key == key]
                try:
                    if key is None:
                        await self._send_rows(pages)
                    else:
                        await self._send_run(key, pages)
                # such as a run folder that was removed meanwhile; the page asks again, and is told
                except Exception:
                    for page in pages:
                        page.end()
            self._next_details = {
                key: at for key, at in self._next_details.items() if at > began - 3600
            }
            await asyncio.sleep(max(INTERVAL, time.monotonic() - began))

    async def _send_rows(self, pages: list[Page]) -> None:
        for since in {page.position for page in pages}:
            position, news = await asyncio.to_thread(self.answers.rows.read_new, since)
            if not news:
                continue
            event = format_event("runs", news, position)
            for page in [page for page in pages if page.position == since]:
                page.position = position
                page.send(event)

    async def _send_run(self, key: str, pages: list[Page]) -> None:
        reader = await asyncio.to_thread(self.answers.reader, key)
        for page in pages:
            for news in await asyncio.to_thread(reader.read_new, page.position):
                page.position = news.position
                state = {"position": news.position, "whole": news.whole}
                if news.curves:
                    page.send(
                        format_event("curves", {**state, "curves": news.curves}, news.position)
                    )
                if news.lines:
                    page.send(format_event("log", {**state, "lines": news.lines}, news.position))
        if time.monotonic() > self._next_details.get(key, 0.0) or any(
            not page.details for page in pages
        ):
            began = time.monotonic()
            details = await asyncio.to_thread(self.answers.run, key)
            pause = DETAILS_OF_ENDED if details["overview"]["is_over"] else DETAILS
            self._next_details[key] = time.monotonic() + max(
                pause, IDLE_SHARE * (time.monotonic() - began)
            )
            event = format_event("details", details)
            for page in [page for page in pages if page.details != event]:
                page.details = event
                page.send(event)
