"""Run folders as a researcher's may look on a busy morning: for pictures, and for nothing else."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.contract.run_folder import RunFolder
from paceline.contract.sweep_folder import Point, Search, SweepFolder
from paceline.slurm.job_states import JobState

HOUR = 3600.0


class SampleRuns:
    """Writes run folders into a scratch folder, and answers for Slurm."""

    def __init__(self, scratch: Path, *, seed: int = 7) -> None:
        self.scratch = scratch
        self.now = time.time()
        self.states: dict[str, JobState] = {}
        self._random = random.Random(seed)

    def query(self, jobs: Iterable[str]) -> Mapping[str, JobState]:
        return {job: self.states[job] for job in jobs if job in self.states}

    def add(
        self,
        name: str,
        *,
        age: float,
        job: str,
        state: str,
        program: str = "train.py",
        nodes: int = 1,
        nproc: int = 8,
        reason: str = "",
        hosts: str = "",
        start: str = "",
        folder: Path | None = None,
    ) -> RunFolder:
        """Write the record of a run that was submitted `age` seconds ago."""
        created = self.now - age
        run_id = (
            time.strftime("%Y%m%d-%H%M%S-", time.localtime(created))
            + f"{self._random.randrange(16**4):04x}"
        )
        made = RunFolder(folder or self.scratch / "llm" / "default" / run_id)
        made.events.mkdir(parents=True)
        record = {
            "run_id": made.path.name,
            "project": "llm",
            "experiment": "default",
            "name": name,
            "created": created,
            "program": program,
            "command": ["paceline", "submit", "--nodes", str(nodes), "--gpus", str(nproc), program],
            "nodes": nodes,
            "nproc": nproc,
            "backend": "slurm",
            "spec": {},
            "args": [],
        }
        made.run_json.write_text(json.dumps(record))
        made.job.write_text(f"{job}\n")
        self.states[job] = JobState(job, state, reason, hosts, start, "2:10:00")
        self.events(made, {"time": created, "event": "submitted"})
        return made

    def events(self, run: RunFolder, *lines: Mapping[str, Any]) -> None:
        with open(run.events / "sample.jsonl", "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def train(
        self,
        run: RunFolder,
        *,
        began: float,
        seconds: float,
        steps: int,
        total: int,
        **shape: float,
    ) -> None:
        """Write the metrics and events of a run that began so long ago and takes so many seconds
        per step.
        """
        start = self.now - began
        job = run.job.read_text().strip()
        common = {"job_start": f"{job}-1", "attempt": 1}
        self.events(
            run,
            {"time": start - 150, "event": "started", **common},
            {"time": start - 140, "event": "ranks", "processes": 16, **common},
            {"time": start, "event": "training", "step": 0, "steps": total, **common},
        )
        for number in range(1, 5):
            at = start + number * steps * seconds / 5
            self.events(
                run,
                {
                    "time": at,
                    "event": "saving",
                    "step": number * steps // 5,
                    "blocked": 6.0,
                    **common,
                },
            )
        lines = []
        for step in [*range(1, steps, max(1, steps // 1500)), steps]:
            loss = shape.get("floor", 2.1) + shape.get("height", 8.5) * math.exp(
                -step / shape.get("scale", 500)
            )
            loss += self._random.gauss(0, 0.05) * (1 + 3 * math.exp(-step / 900))
            accuracy = 0.62 * (1 - math.exp(-step / 1500)) + self._random.gauss(0, 0.005)
            lines.append(
                {
                    "step": step,
                    "time": start + step * seconds,
                    "loss": round(loss, 4),
                    "accuracy": round(accuracy, 4),
                    "grad_norm": round(
                        0.4 + 2 * math.exp(-step / 700) + abs(self._random.gauss(0, 0.1)), 4
                    ),
                    "lr": 3e-4 * min(1.0, step / 400),
                    "seconds": seconds,
                    "tokens_per_second": 524288 / seconds,
                    "data_wait": 0.02,
                }
            )
        run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run.path / "attempt-1").mkdir(exist_ok=True)
        run.attempt(1).start.write_text(f"{job}-1 -1\n")

    def add_sweep(self, name: str, states: list[str], *, job: str, age: float) -> None:
        """Write a sweep with a trial in each of these states."""
        sweep = SweepFolder(self.scratch / "llm" / "default" / name)
        for number, state in enumerate(states):
            task = f"{job}_{number}"
            self.states[task] = JobState(task, state)
            if state == "PENDING":
                continue
            trial = self.add(
                "", age=age, job=task, state=state, nproc=1, folder=sweep.trial(number).path
            )
            self.train(
                trial,
                began=age / 3,
                seconds=0.4,
                steps=900,
                total=1200,
                floor=1.1 + number * 0.07,
                height=3.0,
            )
            if state == "COMPLETED":
                self.end(trial, "done", after=0.0)
                loss = json.loads(trial.metrics.read_text().splitlines()[-1])["loss"]
                sweep.trial(number).result.write_text(
                    json.dumps({"state": "done", "value": loss, "step": 900})
                )
        search = Search(name, metric="loss", created=self.now - age)
        sweep.spec.write_text(search.to_json())
        numbers = range(len(states))
        sweep.points.write_text(
            "".join(Point(number, number, {"lr": number}).to_line() for number in numbers)
        )
        line = {
            "time": self.now - age,
            "job": job,
            "submission": "1",
            "tasks": {str(each): [each] for each in numbers},
        }
        sweep.jobs.write_text(json.dumps(line) + "\n")

    def end(self, run: RunFolder, verdict: str, *, after: float) -> None:
        """Write how a run ended, so many seconds ago."""
        job_start = f"{run.job.read_text().strip()}-1"
        run.claims.mkdir()
        (run.claims / "1").symlink_to(job_start)
        run.job_start(job_start).path.mkdir(parents=True)
        run.job_start(job_start).verdict.write_text(f"{verdict}\n")
        self.events(run, {"time": self.now - after, "event": verdict, "job_start": job_start})

    def sample_nodes(
        self, run: RunFolder, hosts: list[str], *, gpus: int, step: int, slow: int | None = None
    ) -> None:
        run.system.mkdir(exist_ok=True)
        for number, host in enumerate(hosts):
            cards = [{"name": "NVIDIA H100 80GB HBM3", "memory": 80 * 2**30}] * gpus
            header = {
                "time": self.now - 600,
                "host": host,
                "cores": 96,
                "memory_total": 1024 * 2**30,
                "gpus": cards,
            }
            lines: list[dict[str, Any]] = [header]
            for tick in range(20):
                ranks = []
                for local in range(gpus):
                    rank = number * gpus + local
                    own = 1.9 if rank == slow else 1.02 + self._random.random() * 0.05
                    ranks.append([rank, 2, step, 0.4, "R", 1.93, 20.0, own])
                busy = [self._random.randint(91, 99) for _ in range(gpus)]
                used = [(67 + self._random.random()) * 2**30 for _ in range(gpus)]
                lines.append(
                    {
                        "time": self.now - 300 + 15 * tick,
                        "cpu": 38 + self._random.random() * 9,
                        "own_cpu": 31.0,
                        "memory": 311 * 2**30,
                        "own_memory": 180 * 2**30,
                        "ranks": ranks,
                        "gpus": [
                            {"busy": busy[card], "memory": used[card], "power": 640}
                            for card in range(gpus)
                        ],
                    }
                )
            run.node_metrics(number).write_text("".join(json.dumps(line) + "\n" for line in lines))

    def log(self, run: RunFolder, lines: Iterable[str], rank: int = 0) -> None:
        with open(run.attempt(1).log(rank), "a") as file:
            file.writelines(f"{line}\n" for line in lines)
