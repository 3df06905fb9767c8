"""`paceline shell`: a shell in an allocation has the environment of the ranks. Also `cancel --save`."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.contract import env
from paceline.contract.run_folder import RunFolder, read_verdict
from paceline.launch.job_steps import INTERACTIVE
from tests.slurm.harness import Cluster
from tests.slurm.runs import PLAIN, Paceline, diagnostics, project, rank_reports, run_of
from tests.until import until

WITHIN = 120.0
SMALL = ("--gpus", "1", "--cpus-per-gpu", "1", "--time", "10m")

# A fake Lmod: what it has loaded is in a variable, and in PATH.
MODULES = """\
module() {
    case $1 in
        load) export LOADED="${LOADED:+$LOADED:}$2" PATH="/opt/$2/bin:$PATH" ;;
        purge) unset LOADED ;;
    esac
}
"""
CONFIG = """\
[environment]
modules = ["tools/1.0"]
setup = ["export FROM_SETUP=yes"]
[environment.variables]
GREETING = "it's \\"me\\", $HOME"
run = "a common name"
"""

# Variables that only a rank has: its rank, its attempt, its agent's (paths of the run), and Slurm's, for
# a step and to a batch script.
OF_A_RANK = re.compile(
    r"(PACELINE|SLURM|SLURMD|SRUN|TORCH|TORCHELASTIC|ROLE|GROUP|MASTER|OMP|MKL|OPENBLAS|NCCL|GLOO)_\w+"
    r"|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|PWD|OLDPWD|SHLVL|_|PMI\w*|WANDB_(\w+_)?DIR|TORCHINDUCTOR_CACHE_DIR"
    r"|LC_CTYPE|TERM|ENVIRONMENT|HOSTNAME"
)


def shared(environ: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in environ.items() if not OF_A_RANK.fullmatch(name)}


def shell(
    cluster: Cluster, *args: str, commands: str, cwd: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `paceline shell` with commands from a pipe."""
    return subprocess.run(
        [sys.executable, "-m", "paceline", "shell", *args],
        input=commands,
        cwd=cwd,
        env={**os.environ, **cluster.environment, **variables},
        timeout=WITHIN,
        text=True,
        capture_output=True,
    )


