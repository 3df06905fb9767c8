"""An agent in a run folder of its own, with real processes.

Most of these tests are about processes, not about torch: they replace torch by an empty package, so that a run takes
a fraction of a second. `light=False` uses the real one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import AttemptFolder, RunFolder, read_verdict
from paceline.launch.local_run import START_AGENT
from tests.fake_torch import write_fake_torch
from tests.until import until

WITHIN = 100.0  # seconds; for a busy machine


class Launched:
    """A running agent and its files."""

    def __init__(self, folder: Path, console: Path, process: subprocess.Popen[bytes]) -> None:
        self.run = RunFolder(folder)
        self.job_start = self.run.job_start("here")
        self.console = console
        self.process = process

    def wait(self) -> int:
        return self.process.wait(WITHIN)

    def attempt(self, number: int = 1) -> AttemptFolder:
        return self.run.attempt(number)

    def log(self, rank: int, attempt: int = 1) -> str:
        return self.attempt(attempt).log(rank).read_text()

    def out(self) -> str:
        return (self.console / "out").read_text()

    def err(self) -> str:
        return (self.console / "err").read_text()

    def verdicts(self) -> tuple[str | None, str | None]:
        """Return the verdicts of the first attempt and of the job start."""
        return read_verdict(self.attempt().verdict), read_verdict(self.job_start.verdict)

    def failure(self, attempt: int = 1) -> dict[str, Any]:
        failure: dict[str, Any] = json.loads(self.attempt(attempt).failure.read_text())
        return failure

    def events(self) -> list[str]:
        lines = (self.run.events / "agent-0.jsonl").read_text().splitlines()
        return [json.loads(line)["event"] for line in lines]

    def await_file(self, name: str) -> str:
        """Wait for a file that a rank writes into the run folder, and return its text."""
        path = self.run.path / name
        until(lambda: path.exists() and path.read_text() != "", f"{name}; console:\n{self.err()}")
        return path.read_text()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


Launch = Callable[..., Launched]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """`launch(script text, nproc=2, ...)`: start an agent; other keywords are fields of the launch spec."""
    fake_torch = write_fake_torch(tmp_path)
    with ExitStack() as cleanup:

        def start(
            script: str,
            *,
            folder: Path | None = None,
            light: bool = True,
            env: dict[str, str] | None = None,
            stdin: Any = subprocess.DEVNULL,
            stdout: Any = None,
            pass_fds: tuple[int, ...] = (),
            argv: Sequence[str] = ("-c", START_AGENT),
            **launch_spec: Any,
        ) -> Launched:
            folder = folder or tmp_path / "run"
            folder.mkdir(exist_ok=True)
            program = folder / "train.py"
            program.write_text(script)
            fields = {
                "run_id": "test",
                "program": str(program),
                "args": [],
                "python": sys.executable,
                "nproc": 2,
                "cwd": str(folder),
                "kill_after": 2.0,
                "check": False,
                **launch_spec,
            }
            (folder / "launch.json").write_text(json.dumps(asdict(LaunchSpec(**fields))))
            variables = {
                **os.environ,
                "PACELINE_RUN": str(folder),
                "PACELINE_JOB_START": "here",
                **(env or {}),
            }
            if light:
                variables["PYTHONPATH"] = str(fake_torch)
            with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
                process = subprocess.Popen(
                    [sys.executable, *argv],
                    env=variables,
                    stdin=stdin,
                    stdout=stdout or out,
                    stderr=err,
                    pass_fds=pass_fds,
                    cwd=tmp_path,
                )
            cleanup.callback(_end, process)
            return Launched(folder, tmp_path, process)

        yield start


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.wait()
