"""The diagnosis of a run: all checks, in the order in which one problem explains another."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from paceline import errors
from paceline.contract.verdict import DONE, STOPPED
from paceline.spec.findings import GOOD, PROBLEM, Finding
from paceline.spec.shell_text import to_type
from paceline.watch.diagnosis.evidence import Evidence
from paceline.watch.diagnosis.hang import check_flight_recorder, check_hang
from paceline.watch.diagnosis.network import (
    check_answers,
    check_arrival,
    check_interfaces,
    check_lost,
    check_silence,
)
from paceline.watch.diagnosis.pace import check_data, check_fitness, check_stragglers
from paceline.watch.diagnosis.resources import (
    check_cores,
    check_gpu_health,
    check_gpus,
    check_versions,
)
from paceline.watch.diagnosis.space import check_disk, check_memory
from paceline.watch.failure import describe_failure, failure_text, is_usage_error, name_failure

DOCS = "docs/troubleshooting.md"
SIGKILL = -9


def check_failure(evidence: Evidence) -> list[Finding]:
    """Repeat the run's own error, where nothing else explains it."""
    record, failure = evidence.record, evidence.failure
    if record.status in (DONE, STOPPED, "cancelled") or not record.is_over:
        return []
    lines = describe_failure(evidence.folder)
    if not lines and (reason := record.requeue_problem):
        lines = [f"The run was not requeued: {reason}."]
    if not lines:
        tail = [line.strip() for line in evidence.batch_log.splitlines() if line.strip()]
        return [
            Finding(
                "end",
                PROBLEM,
                f"The run {record.status_phrase}, and no rank has reported an error.",
                "Read the batch script's output, slurm.log in the run folder.",
                evidence=tuple(f"slurm.log: {line[:200]}" for line in tail[-3:]),
                docs=f"{DOCS}#it-died",
            )
        ]
    facts = [f"at {failure['where']}"] if failure.get("where") else []
    facts += [failure["log"]] if failure.get("log") else []
    text, advice = _split_advice(lines[0], str(failure.get("type", "")))
    return [
        Finding("error", PROBLEM, text, _hint(evidence, advice), tuple(facts), f"{DOCS}#it-died")
    ]


def _hint(evidence: Evidence, advice: str) -> str:
    rank, code = evidence.failure.get("rank"), evidence.failure.get("code", 0)
    if evidence.failure.get("ended_ranks"):
        return (
            "Give all ranks the same number of batches and steps, or leave the loop on all of "
            "them at once."
        )
    run = evidence.record.run_id
    log = (
        f"Read the log of rank {rank}: {to_type(f'logs --rank {rank} {run}')}."
        if rank is not None
        else ""
    )
    if code == SIGKILL:
        return (
            "The kernel often does this when memory runs out: check the node's memory (paceline "
            "show, dmesg). "
            f"Otherwise a user or one of the site's clean-up scripts killed the process. {log}"
        )
    if evidence.failure.get("cause") == "crash" and evidence.failure.get("where"):
        return (
            "Compiled code crashed at that line: look at the library that it calls, and its "
            f"version. {log}"
        )
    advice = advice or _advise(evidence.failure)
    return " ".join(filter(None, [advice, log])) or f"Read the logs: {to_type(f'logs {run}')}."


def _advise(failure: Mapping[str, Any]) -> str:
    """Return what to do about the script's own exception; empty if nothing is known about it."""
    lacks = re.match(r"No module named '([^'.]+)", str(failure.get("message", "")))
    if failure.get("type") == "ModuleNotFoundError" and lacks:
        return (
            f"Install {lacks[1]} in the environment of this run. Its package may have another name."
        )
    if is_usage_error(failure):
        return "The script rejected its arguments: correct them in your command."
    # the evidence has the whole of it
    line = re.match(r".*?:\d+(?= in )", str(failure.get("where", "")))
    return f"Look at {line[0]}." if line else ""


def _split_advice(text: str, kind: str) -> tuple[str, str]:
    """Return an error of Paceline's own and, apart from it, what it says to do."""
    known = getattr(errors, kind, None) if kind.isidentifier() else None
    message, newline, advice = text.rpartition("\n  ")
    if not newline or not (isinstance(known, type) and issubclass(known, errors.PacelineError)):
        return text, ""
    return message, " ".join(advice.split())


def mention_failure(found: list[Finding], evidence: Evidence) -> list[Finding]:
    """Add the exception that ended the run to the first problem, unless a problem has it
    already.
    """
    failure = evidence.failure
    first = next((each for each in found if each.level == PROBLEM), None)
    if (
        first is None
        or not failure.get("type")
        or evidence.is_live
        or evidence.record.status == DONE
    ):
        return found
    line = failure_text(failure).splitlines()[0]
    message = line.partition(": ")[2]
    if any(message in text for each in found for text in (each.text, *each.evidence)):
        return found
    explained = replace(first, evidence=(*first.evidence, f"{name_failure(failure)}: {line}"))
    return [explained if each is first else each for each in found]


Check = Callable[[Evidence], list[Finding]]

# What a run cannot do without.
CAUSES: tuple[Check, ...] = (
    check_silence,
    check_arrival,
    check_versions,
    check_gpus,
    check_gpu_health,
    check_interfaces,
    check_lost,
    check_memory,
    check_disk,
)
PACE: tuple[Check, ...] = (check_fitness, check_cores, check_data, check_stragglers)
# What those lead to: a problem here is news only if nothing explains it yet.
CONSEQUENCES: tuple[Check, ...] = (check_flight_recorder, check_hang, check_failure)


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
    found = mention_failure(found, evidence)
    order = {PROBLEM: 0, GOOD: 2}
    # A good word about something that another check complains of would confuse.
    bad = {each.about for each in found if each.level != GOOD}
    found = [each for each in found if each.level != GOOD or each.about not in bad]
    return sorted(found, key=lambda each: order.get(each.level, 1))
