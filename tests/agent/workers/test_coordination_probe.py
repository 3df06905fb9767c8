"""Which scripts count as aware of their ranks, and which as independent copies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.contract.heartbeat_file import (
    COORDINATED,
    COORDINATION,
    ENDED_ALONE,
    UNKNOWN,
    file_size,
)

RUN = """
import os, sys
from pathlib import Path
from paceline.agent.workers.bootstrap import make_rank_spec, run_rank
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder
os.environ.update(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2", MASTER_ADDR="here", HOME_OF="x")
spec = LaunchSpec("run", sys.argv[1], [], nproc=2)
attempt = RunFolder(Path(sys.argv[1]).parent).attempt(1)
run_rank(make_rank_spec(spec, attempt=attempt, heartbeat=sys.argv[2]), rank=1, local_rank=1)
"""

READERS = {
    "a subscript": "os.environ['RANK']",
    "a default": "os.environ.get('LOCAL_RANK', -1)",
    "getenv": "os.getenv('WORLD_SIZE')",
    "a test": "'RANK' in os.environ",
    "bytes": "os.environb[b'RANK']",
    "a copy": "dict(os.environ)",
    "items": "[value for name, value in os.environ.items()]",
    "only the address": "os.environ['MASTER_ADDR']",
    "a task of Slurm": "os.environ.get('SLURM_PROCID')",
    "a library that shards data": "import sharding_library",
    "a module named like a library": "import datasets",
    "late, after a failed try": "os.environ.get('HOME'); os.environ.get('HOME_OF'); os.environ['RANK']",
    "expanded in a path": "os.path.expandvars('${RANK}')",
    "a template": "import string; string.Template('$RANK').substitute(os.environ)",
    "after copies have trained": (
        "from paceline.agent.workers.coordination_probe import _WatchedVariables as watched\n"
        "from paceline.contract.heartbeat_file import TRAINS_ALONE\n"
        "watched.probe._report(TRAINS_ALONE); os.environ['RANK']"
    ),
    "a forked child": "pid = os.fork()\nif not pid: os.environ['RANK']; os._exit(0)\nos.waitpid(pid, 0)",
}
OTHERS = {
    "nothing": ("pass", ENDED_ALONE),
    "other variables": (
        "os.environ['HOME_OF']; os.environ['NEW'] = '1'; del os.environ['NEW']",
        ENDED_ALONE,
    ),
    "it exits": ("import sys; sys.exit()", ENDED_ALONE),
    "a progress bar copies all variables": ("import tqdm", ENDED_ALONE),
    "the standard library copies them": (
        "import platform, sysconfig; platform.uname()",
        ENDED_ALONE,
    ),
    "a part of it is pickled": (
        "import pickle; assert type(pickle.loads(pickle.dumps(os.environ._data))) is dict",
        ENDED_ALONE,
    ),
    "the standard library copies all": (
        "import configparser; configparser.RawConfigParser(os.environ)",
        ENDED_ALONE,
    ),
    "a child program may read them": (
        "import subprocess; subprocess.run(['sh', '-c', 'echo $RANK'])",
        UNKNOWN,
    ),
    "a child program that still runs": (
        "import subprocess; subprocess.Popen(['sleep', '1'])",
        UNKNOWN,
    ),
    "it fails": ("1 / 0", UNKNOWN),
    "another program takes its place": ("os.execv('/bin/true', ['true'])", UNKNOWN),
    "another program does the work": (
        f"import subprocess; subprocess.run([{sys.executable!r}, '-c', 'sum(range(10**7))'])",
        UNKNOWN,
    ),
}


def coordination_of(script: str, folder: Path) -> int:
    """Return what the probe found while a rank ran this script."""
    libraries = folder / "site-packages"
    libraries.mkdir()
    (libraries / "tqdm.py").write_text(
        "import os\ncopy = dict(os.environ)\nrank = os.environ['RANK']\n"
    )
    for path in (libraries / "sharding_library.py", folder / "datasets.py"):
        path.write_text("import os\nrank = os.environ['RANK']\n")
    program, heartbeat = folder / "train.py", folder / "heartbeat"
    program.write_text(f"import os\n{script}\n")
    heartbeat.write_bytes(bytes(file_size(2)))
    subprocess.run(
        [sys.executable, "-c", RUN, program, heartbeat],
        env={**os.environ, "PYTHONPATH": str(libraries)},
        stderr=subprocess.DEVNULL,
        check=False,
    )
    value: int = COORDINATION.unpack_from(heartbeat.read_bytes(), COORDINATION.offset(1))[0]
    return value


@pytest.mark.parametrize("case", READERS)
def test_a_script_that_reads_its_rank(case: str, tmp_path: Path) -> None:
    assert coordination_of(READERS[case], tmp_path) == COORDINATED


@pytest.mark.parametrize("case", OTHERS)
def test_a_script_that_does_not(case: str, tmp_path: Path) -> None:
    script, expected = OTHERS[case]
    assert coordination_of(script, tmp_path) == expected
