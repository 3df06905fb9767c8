"""Slurm's commands, replaced by fake ones."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.claims import local_job_start_name
from paceline.contract.run_folder import SUBMITTING, RunFolder
from paceline.errors import JobRejected, NoAnswer, NotConfigured
from paceline.launch import run_folder as claims
from paceline.launch.run_folder import open_run_folder
from paceline.launch.slurm_job import SlurmPlan, submit_plan
from paceline.slurm import commands as slurm
from paceline.slurm import limits, sbatch, squeue_and_sacct
from paceline.slurm.job_states import JobState
from paceline.slurm.limits import check_limits
from paceline.slurm.partitions import NodeKind, Partition, find_partitions
from paceline.slurm.sbatch_directives import Directive, count_tasks
from paceline.spec.findings import PROBLEM, WARNING
from paceline.spec.job import Program
from paceline.spec.load import load_job
from paceline.spec.run_path import RunPath, new_run_id
from tests.golden.cases import plan


def put_command(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def submission(tmp_path: Path) -> SlurmPlan:
    """A plan whose sbatch is found in `tmp_path`."""
    run_path = RunPath(tmp_path / "scratch", "p", "e", "id")
    run_path.folder.events.mkdir(parents=True)
    return replace(plan({}, run_path=run_path), submitter={"PATH": f"{tmp_path}:/usr/bin:/bin"})


# Slurm's commands for anyone but an administrator, where every partition is hidden.
HIDING = 'case " $* " in *" --all "*) printf "%s\\n" "$HIDDEN" ;; esac'


def test_hidden_partitions_and_their_jobs_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("squeue", "sinfo"):
        put_command(tmp_path, name, HIDING)
    text = "secret up infinite 2 8 1000 gpu:4 gpu:0 0/16/0/16 idle 1-infinite"
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        patch.setenv("HIDDEN", slurm.SEPARATOR.join(["7", "RUNNING", "None", "n1", "", "1:00"]))
        assert squeue_and_sacct.states(["7"])["7"].label == "running"
        patch.setenv("HIDDEN", "7")
        assert squeue_and_sacct.numeric_job_id("6_1") == "7"
        patch.setenv("HIDDEN", slurm.SEPARATOR.join(text.split()))
        assert [partition.name for partition in find_partitions()] == ["secret"]


def test_variables_of_the_user_do_not_change_questions_and_cancels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`SQUEUE_PARTITION=low` would make live jobs look lost, and `SCANCEL_PARTITION=low` would keep them alive."""
    for name in ("squeue", "sacct", "sinfo", "scancel"):
        put_command(tmp_path, name, f"env >>{tmp_path}/variables")
    with monkeypatch.context() as patch:
        for name in ("SQUEUE_PARTITION", "SCANCEL_PARTITION", "SACCT_FORMAT", "SINFO_PARTITION"):
            patch.setenv(name, "low")
        patch.setenv("SLURM_CONF", os.devnull)
        patch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        squeue_and_sacct.states(["7"])
        find_partitions()
        slurm.cancel_jobs(["7"])
    found = {line.partition("=")[0] for line in (tmp_path / "variables").read_text().splitlines()}
    assert "SLURM_CONF" in found
    assert not [
        name for name in found if name.startswith(("SQUEUE_", "SCANCEL_", "SACCT_", "SINFO_"))
    ]


def test_a_configuration_that_is_gone_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `paceline sandbox down`: Slurm's own commands look for the file for a minute."""
    put_command(tmp_path, "squeue", "sleep 600")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        patch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
        with pytest.raises(
            NotConfigured, match=r"SLURM_CONF names .*slurm\.conf, which does not exist"
        ) as caught:
            squeue_and_sacct.queue()
    assert "unset SLURM_CONF" in caught.value.hint


