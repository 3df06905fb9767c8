"""Who numbers the agents, and what happens if the numbers contradict the launch spec."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.agent.launcher_placement import Placement, find_placement, node_name
from paceline.contract.launch_spec import LaunchSpec
from paceline.errors import LaunchError


def launch_spec(style: str = "fork", *, nodes: int = 1, nproc: int = 1) -> LaunchSpec:
    return LaunchSpec(
        run_id="r", program="train.py", args=[], style=style, nodes=nodes, nproc=nproc
    )


def slurm(*, procid: int, ntasks: int, localid: int, nodeid: int, **more: str) -> dict[str, str]:
    return {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(procid),
        "SLURM_NTASKS": str(ntasks),
        "SLURM_LOCALID": str(localid),
        "SLURM_NODEID": str(nodeid),
        "SLURMD_NODENAME": f"node{nodeid + 1}",
        **more,
    }


def openmpi(*, rank: int, size: int, local: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
    }


# launch spec, environment -> index, count, node, local ranks, first rank
TABLE = {
    "a job submitted from an interactive step": (
        launch_spec(nodes=2),
        slurm(procid=1, ntasks=2, localid=0, nodeid=1, SLURM_PTY_PORT="1"),
        (1, 2, 1, [0], 1),
    ),
    "a Hydra that does not number ranks on a node": (
        launch_spec("mpirun", nproc=2),
        {"PMI_RANK": "1", "PMI_SIZE": "2"},
        (1, 2, 0, [1], 1),
    ),
    "alone": (launch_spec(nproc=4), {}, (0, 1, 0, [0, 1, 2, 3], 0)),
    "several nodes here": (
        launch_spec(nodes=3, nproc=2),
        {"PACELINE_AGENT": "2/3"},
        (2, 3, 2, [0, 1], 4),
    ),
    "one agent per Slurm node": (
        launch_spec(nodes=2, nproc=4),
        slurm(procid=1, ntasks=2, localid=0, nodeid=1),
        (1, 2, 1, [0, 1, 2, 3], 4),
    ),
    "one agent per Slurm task": (
        launch_spec("srun", nodes=2, nproc=2),
        slurm(procid=3, ntasks=4, localid=1, nodeid=1),
        (3, 4, 1, [1], 3),
    ),
    "cyclic distribution of Slurm tasks": (
        launch_spec("srun", nodes=2, nproc=2),
        slurm(procid=1, ntasks=4, localid=0, nodeid=1),
        (1, 4, 1, [0], 1),
    ),
    "the job's task count is not the step's": (
        launch_spec(nodes=2),
        slurm(procid=1, ntasks=8, localid=0, nodeid=1, SLURM_STEP_NUM_TASKS="2"),
        (1, 2, 1, [0], 1),
    ),
    "a batch script is not a step": (
        launch_spec(nproc=2),
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
        (0, 1, 0, [0, 1], 0),
    ),
    "an interactive shell is not a step": (
        launch_spec(nproc=2),
        slurm(procid=0, ntasks=4, localid=0, nodeid=0) | {"SLURM_STEP_ID": "4294967290"},
        (0, 1, 0, [0, 1], 0),
    ),
    "mpirun, a rank per task, where Slurm's numbers mislead": (
        launch_spec("mpirun", nodes=2, nproc=2),
        slurm(procid=0, ntasks=1, localid=0, nodeid=1) | openmpi(rank=3, size=4, local=1),
        (3, 4, 1, [1], 3),
    ),
    "mpirun, an agent per node": (
        launch_spec("mpirun", nodes=2, nproc=2),
        openmpi(rank=1, size=2, local=0),
        (1, 2, 1, [0, 1], 2),
    ),
    "Hydra": (
        launch_spec("mpirun", nodes=1, nproc=2),
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"},
        (1, 2, 0, [1], 1),
    ),
    "MPI's variables with another style": (
        launch_spec(nproc=2),
        openmpi(rank=3, size=4, local=1),
        (0, 1, 0, [0, 1], 0),
    ),
    "Paceline's own number wins": (
        launch_spec(nodes=2),
        slurm(procid=0, ntasks=1, localid=0, nodeid=0) | {"PACELINE_AGENT": "1/2"},
        (1, 2, 1, [0], 1),
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_placement(case: str) -> None:
    spec, environ, (index, count, node, local_ranks, first_rank) = TABLE[case]
    placement = find_placement(spec, environ)
    assert (placement.index, placement.count, placement.node) == (index, count, node)
    assert (placement.local_ranks, placement.first_rank) == (local_ranks, first_rank)
    assert (placement.nodes, placement.local_world_size) == (spec.nodes, spec.nproc)
    assert placement.is_head == (index == 0)


def test_the_scheduler_names_the_node() -> None:
    assert (
        find_placement(launch_spec(nodes=2), slurm(procid=1, ntasks=2, localid=0, nodeid=1)).host
        == "node2"
    )


# a contradiction names the launch spec's number and the source of the other one
CONTRADICTIONS = {
    "too few tasks": (
        launch_spec(nodes=4),
        slurm(procid=0, ntasks=2, localid=0, nodeid=0),
        ("4 nodes", "2 according to Slurm"),
    ),
    "a task per node for a style that needs one per rank": (
        launch_spec("srun", nodes=2, nproc=4),
        slurm(procid=0, ntasks=2, localid=0, nodeid=0),
        ("2 nodes x 4", "Slurm"),
    ),
    "the other node was not started": (
        launch_spec(nodes=2),
        {},
        ("2 nodes", "1 according to the environment"),
    ),
    "uneven distribution": (
        launch_spec("srun", nodes=2, nproc=2),
        slurm(procid=2, ntasks=4, localid=2, nodeid=0),
        ("local rank 2", "Slurm"),
    ),
    "two tasks on one node for an agent per node": (
        launch_spec(nodes=2, nproc=2),
        slurm(procid=1, ntasks=2, localid=1, nodeid=0),
        ("1 agents per node", "--ntasks-per-node=1"),
    ),
    "mpirun distributes by node": (
        launch_spec("mpirun", nodes=2, nproc=2),
        openmpi(rank=1, size=4, local=0),
        ("OpenMPI", "ppr:2:node"),
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradiction(case: str) -> None:
    spec, environ, texts = CONTRADICTIONS[case]
    with pytest.raises(LaunchError) as caught:
        find_placement(spec, environ)
    for text in texts:
        assert text in str(caught.value)


def all_placements(spec: LaunchSpec, per_rank: bool) -> list[Placement]:
    if not per_rank:
        return [
            find_placement(spec, {"PACELINE_AGENT": f"{i}/{spec.nodes}"}) for i in range(spec.nodes)
        ]
    return [
        find_placement(
            spec,
            slurm(
                procid=rank,
                ntasks=spec.world_size,
                localid=rank % spec.nproc,
                nodeid=rank // spec.nproc,
            ),
        )
        for rank in range(spec.world_size)
    ]


@given(nodes=st.integers(1, 9), nproc=st.integers(1, 9), per_rank=st.booleans())
def test_every_rank_is_started_once(nodes: int, nproc: int, per_rank: bool) -> None:
    spec = launch_spec("srun" if per_rank else "fork", nodes=nodes, nproc=nproc)
    placements = all_placements(spec, per_rank)
    assert sorted(rank for placement in placements for rank in placement.ranks) == list(
        range(spec.world_size)
    )
    assert [placement.index for placement in placements if placement.is_head] == [0]
    for placement in placements:
        for rank, local in zip(placement.ranks, placement.local_ranks, strict=True):
            assert (placement.node, local) == divmod(rank, nproc)


def test_the_host_of_a_node_that_has_not_joined() -> None:
    assert node_name(1, {"SLURM_JOB_NODELIST": "node[3-4]"}) == "node4"
    assert node_name(1, {}) == ""
    assert node_name(0, {"SLURM_JOB_NODELIST": "node[3-"}) == ""
