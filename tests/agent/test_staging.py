"""Staging in real agents: once per node before any rank, results collected however the run ends, nothing left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import FAILED, STOPPED, RunFolder, read_verdict
from paceline.launch.local_run import START_AGENT
from paceline.staging.cache import cached_item
from paceline.staging.cleanup import make_private_folder
from paceline.staging.manifest import scan
from tests.staging.trees import content, make_tree

pytestmark = pytest.mark.usefixtures("without_torch")

WITHIN = 120.0

# Prints what it finds, and writes a result.
LIST_FILES = """
import os, signal, sys, time
from pathlib import Path
data, rank = Path(os.environ["PACELINE_DATA"]), os.environ["RANK"]
print("files", sum(path.is_file() for path in (data / "set").rglob("*")), "in", data, flush=True)
(data / "out").mkdir(exist_ok=True)
(data / "out" / f"result-{rank}").write_text(rank)
"""


class Launched:
    """Agents of one run, whose nodes' disks are below `disks`."""

    def __init__(
        self,
        base: Path,
        name: str,
        script: str,
        *,
        disks: list[Path],
        data: dict[str, Any] | None,
        **more: Any,
    ):
        self.run = RunFolder(base / "default" / name)
        self.run.path.mkdir(parents=True)
        self.job_start = self.run.job_start("job_start")
        self.job_start.path.mkdir(parents=True)
        program = self.run.path / "train.py"
        program.write_text(script)
        staging = (
            {"stage": ["set"], "collect": ["out"], "folder": "$DISK", **data}
            if data is not None
            else {}
        )
        launch_spec = LaunchSpec(
            run_id=name,
            program=str(program),
            args=[],
            python=sys.executable,
            cwd=str(base),
            kill_after=2.0,
            scratch=str(base.parent),
            project=base.name,
            experiment="default",
            data=staging,
            **more,
        )
        self.run.launch_spec.write_text(launch_spec.to_json())
        self.count = len(disks)
        self.processes = [self._start(index, disk) for index, disk in enumerate(disks)]

    def _start(self, index: int, disk: Path) -> subprocess.Popen[bytes]:
        environ = {
            **os.environ,
            "PACELINE_RUN": str(self.run.path),
            "PACELINE_JOB_START": "job_start",
            "PACELINE_TOKEN": "s3cret",
            "PACELINE_AGENT": f"{index}/{self.count}",
            "PACELINE_RENDEZVOUS": "127.0.0.1:0",
            "DISK": str(disk),
            "SLURMD_NODENAME": disk.name,
            "CUDA_VISIBLE_DEVICES": "",
            "TMPDIR": str(disk),
        }
        with (self.run.path / f"console-{index}").open("w") as console:
            return subprocess.Popen(
                [sys.executable, "-c", START_AGENT],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
            )

    def console(self) -> str:
        return "\n".join(
            (self.run.path / f"console-{index}").read_text() for index in range(self.count)
        )

    def codes(self) -> list[int]:
        return [process.wait(WITHIN) for process in self.processes]

    def log(self, rank: int) -> str:
        path = self.run.attempt(1).log(rank)
        return path.read_text() if path.exists() else ""

    def await_that(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WITHIN
        while not holds():
            assert time.monotonic() < deadline, self.console()
            assert self.processes[0].poll() is None, self.console()
            time.sleep(0.05)

    def results(self) -> dict[str, str]:
        return {
            str(path.relative_to(self.run.collected)): path.read_text()
            for path in self.run.collected.rglob("*")
            if path.is_file()
        }

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    base = tmp_path / "scratch" / "project"
    make_tree(base / "set")
    return base


@pytest.fixture
def launch(base: Path) -> Iterator[Callable[..., Launched]]:
    with ExitStack() as stack:

        def start(name: str, script: str, **options: Any) -> Launched:
            launched = Launched(base, name, script, **{"data": {}, **options})
            stack.callback(launched.close)
            return launched

        yield start


def leftovers(disk: Path) -> list[str]:
    return sorted(path.name for path in disk.glob("paceline-*/*"))


def test_two_nodes_stage_and_a_killed_rank_loses_no_result(
    launch: Callable[..., Launched], tmp_path: Path, base: Path
) -> None:
    disks = [tmp_path / "a", tmp_path / "b"]
    die = """
ready = Path(os.environ["PACELINE_LOGS"]) / "ready"
if rank == "0":
    ready.touch()
    time.sleep(600)
while not ready.exists():
    time.sleep(0.05)
os.kill(os.getpid(), signal.SIGKILL)
"""
    run = launch("one", LIST_FILES + die, disks=disks, nodes=2, nproc=1)
    assert run.codes() == [1, 1], run.console()
    count = len(scan(base / "set").files)
    for rank, disk in enumerate(disks):
        assert f"files {count} in {disk}/" in run.log(rank), run.console()
        assert leftovers(disk) == []
    assert read_verdict(run.job_start.verdict) == FAILED
    assert run.results() == {"node-0/out/result-0": "0", "node-1/out/result-1": "1"}, run.console()
    events = (run.run.events / "agent-1.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in events].count("staged") == 1


def test_agents_per_rank_stage_once_per_node_and_cache(
    launch: Callable[..., Launched], tmp_path: Path, base: Path
) -> None:
    disk = tmp_path / "a"
    run = launch(
        "one", LIST_FILES, disks=[disk, disk], nodes=1, nproc=2, style="srun", data={"keep": 3600}
    )
    assert run.codes() == [0, 0], run.console()
    assert run.results() == {"out/result-0": "0", "out/result-1": "1"}
    assert leftovers(disk) == ["cache"]
    staged = [
        json.loads(line)
        for path in run.run.events.iterdir()
        for line in path.read_text().splitlines()
    ]
    assert [each["files"] for each in staged if each["event"] == "staged"] == [
        len(scan(base / "set").files)
    ]
    cached = cached_item(make_private_folder(disk), scan(base / "set").key)
    assert content(cached.target(str(base / "set"))) == content(base / "set")


def test_a_stop_while_data_is_staged_starts_no_rank(
    launch: Callable[..., Launched], tmp_path: Path, base: Path
) -> None:
    disk = tmp_path / "a"
    disk.mkdir()
    lock = cached_item(make_private_folder(disk), scan(base / "set").key).lock()
    assert lock.acquire(exclusive=True)  # another job stages the same data, and takes its time
    run = launch("one", LIST_FILES, disks=[disk], data={"keep": 3600})
    run.await_that(lambda: any("run-one" in name for name in leftovers(disk)))
    run.job_start.stop.touch()
    assert run.codes() == [0], run.console()
    lock.close()
    assert read_verdict(run.job_start.verdict) == STOPPED
    assert not run.run.attempts()
    assert leftovers(disk) == ["cache"]


def test_a_node_that_cannot_stage_is_named_by_the_head(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    run = launch(
        "one", LIST_FILES, disks=[tmp_path / "a", tmp_path / "file" / "b"], nodes=2, nproc=1
    )
    assert run.codes() == [1, 1], run.console()
    head = (run.run.path / "console-0").read_text()
    assert f"Cannot create a folder for data in {tmp_path / 'file' / 'b'}: Not a directory" in head
    assert read_verdict(run.job_start.verdict) == FAILED
    assert not run.log(0)
    assert leftovers(tmp_path / "a") == []


@pytest.mark.parametrize("stages", [True, False])
def test_leftovers_of_a_killed_agent_are_collected_and_removed(
    launch: Callable[..., Launched], tmp_path: Path, stages: bool
) -> None:
    disk = tmp_path / "a"
    dead = launch(
        "dead", LIST_FILES + "print('there', flush=True)\ntime.sleep(600)\n", disks=[disk]
    )
    dead.await_that(lambda: "there" in dead.log(0))
    dead.processes[0].send_signal(signal.SIGKILL)
    dead.codes()
    assert leftovers(disk) == ["run-dead-job_start-0"]
    script, data = (LIST_FILES, {"collect": []}) if stages else ("print('no data')", None)
    after = launch("after", script, disks=[disk], data=data)
    assert after.codes() == [0], after.console()
    assert "removed 1 folders" in after.console()
    assert dead.results() == {"out/result-0": "0"}
    assert leftovers(disk) == []


def test_results_that_cannot_be_collected_stay_on_the_node_until_they_can(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    disk = tmp_path / "a"
    in_the_way = "Path(os.environ['PACELINE_RUN'], 'collected').touch()\n"
    run = launch("full", LIST_FILES + in_the_way, disks=[disk])
    assert run.codes() == [0], run.console()
    assert "cannot collect a result" in run.console()
    assert leftovers(disk) == ["run-full-job_start-0"]
    run.run.collected.unlink()
    after = launch("after", "print('no data')", disks=[disk], data=None)
    assert after.codes() == [0], after.console()
    assert run.results() == {"out/result-0": "0"}
    assert leftovers(disk) == []


def test_a_local_run_stages_by_flag_and_rejects_missing_paths(
    paceline: Callable[..., Any], tmp_path: Path, scratch: Path
) -> None:
    (tmp_path / "train.py").write_text(
        LIST_FILES + "print({n: v for n, v in os.environ.items() if n[:9] == 'PACELINE_'})\n"
    )
    (tmp_path / "paceline.toml").write_text('[project]\nname = "p"\n[data]\ncollect = ["out"]\n')
    missing = paceline("run", "--cpu", "--data", "set", "train.py", cwd=tmp_path)
    assert missing.returncode == 1
    assert f"'{scratch / 'p' / 'set'}' does not exist" in missing.stderr
    assert not scratch.exists()
    make_tree(tmp_path / "elsewhere" / "set")
    done = paceline(
        "run",
        "--cpu",
        "--nproc",
        "1",
        "--data",
        str(tmp_path / "elsewhere" / "set"),
        "train.py",
        cwd=tmp_path,
        check=True,
        TMPDIR=str(tmp_path),
    )
    (result,) = scratch.glob("p/default/*/collected/out/result-0")
    run = result.parents[2]
    for name, value in {
        "SOURCE_DIR": tmp_path,
        "PROJECT": "p",
        "SCRATCH_DIR": scratch,
        "EXPERIMENT": "default",
        "CHECKPOINTS": run / "checkpoints",
        "LOGS": run / "attempt-1",
    }.items():
        assert f"'PACELINE_{name}': '{value}'" in done.stdout
    assert leftovers(tmp_path) == []
