"""A shell in a terminal, to type a page's commands into, and a loose comparison with the output that the page shows."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path

CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b\][^\x07]*\x07|\x1b[=>]")
DURATION = re.compile(r"\b(?:\d+h ?)?(?:\d+m ?)?\d+(?:\.\d+)? ?s\b|\b(?:\d+h ?)?\d+m\b")
ENDED = re.compile(r"@@(\d+)@@\r?\n")


class Terminal:
    """An interactive bash: Ctrl-C reaches the command in the foreground, as it does for a reader."""

    def __init__(self, cwd: Path, environment: dict[str, str]) -> None:
        self.master, slave = pty.openpty()
        # 40 lines of 120 columns
        fcntl.ioctl(slave, termios.TIOCSWINSZ, b"\x28\x00\x78\x00" + b"\x00" * 4)
        self.process = subprocess.Popen(
            ["bash", "--noprofile", "--norc", "--noediting", "-i"],
            cwd=cwd,
            env={**environment, "PS1": ""},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - its terminal
        )
        os.close(slave)
        self.type("stty -echo; PS1= PS2= PROMPT_COMMAND='echo @@$?@@'")

    def type(
        self, command: str, *, interrupt_after: str = "", timeout: float = 300
    ) -> tuple[str, int]:
        """Run a command, and return output and exit code. Press Ctrl-C after a line like `interrupt_after`."""
        os.write(self.master, f"{command}\n".encode())
        seen, deadline = "", time.monotonic() + timeout
        while not (end := ENDED.search(seen)):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{command} has not ended after {timeout} s:\n{plain(seen)[-4000:]}"
                )
            if select.select([self.master], [], [], 1.0)[0]:
                seen += os.read(self.master, 65536).decode(errors="replace")
            if interrupt_after and first_missing([interrupt_after], plain(seen)) is None:
                os.write(self.master, b"\x03")
                interrupt_after = ""
        assert not interrupt_after, f"{command} ended before it was interrupted:\n{plain(seen)}"
        return plain(seen[: end.start()]), int(end[1])

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGHUP)
        self.process.wait(10)
        os.close(self.master)


def plain(text: str) -> str:
    """Return what a terminal shows in the end, about: without colours, and without what was overwritten in a line."""
    lines = CONTROL.sub("", text).replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def first_missing(shown: Sequence[str], output: str) -> str | None:
    """Return the first line of a page that the output does not have, in order; None if it has them all.

    Words with a digit, paths and bars may be others, and so may the names of the machine and of the sandbox's network.
    """
    # which a terminal prints at the cursor
    lines = [line.removeprefix("^C") for line in output.splitlines()]
    rest = [" ".join(DURATION.sub("0s", line).split()) for line in lines]
    for line in shown:
        if line.strip() in ("", "...", "…"):
            continue
        pattern = re.compile(" ?".join(_word(word) for word in DURATION.sub("0s", line).split()))
        found = next((index for index, each in enumerate(rest) if pattern.fullmatch(each)), None)
        if found is None:
            return line
        rest = rest[found + 1 :]
    return None


def _word(word: str) -> str:
    if word in ("...", "…"):
        return r".*"
    if re.search(r"\d|[█▒░▓▁▇━┤╸]|^/|^\(?(?:laptop|namespaces)\)?$", word):
        return r"\S+(?: \d\S*)*"
    return re.escape(word)
