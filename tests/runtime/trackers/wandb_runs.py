"""Environments for tests of trackers (isolated home, no internet), and readers of W&B's files."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.runtime.trackers.wandb_server import KEY, Service


def unreachable_service(folder: Path) -> dict[str, str]:
    """Return variables with an empty home, no key and an unreachable server."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    return {
        "HOME": str(home),
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
        "NETRC": str(home / "netrc"),
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "WANDB_CACHE_DIR": str(home / "cache"),
    }


def service_environment(service: Service, folder: Path) -> dict[str, str]:
    """Return variables with the address of the fake server and a key for it."""
    return {
        **unreachable_service(folder),
        "WANDB_BASE_URL": service.url,
        "WANDB_API_KEY": KEY,
        "WANDB_DIR": str(folder),
    }


def shorten_agent_interval() -> None:
    """Make wandb's agent poll ten times a second instead of every five seconds."""
    from wandb.agents.pyagent import Agent

    Agent.HEARTBEAT_SLEEP_SECONDS = 0.1


@dataclass
class WandbRun:
    """One W&B run, read from its file in the run folder."""

    id: str = ""
    project: str = ""
    group: str = ""
    name: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None

    def lines(self) -> list[dict[str, Any]]:
        """Return the history without the keys that wandb adds."""
        return [
            {key: value for key, value in row.items() if not key.startswith("_")}
            for row in self.history
        ]


def wandb_runs(trackers: Path) -> list[WandbRun]:
    """Return all runs that wandb wrote below a folder, oldest first, except those set aside."""
    folders = [*trackers.glob("wandb/offline-run-*"), *trackers.glob("wandb/run-*")]
    files = [path for folder in sorted(folders) for path in folder.glob("run-*.wandb")]
    return [read_run(path) for path in files]


def read_run(path: Path) -> WandbRun:
    from wandb.proto.wandb_internal_pb2 import Record

    wandb_run = WandbRun()
    for data in _records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            wandb_run.id, wandb_run.project = record.run.run_id, record.run.project
            wandb_run.group, wandb_run.name = record.run.run_group, record.run.display_name
            wandb_run.config.update(
                {each.key: json.loads(each.value_json) for each in record.run.config.update}
            )
        elif kind == "config":
            wandb_run.config.update(
                {each.key: json.loads(each.value_json) for each in record.config.update}
            )
        elif kind == "history":
            items = record.history.item
            row = {
                each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in items
            }
            wandb_run.history.append(row)
        elif kind == "summary":
            for each in record.summary.update:
                wandb_run.summary[each.key or "/".join(each.nested_key)] = json.loads(
                    each.value_json
                )
        elif kind == "exit":
            wandb_run.exit_code = record.exit.exit_code
    return wandb_run


def _records(data: bytes) -> Iterator[bytes]:
    """The records of wandb's file: LevelDB's log format, blocks of 32 KiB after a header of seven bytes."""
    block, position, whole = 32768, 7, b""
    while position + 7 <= len(data):
        left = block - position % block
        if left < 7:  # what is left of a block is padding
            position += left
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        piece = data[position + 7 : position + 7 + length]
        position += 7 + length
        whole = whole + piece if kind in (3, 4) else piece  # full 1, first 2, middle 3, last 4
        if kind in (1, 4):
            yield whole
