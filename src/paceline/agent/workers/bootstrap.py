"""The start of a rank: from here on this process behaves as `python train.py args` would.

`main` is what torchrun, or an agent that cannot fork, runs in place of the script.
"""

from __future__ import annotations

import builtins
import errno
import faulthandler
import functools
import importlib
import json
import os
import random
import signal
import socket
import stat
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.agent.framework_watch import watch_frameworks
from paceline.agent.health import heartbeat
from paceline.agent.rendezvous.network import bind_port
from paceline.agent.workers import process_tree
from paceline.agent.workers.rank_variables import REMOVED
from paceline.agent.workers.zygote.start import THREADS, parse_thread_count
from paceline.contract import clean_exit, env, process
from paceline.contract.heartbeat_file import SAVED_AND_STOPPED, ScriptEnd
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import AttemptFolder, RunFolder, write_atomically
from paceline.contract.stacks import write_stacks_on_signal

_AGENT_PACKAGE = "paceline.agent."
WORKING_DIRECTORY_TIMEOUT = 30.0
STORE_TIMEOUT = 60.0  # seconds; after that, torch's client waits as it always does


def main(_: list[str]) -> None:
    """Run a rank, described by its environment variables."""
    environ = os.environ
    if env.PARENT in environ:
        process.die_with_parent(int(environ[env.PARENT]))
    run = RunFolder(Path(environ[env.RUN]))
    launch_spec = LaunchSpec.from_json(run.launch_spec.read_text(encoding="utf-8"))
    local_rank = int(environ.get("LOCAL_RANK", "0"))
    under_torchrun = env.OUTPUT_PIPES in environ
    if under_torchrun:
        process.die_with_parent(None)
        _redirect_output(json.loads(environ[env.OUTPUT_PIPES])[str(local_rank)])
    attempt = run.attempt(int(environ[env.ATTEMPT]))
    # A process that spawns the ranks itself is not one: it has no heartbeat slot, and reports for
    # its first rank.
    is_rank = "RANK" in environ
    rank = int(environ.get("RANK", int(environ["GROUP_RANK"]) * launch_spec.nproc))
    heartbeat_file = environ[env.HEARTBEAT]
    try:
        run_rank(
            launch_spec, attempt, heartbeat_file, rank=rank, local_rank=local_rank, is_rank=is_rank
        )
    except SystemExit as leaving:
        # torchrun would treat this code as a failure and end the other ranks; the agent knows from
        # the heartbeat.
        if under_torchrun and leaving.code in launch_spec.saved_exit_codes:
            raise SystemExit(0) from None
        raise


def run_forked_rank(variables: dict[str, str]) -> None:
    """Run a rank with these variables in a process that a zygote has forked."""
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    time.tzset()  # TZ, too, may differ from the zygote's
    tempfile.tempdir = None  # torch asks for it at import, and this rank may have another TMPDIR
    with suppress(OSError):
        os.setsid()  # a group of its own, which the agent ends as a whole
    _reseed()
    threads = parse_thread_count(variables.get(THREADS, ""))
    if "torch" in sys.modules and threads:
        sys.modules["torch"].set_num_threads(threads)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None:
        wait_for_store(distributed, os.environ)
        # otherwise this torch cannot distribute
        if hasattr(distributed, "set_debug_level_from_env"):
            # the import read the zygote's TORCH_DISTRIBUTED_DEBUG
            distributed.set_debug_level_from_env()
    main([])


def wait_for_store(distributed: Any, environ: Mapping[str, str]) -> None:
    """Have this rank connect to rank 0's store once it listens. Takes the module
    `torch.distributed`.

    Torch's client is refused before, and retries only after 0.3 s, doubling the delay each time:
    that would be most of a warm start. Only on rank 0's own node: a listener elsewhere cannot be
    seen without connecting to it.
    """
    store, port = getattr(distributed, "TCPStore", None), environ.get("MASTER_PORT")
    if store is None or not port or environ.get("GROUP_RANK") != "0" or environ.get("RANK") == "0":
        return
    construct = store.__init__

    @functools.wraps(construct)
    def wait_and_construct(self: Any, *args: Any, **kwargs: Any) -> None:
        wanted = args[1] if len(args) > 1 else kwargs.get("port")
        serves = args[3] if len(args) > 3 else kwargs.get("is_master", False)
        if str(wanted) == port and not serves:
            await_listener(int(port))
        construct(self, *args, **kwargs)

    store.__init__ = wait_and_construct


