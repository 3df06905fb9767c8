"""Whatever happens to a run on one machine, it ends with the weights and the curve of an undisturbed one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from paceline.agent.workers import process_tree
from tests.fault_tolerance.conftest import Make
from tests.fault_tolerance.runs import Training, assert_same
from tests.until import until

pytestmark = pytest.mark.timeout(600)  # each start imports torch, perhaps on a busy machine


def test_killed_hung_and_failing_ranks_are_restarted(undisturbed: Training, training: Make) -> None:
    ours = training(
        "--nproc",
        "2",
        "--max-restarts",
        "3",
        "--hang-timeout",
        "10s",
        faults="13:1:kill,27:1:hang,38:0:raise,52:0:kill",
    )
    ours.start()
    ours.finish()
    assert ours.verdicts() == ["failed"] * 4 + ["done"], ours.logs()
    killed, hung, raised, again = map(ours.failure, (1, 2, 3, 4))
    assert (killed["cause"], killed["rank"], killed["code"]) == ("killed", 1, -9)
    assert (hung["cause"], hung["rank"]) == ("hang", 1)
    for rank in (0, 1):
        assert "train.py" in ours.run.attempt(2).stacks(rank).read_text()
    assert (raised["rank"], raised["type"]) == (0, "RuntimeError")
    assert (again["cause"], again["rank"]) == ("killed", 0)
    failed = ours.events_named("failed")
    assert [each["rank"] for each in failed] == [1, 1, 0, 0]
    assert [each["step"] for each in failed] == [12, 26, 37, 51]
    assert_same(ours, undisturbed)


def test_stops_at_any_moment(undisturbed: Training, training: Make) -> None:
    """Before the first step, within an epoch, during evaluation and during a save; by signal and by file."""
    ours = training("--nproc", "2", gates="warm-up,step-17,evaluate-2,save-45,step-57")
    ours.start()
    ours.stop_at("warm-up", by_file=True)
    assert not ours.checkpoints()
    ours.resume()
    ours.stop_at("step-17")
    assert 17 <= int(ours.checkpoints()[0].name[5:]) <= 25
    ours.resume()
    ours.stop_at("evaluate-2", by_file=True)
    assert ours.checkpoints()[0].name == "step-00000036"
    ours.resume()
    ours.stop_at("save-45", ranks=1)
    assert int(ours.checkpoints()[0].name[5:]) >= 45
    ours.resume()
    # Several kinds of requests at once, some of them repeated, count as one.
    ours.at("step-57", ranks=2)
    ours.request_stop(by_file=True)
    for _ in range(2):
        for pid in rank_pids(ours):
            os.kill(pid, signal.SIGUSR1)
            os.kill(pid, signal.SIGTERM)
    ours.open("step-57")
    ours.finish()
    assert ours.verdicts() == ["stopped"] * 5
    ours.resume()
    ours.finish()
    assert_same(ours, undisturbed)


def rank_pids(ours: Training) -> list[int]:
    """Return the pids that the session printed."""
    lines = ours.run.attempts()[-1].log(0).read_text().splitlines()
    return [
        int(line.split("pid ")[1].split()[0])
        for line in lines
        if line.startswith("rank ") and "pid " in line
    ]


@pytest.mark.slow
def test_a_second_request_ends_the_run_at_once_and_the_last_checkpoint_is_intact(
    undisturbed: Training, training: Make
) -> None:
    ours = training("--nproc", "2", gates="step-23")
    ours.start()
    ours.at("step-23", ranks=2)
    ours.request_stop()
    time.sleep(1.2)  # two signals within a second count as one request
    assert ours.process is not None
    ours.process.send_signal(signal.SIGTERM)
    assert ours.wait() != 0
    ours.open("step-23")
    assert ours.verdicts() == ["stopped"], "the user ended it, so it has not failed"
    ours.resume()
    ours.finish()
    assert "resumed at step 20" in ours.logs()
    assert_same(ours, undisturbed)


@pytest.mark.slow
def test_damaged_checkpoints_are_skipped(undisturbed: Training, training: Make) -> None:
    ours = training("--nproc", "2", gates="step-33")
    ours.start()
    ours.stop_at("step-33")
    newest, second, third = ours.checkpoints()
    truncated, flipped = (max(each.glob("*.safetensors")) for each in (newest, second))
    os.truncate(truncated, truncated.stat().st_size // 2)
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    ours.resume()
    ours.finish()
    logs = ours.logs()
    assert newest.name in logs
    assert second.name in logs
    assert f"resumed at step {int(third.name[5:])} from" in logs
    assert_same(ours, undisturbed)


def test_a_full_disk_costs_checkpoints_and_nothing_else(
    undisturbed: Training, training: Make
) -> None:
    ours = training("--nproc", "2", gates="start,step-13,step-43")
    ours.start()
    ours.at("start", ranks=2)
    folder = ours.run.checkpoints
    folder.mkdir(exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "paceline-test", str(folder)],
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a file system here: {mounted.stderr.strip()}")
    try:
        ours.open("start")
        ours.at("step-13", ranks=2)
        until(
            lambda: ours.checkpoints() and ours.checkpoints()[0].name == "step-00000010",
            "no save",
            details=ours.logs,
        )
        ballast = folder / "ballast"
        _fill(ballast)
        ours.open("step-13")
        ours.at("step-43", ranks=2)
        until(
            lambda: len(ours.events_named("save_failed")) >= 2, "no save fails", details=ours.logs
        )
        assert [each.name for each in ours.checkpoints()[:1]] == ["step-00000010"]
        ballast.unlink()
        ours.open("step-43")
        ours.finish()
        assert ours.checkpoints()[0].name == "step-00000060"
        assert "training continues" in ours.logs()
    finally:
        ours.close()
        subprocess.run(["umount", str(folder)], check=True)
    assert_same(ours, undisturbed)


def _fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass


@pytest.mark.slow
def test_two_ranks_four_one(training: Make) -> None:
    """The number of ranks changes at each start, but the samples and the curve do not."""
    whole = training("--nproc", "1", "--param", "dropout=0")
    ours = training("--nproc", "2", "--param", "dropout=0", gates="step-17,step-40")
    whole.start()
    whole.finish()
    ours.start()
    ours.stop_at("step-17", ranks=2)
    ours.resume("--nproc", "4")
    ours.stop_at("step-40", ranks=4)
    ours.resume("--nproc", "1")
    ours.finish()
    assert ours.metrics() == pytest.approx(whole.metrics(), abs=1e-6)
    for name, tensor in whole.weights().items():
        assert (ours.weights()[name] - tensor).abs().max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("style", ["torchrun", "spawn"])
def test_other_styles(style: str, undisturbed: Training, training: Make) -> None:
    ours = training(
        "--nproc", "2", "--style", style, "--max-restarts", "1", faults="13:1:kill", gates="step-29"
    )
    ours.start(*(["--spawn"] if style == "spawn" else []))
    ours.stop_at("step-29")
    ours.resume()
    ours.finish()
    assert ours.verdicts() == ["failed", "stopped", "done"], ours.logs()
    failure = ours.failure(1)
    assert (failure["cause"], failure["rank"], failure["step"]) == ("killed", 1, 12)
    assert_same(ours, undisturbed)


def test_spawned_ranks_save_when_all_processes_are_signalled(training: Make) -> None:
    """As a preempting scheduler does. The process that spawned them is signalled too, and must not end them."""
    ours = training("--nproc", "2", "--style", "spawn", gates="step-17")
    ours.start("--spawn")
    ours.at("step-17", ranks=2)
    assert ours.process is not None
    for pid in (ours.process.pid, *process_tree.descendants(ours.process.pid)):
        os.kill(pid, signal.SIGTERM)
    until(
        lambda: ours.events_named("stop_requested"),
        "the stop request is ignored",
        details=ours.logs,
    )
    ours.open("step-17")
    ours.finish()
    assert ours.verdicts() == ["stopped"], ours.logs()
    assert int(ours.checkpoints()[0].name[5:]) >= 17


@pytest.mark.slow
def test_a_spawned_rank_that_hangs_is_named(undisturbed: Training, training: Make) -> None:
    """The script started it, not the agent, but the agent still sees its heartbeat and can ask for its stacks."""
    ours = training(
        "--nproc",
        "2",
        "--style",
        "spawn",
        "--max-restarts",
        "3",
        "--hang-timeout",
        "10s",
        faults="13:1:hang",
    )
    ours.start("--spawn")
    ours.finish()
    assert ours.verdicts() == ["failed", "done"], ours.logs()
    hung = ours.failure(1)
    assert (hung["cause"], hung["rank"]) == ("hang", 1)
    stacks = [ours.run.attempt(1).stacks(rank).read_text() for rank in (0, 1)]
    assert "most recent call first" in stacks[0]
    assert "train.py" in stacks[1], (
        "where exactly it is by then depends on which thread took the signal"
    )
    assert_same(ours, undisturbed)


def test_the_same_error_twice_ends_the_run(training: Make) -> None:
    ours = training("--nproc", "2", "--max-restarts", "5", faults="13:1:raise!")
    ours.start()
    assert ours.wait() == 1
    assert ours.verdicts() == ["failed", "failed"], ours.logs()
    assert (
        "it failed twice at step 12 with the same error: RuntimeError: an error in step 13"
        in ours.logs()
    )


def test_an_error_before_the_first_step_ends_the_run(training: Make) -> None:
    ours = training("--nproc", "2", "--max-restarts", "5", faults="1:0:raise!")
    ours.start()
    assert ours.wait() == 1
    assert ours.verdicts() == ["failed"], ours.logs()


WITHOUT_THE_RUNTIME = """\
import argparse, os, signal, sys, time
from pathlib import Path

