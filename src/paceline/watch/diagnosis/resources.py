"""What the nodes have: versions, GPUs and cores, memory and disk."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from paceline.contract.run_folder import DONE
from paceline.spec.findings import GOOD, PROBLEM, WARNING, Finding
from paceline.watch.diagnosis.evidence import Evidence
from paceline.watch.failure import failure_text, name_failure

DOCS = "docs/troubleshooting.md"
VERSIONS = {
    "torch": "torch",
    "nccl": "NCCL",
    "python": "Python",
    "paceline": "Paceline",
    "gpu_driver": "the GPU driver",
}
THROTTLED = 20.0  # percent of the periods of a CPU limit
MIN_SAMPLES = 2


def check_versions(evidence: Evidence) -> list[Finding]:
    """Name the nodes whose versions differ from those of most."""
    return compare_versions({agent.host: agent.node for agent in evidence.agents.values()})


def compare_versions(agents: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Compare what nodes say about themselves, by their names."""
    found = []
    for key, name in VERSIONS.items():
        versions = {host: node.get(key) for host, node in agents.items()}
        common = Counter(versions.values()).most_common(1)[0][0] if versions else None
        other = [host for host, version in versions.items() if version != common][:8]
        if other:
            shown = list(versions.items())[:16]
            found.append(
                Finding(
                    "versions",
                    PROBLEM,
                    f"{name} on {', '.join(other)} is not the one of the other nodes.",
                    "Use one environment on a shared disk for all nodes (paceline env build), or "
                    f"exclude the node: --exclude {','.join(other)}.",
                    tuple(f"{host}: {name} {version or 'missing'}" for host, version in shown),
                    f"{DOCS}#versions-that-differ",
                )
            )
    if found or not agents:
        return found
    node = next(iter(agents.values()))
    same = ", ".join(f"{name} {node[key]}" for key, name in VERSIONS.items() if node.get(key))
    return [Finding("versions", GOOD, f"{same} on {len(agents)} node{'s' * (len(agents) > 1)}")]


def check_gpus(evidence: Evidence) -> list[Finding]:
    """Compare the GPUs that a node shows with those that its ranks need, and look for two ranks on
    one.
    """
    spec, docs = evidence.launch_spec, f"{DOCS}#gpus-and-ranks"
    if spec is None or spec.gpus <= 0:
        return []
    facts: dict[str, str] = {}  # by node
    for use in evidence.usage:
        shown = use.details.get("gpus")
        if isinstance(shown, list) and len(shown) < min(spec.gpus, spec.nproc):
            fact = f"the driver (NVML) shows {len(shown)} of the {spec.gpus} GPUs requested"
            facts[use.host] = f"{use.host}: {fact}"
    for agent in evidence.agents.values():
        needed = min(spec.gpus, max(len(agent.node.get("ranks") or []), 1))
        granted, visible = agent.node.get("slurm_gpus"), agent.node.get("visible_gpus")
        if isinstance(granted, int) and granted < needed:
            facts[agent.host] = f"{agent.host}: Slurm granted {granted} of the {needed} GPUs needed"
        elif isinstance(visible, int) and visible < (1 if spec.one_gpu_per_rank else needed):
            fact = f"the environment shows {visible} of the {needed} GPUs needed"
            facts[agent.host] = f"{agent.host}: {fact}"
    if not facts:
        return [Finding("GPUs", GOOD, f"{spec.gpus} per node for {spec.nproc} ranks")]
    return [
        Finding(
            "GPUs",
            PROBLEM,
            f"{', '.join(facts)} has fewer GPUs than ranks.",
            "Look at `nvidia-smi` and `dmesg | grep Xid` there: a GPU may have fallen off the "
            f"bus. Exclude the node (--exclude {','.join(facts)}) and report it.",
            tuple(facts.values()),
            docs,
        )
    ]


# Errors of the driver that a program causes itself, and what the others mean. See NVIDIA's list of
# Xid errors.
UNKNOWN_XID = "see NVIDIA's list of Xid errors"
PROGRAM_XIDS = {13, 31, 43, 45, 68}
XIDS = {
    48: "memory error that ECC could not correct",
    63: "memory page or row retired",
    64: "memory row not remapped",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many corrected memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "the GPU's own processor does not answer",
    120: "the GPU's own processor failed",
}


def check_gpu_health(evidence: Evidence) -> list[Finding]:
    """Name GPUs with errors (Xid, ECC), and GPUs that the driver slows down."""
    found = []
    for use in evidence.usage:
        listed = [sample.get("gpus") or [] for sample in use.samples]
        for number, samples in enumerate(zip_longest(*listed, fillvalue={})):
            found += _unhealthy(use.host, number, samples)
    return found