def await_listener(port: int, timeout: float = STORE_TIMEOUT) -> bool:
    """Wait until a process of this machine listens on the port. Returns whether one does.

    No connection is needed: a port that the agent has only reserved can still be bound.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            bind_port(port).close()
        except OSError as error:
            return error.errno == errno.EADDRINUSE
        time.sleep(0.002)
    return False


def run_rank(
    spec: LaunchSpec,
    attempt: AttemptFolder,
    heartbeat_file: str,
    *,
    rank: int,
    local_rank: int,
    is_rank: bool = True,
) -> None:
    """Set up signals, streams and `__main__`, report ready, and run the program. Ends as Python
    itself would.
    """
    for name in REMOVED:
        os.environ.pop(name, None)
    clean_exit.protect_ranks()
    script_end = ScriptEnd(heartbeat_file, local_rank)
    _set_signals()
    _set_streams(rank)
    process_tree.name_process(f"rank-{rank}")
    if is_rank:
        faulthandler.enable(file=2)
        write_stacks_on_signal(
            attempt.stacks(rank), heartbeat_file=heartbeat_file, local_rank=local_rank
        )
        heartbeat.mark_ready(heartbeat_file, local_rank)
    watch_frameworks(heartbeat_file, local_rank)
    try:
        _enter_working_directory(spec)
        if spec.work.get("project"):
            _import_from_copy(spec.work["project"], spec.source)
        for variable in (env.PROOF, env.SAMPLES):
            if variable in os.environ and is_rank:
                from paceline.contract.rank_records import RECORDERS

                importlib.import_module(RECORDERS[variable]).start_recorder()
        _run_program(spec)
        process.exit_code, script_end.is_normal = 0, is_rank
    except SystemExit as leaving:
        if isinstance(leaving.code, int) and leaving.code and not leaving.code & 0xFF:
            leaving.code = 1  # the kernel keeps eight bits, so this would look like success
        process.exit_code = leaving.code or 0
        script_end.is_normal = is_rank and process.exit_code in (0, *spec.saved_exit_codes)
        if leaving.code in spec.saved_exit_codes and is_rank:
            heartbeat.write_state(heartbeat_file, local_rank=local_rank, state=SAVED_AND_STOPPED)
        # not `raise`: libraries replace this function to learn the exit code
        sys.exit(leaving.code)
    except BaseException as error:
        process.exit_code = 1
        if error.__traceback__ is not None:
            error.__traceback__ = _without_our_frames(error.__traceback__)
        if isinstance(error, KeyboardInterrupt) and heartbeat.is_ended(heartbeat_file):
            raise SystemExit(130) from None  # Ctrl-C: the agent reports it
        step = heartbeat.read_step(heartbeat_file, local_rank)
        # a rank's own report counts more than its parent's
        if is_rank or not attempt.error(rank).exists():
            report_error(attempt.error(rank), error, rank=rank, step=step)
        sys.excepthook(type(error), error, error.__traceback__)
        distributed = sys.modules.get("torch.distributed.distributed_c10d")
        clean_exit.keep_forever(*getattr(distributed, "_pg_map", ()))
        raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 1) from None


def report_error(path: Path, error: BaseException, *, rank: int, step: int) -> None:
    """Write the exception where the agent reads it; a full disk must not hide the exception
    itself.
    """
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    message, context = str(error), process.failure_context
    if context and isinstance(error, Exception):
        text += f"{context}\n"
        message = (
            message
            if "\n" in message
            else f"{message.rstrip('.')}. {context}"
            if message
            else context
        )
    record = {
        "rank": rank,
        "host": socket.gethostname(),
        "type": type(error).__name__,
        "message": message,
        "traceback": text,
        "step": step,
        "time": time.time(),
    }
    with suppress(OSError):
        write_atomically(path, json.dumps(record))


def _enter_working_directory(spec: LaunchSpec) -> None:
    """Enter it. One of the run's own that does not appear is an error: files would be read and
    written elsewhere.
    """
    deadline = time.monotonic() + WORKING_DIRECTORY_TIMEOUT
    while True:
        try:
            os.chdir(spec.cwd)
        except OSError as problem:
            if not spec.work.get("project"):
                return
            # The head agent has just made it, and a network file system may show that to other
            # nodes with a delay.
            if not isinstance(problem, FileNotFoundError) or time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def _run_program(spec: LaunchSpec) -> None:
    if spec.is_module:
        import runpy

        sys.path[:0] = [folder for folder in spec.import_path if folder not in sys.path]
        sys.argv[:] = [spec.program, *spec.args]
        sys.modules["__main__"] = _main_module()
        # `python -m` itself calls this; `runpy.run_module` would not leave a real `__main__`
        # behind.
        runpy._run_module_as_main(spec.program)  # type: ignore[attr-defined]
        return
    path = spec.program
    folder = str(Path(path).resolve().parent)
    sys.path[:0] = [
        folder,
        *(each for each in spec.import_path if each != folder and each not in sys.path),
    ]
    sys.argv[:] = [path, *spec.args]
    with open(path, "rb") as file:
        source = file.read()
    main = _main_module()
    main.__file__ = path
    main.__dict__["__cached__"] = None
    sys.modules["__main__"] = main
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _import_from_copy(project: str, copy: str) -> None:
    """Import the project's packages from its copy, also those that `pip install -e` has installed
    from the project.
    """
    project, inside = os.path.realpath(project), os.path.realpath(copy)

    def move(path: str) -> str:
        real = os.path.realpath(path)
        if not f"{real}/".startswith(f"{project}/"):
            return path
        moved = f"{inside}{real[len(project) :]}"
        # A venv in the project is only linked, not copied.
        return moved if os.path.realpath(moved) == moved and os.path.exists(moved) else path

    sys.path[:] = [move(path) for path in sys.path]
    for finder in sys.meta_path:  # setuptools maps the names of such packages to their folders
        packages = getattr(sys.modules.get(getattr(finder, "__module__", "")), "MAPPING", None)
        if isinstance(packages, dict):
            packages.update(
                {name: move(path) for name, path in packages.items() if isinstance(path, str)}
            )


def _main_module() -> types.ModuleType:
    """Return a real module, so that the script's classes can be pickled and spawned children find
    them.
    """
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={}, __spec__=None, __package__=None)
    return main


def _without_our_frames(trace: TracebackType) -> TracebackType | None:
    """Return the traceback from the script's first frame on."""
    current: TracebackType | None = trace
    # By module: byte code in the run half's zip has other file names.
    while current is not None and str(current.tb_frame.f_globals.get("__name__")).startswith(
        _AGENT_PACKAGE
    ):
        current = current.tb_next
    return current


def _set_signals() -> None:
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A stop request may arrive before the script has installed a handler: it must not end the rank.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _redirect_output(paths: list[str]) -> None:
    """Print into the agent's own pipes: torchrun would mix the output of its ranks."""
    for number, path in enumerate(paths, start=1):
        descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY)
        os.dup2(descriptor, number)
        os.close(descriptor)


def _set_streams(rank: int) -> None:
    """Leave a pipe or a file as input to rank 0 alone, and flush every line at once: people follow
    the logs.

    A rank is not in the session of a terminal, so it cannot read from one.
    """
    is_pipe = process.is_open(0) and stat.S_ISFIFO(os.fstat(0).st_mode)
    if rank != 0 or not (is_pipe or os.path.isfile(0)):
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _reseed() -> None:
    """Seed the random generators anew: forked ranks would draw the same numbers if the script sets
    no seed.
    """
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
