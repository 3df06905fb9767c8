"""Start a zygote in a Python process, with the variables that it must have from its start: those
that take effect only when a process starts or torch is imported; and send it messages.

Keep this module light: `paceline run` reads it before it has imported anything.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct

import paceline
from paceline.contract import gpus

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from paceline.contract.launch_spec import LaunchSpec
    from paceline.errors import LaunchError

# frameworks find torchrun's variables and use them
FORKING_STYLES = ("fork", "lightning", "accelerate")

THREADS = "OMP_NUM_THREADS"

_LENGTH = struct.Struct("=I")  # bytes of JSON
_MAX_DESCRIPTORS = 250  # the kernel passes at most 253 with one message
_REST_TIMEOUT = 10.0  # seconds for the rest of a message whose first byte has arrived

# Not `-m`: it would put the current folder, and any module in it, ahead of the standard library.
# `-c` does the same with an empty entry, unless PYTHONSAFEPATH is set: then the first entry is
# needed.
DROP_CWD_FROM_PATH = "import sys; sys.path[:1] = filter(None, sys.path[:1])"
_RUN_MAIN = (
    DROP_CWD_FROM_PATH
    + """
try: import paceline.{module} as it
except ImportError: sys.path.append({root!r}); import paceline.{module} as it
sys.exit(it.main(sys.argv[1:]))"""
)


def python_command(python: str, module: str, *, bare: bool = False) -> list[str]:
    """Return the command that runs `main` of a module below `paceline` in a new interpreter.

    A bare interpreter has no site-packages and starts in half the time.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(paceline.__file__)))
    return [python, *(["-S"] if bare else []), "-c", _RUN_MAIN.format(module=module, root=root)]


def cannot_start(python: str, error: OSError) -> LaunchError:
    from paceline.errors import LaunchError

    return LaunchError(
        f"Cannot start {python}: {error.strerror}.",
        hint="The interpreter must exist on every node: check [environment] in paceline.toml.",
    )


class ZygoteOptions:
    """The options of a zygote. `warm` is for how many seconds a copy of it stays for later runs."""

    def __init__(
        self, program: str, *, is_module: bool, threads: int, preload: list[str], warm: int = 0
    ) -> None:
        self.program = program
        self.is_module = is_module
        self.threads = threads
        self.preload = preload
        self.warm = warm

    @classmethod
    def of(
        cls, launch_spec: LaunchSpec, environ: Mapping[str, str], *, warm: int = 0
    ) -> ZygoteOptions:
        """Return the options of the zygote that a run needs."""
        return cls(
            launch_spec.in_snapshot(launch_spec.program),
            is_module=launch_spec.is_module,
            threads=thread_count(launch_spec, environ),
            preload=launch_spec.preload,
            warm=warm,
        )

    def to_args(self) -> list[str]:
        return [
            str(self.threads),
            str(self.warm),
            str(int(self.is_module)),
            self.program,
            *self.preload,
        ]

    @classmethod
    def from_args(cls, args: list[str]) -> ZygoteOptions:
        threads, warm, is_module, program, *preload = args
        return cls(
            program,
            is_module=is_module == "1",
            threads=int(threads),
            preload=preload,
            warm=int(warm),
        )


