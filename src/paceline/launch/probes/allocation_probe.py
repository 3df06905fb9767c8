"""Ask and measure all nodes of an allocation, or of a live run's job, in a step of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paceline
from paceline.contract import env
from paceline.contract.files.foreign_records import make, parse_object
from paceline.contract.fitness import LINE, Measurement
from paceline.contract.gpus import visible_devices
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.probe_answer import MARK
from paceline.contract.quote import command_line
from paceline.contract.run_folder import RunFolder
from paceline.launch.plan.interactive_shell import PIPED
from paceline.launch.probes.live_probe import CODE, job_environment
from paceline.slurm import commands as slurm
from paceline.slurm.job_states import squeue_and_sacct

MEASURE = "from paceline.runtime.fitness.measure import main; main()"
TIMEOUT = 90.0  # seconds for all nodes, the import of torch included


@dataclass(frozen=True)
class Answers:
    """What the tasks of a step printed, and what went wrong."""

    lines: list[dict[str, Any]]
    problem: str = ""

    def measurements(self) -> list[Measurement]:
        found = []
        for line in self.lines:
            try:
                found.append(make(Measurement, line))
            except ValueError:
                continue
        return sorted(found, key=lambda each: each.rank)


def ask_allocation(environ: Mapping[str, str]) -> Answers:
    """Return what each node of this allocation says about itself."""
    return _run(
        _step(environ, per_node=1),
        [sys.executable, "-c", CODE],
        environ=_with_path(environ),
        mark=MARK,
    )


def measure_allocation(environ: Mapping[str, str]) -> Answers:
    """Measure the devices and links of this allocation: one task per GPU, or one per node."""
    gpus = _gpu_count(environ)
    variables = {**_with_path(environ), **({} if gpus else {env.FITNESS_CPU: "1"})}
    argv = [sys.executable, "-c", MEASURE]
    return _run(_step(environ, per_node=max(1, gpus)), argv, environ=variables, mark=LINE)


def measure_run(folder: RunFolder, launch_spec: LaunchSpec, *, job: str) -> Answers:
    """Measure the devices and links of a live run, beside its ranks."""
    environ = {
        **job_environment(folder, launch_spec),
        **({} if launch_spec.gpus else {env.FITNESS_CPU: "1"}),
    }
    per_node = launch_spec.nproc if launch_spec.gpus else 1
    step = [
        "srun",
        f"--jobid={squeue_and_sacct.numeric_job_id(job)}",
        "--overlap",
        "--export=ALL",
        "--quiet",
        "--mem=0",
        f"--nodes={launch_spec.nodes}",
        f"--ntasks-per-node={per_node}",
    ]
    text = f"exec {command_line(['python', '-c', MEASURE])}\n"
    return _run(step, ["bash", "-c", PIPED], environ=environ, mark=LINE, text=text)


def _step(environ: Mapping[str, str], *, per_node: int) -> list[str]:
    nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
    return [
        "srun",
        f"--jobid={environ['SLURM_JOB_ID']}",
        "--overlap",
        "--export=ALL",
        "--quiet",
        "--mem=0",
        f"--nodes={nodes}",
        f"--ntasks-per-node={per_node}",
    ]


def _gpu_count(environ: Mapping[str, str]) -> int:
    granted = environ.get("SLURM_GPUS_ON_NODE", "")
    return int(granted) if granted.isdigit() else len(visible_devices(environ) or [])


def _with_path(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the tasks of this one, and with the Paceline that asks."""
    kept = {
        name: text
        for name, text in environ.items()
        if not name.startswith(("SLURM_NTASKS", "SLURM_CPUS_PER_TASK"))
    }
    root = str(Path(paceline.__file__).parent.parent)
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(filter(None, [environ.get("PYTHONPATH", ""), root])),
    }


def _run(
    step: Sequence[str],
    argv: Sequence[str],
    *,
    environ: Mapping[str, str],
    mark: str,
    text: str = "",
) -> Answers:
    try:
        done = subprocess.run(
            [*step, *argv],
            env=dict(environ),
            input=text,
            text=True,
            capture_output=True,
            timeout=TIMEOUT,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return Answers([], f"no answer within {TIMEOUT:.0f} s")
    except OSError as error:
        return Answers([], f"srun: {error.strerror}")
    lines = []
    for line in done.stdout.splitlines():
        if line.startswith(mark):
            try:
                lines.append(parse_object(line.removeprefix(mark)))
            except ValueError:
                continue
    return Answers(lines, slurm.error_text(done) if done.returncode else "")