def test_init_writes_a_profile_that_submit_uses_on_that_cluster(
    tmp_path: Path, paceline: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    fields = [
        "gpu*",
        "up",
        "infinite",
        "2",
        "8",
        "1000",
        "gpu:4",
        "gpu:0",
        "0/16/0/16",
        "idle",
        "1-infinite",
    ]
    put_command(tmp_path, "sinfo", f"printf '%s\\n' '{slurm.SEPARATOR.join(fields)}'")
    put_command(tmp_path, "scontrol", "echo 'ClusterName             = east'")
    put_command(tmp_path, "sbatch", "echo 'would start at 2030'")
    (tmp_path / "train.py").touch()
    file = tmp_path / "paceline.toml"
    file.write_text("[job]\nnodes = 2\n")

    def call(*args: str) -> subprocess.CompletedProcess[str]:
        return paceline(*args, cwd=tmp_path, PATH=f"{tmp_path}:/usr/bin:/bin")

    assert "added [profiles.east]" in call("init").stdout
    assert file.read_text().startswith("[job]\nnodes = 2\n\n# The cluster east")
    done = call("submit", "--dry-run", "train.py")
    assert f"using the profile of this cluster: [profiles.east] of {file}" in done.stderr
    assert "#SBATCH --gres=gpu:4\n" in done.stdout
    assert "#SBATCH --nodes=2\n" in done.stdout
    without = call("submit", "--cpu", "--dry-run", "train.py")
    assert "#SBATCH --partition=gpu\n" in without.stdout
    assert "gres" not in without.stdout
    again = call("init")
    assert (again.returncode, again.stdout) == (2, "")


PARTITIONS = {
    "gpu": Partition("gpu", is_default=True, kinds=[NodeKind(2, 64, 500_000, {"a100": 4}, "idle")]),
    "cpu": Partition("cpu", max_time=3600, kinds=[NodeKind(2, 64, 500_000, {}, "idle")]),
}


def test_a_job_for_nodes_that_are_down_waits_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """`sbatch --test-only` rejects such a job; sbatch takes it, unless the cluster forbids that."""
    reason = "Requested node configuration is not available"
    failed = subprocess.CompletedProcess([], 1, "", f"allocation failure: {reason}")
    monkeypatch.setattr(limits, "test_only", lambda plan: failed)
    job = load_job(Program("train.py"))
    planned = replace(plan({}), submitter={})
    kinds = [NodeKind(1, 64, 500_000, {}, "idle"), NodeKind(2, 64, 500_000, {}, "drained*")]
    found = limits.check_with_slurm(job, planned, [Partition("main", is_default=True, kinds=kinds)])
    assert (found.level, found.text) == (
        WARNING,
        "The job cannot start yet: too few nodes that fit it are up (2 of partition main down or drained)."
        " It waits until they are back.",
    )
    rejected = limits.explain_rejection(
        job, planned, [Partition("main", is_default=True, kinds=kinds)], reason
    )
    assert rejected.hint.startswith("Submit it again once they are back")
    up = [Partition("main", is_default=True, kinds=kinds[:1])]
    assert limits.check_with_slurm(job, planned, up).level == PROBLEM


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 8), (3, 4), (5, 1)])
def test_too_many_gpus_are_an_error_that_names_what_there_is(nodes: int, gpus: int) -> None:
    kinds = [
        NodeKind(count, 64, 500_000, {"a100": each}, "idle") for count, each in ((1, 4), (2, 2))
    ]
    kinds.append(NodeKind(4, 64, 500_000, {}, "idle"))
    tables = {"job": {"nodes": nodes, "gpus_per_node": gpus, "time": "1h"}}
    job = load_job(Program("train.py"), overlay=(tables, Path("x")))
    planned = replace(plan({}), directives=(), task_counts=count_tasks(job), submitter={})
    (found,) = check_limits(job, planned, [Partition("gpu", is_default=True, kinds=kinds)])
    assert (found.level, found.about) == (PROBLEM, "nodes")
    assert "Its nodes have a100 (up to 4 per node), " in found.hint


