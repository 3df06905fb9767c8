"""What the nodes have: versions, GPUs and cores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from paceline.spec.findings import GOOD, PROBLEM, WARNING, Finding
from paceline.watch.diagnosis.evidence import Evidence
from paceline.watch.failure import name_failure

DOCS = "docs/troubleshooting.md"
VERSIONS = {
    "torch": "torch",
    "nccl": "NCCL",
    "python": "Python",
    "paceline": "Paceline",
    "gpu_driver": "the GPU driver",
}
BUSY = 0.9  # of a node's own cores
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
    spec, failure, docs = evidence.launch_spec, evidence.failure, f"{DOCS}#gpus-and-ranks"
    if spec is None or spec.gpus <= 0:
        return []
    message = str(failure.get("message", ""))
    if failure.get("type") == "DeviceError" or "Duplicate GPU detected" in message:
        return [
            Finding(
                "GPUs",
                PROBLEM,
                "Two ranks use the same GPU.",
                "Let Paceline set the device (session, or LOCAL_RANK), start one rank per GPU "
                "(--nproc), and do not set CUDA_VISIBLE_DEVICES in the script.",
                (f"{name_failure(failure)}: {message[:300]}",),
                docs,
            )
        ]
    short: dict[str, list[str]] = {}
    names = set()
    for use in evidence.usage:
        shown = use.details.get("gpus")
        names |= {str(gpu.get("name", "GPU")) for gpu in shown or []}
        if isinstance(shown, list) and len(shown) < min(spec.gpus, spec.nproc):
            fact = f"the driver (NVML) shows {len(shown)} of the {spec.gpus} GPUs requested"
            short.setdefault(use.host, []).append(f"{use.host}: {fact}")
    for agent in evidence.agents.values():
        ranks = max(len(agent.node.get("ranks") or []), 1)
        for key, what in (
            ("slurm_gpus", "Slurm granted"),
            ("visible_gpus", "the environment shows"),
        ):
            count, one_each = agent.node.get(key), spec.one_gpu_per_rank and key == "visible_gpus"
            needed = 1 if one_each else min(spec.gpus, ranks)
            if isinstance(count, int) and count < needed:
                fact = f"{agent.host}: {what} {count} of the {needed} GPUs needed"
                short.setdefault(agent.host, []).append(fact)
    if not short:
        kinds = " ".join(sorted(names))
        return [
            Finding("GPUs", GOOD, f"{spec.gpus} per node for {spec.nproc} ranks {kinds}".strip())
        ]
    return [
        Finding(
            "GPUs",
            PROBLEM,
            f"{', '.join(short)} has fewer GPUs than ranks.",
            "Look at `nvidia-smi` and `dmesg | grep Xid` there: a GPU may have fallen off the "
            f"bus. Exclude the node (--exclude {','.join(short)}) and report it.",
            tuple(fact for facts in short.values() for fact in dict.fromkeys(facts)),
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
        for number in range(max(map(len, listed), default=0)):
            samples = [
                gpus[number]
                for gpus in listed
                if number < len(gpus) and isinstance(gpus[number], dict)
            ]
            found += _unhealthy(use.host, number, samples)
    return found


def _unhealthy(host: str, number: int, samples: list[dict[str, Any]]) -> list[Finding]:
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
        use.host: share
        for use in evidence.usage
        if len(use.samples) >= MIN_SAMPLES and (share := use.mean("throttled") or 0.0) >= THROTTLED
    }
    if throttled:
        facts = [
            f"{host}: the kernel held the job back in {share:.0f} % of all periods (cgroup "
            "cpu.stat)"
            for host, share in throttled.items()
        ]
        facts += [
            f"{use.host}: {use.mean('own_cpu') or 0:.1f} of {use.details.get('own_cores', '?')} "
            "cores in use"
            for use in evidence.usage
            if use.host in throttled
        ]
        return [
            Finding(
                "throttled",
                WARNING,
                f"The cores of {', '.join(throttled)} are throttled: a limit of CPU time holds "
                "the ranks back.",
                "Ask for more cores (--cpus-per-gpu), or exclude the node: --exclude "
                f"{','.join(throttled)}.",
                evidence=tuple(facts),
                docs=f"{DOCS}#a-slow-node",
            )
        ]
    counts = _cores_and_ranks(evidence)
    few = {
        host: f"{host}: {ranks} ranks on {cpus} cores"
        for host, (cpus, ranks) in counts.items()
        if 0 < cpus < ranks
    }
    if few:
        return [
            Finding(
                "cores",
                WARNING,
                f"The ranks of {', '.join(few)} share cores.",
                "Ask for at least one core per rank, and for data-loader workers on top: "
                "--cpus-per-gpu.",
                evidence=tuple(few.values()),
                docs=f"{DOCS}#too-few-cores",
            )
        ]
    if not counts:
        return []  # no agent has begun yet
    texts = {f"{cpus} for {ranks} rank{'s' * (ranks != 1)}" for cpus, ranks in counts.values()}
    return [Finding("cores", GOOD, ", ".join(sorted(texts)))]


def _cores_and_ranks(evidence: Evidence) -> dict[str, tuple[int, int]]:
    """Return how many cores and ranks each node has. Agents that `paceline run --nodes` starts
    share their cores.
    """
    found: dict[str, tuple[int, int]] = {}
    for agent in evidence.agents.values():
        cpus, ranks = agent.node.get("cpus"), len(agent.node.get("ranks") or [])
        if isinstance(cpus, int):
            known, others = found.get(agent.host, (0, 0))
            cores = max(known, cpus) if evidence.record.job is None else known + cpus
            found[agent.host] = (cores, others + ranks)
    return found


def saturated(evidence: Evidence) -> dict[str, str]:
    """Return the nodes whose ranks use all of their cores."""
    found = {}
    for use in evidence.usage:
        cores, used = use.details.get("own_cores"), use.mean("own_cpu")
        if (
            isinstance(cores, int)
            and used is not None
            and len(use.samples) >= MIN_SAMPLES
            and used >= BUSY * cores
        ):
            found[use.host] = f"{use.host}: the run uses {used:.1f} of its {cores} cores"
    return found