def _unhealthy(host: str, number: int, samples: Sequence[dict[str, Any]]) -> list[Finding]:
    name = f"GPU {number} of {host}"
    xids = {each["xid"] for each in samples if isinstance(each.get("xid"), int)}
    serious = sorted(xids - PROGRAM_XIDS)
    errors = max((each["ecc"] for each in samples if isinstance(each.get("ecc"), int)), default=0)
    slow = [str(each["slowdown"]) for each in samples if each.get("slowdown")]
    about, level = "GPU error", WARNING
    if serious:
        level, text = PROBLEM, f"{name} is faulty."
        facts = [f"NVML: Xid {xid} ({XIDS.get(xid, UNKNOWN_XID)})" for xid in serious]
    elif errors:
        text = f"{name} has had memory errors that ECC could not correct."
        facts = [f"NVML: {errors} since the node started"]
    elif len(slow) >= MIN_SAMPLES and 2 * len(slow) >= len(samples):
        about, text = "throttled", f"{name} is slowed down by its driver: {slow[-1]}."
        facts = [f"NVML: {slow[-1]}, in {len(slow)} of {len(samples)} samples"]
    else:
        return []
    exclude = f"Exclude the node (--exclude {host}) and report it."
    return [Finding(about, level, text, exclude, tuple(facts), f"{DOCS}#gpus-and-ranks")]


def check_cores(evidence: Evidence) -> list[Finding]:
    """Look for nodes whose ranks have too few cores, or are held back by a limit of CPU time."""
    throttled = {
        use.host: f"{use.host}: the kernel held the job back in {share:.0f} % of all periods "
        "(cgroup cpu.stat)"
        for use in evidence.usage
        if len(use.samples) >= MIN_SAMPLES and (share := use.mean("throttled") or 0.0) >= THROTTLED
    }
    if throttled:
        return [
            Finding(
                "throttled",
                WARNING,
                f"The cores of {', '.join(throttled)} are throttled: a limit of CPU time holds "
                "the ranks back.",
                "Ask for more cores (--cpus-per-gpu), or exclude the node: --exclude "
                f"{','.join(throttled)}.",
                tuple(throttled.values()),
                f"{DOCS}#a-slow-node",
            )
        ]
    counts = [
        (agent.host, len(agent.node.get("ranks") or []), agent.node["cpus"])
        for agent in evidence.agents.values()
        if isinstance(agent.node.get("cpus"), int)
    ]
    few = {host: f"{host}: {n} ranks on {cpus} cores" for host, n, cpus in counts if 0 < cpus < n}
    if few:
        return [
            Finding(
                "cores",
                WARNING,
                f"The ranks of {', '.join(few)} share cores.",
                "Ask for at least one core per rank, and for data-loader workers on top: "
                "--cpus-per-gpu.",
                tuple(few.values()),
                f"{DOCS}#too-few-cores",
            )
        ]
    texts = {f"{cpus} for {ranks} rank{'s' * (ranks != 1)}" for _, ranks, cpus in counts}
    return [Finding("cores", GOOD, ", ".join(sorted(texts)))] if texts else []


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
    "Use fewer or leaner data-loader workers (num_workers; arrays instead of lists of Python "
    "objects), and keep less in memory: memory-mapped files, or run.loader over a stream."
)
MORE_MEMORY = "Ask for more (--mem-per-gpu or --mem-per-node), or: "
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
SAVES = ("saved", "save_failed")  # events
FIX = (
    "Remove old runs and checkpoints (keep_last in [checkpoint] keeps fewer), or choose another "
    "--scratch."
)
SHARED_MEMORY_FIX = (
    "1. Fewer data-loader workers, smaller batches, or a smaller prefetch_factor. "
    "2. A larger /dev/shm: start a container with --ipc=host or --shm-size. "
    "3. Remove files that earlier programs left there: ls -l /dev/shm."
)


def check_memory(evidence: Evidence) -> list[Finding]:
    """Tell whether a GPU or the job has used up its memory, by the type of the error or by who
    killed the rank.
    """
    kind, message = _exception(evidence)
    docs = f"{DOCS}#out-of-memory"
    limits = [
        f"{use.host}: peak {peak / 2**30:.1f} of {limit / 2**30:.1f} GB"
        for use in evidence.usage[:4]
        if isinstance(limit := use.details.get("memory_limit"), int)
        and (peak := use.peak("own_memory")) is not None
    ]
    ways_out = HOST_WAYS_OUT if evidence.record.job is None else MORE_MEMORY + HOST_WAYS_OUT
    if kind == "OutOfMemoryError" or (kind in _CARRIERS and _GPU_MEMORY.search(message)):
        facts = tuple(_said(evidence))
        return [Finding("GPU memory", PROBLEM, "A GPU ran out of memory.", WAYS_OUT, facts, docs)]
    if kills := _kills(evidence):
        # An exception of the script's own is the cause, unless it says that a process was killed.
        level = PROBLEM if not kind or _KILLED.search(message) else WARNING
        text = "The job ran out of memory, and the kernel killed a process."
        return [Finding("memory", level, text, ways_out, (*kills, *limits), docs)]
    peak = max((use.peak("own_memory") or 0.0 for use in evidence.usage), default=0.0)
    if peak < MIN_PEAK:  # the samples of a short run have missed its ranks
        return []
    return [Finding("memory", GOOD, f"peak {peak / 2**30:.1f} GB on a node")]


