"""Stop requests: the signals that an agent receives, and how the ranks of its node are asked: with
which signals, by which deadline, and what a script can do about them.

At the time limit, Slurm signals the batch shell; `slurm/stop_and_requeue.sh` creates the file
`stop`, which `attempt.py` polls.
"""

from __future__ import annotations

import functools
import math
import os
import signal
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from types import FrameType

from paceline.agent.health.heartbeat import Heartbeat, Heartbeats
from paceline.agent.workers import fork_safety, process_tree
from paceline.agent.workers.started_ranks import Launch, StartedRanks
from paceline.contract import frameworks
from paceline.contract.frameworks import PLAIN_SIGNAL, Preset
from paceline.contract.heartbeat_file import READY, RUNNING, SAVED_AND_STOPPED, TAKES_SIGNALS
from paceline.contract.run_folder import RunFolder

LOST = "without a session it cannot save: progress since the script's own last checkpoint is lost"
MARGIN = 10.0  # seconds before the time limit, to write the verdict and requeue the job
# of the timeout, for a script with a handler of SIGUSR1, which may only print stacks
TERM_SHARE = 0.5
LIMIT_SLACK = 90.0  # seconds; Slurm looks at time limits every 30 s
AGAIN = "press Ctrl-C again to end at once"

# How a stop is requested, in the order of urgency: by the batch script's file, by Ctrl-C, by
# SIGTERM.
FILE, INTERRUPT, TERM = range(3)
# Seconds within which two signals are one request: a scheduler signals several processes, which
# pass it on.
SAME_REQUEST = {"stop": 1.0, "interrupt": 0.2}


class Requests:
    """Counts what signals request. `fileno` becomes readable with each signal, including
    SIGCHLD.
    """

    def __init__(self) -> None:
        self.stop = 0  # save and stop: SIGTERM, SIGHUP, SIGUSR1
        self.by_term = False  # or by SIGHUP
        self.interrupt = 0  # Ctrl-C: save and stop; the second time, end now
        self._last = {"stop": -10.0, "interrupt": -10.0}
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def listen(self) -> None:
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(signum, self._count)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            signal.signal(signal.SIGHUP, self._count)
        # a command may have held it back until now
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    @staticmethod
    def ignore() -> None:
        """Ignore signals from now on: while Python shuts down, they would end the process and
        change its exit code.
        """
        for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)

    @property
    def wants_stop(self) -> bool:
        return self.stop > 0 or self.interrupt > 0

    @property
    def end_now(self) -> bool:
        """Whether to kill at once: the user pressed Ctrl-C twice, or requested a stop twice."""
        return self.interrupt > 1 or self.stop > 1

    @property
    def cancels_start(self) -> bool:
        """Whether to give up before any rank runs: there is nothing to save."""
        return self.interrupt > 0 or self.stop > 1

    def fileno(self) -> int:
        return self._reader

    def drain(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self._reader, 4096):
                pass

    def _count(self, signum: int, _: FrameType | None) -> None:
        kind = "interrupt" if signum == signal.SIGINT else "stop"
        self.by_term |= signum in (signal.SIGTERM, signal.SIGHUP)
        now = time.monotonic()
        if now - self._last[kind] >= SAME_REQUEST[kind]:
            setattr(self, kind, getattr(self, kind) + 1)
        self._last[kind] = now


def describe_cause(way: int, *, cancelled: bool, environ: Mapping[str, str], grace: float) -> str:
    """Return why a run is to stop, as far as anybody can know."""
    if way == INTERRUPT:
        return "Ctrl-C"
    if cancelled:
        return "paceline cancel --save" if way == FILE else "paceline cancel"
    if "SLURM_JOB_ID" not in environ:
        return "SIGTERM" if way == TERM else "the stop file"
    left = _time_left(environ)
    at_limit = is_time_limit(way, environ=environ, grace=grace)
    if way == TERM:
        return "the time limit is reached" if at_limit else "SIGTERM: preemption or scancel"
    if left is None:
        return "SIGUSR1 to the batch script, sent by Slurm near the time limit or by hand"
    return f"time limit in {max(0.0, left):.0f} s" if at_limit else "SIGUSR1 to the batch script"


