"""Why a run died: memory, disk, or its own error."""

from __future__ import annotations

import re

from paceline.cluster.checks.findings import GOOD, PROBLEM, WARNING, Finding
from paceline.cluster.checks.quota import check_quota
from paceline.contract.verdict import DONE, STOPPED
from paceline.watch.diagnosis.evidence import Evidence
from paceline.watch.failures import describe_failure, failure_text

DOCS = "docs/troubleshooting.md"
_GPU_MEMORY = re.compile(r"CUDA out of memory|OutOfMemoryError|ran out of memory at step|CUDA error: out of memory")
_HOST_MEMORY = re.compile(r"out-of-memory killer|oom[-_ ]kill|Out Of Memory", re.I)
_REFUSED = re.compile(
    r"DefaultCPUAllocator: can't allocate memory(?:: you tried to allocate (?P<bytes>\d+) bytes)?|^[\w.]*MemoryError: ",
    re.MULTILINE,
)
_OWN = re.compile(r"(slurmstepd|srun|slurmd|paceline|bash|/\S*(job|sbatch|slurm_script)\S*): ")
_DISK = re.compile(r"No space left on device|Disk quota exceeded|errno 28\b|errno 122\b|database or disk is full", re.I)
_PATH = re.compile(r"(?:device|exceeded): '?([^'\n]+?)'?$", re.MULTILINE)
_LEFT = re.compile(r"Ranks? [\d, ]+ ha(?:s|ve) ended normally, without the collective")
NO_SPACE = 64 << 20  # bytes
MIN_PEAK = 64 << 20  # bytes; an agent alone, without its ranks, uses less
WAYS_OUT = (
    "1. Fewer samples per rank at the same global batch: run.loader(..., accumulate=2), or more ranks. "
    '2. Less memory per sample: session(precision="bf16"), or torch.utils.checkpoint. '
    '3. Sharded parameters and optimizer state: run.wrap(model, mode="fsdp").'
)
HOST_WAYS_OUT = (
    "Fewer or leaner data-loader workers: num_workers, and arrays instead of lists of Python objects.",
    "Less in memory: memory-mapped files, or run.loader over a stream.",
)


def check_memory(evidence: Evidence) -> list[Finding]:
    """Tell whether a GPU or the job has used up its memory."""
    failure = evidence.failure
    text = f"{failure.get('type', '')}: {failure.get('message', '')}\n{failure.get('last_line', '')}"
    who = f"rank {failure.get('rank')} on {failure.get('host')}"
    if _GPU_MEMORY.search(text):
        facts = [f"{who}: {_first_line(str(failure.get('message') or text))}"]
        if failure.get("where"):
            facts.append(f"at {failure['where']}")
        return [
            Finding("GPU memory", PROBLEM, "A GPU ran out of memory.", WAYS_OUT, tuple(facts), f"{DOCS}#out-of-memory")
        ]
    if refused := _REFUSED.search(text):
        return [_refused(evidence, refused["bytes"])]
    facts = [f"{who}: {failure_text(failure)}"] if _HOST_MEMORY.search(text) else []
    if evidence.record.status == "out of memory":
        facts.append(f"Slurm: job {evidence.record.job} is OUT_OF_MEMORY")
    facts += [f"slurm.log: {line.strip()[:200]}" for line in _own_lines(evidence) if _HOST_MEMORY.search(line)][-1:]
    facts += [
        f"{use.host}: the kernel killed {use.peak('oom_kills'):.0f} processes of the job"
        for use in evidence.usage if use.peak("oom_kills")
    ]  # fmt: skip
    if facts:
        facts += _limits(evidence)
        return [Finding("memory", PROBLEM, "The job ran out of memory, and the kernel killed a process.",
                        _ways_out(evidence), tuple(facts), f"{DOCS}#out-of-memory")]  # fmt: skip
    peak = max((use.peak("own_memory") or 0.0 for use in evidence.usage), default=0.0)
    if peak < MIN_PEAK:  # the samples of a short run have missed its ranks
        return []
    size = f"{peak / 2**30:.1f} GB" if peak >= 2**30 else f"{peak / 2**20:.0f} MB"
    return [Finding("memory", GOOD, f"peak {size} on a node")]


def _refused(evidence: Evidence, asked: str | None) -> Finding:
    """Describe an allocation that failed at once, as one of a wrong size does."""
    failure = evidence.failure
    number = int(asked) if asked else 0
    size = f" of {number / 1e12:.3g} TB" if number >= 1e12 else f" of {number / 1e9:.3g} GB" if number else ""
    facts = [f"rank {failure.get('rank')} on {failure.get('host')}: {failure_text(failure)}"]
    facts += [f"at {failure['where']}"] if failure.get("where") else []
    return Finding(
        "memory", PROBLEM, f"The system refused an allocation{size} in the node's memory. No process was killed.",
        f"Check the sizes at that line. If they are right: {_ways_out(evidence)}",
        tuple(facts + _limits(evidence)), f"{DOCS}#out-of-memory",
    )  # fmt: skip


