"""What open pages are told, over real connections."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.ui.web import events
from paceline.watch import origin
from tests.sweep.folders import end, grid, make_sweep
from tests.ui.web.conftest import Served
from tests.ui.web.folders import make_run, write_metrics

RUN = "20260101-120000-aaaa"
Event = tuple[str, dict[str, Any], str]  # its name, its data, its id


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "INTERVAL", 0.05)
    monkeypatch.setattr("paceline.ui.web.rows.INTERVAL", 0.05)
    monkeypatch.setattr("paceline.sweep.overview.OVER_INTERVAL", 0.05)


@contextmanager
def connected(served: Served, path: str, **headers: str) -> Iterator[Iterator[Event]]:
    with httpx.Client(
        base_url=served.base, cookies=served.cookies, trust_env=False, timeout=60
    ) as client:
        with client.stream("GET", path, headers=headers) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            yield parse(answer.iter_lines())


def parse(lines: Iterator[str]) -> Iterator[Event]:
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(": ")
        fields[name] = value
        if not line:
            if "event" in fields:
                yield fields["event"], json.loads(fields["data"]), fields.get("id", "")
            fields = {}


def until(
    found: Iterator[Event], name: str, accept: Callable[[dict[str, Any]], bool] = lambda data: True
) -> Event:
    return next(event for event in found if event[0] == name and accept(event[1]))


def test_rows_that_changed(served: Served, scratch: Path) -> None:
    folder = make_run(scratch)
    with connected(served, "api/events") as found:
        _, data, _ = until(found, "runs")
        assert [row["run_id"] for row in data["runs"]] == [RUN]
        make_run(scratch, "20260101-120000-bbbb")
        _, data, position = until(found, "runs")
        assert [row["run_id"] for row in data["runs"]] == ["20260101-120000-bbbb"]
        assert position == str(data["position"])
        folder.run_json.unlink()
        _, data, _ = until(found, "runs")
        assert (data["runs"], data["gone"]) == ([], [str(folder.path)])
    # a connection that broke
    with connected(served, "api/events", **{"last-event-id": position}) as found:
        _, data, _ = until(found, "runs")
        assert (data["runs"], data["gone"]) == ([], [str(folder.path)])


def test_sweeps_that_changed(served: Served, scratch: Path) -> None:
    sweep = make_sweep(scratch / "digits" / "first" / "lr", grid([{"lr": 1}, {"lr": 2}]))
    with connected(served, "api/events") as found:
        (row,) = until(found, "runs")[1]["sweeps"]
        assert (row["name"], row["status"], row["counts"]) == ("lr", "missing", {"missing": 2})
        end(sweep, 0, value=0.5)
        end(sweep, 1, value=0.25)
        _, data, _ = until(found, "runs", lambda data: bool(data["sweeps"]))
        (row,) = data["sweeps"]
        assert (row["status"], row["counts"], row["best"]) == ("done", {"done": 2}, 0.25)
        shutil.rmtree(sweep.path)
        until(found, "runs", lambda data: str(sweep.path) in data["gone"])


def test_points_lines_and_details_of_a_run(served: Served, scratch: Path) -> None:
    folder = make_run(scratch)
    with connected(served, f"api/events?key={RUN}&since=0") as found:
        _, data, _ = until(found, "curves")
        assert data["whole"] is True
        assert len(data["curves"][0]["steps"]) == 20
        _, data, position = until(found, "log")
        assert sorted(line["text"] for line in data["lines"]) == ["hello", "world"]
        assert until(found, "details")[1]["overview"]["run_id"] == RUN
        write_metrics(folder, range(20, 22))
        _, data, _ = until(found, "curves")
        assert data["whole"] is False
        assert {tuple(curve["steps"]) for curve in data["curves"]} == {(20, 21)}
        with open(folder.attempt(1).log(1), "a") as file:
            file.write("<script>\n")
        _, data, _ = until(found, "log")
        assert [(line["rank"], line["text"]) for line in data["lines"]] == [(1, "<script>")]
    with connected(served, f"api/events?key={RUN}", **{"last-event-id": position}) as found:
        # what it has missed
        assert [len(curve["steps"]) for curve in until(found, "curves")[1]["curves"]] == [2, 2]


def test_many_pages_share_a_reader_and_a_closed_one_is_forgotten(
    served: Served, scratch: Path
) -> None:
    make_run(scratch)
    pages = served.server._app.state.events.pages
    with (
        connected(served, f"api/events?key={RUN}") as first,
        connected(served, f"api/events?key={RUN}") as second,
    ):
        until(first, "curves")
        until(second, "curves")
        assert len(pages) == 2
        answers = served.server._app.state.events.answers
        assert answers.reader(RUN) is answers.reader(RUN)
    while pages:
        time.sleep(0.02)


def test_a_heartbeat_is_sent_if_nothing_happens(
    served: Served, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "HEARTBEAT", 0.1)
    with httpx.stream(
        "GET", f"{served.base}api/events", cookies=served.cookies, trust_env=False
    ) as answer:
        lines = (line for line in answer.iter_lines() if line == "event: clock")
        next(lines)  # at the beginning
        next(lines)


def test_the_clock_of_the_runs_is_sent(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the cluster's, and stands still if the connection to it is lost."""
    status = [""]
    monkeypatch.setattr(origin, "status", lambda: status[0])
    monkeypatch.setattr(origin, "clock", lambda: {"now": 1000.0, "runs": not status[0]})
    with connected(served, "api/events") as found:
        assert until(found, "clock")[1] == {"now": 1000, "runs": True}
        status[0] = "no connection"
        assert until(found, "clock")[1] == {"now": 1000, "runs": False}
    answer = httpx.get(f"{served.base}api/runs", cookies=served.cookies, trust_env=False)
    assert json.loads(answer.headers["x-paceline-clock"]) == {"now": 1000, "runs": False}


def test_a_page_that_takes_nothing_is_disconnected() -> None:
    page = events.Page(None, 0)
    for _ in range(events.MAX_WAITING + 1):
        page.send(b"event")
    waiting = [page.queue.get_nowait() for _ in range(page.queue.qsize())]
    assert waiting[-1] is None


def test_open_pages_do_not_delay_the_end(serve: Callable[..., Any], scratch: Path) -> None:
    make_run(scratch)
    with serve(scratch) as served:
        with connected(served, f"api/events?key={RUN}") as found:
            until(found, "details")
            served.server.should_exit = True
            assert list(found) is not None  # the stream ends, and is not cut off
