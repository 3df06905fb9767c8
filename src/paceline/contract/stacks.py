"""The Python stack of a rank: the signal on which it writes that, whether it waits there for other
ranks, and how the probe on a node is asked for stacks.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import re
import signal
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from paceline.contract.heartbeat_file import WRITES_STACKS


def write_stacks_on_signal(
    path: str | os.PathLike[str], *, heartbeat_file: str, local_rank: int
) -> None:
    """From now on, append the Python stacks of all threads to a file on SIGUSR2, until the script
    takes the signal.

    A script may save and exit on SIGUSR2, so the heartbeat file says whose the signal is. Nobody
    else can know.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError:
        descriptor = 2
    faulthandler.register(signal.SIGUSR2, file=descriptor, all_threads=True)
    _mark(heartbeat_file, local_rank, 1)
    original, rank = signal.signal, os.getpid()

    @functools.wraps(original)
    def watched_signal(signalnum: Any, handler: Any) -> Any:
        # not in a process that the script has forked
        if signalnum == signal.SIGUSR2 and os.getpid() == rank:
            _mark(heartbeat_file, local_rank, 0)
        return original(signalnum, handler)

    signal.signal = watched_signal


def _mark(heartbeat_file: str, local_rank: int, value: int) -> None:
    # without it, the agent is gone
    with suppress(OSError), open(heartbeat_file, "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), WRITES_STACKS.pack(value), WRITES_STACKS.offset(local_rank))


_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+),? in (.+)$', re.MULTILINE)
LIBRARY = re.compile(
    r"/(site|dist)-packages/|/lib(64)?/python3|^<|/paceline/(runtime|agent)/|paceline\.zip/"
)
# Where a rank waits for others: in a rendezvous or a collective, or for a device that does.
_WAITS = re.compile(
    r"torch/distributed/.*:(init_process_group|_store_based_barrier|rendezvous|_create_c10d_store|barrier"
    r"|monitored_barrier|all_reduce|all_gather\w*|reduce\w*|broadcast\w*|gather\w*|scatter\w*|all_to_all\w*|wait"
    r"|new_group|_tcp_rendezvous_handler|_env_rendezvous_handler|_broadcast_coalesced|_sync_\w+"
    r"|_verify_param_shape_across_processes|send|recv)"
    r"|paceline.*/runtime/distributed/\w+\.py:(open_store|gather_placements|check_communication|_wait|meet"
    r"|wait_for_key|init_process_groups)"
    r"|paceline.*/runtime/step_boundary/stop_consensus\.py:(collect|any_rank)"
    r"|torch/autograd/graph\.py:_engine_run_backward"
    r"|torch/cuda/.*:synchronize"
)


@dataclass(frozen=True)
class Frame:
    path: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.path.rpartition('/')[2]}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Stack:
    """The main thread of a rank, the innermost frame first."""

    frames: tuple[Frame, ...]

    @property
    def waits_in(self) -> str:
        """The function in which it waits for other ranks; empty if it does not."""
        for frame in self.frames:
            if not LIBRARY.search(frame.path):
                return ""
            if _WAITS.search(f"{frame.path}:{frame.function}"):
                return frame.function
        return ""

    @property
    def where(self) -> str:
        """The innermost frame of the user's own code, or the innermost of all."""
        own = [frame for frame in self.frames if not LIBRARY.search(frame.path)]
        frame = next(iter([*own, *self.frames]), None)
        return str(frame) if frame else "?"


def read_stack(text: str) -> Stack | None:
    """Return the main thread of the last dump in a file; None if there is none. Each dump lists it
    last.
    """
    _, *threads = _THREAD.split(text)
    frames = _frames(threads[-1]) if threads else ()
    return Stack(frames) if frames else None


def read_crash(text: str) -> str:
    """Return where a process crashed, by what Python's fault handler has printed; empty if it has
    not.

    It is the innermost frame of the user's own code in the thread that crashed.
    """
    _, _, dump = text.rpartition("Fatal Python error: ")
    _, _, thread = dump.partition("Current thread 0x")
    frames = _frames(_THREAD.split(thread.partition("\n\n")[0])[0]) if dump != text else ()
    return Stack(frames).where if frames else ""


def _frames(thread: str) -> tuple[Frame, ...]:
    return tuple(
        Frame(path, int(line), function.strip()) for path, line, function in _FRAME.findall(thread)
    )


STACKS = "--stacks"
# begins the line with the answer: a site's start-up files may print others
PROBE_MARK = "paceline-probe "


@dataclass(frozen=True)
class NodeAnswer:
    """What a node says; `problem` if it says nothing."""

    host: str
    answer: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
