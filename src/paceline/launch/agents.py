"""The agents of runs on this machine: start them, with a zygote that may have waited for them, pass
signals on, and wait for them.
"""

from __future__ import annotations

import functools
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from paceline.agent.workers.warm import find_processes, reason_to_start_cold
from paceline.agent.workers.zygote import prestart
from paceline.agent.workers.zygote.prestart import Prestarted
from paceline.agent.workers.zygote.start import FORKING_STYLES, ZygoteOptions, import_variables
from paceline.contract import env
from paceline.contract.claims import local_job_start_name, record_processes
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.process import die_with_parent, is_open
from paceline.contract.run_folder import FAILED, RESTART_EXIT, read_verdict
from paceline.errors import LaunchError
from paceline.launch.local_run import AgentCommand, LocalPlan

# how an agent ends that nobody asked to
MAX_STARTS = 20  # of the agents of one run
KILLED = (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS)
EXIT_TIMEOUT = 20.0  # seconds for the other agents to exit after the head agent
POLL_INTERVAL = 0.05  # seconds
# An outer run's variables must not reach this one.
_RUN_VARIABLES = (
    env.RUN,
    env.ATTEMPT,
    env.JOB_START,
    env.RENDEZVOUS,
    env.TOKEN,
    env.AGENT,
    env.HEARTBEAT,
    env.ZYGOTE,
    env.DATA,
)


class Agents:
    """The agents of one run, which write to the file descriptor `output`, or to this terminal.

    `prestarted` is a zygote that waits for its agent; only a single agent can use it.
    """

    def __init__(
        self, plan: LocalPlan, *, output: int | None = None, prestarted: Prestarted | None = None
    ) -> None:
        self.plan, self.output, self.prestarted = plan, output, prestarted
        self.job_start = plan.run_path.folder.job_start(local_job_start_name())
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        plan = self.plan
        shared = {**plan.secrets, env.JOB_START: local_job_start_name()}
        if len(plan.agents) > 1:
            shared[env.RENDEZVOUS] = "127.0.0.1:0"  # the head agent takes a free port
            shared[env.TOKEN] = secrets.token_hex(16)
        try:
            for command in plan.agents:
                self.processes.append(self._start(command, shared))
            pids = [process.pid for process in self.processes]
            record_processes(plan.run_path.folder, [os.getpid(), *pids])
        except BaseException:
            self.kill()
            raise

    def _start(self, command: AgentCommand, shared: dict[str, str]) -> subprocess.Popen[bytes]:
        inherited = {
            name: value for name, value in os.environ.items() if name not in _RUN_VARIABLES
        }
        environment = {**inherited, **shared, **command.variables}
        if "PYTHONPATH" in command.variables and inherited.get("PYTHONPATH"):
            paths = [command.variables["PYTHONPATH"], inherited["PYTHONPATH"]]
            environment["PYTHONPATH"] = os.pathsep.join(paths)
        if self.prestarted is not None:
            environment[env.ZYGOTE] = f"{self.prestarted.descriptor}/{self.prestarted.pid}"
            if self.prestarted.agent is not None:
                return self.prestarted.agent.start(environment)
        # rank 0 reads it
        reads = command.is_head and self.output is None and is_open(0)
        # A Ctrl-C between fork and exec would be lost in a hook of Python's. The agent inherits
        # this: what we forward waits until it handles it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return subprocess.Popen(
                command.argv,
                env=environment,
                stdin=None if reads else subprocess.DEVNULL,
                stdout=self.output,
                stderr=self.output,
                pass_fds=() if self.prestarted is None else (self.prestarted.descriptor,),
                # this process has one thread
                preexec_fn=functools.partial(_prepare_agent, os.getpid()),  # noqa: PLW1509
            )
        except OSError as error:
            raise LaunchError(
                f"Cannot start {command.argv[0]}: {error.strerror}.",
                hint="Check the interpreter's path.",
            ) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    @property
    def verdict(self) -> str:
        return read_verdict(self.job_start.verdict) or FAILED

    def poll(self) -> int | None:
        """Return the head agent's exit code if it has ended, once the others have, too."""
        code = self.processes[0].poll()
        return None if code is None else self.wait()

    def wait(self) -> int:
        """Wait for the head agent, and then a while for the others; return its exit code."""
        code = self.processes[0].wait()
        deadline = time.monotonic() + EXIT_TIMEOUT
        for process in self.processes[1:]:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        self.kill()
        return code

    def interrupt(self) -> None:
        if not self.processes:
            raise KeyboardInterrupt
        for process in self.processes:
            process.send_signal(signal.SIGINT)

    def stop(self) -> None:
        """Ask the head agent to stop; it informs the others."""
        if not self.processes:
            raise KeyboardInterrupt
        self.processes[0].send_signal(signal.SIGTERM)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()  # nothing, if it has ended
            process.wait()


def run_agents(plan: LocalPlan, *, prestarted: Prestarted | None = None) -> int:
    """Start all agents of a plan, wait for them and return the head agent's exit code.

    If an agent is killed, starts them again. The new head agent knows how often that may happen to
    attempts.
    """
    starts = 0
    while True:
        starts += 1
        agents = Agents(plan, prestarted=prestarted)
        # At the first Ctrl-C the ranks save and stop. The second one ends them at once.
        with _handled(agents.interrupt, agents.stop):
            try:
                agents.start()
                if prestarted is not None:
                    # Now only the agent holds it, so the zygote ends with the agent.
                    os.close(prestarted.descriptor)
                code = agents.wait()
            except BaseException:
                agents.kill()
                raise
        prestarted, job_start = None, agents.job_start
        was_killed = code in (*KILLED, RESTART_EXIT) and job_start.agent.exists()
        if not was_killed or job_start.verdict.exists() or starts == MAX_STARTS:
            return code if code >= 0 else 128 - code
        for path in (job_start.head, *job_start.join_errors()):
            path.unlink(missing_ok=True)


