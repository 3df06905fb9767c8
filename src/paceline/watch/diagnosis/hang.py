"""Whether the ranks hang, and which one the others wait for."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.contract.foreign_records import read_bounded
from paceline.contract.heartbeat_file import READY, RUNNING
from paceline.contract.run_folder import FLIGHT_RECORDER
from paceline.spec.findings import GOOD, PROBLEM, WARNING, Finding
from paceline.watch.diagnosis.evidence import Evidence
from paceline.watch.node_usage import RankSample

DOCS = "docs/troubleshooting.md"
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
    cause = evidence.failure.get("cause")
    if cause in ("hang", "lingered") and not evidence.is_live:
        return [
            _hang(
                evidence, str(evidence.failure.get("message", "")), [evidence.failure.get("rank")]
            )
        ]
    newest = {rank: samples[-1] for rank, samples in evidence.ranks.items()}
    if not evidence.is_live or not newest:
        return []
    running = [each for each in newest.values() if each.state == RUNNING]
    if not running:
        return _without_steps(evidence, newest)
    oldest = max(each.age or 0.0 for each in running)
    limit = max(STUCK_AFTER, STUCK_STEPS * max(each.seconds_per_step for each in running))
    if oldest < limit:
        steps = sorted({each.step for each in running})
        return [
            Finding(
                "progress",
                GOOD,
                f"at step {steps[-1]}, {running[0].seconds_per_step:.3g} s per step",
            )
        ]
    lowest = min(each.step for each in running)
    behind = [each for each in running if each.step == lowest]
    oldest_behind = max(each.age or 0.0 for each in behind)
    stuck = [each.rank for each in behind if oldest_behind - (each.age or 0.0) <= 0.5]
    fact = f"no step for {oldest:.0f} s, the last one was {lowest}"
    # An evaluation between two steps, or a long download, is not a hang.
    if (silent := evidence.seconds_silent()) is not None and silent < QUIET_AFTER:
        return [
            Finding("progress", GOOD, f"{fact}, but the ranks printed something {silent:.0f} s ago")
        ]
    suspects = _late_ranks(evidence) or stuck
    if working := [rank for rank in suspects if evidence.motion.works(rank)]:
        return [_long_step(evidence, fact, working)]
    return [_hang(evidence, fact, stuck)]


def _long_step(evidence: Evidence, fact: str, working: list[int]) -> Finding:
    """Describe ranks that are busy with something that is not a step."""
    facts = [fact, *(_place(evidence, rank) for rank in working[:4])]
    return Finding(
        "progress",
        WARNING,
        f"No step has finished, but {_name(evidence, working, 'is', 'are')} working.",
        "Look at that line. An evaluation or a download may take a while: let it print something "
        "now and then.",
        evidence=tuple(facts),
        docs=f"{DOCS}#it-hangs",
    )


def _without_steps(evidence: Evidence, newest: dict[int, RankSample]) -> list[Finding]:
    """Before the first step, or without a session, only stacks tell who is missing, and whether
    anybody moves.
    """
    ages = [each.age for each in newest.values() if each.state == READY and each.age is not None]
    if not ages or min(ages) < ASLEEP_AFTER:
        return []
    if (silent := evidence.seconds_silent()) is not None and silent < ASLEEP_AFTER:
        # A script without a session counts no steps. As long as it prints, it does not hang.
        return [
            Finding(
                "progress",
                GOOD,
                f"no steps are known, but the ranks printed something {silent:.0f} s ago",
            )
        ]
    late, motion = _late_ranks(evidence), evidence.motion
    printed = (
        f"no rank has printed anything for {silent:.0f} s"
        if silent is not None
        else "no rank has printed"
    )
    if moving := [rank for rank in late if motion.works(rank)]:
        who = _name(evidence, moving, "is", "are")
        return [Finding("progress", GOOD, f"no steps are known, {printed}, but {who} working")]
    waiting = {
        rank: stack.waits_in
        for rank, stack in evidence.stacks.items()
        if stack.waits_in not in BEFORE_GROUP
    }
    if passing := [rank for rank, function in waiting.items() if function and motion.passes(rank)]:
        who = _name(evidence, passing, "goes", "go")
        return [
            Finding(
                "progress",
                GOOD,
                f"no steps are known, {printed}, but {who} from one collective to the next",
            )
        ]
    if late:
        return [
            _hang(evidence, f"{printed}, and none reports steps, as scripts with a session do", [])
        ]
    why = "; their stacks are not available: the script has its own handler for SIGUSR2" * bool(
        motion.foreign
    )
    return [
        Finding("progress", GOOD, f"no step yet, {min(ages):.0f} s after the ranks started{why}")
    ]


def _late_ranks(evidence: Evidence) -> list[int]:
    """Return the ranks that are not where others wait; empty if no stack shows a rank that waits.

    If all stacks that came back are of ranks that wait, the ones without a stack are late.
    """
    waits = {rank: bool(stack.waits_in) for rank, stack in evidence.stacks.items()}
    if not any(waits.values()):
        return []
    absent = [rank for rank, waiting in waits.items() if not waiting]
    known = evidence.motion.present if evidence.is_live else evidence.ranks
    return absent or sorted(rank for rank in known if rank not in waits)


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
    waits = {rank: stack.waits_in for rank, stack in evidence.stacks.items()}
    others = [
        (rank, function) for rank, function in waits.items() if rank not in ranks and function
    ]
    if others:
        facts.append(
            f"{len(others)} other rank{'s' * (len(others) > 1)} wait{'s' * (len(others) == 1)} in "
            f"{others[0][1]}"
        )
    text = "the ranks are stuck."
    if ranks:
        verb, rest = ("is", "are"), "stuck"
        if others:
            verb, rest = ("has", "have"), "not reached the point where the others wait"
        text = f"{_name(evidence, ranks, *verb)} {rest}."
    if evidence.attempt is not None and evidence.stacks:
        facts.append(f"all stacks: {evidence.attempt.path}/stacks-*.txt")
    has_timeout = evidence.launch_spec is not None and evidence.launch_spec.hang_timeout > 0
    return Finding(
        "hang",
        PROBLEM,
        f"{text[0].upper()}{text[1:]}",
        "Look at that line: every rank must call the same collectives, in the same order."
        + ("" if has_timeout else " --hang-timeout 10m ends and restarts a run that hangs."),
        evidence=tuple(filter(None, facts)),
        docs=f"{DOCS}#it-hangs",
    )


def _place(evidence: Evidence, rank: int) -> str:
    """Say where a rank is, or why nobody knows."""
    who = f"rank {rank} on {evidence.host_of_rank(rank)}"
    if rank in evidence.stacks:
        return f"{who} is at {evidence.stacks[rank].where}"
    if rank in evidence.motion.foreign:
        return f"the stack of {who} is not available: the script has its own handler for SIGUSR2"
    return f"{who} has written no stack" if evidence.stacks else ""


def _name(evidence: Evidence, ranks: Sequence[int], *verbs: str) -> str:
    """Return the names of ranks, followed by a verb in the singular or plural."""
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    names = ", ".join(f"{rank} on {evidence.host_of_rank(rank)}" for rank in ranks[:4])
    return f"rank{'s' * (len(ranks) > 1)} {names}{more} {verbs[len(ranks) > 1]}"


MAX_DUMP = 64 << 20  # bytes


class _Plain(pickle.Unpickler):
    """Reads numbers, texts, lists and dictionaries, and refuses everything that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a dump")


