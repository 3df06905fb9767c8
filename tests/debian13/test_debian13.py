"""The tests of the real Slurm once more, with Slurm 24.11, OpenMPI 5, Python 3.13 and torch 2.6; then containers.

They run inside another root (see `root`), each file as one test here.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.debian13.root import CannotMake, Root, find_or_make

pytestmark = [pytest.mark.slow, pytest.mark.newer, pytest.mark.timeout(3600)]

ON_THE_NEWER_SLURM = {
    "submit": ["tests/slurm/test_submit.py"],
    "styles": ["tests/slurm/test_styles.py", "-k", "two_nodes"],
    "requeue": ["tests/slurm/test_requeue.py"],
    "faults": [
        "tests/slurm/test_faults.py",
        "-k",
        "test_time_limit or cancelled or array or test_preempted",
    ],
}
IN_CONTAINERS = {
    "styles": ["tests/debian13/inside/test_containers.py"],
    "stop": ["tests/debian13/inside/test_stop.py"],
    "image-build": ["tests/debian13/inside/test_image_build.py"],
}


@pytest.fixture(scope="module")
def root() -> Iterator[Root]:
    try:
        yield find_or_make()
    except CannotMake as problem:
        pytest.skip(f"no root with a newer Slurm: {problem}")


def passes_inside(root: Root, *args: str) -> None:
    """Run pytest in the root; every test that is chosen must have been run, and have passed."""
    done = subprocess.run(
        # Not below /tmp, which container engines mount by default.
        root.command(
            "python3",
            "-m",
            "pytest",
            "-q",
            "-rs",
            "-p",
            "no:cacheprovider",
            "--basetemp=/mnt/work",
            *args,
        ),
        text=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )
    output = f"{done.stdout[-20000:]}\n{done.stderr[-5000:]}"
    assert done.returncode == 0, output
    assert "skipped" not in done.stdout, output


@pytest.mark.parametrize("args", ON_THE_NEWER_SLURM.values(), ids=ON_THE_NEWER_SLURM)
def test_newer_slurm(args: list[str], root: Root) -> None:
    passes_inside(root, *args)


@pytest.mark.parametrize("args", IN_CONTAINERS.values(), ids=IN_CONTAINERS)
def test_in_containers(args: list[str], root: Root) -> None:
    passes_inside(root, *args)
