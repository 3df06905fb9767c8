"""The batch script, run by bash with fake Slurm commands."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.run_folder import RunFolder
from paceline.errors import SpecError
from paceline.launch.secrets import SCRIPT_PREFIX, Secrets
from paceline.slurm.batch_script import shell_library
from paceline.spec.run_path import RunPath
from tests.golden.cases import HERE, plan
from tests.until import until

SRUN = 'touch "$PACELINE_RUN/begun"; while [ ! -e "$PACELINE_RUN/$END" ]; do sleep 0.05; done\n'
SRUN += 'cd "$PACELINE_RUN/job-starts/$PACELINE_JOB_START"; [ "$END" != stopped ] || : >requeue; echo "$END" >verdict'
SBATCH = 'env >"$(dirname "$0")/seen"; echo "$*" >"$(dirname "$0")/typed"; echo "78;north"'


class Bench:
    def __init__(self, folder: Path, keys: dict[str, Any]) -> None:
        run_path = RunPath(folder / "scratch", "p", "e", "id")
        made = plan(keys, run_path=run_path)
        self.run = RunFolder(run_path.folder.path)
        self.run.path.mkdir(parents=True)
        self.run.script.write_text(made.script)
        self.run.shell_library.write_text(shell_library())
        self.run.environment.write_text(made.environment_file)
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.command("srun", SRUN)
        self.command("squeue", "echo RUNNING")
        self.command("scontrol", "echo '   Requeue=0 Restarts=0 BatchFlag=1'")
        self.command("sbatch", SBATCH)

    def command(self, name: str, text: str) -> None:
        (self.bin / name).write_text(f"#!/bin/bash\n{text}\n")
        (self.bin / name).chmod(0o755)

    def start(self, job: str, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(self.run.script)],
            text=True,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                "PATH": f"{self.bin}:{os.environ['PATH']}",
                "HOME": "/",
                "SLURM_JOB_ID": job,
                "END": "done",
                **{
                    name: text
                    for name, text in os.environ.items()
                    if "PACELINE" in name or "TEST" in name
                },
                **environ,
            },
        )

    def await_start(self) -> None:
        until((self.run.path / "begun").exists, "srun was never called")


def venv(folder: Path) -> dict[str, Any]:
    (folder / "venv" / "bin").mkdir(parents=True)
    (folder / "venv" / "bin" / "activate").touch()
    return {"environment.kind": "venv", "environment.path": str(folder / "venv")}


def test_two_jobs_do_not_share_a_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path, venv(tmp_path))
    first = bench.start("1")
    bench.await_start()
    second = bench.start("2")
    errors = second.communicate(timeout=60)[1]
    assert (second.returncode, "already running as job 1" in errors) == (1, True), errors
    assert bench.run.job.read_text() == "1\n", "the one that lives is still the one to cancel"
    (bench.run.path / "done").touch()
    assert first.wait(60) == 0, first.communicate()[1]


def test_a_continuation_keeps_the_users_defaults_alone(tmp_path: Path) -> None:
    variables = {"environment.variables": {"run": "away", "LANGUAGE": "x"}}
    bench = Bench(tmp_path, venv(tmp_path) | variables)
    (bench.run.path / "stopped").touch()
    job = bench.start("1", END="stopped", SBATCH_ACCOUNT="a b", SLURM_NTASKS="9", HF_TOKEN="hush")
    assert job.wait(60) == 75, job.communicate()[1]
    seen = dict(line.partition("=")[::2] for line in (bench.bin / "seen").read_text().splitlines())
    assert seen["SBATCH_ACCOUNT"] == "a b"
    assert not {"SLURM_NTASKS", "SLURM_JOB_ID", "HF_TOKEN", "LANGUAGE"} & set(seen)
    assert "--dependency=afterany:1" in (bench.bin / "typed").read_text()
    assert bench.run.job.read_text() == "78\n"


def test_a_file_of_secrets_cannot_change_what_the_script_relies_on(tmp_path: Path) -> None:
    names = {
        "HOSTNAME": "elsewhere",
        "SLURM_JOB_ID": "99",
        "IFS": "x",
        "PACELINE_RUN": "/",
        "RANK": "3",
        "MINE": "1",
    }
    found = Secrets(names, dict.fromkeys(names, ".env"))
    run_path = RunPath(tmp_path, "p", "e", "id")
    lines = plan(
        {"job.nodes": 2}, run_path=run_path, file_secrets=found
    ).environment_file.splitlines()
    assert "export HOSTNAME=elsewhere" in lines, (
        "stop_and_requeue.sh has asked the system for its own"
    )
    assert "export MINE=1" in lines
    assert not [line for line in lines if "IFS" in line or "PACELINE_RUN" in line or "RANK" in line]
    script = "\n".join([*lines, 'echo "$SLURM_JOB_ID"'])
    for known, job in (({"SLURM_JOB_ID": "7"}, "7"), ({}, "99")):
        done = subprocess.run(
            ["/bin/bash", "-c", script], env=known, text=True, capture_output=True, check=True
        )
        assert done.stdout.strip() == job, "Slurm's own value stays"


def _locals(text: str) -> set[str]:
    lines = re.findall(r"^ +local (.*)", text, re.MULTILINE)
    return {name for line in lines for name in re.findall(r"(?:^| )([a-z_]+)", line)}


def test_variables_do_not_collide_with_the_script() -> None:
    for text in (shell_library(), *(script.read_text() for script in HERE.glob("*.sbatch"))):
        used = set(re.findall(r"^([a-z_]+)\(\)", text, re.MULTILINE))
        for line in re.findall(r"^\s*([^#\n]*)", text, re.MULTILINE):
            used |= set(re.findall(r"^(?:for )?([a-z_]+)(?==| in )", line))
        # `init` and `hook` are read only right after they are set; the rest are local to functions without user code.
        used -= {"init", "hook", *_locals(text)}
        assert [name for name in used if not name.startswith(SCRIPT_PREFIX)] == []
    variables = {"run": "5", "paceline_run": "6"}
    made = plan({"environment.variables": variables})
    assert "export run=5" in made.environment_file
    assert "export paceline_run" not in made.environment_file
    assert made.launch_spec.variables == variables
    for name, why in (("paceline_run", "use themselves"), ("A B", "not a variable name")):
        with pytest.raises(SpecError, match=why):
            plan({"environment.secrets": [name]}, environ={"PATH": "/bin", name: "x"})


def test_a_path_with_separators_cannot_be_mounted() -> None:
    keys = {
        "environment.kind": "container",
        "environment.image": "a.sif",
        "data.stage": ["/data/a,b"],
    }
    with pytest.raises(SpecError, match="a colon or a comma"):
        plan(keys)
