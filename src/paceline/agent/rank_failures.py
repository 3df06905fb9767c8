"""Failures of ranks: how each ended, why, which one failed first, and what verdict follows."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.agent import retry_policy
from paceline.agent.health.heartbeat import Heartbeat, Heartbeats
from paceline.agent.workers.output import OutputCapture
from paceline.agent.workers.started_ranks import Exit, Launch
from paceline.contract import process
from paceline.contract.heartbeat_file import RUNNING, SAVED_AND_STOPPED
from paceline.contract.run_folder import DONE, FAILED, STOPPED, AttemptFolder, write_atomically
from paceline.contract.stacks import LIBRARY, read_crash
from paceline.errors import in_one_line

INTERRUPTED = "interrupted"  # a cause beside those of the retry policy: the user asked twice
TERM_EXITS = (-signal.SIGTERM, 128 + signal.SIGTERM)
LEFT_SESSION = "it left its open session"
INTERRUPT_EXITS = (-signal.SIGINT, 128 + signal.SIGINT)
# An error that matches is the consequence of another rank's death.
CONSEQUENCE = re.compile(
    r"closed by peer|reset by peer|Broken pipe|Connection "
    r"(closed|refused|reset)|DistNetworkError|DistStoreError"
    r"|remote process exited|NCCL communicator was aborted|Socket Timeout|recvBytes|sendBytes",
    re.IGNORECASE,
)
PORT_IN_USE = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in (.+)\n(?:\s+(?!\s|File )(.+))?', re.MULTILINE)
# What Python prints if a script starts processes while one of these imports it.
IMPORTING = re.compile(r"has finished its bootstrapping phase")
UNGUARDED = (
    "Each process that the script starts imports it again. Start processes only under `if "
    '__name__ == "__main__":`.'
)
MAX_LINE = 300  # characters of a log's last line
WRAPPED = re.compile(r"Caught (?P<type>\S+) (?P<where>in [^\n]*)\.\nOriginal Traceback")
CALLS_SPAWN = "torch/multiprocessing/spawn.py"


@dataclass(frozen=True)
class Failure:
    """The first thing that went wrong in an attempt."""

    cause: str
    host: str
    rank: int | None = None
    code: int | None = None
    type: str = ""
    message: str = ""
    traceback: str = ""
    step: int | None = None
    time: float = 0.0
    log: str = ""
    where: str = ""  # the last frame of the traceback in the user's own code
    last_line: str = ""  # of the log, if there was no exception, such as the message of argparse
    out_of_memory: bool = False  # the kernel's out-of-memory killer ended the rank
    # ranks that ended normally while this one still waited for them
    ended_ranks: Sequence[int] = ()

    @property
    def is_consequence(self) -> bool:
        return self.cause == retry_policy.ERROR and bool(
            CONSEQUENCE.search(f"{self.type}: {self.message}")
        )

    @property
    def error(self) -> str:
        """One line that distinguishes this failure from others."""
        if self.type:
            return f"{self.type}: {self.message}".splitlines()[0]
        return process.describe_exit(self.code) if self.code is not None else self.message

    @property
    def summary(self) -> str:
        """One line for people: the exception, or how the rank exited and what it printed last."""
        if self.last_line:
            return f"{self.error}: {self.last_line}"
        return in_one_line(f"{self.type}: {self.message}") if self.type else self.error

    def headline(self, world_size: int) -> str:
        if self.rank is None:
            return f"node {self.host} failed: {self.message}"
        where = f"\n  at {self.where}" if self.where else ""
        return f"rank {self.rank} of {world_size} on host {self.host} failed: {self.summary}{where}"

    def hint(self, style: str) -> str:
        """Return what to do about a script that clashes with how its ranks are started; empty if
        it does not.
        """
        text = f"{self.message}\n{self.traceback}"
        if style == "spawn" or not PORT_IN_USE.search(text):
            return ""
        if CALLS_SPAWN in text:
            return (
                "each rank calls mp.spawn: use --style spawn, which starts the script once per "
                "node, or --nproc 1"
            )
        return (
            "a port is already in use: do not change MASTER_ADDR and MASTER_PORT, "
            "or use --style spawn if the script starts its ranks itself"
        )

    def format(
        self, world_size: int, *, with_traceback: bool, consequences: Sequence[int] = ()
    ) -> str:
        """Return the text for the console. `consequences` are ranks there that have lost a
        connection because of it.
        """
        lines = [self.headline(world_size)]
        if consequences:
            whose = (
                f"rank {consequences[0]}"
                if len(consequences) == 1
                else f"{len(consequences)} other ranks"
            )
            lines.append(
                f"  this failed first; the error of {whose} is a consequence: the connection was "
                "lost"
            )
        if with_traceback and self.traceback:
            lines.append(self.traceback.rstrip())
        if self.log:
            lines.append(f"  log: {self.log}")
        return "\n".join(lines)


@dataclass(frozen=True)
class RankExit:
    """How one rank ended."""

    rank: int
    code: int
    time: float
    state: int
    step: int
    failure: Failure | None = None
    got_term: bool = False  # a stop request had sent it a signal that ends it, such as SIGTERM
    says_saved: bool = False  # by its exit code
    unsaved: int | None = None  # the step of the last state, if that could not be saved
    in_session: bool = False  # it had opened a session of the runtime

    @property
    def is_stop(self) -> bool:
        """Whether it saved and stopped, or (if there is a stop request) the request ended it."""
        if self.code == 0:  # handlers of SIGTERM that save and exit do not often know of 75
            return self.state == SAVED_AND_STOPPED or self.got_term or self.says_saved
        # by code 75 or its own, by a signal of the request, or killed at its deadline
        return self.failure is None

    @classmethod
    def from_json(cls, fields: dict[str, Any], *, sent: float) -> RankExit:
        """Return an exit that another agent has sent, at the time `sent` of its clock."""
        failure = fields.pop("failure")
        return cls(
            **{**fields, "time": local_time(fields["time"], sent)},
            failure=received_failure(failure, sent=sent) if failure else None,
        )


def has_left_session(heartbeat: Heartbeat) -> bool:
    """Whether a rank that has exited did so inside its session, as with `os._exit(0)`: others may
    wait for it.
    """
    is_open = heartbeat.in_session and heartbeat.state <= RUNNING
    return bool(is_open and not heartbeat.script_ended)


def local_time(moment: float, sent: float) -> float:
    """Return a moment of another host in this one's time: clocks differ, but how long ago it was
    does not.
    """
    return time.time() - (sent - moment)


def received_failure(fields: dict[str, Any], *, sent: float) -> Failure:
    """Return a failure that another agent has sent, at the time `sent` of its clock."""
    return Failure(**{**fields, "time": local_time(fields["time"], sent)})


def explain_exit(
    rank_exit: Exit, launch: Launch, *, heartbeats: Heartbeats, output: OutputCapture | None = None
) -> Failure:
    """Return the failure behind an exit. For a process that spawns its ranks, it is that of the
    first rank.

    The end of the log, read from `output`, may take a moment to arrive.
    """
    rank_of = {local_rank: rank for rank, local_rank in launch.ranks()}
    spawned = rank_of.items() if launch.launch_spec.style == "spawn" else ()
    reported = [local_rank for local_rank, rank in spawned if launch.attempt.error(rank).exists()]
    logged = rank_of[rank_exit.local_rank]
    found = []
    for local_rank in reported or [rank_exit.local_rank]:
        heartbeat = heartbeats.read(local_rank)
        found.append(
            _read_failure(
                launch.attempt,
                rank=rank_of[local_rank],
                host=launch.placement.host,
                code=rank_exit.code,
                when=rank_exit.time,
                step=heartbeat.step if heartbeat.state >= RUNNING else None,
                log=launch.log(logged),
                tail="" if output is None else output.tail(logged),
            )
        )
    first = first_failure(found)
    assert first is not None
    return first


def _read_failure(
    attempt: AttemptFolder,
    *,
    rank: int,
    host: str,
    code: int,
    when: float,
    step: int | None,
    log: Path,
    tail: str,
) -> Failure:
    """Return what is known about a failed rank: its own error report if it left one, else the end
    of its log.
    """
    try:
        report = json.loads(attempt.error(rank).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        report = {}
    code = int(report.get("code", code))  # of a process that this agent did not start itself
    cause = retry_policy.ERROR
    if code < 0:
        name = process.signal_name(-code)
        cause = retry_policy.CRASH if name in retry_policy.CRASH_SIGNALS else retry_policy.KILLED
    lines = tail.splitlines()
    last = next((line.strip()[:MAX_LINE] for line in reversed(lines) if line.strip()), "")
    plain = Failure(
        cause,
        host,
        rank,
        code,
        step=step,
        time=when,
        log=str(log),
        traceback="\n".join(lines[-20:]),
        last_line=last if code > 0 else LEFT_SESSION if code == 0 else "",
        where=read_crash(tail) if cause == retry_policy.CRASH else "",
    )
    is_unguarded = code > 0 and IMPORTING.search(tail) is not None
    if is_unguarded:
        plain = replace(plain, last_line=UNGUARDED, where=find_user_frame(tail))
    try:
        trace, message = str(report["traceback"]), shorten(unwrap(str(report["message"])))
        message = f"{UNGUARDED}\n{message}" if is_unguarded and report["type"] else message
        return replace(
            plain,
            type=str(report["type"]),
            message=message,
            traceback=trace or plain.traceback,
            time=min(when, float(report["time"])),
            where=find_user_frame(trace) or plain.where,
            last_line="" if report["type"] else plain.last_line,
        )
    except (ValueError, KeyError, TypeError):
        return plain


def unwrap(message: str) -> str:
    """Return the original message of an error that torch has passed on from another process, such
    as a data worker.
    """
    found = WRAPPED.match(message)
    if found is None:
        return message
    lines = message.strip().splitlines()
    last_frame = max(
        number for number, line in enumerate(lines) if line.startswith(("  ", "Original Traceback"))
    )
    first, *rest = lines[last_frame + 1 :] or [lines[-1]]
    return "\n".join(
        [f"{first.removeprefix(found['type']).removeprefix(': ')} ({found['where']})", *rest]
    )


def shorten(message: str) -> str:
    """Cut lines that nobody can read. The rank's log has all of them."""
    return "\n".join(
        line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}…" for line in message.splitlines()
    )


