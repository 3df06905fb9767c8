"""Become a rank: from here on this process behaves as `python train.py args` would."""

from __future__ import annotations

import builtins
import faulthandler
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
import types
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.agent.health import heartbeat
from paceline.agent.workers import processes
from paceline.agent.workers.environment import REMOVED
from paceline.agent.workers.zygote.start import THREADS, count_of
from paceline.contract.heartbeat_file import SAVED_AND_STOPPED
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import AttemptFolder, write_atomically
from paceline.contract.verdict import STOPPED_EXIT

_ours = str(Path(__file__).parent.parent)


def job_of(launch_spec: LaunchSpec, *, attempt: AttemptFolder, beat: str) -> dict[str, Any]:
    """What a rank must know beside its variables, as it travels to a zygote."""
    return {
        "program": launch_spec.program, "args": launch_spec.args, "is_module": launch_spec.is_module,
        "import_path": launch_spec.import_path, "cwd": launch_spec.cwd, "threads": launch_spec.threads,
        "attempt": attempt.number, "folder": str(attempt.path), "beat": beat,
    }  # fmt: skip


def become(job: dict[str, Any]) -> None:
    """For a process that was forked from a zygote: its variables come with the job."""
    for name in [name for name in os.environ if name not in job["variables"]]:
        del os.environ[name]
    os.environ.update(job["variables"])
    with suppress(OSError):
        os.setsid()  # its own group: the agent ends it as a whole
    _forget_the_parents_numbers()
    _set_threads(count_of(os.environ.get(THREADS, "")) or job["threads"])
    run(job, rank=job["rank"], local_rank=job["local_rank"])


def run(job: dict[str, Any], *, rank: int, local_rank: int, is_rank: bool = True) -> None:
    """Set up signals, streams and `__main__`, say ready, and run the program. Ends as Python itself would."""
    for name in REMOVED:
        os.environ.pop(name, None)
    attempt = AttemptFolder(Path(job["folder"]), job["attempt"])
    _set_signals()
    _set_streams()
    processes.name_process(f"rank-{rank}")
    with suppress(OSError):
        os.chdir(job["cwd"])
    if is_rank:
        _answer_with_stacks(attempt.stacks(rank))
        heartbeat.say_ready(job["beat"], local_rank)
    try:
        _run_program(job)
    except SystemExit as leaving:
        if leaving.code == STOPPED_EXIT and is_rank:
            heartbeat.write_state(job["beat"], local_rank=local_rank, state=SAVED_AND_STOPPED)
        raise
    except BaseException as problem:
        if problem.__traceback__ is not None:
            problem.__traceback__ = _without_our_frames(problem.__traceback__)
        step = heartbeat.read_step(job["beat"], local_rank)
        if is_rank or not attempt.error(rank).exists():  # a rank's own word counts more than its parent's
            report_error(attempt.error(rank), problem, rank=rank, step=step)
        sys.excepthook(type(problem), problem, problem.__traceback__)
        raise SystemExit(130 if isinstance(problem, KeyboardInterrupt) else 1) from None


def report_error(path: Path, problem: BaseException, *, rank: int, step: int) -> None:
    """Leave the exception where the agent finds it; a full disk must not hide the exception itself."""
    text = "".join(traceback.format_exception(type(problem), problem, problem.__traceback__))
    record = {
        "rank": rank, "host": socket.gethostname(), "type": type(problem).__name__, "message": str(problem),
        "traceback": text, "step": step, "time": time.time(),
    }  # fmt: skip
    with suppress(OSError):
        write_atomically(path, json.dumps(record))


def _run_program(job: dict[str, Any]) -> None:
    if job["is_module"]:
        import runpy

        sys.path[:0] = [folder for folder in job["import_path"] if folder not in sys.path]
        sys.argv[:] = [job["program"], *job["args"]]
        sys.modules["__main__"] = _main_module()
        # What `python -m` itself calls; `runpy.run_module` would not leave a real `__main__` behind.
        runpy._run_module_as_main(job["program"])  # type: ignore[attr-defined]
        return
    path = job["program"]
    folder = str(Path(path).resolve().parent)
    sys.path[:0] = [folder, *(each for each in job["import_path"] if each != folder and each not in sys.path)]
    sys.argv[:] = [path, *job["args"]]
    with open(path, "rb") as file:
        source = file.read()
    main = _main_module()
    main.__file__ = path
    main.__dict__["__cached__"] = None
    sys.modules["__main__"] = main
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _main_module() -> types.ModuleType:
    """A real one, so that what the script defines can be pickled, and spawned children find it again."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={}, __spec__=None, __package__=None)
    return main


def _without_our_frames(trace: TracebackType) -> TracebackType | None:
    """The traceback from the script's first frame on."""
    current: TracebackType | None = trace
    while current is not None and current.tb_frame.f_code.co_filename.startswith(_ours):
        current = current.tb_next
    return current


def _set_signals() -> None:
    for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(each, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A request to stop may come before the script has said what it does with it: it must not end the rank.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _set_streams() -> None:
    """No input; and whole lines leave at once, as on a terminal, since others look on."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _answer_with_stacks(path: Path) -> None:
    """SIGUSR2: the Python stacks of all threads, into the attempt's folder."""
    faulthandler.enable(file=2)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError:
        descriptor = 2
    faulthandler.register(signal.SIGUSR2, file=descriptor, all_threads=True)


def _forget_the_parents_numbers() -> None:
    """Forked ranks would all draw the same random numbers where the script sets no seed."""
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _set_threads(threads: int) -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
