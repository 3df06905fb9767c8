"""The application that a browser talks to: pages, questions about runs, and events.

api/runs                    all rows (`Overview`), and the sweeps (`SweepOverview`)
api/runs/KEY                one run (`RunDetails`); KEY is a run id, or SWEEP-3 for a trial
api/runs/KEY/curves         its metrics; ?name=a&name=b selects some
api/sweeps/NAME             a sweep with its trials and Optuna's figures
api/cluster                 partitions, what is free in them, and your queue
api/events?since=P          server-sent events: rows that changed after the `position` P
api/events?key=KEY          of a run: `details`, `curves` (`whole`: they replace all others);
                            with &log=1, `log`: its lines, those of &rank= &attempt= &grep=
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from paceline.contract.run_folder import RunFolder
from paceline.errors import ClusterError, EnvironmentProblem, PacelineError, UsageError
from paceline.slurm.job_states import WAITING, JobState
from paceline.slurm.partitions import Partition, query_partitions
from paceline.spec.quantities import show_seconds
from paceline.spec.shell_text import to_type
from paceline.sweep.report import describe_trials
from paceline.sweep.results import read_sweep
from paceline.ui.actions import act, allowed_verbs
from paceline.ui.report import STATIC, lines_to_json, plotly_path
from paceline.ui.run_reader import CurveReader, RunReader, Wanted
from paceline.ui.text import encode
from paceline.ui.web.access import Access, Guard
from paceline.ui.web.rows import NoSuchRun, Rows
from paceline.watch import origin
from paceline.watch.details import read_details
from paceline.watch.overview import Overview
from paceline.watch.records import QueryStates, read_record
from paceline.watch.run_status import expected_start, explain_reason
from paceline.watch.scheduler import poll_interval, query_queue, query_states

INTERVAL = 1.0  # seconds between reads for an open page
HEARTBEAT = 15.0  # seconds without an event, after which a sign of life is sent
FIRST_LINES = 1000  # of a log
SWEEP_INTERVAL = 3.0  # seconds between reads of a sweep, at least
IDLE_SHARE = 5  # reading that takes long is followed by a pause of so many times its duration
# A page of its own, because a browser sends the new cookie only with requests that come from us.
ENTRANCE = (
    '<!doctype html><meta charset="utf-8"><title>Paceline</title><link rel="icon" href="data:,">'
    '<meta http-equiv="refresh" content="0; url=./">'
)


class Answers:
    """Answers questions about the runs of a scratch folder. Threads share it."""

    def __init__(
        self, scratch: Path, query: QueryStates = query_states, *, allow_actions: bool = False
    ) -> None:
        self.allow_actions, self.query = allow_actions, query
        self.rows = Rows(scratch, query)
        self._kept: dict[str, tuple[float, bytes]] = {}  # answers, and until when each counts
        self._lock = Lock()

    def run(self, folder: RunFolder) -> dict[str, Any]:
        """Return everything about a run. `actions` are what a page may do to it."""
        return self.with_actions(read_details(read_record(folder, self.query)))

    def with_actions(self, details: Any) -> dict[str, Any]:
        verbs = allowed_verbs(details.overview) if self.allow_actions else []
        return {**details.to_json(), "actions": verbs}

    def act(self, key: str, verb: str) -> dict[str, Any]:
        """Cancel, stop or requeue a run."""
        if not self.allow_actions:
            raise HTTPException(
                403,
                "This server is read-only. Start it with `paceline ui --allow-actions` to act on "
                "your runs.",
            )
        return {"message": act(self.rows.run(key), verb)}

    def curves(self, key: str, names: list[str]) -> dict[str, Any]:
        found, _ = CurveReader(self.rows.run(key)).read()
        return {"curves": [asdict(curve) for curve in found if not names or curve.name in names]}

    def sweep(self, name: str) -> bytes:
        """Return a sweep with its trials and figures."""
        folder = self.rows.sweep(name)
        return self._keep(
            str(folder.path),
            SWEEP_INTERVAL,
            lambda: describe_trials(read_sweep(folder, self.query)),
        )

    def cluster(self) -> bytes:
        return self._keep("", poll_interval(), lambda: read_cluster(self.rows.by_job()))

    def _keep(self, key: str, interval: float, answer: Callable[[], Any]) -> bytes:
        """Return the same answer to all who ask within some seconds. What took long is kept
        longer.
        """
        with self._lock:
            until, known = self._kept.get(key, (0.0, b""))
            began = time.monotonic()
            if began >= until:
                known = encode(answer())
                pause = max(interval, IDLE_SHARE * (time.monotonic() - began))
                self._kept[key] = (time.monotonic() + pause, known)
            return known


def make_app(answers: Answers, access: Access) -> Starlette:
    """Return the application. `make_server` puts the server into its state."""
    rows = answers.rows

    def page(request: Request) -> Response:
        if access.is_entrance(request):
            return HTMLResponse(ENTRANCE, headers={"set-cookie": access.cookie})
        return FileResponse(STATIC / "index.html")

    def asked(answer: Callable[[Request], Any]) -> Callable[[Request], Response]:
        return lambda request: _json(answer(request))

    def key(request: Request) -> str:
        return str(request.path_params["key"])

    async def events(request: Request) -> Response:
        read = await run_in_threadpool(_event_reader, answers, request)
        return StreamingResponse(_stream(request, read), media_type="text/event-stream")

    routes = [
        Route("/", page),
        Route("/api/events", events),
        Route("/api/runs", asked(lambda request: rows.read()[1])),
        Route("/api/runs/{key}", asked(lambda request: answers.run(rows.run(key(request))))),
        Route(
            "/api/runs/{key}/curves",
            asked(
                lambda request: answers.curves(key(request), request.query_params.getlist("name"))
            ),
        ),
        Route(
            "/api/runs/{key}/{verb}",
            asked(lambda request: answers.act(key(request), request.path_params["verb"])),
            methods=["POST"],
        ),
        Route("/api/sweeps/{key}", asked(lambda request: answers.sweep(key(request)))),
        Route("/api/cluster", asked(lambda request: answers.cluster())),
        Mount("/static", StaticFiles(directory=STATIC)),
        Mount("/plotly", StaticFiles(directory=plotly_path().parent)),
    ]
    return Starlette(
        routes=[Mount(access.path.rstrip("/"), routes=routes)],
        middleware=[
            Middleware(Guard, access=access),
            Middleware(GZipMiddleware, minimum_size=1000, compresslevel=5),
        ],
        exception_handlers=dict.fromkeys(
            (HTTPException, PacelineError, OSError, Exception), _on_error
        ),
    )


def _event_reader(answers: Answers, request: Request) -> Callable[[], bytes]:
    """Return a function that returns what is new for a page, as events."""
    query = request.query_params
    if "key" in query:
        folder = answers.rows.run(query["key"])
        wanted = Wanted(
            _number(query.get("rank")),
            _number(query.get("attempt")),
            query.get("grep", ""),
            FIRST_LINES,
        )
        reader = RunReader(folder, answers.query, wanted if "log" in query else None)
        return lambda: _run_events(answers, reader)
    # A connection that broke goes on by itself after the last event that came.
    position = _number(request.headers.get("last-event-id")) or _number(query.get("since")) or 0

    def read() -> bytes:
        nonlocal position
        before = position
        position, news = answers.rows.read(position)
        return _event("runs", news, position) if position != before else b""

    return read


def _run_events(answers: Answers, reader: RunReader) -> bytes:
    news = reader.read()
    events = []
    if news.curves or news.whole_curves:
        curves = [asdict(curve) for curve in news.curves]
        events.append(_event("curves", encode({"whole": news.whole_curves, "curves": curves})))
    if news.lines or news.whole_log:
        lines = lines_to_json(news.lines)
        events.append(_event("log", encode({"whole": news.whole_log, "lines": lines})))
    if news.details is not None:
        events.append(_event("details", encode(answers.with_actions(news.details))))
    return b"".join(events)


async def _stream(request: Request, read: Callable[[], bytes]) -> AsyncIterator[bytes]:
    """Yield events until the page is closed or the server ends."""
    yield b"retry: 2000\n\n"
    silent_since = time.monotonic()
    # A folder that has gone ends it: the page asks again, and is told.
    with suppress(OSError, PacelineError):
        while not request.app.state.server.should_exit:
            began = time.monotonic()
            if (events := await run_in_threadpool(read)) or began > silent_since + HEARTBEAT:
                yield events or b": nothing new\n\n"
                silent_since = began
            await asyncio.sleep(max(INTERVAL, time.monotonic() - began))


def _event(name: str, data: bytes, position: int | None = None) -> bytes:
    head = f"id: {position}\n" if position is not None else ""
    return f"{head}event: {name}\ndata: ".encode() + data + b"\n\n"


def _number(text: str | None) -> int | None:
    """Return a number of a question; None if it has none."""
    if text and not re.fullmatch(r"[0-9]{1,15}", text):
        raise UsageError(f"Invalid number {text[:50]!r}: leave it empty for all.")
    return int(text) if text else None


def _json(answer: Any, status: int = 200) -> Response:
    content = answer if isinstance(answer, bytes) else encode(answer)
    return Response(content, status, media_type="application/json")


def _on_error(request: Request, error: Exception) -> Response:
    text, status = "Paceline could not read this. The terminal of `paceline ui` says why.", 500
    if isinstance(error, HTTPException):
        text, status = error.detail, error.status_code
    elif isinstance(error, PacelineError):
        text = " ".join(filter(None, (error.message, error.hint)))
        status = 404 if isinstance(error, NoSuchRun) else 400
    elif isinstance(error, OSError):  # a file of another user, or one that is just gone
        text, status = str(error), 404
    return _json({"error": text}, status)


MAX_JOBS = 1000
NOTHING = {"cluster": "", "partitions": [], "queue": [], "problem": "", "command": ""}
NOT_COPIED = (
    "Its nodes and its queue are not listed on this machine. To see what it has and what is free:"
)


def read_cluster(runs: Mapping[str, Overview]) -> dict[str, Any]:
    """Ask Slurm for partitions and queue; or return why there are none.

    `runs` are those that are known, by their job.
    """
    if (copy := origin.shown()) is not None:
        about = {"cluster": copy.cluster, "command": to_type("doctor")}
        return {**NOTHING, **about, "problem": NOT_COPIED}
    try:
        partitions, queue = query_partitions(), query_queue()
    except ClusterError as error:
        problem = " ".join(filter(None, (error.message, error.hint)))
        return {**NOTHING, "problem": problem}
    jobs = [_job(each, runs.get(each.id)) for each in queue[:MAX_JOBS]]
    return {**NOTHING, "partitions": [_partition(each) for each in partitions], "queue": jobs}


def _job(state: JobState, run: Overview | None) -> dict[str, Any]:
    is_waiting = state.phase == WAITING
    is_known = state.start not in ("N/A", "Unknown") and (
        not is_waiting or expected_start(state, time.time()) is not None
    )
    return {
        "job": state.id,
        "run": run and {name: getattr(run, name) for name in ("key", "name", "program", "trial")},
        "state": state.label,
        "reason": explain_reason(state.reason, gpus=False) if is_waiting else "",
        "nodes": state.nodes,
        "start": state.start.replace("T", " ") if is_known else "",
        "elapsed": "" if is_waiting else state.elapsed,
    }


def _partition(partition: Partition) -> dict[str, Any]:
    """Return what a partition has on nodes that work, and how much of it no job has."""
    working = [kind for kind in partition.kinds if kind.usable]
    gpus: dict[str, dict[str, Any]] = {}
    for kind in working:
        for name, count in kind.gpus.items():
            about = gpus.setdefault(name, {"kind": name, "count": 0, "free": 0})
            about["count"] += kind.count * count
            about["free"] += kind.count * kind.free_gpus[name]
    return {
        "partition": f"{partition.name}{' (default)' * partition.is_default}",
        "state": "up" if partition.is_up else "down",
        "time_limit": show_seconds(partition.max_time) if partition.max_time else "no limit",
        "nodes": partition.nodes,
        "idle_nodes": sum(kind.count for kind in working if kind.state.startswith("idle")),
        "cpus": sum(kind.count * kind.cpus for kind in working),
        "free_cpus": sum(kind.free_cpus for kind in working),
        "gpus": [*gpus.values()],
    }


LOOPBACK = "127.0.0.1"
GRACE = 3  # seconds for answers under way when the server ends


def listen(port: int) -> socket.socket:
    """Return a socket that listens on the loopback address; port 0 chooses a free one."""
    try:
        return socket.create_server((LOOPBACK, port), backlog=128)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise EnvironmentProblem(
            f"Cannot listen on port {port}: {reason}.",
            hint="Choose another --port, or omit it to get a free one.",
        ) from None


def make_server(app: Starlette) -> uvicorn.Server:
    """Return a server. Pages that are open do not delay its end: they see it in the state."""
    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        ws="none",
        loop="asyncio",
        timeout_graceful_shutdown=GRACE,
    )
    server = app.state.server = uvicorn.Server(config)
    return server
