"""Whether the run is slow, and why: waiting for data, or a rank that lags."""

from __future__ import annotations

from statistics import median

from paceline.contract.findings import GOOD, WARNING, Finding
from paceline.contract.heartbeat_file import RUNNING
from paceline.watch.diagnosis.evidence import Evidence
from paceline.watch.diagnosis.resources import saturated
from paceline.watch.rank_samples import MIN_SECONDS, RankSample, slow_ranks
from paceline.watch.throughput import read_data_wait

DOCS = "docs/troubleshooting.md"
WAITS = 0.3  # of the time, for data
REST = "the rest of a step is not measured"
FASTER_DATA = (
    "Raise num_workers, stage the data to the nodes (--data), or keep small sets on the "
    "device (resident)."
)


def check_data(evidence: Evidence) -> list[Finding]:
    """Name the ranks that spend much of their time waiting for the next batch."""
    shares = {
        rank: share
        for rank, samples in evidence.ranks.items()
        if (share := _wait_share(samples)) is not None
    }
    if not shares:
        return _describe_data_wait(_mean_wait(evidence))
    typical = median(shares.values())
    waiting = {rank: share for rank, share in shares.items() if share >= WAITS}
    if not waiting:
        return [Finding("data", GOOD, f"ranks wait for it {typical:.0%} of the time")]
    few = typical < WAITS and len(waiting) < len(shares)
    facts = [
        f"rank {rank} on {evidence.host_of_rank(rank)} waits for data {share:.0%} of the time"
        for rank, share in sorted(waiting.items(), key=lambda item: -item[1])[:4]
    ]
    if few:
        facts.append(f"half of the ranks wait no more than {typical:.0%}")
    busy = saturated(evidence)
    hosts = sorted({evidence.host_of_rank(rank) for rank in waiting})
    if all(host in busy for host in hosts):
        return [
            Finding(
                "cores",
                WARNING,
                "The data loader is short of cores: it has too few per rank.",
                "Ask for more cores (--cpus-per-gpu), and give them to num_workers; or do less "
                "work per sample.",
                evidence=(*facts, *(busy[host] for host in hosts[:4])),
                docs=f"{DOCS}#too-few-cores",
            )
        ]
    where = f" on {', '.join(hosts)}" if few else ""
    used = [
        (use.host, use.mean("own_cpu") or 0, use.details.get("own_cores", "?"))
        for use in evidence.usage
    ]
    facts += [
        f"{host}: the run uses {own:.1f} of its {cores} cores"
        for host, own, cores in used
        if host in hosts
    ][:4]
    return [
        Finding(
            "data",
            WARNING,
            f"The data loader is slow{where}: ranks wait for it, not for the model.",
            FASTER_DATA,
            evidence=tuple(dict.fromkeys(facts)),
            docs=f"{DOCS}#waiting-for-data",
        )
    ]


def _describe_data_wait(share: float | None) -> list[Finding]:
    """Judge what rank 0 has written for all ranks: the samples of a run that is young or short say
    nothing yet.
    """
    if share is None:
        return []
    fact = f"ranks wait for it {share:.0%} of the time"
    if share < WAITS:
        return [Finding("data", GOOD, fact)]
    text = "The data loader is slow: ranks wait for it, not for the model."
    return [Finding("data", WARNING, text, FASTER_DATA, (fact,), f"{DOCS}#waiting-for-data")]


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
    if not slow:
        trained = [each for each in newest.values() if each.own > 0]
        return (
            [
                Finding(
                    "ranks",
                    GOOD,
                    f"{len(trained)} take the same time until they exchange gradients; {REST}",
                )
            ]
            if len(trained) > 1
            else []
        )
    found = []
    for rank, ratio in sorted(slow.items(), key=lambda item: -item[1])[:4]:
        host = evidence.host_of_rank(rank)
        facts = [
            f"rank {rank} takes {ratio:.1f} times as long as the others before it exchanges "
            "gradients"
        ]
        if rank in newest and newest[rank].own:
            others = [each.own for each in newest.values() if each.rank != rank and each.own]
            facts.append(
                f"{newest[rank].own * 1000:.0f} ms of its own time per step, "
                f"{_milliseconds(others)} elsewhere"
            )
        facts += _node_reasons(evidence, host)
        if rank in evidence.stacks:
            facts.append(f"it was at {evidence.stacks[rank].where}")
        compare = (
            "Compare the node with the others: paceline doctor --fitness RUN. If it is always "
            "this one: "
            f"--exclude {host}."
        )
        own = (
            "All ranks are on one node: compare what this rank does with what the others do, "
            "such as longer samples."
        )
        found.append(
            Finding(
                "straggler",
                WARNING,
                f"Rank {rank} on {host} is slow, and all others wait for it.",
                compare if len({agent.host for agent in evidence.agents.values()}) > 1 else own,
                evidence=tuple(facts),
                docs=f"{DOCS}#a-slow-node",
            )
        )
    return found


def find_slow_ranks(evidence: Evidence) -> dict[int, float]:
    """Return ranks that are slow for no known reason, and how much slower they are than the
    others.
    """
    slow = {**slow_ranks(evidence.ranks), **evidence.stragglers}
    return {rank: ratio for rank, ratio in slow.items() if not _is_explained(evidence, rank)}


def _milliseconds(seconds: list[float]) -> str:
    return f"{median(seconds) * 1000:.0f} ms" if seconds else "unknown"


def _is_explained(evidence: Evidence, rank: int) -> bool:
    """Whether a rank is slow because it waits for data, or because its node's cores are
    throttled.
    """
    from paceline.watch.diagnosis.resources import THROTTLED

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
