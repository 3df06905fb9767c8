"""One real Slurm for all tests in this folder, cleaned up after each test."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import PacelineError
from paceline.tools.sandbox import NAMESPACES, PLAIN, Sandbox, Settings, missing_packages
from tests.slurm.harness import Cluster, is_orphaned

Completed = subprocess.CompletedProcess[str]
HERE = Path(__file__).parent
NODES, GPUS = 4, 4


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slurm)


def remove_orphans() -> None:
    """Stop sandboxes left behind by a killed test run; each records the process that owns it."""
    for record in Path(tempfile.gettempdir()).glob("paceline-slurm-*/sandbox.json"):
        if os.access(record, os.W_OK) and is_orphaned(record.parent):
            with contextlib.suppress(PacelineError):  # another test run may remove the same one
                Sandbox(record.parent).down()
            shutil.rmtree(record.parent, ignore_errors=True)


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Cluster]:
    """Four nodes with four fake GPUs each, in their own namespaces if we are root."""
    network = NAMESPACES if os.geteuid() == 0 else PLAIN
    if missing := missing_packages(Settings(network=network)):
        pytest.skip(f"no Slurm to test on: install {' '.join(missing)}")
    remove_orphans()
    # A private folder that all nodes see, with a name short enough for sockets.
    with tempfile.TemporaryDirectory(
        prefix="paceline-slurm-", ignore_cleanup_errors=True
    ) as folder:
        # A terminated test run should stop its cluster, as an interrupted one does.
        before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
        try:
            made = Cluster.up(
                folder, nodes=NODES, gpus=GPUS, gpu_type="a100", network=network, owner=os.getpid()
            )
            try:
                yield made
            finally:
                made.down()
        finally:
            signal.signal(signal.SIGTERM, before)


@pytest.fixture
def cluster(sandbox: Cluster, guard: None) -> Iterator[Cluster]:
    """The cluster, repaired and idle. Jobs left by the test are gone before the guard looks for processes."""
    yield sandbox
    sandbox.clear()


@pytest.fixture
def slurm_paceline(
    cluster: Cluster, paceline: Callable[..., Completed]
) -> Callable[..., Completed]:
    """Run a `paceline` command as on a login node of the cluster."""

    def run(*args: str, **options: Any) -> Completed:
        return paceline(*args, **{**cluster.environment, **options})

    return run
