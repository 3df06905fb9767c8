"""Start a zygote in a Python process. Imports little: start-up time counts."""

from __future__ import annotations

import os
import socket

from paceline.agent.python_command import python_command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from paceline.errors import LaunchError

# frameworks find torchrun's variables and use them
FORKING_STYLES = ("fork", "lightning", "accelerate")

THREADS = "OMP_NUM_THREADS"


def cannot_start(python: str, error: OSError) -> LaunchError:
    from paceline.errors import LaunchError

    return LaunchError(
        f"Cannot start {python}: {error.strerror}.",
        hint="The interpreter must exist on every node: check [environment] in paceline.toml.",
    )


class ZygoteOptions:
    """The options of a zygote. An agent adopts a prestarted zygote only if it has the options the
    agent would pass.

    `warm` is for how many seconds a copy of it stays for later runs.
    """

    def __init__(
        self, program: str, *, is_module: bool, threads: int, preload: list[str], warm: int = 0
    ) -> None:
        self.program = program
        self.is_module = is_module
        self.threads = threads
        self.preload = preload
        self.warm = warm

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


def parse_thread_count(text: str) -> int:
    """Return the threads of the outer loop in a value such as "4" or "4,2"; 0 if there is no
    number.
    """
    first = text.partition(",")[0].strip()
    return int(first) if first.isdigit() else 0
