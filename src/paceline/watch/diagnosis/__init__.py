"""What is wrong with a run: findings from its folder, each with its evidence.

All checks run in the order in which one problem explains another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from paceline import errors
from paceline.contract.run_folder import DONE, STOPPED
from paceline.spec.findings import GOOD, PROBLEM, Finding
from paceline.spec.shell_text import to_type
from paceline.watch.diagnosis.evidence import Evidence
from paceline.watch.diagnosis.network import (
    check_answers,
    check_arrival,
    check_interfaces,
    check_liveness,
    check_lost,
)
from paceline.watch.diagnosis.pace import check_data, check_hang, check_stragglers
from paceline.watch.diagnosis.resources import (
    check_cores,
    check_disk,
    check_gpu_health,
    check_gpus,
    check_memory,
    check_versions,
)
from paceline.watch.failure import describe_failure, is_usage_error

DOCS = "docs/troubleshooting.md"
SIGKILL = -9


def check_failure(evidence: Evidence) -> list[Finding]:
    """Repeat the run's own error, where nothing else explains it."""
    record, failure, docs = evidence.record, evidence.failure, f"{DOCS}#it-died"
    if record.status in (DONE, STOPPED, "cancelled") or not record.is_over:
        return []
    lines = describe_failure(evidence.folder)
    if not lines and (reason := record.requeue_problem):
        lines = [f"The run was not requeued: {reason}."]
    if not lines:
        tail = [line.strip() for line in evidence.batch_log.splitlines() if line.strip()]
        text = f"The run {record.status_phrase}, and no rank has reported an error."
        hint = "Read the batch script's output, slurm.log in the run folder."
        facts = tuple(f"slurm.log: {line[:200]}" for line in tail[-3:])
        return [Finding("end", PROBLEM, text, hint, facts, docs)]
    text, advice = _split_advice(lines[0], str(failure.get("type", "")))
    facts = (f"at {failure['where']}",) if failure.get("where") else ()
    return [Finding("error", PROBLEM, text, _hint(evidence, advice), facts, docs)]


def _split_advice(text: str, kind: str) -> tuple[str, str]:
    """Return an error of Paceline's own and, apart from it, what it says to do."""
    known = getattr(errors, kind, None) if kind.isidentifier() else None
    message, newline, advice = text.rpartition("\n  ")
    if not newline or not (isinstance(known, type) and issubclass(known, errors.PacelineError)):
        return text, ""
    return message, " ".join(advice.split())


def _hint(evidence: Evidence, advice: str) -> str:
    failure, run = evidence.failure, evidence.record.run_id
    if failure.get("ended_ranks"):
        return (
            "Give all ranks the same number of batches and steps, or leave the loop on all of "
            "them at once."
        )
    rank = failure.get("rank")
    log = f"Read the logs: {to_type(f'logs {run}')}."
    if rank is not None:
        log = f"Read the log of rank {rank}: {to_type(f'logs --rank {rank} {run}')}."
    return " ".join(filter(None, [advice or _advise(failure), log]))


def _advise(failure: Mapping[str, Any]) -> str:
    """Return what to do about a crash, or the script's own exception; empty if nothing is known
    about it.
    """
    where = str(failure.get("where", ""))
    if failure.get("code") == SIGKILL:
        return (
            "The kernel often does this when memory runs out: check the node's memory (paceline "
            "show, dmesg). Otherwise a user or one of the site's clean-up scripts killed the "
            "process."
        )
    if failure.get("cause") == "crash" and where:
        return (
            "Compiled code crashed at that line: look at the library that it calls, and its "
            "version."
        )
    lacks = re.match(r"No module named '([^'.]+)", str(failure.get("message", "")))
    if failure.get("type") == "ModuleNotFoundError" and lacks:
        return (
            f"Install {lacks[1]} in the environment of this run. Its package may have another name."
        )
    if is_usage_error(failure):
        return "The script rejected its arguments: correct them in your command."
    line = re.match(r".*?:\d+(?= in )", where)  # the evidence has the whole of it
    return f"Look at {line[0]}." if line else ""


Check = Callable[[Evidence], list[Finding]]

# What a run cannot do without.
CAUSES: tuple[Check, ...] = (
    check_liveness,
    check_arrival,
    check_versions,
    check_gpus,
    check_gpu_health,
    check_interfaces,
    check_lost,
    check_memory,
    check_disk,
)
PACE: tuple[Check, ...] = (check_cores, check_data, check_stragglers)
# What those lead to: a problem here is news only if nothing explains it yet.
CONSEQUENCES: tuple[Check, ...] = (check_hang, check_failure)


def diagnose(evidence: Evidence) -> list[Finding]:
    """Return what is wrong, problems first, and what was checked and is fine."""
    found = [each for check in CAUSES for each in check(evidence)]
    record = evidence.record
    if record.status in ("queued", "held"):
        why = record.detail or "Slurm has not said why"
        found.append(Finding("queue", GOOD, f"the job is {record.status}: {why}"))
    if not any(each.level == PROBLEM for each in found):
        found += check_answers(evidence)
    found += [each for check in PACE for each in check(evidence)]
    for check in CONSEQUENCES:
        explained = any(each.level == PROBLEM for each in found)
        found += [each for each in check(evidence) if each.level != PROBLEM or not explained]
    order = {PROBLEM: 0, GOOD: 2}
    # A good word about something that another check complains of would confuse.
    bad = {each.about for each in found if each.level != GOOD}
    found = [each for each in found if each.level != GOOD or each.about not in bad]
    return sorted(found, key=lambda each: order.get(each.level, 1))
