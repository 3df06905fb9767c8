"""What open pages are told, over real connections."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.ui.web import app
from tests.sweep.folders import end, grid, make_sweep
from tests.ui.web.conftest import Served
from tests.ui.web.folders import make_run, write_metrics

RUN = "20260101-120000-aaaa"
Event = tuple[str, dict[str, Any], str]  # its name, its data, its id


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "INTERVAL", 0.05)
    monkeypatch.setattr("paceline.ui.web.rows.INTERVAL", 0.05)
    monkeypatch.setattr("paceline.sweep.report.OVER_INTERVAL", 0.05)


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
    with connected(served, f"api/events?key={RUN}&log=1") as found:
        _, data, _ = until(found, "curves")
        assert data["whole"] is True
        assert len(data["curves"][0]["steps"]) == 20
        _, data, _ = until(found, "log")
        assert data["whole"] is True
        assert sorted(line["text"] for line in data["lines"]) == ["hello", "world"]
        assert until(found, "details")[1]["overview"]["run_id"] == RUN
        write_metrics(folder, range(20, 22))
        _, data, _ = until(found, "curves")
        assert data["whole"] is False
        assert {tuple(curve["steps"]) for curve in data["curves"]} == {(20, 21)}
        with open(folder.attempt(1).log(1), "a") as file:
            file.write("<script>\n")
        _, data, _ = until(found, "log")
        assert data["whole"] is False
        assert [(line["rank"], line["text"]) for line in data["lines"]] == [(1, "<script>")]


def test_a_page_chooses_the_lines_that_it_follows(served: Served, scratch: Path) -> None:
    folder = make_run(scratch, log={0: ["a", "<script>b", "\x1b[31mc"], 1: ["<script>d"]})
    with connected(served, f"api/events?key={RUN}&log=1&rank=0&grep=script&attempt=1") as found:
        _, data, _ = until(found, "log")
        assert [line["text"] for line in data["lines"]] == ["<script>b"]
        for rank in (0, 1):
            with open(folder.attempt(1).log(rank), "a") as file:
                file.write(f"other\n<script>{rank}\n")
        _, data, _ = until(found, "log")
        assert [line["text"] for line in data["lines"]] == ["<script>0"]
    address = f"{served.base}api/events?key={RUN}&log=1&rank=x"
    assert httpx.get(address, cookies=served.cookies, trust_env=False).status_code == 400


def test_a_heartbeat_is_sent_if_nothing_happens(
    served: Served, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "HEARTBEAT", 0.1)
    with httpx.stream(
        "GET", f"{served.base}api/events", cookies=served.cookies, trust_env=False
    ) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith(":"))
        next(lines)
        next(lines)


def test_open_pages_do_not_delay_the_end(serve: Callable[..., Any], scratch: Path) -> None:
    make_run(scratch)
    with serve(scratch) as served:
        with connected(served, f"api/events?key={RUN}") as found:
            until(found, "details")
            served.server.should_exit = True
            assert list(found) is not None  # the stream ends, and is not cut off
