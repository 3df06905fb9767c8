"""Each planted fault is named, with its evidence, and nothing else is."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.heartbeat_file import FINISHED, READY, RUNNING
from paceline.spec.findings import GOOD, PROBLEM, WARNING, Finding
from paceline.watch.diagnosis import resources as disk
from paceline.watch.failure import describe_start
from tests.watch.diagnosis.recorded_run import RecordedRun

Plant = Callable[[RecordedRun], None]

BACKWARD = "/x/site-packages/torch/autograd/graph.py:9 in _engine_run_backward"
INIT = "/x/site-packages/torch/distributed/distributed_c10d.py:99 in init_process_group"


def asleep(run: RecordedRun) -> None:
    run.samples(ranks={"state": READY, "step": 0, "age": 90.0, "waited": 0.0, "own": 0.0})
    for rank in (0, 1, 2):
        run.stack(rank, INIT, "/p/train.py:4 in main")
    run.stack(3, "/p/train.py:3 in main")


def stuck(run: RecordedRun) -> None:
    run.samples(ranks={"step": 41, "age": 300.0}, rank2={"step": 40, "process": "D"})
    for rank in (0, 1, 3):
        run.stack(
            rank,
            "/x/site-packages/torch/autograd/graph.py:9 in _engine_run_backward",
            "/p/train.py:20 in train",
        )
    run.stack(2, "/x/lib/python3.11/gzip.py:5 in read", "/p/data.py:7 in __getitem__")


def never_started(run: RecordedRun) -> None:
    del run.events[1]
    run.events[0] = run.events[0][:1]


def blocked(**fields: Any) -> Plant:
    def plant(run: RecordedRun) -> None:
        run.events[0] = run.events[0][:1]
        run.events[1] = run.events[1][:1]
        known = {
            "address": "node1:3322",
            "error": "timed out",
            "resolved": ["10.0.0.1"],
            "interface": "eth0",
        }
        run.event(1, "unreachable", **{**known, **fields})

    return plant


def cut(run: RecordedRun) -> None:
    run.fails(
        cause="lost",
        rank=None,
        code=None,
        message="its agent is gone: the node went down or lost its network connection",
    )
    run.event(0, "lost", host="node2", closed=False)
    run.event(1, "lost", host="node1", closed=False)


def cut_early(run: RecordedRun) -> None:
    run.state = "FAILED"
    run.event(0, "failed", reason="Lost before attempt 1 began.", lost_host="node2")
    run.event(1, "failed", reason="Lost before attempt 1 began.", lost_host="node1")


def died(run: RecordedRun) -> None:
    run.fails(
        cause="lost",
        rank=None,
        code=None,
        message="its agent is gone: the node went down or lost its network connection",
    )


def given_up(run: RecordedRun) -> None:
    run.fails(cause="killed", rank=None, code=None, message="its agent was killed")
    run.folder.slurm_log.write_text(
        "paceline: node node2 failed: its agent was killed\nsrun: error: Node failure on node2\n"
    )


def wrong_interface(name: str) -> Plant:
    def plant(run: RecordedRun) -> None:
        for node in run.nodes.values():
            node["interfaces"]["mgmt0"] = "192.168.7.1"
        run.change_network(set={"GLOO_SOCKET_IFNAME": name}, chosen={})
        run.fails(
            type="RunError",
            message="the first all-reduce of 4 ranks over gloo failed: no answer within 60 s",
        )

    return plant


def other_version(run: RecordedRun) -> None:
    run.nodes[1]["nccl"] = "2.21.5"


def short_of_gpus(run: RecordedRun) -> None:
    gpus = [{"name": "A100", "memory": 1}] * 2
    run.samples(header1={"gpus": gpus}, header2={"gpus": gpus[:1]})


def sick_gpu(**health: Any) -> Plant:
    """The second GPU of node2 reports something; the first one has had a program's illegal access."""
    return lambda run: run.samples(
        header={"gpus": [{"name": "A100", "memory": 1}] * 2}, node2={"gpus": [{"xid": 31}, health]}
    )


def slow_loader(run: RecordedRun) -> None:
    run.samples(ranks={"waited": 0.7, "own": 0.8})


def one_slow_loader(run: RecordedRun) -> None:
    run.samples(rank3={"waited": 0.7, "own": 0.8})


