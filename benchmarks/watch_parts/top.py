"""What `paceline top` costs while it shows ten live runs: CPU time of its process over a minute, in a real terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import psutil

from watch_parts.runs import make_runs

SECONDS = 60.0
START = 30.0  # seconds until it has read everything once
SIZE = (40, 120)  # rows, columns
BLOCK = 65536


class LiveRuns:
    """Appends a line to the metrics and the log of each active run once per second."""

    def __init__(self, scratch: Path, active: int) -> None:
        folders = sorted(
            (path.parent for path in scratch.glob("*/*/*/run.json")), key=lambda path: path.name
        )[:active]
        for folder in folders:
            for path in (folder / "metrics.jsonl", folder / "attempt-1" / "rank-0.log"):
                content = path.read_bytes()  # a link that all runs share: replace it
                path.unlink()
                path.write_bytes(content)
        self._folders, self._closed = folders, threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def _write(self) -> None:
        step = 300
        while not self._closed.wait(1.0):
            step += 1
            line = json.dumps(
                {"step": step, "time": time.time(), "loss": 1 / step, "seconds": 1.0, "lr": 1e-3}
            )
            for folder in self._folders:
                with (
                    open(folder / "metrics.jsonl", "a") as metrics,
                    open(folder / "attempt-1/rank-0.log", "a") as log,
                ):
                    metrics.write(f"{line}\n")
                    log.write(f"step {step} loss {1 / step:.5f}\n")

    def close(self) -> None:
        self._closed.set()
        self._thread.join()


def drain(terminal: int, seconds: float) -> int:
    """Read what is drawn for so long, and return how many bytes that were."""
    count, until = 0, time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if select.select([terminal], [], [], left)[0]:
            try:
                count += len(os.read(terminal, BLOCK))
            except OSError:  # the program has ended
                break
    return count


def watch(scratch: Path, seconds: float) -> tuple[float, float]:
    """Return the share of a core that the program took, and the bytes per second that it drew."""
    terminal, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", *SIZE, 0, 0))
    environ = {**os.environ, "PACELINE_SCRATCH": str(scratch), "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "paceline", "top"]
    with subprocess.Popen(
        command, env=environ, cwd=scratch, stdin=child, stdout=child, stderr=child
    ) as process:
        os.close(child)
        drain(terminal, START)
        before = psutil.Process(process.pid).cpu_times()
        drawn = drain(terminal, seconds)
        after = psutil.Process(process.pid).cpu_times()
        os.write(terminal, b"q")
        drain(terminal, 5.0)
    os.close(terminal)
    return (after.user + after.system - before.user - before.system) / seconds, drawn / seconds


def measure(folder: Path, runs: int, active: int, seconds: float = SECONDS) -> None:
    """Print what `top` took, and how much it drew."""
    scratch = make_runs(folder, runs, active)
    live = LiveRuns(scratch, active)
    try:
        share, drawn = watch(scratch, seconds)
    finally:
        live.close()
    print(
        f"top, {active} live of {runs} runs: {share:.1%} of a core, {drawn / 1000:.1f} kB/s drawn",
        flush=True,
    )