@pytest.mark.parametrize(
    ("keys", "warned"),
    [
        (
            {},
            [
                "the default of partition gpu applies, if it has one.",
                "no GPUs, but the nodes of partition gpu",
            ],
        ),
        ({"job__partition": "cpu"}, ["the default of partition cpu applies (at most 1h)."]),
        ({"job__time": "1h", "runtime__cpu": True}, []),
        ({"job__gpus_per_node": 1, "job__extra": ["--time=5"]}, []),
        ({"job__gpus_per_node": 0, "job__time": "1h"}, []),
    ],
)
def test_a_job_without_a_time_limit_or_gpus_is_a_warning(
    keys: dict[str, Any], warned: list[str]
) -> None:
    tables: dict[str, Any] = {}
    for key, value in keys.items():
        table, name = key.split("__")
        tables.setdefault(table, {})[name] = value
    job = load_job(Program("train.py"), overlay=(tables, Path("x")))
    planned = replace(plan({}), directives=(), task_counts=count_tasks(job), submitter={})
    if job.resources.time:
        planned = replace(planned, directives=(Directive("time", "1:00:00"),))
    found = [
        each.text
        for each in check_limits(job, planned, list(PARTITIONS.values()))
        if each.level == WARNING
    ]
    assert len(found) == len(warned)
    for text, part in zip(found, warned, strict=True):
        assert part in text


def test_the_job_id_is_found_in_other_output(submission: SlurmPlan, tmp_path: Path) -> None:
    put_command(
        tmp_path, "sbatch", "echo 'Welcome to 7!'; echo '123;north'; echo 'have a nice day'"
    )
    assert submit_plan(submission) == "123"
    assert slurm.read_job_id(submission.run_path.folder) == "123"


# A controller that takes the job and answers too late, as sbatch reports it.
LATE = "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"


@pytest.fixture
def slow(
    submission: SlurmPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], None]]:
    """`slow(job)`: from the second question on, squeue lists this job of the run, beside others."""

    def listed(job: str) -> None:
        folder, asked = submission.run_path.folder.path, tmp_path / "asked"
        rows = "".join(
            f"{number}{slurm.SEPARATOR}{path}\\n"
            for number, path in ((5, "/"), (job, folder))
            if number
        )
        put_command(
            tmp_path, "squeue", f"if [ -e {asked} ]; then printf '{rows}'; fi; touch {asked}"
        )

    with monkeypatch.context() as patch:
        patch.setattr(sbatch, "QUERY_PAUSES", (0.0, 0.0, 0.0))
        patch.setattr(sbatch, "INTERRUPTED_PAUSES", (0.0, 0.0))
        put_command(tmp_path, "scancel", f'echo "$*" >{tmp_path}/scancelled')
        yield listed


