"""Start the agents of a run on this machine, forward signals to them and wait for them."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from paceline.agent.workers.zygote.prestart import Prestarted
from paceline.contract import env
from paceline.contract.claims import local_job_start_name, record_processes
from paceline.contract.process import die_with_parent, is_open
from paceline.contract.verdict import RESTART_EXIT
from paceline.errors import LaunchError
from paceline.launch.plan.local import AgentCommand, LocalPlan

# how an agent ends that nobody asked to
KILLED = (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS)
EXIT_TIMEOUT = 20.0  # seconds for the other agents to exit after the head agent


def run_agents(
    plan: LocalPlan,
    *,
    prestarted: Prestarted | None = None,
    after_start: Callable[[], None] = lambda: None,
) -> int:
    """Start all agents of a plan, wait for them and return the head agent's exit code.

    If an agent is killed, starts them again; the new head agent knows how often that may happen.
    `prestarted` is a zygote that waits for its agent; only a single agent can use it. `after_start`
    is called while the ranks start: it does what they need not wait for.
    """
    job_start = plan.run_path.folder.job_start(local_job_start_name())
    while True:
        code = _run_once(plan, prestarted, after_start)
        prestarted, after_start = None, lambda: None
        if (
            code not in (*KILLED, RESTART_EXIT)
            or job_start.verdict.exists()
            or not job_start.agent.exists()
        ):
            return code if code >= 0 else 128 - code
        for path in (job_start.head, *job_start.join_errors()):
            path.unlink(missing_ok=True)


def _run_once(
    plan: LocalPlan, prestarted: Prestarted | None, after_start: Callable[[], None]
) -> int:
    shared = shared_variables(len(plan.agents))
    processes: list[subprocess.Popen[bytes]] = []
    with _forward_signals(processes):
        try:
            for starter in plan.agents:
                passed = prestarted if len(plan.agents) == 1 else None
                processes.append(
                    start_agent(starter, shared, secrets=plan.secrets, prestarted=passed)
                )
            record_processes(
                plan.run_path.folder, [os.getpid(), *(process.pid for process in processes)]
            )
            if prestarted is not None:
                # Now only the agent holds it, so the zygote ends with the agent.
                os.close(prestarted.descriptor)
            after_start()
            code = processes[0].wait()
            wait_for_exit(processes[1:])
            if prestarted is not None:
                _reap_children()
        except BaseException:
            kill(processes)
            raise
    return code


def shared_variables(agents: int) -> dict[str, str]:
    """Return the variables that all agents of one start have in common."""
    variables = {env.JOB_START: local_job_start_name()}
    if agents > 1:
        variables[env.RENDEZVOUS] = _free_address()
        variables[env.TOKEN] = secrets.token_hex(16)
    return variables


def _free_address() -> str:
    """Return an address of this machine with a free port.

    If the port is taken later, the head agent picks another and records it in the job start folder.
    """
    try:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            return f"127.0.0.1:{probe.getsockname()[1]}"
    except OSError:  # it has IPv6 only
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as probe:
            return f"[::1]:{probe.getsockname()[1]}"


def start_agent(
    starter: AgentCommand,
    shared: Mapping[str, str],
    *,
    secrets: Mapping[str, str],
    prestarted: Prestarted | None = None,
    output: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start one agent. Its output goes to the file descriptor `output`, or to this terminal."""
    # An outer run's variables must not reach this one.
    inherited = {name: value for name, value in os.environ.items() if name not in _RUN_VARIABLES}
    environment = {**inherited, **secrets, **shared, **starter.variables}
    if "PYTHONPATH" in starter.variables and inherited.get("PYTHONPATH"):
        environment["PYTHONPATH"] = os.pathsep.join(
            [starter.variables["PYTHONPATH"], inherited["PYTHONPATH"]]
        )
    if prestarted is not None:
        environment[env.ZYGOTE] = str(prestarted.descriptor)
        if prestarted.agent is not None:
            return prestarted.agent.start(environment)
    try:
        return subprocess.Popen(
            starter.argv,
            env=environment,
            # rank 0 reads it
            stdin=None if starter.is_head and output is None and is_open(0) else subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=() if prestarted is None else (prestarted.descriptor,),
            preexec_fn=_agent_setup(),  # noqa: PLW1509 - this process has one thread
        )
    except OSError as error:
        raise LaunchError(
            f"Cannot start {starter.argv[0]}: {error.strerror}.",
            hint="Check the interpreter's path.",
        ) from None


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


def _agent_setup() -> Callable[[], None] | None:
    """Return a function that prepares a new agent process.

    It gets its own process group, so that Ctrl-C reaches it only through us, and a SIGTERM if this
    process dies. A Ctrl-C that we forward waits until the agent handles it.
    """
    if os.name != "posix":
        return None
    parent = os.getpid()

    def prepare() -> None:
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        die_with_parent(parent, signal.SIGTERM)

    return prepare


@contextmanager
def _forward_signals(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Forward Ctrl-C to every agent, and a stop request to the head agent, which informs the
    others.

    At the first Ctrl-C the ranks save and stop. The second one ends them at once.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not processes:
            raise KeyboardInterrupt
        for process in processes:
            process.send_signal(signal.SIGINT)

    def stop(number: int, frame: FrameType | None) -> None:
        if not processes:
            raise KeyboardInterrupt
        processes[0].send_signal(signal.SIGTERM)

    with handle_signals(interrupt, stop):
        yield


Handler = Callable[[int, FrameType | None], None]


@contextmanager
def handle_signals(interrupt: Handler, stop: Handler) -> Iterator[None]:
    """Handle Ctrl-C and stop requests: SIGTERM, and SIGHUP unless it is ignored (as under
    nohup).
    """
    handlers = {signal.SIGINT: interrupt, signal.SIGTERM: stop}
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handlers[signal.SIGHUP] = stop
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wait_for_exit(processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait for agents to exit, and kill those that take too long."""
    deadline = time.monotonic() + EXIT_TIMEOUT
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            kill([process])


def _reap_children() -> None:
    """Wait for the zygote, a child of this process that exits right after its agent."""
    deadline = time.monotonic() + EXIT_TIMEOUT
    try:
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.01)
    except ChildProcessError:
        pass


def kill(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()
