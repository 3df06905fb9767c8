"""A rank behaves as `python train.py` would, however it was started. Real torch."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.launch_spec import LaunchSpec
from paceline.launch.submission import write_run_half
from tests.agent.conftest import Launch, Launched

ARGUMENTS = ["", "a b", "'\"", "$(touch x)", "line\nbreak", "é;,*", "--nproc=9", "\udcff"]

LIKE_PYTHON = """
import atexit, json, multiprocessing, os, pickle, random, sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

class Squares:
    def __len__(self): return 8
    def __getitem__(self, index): return torch.tensor(float(index * index))

def double(value):
    return 2 * value

class Thing:
    pass

if __name__ == "__main__":  # what is spawned needs no torch
    import numpy
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawning) as pool:
        spawned = pool.submit(double, 21).result()
    report = {
        "sum": total.item(), "argv": sys.argv, "path": sys.path[0], "input": sys.stdin.read(),
        "main": sys.modules["__main__"].__dict__ is globals(), "file": __file__,
        "pickled": type(pickle.loads(pickle.dumps(Thing()))).__name__, "spawned": spawned,
        "batches": [sum(batch.tolist()) for batch in DataLoader(Squares(), batch_size=4, num_workers=2)],
        "threads": torch.get_num_threads(), "omp": os.environ["OMP_NUM_THREADS"],
        "debug": dist.get_debug_level().name,
        "random": [random.random(), float(numpy.random.rand()), torch.rand(1).item()],
        "variables": {name: os.environ.get(name) for name in (
            "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID", "ASKED",
            "PACELINE_TOKEN", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        )},
    }
    name = f"report-{dist.get_rank()}"
    def write_report():
        Path(name + ".partial").write_text(json.dumps(report))
        os.rename(name + ".partial", name)
    atexit.register(write_report)
    dist.destroy_process_group()
    print("out", file=sys.stdout)
    print("err", file=sys.stderr)
    sys.exit(0)
"""


def read_report(started: Launched, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((started.run.path / f"report-{rank}").read_text())
    return found


def shadow_the_standard_library(folder: Path) -> None:
    """Write modules that hide the standard library in the current folder."""
    for name in ("json", "types", "socket", "signal", "random", "queue"):
        (folder / f"{name}.py").write_text(
            f"raise SystemExit('this is the {name} of somebody else')\n"
        )


@pytest.mark.parametrize("way", ["command", "zip"])
@pytest.mark.parametrize("safe_path", ["", "1"])
def test_modules_in_the_current_folder_do_not_hide_the_standard_library(
    launch: Launch, way: str, safe_path: str, tmp_path: Path
) -> None:
    shadow_the_standard_library(tmp_path)
    script = "import json, sys\nimport torch\nprint('torch' in sys.modules, json.dumps(1))\n"
    if way == "command":
        started = launch(script, env={"PYTHONSAFEPATH": safe_path})
    else:
        write_run_half(tmp_path / "paceline.zip", store=tmp_path / "store")
        started = launch(
            script,
            env={"PYTHONSAFEPATH": safe_path},
            argv=[str(tmp_path / "paceline.zip")],
            nproc=1,
        )
    assert started.wait() == 0, started.err()
    assert started.log(0).split() == ["True", "1"]


@pytest.mark.parametrize("style", ["fork", "torchrun"])
def test_scripts_run_as_in_plain_python(launch: Launch, style: str, tmp_path: Path) -> None:
    shadow_the_standard_library(tmp_path)
    started = launch(
        LIKE_PYTHON,
        light=False,
        style=style,
        args=ARGUMENTS,
        threads=1,
        env={"PACELINE_TOKEN": "secret"},
        runtime={"debug": True},
        variables={"ASKED": "for, 'this'", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"},
    )
    assert started.wait() == 0, started.err()
    assert started.verdicts() == ("done", "done")
    reports = [read_report(started, rank) for rank in (0, 1)]
    for rank in (0, 1):
        report = reports[rank]
        assert report["sum"] == 2.0
        assert report["argv"] == [str(started.run.path / "train.py"), *ARGUMENTS]
        assert report["path"] == str(started.run.path)
        assert report["file"] == str(started.run.path / "train.py")
        assert report["input"] == ""
        assert report["debug"] == "DETAIL"
        assert report["main"]
        assert report["pickled"] == "Thing"
        assert report["spawned"] == 42
        assert report["batches"] == [14.0, 126.0]
        assert (report["threads"], report["omp"]) == (1, "1")
        assert report["variables"] == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "TORCHELASTIC_RUN_ID": report["variables"]["TORCHELASTIC_RUN_ID"],
            "ASKED": "for, 'this'",
            "PACELINE_TOKEN": None,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        }
        assert sorted(started.log(rank).split()) == ["err", "out"]
    run_ids = {int(report["variables"]["TORCHELASTIC_RUN_ID"]) for report in reports}
    assert run_ids == {LaunchSpec.from_json(started.run.launch_spec.read_text()).run_number}
    assert max(run_ids) < 2**31, "scripts seed numpy with it"
    for first, second in zip(reports[0]["random"], reports[1]["random"], strict=True):
        assert first != second, "no seed was set: ranks must differ, as processes do"
    assert (started.out().split(), started.err().split()) == (["out"], ["err"]), (
        "rank 0 alone is shown"
    )


GLOO = """
import os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(10**9):
    dist.all_reduce(torch.ones(1))
    if step == 3 and rank == 1:
        DEED