def _exception(evidence: Evidence) -> tuple[str, str]:
    """Return the type and message of the exception that ended the run, if need be from the last
    line of its log.
    """
    failure = evidence.failure
    if failure.get("type"):
        return str(failure["type"]), str(failure.get("message", ""))
    found = _EXCEPTION.match(str(failure.get("last_line", "")))
    return (found["type"], found["message"]) if found else ("", "")


def _said(evidence: Evidence) -> list[str]:
    """Return what failed, and where in the script."""
    failure = evidence.failure
    where = [f"at {failure['where']}"] if failure.get("where") else []
    return [f"{name_failure(failure)}: {failure_text(failure)}", *where]


def _kills(evidence: Evidence) -> list[str]:
    """Return who says that the kernel has killed a process for want of memory."""
    facts = _said(evidence)[:1] if evidence.failure.get("out_of_memory") else []
    if evidence.record.status == "out of memory":
        facts.append(f"Slurm: job {evidence.record.job} is OUT_OF_MEMORY")
    # Paceline's own lines are guesses: what it knows is in the failure.
    lines = [line.strip() for line in evidence.own_lines() if _HOST_MEMORY.search(line)]
    facts += [f"slurm.log: {line[:200]}" for line in lines if not line.startswith("paceline: ")][
        -1:
    ]
    kills = {use.host: use.peak("oom_kills") for use in evidence.usage}
    facts += [f"{host}: the kernel killed {n:.0f} processes" for host, n in kills.items() if n]
    return facts


def check_disk(evidence: Evidence) -> list[Finding]:
    """Tell whether a disk or a quota is full: by what failed to write, and by what is free now."""
    failure, docs = evidence.failure, f"{DOCS}#a-full-disk"
    text = "\n".join(str(failure.get(name, "")) for name in ("message", "last_line"))
    if _SHARED_MEMORY.search(text):
        full = (
            "The shared memory (/dev/shm) is full: data-loader workers pass their batches through "
            "it."
        )
        facts = tuple(_said(evidence))
        return [Finding("shm", PROBLEM, full, SHARED_MEMORY_FIX, facts, f"{DOCS}#shared-memory")]
    is_error = bool(_DISK.search(text))
    written, free = _failed_writes(evidence, is_error=is_error), free_space(evidence.folder.path)
    short = [f"{evidence.folder.path}: {free >> 20} MB free now"] if free < NO_SPACE else []
    if not (written or short or any(each.level == PROBLEM for each in evidence.quotas)):
        found = [
            Finding("disk", WARNING, each.text, each.hint, (), docs) for each in evidence.quotas
        ]
        return found or [Finding("disk", GOOD, f"{free / 2**30:.1f} GB free")]
    # A run that is done, or has saved since, has got over it; another error is another cause.
    saves = [each["event"] for each in evidence.record.events if each["event"] in SAVES]
    is_past = bool(written) and saves[-1:] == ["saved"] and not failure
    is_over_it = evidence.record.status == DONE or is_past or (bool(failure) and not is_error)
    path = _PATH.search(text) if is_error else None
    where = path[1] if path else evidence.folder.path
    what = "The disk is full, or your quota is used up" if written else "The disk is almost full"
    facts = (*written, *short, *(each.text for each in evidence.quotas))
    level = WARNING if is_over_it else PROBLEM
    return [Finding("disk", level, f"{what}: {where}", FIX, facts, docs)]


def free_space(path: Path) -> int:
    return shutil.disk_usage(path).free


def _failed_writes(evidence: Evidence, *, is_error: bool) -> list[str]:
    """Return what could not be written."""
    facts = _said(evidence)[:1] if is_error else []
    for event in evidence.record.events:
        if event["event"] == "save_failed" and _DISK.search(str(event.get("error", ""))):
            step = event.get("step", "?")
            facts.append(f"the checkpoint of step {step} was not written: {event['error']}")
    lines = [line.strip()[:200] for line in evidence.own_lines() if _DISK.search(line)]
    return [*facts[-2:], *(f"slurm.log: {line}" for line in lines[-1:])]
