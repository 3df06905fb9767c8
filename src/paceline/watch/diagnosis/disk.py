"""Whether a disk, a quota or the shared memory is full."""

from __future__ import annotations

import re

from paceline.contract.findings import GOOD, PROBLEM, WARNING, Finding
from paceline.contract.verdict import DONE
from paceline.watch.diagnosis.evidence import Evidence
from paceline.watch.failure_text import failure_text, name_failure

DOCS = "docs/troubleshooting.md"
_DISK = re.compile(
    r"No space left on device|Disk quota exceeded|errno 28\b|errno 122\b|database or disk is full",
    re.I,
)
_PATH = re.compile(r"(?:device|exceeded): '?([^'\n]+?)'?$", re.MULTILINE)
# How torch names its files in /dev/shm, and what it says about a worker that could not write there.
_SHARED_MEMORY = re.compile(
    r"file </torch_|workers are out of shared memory|(?:device|exceeded): '?/dev/shm/"
)
NO_SPACE = 64 << 20  # bytes
FIX = (
    "Remove old runs and checkpoints (keep_last in [checkpoint] keeps fewer), or choose another "
    "--scratch."
)
SHARED_MEMORY_FIX = (
    "1. Fewer data-loader workers, smaller batches, or a smaller prefetch_factor. "
    "2. A larger /dev/shm: start a container with --ipc=host or --shm-size. "
    "3. Remove files that earlier programs left there: ls -l /dev/shm."
)


def check_disk(evidence: Evidence) -> list[Finding]:
    """Tell whether a disk or a quota is full: by what failed to write, and by what is free now."""
    text = _error(evidence)
    if _SHARED_MEMORY.search(text):
        return [_shared_memory(evidence)]
    written, free = _failed_writes(evidence), _free(evidence)
    short = _little_space(evidence, free)
    if written or short or any(each.level == PROBLEM for each in evidence.quotas):
        path = _PATH.search(text) if _DISK.search(text) else None
        where = path[1] if path else str(evidence.folder.path)
        facts = [*written, *short, *(each.text for each in evidence.quotas)]
        what = (
            "The disk is full, or your quota is used up" if written else "The disk is almost full"
        )
        return [
            Finding(
                "disk",
                _level(evidence, is_proven=bool(written)),
                f"{what}: {where}",
                FIX,
                evidence=tuple(dict.fromkeys(facts)),
                docs=f"{DOCS}#a-full-disk",
            )
        ]
    if evidence.quotas:
        return [
            Finding("disk", WARNING, each.text, each.hint, docs=f"{DOCS}#a-full-disk")
            for each in evidence.quotas
        ]
    return [Finding("disk", GOOD, f"{free / 2**30:.1f} GB free")] if free is not None else []


def _level(evidence: Evidence, *, is_proven: bool) -> str:
    """Return how bad it is. A run that is done, or has saved since, has got over it; another error
    is another cause.
    """
    has_other_error = bool(evidence.failure) and not _DISK.search(_error(evidence))
    if evidence.record.status == DONE or (
        is_proven and evidence.has_saved_since and not evidence.failure
    ):
        return WARNING
    return WARNING if has_other_error else PROBLEM


def _error(evidence: Evidence) -> str:
    failure = evidence.failure
    return (
        f"{failure.get('type', '')}: {failure.get('message', '')}\n{failure.get('last_line', '')}"
    )


def _failed_writes(evidence: Evidence) -> list[str]:
    """Return what could not be written."""
    facts = []
    if _DISK.search(_error(evidence)):
        facts.append(f"{name_failure(evidence.failure)}: {failure_text(evidence.failure)}")
    if errors := [
        event for event in evidence.save_errors if _DISK.search(str(event.get("error", "")))
    ]:
        later = "; later ones were" if evidence.has_saved_since else ""
        step, error = errors[-1].get("step", "?"), errors[-1].get("error")
        facts.append(f"the checkpoint of step {step} was not written{later}: {error}")
    facts += [
        f"slurm.log: {line.strip()[:200]}" for line in evidence.own_lines() if _DISK.search(line)
    ][-1:]
    return facts


def _little_space(evidence: Evidence, free: int | None) -> list[str]:
    """Return where there is little space. That alone does not mean that anything has failed."""
    facts = []
    if free is not None and free < NO_SPACE:
        facts.append(f"{evidence.folder.path}: {free >> 20} MB free now")
    for agent in evidence.agents.values():
        for key, what in (("run_free", "the run folder"), ("tmp_free", "the temporary folder")):
            room = agent.node.get(key)
            if isinstance(room, int) and room < NO_SPACE:
                facts.append(f"{agent.host}: {room >> 20} MB free in {what} when the run started")
    return facts


def _shared_memory(evidence: Evidence) -> Finding:
    failure = evidence.failure
    facts = [f"{name_failure(failure)}: {failure_text(failure)}"]
    facts += [f"at {failure['where']}"] if failure.get("where") else []
    facts += [
        f"{agent.host}: {room >> 20} MB free in /dev/shm when the run started"
        for agent in evidence.agents.values()
        if agent.host == failure.get("host") and isinstance(room := agent.node.get("shm_free"), int)
    ][:1]
    return Finding(
        "shm",
        PROBLEM,
        "The shared memory (/dev/shm) is full: data-loader workers pass their batches through it.",
        SHARED_MEMORY_FIX,
        tuple(facts),
        f"{DOCS}#shared-memory",
    )


def _free(evidence: Evidence) -> int | None:
    import shutil

    try:
        return shutil.disk_usage(evidence.folder.path).free
    except OSError:
        return None
