"""What pages are told about a cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.ui.web.app import read_cluster
from tests.slurm.conftest import GPUS, NODES
from tests.slurm.harness import Cluster


@pytest.fixture
def here(cluster: Cluster) -> Iterator[None]:
    """This process as on a login node of the cluster, which it asks every time."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**cluster.environment, "PACELINE_POLL_INTERVAL": "0"}.items():
            patch.setenv(name, value)
        patch.setattr("paceline.watch.scheduler.DEFAULT", 0.0)
        yield


@pytest.mark.usefixtures("here")
def test_free_gpus_and_the_queue(cluster: Cluster) -> None:
    answer = read_cluster({})
    assert answer["problem"] == ""
    total = NODES * GPUS
    assert all(
        each["gpus"] == [{"kind": "a100", "count": total, "free": total}]
        for each in answer["partitions"]
    )
    assert answer["queue"] == []
    job = cluster.submit("sleep 600", "--nodes=1", "--gpus-per-node=a100:3")
    cluster.wait(job, "RUNNING")
    answer = read_cluster({})
    assert [(each["job"], each["state"]) for each in answer["queue"]] == [(job, "running")]
    assert all(
        each["gpus"] == [{"kind": "a100", "count": total, "free": total - 3}]
        for each in answer["partitions"]
    )
    waiting = cluster.submit("sleep 600", "--hold")
    cluster.wait(waiting, "PENDING")
    (row,) = (each for each in read_cluster({})["queue"] if each["job"] == waiting)
    assert (row["state"], row["start"], row["elapsed"], row["run"]) == ("queued", "", "", None)
    assert row["reason"] == "held by you"
