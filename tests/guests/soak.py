"""Repeat the ways in which guests end, under load, and count hangs and wrong ends.

    python tests/guests/soak.py [--runs 200] [--parallel 2] [--load 2] [--launcher zygote]

By default, zygotes fork the ranks without an agent, so that only the ranks themselves cost time. `--launcher paceline`
starts a whole run each time; `--launcher torchrun` shows how the same scripts end without Paceline.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from queue import Queue
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from paceline.agent.health.heartbeat import Heartbeats
from paceline.agent.workers.zygote.start import MessageSocket, ZygoteOptions, start_zygote
from paceline.contract.launch_spec import LaunchSpec

SCRIPT = Path(__file__).with_name("exit_paths.py")
PATHS = (
    "ddp",
    "two_groups",
    "new_group",
    "fsdp",
    "exception",
    "no_destroy",
    "no_destroy_global",
    "pending",
)
OUTCOMES = ("right", "hang", "wrong exit code", "output lost")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def judge(path: str, codes: list[int], folder: Path) -> str:
    """Return the outcome of a guest whose ranks, or whose launcher, ended with these codes."""
    fails = path == "exception"
    if any((code != 0) != fails or code < 0 for code in codes):
        return "wrong exit code"
    if len(codes) < 2 and fails:
        return "right"  # the launcher may end the other rank before its output is complete
    outputs = [file.read_text() for file in folder.rglob("output-*")]
    lines = sum(
        (folder / name).read_text().count("atexit")
        for name in ("rank-0.log", "rank-1.log", "console")
        if (folder / name).exists()
    )
    return "right" if outputs == ["complete"] * 2 and lines >= len(codes) else "output lost"


class ZygoteLane:
    """Forks one pair of ranks after another from one zygote, as a running agent does."""

    def __init__(self) -> None:
        options = ZygoteOptions(str(SCRIPT), is_module=False, threads=1, preload=[])
        ours, self.pid = start_zygote(sys.executable, options, dict(os.environ))
        self.zygote = MessageSocket(ours)
        self.heartbeats = Heartbeats(2)
        self.receive("ready", time.monotonic() + 120)

    def receive(self, kind: str, deadline: float) -> dict[str, Any]:
        while True:
            message, _ = self.zygote.receive(max(0.01, deadline - time.monotonic()))
            if message["kind"] == kind:
                return message

    def run(self, path: str, folder: Path, timeout: float) -> list[int] | None:
        """Return the exit codes of both ranks; None if they hang."""
        spec = LaunchSpec(
            run_id="soak", program=str(SCRIPT), args=[path], cwd=str(folder), nproc=2, style="fork"
        )
        (folder / "attempt-1").mkdir()  # for stacks
        (folder / "launch.json").write_text(json.dumps(asdict(spec)))
        environ = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "PACELINE_RUN": str(folder),
            "PACELINE_ATTEMPT": "1",
            "PACELINE_HEARTBEAT": str(self.heartbeats.path),
        }
        logs = [
            os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for rank in (0, 0, 1, 1)
        ]
        ranks = {str(rank): {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)}
        self.heartbeats.reset(1)
        self.zygote.send({"kind": "start", "environ": environ, "ranks": ranks}, logs)
        for descriptor in logs:
            os.close(descriptor)
        deadline = time.monotonic() + timeout
        pids = self.receive("started", deadline)["pids"]
        try:
            return [self.receive("exit", deadline)["code"] for _ in ranks]
        except TimeoutError:
            for pid in pids.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR2)  # writes the stacks into the folder
            time.sleep(1)
            self.zygote.send({"kind": "kill_leftovers"})
            self.receive("killed_leftovers", time.monotonic() + 30)
            return None

    def close(self) -> None:
        self.zygote.close()
        os.waitpid(self.pid, 0)
        self.heartbeats.remove()


class CommandLane:
    """Runs one command after another: `paceline run` or `torchrun`."""

    def __init__(self, launcher: str) -> None:
        options = {
            "paceline": ["run", "--cpu", "--nproc", "2"],
            "torchrun": ["--nproc-per-node", "2", "--standalone"],
        }
        self.command = [
            str(Path(sys.executable).with_name(launcher)),
            *options[launcher],
            str(SCRIPT),
        ]

    def run(self, path: str, folder: Path, timeout: float) -> list[int] | None:
        """Return the exit code of the command; None if it hangs."""
        environ = {**os.environ, "PACELINE_SCRATCH": str(folder / "runs"), "OMP_NUM_THREADS": "1"}
        with (
            open(folder / "console", "wb") as console,
            subprocess.Popen(
                [*self.command, path],
                cwd=folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
            ) as process,
        ):
            try:
                return [process.wait(timeout)]
            except subprocess.TimeoutExpired:
                _end(process)
                return None

    def close(self) -> None:
        pass


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher that hangs: politely, so that it ends its ranks, then with its whole session."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def busy(count: int):
    """Keep `count` cores busy."""
    code = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    loops = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=200, help="runs in total, over all paths")
    parser.add_argument("--parallel", type=int, default=2, help="runs at the same time")
    parser.add_argument("--load", type=int, default=2, help="busy loops beside them")
    parser.add_argument(
        "--timeout", type=float, default=90.0, help="seconds until a run counts as hung"
    )
    parser.add_argument("--launcher", choices=["zygote", "paceline", "torchrun"], default="zygote")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=PATHS)
    options = parser.parse_args()
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: dict[str, list[float]] = defaultdict(list)
    base = Path(tempfile.mkdtemp(prefix="soak-"))
    lanes: Queue[ZygoteLane | CommandLane] = Queue()
    for _ in range(options.parallel):
        lanes.put(ZygoteLane() if options.launcher == "zygote" else CommandLane(options.launcher))

    def run_once(number: int) -> tuple[str, str, float]:
        path = options.paths[number % len(options.paths)]
        folder = base / f"{number}-{path}"
        folder.mkdir()
        lane = lanes.get()
        started = time.monotonic()
        codes = lane.run(path, folder, options.timeout)
        lanes.put(lane)
        outcome = "hang" if codes is None else judge(path, codes, folder)
        if outcome == "right":
            shutil.rmtree(folder)
        return path, outcome, time.monotonic() - started

    with busy(options.load), ThreadPoolExecutor(options.parallel) as pool:
        results = pool.map(run_once, range(options.runs))
        for path, outcome, duration in track(results, "ending guests", total=options.runs):
            outcomes[path][outcome] += 1
            seconds[path].append(duration)
    while not lanes.empty():
        lanes.get().close()

    table = Table(
        "path",
        "runs",
        *OUTCOMES,
        "median seconds",
        title=f"{options.launcher}, {options.load} busy loops",
    )
    for path, counts in outcomes.items():
        median = sorted(seconds[path])[len(seconds[path]) // 2]
        table.add_row(
            path,
            str(counts.total()),
            *(str(counts[outcome]) for outcome in OUTCOMES),
            f"{median:.1f}",
        )
    Console(width=110).print(table)
    if any(counts["right"] != counts.total() for counts in outcomes.values()):
        sys.exit(f"not all guests ended as they should: see {base}")
    shutil.rmtree(base)


if __name__ == "__main__":
    main()