def find_user_frame(trace: str) -> str:
    """Return the last frame of a traceback that is not in a library, such as `train.py:12 in main:
    loss = f(x)`.
    """
    frames = [found for found in FRAME.findall(trace) if not LIBRARY.search(found[0])]
    if not frames:
        return ""
    path, line, function, code = frames[-1]
    return f"{Path(path).name}:{line} in {function}{f': {code.strip()}' if code.strip() else ''}"


def with_stack(failure: Failure, attempt: AttemptFolder) -> Failure:
    """Add the main thread's stack to the failure of a rank that hung or lingered."""
    if failure.rank is None or failure.cause not in (retry_policy.HANG, retry_policy.LINGERED):
        return failure
    try:
        text = attempt.stacks(failure.rank).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return failure
    main_thread = text.strip().split("\n\n")[-1].splitlines()
    return replace(
        failure, traceback="\n".join(line for line in main_thread if "paceline/agent/" not in line)
    )


def write_failure(attempt: AttemptFolder, failure: Failure) -> None:
    write_atomically(attempt.failure, json.dumps(asdict(failure), indent=1) + "\n")


def first_failure(failures: Iterable[Failure]) -> Failure | None:
    """Return the root failure. A lost connection is never the root if there is any other
    failure.
    """
    return min(failures, key=lambda failure: (failure.is_consequence, failure.time), default=None)