@pytest.mark.parametrize(
    "text", [LATE, "exec sleep 60", "echo welcome"], ids=["error", "silence", "no id"]
)
def test_a_job_that_slurm_has_after_all_is_adopted(
    submission: SlurmPlan,
    tmp_path: Path,
    slow: Callable[[str], None],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow("123")
    put_command(tmp_path, "sbatch", text)
    monkeypatch.setattr(slurm, "COMMAND_TIMEOUT", 0.5)
    assert submit_plan(submission) == "123"
    assert slurm.read_job_id(submission.run_path.folder) == "123"
    assert not (submission.run_path.folder.path / SUBMITTING).exists()


def test_a_folder_whose_job_may_exist_stays(
    submission: SlurmPlan,
    tmp_path: Path,
    slow: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow("")
    put_command(tmp_path, "sbatch", LATE)

    def submit() -> RunFolder:
        run_path = replace(submission.run_path, run_id=new_run_id())
        with open_run_folder(run_path, is_new=True):
            run_path.folder.events.mkdir()
            submit_plan(replace(submission, run_path=run_path, folder=run_path.folder))
        return run_path.folder

    with pytest.raises(NoAnswer, match=r"did not confirm the job: .*Socket timed out"):
        submit()
    (kept,) = (path.parent for path in tmp_path.glob(f"scratch/*/*/*/{SUBMITTING}"))
    assert RunFolder(kept).cancelled.exists(), "a job that comes after all ends at once"
    put_command(tmp_path, "sbatch", "echo 'sbatch: error: Invalid account' >&2; exit 1")
    with pytest.raises(JobRejected, match="Invalid account"):
        submit()
    assert len(list(tmp_path.glob("scratch/*/*/2*"))) == 1, "a rejected run leaves nothing behind"


def test_an_interrupted_submission_is_withdrawn(
    submission: SlurmPlan,
    tmp_path: Path,
    slow: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow("123")
    real = slurm.call

    def interrupted(argv: Sequence[str], **options: Any) -> Any:
        if argv[0] == "sbatch":
            raise KeyboardInterrupt
        return real(argv, **options)

    monkeypatch.setattr(sbatch, "call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        submit_plan(submission)
    assert (tmp_path / "scancelled").read_text() == "123\n"
    assert submission.run_path.folder.cancelled.exists()


def test_of_several_arrays_the_new_one_is_adopted(
    submission: SlurmPlan, tmp_path: Path, slow: Callable[[str], None]
) -> None:
    slow("123")
    put_command(tmp_path, "sbatch", LATE)
    assert sbatch.submit_array(submission, array="0-1", listing="tasks-1") == "123"
    with pytest.raises(NoAnswer):
        sbatch.submit_array(submission, array="2-3", listing="tasks-2", known=["123"])
    assert sorted(path.name for path in submission.run_path.folder.path.glob("cancelled*")) == [
        "cancelled-tasks-2"
    ]


def test_a_job_that_cannot_be_recorded_is_cancelled(submission: SlurmPlan, tmp_path: Path) -> None:
    put_command(tmp_path, "sbatch", "echo 123")
    put_command(tmp_path, "scancel", f'echo "$*" >{tmp_path}/cancelled')
    submission.run_path.folder.events.rmdir()
    with pytest.raises(OSError, match=r"launch\.jsonl"):
        submit_plan(submission)
    assert (tmp_path / "cancelled").read_text() == "123\n"


def test_ps_shows_odd_names_and_finds_the_active_run(
    scratch: Path, paceline: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    for number in range(25):
        folder = RunFolder(scratch / "p" / "e" / f"20260101-0000{number:02d}-aaaa")
        folder.path.mkdir(parents=True)
        claims.claim_run(folder)
        if number:
            folder.job_start(local_job_start_name()).verdict.write_text("done\n")
        folder.run_json.write_text(
            json.dumps({"name": "a[/b]\x1b]0;owned\x07", "nodes": 1, "nproc": 2})
        )
    every = paceline("ps", COLUMNS="200")
    assert every.returncode == 0, every.stderr
    assert every.stdout.count("a[/b]") == 20
    assert "\x1b" not in every.stdout
    assert "\x07" not in every.stdout
    live = paceline("ps", "--live", COLUMNS="200")
    assert "20260101-000000-aaaa  running" in live.stdout, live.stdout + live.stderr
    assert live.stdout.count("aaaa") == 1


def test_logs_print_what_the_locale_cannot_show(
    scratch: Path, paceline: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    folder = RunFolder(scratch / "p" / "e" / "20260101-000000-aaaa")
    folder.attempt(1).path.mkdir(parents=True)
    folder.run_json.write_text("{}")
    folder.attempt(1).log(0).write_bytes("größe ██ ".encode() + b"\xff\n")
    for encoding in ("ascii", "utf-8"):
        done = paceline("logs", "last", PYTHONIOENCODING=encoding)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("gr")


def test_job_states_take_time_in_proportion_to_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(str):
        __slots__ = ()
        hashed = 0

        def __hash__(self) -> int:
            Counted.hashed += 1
            return super().__hash__()

    count = 200
    names = [Counted(number) for number in range(count)]
    monkeypatch.setattr(
        squeue_and_sacct, "queue", lambda: {name: JobState(name, "RUNNING") for name in names}
    )
    assert len(squeue_and_sacct.states(names)) == count
    assert Counted.hashed < 20 * count