requests = []
signal.signal(signal.SIGUSR1, lambda *_: requests.append(1))
parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path)
options, _ = parser.parse_known_args()
state = options.out / f"state-{os.environ['RANK']}"
first = int(state.read_text()) if state.exists() else 0
(options.out / f"at-start-{first}-{os.environ['RANK']}").touch()
for step in range(first, first + 30 if first else 10**9):
    state.write_text(str(step + 1))
    time.sleep(0.01)
    if requests:
        sys.exit(75)
"""


def test_a_script_without_the_runtime(training: Make, tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(WITHOUT_THE_RUNTIME)
    ours = training("--nproc", "2", script=script)
    ours.start()
    ours.at("start-0", ranks=2)
    ours.request_stop(by_file=True)
    ours.finish()
    assert ours.verdicts() == ["stopped"], ours.logs()
    ours.resume()
    ours.finish()
    assert ours.verdicts() == ["stopped", "done"]
    assert "continuing from the script's own checkpoint, if any" in ours.logs()
    assert all(int((ours.out / f"state-{rank}").read_text()) >= 30 for rank in (0, 1))


def test_a_straggler_is_named(training: Make) -> None:
    ours = training("--nproc", "2")
    ours.start("--straggler", "1", "--pause", "0.02")
    ours.finish()
    slow = [
        line
        for line in map(json.loads, ours.run.metrics.read_text().splitlines())
        if "stragglers" in line
    ]
    assert slow, ours.logs()
    assert all(list(line["stragglers"]) == ["1"] for line in slow)
    assert "rank 1" in ours.logs()
    assert "slower" in ours.logs()
