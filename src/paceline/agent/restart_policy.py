"""Whether to try again after a failed attempt. Pure: what happened so far goes in, a decision comes out.

The rules, in the order in which they are asked:

1. a node was lost, did not pass preflight, or has killed ranks twice: not here; elsewhere, without it, where there
   is an elsewhere.
2. nobody asked for relaunches: no.
3. the program failed by its own doing before its first step: no. What ends a rank from outside is tried once more.
4. the same error at the same step, twice: no.
5. attempts that did not advance the checkpoint cost one of `max_restarts` each; when they are spent: no.
6. otherwise yes: at once the first time, later after a wait that doubles.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields

from paceline.contract.run_folder import AttemptFolder, RunFolder, write_atomically
from paceline.contract.verdict import FAILED, STOPPED

# Causes: how an attempt ended.
ERROR = "error"  # a rank exited with a code other than 0: the program's own doing
CRASH = "crash"  # a signal that a program's own faults raise: SEGV, ABRT, BUS, FPE, ILL
KILLED = "killed"  # a signal from outside: KILL (the out-of-memory killer too), TERM, HUP ...
HANG = "hang"  # the watchdog ended it
LOST = "lost"  # a agent is gone: its node died or was cut off
PREFLIGHT = "preflight"  # a node was found unfit before the ranks were started

OWN_DOING = (ERROR, CRASH)
BLAMES_HOST = (KILLED, HANG, CRASH)  # twice on one host: the host is suspect
CRASH_SIGNALS = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSYS", "SIGTRAP")

FIRST_WAIT = 1.0  # seconds, before the second relaunch in a row that got nowhere
LONGEST_WAIT = 60.0
MOST_STOPS_IN_VAIN = 10  # stops in a row, each before anything was saved
SHORT_JOB_START = 600.0  # seconds: a script that asks to be resumed sooner, with nothing saved, may loop
MOST_JOB_STARTS_IN_VAIN = 3  # a run that gets nowhere in this many allocations in a row asks for no more
MAX_EXCLUSIONS = 3  # requeues of a failed run to get rid of unfit nodes


@dataclass(frozen=True)
class AttemptSummary:
    """What must be known of a failed attempt to decide about the next one."""

    number: int
    cause: str
    error: str = ""  # type and message, or the signal's name
    step: int | None = None  # the step that it had done last; None: no step boundary was passed
    resumed_from: int = -1  # step of the newest checkpoint when it began; -1: there was none
    saved: int = -1  # and when it ended
    hosts: list[str] = field(default_factory=list)  # where it failed; for LOST and PREFLIGHT the unfit nodes
    beats: bool = True  # whether the script uses the runtime, and so would have passed step boundaries
    job_start: str = ""

    @property
    def advanced(self) -> bool:
        return self.saved > self.resumed_from

    @property
    def before_first_step(self) -> bool:
        return self.beats and not self.step and not self.advanced


@dataclass(frozen=True)
class Decision:
    relaunch: bool  # in this allocation
    reason: str
    wait_seconds: float = 0.0
    requeue: bool = False  # worth another allocation, without the hosts in `exclude`
    exclude: list[str] = field(default_factory=list)


def decide(history: Sequence[AttemptSummary], max_restarts: int, *, elsewhere: bool = True) -> Decision:
    """What to do after the last of these attempts, oldest first. Stopped and finished attempts are not among them.

    `elsewhere` says whether there are other nodes to go to: on the only machine there is, no node is left out.
    """
    assert history, "an attempt has failed, or there is nothing to decide"
    last = history[-1]
    exclude = unfit_hosts(history) if elsewhere else []
    if last.cause in (LOST, PREFLIGHT) or set(last.hosts) & set(exclude):
        names = ", ".join(exclude) or "a node"
        return Decision(
            False,
            f"{names} cannot be used",
            requeue=_job_starts_in_vain(history) <= MOST_JOB_STARTS_IN_VAIN,
            exclude=exclude,
        )
    if max_restarts <= 0:
        return Decision(False, "no relaunch was asked for", exclude=exclude)
    if last.before_first_step:
        if last.cause in OWN_DOING:
            return Decision(
                False, "it failed before its first step: trying again would not help", exclude=exclude
            )
        if len(history) > 1 and history[-2].before_first_step:
            return Decision(False, "it ended twice before its first step", exclude=exclude)
    if any(_same_failure(last, attempt) for attempt in history[:-1]):
        return Decision(False, f"the same failure at step {last.step}, twice: {last.error}", exclude=exclude)
    spent = sum(1 for attempt in history if attempt.job_start == last.job_start and not attempt.advanced)
    if spent > max_restarts:
        return Decision(
            False,
            f"all {max_restarts} relaunches are used up",
            requeue=last.cause not in OWN_DOING and _job_starts_in_vain(history) <= MOST_JOB_STARTS_IN_VAIN,
            exclude=exclude,
        )
    idle = _fruitless_in_a_row(history)
    wait = 0.0 if idle <= 1 else min(LONGEST_WAIT, FIRST_WAIT * 2 ** (idle - 2))
    cost = (
        "it advanced the checkpoint, so it costs nothing" if last.advanced else f"{spent} of {max_restarts}"
    )
    return Decision(True, f"relaunch ({cost})", wait_seconds=wait, exclude=exclude)


def unfit_hosts(history: Sequence[AttemptSummary]) -> list[str]:
    """Nodes to leave out: lost or failed in preflight once, or ranks killed there in two attempts."""
    named = Counter(host for a in history if a.cause in BLAMES_HOST for host in set(a.hosts))
    unfit = {host for host, times in named.items() if times >= 2}
    unfit |= {host for a in history if a.cause in (LOST, PREFLIGHT) for host in a.hosts}
    return sorted(unfit)


def may_requeue(verdict: str, *, can_exclude: bool, exclusions: int) -> bool:
    """Return whether a job start with this verdict may go back into the queue.

    A stopped run may; a failed one only if this job start found nodes that can be excluded (`can_exclude`), and the
    run has not been requeued for that too often. `exclusions` counts the job starts that did, this one included.
    """
    return verdict == STOPPED or (verdict == FAILED and can_exclude and exclusions <= MAX_EXCLUSIONS)


def _same_failure(one: AttemptSummary, other: AttemptSummary) -> bool:
    if one.step is None or other.step is None:
        return False
    return (one.cause, one.error, one.step) == (other.cause, other.error, other.step)


def _fruitless_in_a_row(history: Sequence[AttemptSummary]) -> int:
    count = 0
    for attempt in reversed(history):
        if attempt.advanced:
            break
        count += 1
    return count


def _job_starts_in_vain(history: Sequence[AttemptSummary]) -> int:
    fruitless = _fruitless_in_a_row(history)
    return len({attempt.job_start for attempt in history[len(history) - fruitless :]})


def remember(folder: AttemptFolder, summary: AttemptSummary) -> None:
    """Keep a summary in its attempt's folder: later job starts of the run decide by it too."""
    write_atomically(folder.path / "summary.json", json.dumps(asdict(summary), indent=1) + "\n")


def recall(run: RunFolder) -> list[AttemptSummary]:
    """The failed attempts of a run so far, oldest first. What cannot be read is as if it had not been."""
    known = {each.name for each in fields(AttemptSummary)}
    found = []
    for attempt in run.attempts():
        try:
            told = json.loads((attempt.path / "summary.json").read_text(encoding="utf-8"))
            found.append(AttemptSummary(**{key: value for key, value in told.items() if key in known}))
        except (OSError, ValueError, TypeError, AttributeError):
            continue
    return found