@pytest.mark.usefixtures("without_torch")
def test_a_shell_in_a_run_has_the_environment_of_its_ranks(
    tmp_path: Path, scratch: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    (tmp_path / "modules" / "init").mkdir(parents=True)
    (tmp_path / "modules" / "init" / "bash").write_text(MODULES)
    home = project(tmp_path / "project", PLAIN + "import time\ntime.sleep(3600)\n", config=CONFIG)
    variables = {"MODULESHOME": str(tmp_path / "modules")}
    folder = run_of(slurm_paceline("submit", *SMALL, "train.py", cwd=home, check=True, **variables))
    (rank,) = until(
        lambda: rank_reports(folder).values(),
        "no rank starts",
        details=lambda: diagnostics(folder),
        within=WITHIN,
    )
    commands = """\
python -c 'import json, os; print("report " + json.dumps(dict(os.environ)))'
python -c 'import paceline, sys; print("half", paceline.__file__); print("python", sys.executable)'
echo "host $HOSTNAME, in $PWD"
exit 7
"""
    done = shell(
        cluster,
        folder.path.name,
        commands=commands,
        cwd=home,
        PACELINE_SCRATCH=str(scratch),
        ONLY_AT_LOGIN="1",
    )
    assert done.returncode == 7, done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    found = shared(json.loads(lines["report"]))
    # `python` is the job's own: its folder comes before the PATH of the ranks.
    found["PATH"] = found["PATH"].removeprefix(f"{Path(sys.executable).parent}:")
    assert found == shared(rank["environ"])
    assert lines["python"] == sys.executable
    assert (found["LOADED"], found["FROM_SETUP"]) == ("tools/1.0", "yes")
    assert found["GREETING"] == 'it\'s "me", $HOME'
    assert lines["half"].startswith(str(folder.run_half))
    assert lines["host"] == f"{rank['host']}, in {rank['cwd']}"


@pytest.mark.usefixtures("without_torch")
def test_a_shell_in_a_trial(
    tmp_path: Path, scratch: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    config = '[environment]\nsecrets = ["API_TOKEN"]\nvariables = { GREETING = "hello" }\n'
    home = project(tmp_path / "project", PLAIN + "import time\ntime.sleep(3600)\n", config=config)
    (home / "sweep.toml").write_text(
        '[sweep]\nscript = "train.py"\narguments = "none"\n[space]\nx = [1]\n'
    )
    args = ("sweep", "--gpus", "1", "--time", "10m", "sweep.toml")
    slurm_paceline(*args, cwd=home, check=True, API_TOKEN="hush")

    def trial() -> RunFolder | None:
        found = [RunFolder(path.parent) for path in scratch.glob("*/*/sweep/trials/0/run.json")]
        return found[0] if found and rank_reports(found[0]) else None

    folder = until(trial, "no trial starts", within=WITHIN)
    commands = """\
echo "$GREETING $API_TOKEN ${paceline_run-no} ${paceline_submission-no} $(declare -F)"
python -c 'import paceline; print(paceline.__file__)'
"""
    done = shell(cluster, "sweep-0", commands=commands, cwd=home, PACELINE_SCRATCH=str(scratch))
    assert done.returncode == 0, done.stderr
    shown, half = done.stdout.splitlines()
    assert shown == "hello hush no no ", "and none of the script's functions is left"
    assert half.startswith(str(folder.run_half.resolve()))


def test_a_new_allocation_has_the_run_half(tmp_path: Path, scratch: Path, cluster: Cluster) -> None:
    home = project(tmp_path / "project", config='[environment.variables]\nGREETING = "hello"\n')
    commands = """\
echo "$GREETING from $SLURM_JOB_NUM_NODES nodes"
python -c 'import paceline; print(paceline.__file__)'
"""
    done = shell(
        cluster,
        *("--nodes", "2", "--gpus", "1", "--time", "5m"),
        commands=commands,
        cwd=home,
        PACELINE_SCRATCH=str(scratch),
    )
    assert done.returncode == 0, done.stderr
    greeting, half = done.stdout.splitlines()
    assert greeting == "hello from 2 nodes"
    assert half.startswith(str(scratch))


def test_an_interactive_shell_reads_no_startup_files(tmp_path: Path) -> None:
    """On a terminal, without Slurm: startup files would undo what the job's setup lines did."""
    (tmp_path / ".bashrc").write_text("export GREETING=changed\n")
    master, slave = pty.openpty()
    setup = "export GREETING=kept; speak() { echo it is $GREETING; }"
    process = subprocess.Popen(
        ["bash", "-c", INTERACTIVE],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env={**os.environ, "HOME": str(tmp_path), env.SHELL_SETUP: setup},
    )
    os.close(slave)
    os.write(master, f"speak; echo [${env.SHELL_SETUP}]; exit 3\n".encode())
    shown = b""
    try:
        while chunk := os.read(master, 65536):
            shown += chunk
    except OSError:
        pass  # the terminal is closed with its last process
    os.close(master)
    assert process.wait(WITHIN) == 3
    assert b"\rit is kept\r\n[]\r\n" in shown, shown
    assert b"(paceline)" in shown


TRAINING = """\
import torch, paceline

with paceline.session(cpu=True) as run:
    model = run.wrap(torch.nn.Linear(2, 1))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    run.resume(model=model, opt=opt)
    for batch in run.steps(torch.ones(2, 2) for _ in range(10**9)):
        run.backward(model(batch).sum())
        run.update(opt)
    print("never")
"""


@pytest.mark.timeout(400)
def test_cancel_saves_a_checkpoint_first(
    tmp_path: Path,
    cluster: Cluster,
    slurm_paceline: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    home = project(tmp_path / "project", TRAINING)
    folder: RunFolder = run_of(
        slurm_paceline("submit", *SMALL, "--cpu", "train.py", cwd=home, check=True)
    )
    job = folder.job.read_text().strip()
    rank_events = folder.events / "rank-0.jsonl"
    until(
        lambda: rank_events.exists() and '"training"' in rank_events.read_text(),
        "it does not train",
        details=lambda: diagnostics(folder),
        within=300,
    )
    shown = slurm_paceline("cancel", "--save", folder.path.name, cwd=home, check=True).stdout
    assert "it saves first" in shown
    cluster.wait(job, timeout=WITHIN)
    assert read_verdict(folder.job_start(f"{job}-0").verdict) == "stopped", diagnostics(folder)
    assert [each.name for each in folder.checkpoints.glob("step-*/complete.json")], (
        "nothing was saved"
    )
    time.sleep(2)
    assert cluster.restarts(job) == 0
    assert cluster.queue() == []
    shown = slurm_paceline("ps", cwd=home, check=True).stdout
    assert "cancelled" in shown
    assert "not requeued" not in shown
    assert slurm_paceline("wait", folder.path.name, cwd=home).returncode == 75, "it can go on"
    assert "never" not in folder.attempt(1).log(0).read_text()
