"""A run folder as agents and ranks leave it, with one thing changed: what `paceline doctor RUN` reads."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.contract.heartbeat_file import RUNNING
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder
from paceline.contract.stacks import NodeAnswer
from paceline.slurm.job_states import JobState
from paceline.spec.findings import GOOD, Finding
from paceline.watch.diagnosis import diagnose
from paceline.watch.diagnosis.evidence import Evidence
from paceline.watch.records import read_record


class RecordedRun:
    """Two nodes with two ranks each, in their tenth minute. Change what you like, then ask for the findings."""

    def __init__(self, path: Path, *, state: str = "RUNNING", **spec: Any) -> None:
        self.folder, self.state = RunFolder(path), state
        for each in (
            self.folder.events,
            self.folder.system,
            self.folder.attempt(1).path,
            self.folder.claims,
        ):
            each.mkdir(parents=True)
        fields = {"nodes": 2, "nproc": 2, "gpus": 0, **spec}
        launch_spec = LaunchSpec(run_id="r", program="/p/train.py", args=[], **fields)
        self.folder.launch_spec.write_text(json.dumps(asdict(launch_spec)))
        self.folder.run_json.write_text("{}")
        self.folder.job.write_text("7\n")
        (self.folder.claims / "1").symlink_to("7-0")
        self.began = time.time() - 600
        self.answer: dict[str, Any] = {"ranks": [[rank] for rank in range(4)], "dumped": []}
        self.nodes: dict[int, dict[str, Any]] = {}
        self.events: dict[int, list[dict[str, Any]]] = {}
        for index in range(2):
            self.arrives(index)
            self.joins(index)

    # -- what the agents write -----------------------------------------------------------------------

    def arrives(self, index: int) -> None:
        host, address = f"node{index + 1}", f"10.0.0.{index + 1}"
        self.nodes[index] = {
            "event": "node",
            "time": self.began,
            "job_start": "7-0",
            "index": index,
            "nodelist": "node[1-2]",
            "host": host,
            "node": index,
            "ranks": [2 * index, 2 * index + 1],
            "interfaces": {"lo": "127.0.0.1", "eth0": address},
            "visible_gpus": None,
            "slurm_gpus": None,
            "gpu_devices": 0,
            "gpu_driver": None,
            "cpus": 8,
            "python": "3.11.2",
            "torch": "2.13.0",
            "nccl": None,
            "paceline": "0.1.0",
            "attempt": 0,
        }
        self.events[index] = [self.nodes[index]]

    def joins(self, index: int) -> None:
        peer = "10.0.0.1" if index else "10.0.0.2"
        self.event(index, "started", job_start="7-0", index=index)
        self.event(
            index,
            "network",
            attempt=1,
            peer=peer,
            interface="eth0",
            set={},
            chosen={"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0"},
        )

    def event(self, agent: int, event: str, **fields: Any) -> None:
        self.events[agent].append(
            {"event": event, "time": self.began + 1, "host": f"node{agent + 1}", **fields}
        )

    def change_network(self, **fields: Any) -> None:
        for events in self.events.values():
            for each in events:
                if each["event"] == "network":
                    each.update(fields)

    def fails(self, **fields: Any) -> None:
        """Record the failure of the only attempt; the job is over."""
        self.state = "FAILED"
        failure = {
            "cause": "error",
            "host": "node2",
            "rank": 3,
            "code": 1,
            "type": "",
            "message": "",
            **fields,
        }
        self.folder.attempt(1).failure.write_text(json.dumps(failure))
        self.folder.attempt(1).verdict.write_text("failed\n")
        start = self.folder.job_start("7-0")
        start.path.mkdir(parents=True)
        start.verdict.write_text("failed\n")

    def samples(self, *, header: dict[str, Any] | None = None, **changes: Any) -> None:
        """Write samples of both nodes every 15 s. `changes`: for node 1 (`node1`), rank 3 (`rank3`) or all ranks."""
        for index in range(2):
            facts = {
                "time": self.began + 1,
                "host": f"node{index + 1}",
                "job_start": "7-0",
                "cores": 8,
                "own_cores": 8,
            }
            lines = [{**facts, **(header or {}), **changes.get(f"header{index + 1}", {})}]
            for number in range(8):
                ranks = []
                for rank in (2 * index, 2 * index + 1):
                    own = {
                        "waited": 0.02,
                        "own": 0.1,
                        "step": 15 * number,
                        "age": 0.3,
                        "state": RUNNING,
                        "process": "S",
                    }
                    own |= {**changes.get("ranks", {}), **changes.get(f"rank{rank}", {})}
                    ranks.append(
                        [
                            rank,
                            own["state"],
                            own["step"],
                            own["age"],
                            own["process"],
                            1.0,
                            own["waited"] * (15 * number + 1),
                            own["own"],
                        ]
                    )
                usage = {
                    "cpu": 30.0,
                    "own_cpu": 2.0,
                    "memory": 1 << 30,
                    "own_memory": 1 << 29,
                    "ranks": ranks,
                }
                lines.append(
                    {
                        "time": self.began + 15 * number + 2,
                        **usage,
                        **changes.get(f"node{index + 1}", {}),
                    }
                )
            self.folder.node_metrics(index).write_text(
                "".join(json.dumps(line) + "\n" for line in lines)
            )

    def stack(self, rank: int, *frames: str) -> None:
        """Write a rank's stack: frames such as `torch/distributed/c10d.py:9 in barrier`, the innermost first."""
        lines = [
            "Thread 0x1 (most recent call first):",
            '  File "/x/site-packages/torch/pin.py", line 1 in run',
            "",
        ]
        lines.append("Current thread 0x2 (most recent call first):")
        for frame in frames:
            path, _, rest = frame.partition(":")
            lines.append(f'  File "{path}", line {rest}')
        self.folder.attempt(1).stacks(rank).write_text("\n".join(lines) + "\n")
        self.answer["dumped"].append(rank)

    # -- what the doctor says ------------------------------------------------------------------------

    def findings(self, quotas: Sequence[Finding] = ()) -> list[Finding]:
        for index, events in self.events.items():
            text = "".join(json.dumps(event) + "\n" for event in events)
            (self.folder.events / f"agent-{index}.jsonl").write_text(text)
        state = JobState("7", self.state, "", "node[1-2]")
        record = read_record(self.folder, lambda jobs: {"7": state})
        answers = [NodeAnswer("node1", self.answer)] if self.state == "RUNNING" else []
        return diagnose(Evidence(record, answers, quotas))

    def problems(self, quotas: Sequence[Finding] = ()) -> list[Finding]:
        """Return what is not good."""
        return [each for each in self.findings(quotas) if each.level != GOOD]
