"""A training under `paceline run`: started, waited for, asked to stop, and compared with one that nothing disturbed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.contract.run_folder import RunFolder
from paceline.contract.verdict import read_verdict

SCRIPT = Path(__file__).with_name("train.py")
STEPS = 60
WITHIN = 150.0  # seconds: for a machine that has much else to do


def until(
    condition: Callable[[], Any], what: str, *, told: Callable[[], str] = str, within: float = WITHIN
) -> Any:
    """Wait until it is so; what it returned."""
    deadline = time.monotonic() + within
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}\n{told()}"
        time.sleep(0.05)
    return found


class Training:
    """One run of `train.py`, over as many starts as it takes."""

    def __init__(
        self, home: Path, *options: str, gates: str = "", faults: str = "", script: Path = SCRIPT
    ) -> None:
        self.home = home
        self.out = home / "out"
        self.out.mkdir(parents=True)
        self.options = options
        self.own = ["--out", str(self.out), "--gates", gates, "--faults", faults]
        self.script = script
        self.process: subprocess.Popen[bytes] | None = None

    # -- starting --------------------------------------------------------------------------------------

    def start(self, *own: str) -> None:
        """The first start; `own` are further arguments of the script."""
        self._type(*self.options, "--no-snapshot", str(self.script), *self.own, *own)

    def go_on(self, *options: str) -> None:
        self._type(*options, "--resume", "last")

    def _type(self, *words: str) -> None:
        assert self.process is None or self.process.poll() is not None
        environment = {**os.environ, "PACELINE_SCRATCH": str(self.home / "scratch"), "COLUMNS": "120"}
        with open(self.home / "console", "ab") as console:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "paceline", "run", "--cpu", *words],
                cwd=self.home, env=environment, stdin=subprocess.DEVNULL, stdout=console, stderr=console,
            )  # fmt: skip

    def wait(self) -> int:
        assert self.process is not None
        try:
            return self.process.wait(WITHIN)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end\n{self.told()}") from None

    def finish(self) -> None:
        code = self.wait()
        assert code == 0, self.told()

    def close(self) -> None:
        """Whatever a test that failed has left: Ctrl-C ends it, twice ends it at once."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    # -- looking ---------------------------------------------------------------------------------------

    @property
    def run(self) -> RunFolder:
        found = [path.parent for path in (self.home / "scratch").glob("**/launch.json")]
        assert len(found) == 1, f"{found}\n{self.told()}"
        return RunFolder(found[0])

    def told(self) -> str:
        """All that could explain a failure."""
        texts = []
        for path in [self.home / "console", *sorted((self.home / "scratch").glob("**/attempt-*/rank-*.log"))]:
            if path.exists():
                texts.append(f"--- {path}\n{path.read_text(errors='replace')[-3000:]}")
        return "\n".join(texts)

    def events(self) -> list[dict[str, Any]]:
        lines = [line for file in self.run.events.glob("*.jsonl") for line in file.read_text().splitlines()]
        return sorted((json.loads(line) for line in lines), key=lambda event: event["time"])

    def happened(self, event: str) -> list[dict[str, Any]]:
        return [each for each in self.events() if each["event"] == event]

    def verdicts(self) -> list[str | None]:
        return [read_verdict(attempt.verdict) for attempt in self.run.attempts()]

    def failure(self, attempt: int) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.run.attempt(attempt).failure.read_text())
        return told

    def checkpoints(self) -> list[Path]:
        """Complete ones, newest first."""
        found = self.run.checkpoints.glob("step-????????")
        return sorted((path for path in found if (path / "complete.json").exists()), reverse=True)

    # -- gates and stops -------------------------------------------------------------------------------

    def at(self, gate: str, *, ranks: int = 1) -> None:
        """Wait until so many ranks stand at a gate."""
        until(
            lambda: len(list(self.out.glob(f"at-{gate}-*"))) >= ranks or self._has_ended(),
            f"nobody comes to the gate {gate}", told=self.told,
        )  # fmt: skip
        assert list(self.out.glob(f"at-{gate}-*")), f"it ended before the gate {gate}\n{self.told()}"

    def _has_ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def open(self, gate: str) -> None:
        (self.out / f"go-{gate}").touch()

    def ask_to_stop(self, *, by_file: bool = False) -> None:
        """SIGTERM to the command, or the file that a batch shell makes; returns when the agent has seen it."""
        assert self.process is not None
        before = len(self.happened("stop_requested"))
        if by_file:
            job_starts = {each["job_start"] for each in self.happened("started")}
            self.run.job_start(
                next(job_start for job_start in job_starts if job_start.endswith(f"-{self.process.pid}"))
            ).stop.touch()
        else:
            self.process.send_signal(signal.SIGTERM)
        until(
            lambda: len(self.happened("stop_requested")) > before, "nobody hears the request", told=self.told
        )

    def stop_at(self, gate: str, *, by_file: bool = False, ranks: int = 2) -> None:
        """Ask for a stop while ranks stand at a gate, open it, and wait for the clean end."""
        self.at(gate, ranks=ranks)
        self.ask_to_stop(by_file=by_file)
        self.open(gate)
        self.finish()
        assert self.verdicts()[-1] == "stopped", self.told()

    # -- comparing -------------------------------------------------------------------------------------

    def losses(self) -> dict[int, list[tuple[int, str]]]:
        """Of each rank: every step it did, in all attempts, with the loss in full."""
        found: dict[int, list[tuple[int, str]]] = {}
        for path in sorted(self.out.glob("losses-*.txt"), key=lambda path: int(path.stem.split("-")[1])):
            rows = [line.split() for line in path.read_text().splitlines()]
            found.setdefault(int(path.stem.split("-")[2]), []).extend((int(row[0]), row[1]) for row in rows)
        return found

    def metrics(self, name: str = "loss") -> dict[int, float]:
        """The curve that rank 0 wrote: the last word on each step."""
        lines = [json.loads(line) for line in self.run.metrics.read_text().splitlines()]
        return {line["step"]: line[name] for line in lines if name in line}

    def weights(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(self.out / "final.pt")
        return found


def assert_same(ours: Training, undisturbed: Training) -> None:
    """To the last bit: every step of every attempt, the written curve, and what came of it."""
    expected = {rank: dict(rows) for rank, rows in undisturbed.losses().items()}
    for rank, rows in ours.losses().items():
        wrong = [step for step, loss in rows if expected[rank][step] != loss]
        assert not wrong, f"rank {rank} went astray at step {wrong[0]}\n{ours.told()}"
        assert {step for step, _ in rows} == set(range(1, STEPS + 1)), (
            f"rank {rank} left steps out\n{ours.told()}"
        )
    assert ours.metrics() == undisturbed.metrics()
    assert ours.metrics("hits") == undisturbed.metrics("hits")
    for name, tensor in undisturbed.weights().items():
        assert torch.equal(ours.weights()[name], tensor), name
