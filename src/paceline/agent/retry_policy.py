"""The retry policy: whether to try again after a failed attempt, here or in another job start.

Decisions are pure: what happened so far goes in, a decision comes out. The rules, in order:

1. A node was lost or failed preflight, or ranks on it were killed, crashed or hung in two attempts:
  not in this
   allocation. Requeue without that node, if there is a queue.
2. The user asked for no restarts: no.
3. Some ranks had exited, and the rest lingered: no. The program may be complete.
4. The program failed on its own before its first step: no. After another cause it is tried once
  more.
5. The same error at the same step, twice: no.
6. Each attempt of this job start that did not advance the checkpoint uses one of `max_restarts`.
  When none are left:
   no. Requeue, if there is a queue, unless the program failed on its own.
7. A stop was requested: no. Requeue, if there is a queue: the next job start may try again.
8. Otherwise yes: at once the first time, then after a delay that doubles.

A run whose checkpoint did not advance in several job starts in a row is not requeued after a
failure.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields

from paceline.contract.run_folder import FAILED, STOPPED, AttemptFolder, RunFolder, write_atomically

# Causes of a failed attempt.
ERROR = "error"  # a rank exited with a code other than 0: the program's own fault
CRASH = "crash"  # a signal that a program's own faults raise: SEGV, ABRT, BUS, FPE, ILL
KILLED = "killed"  # a signal from outside: KILL (the out-of-memory killer too), TERM, HUP ...
HANG = "hang"  # the watchdog ended it
LINGERED = "lingered"  # it did nothing for long after other ranks had exited
LOST = "lost"  # an agent is gone: its node died or was cut off
PREFLIGHT = "preflight"  # a node was found unfit before the ranks started

PROGRAM_CAUSES = (ERROR, CRASH)
NODE_CAUSES = (KILLED, HANG, CRASH)  # twice on one node: the node is suspect
CRASH_SIGNALS = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSYS", "SIGTRAP")

FREE = "free, as the checkpoint advanced"
FIRST_DELAY = 1.0  # seconds before the second restart in a row without progress
MAX_DELAY = 60.0
MAX_STOPS_WITHOUT_PROGRESS = 10  # stops in a row, each before anything was saved
# seconds: a script without the runtime that stops sooner may have saved nothing
SHORT_JOB_START = 600.0
MAX_JOB_STARTS_WITHOUT_PROGRESS = 3  # in a row; then the run is no longer requeued
MAX_EXCLUSIONS = 3  # requeues of a failed run to get rid of unfit nodes


def has_progressed(*, saved: bool, stepped: bool | None, says_saved: bool, seconds: float) -> bool:
    """Return whether a job start that was stopped got anywhere, in any launch style.

    `saved`: there is something new among the checkpoints. `stepped`: ranks passed steps beyond the
    checkpoint that they began with; None if they never came to the runtime's first step boundary.
    `says_saved`: a stop was requested, and ranks without the runtime exited with the code that says
    so. `seconds`: how long it lasted.
    """
    if saved or says_saved:
        return True
    return seconds >= SHORT_JOB_START if stepped is None else stepped


@dataclass(frozen=True)
class AttemptSummary:
    """What the policy must know about a failed attempt."""

    number: int
    cause: str
    error: str = ""  # type and message, or the signal's name
    step: int | None = None  # the last completed step; None if no step boundary was passed
    resumed_from: int = -1  # step of the newest checkpoint at its start; -1 if there was none
    saved: int = -1  # and at its end
    # where it failed; for LOST and PREFLIGHT the unfit nodes
    hosts: list[str] = field(default_factory=list)
    uses_runtime: bool = True  # otherwise the script passes no step boundaries
    job_start: str = ""

    @property
    def advanced(self) -> bool:
        return self.saved > self.resumed_from

    @property
    def before_first_step(self) -> bool:
        return self.uses_runtime and not self.step and not self.advanced


@dataclass(frozen=True)
class Decision:
    restart: bool  # in this allocation
    reason: str
    delay: float = 0.0  # seconds
    requeue: bool = False  # worth another allocation, without the nodes in `exclude`
    exclude: list[str] = field(default_factory=list)


def decide(
    history: Sequence[AttemptSummary],
    max_restarts: int,
    *,
    other_nodes: bool = True,
    stop_requested: bool = False,
) -> Decision:
    """Decide what to do after the last of these failed attempts, oldest first.

    `other_nodes` says whether there are nodes to move to: the only machine there is cannot be
    excluded.
    """
    assert history, "there is nothing to decide without a failed attempt"
    last = history[-1]
    exclude = nodes_to_exclude(history) if other_nodes else []
    if last.cause in (LOST, PREFLIGHT) or set(last.hosts) & set(exclude):
        names = ", ".join(exclude) or "a node"
        requeue = _idle_job_starts(history) <= MAX_JOB_STARTS_WITHOUT_PROGRESS
        return Decision(
            False, f"no restart: {names} cannot be used", requeue=requeue, exclude=exclude
        )
    if max_restarts <= 0:
        return Decision(False, "no restart was requested", exclude=exclude)
    if last.cause == LINGERED:
        return Decision(False, "no restart: some ranks had already finished", exclude=exclude)
    if last.before_first_step:
        if last.cause in PROGRAM_CAUSES:
            return Decision(False, "no restart: it failed before its first step", exclude=exclude)
        if len(history) > 1 and history[-2].before_first_step:
            return Decision(
                False, "no restart: it ended twice before its first step", exclude=exclude
            )
    if any(_same_failure(last, attempt) for attempt in history[:-1]):
        reason = (
            f"no restart: it failed twice at step {last.step} with the same error: {last.error}"
        )
        return Decision(False, reason, exclude=exclude)
    used = count_used(history, last.job_start)
    if used > max_restarts:
        requeue = (
            last.cause not in PROGRAM_CAUSES
            and _idle_job_starts(history) <= MAX_JOB_STARTS_WITHOUT_PROGRESS
        )
        reason = f"no restart: all {max_restarts} restarts are used up"
        return Decision(False, reason, requeue=requeue, exclude=exclude)
    if stop_requested:
        requeue = _idle_job_starts(history) <= MAX_JOB_STARTS_WITHOUT_PROGRESS
        return Decision(False, "no restart: a stop was requested", requeue=requeue, exclude=exclude)
    idle = _idle_attempts(history)
    delay = 0.0 if idle <= 1 else min(MAX_DELAY, FIRST_DELAY * 2 ** (idle - 2))
    cost = FREE if last.advanced else f"{used} of {max_restarts}"
    start = describe_start(last.saved, uses_runtime=last.uses_runtime)
    return Decision(True, f"restarting {start} ({cost})", delay=delay, exclude=exclude)


def count_used(history: Iterable[AttemptSummary], job_start: str) -> int:
    """Return how many restarts a job start has used: one for each attempt that did not advance the
    checkpoint.
    """
    return sum(1 for attempt in history if attempt.job_start == job_start and not attempt.advanced)


def describe_start(saved: int, *, uses_runtime: bool) -> str:
    """Describe where an attempt starts, from the step of the newest checkpoint; -1 if there is
    none.
    """
    if saved >= 0:
        return f"from step {saved}"
    return (
        "from the beginning: no checkpoint yet"
        if uses_runtime
        else "from the script's own checkpoint, if any"
    )


def nodes_to_exclude(history: Sequence[AttemptSummary]) -> list[str]:
    """Return the nodes that were lost or unfit once, or whose ranks were killed, crashed or hung
    twice.
    """
    blamed = Counter(
        host for attempt in history if attempt.cause in NODE_CAUSES for host in set(attempt.hosts)
    )
    exclude = {host for host, times in blamed.items() if times >= 2}
    exclude |= {
        host for attempt in history if attempt.cause in (LOST, PREFLIGHT) for host in attempt.hosts
    }
    return sorted(exclude)


def may_requeue(verdict: str, *, wanted: bool, can_exclude: bool, exclusions: int) -> bool:
    """Return whether a job start with this verdict may go back into the queue.

    None may unless there is a queue and the user lets it (`wanted`). A stopped run may then; a
    failed one only if this job start found nodes that can be excluded (`can_exclude`), and the run
    has not been requeued for that too often.
    `exclusions` counts the job starts that did, this one included.
    """
    if not wanted:
        return False
    return verdict == STOPPED or (
        verdict == FAILED and can_exclude and exclusions <= MAX_EXCLUSIONS
    )


def _same_failure(one: AttemptSummary, other: AttemptSummary) -> bool:
    if one.step is None or other.step is None:
        return False
    return (one.cause, one.error, one.step) == (other.cause, other.error, other.step)


def _idle_attempts(history: Sequence[AttemptSummary]) -> int:
    """Count the attempts at the end of the history that did not advance the checkpoint."""
    count = 0
    for attempt in reversed(history):
        if attempt.advanced:
            break
        count += 1
    return count


def _idle_job_starts(history: Sequence[AttemptSummary]) -> int:
    idle = _idle_attempts(history)
    return len({attempt.job_start for attempt in history[len(history) - idle :]})


def write_summary(folder: AttemptFolder, summary: AttemptSummary) -> None:
    """Write a summary into its attempt's folder, for decisions in later job starts."""
    write_atomically(folder.summary, json.dumps(asdict(summary), indent=1) + "\n")


def read_history(run: RunFolder) -> list[AttemptSummary]:
    """Return the failed attempts of a run, oldest first. Skip summaries that cannot be read."""
    known = {entry.name for entry in fields(AttemptSummary)}
    history = []
    for attempt in run.attempts():
        try:
            summary = json.loads(attempt.summary.read_text(encoding="utf-8"))
            history.append(
                AttemptSummary(**{key: value for key, value in summary.items() if key in known})
            )
        except (OSError, ValueError, TypeError, AttributeError):
            continue
    return history
