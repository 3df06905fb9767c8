"""Starting a zygote: what it is told on its command line. Light, since a head start is worth milliseconds."""

from __future__ import annotations

import os
import socket

import paceline

FORKING_STYLES = ("fork", "lightning", "accelerate")  # frameworks find torchrun's variables, and use them

THREADS = "OMP_NUM_THREADS"

# Not `-m`: that would put the current folder, and whatever lies in it, ahead of the standard library. `-c` does so
# too, as an empty entry, unless PYTHONSAFEPATH is set: then the first entry is one that is needed.
NOT_FROM_HERE = "import sys; sys.path[:1] = filter(None, sys.path[:1])"
_START = (
    NOT_FROM_HERE
    + """
try: import paceline.agent.{module} as it
except ImportError: sys.path.append({root!r}); import paceline.agent.{module} as it
it.main(sys.argv[1:])"""
)


def python_command(python: str, module: str, *, bare: bool = False) -> list[str]:
    """How to run the `main` of a module of this room in a fresh interpreter; a bare one has no packages that were
    installed, and starts in half the time.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(paceline.__file__)))
    return [python, *(["-S"] if bare else []), "-c", _START.format(module=module, root=root)]


class Opening:
    """A agent adopts only a zygote that was told what it would have said itself."""

    def __init__(self, program: str, *, is_module: bool, threads: int, preload: list[str]) -> None:
        self.program = program
        self.is_module = is_module
        self.threads = threads
        self.preload = preload

    def words(self) -> list[str]:
        return [str(self.threads), str(int(self.is_module)), self.program, *self.preload]

    @classmethod
    def read(cls, words: list[str]) -> Opening:
        threads, is_module, program, *preload = words
        return cls(program, is_module=is_module == "1", threads=int(threads), preload=preload)


def open_zygote(python: str, opening: Opening, environ: dict[str, str]) -> tuple[socket.socket, int]:
    """Start a zygote: our end of its socket, and its process id. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        theirs.set_inheritable(True)
        told = [str(theirs.fileno()), str(os.getpid()), *opening.words()]
        # posix_spawn, since `subprocess` alone takes longer to import than all that is needed here.
        pid = os.posix_spawnp(python, [*python_command(python, "workers.zygote.zygote"), *told], environ)
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    return ours, pid


def count_of(text: str) -> int:
    """The threads of the outer loop in a value such as "4" or "4,2"; 0 where it names none."""
    first = text.partition(",")[0].strip()
    return int(first) if first.isdigit() else 0
