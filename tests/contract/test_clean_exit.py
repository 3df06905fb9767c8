"""Which processes keep torch's process groups alive until the objects that use them are gone."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
from pathlib import Path

def is_protected():
    import torch.distributed
    return [hasattr(each.__init__, "__wrapped__") for each in (torch.distributed.Reducer, torch.distributed.Logger)]

def write(rank, folder, text):
    import torch.multiprocessing as mp
    protected = [*is_protected(), hasattr(mp.start_processes, "__wrapped__")]
    Path(folder, f"{rank}.json").write_text(json.dumps([text, *protected]))
    if text == "nested":
        mp.spawn(write, (folder, "inner"), nprocs=1)

if __name__ == "__main__":
    method, folder = sys.argv[1:]
    from paceline.contract import clean_exit
    assert "torch" not in sys.modules
    clean_exit.protect_ranks()
    import torch, torch.multiprocessing as mp
    assert all(is_protected())
    assert type(torch.distributed.__loader__).__name__ == "SourceFileLoader"
    if method == "spawn":
        mp.spawn(write, (folder, "a"), nprocs=2)
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
        [sys.executable, str(script), method, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_processes_of_the_script_are_protected(tmp_path: Path, method: str) -> None:
    ended = run(tmp_path, method)
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == ["a", True, True, True]


def test_processes_of_such_processes_are_protected(tmp_path: Path) -> None:
    ended = run(tmp_path, "nested")
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "0.json").read_text()) == ["inner", True, True, True]


def test_two_threads_may_import_the_package_at_once(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text(
        # a module that nobody has imported yet
        "import time\ntime.sleep(0.6)\nimport sched, package.inner\n"
    )
    (tmp_path / "package" / "inner.py").write_text("")
    text = """
        import sys, threading, time
        from paceline.contract.clean_exit import _AfterImport
        found = []
        sys.meta_path.insert(0, _AfterImport("package.inner", found.append))
        whole = threading.Thread(target=__import__, args=("package",))
        whole.start()
        while "package" not in sys.modules:
            time.sleep(0.01)
        import package.inner
        whole.join()
        assert found == [sys.modules["package.inner"]], found
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(text))
    subprocess.run([sys.executable, str(script)], check=True, timeout=60)
