"""Why a run failed, in a few lines."""

from __future__ import annotations

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
    exit_code = f"exit code {failure['code']}" if failure.get("code", -1) > 0 else ""
    parts = [exit_code, str(failure.get("last_line", ""))] if failure.get("last_line") else [message or exit_code]
    return ": ".join(part for part in parts if part) or str(failure.get("cause", ""))


def describe_failure(folder: RunFolder) -> list[str]:
    """Return why a run failed: who failed first, with which error, where, and how to read more."""
    attempts = folder.attempts()
    failure = read_failure(attempts[-1]) if attempts else {}
    if not failure:
        reasons = [str(event["reason"]) for event in read_events(folder.events) if event.get("reason")]
        return reasons[-1:]
    rank, run = failure.get("rank"), folder.key
    if rank is None:
        return [f"{failure.get('host', '?')}: {failure_text(failure)}"]
    lines = [f"rank {rank} on {failure.get('host', '?')}: {failure_text(failure)}"]
    if failure.get("where"):
        lines.append(f"  at {failure['where']}")
    return [*lines, f"  its log: paceline logs --rank {rank} {run}"]
