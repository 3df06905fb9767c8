"""One job start at a time has a run folder, whichever host it is on."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.claims import Holder, describe_processes, find_holder, local_job_start_name
from paceline.contract.run_folder import RunFolder, write_atomically
from paceline.errors import ClusterError, UsageError
from paceline.launch import run_folder as claims
from paceline.slurm import squeue_and_sacct
from paceline.slurm.job_states import JobState
from paceline.watch.records import read_record


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def claim_for(run: RunFolder, name: str, pid: int | None = None, **changed: Any) -> Holder:
    """Claim the run for another process, perhaps one of another host."""
    holder = find_holder(run)
    run.claims.mkdir(exist_ok=True)
    (run.claims / str(holder.number + 1 if holder else 1)).symlink_to(name)
    if pid is not None:
        known = json.loads(describe_processes([pid])) | changed
        run.job_start(name).path.mkdir(parents=True)
        write_atomically(run.job_start(name).process, json.dumps(known))
    found = find_holder(run)
    assert found is not None
    return found


@contextmanager
def process() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield child.pid


def test_a_live_process_keeps_others_out(run: RunFolder) -> None:
    with process() as pid:
        claim_for(run, "pid-1-a", pid)
        with pytest.raises(UsageError, match=f"still running as process {pid}") as refused:
            claims.claim_run(run)
        assert (
            refused.value.hint == f"Wait for it, or stop it with `paceline cancel {run.path.name}`."
        )
        assert read_record(run).status == "running"
    assert read_record(run).status == "lost"
    claims.claim_run(run)
    holder = find_holder(run)
    assert holder is not None
    assert (holder.number, holder.name, holder.pids()) == (2, local_job_start_name(), [os.getpid()])


def test_a_recycled_pid_does_not_count_as_alive(run: RunFolder) -> None:
    with process() as pid:
        started = json.loads(describe_processes([pid]))["processes"][0][1]
        boot, ticks = started.split()
        claim_for(run, "pid-1-a", pid, processes=[[pid, f"{boot} {int(ticks) - 1}"]])
        assert read_record(run).status == "lost"
        claims.claim_run(run)


def test_agents_that_outlive_their_command_keep_others_out(run: RunFolder) -> None:
    with process() as agent:
        known = json.loads(describe_processes([agent]))
        claim_for(run, "pid-1-a", agent, processes=[[2**22 + 1, "gone"], *known["processes"]])
        with pytest.raises(UsageError, match=f"still running as process {agent}"):
            claims.claim_run(run)


ANOTHER_HOST = {"host": "elsewhere", "boot": "b", "namespace": "pid:[1]"}


def test_a_run_on_another_host_keeps_others_out(run: RunFolder) -> None:
    holder = claim_for(run, "pid-1-a", 1, **ANOTHER_HOST)
    with pytest.raises(
        UsageError, match="was started on elsewhere, and has not ended there"
    ) as caught:
        claims.claim_run(run)
    assert str(holder.job_start.process) in caught.value.hint
    assert read_record(run).status == "unknown"
    write_atomically(holder.job_start.verdict, "stopped\n")
    claims.claim_run(run)


def test_the_way_out_for_a_host_that_is_gone(run: RunFolder) -> None:
    claim_for(run, "pid-1-a", 1, **ANOTHER_HOST).job_start.process.unlink()
    claims.claim_run(run)


def test_another_container_of_this_host_is_another_host(run: RunFolder) -> None:
    claim_for(run, "pid-1-a", os.getpid(), namespace="pid:[1]")
    with pytest.raises(UsageError, match="has not ended there"):
        claims.claim_run(run)


def test_a_host_that_was_rebooted_runs_nothing(run: RunFolder) -> None:
    claim_for(run, "pid-1-a", os.getpid(), boot="before")
    claims.claim_run(run)


def test_jobs_keep_others_out(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    claim_for(run, "7-0")
    for state in ("RUNNING", "PENDING"):
        monkeypatch.setattr(
            squeue_and_sacct,
            "states",
            lambda jobs, state=state: {job: JobState(job, state) for job in jobs},
        )
        with pytest.raises(UsageError, match="as job 7"):
            claims.claim_run(run)

    def silent(jobs: object) -> dict[str, JobState]:
        raise ClusterError("squeue did not respond within 60 s.")

    monkeypatch.setattr(squeue_and_sacct, "states", silent)
    with pytest.raises(ClusterError, match="Cannot find out whether job 7 still has run"):
        claims.claim_run(run)
    run.job_start("7-0").path.mkdir(parents=True)
    write_atomically(run.job_start("7-0").verdict, "failed\n")
    claims.claim_run(run)


def test_a_rival_that_comes_between_is_noticed(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim_for(run, "pid-1-a", 1, boot="before")
    with process() as rival, monkeypatch.context() as patch:
        real = claims._require_over

        def overtaken(run: RunFolder, holder: Holder | None) -> None:
            real(run, holder)  # the first one is over
            patch.setattr(claims, "_require_over", real)
            claim_for(run, "pid-2-b", rival)

        patch.setattr(claims, "_require_over", overtaken)
        with pytest.raises(UsageError, match=f"still running as process {rival}"):
            claims.claim_run(run)


def test_what_is_not_a_claim_is_an_error(run: RunFolder) -> None:
    run.claims.mkdir()
    (run.claims / "1").touch()
    with pytest.raises(UsageError, match="not a claim"):
        claims.claim_run(run)


def _claim(path: Path, barrier: Any, results: Any) -> None:
    barrier.wait()
    try:
        claims.claim_run(RunFolder(path))
        results.put("claimed")
    except UsageError as error:
        results.put(error.message)
    barrier.wait()  # alive until all have tried


def test_of_eight_at_once_one_succeeds(run: RunFolder) -> None:
    claim_for(run, "pid-1-a", 1, boot="before")  # over: all eight may succeed it
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(8), context.Queue()
    children = [context.Process(target=_claim, args=(run.path, barrier, results)) for _ in range(8)]
    for child in children:
        child.start()
    answers = sorted(results.get(timeout=60) for _ in children)
    for child in children:
        child.join()
    assert answers.count("claimed") == 1
    assert sum("still running as process" in answer for answer in answers) == 7
    assert len(list(run.claims.iterdir())) == 2


def test_cancel_names_the_host_of_a_run(
    scratch: Path, paceline: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    run = RunFolder(scratch / "p" / "e" / "20260101-000000-aaaa")
    run.path.mkdir(parents=True)
    run.run_json.write_text("{}")
    claim_for(run, "pid-1-a", 1, **ANOTHER_HOST)
    done = paceline("cancel", "last")
    assert (done.returncode, "was started on elsewhere" in done.stderr) == (2, True), done.stderr
    assert not run.cancelled.exists()
