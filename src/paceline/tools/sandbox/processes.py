"""Processes that outlive the command that started them, identified by pid and start time."""

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
    """One process. A pid may be reused by another process, but not together with the start time."""

    pid: int
    started: int  # in clock ticks since the machine booted

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Return the process that has this pid now, or None if there is none or it is a zombie."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        # The second field is the name in parentheses, which may contain any character.
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
        """Terminate the process, kill it after the grace period, and wait until it is gone."""
        self.signal(signal.SIGTERM)
        if not self.wait(grace):
            self.kill()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait(30.0)

    def wait(self, timeout: float) -> bool:
        """Wait until the process is gone, and return whether it is."""
        deadline = time.monotonic() + timeout
        while self.alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def children(self) -> list[Process]:
        """Return the process's children; none if it is gone."""
        try:
            found = psutil.Process(self.pid).children() if self.alive() else []
        except psutil.Error:
            return []
        return [each for child in found if (each := Process.of(child.pid))]


def start(argv: list[str], *, log: Path, environment: dict[str, str]) -> Process | None:
    """Start a program that outlives us; return None if it exited at once (its log says why).

    The shell in between detaches it, so that we need not reap it. `env` restores the default
    signals: a background job ignores SIGINT, and so would every task of the cluster.
    """
    shell = 'log=$1; shift; env --default-signal "$@" </dev/null >>"$log" 2>&1 & echo $!'
    done = subprocess.run(
        ["sh", "-c", shell, "sh", str(log), *argv],
        env=environment,
        start_new_session=True,
        cwd="/",
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    return Process.of(int(done.stdout))


def kill_all(processes: Iterable[Process]) -> None:
    """Kill all of them, signalling each one before waiting for any."""
    killed = list(processes)
    for process in killed:
        process.signal(signal.SIGKILL)
    for process in killed:
        process.wait(30.0)


def node_processes(*, node: str, log: Path, slurm_conf: Path) -> list[Process]:
    """Return all processes of a node that shares this machine's process table with others.

    The daemon and its step daemons detach from each other and clear their environments, so we find
    them by the log file that they hold open. Tasks, even detached ones, have the node's name in
    their environment.
    """
    pids: set[int] = set()
    for process in psutil.process_iter():
        try:
            if process.name() in ("slurmd", "slurmstepd"):
                if any(
                    _target(link) == str(log) for link in Path(f"/proc/{process.pid}/fd").iterdir()
                ):
                    pids |= {each.pid for each in (process, *process.children(recursive=True))}
            else:
                variables = process.environ()
                if (variables.get("SLURMD_NODENAME"), variables.get("SLURM_CONF")) == (
                    node,
                    str(slurm_conf),
                ):
                    pids.add(process.pid)
        except (psutil.Error, OSError):
            continue
    return [found for pid in sorted(pids) if (found := Process.of(pid))]


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""
