"""Who numbers the agents, and what happens when the numbers and the order disagree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.agent.placement import Place, find_place, host_of_node
from paceline.contract.launch_spec import LaunchSpec
from paceline.errors import LaunchError


def launch_spec(style: str = "fork", *, nodes: int = 1, nproc: int = 1) -> LaunchSpec:
    return LaunchSpec(run_id="r", program="train.py", args=[], style=style, nodes=nodes, nproc=nproc)


def slurm(*, procid: int, ntasks: int, localid: int, nodeid: int, **more: str) -> dict[str, str]:
    return {
        "SLURM_STEP_ID": "0", "SLURM_PROCID": str(procid), "SLURM_NTASKS": str(ntasks),
        "SLURM_LOCALID": str(localid), "SLURM_NODEID": str(nodeid), "SLURMD_NODENAME": f"node{nodeid + 1}", **more,
    }  # fmt: skip


def openmpi(*, rank: int, size: int, local: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
    }  # fmt: skip


# what the ranks are, what the environment says -> index, count, node, local ranks, first rank
TABLE = {
    "alone": (launch_spec(nproc=4), {}, (0, 1, 0, [0, 1, 2, 3], 0)),
    "several nodes here": (launch_spec(nodes=3, nproc=2), {"PACELINE_AGENT": "2/3"}, (2, 3, 2, [0, 1], 4)),
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
    "Slurm tasks dealt out cyclically": (
        launch_spec("srun", nodes=2, nproc=2),
        slurm(procid=1, ntasks=4, localid=0, nodeid=1),
        (1, 4, 1, [0], 1),
    ),
    "the job's task count is not the step's": (
        launch_spec(nodes=2),
        slurm(procid=1, ntasks=8, localid=0, nodeid=1, SLURM_STEP_NUM_TASKS="2"),
        (1, 2, 1, [0], 1),
    ),
    "a batch script is no step": (
        launch_spec(nproc=2),
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
        (0, 1, 0, [0, 1], 0),
    ),
    "an interactive shell is no step": (
        launch_spec(nproc=2),
        slurm(procid=0, ntasks=4, localid=0, nodeid=0) | {"SLURM_STEP_ID": "4294967290"},
        (0, 1, 0, [0, 1], 0),
    ),
    "mpirun, a rank per task, where Slurm's numbers mislead": (
        launch_spec("mpirun", nodes=2, nproc=2),
        slurm(procid=0, ntasks=1, localid=0, nodeid=1) | openmpi(rank=3, size=4, local=1),
        (3, 4, 1, [1], 3),
    ),
    "mpirun, a agent per node": (
        launch_spec("mpirun", nodes=2, nproc=2),
        openmpi(rank=1, size=2, local=0),
        (1, 2, 1, [0, 1], 2),
    ),
    "Hydra": (
        launch_spec("mpirun", nodes=1, nproc=2),
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"},
        (1, 2, 0, [1], 1),
    ),
    "MPI's variables around another style": (
        launch_spec(nproc=2),
        openmpi(rank=3, size=4, local=1),
        (0, 1, 0, [0, 1], 0),
    ),
    "Paceline's own number is the last word": (
        launch_spec(nodes=2),
        slurm(procid=0, ntasks=1, localid=0, nodeid=0) | {"PACELINE_AGENT": "1/2"},
        (1, 2, 1, [0], 1),
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_place(case: str) -> None:
    asked, environ, (index, count, node, local_ranks, first_rank) = TABLE[case]
    place = find_place(asked, environ)
    assert (place.index, place.count, place.node) == (index, count, node)
    assert (place.local_ranks, place.first_rank) == (local_ranks, first_rank)
    assert (place.nodes, place.local_world_size) == (asked.nodes, asked.nproc)
    assert place.is_head == (index == 0)


def test_the_scheduler_names_the_node() -> None:
    assert find_place(launch_spec(nodes=2), slurm(procid=1, ntasks=2, localid=0, nodeid=1)).host == "node2"


# a contradiction names what was ordered and who said otherwise
CONTRADICTIONS = {
    "too few tasks": (
        launch_spec(nodes=4),
        slurm(procid=0, ntasks=2, localid=0, nodeid=0),
        ("4 nodes", "Slurm started 2"),
    ),
    "a task per node for a style that needs one per rank": (
        launch_spec("srun", nodes=2, nproc=4),
        slurm(procid=0, ntasks=2, localid=0, nodeid=0),
        ("2 nodes x 4", "Slurm"),
    ),
    "nobody started the other node": (launch_spec(nodes=2), {}, ("2 nodes", "nobody")),
    "unevenly dealt": (
        launch_spec("srun", nodes=2, nproc=2),
        slurm(procid=2, ntasks=4, localid=2, nodeid=0),
        ("local rank 2", "Slurm"),
    ),
    "two tasks on one node for a agent per node": (
        launch_spec(nodes=2, nproc=2),
        slurm(procid=1, ntasks=2, localid=1, nodeid=0),
        ("one task per node",),
    ),
    "mpirun deals by node": (
        launch_spec("mpirun", nodes=2, nproc=2),
        openmpi(rank=1, size=4, local=0),
        ("OpenMPI", "ppr:2:node"),
    ),
    "not a number": (launch_spec(), {"PACELINE_AGENT": "one of two"}, ("one of two", "0/2")),
    "beyond the end": (launch_spec(nodes=2), {"PACELINE_AGENT": "2/2"}, ("PACELINE_AGENT", "2 of 2")),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradiction(case: str) -> None:
    asked, environ, words = CONTRADICTIONS[case]
    with pytest.raises(LaunchError) as caught:
        find_place(asked, environ)
    for word in words:
        assert word in str(caught.value)


def all_places(asked: LaunchSpec, per_rank: bool) -> list[Place]:
    if not per_rank:
        return [find_place(asked, {"PACELINE_AGENT": f"{i}/{asked.nodes}"}) for i in range(asked.nodes)]
    return [
        find_place(
            asked,
            slurm(
                procid=rank, ntasks=asked.world_size, localid=rank % asked.nproc, nodeid=rank // asked.nproc
            ),
        )
        for rank in range(asked.world_size)
    ]


@given(nodes=st.integers(1, 9), nproc=st.integers(1, 9), per_rank=st.booleans())
def test_every_rank_is_started_once(nodes: int, nproc: int, per_rank: bool) -> None:
    asked = launch_spec("srun" if per_rank else "fork", nodes=nodes, nproc=nproc)
    places = all_places(asked, per_rank)
    assert sorted(rank for place in places for rank in place.ranks) == list(range(asked.world_size))
    assert [place.index for place in places if place.is_head] == [0]
    for place in places:
        for rank, local in zip(place.ranks, place.local_ranks, strict=True):
            assert (place.node, local) == divmod(rank, nproc)


def test_the_host_of_a_node_that_has_not_joined() -> None:
    assert host_of_node(1, {"SLURM_JOB_NODELIST": "node[3-4]"}) == "node4"
    assert host_of_node(1, {}) == ""
    assert host_of_node(0, {"SLURM_JOB_NODELIST": "node[3-"}) == ""
