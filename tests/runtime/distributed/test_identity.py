"""Every row of the identity table, and the traps between them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.errors import UsageError
from paceline.runtime.distributed.identity import Identity, read_identity
from paceline.runtime.distributed.process_group import store_address

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
}
PMI = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


def mpi(prefix: str) -> dict[str, str]:
    numbers = {"RANK": "5", "SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}
    return {f"{prefix}_COMM_WORLD_{name}": number for name, number in numbers.items()}


ROWS = {
    "torchrun": TORCHRUN,
    "spawn": {**TORCHRUN, "PACELINE_SPAWNED": "1"},
    "slurm": SLURM,
    "openmpi": mpi("OMPI"),
    "mvapich": mpi("MV2"),
    "mpich": PMI,
    "intelmpi": {**PMI, "I_MPI_INFO_NP": "8"},
    "pmix": {"PMIX_RANK": "5", "PMIX_SIZE": "8", "PMIX_LOCAL_RANK": "1", "PMIX_LOCAL_SIZE": "4"},
}


@pytest.mark.parametrize("source", ROWS)
def test_all_variables_give_the_same_placement(source: str) -> None:
    assert read_identity(ROWS[source]) == Identity(5, 8, 1, 4, 1, 2, source)


def test_without_variables_the_world_size_is_one() -> None:
    assert read_identity({"PATH": "/bin"}) == Identity()
    assert not read_identity({}).is_distributed


@pytest.mark.parametrize("step", ["4294967291", "4294967290", "batch", "interactive", None])
def test_a_batch_script_is_not_rank_zero_of_its_job(step: str | None) -> None:
    environ = {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    del environ["SLURM_STEP_ID"]
    if step is not None:
        environ["SLURM_STEP_ID"] = step
    assert not read_identity(environ).is_distributed


def test_a_shell_in_an_allocation_is_alone() -> None:
    assert not read_identity({**SLURM, "SLURM_PTY_PORT": "4242"}).is_distributed


def test_an_older_slurm_without_the_steps_own_numbers() -> None:
    environ = {key: value for key, value in SLURM.items() if not key.startswith("SLURM_STEP_")}
    environ |= {"SLURM_STEPID": "0", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_NNODES": "2"}
    assert read_identity(environ) == Identity(5, 8, 1, 4, 1, 2, "slurm")


def test_torchrun_and_mpi_win_over_inherited_slurm_variables() -> None:
    node = {
        **SLURM,
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": "0",
    }
    assert read_identity({**node, **TORCHRUN}).source == "torchrun"
    assert read_identity({**node, **mpi("OMPI")}).rank == 5


def test_a_pmi_rank_that_slurm_gave_is_read_as_slurms() -> None:
    # `srun --mpi=pmi2` sets PMI_RANK but no local numbers.
    assert read_identity({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8"}).source == "slurm"


def test_uneven_nodes() -> None:
    last = {
        "SLURM_PROCID": "6",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "2",
        "SLURM_STEP_NUM_NODES": "3",
    }
    environ = {**SLURM, **last, "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "3(x2),1"}
    assert read_identity(environ) == Identity(6, 7, 0, 1, 2, 3, "slurm")


def test_rank_and_world_size_set_manually() -> None:
    assert read_identity({"RANK": "1", "WORLD_SIZE": "2"}) == Identity(1, 2, 1, 2, 0, 1, "torchrun")


@pytest.mark.parametrize("rank", ["two", "8", "-1"])
def test_an_invalid_rank_is_an_error_that_names_the_variable(rank: str) -> None:
    with pytest.raises(UsageError, match="RANK="):
        read_identity({**TORCHRUN, "RANK": rank})


@pytest.mark.parametrize(
    ("hostlist", "first"),
    [("node[03-07,9],login1", "node03"), ("a,b", "a"), ("gpu-1", "gpu-1"), ("n[1]-x", "n1-x")],
)
def test_the_store_is_on_the_first_host_of_the_step(
    hostlist: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            patch.delenv(name, raising=False)
        patch.setenv("SLURM_STEP_NODELIST", hostlist)
        address = store_address(read_identity(SLURM))
    assert address is not None
    assert address[0] == first


def test_identity_imports_no_torch() -> None:
    code = "import sys; from paceline import read_identity; read_identity(); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], text=True, capture_output=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"