def decide_verdict(
    failures: Iterable[Failure], exits: Sequence[RankExit], *, stop_requested: bool
) -> tuple[str, Failure | None]:
    """Return the verdict of an attempt, and its root failure if it failed, from all ranks on all
    nodes.
    """
    # The exits of other agents hold failures whose own messages may not have arrived in time.
    known = [
        *failures,
        *(rank_exit.failure for rank_exit in exits if rank_exit.failure is not None),
    ]
    stops = [rank_exit for rank_exit in exits if rank_exit.is_stop]
    # a rank that stops closes its connections, which other ranks may notice first
    if stop_requested and stops:
        known = [failure for failure in known if not failure.is_consequence]
    failure = first_failure(known)
    if failure is not None:
        return FAILED, _explain_lost_connection(failure, exits)
    if not stop_requested and any(
        rank_exit.code and not rank_exit.says_saved for rank_exit in stops
    ):
        return FAILED, None
    return STOPPED if stops else DONE, None


def _explain_lost_connection(failure: Failure, exits: Sequence[RankExit]) -> Failure:
    """If no rank has crashed, a lost connection means that a rank has ended while another one
    still waited for it.
    """
    ended = [
        each.rank
        for each in exits
        if each.code == 0 and each.rank != failure.rank and not each.is_stop
    ]
    if not failure.is_consequence or not ended:
        return failure
    ranks = ", ".join(map(str, ended[:8]))
    who = f"Rank {ranks} has" if len(ended) == 1 else f"Ranks {ranks} have"
    note = (
        f"{who} exited normally without joining the collective that rank {failure.rank} is "
        "waiting in. No rank crashed."
    )
    return replace(failure, message=f"{note}\n{failure.message}", ended_ranks=tuple(ended))
