"""A fake W&B server on loopback: enough of its API for the real package to log, sync and run sweeps.

Everything that a client sends is kept: `runs` holds what was uploaded, by run id, and `operations` the names of
all GraphQL operations in order. Points of a sweep are handed out by `agentHeartbeat`, one per agent at a time.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY = "somebody"
KEY = "0123456789abcdef" * 2 + "01234567"  # forty characters, as the package expects


@dataclass
class Uploaded:
    """One run, as the server stores it."""

    name: str
    project: str = ""
    group: str = ""
    display_name: str = ""
    sweep: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    files: dict[str, dict[int, str]] = field(default_factory=dict)  # by name: lines by their number
    exit_code: int | None = None
    starts: int = 0

    def history(self) -> list[dict[str, Any]]:
        lines = self.files.get("wandb-history.jsonl", {})
        return [json.loads(lines[number]) for number in sorted(lines)]

    def summary(self) -> dict[str, Any]:
        lines = self.files.get("wandb-summary.json", {})
        found: dict[str, Any] = json.loads(lines[max(lines)]) if lines else {}
        return found


class Service:
    """The state of the fake server, and its answer to each operation."""

    def __init__(self) -> None:
        self.url = ""
        self.runs: dict[str, Uploaded] = {}
        self.operations: list[str] = []
        self.unanswered: list[str] = []
        self.points: list[dict[str, Any]] = []  # of the sweep, not yet given to an agent
        self.sweeps: list[dict[str, Any]] = []  # that were created
        self.agents = 0
        self.points_given: dict[str, dict[str, Any]] = {}
        self.lock = threading.Lock()

    def run(self, name: str) -> Uploaded:
        return self.runs.setdefault(name, Uploaded(name))

    # -- GraphQL ---------------------------------------------------------------------------------------

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        match = re.search(r"(?:query|mutation)\s+(\w+)", query)
        name = match[1] if match else ""
        with self.lock:
            self.operations.append(name)
            method = getattr(self, f"on_{name}", None)
            if method is None:
                self.unanswered.append(name)
                return {"errors": [{"message": f"the fake server does not know {name}"}]}
            return {"data": method(variables)}

    def on_Viewer(self, variables: dict[str, Any]) -> dict[str, Any]:
        return {
            "viewer": {
                "id": "viewer",
                "entity": ENTITY,
                "username": ENTITY,
                "flags": "{}",
                "admin": False,
                "email": "",
                "teams": {"edges": [{"node": {"name": ENTITY}}]},
                "name": ENTITY,
                "apiKeys": {"edges": []},
            },
            "serverInfo": {"cliVersionInfo": {}, "latestLocalVersionInfo": None},
        }

    def on_ServerFeaturesQuery(self, variables: dict[str, Any]) -> dict[str, Any]:
        return {"serverInfo": {"features": []}}

    def on_RunResumeStatus(self, variables: dict[str, Any]) -> dict[str, Any]:
        found = self.runs.get(variables["name"])
        bucket = None
        if found is not None and found.starts:
            history = found.history()
            bucket = {
                "id": found.name,
                "name": found.name,
                "summaryMetrics": json.dumps(found.summary()),
                "displayName": found.display_name,
                "logLineCount": len(found.files.get("output.log", {})),
                "historyLineCount": len(history),
                "eventsLineCount": len(found.files.get("wandb-events.jsonl", {})),
                "historyTail": json.dumps([json.dumps(line) for line in history[-1:]]),
                "eventsTail": "[]",
                "config": json.dumps(found.config),
                "tags": [],
                "wandbConfig": json.dumps({"t": 1}),
            }
        return {
            "model": {
                "id": "project",
                "name": variables.get("project"),
                "entity": {"id": ENTITY, "name": ENTITY},
                "bucket": bucket,
            }
        }

    def on_UpsertBucket(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = self.run(variables.get("name") or variables.get("id") or "")
        run.starts += 1
        run.project = variables.get("project") or run.project
        run.group = variables.get("groupName") or run.group
        run.display_name = variables.get("displayName") or run.display_name or run.name
        run.sweep = variables.get("sweep") or run.sweep
        if variables.get("config"):
            run.config = json.loads(variables["config"])
        bucket = {
            "id": run.name,
            "name": run.name,
            "displayName": run.display_name,
            "description": None,
            "config": json.dumps(run.config),
            "sweepName": run.sweep or None,
            "historyLineCount": len(run.history()),
            "project": {
                "id": "project",
                "name": run.project or "uncategorized",
                "entity": {"id": ENTITY, "name": ENTITY},
            },
        }
        return {"upsertBucket": {"bucket": bucket, "inserted": run.starts == 1}}

    def on_CreateRunFiles(self, variables: dict[str, Any]) -> dict[str, Any]:
        files = [
            {"name": name, "uploadUrl": f"{self.url}/storage/{variables['run']}/{name}"}
            for name in variables["files"]
        ]
        return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}

    def on_MarkRunFilesUploaded(self, variables: dict[str, Any]) -> dict[str, Any]:
        return {"markRunFilesUploaded": {"success": True}}

    def on_OrganizationCoreWeaveOrganizationID(self, variables: dict[str, Any]) -> dict[str, Any]:
        return {"entity": None}

    def on_RunStoppedStatus(self, variables: dict[str, Any]) -> dict[str, Any]:
        return {"project": {"run": {"stopped": False}}}

    def on_UpsertSweep(self, variables: dict[str, Any]) -> dict[str, Any]:
        self.sweeps.append(variables)
        project = {
            "id": "project",
            "name": variables.get("projectName"),
            "entity": {"id": ENTITY, "name": ENTITY},
        }
        sweep = {"id": "sweep-id", "name": f"sweep{len(self.sweeps)}", "project": project}
        return {"upsertSweep": {"sweep": sweep, "configValidationWarnings": []}}

    def on_CreateAgent(self, variables: dict[str, Any]) -> dict[str, Any]:
        self.agents += 1
        return {"createAgent": {"agent": {"id": f"agent-{self.agents}"}}}

    def on_Heartbeat(self, variables: dict[str, Any]) -> dict[str, Any]:
        """Return a point for an idle agent, or its exit if none is left."""
        commands: list[dict[str, Any]] = []
        if not any(json.loads(variables.get("runState") or "{}").values()):
            if self.points:
                point = self.points.pop(0)
                run_id = f"trial-{len(self.points_given) + 1}"
                self.points_given[run_id] = point
                args = {key: {"value": value} for key, value in point.items()}
                commands = [{"type": "run", "run_id": run_id, "args": args, "program": "train.py"}]
            else:
                commands = [{"type": "exit"}]
        encoded = json.dumps(commands)
        return {"agentHeartbeat": {"agent": {"id": variables["id"]}, "commands": encoded}}

    # -- the run's own lines ---------------------------------------------------------------------------

    def take_stream(self, name: str, sent: dict[str, Any]) -> None:
        with self.lock:
            run = self.run(name)
            for file, part in (sent.get("files") or {}).items():
                lines = run.files.setdefault(file, {})
                for number, line in enumerate(
                    part.get("content") or [], start=part.get("offset", 0)
                ):
                    lines[number] = line
            if sent.get("complete"):
                run.exit_code = sent.get("exitcode")


class _Handler(BaseHTTPRequestHandler):
    service: Service
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        sent = json.loads(self._body() or b"{}")
        if self.path.endswith("/graphql"):
            self._reply(self.service.answer(sent.get("query", ""), sent.get("variables") or {}))
        elif match := re.fullmatch(r"/files/[^/]+/[^/]*/([^/]+)/file_stream", self.path):
            self.service.take_stream(match[1], sent)
            self._reply({})
        else:
            self._reply({}, status=404)

    def do_PUT(self) -> None:
        self._body()
        self._reply({})

    def do_GET(self) -> None:
        self._reply({})

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _reply(self, value: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect."""


@contextmanager
def wandb_service(
    points: list[dict[str, Any]] | None = None, *, address: str = "127.0.0.1"
) -> Iterator[Service]:
    """Run the server at `service.url`; `address` is the one that nodes of a sandbox can reach."""
    service = Service()
    service.points = list(points or [])
    server = _Server((address, 0), type("Handler", (_Handler,), {"service": service}))
    service.url = f"http://{address}:{server.server_address[1]}"
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    )
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
