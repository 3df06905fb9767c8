"""Run a probe on every node of a live run: in a step of its job, next to the ranks, or on this
machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from paceline.contract import env
from paceline.contract.files.foreign_records import parse_object
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.probe_answer import MARK, STACKS, NodeAnswer
from paceline.contract.quote import command_line
from paceline.contract.run_folder import RunFolder
from paceline.launch.plan.interactive_shell import PIPED, setup_from_run
from paceline.slurm import commands as slurm
from paceline.slurm.job_states import squeue_and_sacct
from paceline.slurm.submission_environment import submission_environment

CODE = "from paceline.agent.probe.node_probe import main; main()"
TIMEOUT = 20.0  # seconds for a node to answer
MAX_NODES = 32  # asked; more would take long, and one of them is enough to find a hang
AT_ONCE = 8


def probe_here(folder: RunFolder, *, stacks: bool = False) -> list[NodeAnswer]:
    """Ask this machine about a local run; with `stacks`, for the stacks of all ranks."""
    argv = [sys.executable, "-c", CODE, str(folder.path), *([STACKS] if stacks else [])]
    return [_ask("here", argv, environ=dict(os.environ), text="")]


def probe_job(
    folder: RunFolder,
    launch_spec: LaunchSpec,
    *,
    job: str,
    nodes: Sequence[str],
    stacks: bool = False,
) -> list[NodeAnswer]:
    """Ask each node of a job by a step of its own: one that is cut off must not hold up the
    others.
    """
    environ = job_environment(folder, launch_spec)
    number = squeue_and_sacct.numeric_job_id(job)
    words = ["python", "-c", CODE, str(folder.path), *([STACKS] if stacks else [])]
    text = f"exec {command_line(words)}\n"

    def ask(node: str) -> NodeAnswer:
        argv = [
            "srun",
            f"--jobid={number}",
            "--overlap",
            "--export=ALL",
            "--nodes=1",
            "--ntasks=1",
            "--quiet",
            f"--nodelist={node}",
            "--cpus-per-task=1",
            "--mem=0",
            "--gpus-per-node=0",
            "bash",
            "-c",
            PIPED,
        ]
        return _ask(node, argv, environ=environ, text=text)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(ask, nodes[:MAX_NODES]))


def job_environment(folder: RunFolder, launch_spec: LaunchSpec) -> dict[str, str]:
    """Return the variables of a shell that enters a job and sets up its environment."""
    return {
        **submission_environment(os.environ, ()).variables,
        env.SHELL_SETUP: setup_from_run(folder, launch_spec),
    }


def _ask(host: str, argv: Sequence[str], *, environ: Mapping[str, str], text: str) -> NodeAnswer:
    try:
        done = subprocess.run(
            list(argv),
            env=dict(environ),
            input=text,
            text=True,
            capture_output=True,
            timeout=TIMEOUT,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return NodeAnswer(host, problem=f"no answer within {TIMEOUT:.0f} s")
    except OSError as error:
        return NodeAnswer(host, problem=f"{argv[0]}: {error.strerror}")
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(MARK):
            try:
                answer = parse_object(line.removeprefix(MARK))
            except ValueError:
                continue
            return NodeAnswer(str(answer.get("host", host)), answer)
    return NodeAnswer(host, problem=slurm.error_text(done))
