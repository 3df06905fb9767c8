"""Agents on this machine: start them, pass signals on, wait for them."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from paceline.contract import env
from paceline.contract.process import die_with_parent
from paceline.errors import LaunchError
from paceline.plan.local import LocalPlan, Starter

EXIT_TIMEOUT = 20.0  # seconds that other agents have to end once the head has


def job_start_name() -> str:
    """One start of a run on this machine."""
    return f"pid-{os.getpid()}"


def run_agents(plan: LocalPlan, *, zygote_socket: int | None = None) -> int:
    """Start all agents of a plan, and wait until the last has ended. The head's exit code.

    `zygote_socket` is the descriptor of a zygote that waits for its agent: only one that is alone can take it.
    """
    # What a process of the same number left there is not about this start.
    shutil.rmtree(plan.run_path.folder.job_start(job_start_name()).path, ignore_errors=True)
    shared = shared_variables(len(plan.agents))
    processes: list[subprocess.Popen[bytes]] = []
    with _forward_signals(processes):
        try:
            for starter in plan.agents:
                taken = zygote_socket if len(plan.agents) == 1 else None
                processes.append(start_agent(starter, shared, secrets=plan.secrets, zygote_socket=taken))
            if zygote_socket is not None:
                os.close(
                    zygote_socket
                )  # the agent alone holds it now: its end, however it comes, ends the zygote
            code = processes[0].wait()
            wait_for_exit(processes[1:])
            if zygote_socket is not None:
                _reap_children()
        except BaseException:
            kill(processes)
            raise
    return code if code >= 0 else 128 - code


def shared_variables(agents: int) -> dict[str, str]:
    variables = {env.JOB_START: job_start_name()}
    if agents > 1:
        variables[env.RENDEZVOUS] = f"127.0.0.1:{_free_port()}"
        variables[env.TOKEN] = secrets.token_hex(16)
    return variables


def _free_port() -> int:
    """A port that is free now; the head takes another if it no longer is, and says so in the job start's folder."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start_agent(
    starter: Starter,
    shared: Mapping[str, str],
    *,
    secrets: Mapping[str, str],
    zygote_socket: int | None = None,
    output: int | None = None,
) -> subprocess.Popen[bytes]:
    """`output` is the descriptor of a file that takes what the agent prints; else it is this terminal."""
    # What a run around this one told its ranks is not for this one.
    inherited = {name: value for name, value in os.environ.items() if name not in _OURS}
    environment = {**inherited, **secrets, **shared, **starter.variables}
    if "PYTHONPATH" in starter.variables and inherited.get("PYTHONPATH"):
        environment["PYTHONPATH"] = os.pathsep.join(
            [starter.variables["PYTHONPATH"], inherited["PYTHONPATH"]]
        )
    if zygote_socket is not None:
        environment[env.ZYGOTE] = str(zygote_socket)
    try:
        return subprocess.Popen(
            starter.argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=() if zygote_socket is None else (zygote_socket,),
            preexec_fn=_agent_setup(),  # noqa: PLW1509 - this process has one thread
        )
    except OSError as error:
        raise LaunchError(
            f"cannot start {starter.argv[0]}: {error.strerror}", hint="check the interpreter's path"
        ) from None


_OURS = (
    env.RUN, env.ATTEMPT, env.JOB_START, env.RENDEZVOUS, env.TOKEN, env.AGENT, env.HEARTBEAT,
    env.ZYGOTE, env.DATA,
)  # fmt: skip


def _agent_setup() -> Callable[[], None] | None:
    """In a process group of its own, so that Ctrl-C reaches it once, from here; told to stop if this process dies."""
    if os.name != "posix":
        return None
    parent = os.getpid()

    def prepare() -> None:
        os.setpgid(0, 0)
        die_with_parent(parent, signal.SIGTERM)

    return prepare


@contextmanager
def _forward_signals(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Ctrl-C goes to every agent, a request to stop to the head, which tells the others."""

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
    """Ctrl-C, and requests to stop: SIGTERM, and the end of the terminal unless that is to be outlived."""
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
    deadline = time.monotonic() + EXIT_TIMEOUT
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            kill([process])


def _reap_children() -> None:
    """The zygote is a child of this process, and ends right after its agent: wait, so that nothing outlives us."""
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