def is_time_limit(way: int, *, environ: Mapping[str, str], grace: float) -> bool:
    """Whether a stop that the batch script or SIGTERM requests is due to the job's time limit."""
    left = _time_left(environ)
    return left is not None and (left < 1 if way == TERM else left <= grace + LIMIT_SLACK)


def _time_left(environ: Mapping[str, str]) -> float | None:
    """Return the seconds until the time limit; None without a job, or if an older Slurm does not
    say.
    """
    end = environ.get("SLURM_JOB_END_TIME", "") if "SLURM_JOB_ID" in environ else ""
    return int(end) - time.time() if end.isdigit() else None


class StopRequest:
    """Signals each rank once it can take a signal, and again when its runtime listens.

    A request has a deadline if the ranks must end, or may: by Ctrl-C, by SIGTERM to any agent,
    because the run was cancelled or is requeued in any case, or because the run has trained with
    the runtime. The next job start then goes on from the newest checkpoint; at the time limit,
    Slurm would end the run for good.
    """

    def __init__(self, launch: Launch, *, workers: StartedRanks, heartbeats: Heartbeats) -> None:
        self._launch_spec, self._workers, self._heartbeats = launch.launch_spec, workers, heartbeats
        self._run = RunFolder(launch.attempt.path.parent)
        self.timeout = launch.launch_spec.stop_timeout
        self.requested = False
        self._way = FILE
        self._term_time = self._deadline = math.inf
        # Process -> its state when it last got SIGUSR1, and whether it handled that.
        self._signalled: dict[int, tuple[int, bool]] = {}
        # processes, and which other signals they got
        self._terminated: set[tuple[int, int]] = set()
        # processes that signal themselves, and by which
        self._at_step: set[tuple[int, int]] = set()
        self._by_preset: dict[int, int] = {}  # process -> the signal of its framework, which it got

    def is_news(self, way: int) -> bool:
        """Whether a request adds to what is known: it is the first, or more urgent than the one
        before.
        """
        return not self.requested or way > self._way

    def start(self, way: int) -> None:
        self.requested = True
        self._heartbeats.request_stop()
        self._way = max(way, self._way)

    def cause(self, way: int, environ: Mapping[str, str]) -> str:
        return describe_cause(
            way, cancelled=self._run.cancelled.exists(), environ=environ, grace=self.timeout
        )

    @property
    def is_overdue(self) -> bool:
        return time.monotonic() > self._deadline

    def signal_ranks(self, local_ranks: Collection[int]) -> None:
        """Send SIGUSR1, and to ranks without a runtime the signal that ends them, if they must end
        or save on it.
        """
        states = self._states(local_ranks)
        if self._must_end() or self._has_trained(states):
            self._set_deadline()
        for pid, state in states.items():
            if not READY <= state <= RUNNING:
                continue
            number = self._find_last_signal(pid) if state == READY else None
            # Again once the script has a handler: before, the signal was ignored.
            news = (state, process_tree.has_handler(pid, signal.SIGUSR1))
            if self._signalled.get(pid, (0, False)) < news:
                self._signalled[pid] = news
                process_tree.send_signal(pid, signal.SIGUSR1)
            if number is not None:
                self._set_deadline()
                self._end(pid, number)

    def has_terminated(self, heartbeat: Heartbeat) -> bool:
        """Whether a rank without the runtime, or the process that started it, got a signal that
        ends it.
        """
        return heartbeat.state <= READY and bool(self._sent_to(heartbeat))

    def has_interrupted(self, heartbeat: Heartbeat) -> bool:
        """Whether a rank without the runtime got SIGINT, as after Ctrl-C."""
        return heartbeat.state <= READY and signal.SIGINT in self._sent_to(heartbeat)

    def has_ended(self, heartbeat: Heartbeat, code: int) -> bool:
        """Whether a signal of this request ended a rank that does not handle it."""
        # the script may have restored the default action of SIGUSR1
        numbers = {signal.SIGUSR1} if self.requested else set()
        return -code in numbers | self._sent_to(heartbeat)

    def _sent_to(self, heartbeat: Heartbeat) -> set[int]:
        """Return the signals, besides SIGUSR1, that a rank or the process that started it got."""
        return {
            number
            for pid, number in self._terminated | self._at_step
            if pid == heartbeat.pid or self._spawns
        }

    def says_saved(self, heartbeat: Heartbeat, code: int) -> bool:
        """Whether the exit code of a rank without the runtime says that it has saved and is to be
        resumed.
        """
        # by its exit code, which torchrun may have replaced
        if heartbeat.state == SAVED_AND_STOPPED:
            return not self._uses_runtime
        if code or not self.requested or heartbeat.state > READY:
            return code in self._launch_spec.saved_exit_codes
        preset = heartbeat.preset
        by_preset = (
            preset is not None and preset.saved_exit_code == 0 and self.has_terminated(heartbeat)
        )
        return by_preset or self._launch_spec.saved_exit_code == 0

    def reaches(self, local_ranks: Collection[int]) -> bool:
        """Whether all ranks can take signals."""
        return all(self._heartbeats.read(local_rank).pid for local_rank in local_ranks) or (
            self._spawns and bool(self._states(local_ranks))
        )

    def describe(self, local_ranks: Collection[int]) -> list[str]:
        """Return what the ranks will do, one console note per line."""
        lines = self._describe(self._states(local_ranks))
        return lines if self._way != INTERRUPT else [f"{lines[0]}; {AGAIN}", *lines[1:]]

    def _describe(self, states: Mapping[int, int]) -> list[str]:
        if RUNNING in states.values():
            return ["the ranks save and stop"]
        if preset := next(filter(None, map(self._find_preset, states)), None):
            return [f"the script gets {preset.stop_signal}, which the {preset.name} handles itself"]
        if self._uses_runtime or self._has_trained(states):
            return ["the ranks have not begun to train, so they have nothing to save"]
        if self._set_signal is not None:
            return [
                f"the script gets {self._set_signal.name}, as set by stop_signal, to save in its "
                "own way"
            ]
        if any(process_tree.has_handler(pid, signal.SIGUSR1) for pid in states):
            return ["the script handles SIGUSR1 itself"]
        if self._way == INTERRUPT:
            return ["the script gets SIGINT (KeyboardInterrupt), to save in its own way"]
        if self._must_end():
            caught = any(process_tree.has_handler(pid, signal.SIGTERM) for pid in states)
            return ["the script handles SIGTERM itself" if caught else LOST]
        return [
            f"the script runs until the time limit, and {LOST}",
            'if it resumes by itself, requeue it with --requeue-always (requeue = "always")',
        ]

    @property
    def _spawns(self) -> bool:
        return self._launch_spec.style == "spawn"

    @property
    def _uses_runtime(self) -> bool:
        """Whether the script imports the runtime, or a rank has opened a session: another module
        may import it.
        """
        return self._imports_runtime or self._has_session

    @property
    def _has_session(self) -> bool:
        return any(slot.in_session for slot in self._heartbeats.read_all())

    @functools.cached_property
    def _imports_runtime(self) -> bool:
        return fork_safety.uses_runtime(self._launch_spec)

    @property
    def _set_signal(self) -> signal.Signals | None:
        """The signal that the user has set. SIGUSR1 goes to every script, whoever handles it."""
        name = self._launch_spec.stop_signal
        return None if name in ("", PLAIN_SIGNAL) else signal.Signals[name]

    def _find_last_signal(self, pid: int) -> int | None:
        """Return the signal, besides SIGUSR1, that a rank without the runtime gets now; None if it
        gets no other.

        After Ctrl-C scripts expect SIGINT, which torchrun and a terminal send too.
        """
        if self._set_signal is not None and not self._uses_runtime:
            return self._set_signal
        if preset := self._find_preset(pid):
            self._by_preset[pid] = signal.Signals[preset.stop_signal]
        # and no other, even if the framework has removed its handler since
        if pid in self._by_preset:
            return self._by_preset[pid]
        # A script that saves on SIGUSR1 gets time to do so: SIGTERM would end it meanwhile.
        if not self._must_end() or (
            self._may_save_on_usr1(pid) and time.monotonic() <= self._term_time
        ):
            return None
        return signal.SIGINT if self._way == INTERRUPT else signal.SIGTERM

    def _find_preset(self, pid: int) -> Preset | None:
        """Return the preset that applies to a rank: nothing is set, and its framework handles the
        signal now.

        At the time limit, a script that does not resume by itself runs on: it would only start
        over.
        """
        if (
            self._launch_spec.stop_signal
            or self._has_session
            or process_tree.has_handler(pid, signal.SIGUSR1)
        ):
            return None
        slot = self._find_slot(pid)
        preset = None if slot is None else slot.preset
        if preset is None or not process_tree.has_handler(pid, signal.Signals[preset.stop_signal]):
            return None
        return preset if self._must_end() or self._can_resume(preset) else None

    def _can_resume(self, preset: Preset) -> bool:
        return preset.can_resume(self._sources, self._launch_spec.args)

    @functools.cached_property
    def _sources(self) -> list[str]:
        spec = self._launch_spec
        return frameworks.read_sources(
            spec.program, is_module=spec.is_module, import_path=spec.import_path
        )

    def _must_end(self) -> bool:
        """Whether a script that takes no stop request must end all the same: somebody ended or
        cancelled the run.
        """
        return self._way > FILE or self._launch_spec.requeue_always or self._run.cancelled.exists()

    def _has_trained(self, states: Mapping[int, int]) -> bool:
        """Whether the run, in this attempt or before, has come to the runtime's step boundaries."""
        return max(states.values(), default=READY) > READY or self._run.rank_events.exists()

    def _set_deadline(self) -> None:
        if self._deadline != math.inf:
            return
        if self._way == FILE and not self._run.cancelled.exists():
            # The time limit is `stop_timeout` away, and the ranks must have ended by then.
            margin = min(self._launch_spec.kill_after + MARGIN, self.timeout / 2)
            self.timeout -= margin
        now = time.monotonic()
        self._term_time, self._deadline = now + TERM_SHARE * self.timeout, now + self.timeout

    def _states(self, local_ranks: Collection[int]) -> dict[int, int]:
        """Map processes to their states. A process that starts the ranks itself counts if they
        have no slots.
        """
        heartbeats = [self._heartbeats.read(local_rank) for local_rank in local_ranks]
        states = {heartbeat.pid: heartbeat.state for heartbeat in heartbeats if heartbeat.pid}
        if not states and self._spawns:
            states = dict.fromkeys(self._workers.pids().values(), READY)
        return states

    def _end(self, pid: int, number: int) -> None:
        """Have a rank get a signal: after a common step if it counts them and one comes in time,
        else now.
        """
        if self._spawns:
            self._terminate(self._workers.pids().values(), number)
            return
        slot = self._find_slot(pid)
        is_due = slot is not None and slot.at_steps == TAKES_SIGNALS
        if is_due and time.monotonic() <= self._term_time:
            self._heartbeats.signal_at_common_step(number)
            self._at_step.add((pid, number))
        elif is_due or (pid, number) not in self._at_step:
            self._terminate([pid], number)

    def _find_slot(self, pid: int) -> Heartbeat | None:
        return next((slot for slot in self._heartbeats.read_all() if slot.pid == pid), None)

    def _terminate(self, pids: Iterable[int], number: int) -> None:
        """Send a signal once. A process that starts the ranks itself passes SIGTERM on, or ends
        with them.

        It does not pass on SIGINT: a terminal would signal its whole process group.
        """
        for pid in pids:
            if (pid, number) not in self._terminated:
                self._terminated.add((pid, number))
                send = (
                    process_tree.signal_group
                    if self._spawns and number == signal.SIGINT
                    else process_tree.send_signal
                )
                send(pid, number)

    def _may_save_on_usr1(self, pid: int) -> bool:
        # Every Python process has a handler of SIGINT, so that tells nothing.
        handles_end = self._way != INTERRUPT and process_tree.has_handler(pid, signal.SIGTERM)
        return process_tree.has_handler(pid, signal.SIGUSR1) and not handles_end