class ParallelRuns:
    """Runs that share a fixed number of slots on this machine."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.interrupted = False  # by Ctrl-C
        self.stopping = False  # runs save and stop, and no more are started
        self._active: dict[int, tuple[int, Agents]] = {}  # by number: the slot, and the agents

    def run(
        self,
        numbers: list[int],
        *,
        begin: Callable[[int, int], LocalPlan | None],
        end: Callable[[int, str], None],
        stop: Callable[[int], None],
        poll: Callable[[], None] = lambda: None,
    ) -> None:
        """Run all of them in order. At the first Ctrl-C they save and stop, at the second they end.

        `begin(number, slot)` returns the plan of a run, or None to skip it; `end(number, verdict)`
        is called after it. `stop(count)` is called once so many runs have been asked to stop, and
        `poll()` again and again.
        """
        waiting, is_reported = list(numbers), False
        with _handled(self.interrupt, self._stop):
            try:
                while waiting or self._active:
                    taken = {slot for slot, _ in self._active.values()}
                    free = sorted(set(range(self.slots)) - taken)
                    while waiting and free and not self.stopping:
                        number = waiting.pop(0)
                        plan = begin(number, free[0])
                        if plan is not None:
                            self._active[number] = (free.pop(0), _start_into_log(plan))
                    if self.stopping:
                        waiting.clear()
                        if self._active and not is_reported:
                            is_reported = True
                            stop(len(self._active))
                    for number, (_, agents) in list(self._active.items()):
                        if agents.poll() is not None:
                            del self._active[number]
                            end(number, agents.verdict)
                    poll()
                    time.sleep(POLL_INTERVAL)
            finally:
                for _, agents in self._active.values():
                    agents.kill()

    def interrupt(self) -> None:
        """Let all runs save and stop, as Ctrl-C does. The second time, end them at once."""
        self.interrupted = self.stopping = True
        for _, agents in self._active.values():
            agents.interrupt()

    def _stop(self) -> None:
        self.stopping = True
        for _, agents in self._active.values():
            agents.stop()


def _start_into_log(plan: LocalPlan) -> Agents:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    log = os.open(plan.run_path.folder.slurm_log, flags, 0o644)
    try:
        agents = Agents(plan, output=log)
        agents.start()
    finally:
        os.close(log)
    return agents


def _prepare_agent(parent: int) -> None:
    """Prepare a new agent process.

    It gets its own process group, so that Ctrl-C reaches it only through us, and a SIGTERM if this
    process dies.
    """
    os.setpgid(0, 0)
    die_with_parent(parent, signal.SIGTERM)


@contextmanager
def _handled(interrupt: Callable[[], None], stop: Callable[[], None]) -> Iterator[None]:
    """Handle Ctrl-C and stop requests: SIGTERM, and SIGHUP unless it is ignored (as under
    nohup).
    """

    def handle(number: int, frame: FrameType | None) -> None:
        interrupt() if number == signal.SIGINT else stop()

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def find_zygote(plan: LocalPlan, *, warm: int) -> tuple[prestart.Prestarted | None, list[str]]:
    """Return the run's zygote, or None if its agent is to start one; and notes for the user.

    `warm` is for how many seconds a warm process stays; 0 for none.
    """
    spec = plan.launch_spec
    notes = describe_cold(spec, warm=warm)
    warm = 0 if notes else warm
    options = ZygoteOptions.of(spec, os.environ, warm=warm)
    variables = import_variables({**spec.variables, **plan.secrets}, preload=bool(spec.preload))
    started = prestart.prestarted
    if started is not None and not _fits(started, spec, options, variables):
        started.discard()
        started = None
    if started is None and warm:
        with suppress(OSError):  # the agent will try it again, and say what is wrong
            started = Prestarted(spec.python, options, {**os.environ, **variables})
    if started is not None and started.replaced:
        notes.append(f"starting cold, because {started.replaced}")
    return started, notes


def _fits(
    started: Prestarted, spec: LaunchSpec, options: ZygoteOptions, variables: dict[str, str]
) -> bool:
    """Whether the zygote that was started before the options were parsed is what this run needs: a
    `.env` file or paceline.toml may have changed them.
    """
    typed = started.options
    return (
        (spec.style in FORKING_STYLES and spec.nodes == 1)
        and (started.python, typed.warm) == (spec.python, options.warm)
        and (typed.threads, typed.preload) == (options.threads, options.preload)
        and all(started.environ.get(name) == value for name, value in variables.items())
    )


def describe_cold(spec: LaunchSpec, *, warm: int) -> list[str]:
    """Return a note for the user if a run cannot have the warm process that it asks for."""
    cold = _why_cold(spec) if warm else None
    return [f"starting cold, because {cold}: --warm has no effect"] if cold else []


def _why_cold(spec: LaunchSpec) -> str | None:
    if spec.style not in FORKING_STYLES:
        return f"the {spec.style} style does not fork ranks"
    if spec.nodes > 1:
        return "each simulated node imports torch itself"
    return reason_to_start_cold(os.environ)


def read_warm() -> list[int]:
    """Return the process ids of this user's warm processes."""
    return find_processes()
