"""Whether the run is slow, and why: waiting for data, or a rank that lags."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from paceline.contract.fitness import Judgement, Measurement, expected_between
from paceline.contract.foreign_records import make, read_object
from paceline.contract.heartbeat_file import RUNNING
from paceline.spec.findings import GOOD, NOTE, PROBLEM, WARNING, Finding
from paceline.watch.diagnosis.evidence import Evidence
from paceline.watch.diagnosis.resources import THROTTLED, saturated
from paceline.watch.latest import read_data_wait
from paceline.watch.node_usage import MIN_SECONDS, RankSample, slow_ranks

DOCS = "docs/troubleshooting.md"
WAITS = 0.3  # of the time, for data
REST = "the rest of a step is not measured"
FASTER_DATA = (
    "Raise num_workers, stage the data to the nodes (--data), or keep small sets on the "
    "device (resident)."
)


def check_data(evidence: Evidence) -> list[Finding]:
    """Name the ranks that spend much of their time waiting for the next batch."""
    known = ((rank, _wait_share(samples)) for rank, samples in evidence.ranks.items())
    shares = {rank: share for rank, share in known if share is not None}
    # what rank 0 has written for all ranks: samples of a young or short run say nothing yet
    mean = median(shares.values()) if shares else _mean_wait(evidence)
    if mean is None:
        return []
    waiting = {rank: share for rank, share in shares.items() if share >= WAITS}
    fact = f"ranks wait for it {mean:.0%} of the time"
    if not waiting and mean < WAITS:
        return [Finding("data", GOOD, fact)]
    few = bool(shares) and mean < WAITS and len(waiting) < len(shares)
    facts = [
        f"rank {rank} on {evidence.host_of_rank(rank)} waits for data {share:.0%} of the time"
        for rank, share in sorted(waiting.items(), key=lambda item: -item[1])[:4]
    ] or [fact]
    if few:
        facts.append(f"half of the ranks wait no more than {mean:.0%}")
    busy = saturated(evidence)
    hosts = sorted({evidence.host_of_rank(rank) for rank in waiting})
    if hosts and all(host in busy for host in hosts):
        return [
            Finding(
                "cores",
                WARNING,
                "The data loader is short of cores: it has too few per rank.",
                "Ask for more cores (--cpus-per-gpu), and give them to num_workers; or do less "
                "work per sample.",
                (*facts, *(busy[host] for host in hosts[:4])),
                f"{DOCS}#too-few-cores",
            )
        ]
    for use in [use for use in evidence.usage if use.host in hosts][:4]:
        own, cores = use.mean("own_cpu") or 0, use.details.get("own_cores", "?")
        facts.append(f"{use.host}: the run uses {own:.1f} of its {cores} cores")
    where = f" on {', '.join(hosts)}" if few else ""
    return [
        Finding(
            "data",
            WARNING,
            f"The data loader is slow{where}: ranks wait for it, not for the model.",
            FASTER_DATA,
            tuple(dict.fromkeys(facts)),
            f"{DOCS}#waiting-for-data",
        )
    ]


def _mean_wait(evidence: Evidence) -> float | None:
    """Return the share of its time that the newest start of the run waits for data, by its
    metrics.
    """
    began = min((float(use.details.get("time", 0)) for use in evidence.usage), default=0.0)
    return read_data_wait(evidence.folder.metrics, since=began, min_seconds=MIN_SECONDS)


def _wait_share(samples: list[RankSample]) -> float | None:
    """Return the share of its time that a rank waits for data; None if it has trained too short."""
    running = [each for each in samples if each.state == RUNNING and each.waited > 0]
    if len(running) < 2 or running[-1].step <= running[0].step:
        return None
    seconds = running[-1].time - running[0].time
    return (
        min(1.0, (running[-1].waited - running[0].waited) / seconds)
        if seconds >= MIN_SECONDS
        else None
    )


def check_stragglers(evidence: Evidence) -> list[Finding]:
    """Name the ranks that the others wait for, unless data or a throttled node is the reason."""
    slow = find_slow_ranks(evidence)
    newest = {rank: samples[-1] for rank, samples in evidence.ranks.items()}
    own = {rank: each.own for rank, each in newest.items() if each.own > 0}
    if not slow and len(own) > 1:
        text = f"{len(own)} take the same time until they exchange gradients; {REST}"
        return [Finding("ranks", GOOD, text)]
    return [
        _straggler(evidence, rank, ratio, own)
        for rank, ratio in sorted(slow.items(), key=lambda item: -item[1])[:4]
    ]


def _straggler(evidence: Evidence, rank: int, ratio: float, own: dict[int, float]) -> Finding:
    host = evidence.host_of_rank(rank)
    facts = [
        f"rank {rank} takes {ratio:.1f} times as long as the others before it exchanges gradients"
    ]
    others = [each for other, each in own.items() if other != rank]
    if rank in own:
        elsewhere = f"{median(others) * 1000:.0f} ms" if others else "unknown"
        facts.append(f"{own[rank] * 1000:.0f} ms of its own time per step, {elsewhere} elsewhere")
    facts += _node_reasons(evidence, host)
    if rank in evidence.stacks:
        facts.append(f"it was at {evidence.stacks[rank].where}")
    hint = (
        "All ranks are on one node: compare what this rank does with what the others do, such as "
        "longer samples."
    )
    if len({agent.host for agent in evidence.agents.values()}) > 1:
        hint = (
            "Compare the node with the others: paceline doctor --fitness RUN. If it is always "
            f"this one: --exclude {host}."
        )
    text = f"Rank {rank} on {host} is slow, and all others wait for it."
    return Finding("straggler", WARNING, text, hint, tuple(facts), f"{DOCS}#a-slow-node")


def find_slow_ranks(evidence: Evidence) -> dict[int, float]:
    """Return ranks that are slow for no known reason, and how much slower they are than the
    others.
    """
    slow = {**slow_ranks(evidence.ranks), **evidence.stragglers}
    return {rank: ratio for rank, ratio in slow.items() if not _is_explained(evidence, rank)}


def _is_explained(evidence: Evidence, rank: int) -> bool:
    """Whether a rank is slow because it waits for data, or because its node's cores are
    throttled.
    """
    host = evidence.host_of_rank(rank)
    if any(
        use.host == host and (use.mean("throttled") or 0.0) >= THROTTLED for use in evidence.usage
    ):
        return True
    share = _wait_share(evidence.ranks.get(rank, []))
    share = _mean_wait(evidence) if share is None else share
    return share is not None and share >= WAITS


def _node_reasons(evidence: Evidence, host: str) -> list[str]:
    found = []
    for use in evidence.usage:
        cores, cpu, own = use.details.get("cores"), use.mean("cpu"), use.mean("own_cpu")
        if use.host == host and isinstance(cores, int) and cpu is not None and own is not None:
            other = cpu * cores / 100 - own
            if other > 0.3 * cores:
                found.append(f"other processes on {host} use {other:.1f} of its {cores} cores")
    return found


def check_fitness(evidence: Evidence) -> list[Finding]:
    """Repeat what the fitness check of the newest job start has found."""
    try:
        record = read_object(evidence.folder.fitness)
        measured = [make(Measurement, each) for each in record["ranks"]]
        found = [
            make(Judgement, {**each, "evidence": tuple(map(str, each["evidence"]))})
            for each in record["found"]
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return describe(measured, found)


def describe(measured: Sequence[Measurement], found: Sequence[Judgement]) -> list[Finding]:
    if not measured:
        return []
    findings = [_finding(each) for each in found]
    unfinished = [each for each in measured if not each.complete]
    if unfinished and not any(each.unfit for each in found):
        facts = tuple(
            f"rank {each.rank} on {each.host}: {each.error or 'not finished within 30 s'}"
            for each in unfinished[:8]
        )
        findings.append(
            Finding(
                "links",
                WARNING,
                "The ranks could not exchange data in the fitness check.",
                "Check the network between these nodes, and the variables of the interface.",
                evidence=facts,
                docs=f"{DOCS}#the-wrong-interface-or-address",
            )
        )
    speeds = summarize(measured)  # also beside what is slow: a reader wants to compare
    return (
        [*findings, Finding("fitness", NOTE if findings else GOOD, speeds)]
        if speeds or not findings
        else findings
    )


def _finding(each: Judgement) -> Finding:
    level, about = (PROBLEM, "slow node") if each.unfit else (WARNING, "links")
    return Finding(
        about,
        level,
        f"{each.host}: {each.text}.",
        f"Exclude the node (--exclude {each.host}) and report it; a run with --fitness does this "
        "automatically."
        if each.unfit
        else "Compare with other nodes, and see `nvidia-smi topo -m` and `ibstat` there.",
        evidence=tuple(map(str, each.evidence)),
        docs=f"{DOCS}#a-slow-node",
    )


def summarize(measured: Sequence[Measurement]) -> str:
    """Return the speeds in one line, beside what the link between nodes should give."""
    speeds = [each.tflops for each in measured if each.tflops > 0]
    parts = (
        [
            f"{len(speeds)} x {measured[0].device} "
            f"{_range([1000 * each for each in speeds], 'GFLOP/s')}"
        ]
        if speeds
        else []
    )
    within = [each.within for each in measured if each.within]
    between = [each.between for each in measured if each.between]
    if within:
        parts.append(f"all-reduce within a node {_range(within, 'GB/s')}")
    if between:
        expected = expected_between(measured[0])
        about = f" (about {expected:.1f} expected)" if expected else ""
        parts.append(f"all-reduce between nodes {_range(between, 'GB/s')}{about}")
    return ", ".join(parts)


def _range(values: Sequence[float], unit: str) -> str:
    low, high = min(values), max(values)
    return f"{low:.3g} {unit}" if high <= 1.05 * low else f"{low:.3g} to {high:.3g} {unit}"
