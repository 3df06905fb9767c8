"""A training under `paceline run`: start it, wait for it, stop it, and compare it with an undisturbed one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from paceline.contract.run_folder import STOPPED, STOPPED_EXIT, RunFolder, read_verdict
from tests.until import WITHIN, until

SCRIPT = Path(__file__).with_name("train.py")
STEPS = 60


class Training:
    """One run of `train.py`, over several starts."""

    def __init__(
        self, home: Path, *options: str, gates: str = "", faults: str = "", script: Path = SCRIPT
    ) -> None:
        self.home = home
        self.out = home / "out"
        self.out.mkdir(parents=True)
        self.options = options
        self.script_args = ["--out", str(self.out), "--gates", gates, "--faults", faults]
        self.script = script
        self.process: subprocess.Popen[bytes] | None = None

    # -- starting --------------------------------------------------------------------------------------

    def start(self, *args: str) -> None:
        """Start for the first time; `args` are further arguments of the script."""
        self._run(*self.options, "--no-snapshot", str(self.script), *self.script_args, *args)

    def resume(self, *options: str) -> None:
        self._run(*options, "--resume", "last")

    def _run(self, *args: str) -> None:
        assert self.process is None or self.process.poll() is not None
        environment = {
            **os.environ,
            "PACELINE_SCRATCH": str(self.home / "scratch"),
            "COLUMNS": "120",
        }
        with open(self.home / "console", "ab") as console:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "paceline", "run", "--cpu", *args],
                cwd=self.home,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
            )

    def wait(self) -> int:
        assert self.process is not None
        try:
            return self.process.wait(WITHIN)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run does not end\n{self.logs()}") from None

    def finish(self) -> None:
        code = self.wait()
        assert code == (STOPPED_EXIT if self.verdicts()[-1] == STOPPED else 0), self.logs()

    def close(self) -> None:
        """End what a failed test left behind."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    # -- reading ---------------------------------------------------------------------------------------

    @property
    def run(self) -> RunFolder:
        found = [path.parent for path in (self.home / "scratch").glob("*/*/*/launch.json")]
        assert len(found) == 1, f"{found}\n{self.logs()}"
        return RunFolder(found[0])

    def logs(self) -> str:
        """Return everything that could explain a failure."""
        texts = []
        for path in [
            self.home / "console",
            *sorted((self.home / "scratch").glob("*/*/*/attempt-*/rank-*.log")),
        ]:
            if path.exists():
                texts.append(f"--- {path}\n{path.read_text(errors='replace')[-3000:]}")
        return "\n".join(texts)

    def events(self) -> list[dict[str, Any]]:
        lines = [
            line
            for file in self.run.events.glob("*.jsonl")
            for line in file.read_text().splitlines()
        ]
        return sorted((json.loads(line) for line in lines), key=lambda event: event["time"])

    def events_named(self, event: str) -> list[dict[str, Any]]:
        return [each for each in self.events() if each["event"] == event]

    def verdicts(self) -> list[str | None]:
        return [read_verdict(attempt.verdict) for attempt in self.run.attempts()]

    def failure(self, attempt: int) -> dict[str, Any]:
        failure: dict[str, Any] = json.loads(self.run.attempt(attempt).failure.read_text())
        return failure

    def checkpoints(self) -> list[Path]:
        """Return the complete ones, newest first."""
        found = self.run.checkpoints.glob("step-????????")
        return sorted((path for path in found if (path / "complete.json").exists()), reverse=True)

    # -- gates and stops -------------------------------------------------------------------------------

    def at(self, gate: str, *, ranks: int = 1) -> None:
        """Wait until this many ranks have reached a gate."""
        until(
            lambda: len(list(self.out.glob(f"at-{gate}-*"))) >= ranks or self._has_ended(),
            f"no rank reaches the gate {gate}",
            details=self.logs,
        )
        assert list(self.out.glob(f"at-{gate}-*")), (
            f"it ended before the gate {gate}\n{self.logs()}"
        )

    def _has_ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def open(self, gate: str) -> None:
        (self.out / f"go-{gate}").touch()

    def request_stop(self, *, by_file: bool = False) -> None:
        """Send SIGTERM or create the batch shell\'s file, and wait until the agent has seen it."""
        assert self.process is not None
        before = len(self.events_named("stop_requested"))
        if by_file:
            job_starts = {each["job_start"] for each in self.events_named("started")}
            self.run.job_start(
                next(
                    job_start
                    for job_start in job_starts
                    if job_start.startswith(f"pid-{self.process.pid}-")
                )
            ).stop.touch()
        else:
            self.process.send_signal(signal.SIGTERM)
        until(
            lambda: len(self.events_named("stop_requested")) > before,
            "the stop request is ignored",
            details=self.logs,
        )

    def stop_at(self, gate: str, *, by_file: bool = False, ranks: int = 2) -> None:
        """Request a stop while ranks wait at a gate, open it, and wait for the clean end."""
        self.at(gate, ranks=ranks)
        self.request_stop(by_file=by_file)
        self.open(gate)
        self.finish()
        assert self.verdicts()[-1] == "stopped", self.logs()

    # -- comparing -------------------------------------------------------------------------------------

    def losses(self) -> dict[int, list[tuple[int, str]]]:
        """Return for each rank every step of all attempts with its exact loss."""
        found: dict[int, list[tuple[int, str]]] = {}
        for path in sorted(
            self.out.glob("losses-*.txt"), key=lambda path: int(path.stem.split("-")[1])
        ):
            rows = [line.split() for line in path.read_text().splitlines()]
            found.setdefault(int(path.stem.split("-")[2]), []).extend(
                (int(row[0]), row[1]) for row in rows
            )
        return found

    def metrics(self, name: str = "loss") -> dict[int, float]:
        """Return the curve that rank 0 wrote: the last line of each step counts."""
        lines = [json.loads(line) for line in self.run.metrics.read_text().splitlines()]
        return {line["step"]: line[name] for line in lines if name in line}

    def weights(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(self.out / "final.pt")
        return found


def assert_same(ours: Training, undisturbed: Training) -> None:
    """Compare every step of every attempt, the written curve and the weights, to the last bit."""
    expected = {rank: dict(rows) for rank, rows in undisturbed.losses().items()}
    for rank, rows in ours.losses().items():
        wrong = [step for step, loss in rows if expected[rank][step] != loss]
        assert not wrong, f"rank {rank} differs at step {wrong[0]}\n{ours.logs()}"
        assert {step for step, _ in rows} == set(range(1, STEPS + 1)), (
            f"rank {rank} skipped steps\n{ours.logs()}"
        )
    assert ours.metrics() == undisturbed.metrics()
    assert ours.metrics("hits") == undisturbed.metrics("hits")
    for name, tensor in undisturbed.weights().items():
        assert torch.equal(ours.weights()[name], tensor), name
