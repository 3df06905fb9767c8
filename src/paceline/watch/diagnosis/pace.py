"""Whether the run is slow, and why: waiting for data, a rank that lags, or one that has stopped."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from paceline.cluster.checks.findings import GOOD, PROBLEM, WARNING, Finding
from paceline.contract.heartbeat_file import READY, RUNNING
from paceline.watch.diagnosis.evidence import Evidence
from paceline.watch.diagnosis.resources import saturated
from paceline.watch.rank_samples import MIN_SECONDS, RankSample, slow_ranks
from paceline.watch.throughput import read_data_wait

DOCS = "docs/troubleshooting.md"
WAITS = 0.3  # of the time, for data
STUCK_AFTER = 30.0  # seconds without a step, at least
STUCK_STEPS = 20  # steps' worth of time without one
FASTER_DATA = "Raise num_workers, stage the data to the nodes (--data), or keep small sets on the device (resident)."
ASLEEP_AFTER = 10.0  # seconds before the first step after which stacks say who is missing


def check_data(evidence: Evidence) -> list[Finding]:
    """Name the ranks that spend much of their time waiting for the next batch."""
    shares = {rank: share for rank, samples in evidence.ranks.items() if (share := _wait_share(samples)) is not None}
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
                "cores", WARNING, "The data loader is short of cores: it has too few per rank.",
                "Ask for more cores (--cpus-per-gpu), and give them to num_workers; or do less work per sample.",
                evidence=(*facts, *(busy[host] for host in hosts[:4])), docs=f"{DOCS}#too-few-cores",
            )
        ]  # fmt: skip
    where = f" on {', '.join(hosts)}" if few else ""
    used = [(use.host, use.mean("own_cpu") or 0, use.details.get("own_cores", "?")) for use in evidence.usage]
    facts += [f"{host}: the run uses {own:.1f} of its {cores} cores" for host, own, cores in used if host in hosts][:4]
    return [
        Finding(
            "data", WARNING, f"The data loader is slow{where}: ranks wait for it, not for the model.",
            FASTER_DATA, evidence=tuple(dict.fromkeys(facts)), docs=f"{DOCS}#waiting-for-data",
        )
    ]  # fmt: skip


def _describe_data_wait(share: float | None) -> list[Finding]:
    """Judge what rank 0 has written for all ranks: the samples of a run that is young or short say nothing yet."""
    if share is None:
        return []
    fact = f"ranks wait for it {share:.0%} of the time"
    if share < WAITS:
        return [Finding("data", GOOD, fact)]
    text = "The data loader is slow: ranks wait for it, not for the model."
    return [Finding("data", WARNING, text, FASTER_DATA, (fact,), f"{DOCS}#waiting-for-data")]


def _mean_wait(evidence: Evidence) -> float | None:
    """Return the share of its time that the newest start of the run waits for data, by its metrics."""
    began = min((float(use.details.get("time", 0)) for use in evidence.usage), default=0.0)
    return read_data_wait(evidence.folder.metrics, since=began, min_seconds=MIN_SECONDS)


def _wait_share(samples: list[RankSample]) -> float | None:
    """Return the share of its time that a rank waits for data; None if it has trained too short."""
    running = [each for each in samples if each.state == RUNNING and each.waited > 0]
    if len(running) < 2 or running[-1].step <= running[0].step:
        return None
    seconds = running[-1].time - running[0].time
    return min(1.0, (running[-1].waited - running[0].waited) / seconds) if seconds >= MIN_SECONDS else None


def check_stragglers(evidence: Evidence) -> list[Finding]:
    """Name the ranks that the others wait for, unless data or a throttled node is the reason."""
    slow = find_slow_ranks(evidence)
    newest = {rank: samples[-1] for rank, samples in evidence.ranks.items()}
    if not slow:
        trained = [each for each in newest.values() if each.own > 0]
        return [Finding("ranks", GOOD, f"{len(trained)} take equally long for a step")] if len(trained) > 1 else []
    found = []
    for rank, ratio in sorted(slow.items(), key=lambda item: -item[1])[:4]:
        host = evidence.host_of_rank(rank)
        facts = [f"rank {rank} takes {ratio:.1f} times as long as the others before it exchanges gradients"]
        if rank in newest and newest[rank].own:
            others = [each.own for each in newest.values() if each.rank != rank and each.own]
            facts.append(f"{newest[rank].own * 1000:.0f} ms of its own per step, {_milliseconds(others)} elsewhere")
        facts += _node_reasons(evidence, host)
        if rank in evidence.stacks:
            facts.append(f"it was at {evidence.stacks[rank].where}")
        compare = (
            f"Compare the node with the others: paceline doctor --fitness RUN. If it is always this one: "
            f"--exclude {host}."
        )
        own = "All ranks are on one node: compare what this rank does with what the others do, such as longer samples."
        found.append(
            Finding(
                "straggler", WARNING, f"Rank {rank} on {host} is slow, and all others wait for it.",
                compare if len({agent.host for agent in evidence.agents.values()}) > 1 else own,
                evidence=tuple(facts), docs=f"{DOCS}#a-slow-node",
            )
        )  # fmt: skip
    return found


def find_slow_ranks(evidence: Evidence) -> dict[int, float]:
    """Return ranks that are slow for no known reason, and how much slower they are than the others."""
    slow = {**slow_ranks(evidence.ranks), **evidence.stragglers}
    return {rank: ratio for rank, ratio in slow.items() if not _is_explained(evidence, rank)}


def _milliseconds(seconds: list[float]) -> str:
    return f"{median(seconds) * 1000:.0f} ms" if seconds else "unknown"


def _is_explained(evidence: Evidence, rank: int) -> bool:
    """Whether a rank is slow because it waits for data, or because its node's cores are throttled."""
    from paceline.watch.diagnosis.resources import THROTTLED

    host = evidence.host_of_rank(rank)
    if any(use.host == host and (use.mean("throttled") or 0.0) >= THROTTLED for use in evidence.usage):
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


