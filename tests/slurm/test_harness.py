"""The cluster that other tests use: jobs span nodes, and cleanup removes jobs and faults."""

from __future__ import annotations

from pathlib import Path

from tests.slurm.harness import Cluster


def test_job_on_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    output = tmp_path / "out"
    job = cluster.submit("srun printenv SLURMD_NODENAME", "-N2", output=output)
    assert cluster.wait(job) == "COMPLETED"
    assert sorted(output.read_text().split()) == ["node1", "node2"]


def test_cleanup_removes_jobs_and_faults(cluster: Cluster) -> None:
    running = cluster.submit("srun sleep 600", "-N2")
    waiting = cluster.submit("sleep 600", "--hold")
    cluster.wait(running, "RUNNING")
    cluster.kill_node(2, mark_down=True)
    cluster.run(["scontrol", "update", "nodename=node4", "state=drain", "reason=test"])
    cluster.clear()
    assert not cluster.queue()
    assert {node.state for node in cluster.states().values()} == {"idle"}
    assert cluster.state(waiting) == "CANCELLED"
    assert cluster.wait(running) == "CANCELLED"
