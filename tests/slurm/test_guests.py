"""Scripts that know nothing of Paceline on two nodes: the same results as with the program they were written for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.guests.guests import BY_NAME, ON_CLUSTERS, SCRIPTS, Guest, results, run_peer
from tests.slurm.harness import Cluster
from tests.slurm.runs import Paceline, diagnostics, run_of

# A script that starts its own ranks starts them on one node, and a job has nothing on its standard input.
GUESTS = [guest for guest in ON_CLUSTERS if guest.name not in ("mp_spawn", "reads_stdin")]
CASES = [
    (guest, style)
    for guest in GUESTS
    for style in (*guest.styles, "srun")
    if guest.peer != "mpirun"
]
CASES.append((BY_NAME["mpi4py_sum"], "mpirun"))
# the example `bare` is another: tests/slurm/test_examples.py
REPRESENTATIVE = {("mpi4py_sum", "mpirun")}


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("guest", "style"),
    [
        pytest.param(
            guest,
            style,
            id=f"{guest.name}-{style}",
            marks=() if (guest.name, style) in REPRESENTATIVE else pytest.mark.slow,
        )
        for guest, style in CASES
    ],
)
def test_same_results_on_two_nodes(
    guest: Guest, style: str, tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    done = slurm_paceline(
        "submit",
        "--style",
        style,
        "--nodes",
        "2",
        "--nproc",
        "1",
        "--cpu",
        "--time",
        "10m",
        "--wait",
        "--env",
        "GUEST_NODES=2",
        "--env",
        "GUEST_DEVICES=1",
        "--env",
        "OMP_NUM_THREADS=1",
        guest.script,
        *guest.args_for(out),
        cwd=SCRIPTS,
        timeout=400,
    )
    assert done.returncode == 0, diagnostics(run_of(done), done)
    assert results(out) == run_peer(guest, tmp_path / "peer")