def check_hang(evidence: Evidence) -> list[Finding]:
    """Name the ranks that no longer make progress, and where they are."""
    cause = evidence.failure.get("cause")
    if cause in ("hang", "lingered") and not evidence.is_live:
        return [_hang(evidence, str(evidence.failure.get("message", "")), [evidence.failure.get("rank")])]
    newest = {rank: samples[-1] for rank, samples in evidence.ranks.items()}
    if not evidence.is_live or not newest:
        return []
    running = [each for each in newest.values() if each.state == RUNNING]
    if not running:
        return _asleep(evidence, newest)
    oldest = max(each.age or 0.0 for each in running)
    limit = max(STUCK_AFTER, STUCK_STEPS * max(each.seconds_per_step for each in running))
    if oldest < limit:
        steps = sorted({each.step for each in running})
        return [Finding("progress", GOOD, f"at step {steps[-1]}, {running[0].seconds_per_step:.3g} s per step")]
    lowest = min(each.step for each in running)
    behind = [each for each in running if each.step == lowest]
    oldest_behind = max(each.age or 0.0 for each in behind)
    stuck = [each.rank for each in behind if oldest_behind - (each.age or 0.0) <= 0.5]
    return [_hang(evidence, f"no step for {oldest:.0f} s, the last one was {lowest}", stuck)]


def _asleep(evidence: Evidence, newest: dict[int, RankSample]) -> list[Finding]:
    """Before the first step, only stacks tell who is missing: the ranks that do not wait for the others."""
    ages = [each.age for each in newest.values() if each.state == READY and each.age is not None]
    if not ages or min(ages) < ASLEEP_AFTER:
        return []
    waiting = [rank for rank, stack in evidence.stacks.items() if stack.waits_in]
    if (silent := evidence.seconds_silent()) is not None and silent < ASLEEP_AFTER:
        # A script without a session counts no steps. As long as it prints, it does not hang.
        return [Finding("progress", GOOD, f"no steps are known, but the ranks printed something {silent:.0f} s ago")]
    if waiting and len(waiting) < len(evidence.stacks):
        printed = f"no rank has printed anything for {silent:.0f} s" if silent is not None else "no rank has printed"
        return [_hang(evidence, f"{printed}, and none reports steps, as scripts with a session do", [])]
    return [Finding("progress", GOOD, f"no step yet, {min(ages):.0f} s after the ranks started")]


def _hang(evidence: Evidence, fact: str, suspects: Sequence[int | None]) -> Finding:
    """Describe a hang. If stacks tell who waits for whom, they decide; otherwise `suspects` do."""
    waits = {rank: stack.waits_in for rank, stack in evidence.stacks.items()}
    absent = [rank for rank, function in waits.items() if not function]
    ranks = absent if absent and len(absent) < len(waits) else [rank for rank in suspects if rank is not None]
    facts = [fact]
    for rank in ranks[:4]:
        if rank in evidence.stacks:
            facts.append(f"rank {rank} on {evidence.host_of_rank(rank)} is at {evidence.stacks[rank].where}")
        process = evidence.ranks[rank][-1].process if rank in evidence.ranks else ""
        if process in ("T", "t", "D"):
            state = "waits for a disk or device" if process == "D" else "was stopped by a signal"
            facts.append(f"its process {state} (state {process})")
    others = [(rank, function) for rank, function in waits.items() if rank not in ranks and function]
    if others:
        facts.append(
            f"{len(others)} other rank{'s' * (len(others) > 1)} wait{'s' * (len(others) == 1)} in {others[0][1]}"
        )
    names = ", ".join(f"{rank} on {evidence.host_of_rank(rank)}" for rank in ranks[:4])
    who = f"Rank {names} has not arrived where the others wait" if others and ranks else f"Rank {names} is stuck"
    text = f"{who if ranks else 'The ranks are stuck'}."
    if evidence.attempt is not None and evidence.stacks:
        facts.append(f"all stacks: {evidence.attempt.path}/stacks-*.txt")
    has_timeout = evidence.launch_spec is not None and evidence.launch_spec.hang_timeout > 0
    return Finding(
        "hang", PROBLEM, text,
        "Look at that line: every rank must call the same collectives, in the same order."
        + ("" if has_timeout else " --hang-timeout 10m ends and restarts a run that hangs."),
        evidence=tuple(facts), docs=f"{DOCS}#it-hangs",
    )  # fmt: skip
