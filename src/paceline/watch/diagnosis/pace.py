"""Whether the run is slow or hangs, and why: waiting for data, or for a rank."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from paceline.contract.fitness import Judgement, Measurement
from paceline.contract.heartbeat_file import READY, RUNNING
from paceline.spec.findings import GOOD, NOTE, PROBLEM, WARNING, Finding
from paceline.watch.diagnosis.evidence import Evidence
from paceline.watch.diagnosis.resources import THROTTLED
from paceline.watch.metrics import read_data_wait
from paceline.watch.node_usage import MIN_SECONDS, RankSample, slow_ranks

DOCS = "docs/troubleshooting.md"
WAITS = 0.3  # of the time, for data
REST = "the rest of a step is not measured"
FASTER_DATA = (
    "Raise num_workers (with --cpus-per-gpu if all cores are in use), stage the data to the nodes "
    "(--data), or keep small sets on the device (resident)."
)


def check_data(evidence: Evidence) -> list[Finding]:
    """Name the ranks that spend much of their time waiting for the next batch."""
    known = ((rank, _wait_share(samples)) for rank, samples in evidence.ranks.items())
    shares = {rank: share for rank, share in known if share is not None}
    # what rank 0 has written for all ranks: samples of a young or short run say nothing yet
    mean = median(shares.values()) if shares else _mean_wait(evidence)
    if mean is None:
        return []
    waiting = sorted((rank for rank in shares if shares[rank] >= WAITS), key=lambda r: -shares[r])
    fact = f"ranks wait for it {mean:.0%} of the time"
    if not waiting and mean < WAITS:
        return [Finding("data", GOOD, fact)]
    facts = [
        f"rank {rank} on {evidence.host_of_rank(rank)} waits for data {shares[rank]:.0%} of the "
        "time"
        for rank in waiting[:4]
    ]
    hosts = sorted({*map(evidence.host_of_rank, waiting)})
    facts += [
        f"{use.host}: the run uses {use.mean('own_cpu') or 0:.1f} of its "
        f"{use.details.get('own_cores')} cores"
        for use in evidence.usage
        if use.host in hosts
    ][:4]
    where = f" on {', '.join(hosts)}" if mean < WAITS else ""
    text = f"The data loader is slow{where}: ranks wait for it, not for the model."
    docs = f"{DOCS}#waiting-for-data"
    return [Finding("data", WARNING, text, FASTER_DATA, tuple(facts or [fact]), docs)]


def _mean_wait(evidence: Evidence) -> float | None:
    """Return the share of its time that the newest start of the run waits for data, by its
    metrics.
    """
    began = min((float(use.details.get("time", 0)) for use in evidence.usage), default=0.0)
    return read_data_wait(evidence.folder.metrics, since=began, min_seconds=MIN_SECONDS)


def _wait_share(samples: Sequence[RankSample]) -> float | None:
    """Return the share of its time that a rank waits for data; None if it has trained too short."""
    running = [each for each in samples if each.state == RUNNING and each.waited > 0]
    if len(running) < 2 or running[-1].step <= running[0].step:
        return None
    first, last = running[0], running[-1]
    seconds = last.time - first.time
    return min(1.0, (last.waited - first.waited) / seconds) if seconds >= MIN_SECONDS else None


def check_stragglers(evidence: Evidence) -> list[Finding]:
    """Name the ranks that the others wait for, unless data or a throttled node is the reason."""
    own = {rank: samples[-1].own for rank, samples in evidence.ranks.items() if samples[-1].own > 0}
    slow = sorted(find_slow_ranks(evidence).items(), key=lambda item: -item[1])
    if not slow and len(own) > 1:
        text = f"{len(own)} take the same time until they exchange gradients; {REST}"
        return [Finding("ranks", GOOD, text)]
    is_elsewhere = len({agent.host for agent in evidence.agents.values()}) > 1
    found = []
    for rank, ratio in slow[:4]:
        host = evidence.host_of_rank(rank)
        facts = [
            f"rank {rank} takes {ratio:.1f} times as long as the others before it exchanges "
            "gradients"
        ]
        facts += [
            f"{host}: the run uses {use.mean('own_cpu') or 0:.1f} of {use.details.get('cores')} "
            f"cores, which are {use.mean('cpu') or 0:.0f} % busy"
            for use in evidence.usage
            if use.host == host
        ]
        if rank in evidence.stacks:
            facts.append(f"it was at {evidence.stacks[rank].where}")
        hint = (
            "All ranks are on one node: compare what this rank does with what the others do, such "
            "as longer samples."
        )
        if is_elsewhere:
            hint = (
                "Compare the node with the others: start with --fitness. If it is always "
                f"this one: --exclude {host}."
            )
        text = f"Rank {rank} on {host} is slow, and all others wait for it."
        docs = f"{DOCS}#a-slow-node"
        found.append(Finding("straggler", WARNING, text, hint, tuple(facts), docs))
    return found


def find_slow_ranks(evidence: Evidence) -> dict[int, float]:
    """Return ranks that are slow for no known reason, and how much slower they are than the
    others: one that waits for data, or whose node's cores are throttled, is explained.
    """
    throttled = {use.host for use in evidence.usage if (use.mean("throttled") or 0.0) >= THROTTLED}
    found = {}
    for rank, ratio in slow_ranks(evidence.ranks).items():
        share = _wait_share(evidence.ranks[rank])
        share = _mean_wait(evidence) if share is None else share
        if evidence.host_of_rank(rank) not in throttled and (share is None or share < WAITS):
            found[rank] = ratio
    return found


def describe(measured: Sequence[Measurement], found: Sequence[Judgement]) -> list[Finding]:
    """Return what the fitness check has found, and the speeds beside it: a reader wants to
    compare.
    """
    findings = [_judged(each) for each in found]
    unfinished = [each for each in measured if not each.complete]
    if unfinished and not any(each.unfit for each in found):
        findings.append(
            Finding(
                "links",
                WARNING,
                "The ranks could not exchange data in the fitness check.",
                "Check the network between these nodes, and the variables of the interface.",
                tuple(
                    f"rank {each.rank} on {each.host}: {each.error or 'not finished within 30 s'}"
                    for each in unfinished[:8]
                ),
                f"{DOCS}#the-wrong-interface-or-address",
            )
        )
    if measured and (speeds := summarize(measured)):
        findings.append(Finding("fitness", NOTE if findings else GOOD, speeds))
    return findings


def _judged(each: Judgement) -> Finding:
    level, about = (PROBLEM, "slow node") if each.unfit else (WARNING, "links")
    hint = "Compare with other nodes, and see `nvidia-smi topo -m` and `ibstat` there."
    if each.unfit:
        hint = (
            f"Exclude the node (--exclude {each.host}) and report it; a run with --fitness does "
            "this automatically."
        )
    facts = tuple(map(str, each.evidence))
    return Finding(about, level, f"{each.host}: {each.text}.", hint, facts, f"{DOCS}#a-slow-node")


def summarize(measured: Sequence[Measurement]) -> str:
    """Return the speeds in one line."""
    first, parts = measured[0], []
    speeds = [1000 * each.tflops for each in measured if each.tflops > 0]
    links = [speed for each in measured for speed in each.pairs.values()]
    for name, values, unit in (
        (f"{len(speeds)} x {first.device}", speeds, "GFLOP/s"),
        ("exchanges between two nodes", links, "GB/s"),
    ):
        if values:
            low, high = min(values), max(values)
            text = f"{low:.3g}" if high <= 1.05 * low else f"{low:.3g} to {high:.3g}"
            parts.append(f"{name} {text} {unit}")
    return ", ".join(parts)


STUCK_AFTER = 30.0  # seconds without a step, at least
STUCK_STEPS = 20  # steps' worth of time without one
ASLEEP_AFTER = 10.0  # seconds before the first step after which stacks say who is missing
QUIET_AFTER = 30.0  # seconds without output after which ranks that make no steps may hang
# Where ranks wait for others before the process group exists. Some of these functions poll: their
# ranks wake up often.
BEFORE_GROUP = {
    "init_process_group",
    "rendezvous",
    "_create_c10d_store",
    "_store_based_barrier",
    "_tcp_rendezvous_handler",
    "_env_rendezvous_handler",
    "new_group",
    "open_store",
    "gather_placements",
    "meet",
    "wait_for_key",
    "init_process_groups",
    "check_communication",
    "_wait",
}
HELD = ("T", "t", "D")  # the kernel's state letters of a process that cannot go on


def check_hang(evidence: Evidence) -> list[Finding]:
    """Name the ranks that no longer make progress, and where they are."""
    failure = evidence.failure
    if failure.get("cause") in ("hang", "lingered") and not evidence.is_live:
        return [_hang(evidence, str(failure.get("message", "")), [failure.get("rank")])]
    newest = [samples[-1] for samples in evidence.ranks.values()]
    if not evidence.is_live or not newest:
        return []
    running = [each for each in newest if each.state == RUNNING]
    if not running:
        return _without_steps(evidence, newest)
    oldest, seconds_per_step = (
        max(each.age or 0.0 for each in running),
        max(each.seconds_per_step for each in running),
    )
    if oldest < max(STUCK_AFTER, STUCK_STEPS * seconds_per_step):
        step = max(each.step for each in running)
        return [_fine(f"at step {step}, {seconds_per_step:.3g} s per step")]
    lowest = min(each.step for each in running)
    fact = f"no step for {oldest:.0f} s, the last one was {lowest}"
    # An evaluation between two steps, or a long download, is not a hang.
    if (quiet := evidence.seconds_quiet()) is not None and quiet < QUIET_AFTER:
        return [_fine(f"{fact}, but the ranks printed something {quiet:.0f} s ago")]
    behind = [each for each in running if each.step == lowest]
    longest = max(each.age or 0.0 for each in behind)
    stuck = [each.rank for each in behind if longest - (each.age or 0.0) <= 0.5]
    working = [rank for rank in _late_ranks(evidence) or stuck if evidence.works(rank)]
    if not working:
        return [_hang(evidence, fact, stuck)]
    return [
        Finding(
            "progress",
            WARNING,
            f"No step has finished, but {_name(evidence, working, 'is', 'are')} working.",
            "Look at that line. An evaluation or a download may take a while: let it print "
            "something now and then.",
            (fact, *(_place(evidence, rank) for rank in working[:4])),
            f"{DOCS}#it-hangs",
        )
    ]


def _fine(text: str) -> Finding:
    return Finding("progress", GOOD, text)


def _without_steps(evidence: Evidence, newest: Sequence[RankSample]) -> list[Finding]:
    """Before the first step, or without a session, only stacks tell who is missing, and whether
    anybody moves.
    """
    ages = [each.age for each in newest if each.state == READY and each.age is not None]
    if not ages or min(ages) < ASLEEP_AFTER:
        return []
    printed, quiet = "no rank has printed", evidence.seconds_quiet()
    if quiet is not None:
        printed = f"no rank has printed anything for {quiet:.0f} s"
    if quiet is not None and quiet < ASLEEP_AFTER:
        # A script without a session counts no steps. As long as it prints, it does not hang.
        return [_fine(f"no steps are known, but the ranks printed something {quiet:.0f} s ago")]
    late = _late_ranks(evidence)
    if moving := [rank for rank in late if evidence.works(rank)]:
        who = _name(evidence, moving, "is", "are")
        return [_fine(f"no steps are known, {printed}, but {who} working")]
    awake = evidence.told("changed") | evidence.told("awake")
    passing = [
        rank
        for rank, stack in evidence.stacks.items()
        if stack.waits_in and stack.waits_in not in BEFORE_GROUP and rank in awake
    ]
    if passing:
        who = _name(evidence, passing, "goes", "go")
        return [_fine(f"no steps are known, {printed}, but {who} from one collective to the next")]
    if late:
        fact = f"{printed}, and none reports steps, as scripts with a session do"
        return [_hang(evidence, fact, [])]
    return [_fine(f"no step yet, {min(ages):.0f} s after the ranks started")]


def _late_ranks(evidence: Evidence) -> list[int]:
    """Return the ranks that are not where others wait; empty if no stack shows a rank that waits.

    If all stacks that came back are of ranks that wait, the ones without a stack are late.
    """
    waits = {rank: bool(stack.waits_in) for rank, stack in evidence.stacks.items()}
    if not any(waits.values()):
        return []
    known = evidence.told("ranks") if evidence.is_live else evidence.ranks.keys()
    absent = [rank for rank, waiting in waits.items() if not waiting]
    return absent or sorted(known - waits.keys())


def _hang(evidence: Evidence, fact: str, suspects: Sequence[int | None]) -> Finding:
    """Describe a hang. If stacks tell who waits for whom, they decide; otherwise `suspects` do."""
    ranks = _late_ranks(evidence) or [rank for rank in suspects if rank is not None]
    facts = [fact]
    for rank in ranks[:4]:
        facts.append(_place(evidence, rank))
        process = evidence.ranks[rank][-1].process if rank in evidence.ranks else ""
        if process in HELD:
            state = "waits for a disk or device" if process == "D" else "was stopped by a signal"
            facts.append(f"its process {state} (state {process})")
    others = [
        stack.waits_in
        for rank, stack in evidence.stacks.items()
        if rank not in ranks and stack.waits_in
    ]
    text = "The ranks are stuck."
    if others:
        who = "1 other rank waits" if len(others) == 1 else f"{len(others)} other ranks wait"
        facts.append(f"{who} in {others[0]}")
    if ranks:
        text = f"{_name(evidence, ranks, 'is', 'are')} stuck."
    if ranks and others:
        who = _name(evidence, ranks, "has", "have")
        text = f"{who} not reached the point where the others wait."
    if evidence.attempt is not None and evidence.stacks:
        facts.append(f"all stacks: {evidence.attempt.path}/stacks-*.txt")
    has_timeout = evidence.launch_spec is not None and evidence.launch_spec.hang_timeout > 0
    return Finding(
        "hang",
        PROBLEM,
        f"{text[0].upper()}{text[1:]}",
        "Look at that line: every rank must call the same collectives, in the same order."
        + ("" if has_timeout else " --hang-timeout 10m ends and restarts a run that hangs."),
        tuple(filter(None, facts)),
        f"{DOCS}#it-hangs",
    )


def _place(evidence: Evidence, rank: int) -> str:
    """Say where a rank is, or why nobody knows."""
    who = f"rank {rank} on {evidence.host_of_rank(rank)}"
    if rank in evidence.stacks:
        return f"{who} is at {evidence.stacks[rank].where}"
    if rank in evidence.told("foreign"):
        return f"the stack of {who} is not available: the script has its own handler for SIGUSR2"
    return f"{who} has written no stack" if evidence.stacks else ""


def _name(evidence: Evidence, ranks: Sequence[int], *verbs: str) -> str:
    """Return the names of ranks, followed by a verb in the singular or plural."""
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    names = ", ".join(f"{rank} on {evidence.host_of_rank(rank)}" for rank in ranks[:4])
    return f"rank{'s' * (len(ranks) > 1)} {names}{more} {verbs[len(ranks) > 1]}"
