"""Jobs to plan, module files to load, and two module systems that load them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.launch.slurm_job import SlurmPlan, plan_slurm
from paceline.spec.job import Job, Program
from paceline.spec.load import load_job
from paceline.spec.option import Flag
from paceline.spec.run_path import RunPath

LMOD = Path("/usr/share/lmod/lmod")


def job_in(folder: Path, script: str = "", **keys: Any) -> Job:
    """A job for a script in this folder; keys are written `environment__modules=[...]`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(script, encoding="utf-8")
    flags = [Flag(f"--{key}", key.replace("__", "."), value) for key, value in keys.items()]
    return load_job(Program("train.py"), flags=flags, cwd=folder)


def plan_of(job: Job, environ: dict[str, str]) -> SlurmPlan:
    run_path = RunPath(job.folder / "scratch", "p", "e", "id")
    return plan_slurm(job, run_path=run_path, environ=environ, python=sys.executable)


def bare(**more: str) -> dict[str, str]:
    """Return an environment without modules."""
    return {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "USER": "ann", **more}


def write_modules(folder: Path) -> Path:
    """Module files in Tcl, which both systems read: greet/1.0, greet/2.0 (brings a Python package), other/1."""
    packages = folder / "packages"
    packages.mkdir(parents=True)
    (packages / "hello_from_a_module.py").write_text("WORD = 'hello'\n")
    texts = {
        "greet/1.0": "setenv GREETING one",
        "greet/2.0": f"setenv GREETING two\nprepend-path PYTHONPATH {packages}",
        "other/1": f"setenv OTHER here\nprepend-path PATH {folder}/other-bin",
    }
    files = folder / "modules"  # Lmod reads no Tcl from a path with a space in it
    for name, text in texts.items():
        path = files / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#%Module1.0\n{text}\n")
    return files


def lmod() -> dict[str, str]:
    if not (LMOD / "init" / "bash").exists() or shutil.which("tclsh") is None:
        pytest.skip("lmod is not installed: apt-get install lmod")
    return {}  # installed in the system's own path


def environment_modules(cache: Path) -> dict[str, str]:
    """Debian's package, unpacked into a folder: it cannot be installed beside Lmod."""
    if shutil.which("apt-get") is None or shutil.which("tclsh") is None:
        pytest.skip("environment-modules cannot be fetched: no apt-get, or no tclsh")
    done = subprocess.run(
        ["apt-get", "download", "environment-modules"], cwd=cache, capture_output=True, text=True
    )
    debs = list(cache.glob("environment-modules_*.deb"))
    if done.returncode or not debs:
        pytest.skip(f"environment-modules cannot be fetched: {done.stderr.strip()[-200:]}")
    root = cache / "root"
    subprocess.run(["dpkg", "-x", str(debs[0]), str(root)], check=True)
    (command,) = root.glob("usr/lib/*/modulecmd.tcl")
    home = root / "usr" / "share" / "modules"
    for path in (home / "init" / "bash", command):
        text = path.read_text(errors="surrogateescape")
        moved = f"/{command.relative_to(root)}"
        text = text.replace(moved, str(command)).replace("/usr/share/modules", str(home))
        path.write_text(text, errors="surrogateescape")
    return {"MODULESHOME": str(home)}


def in_login_shell(environ: dict[str, str], lines: str) -> dict[str, str]:
    """Return the environment after these lines ran in a login shell."""
    text = f'init="${{MODULESHOME:-{LMOD}}}/init/bash"; source "$init" || exit 1\n{lines}\nenv -0'
    variables = {
        **environ,
        **{name: os.environ[name] for name in os.environ if name.startswith("PACELINE_TEST")},
    }
    done = subprocess.run(
        ["bash", "-c", text], env=variables, capture_output=True, text=True, check=True
    )
    pairs = (item.partition("=") for item in done.stdout.split("\0") if item)
    return {name: value for name, _, value in pairs if not name.startswith("BASH_FUNC")}
