"""Whatever happens to a run on one machine, it ends with the weights and the curve of one that nothing happened to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from paceline.agent.workers import processes
from tests.fault_tolerance.conftest import Make
from tests.fault_tolerance.runs import Training, assert_same, until

pytestmark = pytest.mark.timeout(600)  # each start imports torch, on a machine that may have much else to do


def test_killed_hung_and_failing_ranks_are_relaunched(undisturbed: Training, training: Make) -> None:
    ours = training(
        "--nproc", "2", "--max-restarts", "3", "--hang-timeout", "10s",
        faults="13:1:kill,27:1:hang,38:0:raise,52:0:kill",
    )  # fmt: skip
    ours.start()
    ours.finish()
    assert ours.verdicts() == ["failed"] * 4 + ["done"], ours.told()
    killed, hung, raised, again = map(ours.failure, (1, 2, 3, 4))
    assert (killed["cause"], killed["rank"], killed["code"]) == ("killed", 1, -9)
    assert (hung["cause"], hung["rank"]) == ("hang", 1)
    for rank in (0, 1):
        assert "train.py" in ours.run.attempt(2).stacks(rank).read_text()
    assert (raised["rank"], raised["type"]) == (0, "RuntimeError")
    assert (again["cause"], again["rank"]) == ("killed", 0)
    failed = ours.happened("failed")
    assert [each["rank"] for each in failed] == [1, 1, 0, 0]
    assert [each["step"] for each in failed] == [12, 26, 37, 51]
    assert_same(ours, undisturbed)


def test_stops_at_any_moment(undisturbed: Training, training: Make) -> None:
    """Before the first step, within an epoch, in an evaluation, during a save; by a signal and by the file."""
    ours = training("--nproc", "2", gates="warm-up,step-17,evaluate-2,save-45,step-57")
    ours.start()
    ours.stop_at("warm-up", by_file=True)
    assert not ours.checkpoints()
    ours.go_on()
    ours.stop_at("step-17")
    assert 17 <= int(ours.checkpoints()[0].name[5:]) <= 25
    ours.go_on()
    ours.stop_at("evaluate-2", by_file=True)
    assert ours.checkpoints()[0].name == "step-00000036"
    ours.go_on()
    ours.stop_at("save-45", ranks=1)
    assert int(ours.checkpoints()[0].name[5:]) >= 45
    ours.go_on()
    # Asked in several ways at once, and the ranks themselves more than once: all mean the same.
    ours.at("step-57", ranks=2)
    ours.ask_to_stop(by_file=True)
    for _ in range(2):
        for pid in rank_pids(ours):
            os.kill(pid, signal.SIGUSR1)
            os.kill(pid, signal.SIGTERM)
    ours.open("step-57")
    ours.finish()
    assert ours.verdicts() == ["stopped"] * 5
    ours.go_on()
    ours.finish()
    assert_same(ours, undisturbed)


def rank_pids(ours: Training) -> list[int]:
    """From what the session printed of its ranks."""
    lines = ours.run.attempts()[-1].log(0).read_text().splitlines()
    return [
        int(line.split("pid ")[1].split()[0]) for line in lines if line.startswith("rank ") and "pid " in line
    ]


@pytest.mark.slow
def test_asked_twice_it_ends_at_once_and_the_last_checkpoint_is_good(
    undisturbed: Training, training: Make
) -> None:
    ours = training("--nproc", "2", gates="step-23")
    ours.start()
    ours.at("step-23", ranks=2)
    ours.ask_to_stop()
    time.sleep(1.2)  # two signals within a second are one press
    assert ours.process is not None
    ours.process.send_signal(signal.SIGTERM)
    assert ours.wait() != 0
    ours.open("step-23")
    assert ours.verdicts() == ["failed"]
    ours.go_on()
    ours.finish()
    assert "resumed at step 20" in ours.told()
    assert_same(ours, undisturbed)


def test_damaged_checkpoints_are_passed_over(undisturbed: Training, training: Make) -> None:
    ours = training("--nproc", "2", gates="step-33")
    ours.start()
    ours.stop_at("step-33")
    newest, second, third = ours.checkpoints()
    truncated, flipped = (max(each.glob("*.safetensors")) for each in (newest, second))
    os.truncate(truncated, truncated.stat().st_size // 2)
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    ours.go_on()
    ours.finish()
    told = ours.told()
    assert newest.name in told
    assert second.name in told
    assert f"resumed at step {int(third.name[5:])} from" in told
    assert_same(ours, undisturbed)


def test_a_full_disk_costs_checkpoints_and_nothing_else(undisturbed: Training, training: Make) -> None:
    ours = training("--nproc", "2", gates="start,step-13,step-43")
    ours.start()
    ours.at("start", ranks=2)
    place = ours.run.checkpoints
    place.mkdir(exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "paceline-test", str(place)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        ours.open("start")
        ours.at("step-13", ranks=2)
        until(
            lambda: ours.checkpoints() and ours.checkpoints()[0].name == "step-00000010",
            "no save",
            told=ours.told,
        )
        ballast = place / "ballast"
        _fill(ballast)
        ours.open("step-13")
        ours.at("step-43", ranks=2)
        until(lambda: len(ours.happened("save_failed")) >= 2, "no save fails", told=ours.told)
        assert [each.name for each in ours.checkpoints()[:1]] == ["step-00000010"]
        ballast.unlink()
        ours.open("step-43")
        ours.finish()
        assert ours.checkpoints()[0].name == "step-00000060"
        assert "Training goes on" in ours.told()
    finally:
        ours.close()
        subprocess.run(["umount", str(place)], check=True)
    assert_same(ours, undisturbed)


def _fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass


def test_four_ranks_two_four(undisturbed: Training, training: Make) -> None:
    """The number of ranks changes at each start: the same samples, the same curve."""
    whole = training("--nproc", "4", "--param", "dropout=0")
    ours = training("--nproc", "4", "--param", "dropout=0", gates="step-17,step-40")
    whole.start()
    whole.finish()
    ours.start()
    ours.stop_at("step-17", ranks=4)
    ours.go_on("--nproc", "2")
    ours.stop_at("step-40", ranks=2)
    ours.go_on("--nproc", "4")
    ours.finish()
    assert ours.metrics() == pytest.approx(whole.metrics(), abs=1e-6)
    for name, tensor in whole.weights().items():
        assert (ours.weights()[name] - tensor).abs().max() < 1e-5


@pytest.mark.parametrize("style", ["torchrun", pytest.param("spawn", marks=pytest.mark.slow)])
def test_other_styles(style: str, undisturbed: Training, training: Make) -> None:
    ours = training(
        "--nproc", "2", "--style", style, "--max-restarts", "1", faults="13:1:kill", gates="step-29"
    )
    ours.start(*(["--spawn"] if style == "spawn" else []))
    ours.stop_at("step-29")
    ours.go_on()
    ours.finish()
    assert ours.verdicts() == ["failed", "stopped", "done"], ours.told()
    failure = ours.failure(1)
    assert (failure["cause"], failure["rank"], failure["step"]) == ("killed", 1, 12)
    assert_same(ours, undisturbed)


def test_spawned_ranks_save_when_all_processes_are_signalled(training: Make) -> None:
    """As a scheduler does that preempts: also the process that has started them, and must not take them along."""
    ours = training("--nproc", "2", "--style", "spawn", gates="step-17")
    ours.start("--spawn")
    ours.at("step-17", ranks=2)
    assert ours.process is not None
    for pid in (ours.process.pid, *processes.descendants(ours.process.pid)):
        os.kill(pid, signal.SIGTERM)
    until(lambda: ours.happened("stop_requested"), "nobody hears the request", told=ours.told)
    ours.open("step-17")
    ours.finish()
    assert ours.verdicts() == ["stopped"], ours.told()
    assert int(ours.checkpoints()[0].name[5:]) >= 17


@pytest.mark.slow
def test_a_spawned_rank_that_hangs_is_named(undisturbed: Training, training: Make) -> None:
    """The script has started it, and not the agent: which still sees it beat, and can ask it for its stacks."""
    ours = training(
        "--nproc", "2", "--style", "spawn", "--max-restarts", "3", "--hang-timeout", "10s", faults="13:1:hang"
    )
    ours.start("--spawn")
    ours.finish()
    assert ours.verdicts() == ["failed", "done"], ours.told()
    hung = ours.failure(1)
    assert (hung["cause"], hung["rank"]) == ("hang", 1)
    stacks = [ours.run.attempt(1).stacks(rank).read_text() for rank in (0, 1)]
    assert "most recent call first" in stacks[0]
    assert "train.py" in stacks[1], "where exactly it is by then depends on which thread took the signal"
    assert_same(ours, undisturbed)


def test_the_same_error_twice_ends_the_run(training: Make) -> None:
    ours = training("--nproc", "2", "--max-restarts", "5", faults="13:1:raise!")
    ours.start()
    assert ours.wait() == 1
    assert ours.verdicts() == ["failed", "failed"], ours.told()
    assert "the same failure at step 12, twice: RuntimeError: an error in step 13" in ours.told()


def test_an_error_before_the_first_step_ends_the_run(training: Make) -> None:
    ours = training("--nproc", "2", "--max-restarts", "5", faults="1:0:raise!")
    ours.start()
    assert ours.wait() == 1
    assert ours.verdicts() == ["failed"], ours.told()


WITHOUT_THE_RUNTIME = """\
import argparse, os, signal, sys, time
from pathlib import Path

asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path)
options, _ = parser.parse_known_args()
state = options.out / f"state-{os.environ['RANK']}"
begun = int(state.read_text()) if state.exists() else 0
(options.out / f"at-begun-{begun}-{os.environ['RANK']}").touch()
for step in range(begun, begun + 30 if begun else 10**9):
    state.write_text(str(step + 1))
    time.sleep(0.01)
    if asked:
        sys.exit(75)
"""


def test_a_script_without_the_runtime(training: Make, tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(WITHOUT_THE_RUNTIME)
    ours = training("--nproc", "2", script=script)
    ours.start()
    ours.at("begun-0", ranks=2)
    ours.ask_to_stop(by_file=True)
    ours.finish()
    assert ours.verdicts() == ["stopped"], ours.told()
    ours.go_on()
    ours.finish()
    assert ours.verdicts() == ["stopped", "done"]
    assert all(int((ours.out / f"state-{rank}").read_text()) >= 30 for rank in (0, 1))


def test_a_straggler_is_named(training: Make) -> None:
    ours = training("--nproc", "2")
    ours.start("--straggler", "1", "--pause", "0.02")
    ours.finish()
    slow = [
        line for line in map(json.loads, ours.run.metrics.read_text().splitlines()) if "stragglers" in line
    ]
    assert slow, ours.told()
    assert all(list(line["stragglers"]) == ["1"] for line in slow)
    assert "rank 1" in ours.told()
    assert "slower" in ours.told()
