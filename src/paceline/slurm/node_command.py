"""Run a paceline command on one node of the cluster."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence

from paceline.errors import ClusterError
from paceline.slurm.submission_environment import SLURM_VARIABLES

# Not `-m`: it would put the current folder, and any module in it, ahead of the standard library.
PACELINE = (
    "import sys; sys.path[:1] = filter(None, sys.path[:1]); from paceline.cli import main; main()"
)
TIMEOUT = 300.0  # seconds for the node to be free and to answer


def run_on_node(node: str, args: Sequence[str]) -> int:
    """Run a paceline command on a node, in a small job that shares the node with others. Returns
    its exit code.
    """
    if shutil.which("srun") is None:
        raise ClusterError(
            "Cannot find srun here.", hint="Run this on a login node, or leave out --node."
        )
    command = [
        "srun",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={node}",
        "--time=10",
        "--quiet",
        "--export=ALL",
        f"--job-name=paceline-{args[0]}",
        sys.executable,
        "-c",
        PACELINE,
        *args,
    ]
    # The variables of a job around this one do not apply to the new one.
    environ = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith("SLURM_") or name in SLURM_VARIABLES
    }
    try:
        return subprocess.run(
            command, env=environ, timeout=TIMEOUT, stdin=subprocess.DEVNULL
        ).returncode
    except subprocess.TimeoutExpired:
        raise ClusterError(
            f"Node {node} did not respond within {TIMEOUT:.0f} s.",
            hint=f"Check that the node is free, or run there: {shlex.join(['paceline', *args])}",
        ) from None