"""


@pytest.mark.parametrize(
    ("deed", "how"),
    [
        pytest.param(
            "raise ValueError('in the loop')", "ValueError: in the loop", marks=pytest.mark.slow
        ),
        (
            "dist.destroy_process_group(); raise ValueError('after destroy')",
            "ValueError: after destroy",
        ),
        pytest.param("os._exit(3)", "exit code 3", marks=pytest.mark.slow),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
    ],
)
def test_the_first_failure_is_reported_not_its_consequences(
    launch: Launch, deed: str, how: str
) -> None:
    """The peer loses its connection and fails as well, sometimes first; it is not to blame."""
    started = launch(GLOO.replace("DEED", deed), light=False)
    assert started.wait() == 1
    assert f"rank 1 of 2 on host {started.failure()['host']} failed: {how}" in started.err()


# Ranks that wait for each other without torch: torchrun itself has imported it.
WITHOUT_TORCH = """
import os, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
Path(f"there-{rank}").touch()
while not Path(f"there-{1 - rank}").exists():
    time.sleep(0.02)
Path("there").write_text("x")
if rank == 1:
    DEED
time.sleep(3600)
"""


@pytest.mark.parametrize(
    ("script", "deed", "code"),
    [
        (WITHOUT_TORCH, "os._exit(3)", 3),
        pytest.param(GLOO, "raise ValueError('in the loop')", 1, marks=pytest.mark.slow),
        (WITHOUT_TORCH, "pass", None),
    ],
)
def test_torchrun_style_failures_and_stops(
    launch: Launch, tmp_path: Path, script: str, deed: str, code: int | None
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    env = {"TMPDIR": str(temporary)}
    started = launch(script.replace("DEED", deed), light=False, style="torchrun", env=env)
    if code is None:
        started.await_file("there")
        started.process.send_signal(signal.SIGTERM)
        assert started.wait() == 0, started.err()
        assert started.verdicts() == ("stopped", "stopped")
    else:
        assert started.wait() == 1
        assert started.failure()["rank"] == 1
        assert started.failure()["code"] == code
        assert "rank 1 of 2" in started.err()
    assert not list(temporary.glob("torchelastic_*")), "torchrun leaves its log folder behind"


def test_a_module(launch: Launch, tmp_path: Path) -> None:
    package = tmp_path / "code" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "program.py").write_text(
        "import pickle, sys\nclass Thing: pass\n"
        "print(__name__, __package__, type(pickle.loads(pickle.dumps(Thing()))).__name__, sys.argv[1:])\n"
    )
    launch_spec = {
        "is_module": True,
        "args": ["x"],
        "nproc": 1,
        "import_path": [str(package.parent)],
    }
    started = launch("", program="package.program", **launch_spec)
    assert started.wait() == 0, started.err()
    assert started.out() == "__main__ package Thing ['x']\n"
    started = launch("", program="package.other", **launch_spec)
    assert started.wait() == 1
    assert "No module named package.other" in started.err()


def test_spawn_style_gives_the_node_and_no_rank(launch: Launch) -> None:
    script = """