def _ways_out(evidence: Evidence) -> str:
    more = ("Ask for more: --mem-per-gpu or --mem-per-node.",) if evidence.record.job is not None else ()
    return " ".join(f"{number}. {each}" for number, each in enumerate((*more, *HOST_WAYS_OUT), start=1))


def _own_lines(evidence: Evidence) -> list[str]:
    """Return what Slurm, the shell and Paceline have written to the log of a run that is not done.

    The script's output is there too, and may say anything.
    """
    if evidence.record.status == DONE:
        return []
    return [line for line in evidence.batch_log.splitlines() if _OWN.match(line.strip())]


def _limits(evidence: Evidence) -> list[str]:
    found = []
    for use in evidence.usage[:4]:
        limit, peak = use.details.get("memory_limit"), use.peak("own_memory")
        if isinstance(limit, int) and peak is not None:
            found.append(f"{use.host}: peak {peak / 2**30:.1f} of {limit / 2**30:.1f} GB")
    return found


def check_disk(evidence: Evidence) -> list[Finding]:
    """Tell whether a disk or a quota is full: by what failed to write, and by what is free now."""
    failure, facts = evidence.failure, []
    text = f"{failure.get('type', '')}: {failure.get('message', '')}\n{failure.get('last_line', '')}"
    if found := _DISK.search(text):
        facts.append(f"rank {failure.get('rank')} on {failure.get('host')}: {failure_text(failure)}")
    errors = [event for event in evidence.save_errors if _DISK.search(str(event.get("error", "")))]
    if errors:
        facts.append(f"the checkpoint of step {errors[-1].get('step', '?')} was not written: {errors[-1].get('error')}")
    facts += [f"slurm.log: {line.strip()[:200]}" for line in _own_lines(evidence) if _DISK.search(line)][-1:]
    free = _free(evidence)
    if free is not None and free < NO_SPACE:
        facts.append(f"{evidence.folder.path}: {free >> 20} MB free now")
    for agent in evidence.agents.values():
        for key, what in (("run_free", "the run folder"), ("tmp_free", "the temporary folder")):
            room = agent.node.get(key)
            if isinstance(room, int) and room < NO_SPACE:
                facts.append(f"{agent.host}: {room >> 20} MB free in {what} when the run started")
    quotas = [each for each in check_quota(evidence.folder.path) if each.level != GOOD]
    if facts or any(each.level == PROBLEM for each in quotas):
        path = _PATH.search(text) if found else None
        where = path[1] if path else str(evidence.folder.path)
        facts += [each.text for each in quotas]
        return [
            Finding(
                "disk", PROBLEM, f"The disk is full, or your quota is used up: {where}",
                "Remove old runs and checkpoints (keep_last in [checkpoint] keeps fewer), or choose another --scratch.",
                evidence=tuple(dict.fromkeys(facts)), docs=f"{DOCS}#a-full-disk",
            )
        ]  # fmt: skip
    if quotas:
        return [Finding("disk", WARNING, each.text, each.hint, docs=f"{DOCS}#a-full-disk") for each in quotas]
    return [Finding("disk", GOOD, f"{free / 2**30:.1f} GB free")] if free is not None else []


def _free(evidence: Evidence) -> int | None:
    import shutil

    try:
        return shutil.disk_usage(evidence.folder.path).free
    except OSError:
        return None


def check_failure(evidence: Evidence) -> list[Finding]:
    """Repeat the run's own error, where nothing else explains it."""
    record, failure = evidence.record, evidence.failure
    if record.status in (DONE, STOPPED, "cancelled") or evidence.is_live:
        return []
    lines = describe_failure(evidence.folder)
    if not lines and (reason := record.requeue_problem):
        lines = [f"It did not go back into the queue: {reason}."]
    if not lines and record.is_over:
        tail = [line.strip() for line in evidence.batch_log.splitlines() if line.strip()]
        return [
            Finding(
                "end", PROBLEM, f"The run is {record.status}, and no rank has reported an error.",
                "Read the batch script's output: paceline logs --batch RUN.",
                evidence=tuple(f"slurm.log: {line[:200]}" for line in tail[-3:]), docs=f"{DOCS}#it-died",
            )
        ]  # fmt: skip
    if not lines:
        return []
    facts = [f"at {failure['where']}"] if failure.get("where") else []
    facts += [failure["log"]] if failure.get("log") else []
    rank = failure.get("rank")
    if _LEFT.search(lines[0]):
        hint = "Give all ranks the same number of batches and steps, or leave the loop on all of them at once."
    elif rank is not None:
        hint = f"Read the log of rank {rank}: paceline logs --rank {rank} {record.run_id}."
    else:
        hint = f"Read the logs: paceline logs {record.run_id}."
    return [Finding("error", PROBLEM, lines[0], hint, tuple(facts), f"{DOCS}#it-died")]


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")[:300]
