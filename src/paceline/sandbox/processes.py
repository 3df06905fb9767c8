"""Processes that outlive the command that started them, known by pid and start time, never by name."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Process:
    """A pid alone may have passed to a stranger; together with the start time it is one process for ever."""

    pid: int
    started: int  # in clock ticks since the machine booted

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The process that has this pid now; None when nobody has it, or only a zombie."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        # The second field is the name in parentheses, and may itself hold any character.
        fields = text[text.rindex(")") + 2 :].split()
        return None if fields[0] in "ZX" else cls(pid, int(fields[19]))

    def alive(self) -> bool:
        return Process.of(self.pid) == self

    def signal(self, number: int) -> None:
        if self.alive():
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass

    def end(self, *, grace: float = 10.0) -> None:
        """Ask it to end, then make it; returns when it is gone."""
        self.signal(signal.SIGTERM)
        if not self.gone_within(grace):
            self.kill()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.gone_within(30.0)

    def gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def children(self) -> list[Process]:
        """Its own children, if it is there."""
        try:
            found = psutil.Process(self.pid).children() if self.alive() else []
        except psutil.Error:
            return []
        return [each for child in found if (each := Process.of(child.pid))]


def start(argv: list[str], *, log: Path, environment: dict[str, str]) -> Process | None:
    """Start a program that outlives us; None when it ended at once (its log tells why).

    A shell in between leaves it without a parent that would have to reap it, and `env` gives it default
    signals: a background job ignores SIGINT, and so would every task of the cluster.
    """
    shell = 'log=$1; shift; env --default-signal "$@" </dev/null >>"$log" 2>&1 & echo $!'
    told = subprocess.run(
        ["sh", "-c", shell, "sh", str(log), *argv],
        env=environment, start_new_session=True, cwd="/", text=True, stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    return Process.of(int(told.stdout))


def kill_all(processes: Iterable[Process]) -> None:
    """End them all at once: each is signalled before any is waited for."""
    found = list(processes)
    for process in found:
        process.signal(signal.SIGKILL)
    for process in found:
        process.gone_within(30.0)


def of_node(*, node: str, log: Path, slurm_conf: Path) -> list[Process]:
    """All processes of a node that shares this machine's process table with others.

    The daemon and its step daemons detach from each other and wipe their environments: the log file that
    they hold open tells whose they are. Tasks, however they detach, carry the node's name in their environment.
    """
    wanted = str(log)
    mine: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            if process.name() in ("slurmd", "slurmstepd"):
                if any(_target(link) == wanted for link in Path(f"/proc/{process.pid}/fd").iterdir()):
                    mine |= {each.pid: each for each in (process, *process.children(recursive=True))}
            else:
                variables = process.environ()
                if variables.get("SLURMD_NODENAME") == node and variables.get("SLURM_CONF") == str(
                    slurm_conf
                ):
                    mine[process.pid] = process
        except (psutil.Error, OSError):
            continue
    return [each for pid in mine if (each := Process.of(pid))]


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""