def loader_without_cores(run: RecordedRun) -> None:
    run.samples(ranks={"waited": 0.7, "own": 0.8}, node1={"own_cpu": 7.9}, node2={"own_cpu": 7.8})


def throttled(run: RecordedRun) -> None:
    run.samples(rank2={"own": 0.5}, rank3={"own": 0.5}, node2={"throttled": 83.0})


def slow_rank(run: RecordedRun) -> None:
    run.samples(rank2={"own": 0.5})


def shared_cores(run: RecordedRun) -> None:
    run.nodes[1]["cpus"] = 1


def full_disk(run: RecordedRun) -> None:
    run.fails(type="OSError", message="[Errno 28] No space left on device: '/scratch/out.pt'")


def failed_save(run: RecordedRun) -> None:
    line = {
        "event": "save_failed",
        "time": run.began,
        "step": 40,
        "error": "[Errno 122] Disk quota exceeded",
    }
    (run.folder.events / "rank-0.jsonl").write_text(json.dumps(line) + "\n")


def gpu_memory(run: RecordedRun) -> None:
    run.fails(
        type="RunError", message="cuda:1 ran out of memory at step 12: 0.10 GiB of 80 GiB are free"
    )


def host_memory(run: RecordedRun) -> None:
    run.samples(header={"memory_limit": 1 << 30}, node2={"oom_kills": 1})
    run.fails(
        cause="killed",
        code=-9,
        out_of_memory=True,
        last_line="the kernel's out-of-memory killer killed it: the job used up its memory",
    )


def shared_memory(run: RecordedRun) -> None:
    text = "unable to write to file </torch_12_34_5>: No space left on device (28)"
    run.fails(type="RuntimeError", message=text, where="train.py:9 in main")


def killed(run: RecordedRun) -> None:
    run.fails(cause="killed", code=-9)


def crashed(run: RecordedRun) -> None:
    run.fails(cause="crash", code=-11, where="train.py:7 in main")


def quoted_words(run: RecordedRun) -> None:
    run.fails(type="ValueError", message="column 'CUDA out of memory' or 'oom-killer' not found")


def nan(run: RecordedRun) -> None:
    run.fails(type="NonFinite", message="The loss is nan at step 7.\n  Lower the learning rate.")


def own_error(run: RecordedRun) -> None:
    run.fails(type="ValueError", message="no such class", where="train.py:9 in main")


def left_early(run: RecordedRun) -> None:
    left = "Rank 1 has exited normally without joining the collective that rank 3 is waiting in. No rank crashed."
    run.fails(type="RuntimeError", message=f"{left}\nConnection closed by peer", ended_ranks=[1])


