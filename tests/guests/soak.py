"""Repeat the ways in which guests end, under load, and count hangs and wrong ends.

    python tests/guests/soak.py [--runs 200] [--parallel 2] [--load 2] [--launcher paceline]

`--launcher torchrun` shows how the same scripts end without Paceline.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

SCRIPT = Path(__file__).with_name("exit_paths.py")
PATHS = ("ddp", "two_groups", "new_group", "fsdp", "exception", "no_destroy", "no_destroy_global", "pending")
OUTCOMES = ("right", "hang", "wrong exit code", "output lost")


def command(launcher: str, path: str) -> list[str]:
    binary = str(Path(sys.executable).with_name(launcher))
    options = {
        "paceline": ["run", "--cpu", "--nproc", "2"],
        "torchrun": ["--nproc-per-node", "2", "--master-port", "0"],
    }
    return [binary, *options[launcher], str(SCRIPT), path]


def run_once(launcher: str, path: str, folder: Path, timeout: float) -> tuple[str, float]:
    """Run one guest. Returns its outcome and its seconds; keeps the folder unless all is right."""
    folder.mkdir()
    environ = {**os.environ, "PACELINE_SCRATCH": str(folder / "runs"), "OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    with (
        open(folder / "console", "wb") as console,
        subprocess.Popen(
            command(launcher, path), cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=console, stderr=console,
            start_new_session=True,
        ) as process,
    ):  # fmt: skip
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            _end(process)
            return "hang", timeout
    seconds = time.monotonic() - started
    fails = path == "exception"
    if (code != 0) != fails:
        return "wrong exit code", seconds
    # After a failure the agent may end the other rank before it gets that far.
    outputs = [file.read_text() for file in folder.rglob("output-*")]
    atexits = (folder / "console").read_text().count("atexit")
    if not fails and (outputs != ["complete"] * 2 or not atexits):
        return "output lost", seconds
    shutil.rmtree(folder)
    return "right", seconds


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
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="runs in total, over all paths")
    parser.add_argument("--parallel", type=int, default=2, help="runs at the same time")
    parser.add_argument("--load", type=int, default=2, help="busy loops beside them")
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds until a run counts as hung")
    parser.add_argument("--launcher", choices=["paceline", "torchrun"], default="paceline")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=PATHS)
    options = parser.parse_args()
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: dict[str, list[float]] = defaultdict(list)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))

    def job(number: int) -> tuple[str, str, float]:
        path = options.paths[number % len(options.paths)]
        return path, *run_once(options.launcher, path, folder / f"{number}-{path}", options.timeout)

    with busy(options.load), ThreadPoolExecutor(options.parallel) as pool:
        results = pool.map(job, range(options.runs))
        for path, outcome, duration in track(results, "ending guests", total=options.runs):
            outcomes[path][outcome] += 1
            seconds[path].append(duration)
            if outcome != "right":
                print(f"{path}: {outcome}")

    table = Table("path", "runs", *OUTCOMES, "median seconds", title=f"{options.launcher}, {options.load} busy loops")
    for path, counts in outcomes.items():
        median = sorted(seconds[path])[len(seconds[path]) // 2]
        table.add_row(path, str(counts.total()), *(str(counts[outcome]) for outcome in OUTCOMES), f"{median:.1f}")
    Console().print(table)
    if any(counts["right"] != counts.total() for counts in outcomes.values()):
        sys.exit(f"not all guests ended as they should: see {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