import os
import torch, torch.distributed as dist, torch.multiprocessing as mp
def work(local):
    nproc, node = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["GROUP_RANK"])
    dist.init_process_group("gloo", rank=node * nproc + local, world_size=nproc * int(os.environ["GROUP_WORLD_SIZE"]))
    total = torch.ones(1)
    dist.all_reduce(total)
    if local == 0:
        print("sum", total.item(), flush=True)
    dist.destroy_process_group()
if __name__ == "__main__":
    assert "RANK" not in os.environ
    mp.spawn(work, nprocs=int(os.environ["LOCAL_WORLD_SIZE"]))
"""
    started = launch(script, light=False, style="spawn")
    assert started.wait() == 0, started.err()
    assert started.out() == "sum 2.0\n"


NUMBERS = 'import os\nos.environ["OMP_NUM_THREADS"] = "1"\nimport torch\nprint(os.getppid())\n'


def test_a_script_that_sets_threads_first_is_not_forked(launch: Launch) -> None:
    started = launch(NUMBERS, nproc=1)
    assert started.wait() == 0, started.err()
    assert (
        "as new processes instead of forking them: the script sets OMP_NUM_THREADS before it imports torch"
        in started.err()
    )
    assert int(started.out()) == started.process.pid


def test_a_preload_that_starts_threads_is_named(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "fake" / "threading_thing.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(3600,), daemon=True).start()\n"
    )
    started = launch("import os; print(os.getppid())", nproc=1, preload=["threading_thing"])
    assert started.wait() == 0, started.err()
    assert "instead of forking them: importing threading_thing started 1 thread" in started.err()
    assert int(started.out()) == started.process.pid


def test_a_missing_preload_is_named(launch: Launch) -> None:
    started = launch("", preload=["no_such_thing"])
    assert started.wait() == 1
    assert "Cannot preload no_such_thing" in started.err()
    assert started.verdicts()[1] == "failed"


TOLD = "import os\nprint(os.environ['OMP_NUM_THREADS'], os.environ['MKL_NUM_THREADS'])\n"

# exported, requested by name -> a rank's thread count; its share is 2
THREADS = [
    ("3", None, "3 3"),
    ("2", None, "2 2"),
    ("5,2", None, "5,2 5"),
    ("3", "4", "4 4"),
    ("x", None, "2 2"),
]


THREAD_CASES = [
    *(("fork", case) for case in THREADS),
    ("srun", THREADS[0]),
    *(pytest.param("srun", case, marks=pytest.mark.slow) for case in THREADS[1:]),
]


@pytest.mark.parametrize(("style", "case"), THREAD_CASES)
def test_exported_thread_counts_are_used(
    launch: Launch, style: str, case: tuple[str, str | None, str]
) -> None:
    exported, requested, found = case
    variables = {"OMP_NUM_THREADS": requested} if requested else {}
    started = launch(
        TOLD,
        nproc=1,
        style=style,
        threads=2,
        env={"OMP_NUM_THREADS": exported},
        variables=variables,
    )
    assert started.wait() == 0, started.err()
    assert started.out().splitlines()[0] == found
