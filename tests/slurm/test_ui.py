"""`paceline ui` on a real Slurm, in a real browser: the cluster, and what its buttons do to a job."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.conftest import GPUS, NODES
from tests.slurm.harness import Cluster
from tests.slurm.runs import project, run_of
from tests.slurm.test_top import SCRIPT
from tests.ui.conftest import Console, console, page
from tests.ui.web.conftest import Served, serve_here

__all__ = ["console", "page"]
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def acting(cluster: Cluster, scratch: Path) -> Iterator[Served]:
    """A dashboard that may act, as on a login node of the cluster."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**cluster.environment, "PACELINE_POLL_INTERVAL": "1"}.items():
            patch.setenv(name, value)
        patch.setattr("paceline.watch.scheduler.DEFAULT", 1.0)
        with serve_here(scratch, allow_actions=True) as served:
            yield served


def press(page: Any, button: str) -> None:
    """Press a button of a run, and agree."""
    page.get_by_role("button", name=button).click()
    page.get_by_role("dialog").get_by_role("button", name=button).click()


def test_the_cluster_and_the_buttons_of_a_job(
    cluster: Cluster,
    slurm_paceline: Callable[..., subprocess.CompletedProcess[str]],
    acting: Served,
    tmp_path: Path,
    *,
    page: Any,
    console: Console,
) -> None:
    finish = tmp_path / "finish"
    folder = project(tmp_path / "project", SCRIPT.format(finish=str(finish)))
    filler = cluster.submit("sleep 600", f"--nodes={NODES}", "--exclusive")
    cluster.wait(filler, "RUNNING")
    done = slurm_paceline(
        "submit", "--nproc", "1", "--cpu", "--name", "tiny", "train.py", cwd=folder, check=True
    )
    run = run_of(done)
    job = run.job.read_text().strip()
    page.goto(acting.link)
    page.get_by_role("link", name="Cluster").click()
    partition = page.locator("tbody tr", has_text="(default)").first
    gpus = partition.locator("td").nth(2)
    gpus.get_by_text(f"0 of {NODES * GPUS} a100", exact=True).wait_for()
    assert gpus.locator(".bar > span").count() == 0  # none is free
    partition.get_by_text(f"0 of {NODES}", exact=True).wait_for()  # the other job has all nodes
    queue = page.locator("section", has=page.get_by_role("heading", name="Your queue"))
    row = queue.locator("tbody tr", has=page.get_by_role("link", name="tiny"))
    row.get_by_text("waits for nodes to become free").wait_for()
    row.get_by_role("link", name="tiny").click()
    pill = page.locator("h1 + .pill")
    pill.get_by_text("queued").wait_for()
    page.get_by_text(re.compile("^waits for")).wait_for()
    buttons = page.locator(".head button")
    assert buttons.all_inner_texts() == ["Cancel"]  # it has nothing to save
    cluster.run(["scancel", filler])
    pill.get_by_text("running").wait_for()
    page.get_by_role("button", name="Requeue").wait_for()
    assert buttons.all_inner_texts() == ["Save and stop", "Requeue", "Cancel"]
    page.locator("[data-metric=loss]").wait_for()  # it has made steps

    press(page, "Requeue")
    page.get_by_text(f"saves and requeues itself, job {job}").wait_for()
    page.locator(".tile", has_text="Attempts").get_by_text("2", exact=True).wait_for()
    pill.get_by_text("running").wait_for()
    press(page, "Save and stop")
    page.get_by_text("saves and stops.").wait_for()
    page.get_by_role("button", name="Submit again").wait_for()
    assert run.cancelled.exists()
    press(page, "Submit again")
    page.get_by_text("submitted again, job").wait_for()
    pill.get_by_text("running").wait_for()
    again = run.job.read_text().strip()
    assert again != job
    press(page, "Cancel")
    page.get_by_text("is cancelled.").wait_for()
    pill.get_by_text("cancelled").wait_for()
    assert cluster.wait(again) == "CANCELLED"
    assert not console.problems
