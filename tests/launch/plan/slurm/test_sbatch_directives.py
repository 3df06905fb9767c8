"""Nodes, tasks, GPUs and cores; contradictions; what the submitter's environment can set."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.run_folder import RunFolder
from paceline.errors import PacelineError
from paceline.slurm.sbatch import submission_environment
from paceline.slurm.sbatch_directives import Directive, count_tasks, directives
from paceline.spec.job import Program
from paceline.spec.load import load_job
from tests.golden.cases import ENVIRON, plan

# style -> tasks per node, cores per task, for 2 nodes x 4 GPUs with 8 cores each
LAYOUTS = {
    "fork": (1, 32),
    "torchrun": (1, 32),
    "spawn": (1, 32),
    "lightning": (1, 32),
    "accelerate": (1, 32),
    "srun": (4, 8),
    "mpirun": (4, 8),
}


@pytest.mark.parametrize("style", LAYOUTS)
def test_tasks_and_cores_follow_the_style(style: str) -> None:
    made = plan({"launch.style": style})
    tasks, cores = LAYOUTS[style]
    assert (made.value("ntasks-per-node"), made.value("cpus-per-task")) == (str(tasks), str(cores))
    assert made.value("gres") == "gpu:4"
    assert (made.launch_spec.nproc, made.launch_spec.nodes, made.launch_spec.threads) == (4, 2, 8)
    if style != "mpirun":
        assert f"--ntasks={2 * tasks} --ntasks-per-node={tasks}" in made.script


def test_mpirun_over_torchrun_starts_one_agent_per_node() -> None:
    made = plan({"launch.style": "mpirun", "launch.mpirun_over": "torchrun"})
    assert "mpirun -np 2 --map-by ppr:1:node" in made.script


def test_memory_per_gpu_is_counted_per_node() -> None:
    assert plan({"job.mem_per_gpu": "30G"}).value("mem") == "120G"


CONTRADICTIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"job.mem_per_gpu": "1G", "job.mem_per_node": "1G"}, "both set the memory.", "only one"),
    *(
        ({"job.time": time, "resume.grace": grace}, "at least 60 s and less than half", "2m")
        for time, grace in (("2h", "10s"), ("2m", "75s"), ("3m", "55s"), ("10m", "5m"))
    ),
    (
        {"launch.nproc": 8},
        "--launch.nproc asks for 8 ranks per node, but --job.gpus_per_node is 4",
        "--gpus 8",
    ),
    ({"launch.gpu_binding": "one"}, '"one", but launch.style (default) is "fork"', "--style srun"),
    ({"job.gpus_per_node": 0, "job.gpu_type": "a100"}, "asks for a100 GPUs, but", "--gpus 4"),
    ({"job.extra": ["--ntasks=3"]}, "has --ntasks=3", "--nproc"),
    ({"job.extra": ["-N", "3"]}, "is not a long option of sbatch", "--sbatch-arg"),
    ({"job.extra": ["--gres=gpu:2"]}, "has --gres=gpu:2", "--gpus"),
    (
        {"job.extra": ["--dependency=afterok:1"]},
        "has --dependency=afterok:1",
        "Use --dependency instead.",
    ),
    ({"job.extra": ["--no-requeue"]}, "has --no-requeue", "Use --no-requeue instead."),
    ({"job.extra": ["--signal=USR1"]}, "has --signal=USR1", "Use --grace instead."),
    (
        {"job.extra": ["--expor=API_KEY=hush"]},
        "has --expor=API_KEY=***, which",
        "Use --env instead.",
    ),
    ({"job.extra": ["oops"]}, "is not a long option of sbatch", "--sbatch-arg"),
    (
        {"environment.secrets": ["NOT_THERE"]},
        "names NOT_THERE, which is not set here",
        "Export NOT_THERE",
    ),
]


@pytest.mark.parametrize(("keys", "message", "hint"), CONTRADICTIONS)
def test_contradictions_name_both_sources(keys: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(PacelineError) as caught:
        plan(keys)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_variables_of_other_jobs_are_not_submitted() -> None:
    inside = {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "4",
        "SLURMD_NODENAME": "a",
        "OMPI_COMM_WORLD_RANK": "1",
        "RANK": "3",
        "PMIX_RANK": "1",
        "MASTER_PORT": "1",
        "CUDA_VISIBLE_DEVICES": "0",
        "PACELINE_RUN": "/x",
        "WANDB_API_KEY": "hush",
    }
    remaining = {"SLURM_CONF": "/etc/slurm.conf", "SLURM_CLUSTERS": "big", "HOME": "/home/ann"}
    assert submission_environment({**inside, **remaining}, []).variables == remaining


def test_sbatch_defaults_stay_unless_overruled_and_are_named() -> None:
    made = plan(
        {"job.partition": "gpu"},
        environ={
            **ENVIRON,
            "SBATCH_PARTITION": "debug",
            "SBATCH_ACCOUNT": "physics",
            "SBATCH_REQUEUE": "1",
        },
    )
    assert "SBATCH_PARTITION" not in made.submitter
    assert "SBATCH_REQUEUE" not in made.submitter
    assert made.submitter["SBATCH_ACCOUNT"] == "physics"
    assert made.notes == ("SBATCH_ACCOUNT sets account to 'physics'",)
    assert "SBATCH_ACCOUNT sets account" in made.show()


def test_paths_that_slurm_or_python_would_split_are_rejected() -> None:
    from paceline.spec.run_path import RunPath

    for folder, name in (("a:b", "a colon"), ("a\\b", "a backslash")):
        with pytest.raises(PacelineError, match=re.escape(f"has {name} in its path")):
            plan({}, run_path=RunPath(Path("/scratch") / folder, "p", "e", "r"))


def test_a_job_is_named_in_one_line() -> None:
    job = load_job(Program("a\nb\x1b.py"), cwd=Path("/nowhere"))
    folder = RunFolder(Path("/scratch/run"))
    assert directives(job, count_tasks(job), folder)[0] == Directive("job-name", "a_b_")