def start_zygote(
    python: str, options: ZygoteOptions, environ: dict[str, str]
) -> tuple[socket.socket, int]:
    """Start a zygote. Returns our end of its socket and its process id; raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        theirs.set_inheritable(True)
        args = [str(theirs.fileno()), str(os.getpid()), *options.to_args()]
        # posix_spawn, because importing `subprocess` alone takes longer than everything else here.
        pid = os.posix_spawnp(
            python, [*python_command(python, "agent.workers.zygote.zygote"), *args], environ
        )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    return ours, pid


class ConnectionClosed(Exception):
    """The other process has closed its end."""


class MessageSocket:
    """One end of a connection, read and written by whole messages."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end

    def fileno(self) -> int:
        return self.end.fileno()

    def send(
        self,
        message: dict[str, Any],
        descriptors: Sequence[int] = (),
        *,
        timeout: float | None = None,
    ) -> None:
        """Send a whole message; raises `ConnectionClosed`, also when the other process does not
        read it in time.
        """
        # ASCII escapes preserve arguments and file names that are not UTF-8 (Python's surrogates),
        # byte for byte.
        body = json.dumps(message).encode()
        data = _LENGTH.pack(len(body)) + body
        try:
            self.end.settimeout(timeout)
            for start in range(0, len(descriptors), _MAX_DESCRIPTORS):
                batch = descriptors[start : start + _MAX_DESCRIPTORS]
                assert len(data) > 1, "each batch of descriptors travels with a byte"
                data = data[socket.send_fds(self.end, [data[:1]], list(batch)) :]
            self.end.sendall(data)
        except OSError as error:
            raise ConnectionClosed(str(error)) from error

    def receive(self, timeout: float | None = None) -> tuple[dict[str, Any], list[int]]:
        """Wait for the next message; raises `ConnectionClosed` and `TimeoutError`."""
        if not select.select([self.end], [], [], timeout)[0]:
            raise TimeoutError
        descriptors: list[int] = []
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, descriptors))
        return json.loads(self._read(length, descriptors)), descriptors

    def receive_pending(self) -> list[tuple[dict[str, Any], list[int]]]:
        """Return all messages that have arrived, without waiting; raises `ConnectionClosed` after
        the last one.
        """
        messages: list[tuple[dict[str, Any], list[int]]] = []
        try:
            while select.select([self.end], [], [], 0)[0]:
                messages.append(self.receive())
        except ConnectionClosed:
            if not messages:
                raise
        return messages

    def close(self) -> None:
        self.end.close()

    def _read(self, size: int, descriptors: list[int]) -> bytes:
        """Read so many bytes, and not one more: another process may read the next message."""
        data = b""
        while len(data) < size:
            try:
                self.end.settimeout(_REST_TIMEOUT)
                part, passed, _, _ = socket.recv_fds(self.end, size - len(data), _MAX_DESCRIPTORS)
            except OSError as error:
                raise ConnectionClosed(str(error)) from error
            if not part:
                raise ConnectionClosed("end of messages")
            descriptors += passed
            data += part
        return data


def parse_thread_count(text: str) -> int:
    """Return the threads of the outer loop in a value such as "4" or "4,2"; 0 if there is no
    number.
    """
    first = text.partition(",")[0].strip()
    return int(first) if first.isdigit() else 0


def thread_count(launch_spec: LaunchSpec, environ: Mapping[str, str]) -> int:
    """Return the threads of a rank: what the user set, in the spec or the environment, else its
    share of the cores.
    """
    counts = (
        parse_thread_count(each.get(THREADS, "")) for each in (launch_spec.variables, environ)
    )
    return next((count for count in counts if count), launch_spec.threads)


# Libraries read these when they load. What torch itself reads is in torch/*/config.py and in its
# C++ code.
READ_AT_IMPORT = (
    "OMP_",
    "KMP_",
    "GOMP_",
    "MKL_",
    "OPENBLAS_",
    "GOTO_",
    "BLIS_",
    "VECLIB_",
    "NVPL_",
    "NUMEXPR_",
    "ATEN_",
    "TORCH",
    "PYTORCH_",
    "AOT",
    "INDUCTOR_",
    "TRITON_",
    "PT2_",
    "FX_",
    "CUTLASS_",
    "CUTEDSL_",
    "KINETO_",
    "PARTITIONER_",
    "COMPILE_STROBELIGHT_",
    "CUDA_",
    "HIP_",
    "ROCM_",
    "DNNL_",
    "ONEDNN_",
    "NPY_",
    "NUMPY_",
    "SYMPY_",
    "MPMATH_",
    "CXX",
    "LD_",
    "MALLOC_",
)

# The interpreter and the C library read these when a process starts. A script that sets one changes
# nothing itself.
READ_AT_START = ("PYTHON", "GLIBC_", "LC_", "LANG", "HOME")

# When a rank first uses a GPU, compiles something, or opens a process group.
READ_LATER = (
    *gpus.NAMES,
    "TORCHELASTIC_",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
    "TORCH_HOME",
    "TORCH_NCCL_",
)

READ_BY_RANKS = ("PACELINE_", "WANDB_", "NCCL_", "GLOO_")


def is_read_at_import(name: str) -> bool:
    """Whether a script that sets this variable before it imports torch cannot be forked after that
    import.
    """
    return name.startswith(READ_AT_IMPORT) and (
        name in gpus.NAMES or not name.startswith(READ_LATER)
    )


def import_variables(variables: Mapping[str, str], *, preload: bool) -> dict[str, str]:
    """Return those of a run's own variables that a zygote must have from its start: modules of the
    user, which it preloads, may read any name.
    """
    if preload:
        others = READ_LATER + READ_BY_RANKS
        return {name: text for name, text in variables.items() if not name.startswith(others)}
    return {
        name: text
        for name, text in variables.items()
        if name.startswith(READ_AT_IMPORT + READ_AT_START) and not name.startswith(READ_LATER)
    }
