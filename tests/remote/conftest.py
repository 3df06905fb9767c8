"""A login node for all tests in this folder, and a project on the laptop."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.spec.clusters import Cluster as RemoteCluster
from paceline.ssh.connection import Connection, close_all
from paceline.tools.sandbox import NAMESPACES, Settings, missing_packages
from tests.forked_cli import Commands
from tests.remote import lab as labs
from tests.remote.lab import Lab
from tests.remote.relay import Relay
from tests.slurm.harness import Cluster

Completed = subprocess.CompletedProcess[str]
PROFILES = """
[profiles.lab]
host = "lab"
[profiles.plain]
host = "plain"
[profiles.inner]
host = "inner"
[profiles.agent]
host = "agent"
[profiles.shared]
host = "shared"
[profiles.strange]
host = "strange"
[profiles.closed]
host = "closed"
[profiles.slurm]
host = "slurm"
[profiles.link]
host = "link"
"""


@pytest.fixture(scope="session")
def lab_here() -> Iterator[Lab]:
    if reason := labs.missing():
        pytest.skip(f"no login node to test on: {reason}")
    with tempfile.TemporaryDirectory(prefix="pl-ssh-", ignore_cleanup_errors=True) as folder:
        made = Lab(Path(folder))
        try:
            made.up()
            yield made
        finally:
            made.down()


@pytest.fixture(scope="session")
def slurm_node(lab_here: Lab) -> Iterator[Cluster]:
    """A Slurm of two nodes behind the login node `slurm`."""
    network = NAMESPACES
    if missing := missing_packages(Settings(network=network)):
        pytest.skip(f"no Slurm to test on: install {' '.join(missing)}")
    with tempfile.TemporaryDirectory(
        prefix="paceline-slurm-", ignore_cleanup_errors=True
    ) as folder:
        made = Cluster.up(folder, nodes=2, gpus=1, network=network, owner=os.getpid())
        # it is private otherwise
        for path in (made.folder, *made.folder.glob("*/"), *made.folder.glob("tmp/*/")):
            path.chmod(0o1777 if path.parent.name == "tmp" else 0o755)
        try:
            lab_here.add("slurm", {"SLURM_CONF": made.environment["SLURM_CONF"]})
            yield made
        finally:
            made.down()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "paceline.toml").write_text(PROFILES)
    return folder


@pytest.fixture
def lab(lab_here: Lab, guard: None, project: Path) -> Iterator[Lab]:
    """The login node, with nobody logged in before and after, and without runs of other tests there or in a copy."""
    shutil.rmtree(lab_here.home / "paceline", ignore_errors=True)
    shutil.rmtree(lab_here.folder / "laptop" / ".cache" / "paceline" / "views", ignore_errors=True)
    yield lab_here
    with pytest.MonkeyPatch.context() as patch:
        for name, value in lab_here.variables.items():
            patch.setenv(name, value)
        close_all()
        Connection(RemoteCluster("shared", "shared")).close()
    lab_here.wait_until_empty()


@pytest.fixture
def link(lab: Lab) -> Iterator[Relay]:
    """A relay in front of `plain`, as the cluster `link`."""
    with lab.link(lab.plain) as relay:
        yield relay


@pytest.fixture
def slurm_link(slurm_node: Cluster, lab: Lab) -> Iterator[Relay]:
    """A relay in front of `slurm`, as the cluster `link`."""
    with lab.link(next(node for node in lab.more if node.name == "slurm")) as relay:
        yield relay
    slurm_node.clear()


@pytest.fixture
def laptop(lab: Lab, project: Path, forked_cli: Commands) -> Callable[..., Completed]:
    """Run a `paceline` command on the laptop, without a terminal: `laptop("login", "lab")`."""

    def run(
        *args: str,
        check: bool = False,
        cwd: Path = project,
        timeout: float = 120,
        input: str = "",
        **variables: str,
    ) -> Completed:
        environment = {**os.environ, **lab.variables, **variables}
        done = forked_cli([*args], cwd=cwd, env=environment, timeout=timeout, input=input)
        assert not check or done.returncode == 0, (
            f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done

    return run
