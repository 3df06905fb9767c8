"""Why a run failed, in a few lines."""

from __future__ import annotations

import signal
from typing import Any

from paceline.contract.files.foreign_records import Fields, keep_valid, read_object
from paceline.contract.run_folder import AttemptFolder, RunFolder
from paceline.watch.goodput import read_events

FAILURE_FIELDS: Fields = {
    "rank": int, "host": str, "cause": str, "code": int, "type": str, "message": str, "where": str, "last_line": str,
}  # fmt: skip
MAX_MESSAGE_LINES = 4
MAX_LINE = 300  # characters


def read_failure(attempt: AttemptFolder) -> dict[str, Any]:
    """Return the first failure of an attempt; empty if there is none."""
    try:
        return keep_valid(read_object(attempt.failure), FAILURE_FIELDS)
    except (OSError, ValueError):
        return {}


def failure_text(failure: dict[str, Any]) -> str:
    """Return the exception, or how the rank exited and what it printed last."""
    lines = str(failure.get("message", "")).splitlines()[:MAX_MESSAGE_LINES]
    message = "\n".join(line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}…" for line in lines)
    if failure.get("type"):
        return f"{failure['type']}: {message}"
    how = _describe_exit(failure.get("code", 0))
    parts = [how, str(failure.get("last_line", ""))] if failure.get("last_line") else [message or how]
    return ": ".join(part for part in parts if part) or str(failure.get("cause", ""))


def _describe_exit(code: int) -> str:
    """Describe an exit code; a negative one is a signal."""
    if code >= 0:
        return f"exit code {code}" if code else ""
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def name_failure(failure: dict[str, Any]) -> str:
    """Name the rank that failed, or the node."""
    host = failure.get("host", "?")
    return f"rank {failure['rank']} on {host}" if failure.get("rank") is not None else str(host)


def describe_failure(folder: RunFolder) -> list[str]:
    """Return why a run failed: who failed first, with which error, where, and how to read more."""
    attempts = folder.attempts()
    failure = read_failure(attempts[-1]) if attempts else {}
    if not failure:
        reasons = [str(event["reason"]) for event in read_events(folder.events) if event.get("reason")]
        return reasons[-1:]
    rank, run = failure.get("rank"), folder.key
    lines = [f"{name_failure(failure)}: {failure_text(failure)}"]
    if rank is None:
        return lines
    if failure.get("where"):
        lines.append(f"  at {failure['where']}")
    return [*lines, f"  its log: paceline logs --rank {rank} {run}"]
