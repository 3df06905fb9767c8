"""Environments on a real Slurm: built by a job and used by the next, with modules; two builders; a build that fails."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.launch.environment.jobs import bare, lmod, write_modules
from tests.launch.environment.wheels import write_wheel
from tests.slurm.harness import Cluster
from tests.slurm.runs import Completed, Paceline, diagnostics, project, run_of

pytestmark = pytest.mark.timeout(900)
TIMEOUT = 600
SMALL = ("--style", "srun", "--gpus", "1", "--cpu", "--time", "10m", "--cpus-per-gpu", "1")

SCRIPT = """\
import os, sys
import hello_from_a_module, tiny
print("seen", tiny.VERSION, hello_from_a_module.WORD, os.environ["GREETING"], sys.prefix, flush=True)
"""


def config(modules: Path, more: str = "") -> str:
    return f"""\
[project]
name = "p"
[job]
partition = "low"
[environment]
kind = "venv"
requirements = "requirements.txt"
modules = ["greet/2.0"]
module_paths = ["{modules}"]
{more}
"""


def built(scratch: Path) -> list[Path]:
    return [path.parent for path in (scratch / "p" / ".environments").glob("*/paceline-built.json")]


def test_built_by_a_job_and_used_by_the_next(
    tmp_path: Path, scratch: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    lmod()
    modules = write_modules(tmp_path / "site")
    home = project(tmp_path / "project", SCRIPT, config=config(modules))
    wheel = write_wheel(tmp_path / "wheels", "tiny")
    (home / "requirements.txt").write_text(f"--no-index\n{wheel}\n")

    early = slurm_paceline("submit", *SMALL, "train.py", cwd=home)
    assert early.returncode == 2
    assert "is not built" in early.stderr
    assert "Build it: paceline env build" in early.stderr
    assert cluster.queue() == []

    # Two build the same at once: both commands print the path of the one that is used.
    builds: list[Completed] = []
    both = [
        threading.Thread(
            target=lambda: builds.append(slurm_paceline("env", "build", cwd=home, timeout=TIMEOUT))
        )
        for _ in range(2)
    ]
    for each in both:
        each.start()
    for each in both:
        each.join()
    for done in builds:
        assert done.returncode == 0, done.stdout + done.stderr
        assert "runs that are submitted from now on use it" in done.stdout
    (folder,) = built(scratch)
    logs = "".join(done.stdout for done in builds)
    assert "paceline: creating a venv with python3" in logs
    assert " on node" in logs, "on a node, not here"
    again = slurm_paceline("env", "build", cwd=home, check=True)
    assert again.stdout.startswith(f"up to date: {folder}")

    run = slurm_paceline(
        "submit", *SMALL, "--nodes", "2", "--wait", "train.py", cwd=home, timeout=TIMEOUT
    )
    made = run_of(run)
    assert run.returncode == 0, diagnostics(made, run)
    for rank in (0, 1):
        assert f"seen 1.0 hello two {folder}\n" in made.attempt(1).log(rank).read_text()
    left = [path.name for path in folder.parent.iterdir() if path != folder]
    assert all(name.startswith(f"{folder.name}.build-") for name in left), left


@pytest.mark.slow
def test_a_failing_build_and_a_missing_module(
    tmp_path: Path, scratch: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    lmod()
    modules = write_modules(tmp_path / "site")
    home = project(tmp_path / "project", SCRIPT, config=config(modules))
    (home / "requirements.txt").write_text("--no-index\nno-such-package-xyz\n")
    done = slurm_paceline("env", "build", cwd=home, timeout=TIMEOUT)
    assert done.returncode == 1, done.stdout
    assert "failed: nothing was built" in done.stderr
    assert "No matching distribution found for no-such-package-xyz" in done.stderr
    assert built(scratch) == []
    left = {path.name.partition(".")[2] for path in (scratch / "p" / ".environments").iterdir()}
    assert all(name.startswith("build-") for name in left), (
        "the log of what failed is all that stays"
    )

    refused = slurm_paceline("env", "build", "--partition", "nowhere", cwd=home)
    assert refused.returncode == 1
    assert "sbatch rejected the build" in refused.stderr

    (home / "paceline.toml").write_text(config(modules).replace("greet/2.0", "greet/7"))
    gone = slurm_paceline("env", "build", cwd=home)
    assert "Cannot load the module greet/7" in gone.stderr
    (home / "paceline.toml").write_text(
        config(modules).replace("greet/2.0", "greet/7").replace('kind = "venv"', 'kind = "current"')
    )
    missing = slurm_paceline("submit", *SMALL, "train.py", cwd=home)
    assert missing.returncode == 2
    assert "Cannot load the module greet/7" in missing.stderr
    assert "Available versions: greet/1.0, greet/2.0" in missing.stderr
    assert cluster.queue() == []


def test_conda_runs_activation_scripts_of_packages(
    tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    """A folder with the layout of a conda environment: an interpreter and activation scripts."""
    prefix = tmp_path / "conda env"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(prefix)], check=True, env=bare()
    )
    hooks = prefix / "etc" / "conda" / "activate.d"
    hooks.mkdir(parents=True)
    (hooks / "proj.sh").write_text('export PROJ_DATA="$CONDA_PREFIX/share"\n')
    (prefix / "conda-meta").mkdir()
    script = "import os, sys; print('seen', sys.prefix, os.environ['PROJ_DATA'], os.environ['CONDA_DEFAULT_ENV'])\n"
    text = f'[environment]\nkind = "conda"\npath = "{prefix}"\nproxies = true\n'
    home = project(tmp_path / "project", script, config=text)
    run = slurm_paceline(
        "submit",
        *SMALL,
        "--wait",
        "train.py",
        cwd=home,
        timeout=TIMEOUT,
        https_proxy="http://ann:hush@proxy:3128",
    )
    made = run_of(run)
    assert run.returncode == 0, diagnostics(made, run)
    assert f"seen {prefix} {prefix}/share {prefix}\n" in made.attempt(1).log(0).read_text()
    holding = [
        path.name
        for path in made.path.rglob("*")
        if path.is_file() and b"hush" in path.read_bytes()
    ]
    assert holding == [], "the values are gone when the run is over"

    (home / "paceline.toml").write_text(text.replace("conda env", "no env"))
    gone = slurm_paceline("submit", *SMALL, "train.py", cwd=home)
    assert gone.returncode == 2
    assert "cannot be run here: No such file or directory" in gone.stderr
    assert "conda env list" in gone.stderr