def read_dump(path: Path) -> list[dict[str, Any]]:
    """Return the collectives in a dump, oldest first; empty if it cannot be read."""
    try:
        dump = _Plain(io.BytesIO(read_bounded(path, MAX_DUMP))).load()
        return [entry for entry in dump["entries"] if isinstance(entry, dict)]
    except (OSError, ValueError, KeyError, TypeError, EOFError, IndexError, pickle.UnpicklingError):
        return []


def check_flight_recorder(evidence: Evidence) -> list[Finding]:
    """Compare the last collective of each rank."""
    if evidence.attempt is None:
        return []
    dumps = {}
    for path in evidence.attempt.path.glob(f"{FLIGHT_RECORDER}*"):
        rank = path.name.removeprefix(FLIGHT_RECORDER)
        entries = read_dump(path) if rank.isdigit() else []
        if entries:
            dumps[int(rank)] = entries
    last = {rank: _last_collective(entries) for rank, entries in sorted(dumps.items())}
    known = {rank: entry for rank, entry in last.items() if entry is not None}
    if len(known) < 2:
        return []
    newest = max(entry["collective_seq_id"] for entry in known.values())
    behind = {rank: entry for rank, entry in known.items() if entry["collective_seq_id"] < newest}
    names = {str(entry.get("profiling_name")) for entry in known.values()}
    ahead = next(entry for entry in known.values() if entry["collective_seq_id"] == newest)
    facts = [_describe(rank, entry, evidence) for rank, entry in list(known.items())[:8]]
    if behind:
        ranks = ", ".join(f"{rank} on {evidence.host_of_rank(rank)}" for rank in list(behind)[:8])
        text = (
            f"Rank {ranks} did not take part in collective {newest} "
            f"({ahead.get('profiling_name')})."
        )
    elif len(names) > 1:
        text = (
            f"The ranks called different collectives at number {newest}: "
            f"{', '.join(sorted(names))}."
        )
    else:
        return []
    return [
        Finding(
            "NCCL",
            PROBLEM,
            text,
            "Every rank must call the same collectives, in the same order: look at these lines.",
            evidence=tuple(facts),
            docs=f"{DOCS}#nccls-flight-recorder",
        )
    ]


def _last_collective(entries: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the newest collective of the default process group."""
    known = [
        entry
        for entry in entries
        if isinstance(entry.get("collective_seq_id"), int) and not entry.get("is_p2p")
    ]
    groups = [str(entry.get("pg_id", 0)) for entry in known]
    first = [entry for entry, group in zip(known, groups, strict=True) if group == min(groups)]
    return max(first, key=lambda entry: entry["collective_seq_id"], default=None)


def _describe(rank: int, entry: dict[str, Any], evidence: Evidence) -> str:
    frames = entry.get("frames")
    where = ""
    for frame in frames if isinstance(frames, list) else []:
        if isinstance(frame, dict) and "site-packages" not in (
            name := str(frame.get("filename", ""))
        ):
            where = f", at {name.rpartition('/')[2]}:{frame.get('line')}"
            break
    text = f"{entry['collective_seq_id']} ({entry.get('profiling_name')}, {entry.get('state')})"
    return f"rank {rank} on {evidence.host_of_rank(rank)}: its last collective is {text}{where}"
