"""Whether a GPU or the job has used up its memory."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

from paceline.contract.verdict import DONE
from paceline.spec.findings import GOOD, PROBLEM, WARNING, Finding
from paceline.watch.diagnosis.evidence import Evidence
from paceline.watch.failure import failure_text, name_failure

DOCS = "docs/troubleshooting.md"
# Exceptions of torch and of Paceline whose messages say that memory is short. Any other may quote
# these words.
_CARRIERS = ("RuntimeError", "AcceleratorError", "DistBackendError", "RunError")
_GPU_MEMORY = re.compile(
    r"CUDA out of memory|HIP out of memory|XPU out of memory|MPS backend out of memory|ran out of "
    r"memory at step"
    r"|(?:CUDA|HIP) error: out of memory|Cuda failure (?:\d+ )?'out of "
    r"memory'|CUBLAS_STATUS_ALLOC_FAILED"
)
_HOST_MEMORY = re.compile(r"out-of-memory killer|oom[-_ ]kill|Out Of Memory", re.I)
_REFUSED = re.compile(
    r"DefaultCPUAllocator: can't allocate memory(?:: you tried to allocate (?P<bytes>\d+) bytes)?"
)
_EXCEPTION = re.compile(
    r"(?:[\w.]+\.)?(?P<type>\w+(?:Error|Exception)): (?P<message>.*)", re.DOTALL
)
# what torch says about a data-loader worker
_KILLED = re.compile(r"killed by signal|exited unexpectedly")
MIN_PEAK = 64 << 20  # bytes; an agent alone, without its ranks, uses less
WAYS_OUT = (
    "1. Fewer samples per rank at the same global batch: run.loader(..., accumulate=2), or more "
    "ranks. "
    '2. Less memory per sample: session(precision="bf16"), or torch.utils.checkpoint. '
    '3. Sharded parameters and optimizer state: run.wrap(model, mode="fsdp").'
)
HOST_WAYS_OUT = (
    "Fewer or leaner data-loader workers: num_workers, and arrays instead of lists of Python "
    "objects.",
    "Less in memory: memory-mapped files, or run.loader over a stream.",
)


def check_memory(evidence: Evidence) -> list[Finding]:
    """Tell whether a GPU or the job has used up its memory, by the type of the error or by who
    killed the rank.
    """
    kind, message = _exception(evidence)
    if kind == "OutOfMemoryError" or (kind in _CARRIERS and _GPU_MEMORY.search(message)):
        return [
            Finding(
                "GPU memory",
                PROBLEM,
                "A GPU ran out of memory.",
                WAYS_OUT,
                tuple(_said(evidence)),
                f"{DOCS}#out-of-memory",
            )
        ]
    refused = _REFUSED.search(message) if kind == "RuntimeError" else None
    if refused or kind.endswith("MemoryError"):
        return [_refused(evidence, refused["bytes"] if refused else None)]
    if facts := _kills(evidence):
        # An exception of the script's own is the cause, unless it says that a process was killed.
        is_cause = not kind or bool(_KILLED.search(message))
        facts += _limits(evidence)
        found = Finding(
            "memory",
            PROBLEM,
            "The job ran out of memory, and the kernel killed a process.",
            _ways_out(evidence),
            tuple(facts),
            f"{DOCS}#out-of-memory",
        )
        return [found if is_cause else dataclasses.replace(found, level=WARNING)]
    peak = max((use.peak("own_memory") or 0.0 for use in evidence.usage), default=0.0)
    if peak < MIN_PEAK:  # the samples of a short run have missed its ranks
        return []
    size = f"{peak / 2**30:.1f} GB" if peak >= 2**30 else f"{peak / 2**20:.0f} MB"
    return [Finding("memory", GOOD, f"peak {size} on a node")]


def _exception(evidence: Evidence) -> tuple[str, str]:
    """Return the type and message of the exception that ended the run, if need be from the last
    line of its log.
    """
    failure = evidence.failure
    if failure.get("type"):
        return str(failure["type"]), str(failure.get("message", ""))
    found = _EXCEPTION.match(str(failure.get("last_line", "")))
    return (found["type"], found["message"]) if found else ("", "")


def _kills(evidence: Evidence) -> list[str]:
    """Return who says that the kernel has killed a process for want of memory."""
    failure, facts = evidence.failure, []
    if failure.get("out_of_memory"):
        facts.append(f"{name_failure(failure)}: {failure_text(failure)}")
    if evidence.record.status == "out of memory":
        facts.append(f"Slurm: job {evidence.record.job} is OUT_OF_MEMORY")
    # Paceline's own lines are guesses: what it knows is in the failure.
    lines = [
        line
        for line in evidence.own_lines()
        if _HOST_MEMORY.search(line) and not line.strip().startswith("paceline: ")
    ]
    facts += [f"slurm.log: {line.strip()[:200]}" for line in lines[-1:]]
    facts += [
        f"{use.host}: the kernel killed {use.peak('oom_kills'):.0f} processes of the job"
        for use in evidence.usage
        if use.peak("oom_kills")
    ]
    return facts


def _refused(evidence: Evidence, asked: str | None) -> Finding:
    """Describe an allocation that failed at once, as one of a wrong size does."""
    number = int(asked) if asked else 0
    size = (
        f" of {number / 1e12:.3g} TB"
        if number >= 1e12
        else f" of {number / 1e9:.3g} GB"
        if number
        else ""
    )
    return Finding(
        "memory",
        PROBLEM,
        f"The system refused a memory allocation{size} on the node. No process was killed.",
        f"Check the sizes at that line. If they are right: {_ways_out(evidence)}",
        (*_said(evidence), *_limits(evidence)),
        f"{DOCS}#out-of-memory",
    )


def _said(evidence: Evidence) -> list[str]:
    """Return what failed, and where in the script."""
    failure = evidence.failure
    where = [f"at {failure['where']}"] if failure.get("where") else []
    return [f"{name_failure(failure)}: {failure_text(failure)}", *where]


def _ways_out(evidence: Evidence) -> str:
    more = (
        ("Ask for more: --mem-per-gpu or --mem-per-node.",)
        if evidence.record.job is not None
        else ()
    )
    return " ".join(
        f"{number}. {each}" for number, each in enumerate((*more, *HOST_WAYS_OUT), start=1)
    )


def _limits(evidence: Evidence) -> list[str]:
    found = []
    for use in evidence.usage[:4]:
        limit, peak = use.details.get("memory_limit"), use.peak("own_memory")
        if isinstance(limit, int) and peak is not None:
            found.append(f"{use.host}: peak {peak / 2**30:.1f} of {limit / 2**30:.1f} GB")
    return found


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
    written, free = _failed_writes(evidence), free_space(evidence.folder.path)
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


def free_space(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _level(evidence: Evidence, *, is_proven: bool) -> str:
    """Return how bad it is. A run that is done, or has saved since, has got over it; another error
    is another cause.
    """
    has_other_error = bool(evidence.failure) and not _DISK.search(_error(evidence))
    is_past = is_proven and evidence.has_saved_since and not evidence.failure
    is_over_it = evidence.record.status == DONE or is_past or has_other_error
    return WARNING if is_over_it else PROBLEM


def _error(evidence: Evidence) -> str:
    failure = evidence.failure
    return "\n".join(str(failure.get(name, "")) for name in ("message", "last_line"))


def _failed_writes(evidence: Evidence) -> list[str]:
    """Return what could not be written."""
    facts = []
    if _DISK.search(_error(evidence)):
        facts += _said(evidence)[:1]
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
    facts = [
        f"{agent.host}: {room >> 20} MB free in /dev/shm when the run started"
        for agent in evidence.agents.values()
        if agent.host == failure.get("host") and isinstance(room := agent.node.get("shm_free"), int)
    ][:1]
    return Finding(
        "shm",
        PROBLEM,
        "The shared memory (/dev/shm) is full: data-loader workers pass their batches through it.",
        SHARED_MEMORY_FIX,
        (*_said(evidence), *facts),
        f"{DOCS}#shared-memory",
    )