# fault -> what it is about, its level, and words of its text and of its evidence
FAULTS: dict[str, tuple[Plant, str, str, str, str]] = {
    "one node asleep before init": (
        asleep,
        "hang",
        PROBLEM,
        "Rank 3 on node2 has not reached",
        "train.py:3 in main",
    ),
    "a rank that is stuck": (stuck, "hang", PROBLEM, "Rank 2 on node2", "data.py:7 in __getitem__"),
    "a node that never started": (
        never_started,
        "nodes",
        PROBLEM,
        "No agent has started on node2",
        "agent 1",
    ),
    "a firewall": (
        blocked(answers=True),
        "firewall",
        PROBLEM,
        "port 3322",
        "answers on other ports",
    ),
    "no network": (
        blocked(answers=False),
        "network",
        PROBLEM,
        "cannot reach node1 at all",
        "eth0 10.0.0.2",
    ),
    "no name": (blocked(resolved=[], answers=False), "name", PROBLEM, "cannot resolve", "unknown"),
    "a wrong address": (
        blocked(resolved=["127.0.1.1"]),
        "address",
        PROBLEM,
        "resolves node1 to 127.0.1.1",
        "node1 has eth0 10.0.0.1",
    ),
    "a cut cable": (
        cut,
        "network",
        PROBLEM,
        "The network connection to node2 was lost",
        "lost node1 in turn",
    ),
    "a cable that was cut early": (
        cut_early,
        "network",
        PROBLEM,
        "connection to node2 was lost",
        "lost node1 in turn",
    ),
    "a node that Slurm has given up": (
        given_up,
        "node",
        PROBLEM,
        "node2 was lost",
        "Slurm has marked it as failed",
    ),
    "a dead node": (died, "node", PROBLEM, "node2 was lost", "wrote nothing more"),
    "the wrong interface": (
        wrong_interface("mgmt0"),
        "interface",
        PROBLEM,
        "is mgmt0",
        "the way to",
    ),
    "an unknown interface": (
        wrong_interface("ib9"),
        "interface",
        PROBLEM,
        "is ib9",
        "has no interface ib9",
    ),
    "the loopback": (wrong_interface("lo"), "interface", PROBLEM, "is lo", "but the way to"),
    "another NCCL": (other_version, "versions", PROBLEM, "NCCL on node2", "node2: NCCL 2.21.5"),
    "a slow loader": (slow_loader, "data", WARNING, "The data loader is slow:", "70% of the time"),
    "a slow loader on one node": (
        one_slow_loader,
        "data",
        WARNING,
        "slow on node2",
        "rank 3 on node2",
    ),
    "a loader without cores": (
        loader_without_cores,
        "data",
        WARNING,
        "loader is slow",
        "7.9 of its 8 cores",
    ),
    "a throttled core": (throttled, "throttled", WARNING, "cores of node2 are throttled", "83 %"),
    "a slow rank": (
        slow_rank,
        "straggler",
        WARNING,
        "Rank 2 on node2 is slow",
        "5.0 times as long",
    ),
    "ranks that share cores": (
        shared_cores,
        "cores",
        WARNING,
        "ranks of node2 share cores",
        "2 ranks on 1 cores",
    ),
    "a full disk": (full_disk, "disk", PROBLEM, "/scratch/out.pt", "No space left on device"),
    "a full quota": (failed_save, "disk", PROBLEM, "quota", "the checkpoint of step 40"),
    "GPU memory": (gpu_memory, "GPU memory", PROBLEM, "ran out of memory", "cuda:1"),
    "host memory": (host_memory, "memory", PROBLEM, "the kernel killed", "of 1.0 GB"),
    "shared memory": (shared_memory, "shm", PROBLEM, "(/dev/shm) is full", "at train.py:9"),
    "a signal from outside": (killed, "error", PROBLEM, "killed by SIGKILL", ""),
    "a crash": (crashed, "error", PROBLEM, "killed by SIGSEGV", "at train.py:7 in main"),
    "words of an exception": (quoted_words, "error", PROBLEM, "ValueError: column", ""),
    "an error of our own": (nan, "error", PROBLEM, "The loss is nan at step 7.", ""),
    "the script's own error": (
        own_error,
        "error",
        PROBLEM,
        "ValueError: no such class",
        "train.py:9",
    ),
}
GPU_FAULTS: dict[str, tuple[Plant, str, str]] = {
    "short of GPUs": (short_of_gpus, "GPUs", "node2: the driver (NVML) shows 1 of the 2"),
    "a GPU off the bus": (sick_gpu(xid=79), "GPU error", "Xid 79 (the GPU has fallen off the bus)"),
    "memory errors": (sick_gpu(ecc=3), "GPU error", "3 since the node started"),
    "a hot GPU": (sick_gpu(slowdown="heat"), "throttled", "heat, in 8 of 8 samples"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_and_nothing_else(fault: str, tmp_path: Path) -> None:
    plant, about, level, text, fact = FAULTS[fault]
    run = RecordedRun(tmp_path / "run")
    run.samples()
    plant(run)
    (found,) = run.problems()
    assert (found.about, found.level) == (about, level)
    assert text in found.text
    assert not fact or any(fact in each for each in found.evidence), found.evidence
    assert found.hint
    assert found.docs.startswith("docs/troubleshooting.md")


def test_a_rank_that_left_early_has_nothing_in_its_log(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run")
    run.samples()
    left_early(run)
    (found,) = run.problems()
    assert "Rank 1 has exited normally" in found.text
    assert "the same number of batches" in found.hint
    assert "log" not in found.hint


@pytest.mark.parametrize("fault", GPU_FAULTS)
def test_gpus(fault: str, tmp_path: Path) -> None:
    plant, about, fact = GPU_FAULTS[fault]
    run = RecordedRun(tmp_path / "run", gpus=2)
    run.samples(header={"gpus": [{"name": "A100", "memory": 1}] * 2})
    assert run.problems() == []
    plant(run)
    (found,) = run.problems()
    assert found.about == about
    assert any(fact in each for each in found.evidence), found.evidence


def test_a_healthy_run_says_what_was_checked(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run")
    run.samples()
    found = {each.about: each for each in run.findings()}
    assert all(each.level == GOOD for each in found.values())
    assert {
        "nodes",
        "versions",
        "interface",
        "cores",
        "data",
        "ranks",
        "progress",
        "disk",
        "memory",
    } <= found.keys()
    assert "node2 (eth0 10.0.0.2)" in found["nodes"].text


@pytest.mark.parametrize("state", [RUNNING, FINISHED])
def test_metrics_say_whether_a_short_run_waits_for_data(state: int, tmp_path: Path) -> None:
    """Its nodes have sampled nothing of use. The rank that waits longest is no straggler."""
    run = RecordedRun(tmp_path / "run")
    run.samples(ranks={"state": state, "waited": 0.0}, rank1={"own": 0.5})
    for share, expected in ((0.94, ["data"]), (0.02, ["straggler"] if state == RUNNING else [])):
        lines = [
            {"step": step, "time": run.began + 2 + step, "data_wait": share} for step in range(9)
        ]
        earlier = [
            {"step": step, "time": run.began - 9, "data_wait": 1 - share} for step in range(9)
        ]
        run.folder.metrics.write_text(
            "".join(json.dumps(line) + "\n" for line in [*earlier, *lines])
        )
        assert [each.about for each in run.problems()] == expected
        data = next(each for each in run.findings() if each.about == "data")
        assert f"{share:.0%} of the time" in f"{data.text} {data.evidence}"


def test_a_slow_rank_of_one_node_is_not_compared_with_other_nodes(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run")
    run.samples(rank2={"own": 0.5})
    run.nodes[1]["host"] = "node1"
    (found,) = run.problems()
    assert found.about == "straggler"
    assert "--exclude" not in found.hint


def test_ranks_that_start_together_are_not_stuck(tmp_path: Path) -> None:
    """All of them compile or load: nobody waits for anybody."""
    run = RecordedRun(tmp_path / "run")
    run.samples(ranks={"state": READY, "step": 0, "age": 90.0, "waited": 0.0, "own": 0.0})
    for rank in range(4):
        run.stack(
            rank,
            "/x/site-packages/torch/_inductor/compile.py:9 in compile",
            "/p/train.py:4 in main",
        )
    assert run.problems() == []


def test_agents_on_one_machine(tmp_path: Path) -> None:
    """As `paceline run --nodes 2` starts them."""
    run = RecordedRun(tmp_path / "run")
    run.samples()
    run.folder.job.unlink()
    for node in run.nodes.values():
        node |= {"host": "laptop"}
    found = {each.about: each for each in run.findings()}
    assert found["nodes"].text.startswith("2 of 2 have joined, all on laptop")
    for node in run.nodes.values():
        node["interfaces"] = {
            "lo": "127.0.0.1",
            **{f"eth{number}": f"10.0.{number}.1" for number in range(15)},
        }
    (nodes,) = [each.text for each in run.findings() if each.about == "nodes"]
    assert (
        nodes
        == "2 of 2 have joined, all on laptop (eth0 10.0.0.1, eth1 10.0.1.1, eth2 10.0.2.1 + 12 more)"
    )


def test_a_script_without_a_session_that_prints_is_not_stuck(tmp_path: Path) -> None:
    """Its steps are not known, and any backward pass looks like waiting."""
    run = RecordedRun(tmp_path / "run")
    asleep(run)
    assert [each.about for each in run.problems()] == ["hang"]
    (run.folder.attempts()[-1].path / "rank-1.log").write_text("step 350\n")
    assert run.problems() == []


@pytest.mark.parametrize(
    ("motion", "who"), [({"busy": [3]}, "rank 3 on node2 is"), ({"awake": [0, 1]}, "go from one")]
)
def test_a_quiet_script_that_moves_is_not_stuck(
    motion: dict[str, list[int]], who: str, tmp_path: Path
) -> None:
    """Its late rank works, or those that wait for it get on at each of its short steps."""
    run = RecordedRun(tmp_path / "run")
    asleep(run)
    for rank in (0, 1, 2):
        run.stack(rank, BACKWARD, "/p/train.py:4 in main")
    run.answer |= motion
    assert run.problems() == []
    assert any(who in each.text for each in run.findings() if each.about == "progress")


def test_ranks_that_poll_for_others_at_the_start_do_not_move(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run")
    asleep(run)
    run.answer["awake"] = [0, 1, 2]
    assert [each.about for each in run.problems()] == ["hang"]


def test_stacks_of_another_moment_do_not_count(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run")
    asleep(run)
    run.answer["dumped"] = []
    assert run.problems() == []


def test_a_rank_without_a_stack_is_missing_where_all_others_wait(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run")
    asleep(run)
    run.answer |= {"dumped": [0, 1, 2], "foreign": [3]}
    (found,) = run.problems()
    assert found.text == "Rank 3 on node2 has not reached the point where the others wait."
    assert any("its own handler for SIGUSR2" in each for each in found.evidence), found.evidence


def test_a_long_evaluation_between_two_steps_is_no_hang(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run")
    stuck(run)
    run.answer["busy"] = [2]
    (found,) = run.problems()
    assert (found.about, found.level) == ("progress", WARNING)
    assert "rank 2 on node2 is working" in found.text
    assert "rank 2 on node2 is at data.py:7 in __getitem__" in found.evidence
    (run.folder.attempts()[-1].path / "rank-0.log").write_text("eval batch 7\n")
    assert run.problems() == []


def test_a_hang_of_a_plain_script_with_a_timeout(tmp_path: Path) -> None:
    """It may have trained for long: nobody knows its steps. And it has the timeout already."""
    run = RecordedRun(tmp_path / "run", hang_timeout=15.0)
    asleep(run)
    log = run.folder.attempt(1).log(0)
    log.write_text("step 4\n")
    os.utime(log, (run.began, run.began))
    (found,) = run.problems()
    assert found.about == "hang"
    assert re.match(
        "no rank has printed anything for 60. s, and none reports steps", found.evidence[0]
    )
    assert "--hang-timeout" not in found.hint


@pytest.mark.parametrize(
    ("size", "text"), [(20 << 20, ""), (300 << 20, "0.3 GB"), (3 << 30, "3.0 GB")]
)
def test_the_peak_of_memory(size: int, text: str, tmp_path: Path) -> None:
    """An agent alone is no peak: the samples of a short run have missed its ranks."""
    run = RecordedRun(tmp_path / "run")
    run.samples(node1={"own_memory": size}, node2={"own_memory": 1 << 20})
    found = [each.text for each in run.findings() if each.about == "memory"]
    assert found == ([f"peak {text} on a node"] if text else [])


def test_words_of_the_script_are_no_evidence(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run")
    run.samples()
    run.folder.slurm_log.write_text(
        "oom-killer guard enabled: will retry on Out Of Memory\ndatabase or disk is full?\n"
    )
    assert run.problems() == []
    run.folder.slurm_log.write_text(
        "paceline: An agent was killed. The out-of-memory killer may have ended it.\n"
    )
    assert run.problems() == [], "nor is a guess"
    run.folder.slurm_log.write_text("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0\n")
    assert [each.about for each in run.problems()] == ["memory"]


def test_an_interface_that_works_is_no_fault(tmp_path: Path) -> None:
    """Training over InfiniBand while agents talk over Ethernet is what many sites want."""
    run = RecordedRun(tmp_path / "run")
    for node in run.nodes.values():
        node["interfaces"]["ib0"] = "192.168.7.1"
    run.change_network(set={"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"}, chosen={})
    run.samples()
    assert run.problems() == []


def test_an_earlier_job_start_does_not_count(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run")
    run.samples()
    run.events[1].insert(
        0,
        {
            "event": "unreachable",
            "time": 1.0,
            "job_start": "6-0",
            "address": "node1:1",
            "error": "x",
        },
    )
    run.events[1].insert(0, {**run.nodes[1], "job_start": "6-0", "torch": "1.0", "time": 0.5})
    assert run.problems() == []


def test_no_space_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RecordedRun(tmp_path / "run")
    run.samples()
    monkeypatch.setattr(disk, "free_space", lambda path: 1 << 20)
    (found,) = run.problems()
    assert (found.about, "1 MB free now" in found.evidence[0]) == ("disk", True)


def test_little_space_does_not_hide_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RecordedRun(tmp_path / "run")
    run.samples()
    own_error(run)
    monkeypatch.setattr(disk, "free_space", lambda path: 1 << 20)
    error, space = run.problems()
    assert (error.about, error.level, "no such class" in error.text) == ("error", PROBLEM, True)
    assert (space.about, space.level) == ("disk", WARNING)


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETED"])
def test_a_save_that_failed_once_is_a_warning(state: str, tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run", state=state)
    run.samples()
    failed_save(run)
    if state == "COMPLETED":
        start = run.folder.job_start("7-0")
        start.path.mkdir(parents=True)
        start.verdict.write_text("done\n")
    else:
        assert [each.level for each in run.problems()] == [PROBLEM]
        with open(run.folder.events / "rank-0.jsonl", "a") as file:
            file.write(json.dumps({"event": "saved", "time": run.began + 9, "step": 60}) + "\n")
    (found,) = run.problems()
    assert (found.about, found.level) == ("disk", WARNING)


def test_the_advice_of_an_error_is_the_fix(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run")
    run.samples()
    nan(run)
    (found,) = run.problems()
    assert found.text == "rank 3 on node2: NonFinite: The loss is nan at step 7."
    assert found.hint.startswith("Lower the learning rate. Read the log")


@pytest.mark.parametrize(
    ("kind", "message", "about"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB.", "GPU memory"),
        ("AcceleratorError", "CUDA error: out of memory\nCUDA kernel errors", "GPU memory"),
        ("DistBackendError", "NCCL error in: x.cpp\nCuda failure 2 'out of memory'", "GPU memory"),
        ("KeyError", "CUDA error: out of memory", "error"),
        ("_ArrayMemoryError", "Unable to allocate 8 TiB", "error"),
    ],
)
def test_types_and_texts_that_mean_memory(
    kind: str, message: str, about: str, tmp_path: Path
) -> None:
    run = RecordedRun(tmp_path / "run")
    run.samples()
    run.fails(type=kind, message=message)
    assert [each.about for each in run.problems()] == [about]


def test_damaged_records_cost_nothing(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run")
    run.samples()
    run.nodes[1].update(interfaces=7, ranks="x", addresses=None, cpus="many")
    run.change_network(set=[], chosen=1)
    with open(run.folder.node_metrics(0), "a") as file:
        file.write('{"time": 5, "ranks": [[1], "x", [1, 2, 3, 4, 5, 6, 7, 8]]}\n')
    assert [each for each in run.problems() if each.level == PROBLEM] == []


def test_a_quota_that_is_used_up_is_a_problem(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run")
    run.samples()
    full = Finding("quota", PROBLEM, "Your quota on /scratch is used up.", "Remove something.")
    (found,) = run.problems([full])
    assert found.evidence == ("Your quota on /scratch is used up.",)


def test_every_finding_leads_to_a_section_of_the_guide() -> None:
    root = Path(__file__).parents[3]
    guide = (root / "docs/troubleshooting.md").read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", guide, re.MULTILINE)
    known = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    used = set()
    for path in (root / "src/paceline/watch/diagnosis").glob("*.py"):
        used |= set(
            re.findall(
                r"(?:\{DOCS\}|troubleshooting\.md)#([\w-]+)", path.read_text(encoding="utf-8")
            )
        )
    assert len(used) > 8
    assert used <= known


@pytest.mark.parametrize(
    ("failure", "advice"),
    [
        (
            {"type": "ModuleNotFoundError", "message": "No module named 'einops.torch'"},
            "Install einops in the",
        ),
        (
            {"code": 2, "last_line": "train.py: error: unrecognized arguments: --lrr"},
            "The script rejected its argum",
        ),
        (
            {"type": "KeyError", "message": "'x'", "where": "train.py:9 in main"},
            "Look at train.py:9. Read the",
        ),
    ],
)
def test_the_advice_fits_the_error(tmp_path: Path, failure: dict[str, Any], advice: str) -> None:
    run = RecordedRun(tmp_path / "run")
    run.fails(**failure)
    (found,) = run.problems()
    assert found.hint.startswith(advice)
    rejected = "add the script and other arguments: it rejected these"
    assert (describe_start(run.folder) == rejected) is (failure.get("code") == 2)
