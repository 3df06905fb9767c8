"""Why a run failed, in a few lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from paceline.contract import launcher_variables
from paceline.contract.checkpoint import checkpoint_step, find_checkpoints
from paceline.contract.foreign_records import Fields, read_fields, read_text
from paceline.contract.process import describe_exit
from paceline.contract.run_folder import TRIALS, USAGE_EXIT, AttemptFolder, RunFolder
from paceline.contract.sweep_folder import TrialFolder
from paceline.errors import UsageError
from paceline.spec.shell_text import cluster, quote, to_type
from paceline.watch.events import read_events

FAILURE_FIELDS: Fields = {
    "rank": int,
    "host": str,
    "cause": str,
    "code": int,
    "type": str,
    "message": str,
    "where": str,
    "last_line": str,
    "out_of_memory": bool,
    "ended_ranks": list,
}
AGENT_CAUSES = ("killed", "lost")  # of a node, not of a rank
NODE_DIED = "the node died: Slurm has marked it as failed"
LOG_TAIL = 65536  # bytes of the batch log
MAX_MESSAGE_LINES = 4
MAX_LINE = 300  # characters


def read_failure(attempt: AttemptFolder) -> dict[str, Any]:
    """Return the first failure of an attempt; empty if there is none. Slurm may know that a lost
    node has died.
    """
    failure = read_fields(attempt.failure, FAILURE_FIELDS)
    host = failure.get("host", "")
    is_agent = failure.get("rank") is None and failure.get("cause") in AGENT_CAUSES
    if is_agent and host and _slurm_lost(RunFolder(attempt.path.parent), host):
        failure |= {"cause": "lost", "message": NODE_DIED}
    return failure


def is_usage_error(failure: Mapping[str, Any]) -> bool:
    """Return whether the script rejected its arguments, as argparse and click do."""
    return failure.get("code") == USAGE_EXIT and not failure.get("type")


def _slurm_lost(run: RunFolder, host: str) -> bool:
    """Return whether Slurm noticed that a node died, whenever the head agent lost the agent
    there.
    """
    log = read_text(run.slurm_log, LOG_TAIL)
    _, lost, end = f"\n{log}".rpartition(f"\npaceline: node {host} failed: ")
    named = re.findall(r"^srun: error: Node failure on (\S+)$", end, re.MULTILINE)
    if not lost or not named:
        died = re.search(r"^slurmstepd\S*: error: .* DUE TO NODE FAILURE", end, re.MULTILINE)
        return bool(lost) and died is not None
    with suppress(UsageError):  # the log may be anybody's
        return any(host in launcher_variables.expand(nodes) for nodes in named)
    return False


def failure_text(failure: dict[str, Any]) -> str:
    """Return the exception, or how the rank exited and what it printed last."""
    lines = str(failure.get("message", "")).splitlines()[:MAX_MESSAGE_LINES]
    message = "\n".join(line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}…" for line in lines)
    if failure.get("type"):
        return f"{failure['type']}: {message}"
    how = describe_exit(code) if (code := failure.get("code", 0)) else ""
    parts = (
        [how, str(failure.get("last_line", ""))] if failure.get("last_line") else [message or how]
    )
    return ": ".join(part for part in parts if part) or str(failure.get("cause", ""))


def name_failure(failure: dict[str, Any]) -> str:
    """Name the rank that failed, or the node."""
    host = failure.get("host", "?")
    return f"rank {failure['rank']} on {host}" if failure.get("rank") is not None else str(host)


def describe_failure(folder: RunFolder) -> list[str]:
    """Return why a run failed: who failed first, with which error, where, and how to read more."""
    attempts = folder.attempts()
    failure = read_failure(attempts[-1]) if attempts else {}
    if not failure:
        reasons = [
            str(event["reason"]) for event in read_events(folder.events) if event.get("reason")
        ]
        return reasons[-1:]
    rank, run = failure.get("rank"), folder.key
    lines = [f"{name_failure(failure)}: {failure_text(failure)}"]
    if rank is None:
        return lines
    if failure.get("where"):
        lines.append(f"  at {failure['where']}")
    return [*lines, f"  its log: {to_type(f'logs --rank {rank} {run}')}"]


def submit_again(folder: RunFolder) -> str:
    """Return the command that goes on with a run of Slurm in the queue."""
    return _trial_again(folder) or to_type(f"submit --resume {folder.path.name}")


def resume_command(folder: RunFolder, *, job: str | None) -> str:
    """Return the command that goes on with a run where it ran: in the queue if it was a job, or
    else here.

    Empty for a run that another cluster trains, and for one that ran on a login node if the user is
    not there.
    """
    if job is not None:
        return submit_again(folder)
    if cluster():
        return ""
    return _trial_again(folder, "--local ") or f"paceline run --resume {folder.path.name}"


def _trial_again(folder: RunFolder, where: str = "") -> str:
    """Return the command that runs a trial again, and others that ended as it did; empty for other
    runs.
    """
    if folder.path.parent.name != TRIALS:
        return ""
    trial = TrialFolder(folder.path)
    state = "failed" if trial.result.exists() else "missing"
    again = f"sweep {where}--resubmit {state} {quote(trial.sweep.name)}"
    return f"paceline {again}" if where else to_type(again)


def describe_start(folder: RunFolder) -> str:
    """Return where a resume of the run begins."""
    if found := find_checkpoints(folder.path):
        return f"from step {checkpoint_step(found[0].name)}"
    events = read_events(folder.events)
    has_trained = any(event["event"] == "training" for event in events)
    starts = [event for event in events if event["event"] in ("launch", "ranks")]
    if not (starts or has_trained or folder.attempts()):
        return "its ranks had not started"
    saves_itself = any(
        event["event"] == "ranks" and not event.get("uses_runtime", True) for event in starts
    )
    if saves_itself and not has_trained:
        return "from the script's own checkpoint, if any"
    if (attempts := folder.attempts()) and is_usage_error(read_failure(attempts[-1])):
        return "add the script and other arguments: it rejected these"
    return "no checkpoint: the script starts from the beginning"
