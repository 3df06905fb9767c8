"""Which processes keep torch's process groups alive until the objects that use them are gone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import functools, json, sys
from pathlib import Path
from paceline.contract.processes import clean_exit

def is_protected():
    import torch.distributed
    return [hasattr(each.__init__, "__wrapped__") for each in (torch.distributed.Reducer, torch.distributed.Logger)]

def write(rank, folder, text):
    import torch.multiprocessing as mp
    protected = [*is_protected(), hasattr(mp.start_processes, "__wrapped__")]
    Path(folder, f"{rank}.json").write_text(json.dumps([text, *protected]))
    if text == "nested":
        mp.spawn(write, (folder, "inner"), nprocs=1)

def fail(rank):
    raise OSError("no route to rank 1")

if __name__ == "__main__":
    method, folder = sys.argv[1:]
    assert "torch" not in sys.modules
    clean_exit.protect_ranks()
    finders = len(sys.meta_path)
    import torch, torch.multiprocessing as mp
    assert len(sys.meta_path) == finders - 2, sys.meta_path
    assert all(is_protected())
    if method == "error":
        mp.spawn(fail)
    elif method == "spawn":
        mp.spawn(write, (folder, "a"), nprocs=2)
    elif method == "partial":  # pickled with its arguments
        mp.spawn(fn=functools.partial(write, folder=folder, text="a"), nprocs=2)
    elif method == "keyword":
        context = mp.start_processes(fn=write, args=(folder, "a"), nprocs=2, join=False)
        while not context.join():
            pass
    elif method == "nested":
        mp.spawn(write, (folder, method), nprocs=1, daemon=False)
    else:
        context = mp.start_processes(write, (folder, "a"), 2, False, start_method=method)
        while not context.join():
            pass
"""


def run(folder: Path, method: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, str(script), method, str(folder)], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver", "partial", "keyword"])
def test_processes_of_the_script_are_protected(tmp_path: Path, method: str) -> None:
    ended = run(tmp_path, method)
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == ["a", True, True, True]


def test_processes_of_such_processes_are_protected(tmp_path: Path) -> None:
    ended = run(tmp_path, "nested")
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "0.json").read_text()) == ["inner", True, True, True]


def test_an_error_shows_the_frames_of_the_script_alone(tmp_path: Path) -> None:
    ended = run(tmp_path, "error")
    assert ended.returncode == 1
    trace = ended.stderr.partition("-- Process 0 terminated")[2]
    assert "OSError: no route to rank 1" in trace
    assert "clean_exit" not in trace, trace
