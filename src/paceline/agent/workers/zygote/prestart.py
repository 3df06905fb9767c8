"""Start a zygote before anything else, so that torch is imported while the command line parses its
options.

The options of the zygote are guessed from the arguments as they are typed. A wrong guess, because
of paceline.toml for example, costs a little work and nothing else: the zygote is discarded and the
right one started. If the command ends early, the zygote ends with it.
"""

from __future__ import annotations

import os
import signal
import sys

from paceline.agent.workers.warm import reason_to_start_cold, request_zygote
from paceline.agent.workers.zygote.start import (
    FORKING_STYLES,
    THREADS,
    ZygoteOptions,
    import_variables,
    parse_thread_count,
    python_command,
    start_zygote,
)
from paceline.contract.gpus import visible_devices
from paceline.contract.process import DEFAULT_WARM

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    import subprocess

# Options of `paceline run` that take no value, besides --no-...; all others are followed by one. A
# test compares them with the table of options, which takes too long to import here.
FLAGS = (
    "-m",
    "--module",
    "--check",
    "--continue",
    "--cpu",
    "--debug",
    "--deterministic",
    "--fitness",
    "--here",
    "--snapshot",
    "--strict",
    "--tensorboard",
    "--wandb",
    "--wandb-all-processes",
    "--warm",
)
SHORT = {"-N": "--nodes", "-J": "--name"}  # with a value, which may be attached: -N2
# nothing starts, or a program that is not in the arguments
NO_PRESTART = ("--dry-run", "--help", "-h", "--resume")


class Prestarted:
    """A zygote that waits for its agent. `replaced` says why a warm process could not serve it."""

    def __init__(self, python: str, options: ZygoteOptions, environ: dict[str, str]) -> None:
        self.python, self.options, self.environ, self.replaced = python, options, environ, ""
        self.agent: EarlyAgent | None = None
        connection: socket.socket | None = None
        if options.warm:
            connection, self.pid, self.replaced = request_zygote(python, options, environ)
        self.is_served = connection is not None  # by a warm process, whose child it is
        if connection is None:
            connection, self.pid = start_zygote(python, options, environ)
        self.descriptor = connection.detach()

    def discard(self) -> None:
        """End it: the run needs another one."""
        if self.agent is not None:
            self.agent.discard()
        os.close(self.descriptor)
        if not self.is_served:
            os.kill(self.pid, signal.SIGKILL)  # it would keep importing for a second or two
            os.waitpid(self.pid, 0)


class EarlyAgent:
    """An agent that imports its modules while the command line is parsed, and waits for its
    variables.
    """

    def __init__(self, zygote: int) -> None:
        import subprocess

        reader, self._writer = os.pipe()
        self.process = subprocess.Popen(
            [*python_command(sys.executable, "agent.main"), str(reader), str(os.getpid())],
            pass_fds=(reader, zygote),
            preexec_fn=_hold_back_interrupts,  # noqa: PLW1509 - this process has one thread
        )
        os.close(reader)

    def start(self, environ: dict[str, str]) -> subprocess.Popen[bytes]:
        """Let it run, with these variables."""
        import json

        with open(self._writer, "wb") as pipe:
            pipe.write(json.dumps(environ).encode())
        return self.process

    def discard(self) -> None:
        os.close(self._writer)
        self.process.wait()


def _hold_back_interrupts() -> None:
    """Ctrl-C reaches the agent only through this command, and waits until the agent handles it."""
    os.setpgrp()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


prestarted: Prestarted | None = None


def start(argv: list[str]) -> None:
    """Start a zygote for this command line if it needs one. Never raises: the run just starts a
    little later.
    """
    global prestarted
    if len(argv) < 3 or argv[1] != "run" or sys.platform != "linux":
        return
    environ = dict(os.environ)
    try:
        options = guess(argv[2:], cores=len(os.sched_getaffinity(0)), environ=environ)
        if options is not None:
            typed = _typed_variables(_split(argv[2:])[0])
            environ.update(import_variables(typed, preload=bool(options.preload)))
            prestarted = Prestarted(sys.executable, options, environ)
            if prestarted.is_served:  # with torch imported, the agent would take longest
                prestarted.agent = EarlyAgent(prestarted.descriptor)
    except (OSError, ValueError):
        return


def guess(args: list[str], *, cores: int, environ: dict[str, str]) -> ZygoteOptions | None:
    """Return the zygote options that fit these arguments of `paceline run`; None if no zygote is
    needed.
    """
    options, program = _split(args)
    is_module = "-m" in options or "--module" in options
    if not program or (not is_module and not os.path.isfile(program)):
        return None
    style, nodes = options.get("--style", ["fork"])[-1], options.get("--nodes", ["1"])[-1]
    nproc = _default_nproc("--cpu" in options, environ)
    if "--nproc" in options:
        nproc = int(options["--nproc"][-1])
    if style not in FORKING_STYLES or nodes != "1" or nproc < 1:
        return None
    counts = (
        parse_thread_count(each.get(THREADS, "")) for each in (_typed_variables(options), environ)
    )
    threads = next(filter(None, counts), max(1, cores // nproc))
    is_warm = "--warm" in options and not reason_to_start_cold(environ)
    return ZygoteOptions(
        program,
        is_module=is_module,
        threads=threads,
        preload=options.get("--preload", []),
        warm=DEFAULT_WARM if is_warm else 0,
    )


def _typed_variables(options: dict[str, list[str]]) -> dict[str, str]:
    """Return the variables of --env."""
    parts = (text.partition("=") for text in options.get("--env", []))
    return {name: value for name, equals, value in parts if equals}


def _split(args: list[str]) -> tuple[dict[str, list[str]], str]:
    """Return the options with their values, and the program; without one, nothing starts."""
    options: dict[str, list[str]] = {}
    rest = iter(args)
    for arg in rest:
        name, equals, value = arg.partition("=")
        if arg[:2] in SHORT:
            options.setdefault(SHORT[arg[:2]], []).append(arg[2:] or next(rest, ""))
            continue
        if not arg.startswith("-"):
            return options, arg
        if name in NO_PRESTART:
            break
        takes_none = name in FLAGS or name.startswith("--no-")
        text = value if equals else "" if takes_none else next(rest, "")
        options.setdefault(name, []).append(text)
    return options, ""


def _default_nproc(on_cpu: bool, environ: dict[str, str]) -> int:
    """Return the number of ranks that the plan chooses: one per visible GPU, else two."""
    gpus = sum(1 for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit())
    visible = visible_devices(environ)
    if visible is not None:
        gpus = min(gpus, len(visible))
    return 2 if on_cpu or not gpus else gpus
