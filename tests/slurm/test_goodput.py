"""Goodput of a run on a real cluster, into which known delays and a failure are injected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.ui.run_reader import RunList
from paceline.watch.details import read_details
from paceline.watch.records import read_record
from paceline.watch.scheduler import query_states
from tests.slurm.harness import Cluster
from tests.slurm.runs import Paceline, diagnostics, run_of
from tests.until import until

pytestmark = pytest.mark.timeout(900)

# Writes down how long each injected delay really took, and when each step ended.
SCRIPT = """
import json, os, signal, sys, time
began = time.time()
time.sleep(4)
imported = time.time() - began
import torch
import paceline
ledger = open(sys.argv[1], "a", buffering=1)
def record(what, **fields):
    print(json.dumps({"what": what, "time": time.time(), **fields}), file=ledger)
def delay(what, seconds):
    began = time.time()
    time.sleep(seconds)
    record(what, seconds=time.time() - began)
record("import", seconds=imported)
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 80
    def __getitem__(self, index):
        delay("data", 0.1)
        return torch.ones(2)
with paceline.session(save_every_steps=20, progress=False) as run:
    model = run.wrap(torch.nn.Linear(2, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = run.loader(Slow(), batch_size=1)
    resumed = run.resume(model=model, opt=opt, loader=loader)
    delay("setup", 5)
    is_first = True
    for x in run.steps(loader):
        if is_first:
            delay("compile", 4)
            is_first = False
        time.sleep(0.2)
        run.backward(model(x).pow(2).mean())
        run.update(opt)
        if run.step == 50 and not resumed:
            delay("stuck", 6)
            record("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        record("step", step=run.step)
"""
SHAPE = (
    "--nodes",
    "1",
    "--gpus",
    "1",
    "--cpus-per-gpu",
    "1",
    "--cpu",
    "--time",
    "30m",
    "--no-snapshot",
)


@pytest.mark.slow
def test_goodput_agrees_with_injected_delays(
    slurm_paceline: Paceline, cluster: Cluster, tmp_path: Path
) -> None:
    script, ledger = tmp_path / "train.py", tmp_path / "ledger.jsonl"
    script.write_text(SCRIPT)
    done = slurm_paceline("submit", *SHAPE, str(script), str(ledger), cwd=tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    folder = run_of(done)
    assert cluster.wait(folder.job.read_text().strip(), timeout=400) == "COMPLETED", diagnostics(
        folder
    )

    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    [killed] = [number for number, line in enumerate(lines) if line["what"] == "killed"]
    first, second = lines[:killed], lines[killed + 1 :]

    def seconds(part: list[dict[str, float]], what: str) -> float:
        return sum(line["seconds"] for line in part if line["what"] == what)

    # 40 steps are done
    saved = next(number for number, line in enumerate(first) if line.get("step") == 39)
    lost = lines[killed]["time"] - first[saved]["time"]
    goodput = read_details(read_record(folder, lambda jobs: {})).goodput
    near = {"rel": 0.05, "abs": 0.5}
    assert goodput.seconds["lost"] == pytest.approx(lost, **near)
    counted = [*first[:saved], *second]
    waits = [line for line in counted if line["what"] == "data"]
    assert goodput.parts["training"]["data"] == pytest.approx(seconds(waits, "data"), **near)
    trained = 0.0
    for part in (first[: saved + 1], second):
        steps = [line["time"] for line in part if line["what"] == "step"]
        trained += (steps[-1] - steps[0]) * len(steps) / (len(steps) - 1)
    assert goodput.seconds["training"] + goodput.seconds["saving"] == pytest.approx(trained, **near)
    starting = goodput.parts["starting"]
    assert starting["compile"] == pytest.approx(seconds(lines, "compile"), **near)
    # and building the model
    assert starting["setup"] == pytest.approx(seconds(lines, "setup"), rel=0.05, abs=1.5)
    assert starting["import"] > seconds(lines, "import")
    assert (goodput.failures, sum(goodput.seconds.values())) == (1, pytest.approx(goodput.total))


# Saves every 20 steps, prints nothing, and hangs after 50 if it should. The ledger has the time of each step.
STEPS = """
import json, os, sys, time
import paceline
ledger = open(f"{sys.argv[1]}-{os.environ['RANK']}", "a", buffering=1)
with paceline.session(cpu=True, save_every_steps=20, progress=False, report=False) as run:
    resumed = run.resume()
    for _ in run.steps(range(100)):
        time.sleep(0.2)
        print(json.dumps({"step": run.step, "time": time.time()}), file=ledger)
        if sys.argv[2] == "hang" and run.step == 50 and not resumed:
            time.sleep(600)
"""


def read_ledger(path: Path) -> list[dict[str, float]]:
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def moment(cluster: Cluster, job: str, field: str) -> float:
    return time.mktime(time.strptime(cluster.show(job)[field], "%Y-%m-%dT%H:%M:%S"))


def seconds_of_steps(lines: list[dict[str, float]]) -> float:
    """Return how long these steps took, the first one as long as the others."""
    return (lines[-1]["time"] - lines[0]["time"]) * len(lines) / (len(lines) - 1)


@pytest.mark.slow
def test_a_hang_is_lost_from_the_last_save_until_it_is_noticed(
    slurm_paceline: Paceline, cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(STEPS)
    ledger, timeout = tmp_path / "ledger", 40
    options = (*SHAPE, "--hang-timeout", f"{timeout}s", "train.py", str(ledger), "hang")
    folder = run_of(slurm_paceline("submit", *options, cwd=tmp_path, check=True))
    assert cluster.wait(folder.job.read_text().strip(), timeout=400) == "COMPLETED", diagnostics(
        folder
    )
    lines = read_ledger(tmp_path / "ledger-0")
    first = lines[: next(number for number, line in enumerate(lines) if line["step"] == 50) + 1]
    saved = next(line["time"] for line in first if line["step"] == 39)
    goodput = read_details(read_record(folder, lambda jobs: {})).goodput
    assert goodput.seconds["lost"] == pytest.approx(
        first[-1]["time"] - saved + timeout, rel=0.05
    ), diagnostics(folder)
    again = lines[len(first) :]
    assert [line["step"] for line in again] == list(range(40, 100))
    trained = seconds_of_steps(first[:40]) + seconds_of_steps(again)
    assert goodput.seconds["training"] + goodput.seconds["saving"] == pytest.approx(
        trained, rel=0.05, abs=0.5
    )
    assert (goodput.failures, sum(goodput.seconds.values())) == (1, pytest.approx(goodput.total))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["head", "member"])
def test_a_lost_node_is_lost_from_the_last_save_until_slurm_requeues_the_job(
    slurm_paceline: Paceline, cluster: Cluster, tmp_path: Path, victim: str
) -> None:
    """The power is cut, and Slurm notices after 40 s. Then the job waits in the queue."""
    (tmp_path / "train.py").write_text(STEPS)
    ledger = tmp_path / "ledger-0"
    shape = (
        "--nodes",
        "2",
        "--gpus",
        "1",
        "--cpus-per-gpu",
        "1",
        "--cpu",
        "--time",
        "30m",
        "--no-snapshot",
    )
    done = slurm_paceline(
        "submit", *shape, "train.py", str(tmp_path / "ledger"), "-", cwd=tmp_path, check=True
    )
    folder = run_of(done)
    job = folder.job.read_text().strip()
    until(lambda: any(line["step"] >= 50 for line in read_ledger(ledger)), diagnostics(folder))
    head = cluster.show(job)["BatchHost"]
    nodes = cluster.run(
        ["scontrol", "show", "hostnames", cluster.show(job)["NodeList"]]
    ).stdout.split()
    cluster.kill_node(head if victim == "head" else next(node for node in nodes if node != head))
    died = time.time()
    first = read_ledger(ledger)
    assert cluster.wait(job, timeout=400) == "COMPLETED", diagnostics(folder)

    requeued, lines = moment(cluster, job, "SubmitTime"), read_ledger(ledger)
    resumed = int(lines[len(first)]["step"])
    assert resumed in (40, 60), "the newest checkpoint"
    saved = next(line["time"] for line in first if line["step"] == resumed - 1)
    details = read_details(read_record(folder, lambda jobs: {}))
    # Slurm's times have no fractions
    seconds, near = details.goodput.seconds, {"rel": 0.05, "abs": 1.5}
    submitted = read_record(folder, lambda jobs: {}).events[0]["time"]
    starts = details.goodput.job_starts
    waited = starts[0].began - submitted + starts[1].began - requeued
    assert seconds["queued"] == pytest.approx(waited, **near), diagnostics(folder)
    if victim == "head":  # nobody is left who could tell
        assert seconds["lost"] == pytest.approx(requeued - saved, **near)
    else:  # the head agent notices at once, ends the ranks, and waits for the node
        assert seconds["lost"] == pytest.approx(died - saved, **near)
        assert seconds["idle"] == pytest.approx(requeued - died, **near)
    trained = seconds_of_steps(first[:resumed]) + seconds_of_steps(lines[len(first) :])
    assert seconds["training"] + seconds["saving"] == pytest.approx(trained, rel=0.05, abs=0.5)
    assert (details.goodput.failures, sum(seconds.values())) == (
        1,
        pytest.approx(details.goodput.total),
    )


# Without the runtime, so that it starts quickly: on request it says that it has saved, and the second start ends.
SAVES = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
mark = pathlib.Path(sys.argv[1], f"started-{os.environ['RANK']}")
print("started", flush=True)
if not mark.exists():
    mark.touch()
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("without_torch")
def test_the_wait_for_busy_nodes_after_a_requeue_is_queued(
    slurm_paceline: Paceline, cluster: Cluster, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SAVES)
    shape = (
        "--nodes",
        "2",
        "--gpus",
        "1",
        "--cpus-per-gpu",
        "1",
        "--cpu",
        "--time",
        "30m",
        "--no-snapshot",
    )
    done = slurm_paceline(
        "submit", *shape, "--requeue-always", str(script), str(tmp_path), cwd=tmp_path
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    folder = run_of(done)
    job = folder.job.read_text().strip()
    until(
        lambda: all((tmp_path / f"started-{rank}").exists() for rank in (0, 1)), diagnostics(folder)
    )
    blocker = cluster.submit("sleep 20", "--nodes=4", "--exclusive")
    cluster.run(["scancel", "--batch", "--signal=USR1", job])
    seen: list[tuple[str, float]] = []

    def look() -> bool:
        """Look as a person does, who must not read of a lost or failed run meanwhile."""
        shown = json.loads(
            slurm_paceline("show", folder.path.name, "--json", cwd=tmp_path, check=True).stdout
        )
        seen.append((shown["overview"]["status"], shown["goodput"]["seconds"]["queued"]))
        time.sleep(1)  # each look takes a second of CPU time
        return cluster.state(blocker) == "COMPLETED"

    until(look, f"the other job does not end; {cluster.show(blocker)}")
    *before, last = (status for status, _ in seen)
    assert set(before) <= {"running", "ending", "queued"}, seen
    # once the nodes are free, it does not take long
    assert last in {"running", "ending", "queued", "done"}, seen
    waits = [queued for status, queued in seen if status == "queued"]
    assert waits == sorted(waits)
    assert waits[-1] - waits[0] > 5, "it grows while the job waits"
    assert cluster.wait(job, timeout=200) == "COMPLETED", diagnostics(folder)
    ended = folder.job_start(f"{job}-0").verdict.stat().st_mtime
    requeued, began = moment(cluster, job, "SubmitTime"), moment(cluster, job, "StartTime")
    goodput = read_details(read_record(folder, lambda jobs: {})).goodput
    first, second = goodput.job_starts
    # in the queue for the first time
    waited = first.began - read_record(folder, lambda jobs: {}).events[0]["time"]
    # Slurm's times have no fractions, and agents take a moment to start
    near = {"rel": 0.05, "abs": 2.5}
    assert goodput.seconds["queued"] == pytest.approx(waited + began - requeued, **near), (
        first,
        second,
    )
    assert goodput.seconds["idle"] == pytest.approx(requeued - ended, **near), (first, second)
    assert (goodput.failures, goodput.total) == (0, pytest.approx(sum(goodput.seconds.values())))


@pytest.mark.slow
@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("event", ["preemption", "lost node"])
def test_nobody_reads_of_a_lost_run_while_the_last_answer_is_old(
    slurm_paceline: Paceline, cluster: Cluster, scratch: Path, tmp_path: Path, event: str
) -> None:
    """Slurm itself requeues the job, without a word in the run folder, and is asked once in a minute."""
    script = tmp_path / "train.py"
    script.write_text(SAVES)
    shape = (
        "--nodes",
        "2",
        "--gpus",
        "1",
        "--cpus-per-gpu",
        "1",
        "--cpu",
        "--time",
        "30m",
        "--no-snapshot",
    )
    done = slurm_paceline(
        "submit", *shape, "--partition", "low", str(script), str(tmp_path), cwd=tmp_path
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    folder = run_of(done)
    job = folder.job.read_text().strip()
    until(
        lambda: all((tmp_path / f"started-{rank}").exists() for rank in (0, 1)), diagnostics(folder)
    )
    seen: list[str] = []
    options = {"PACELINE_POLL_INTERVAL": "60"}
    environment = {**os.environ, **cluster.environment, "PACELINE_SCRATCH": str(scratch), **options}
    with open(tmp_path / "followed", "w") as out:
        following = subprocess.Popen(
            [sys.executable, "-m", "paceline", "logs", "-f", folder.path.name],
            env=environment,
            stdout=out,
        )

    def look() -> None:
        """Look at the run in all views."""
        shown = slurm_paceline(
            "show", folder.path.name, "--json", cwd=tmp_path, check=True, **options
        )
        listed = slurm_paceline("ps", "--json", cwd=tmp_path, check=True, **options)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**cluster.environment, **options}.items():
                patch.setenv(name, value)
            (top,) = RunList(scratch, query_states).read().runs
        (row,) = json.loads(listed.stdout)["runs"]
        seen.extend([json.loads(shown.stdout)["overview"]["status"], row["status"], top.status])
        assert following.poll() is None or seen[-1] == "done", "it follows to the end"

    try:
        look()
        assert set(seen) == {"running"}
        if event == "preemption":
            urgent = cluster.submit("sleep 15", "--partition=high", "--exclusive", "--nodes=4")
            until(
                lambda: cluster.state(urgent) == "RUNNING" or look(),
                "the urgent job does not start",
            )
        else:
            cluster.kill_node(cluster.show(job)["BatchHost"], mark_down=True)
        until(
            lambda: cluster.restarts(job) == 1 or look(),
            f"the job was not requeued: {cluster.show(job)}",
        )
        until(lambda: cluster.state(job) == "COMPLETED" or look(), diagnostics(folder))
        look()
        assert set(seen) <= {"running", "ending", "queued", "starting", "done"}, seen
        assert seen[-3:] == ["done"] * 3
        assert following.wait(120) == 0
    finally:
        following.kill()
        following.wait()
    assert "--- attempt 2 ---" in (tmp_path / "followed").read_text()
