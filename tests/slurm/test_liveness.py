"""A node that dies and comes back at once: Slurm takes the dead job for a running one, and `paceline ps` says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from paceline.cli.commands.doctor import diagnose_run
from paceline.watch import run_status
from paceline.watch.records import read_record
from tests.fault_tolerance.runs import Training, assert_same
from tests.slurm.harness import Cluster
from tests.slurm.test_faults import Submitted, four_undisturbed, submitted  # noqa: F401 (fixtures)

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
Make = Callable[..., Submitted]


@pytest.fixture
def here(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ask this cluster from this process, and let ten seconds count as too long."""
    with monkeypatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        patch.setattr(run_status, "LIMIT", 10.0)
        yield


def test_a_node_that_dies_and_comes_back_at_once(
    four_undisturbed: Training,  # noqa: F811
    submitted: Make,  # noqa: F811
    cluster: Cluster,
    here: None,
) -> None:
    ours = submitted(gates="step-23")
    ours.submit("--system-metrics", "1s")
    ours.at("step-23", ranks=4)
    ours.until(lambda: len(list(ours.folder.system.glob("*.jsonl"))) == 2, "nothing is sampled")
    assert read_record(ours.folder).seconds_lifeless is None, (
        "the ranks wait at the gate, but the agents write"
    )
    head = cluster.show(ours.job)["BatchHost"]
    cluster.restart_controller(kill=True)  # it takes this for news of every job
    cluster.kill_node(head)
    cluster.start_node(head)
    ours.until(
        lambda: read_record(ours.folder).seconds_lifeless is not None, "nobody notices the silence"
    )
    assert cluster.state(ours.job) == "RUNNING", (
        "Slurm has noticed too, so there is nothing to test"
    )
    remedy = f"scontrol requeue {ours.job}"
    assert f"use `{remedy}`" in read_record(ours.folder).detail
    found = diagnose_run(ours.folder)
    assert f"`{remedy}`" in found[1].hint, found

    cluster.run(remedy.split())
    ours.restarted(1)
    ours.open("step-23")
    ours.completes()
    assert read_record(ours.folder).seconds_lifeless is None
    assert_same(ours, four_undisturbed)
