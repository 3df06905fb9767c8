"""Fixtures for all tests, and the guard: no test may leave a process behind or change the environment."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import version
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import forked_cli as forked_commands
from tests.chromium import chromium
from tests.fake_torch import write_fake_torch
from tests.forked_ranks import Ranks

__all__ = ["chromium"]  # a fixture

ROOT = Path(__file__).parent.parent
# Every process that a test starts inherits it, however it detaches itself. Forked commands do not show it.
MARK = "PACELINE_TEST_TOKEN"

# Python starts this helper on first use and keeps it to the end: before any test, so that none is blamed for it.
resource_tracker.ensure_running()


# Rooms with long files first, so that no worker starts one of them when the others have nothing left to do.
LONGEST = (
    "slurm",
    "fault_tolerance",
    "guests",
    "docs",
    "agent",
    "remote",
    "examples",
    "runtime",
    "cli",
    "ui",
    "sweep",
)
# What each worker begins with: some wait for Slurm or for agents, while others compute.
BEGIN = ("slurm", "runtime", "agent", "slurm", "guests", "remote", "docs", "cli")


def room_of(nodeid: str) -> str:
    return nodeid.split("/")[1] if nodeid.count("/") > 1 else ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(room_of(item.nodeid), len(order)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker stays in a room, then takes one without a worker: Slurms, login nodes and servers of ranks start seldom."""
    from xdist.scheduler import LoadFileScheduling

    class StaysInARoom(LoadFileScheduling):
        def _assign_work_unit(self, node: Any) -> None:
            rooms = {
                each: room_of([*files][-1]) for each, files in self.assigned_work.items() if files
            }
            own = rooms.get(node, BEGIN[int(node.gateway.id[2:]) % len(BEGIN)])
            here = [file for file in self.workqueue if room_of(file) == own]
            unused = [file for file in self.workqueue if room_of(file) not in rooms.values()]
            for file in [*here, *unused][:1]:
                self.workqueue.move_to_end(file, last=False)
            super()._assign_work_unit(node)

    return StaysInARoom(config, log) if config.option.dist == "loadfile" else None


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # no later collection looks at all modules and tests again


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show why tests were rerun: if one passes in the end, nobody would see what went wrong before."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"rerun: {report.nodeid}", "-")
        terminalreporter.line("\n".join(report.longreprtext.splitlines()[-40:]))


# What people read and run, and how ranks end, is tested with the torch that people have; other processes start faster.
WHOLE_TORCH = {ROOT / "tests" / name for name in ("docs", "gpu", "guests/test_exit_paths.py")}
TORCH = version("torch").partition("+")[0]  # light_torch knows the one that is pinned
HAS_PINNED_TORCH = f"torch=={TORCH}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
PYTHONPATH = os.environ.get("PYTHONPATH", "")


@pytest.hookimpl(tryfirst=True)  # before the first fixture, of whatever scope
def pytest_runtest_setup(item: pytest.Item) -> None:
    # A shell that starts pytest in the background ignores SIGINT for it, and so for all that it starts; so do commands
    # that run within a test, once they are interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    is_whole = not HAS_PINNED_TORCH or WHOLE_TORCH.intersection([item.path, *item.path.parents])
    light = [] if is_whole else [forked_commands.LIGHT_TORCH]
    os.environ["PYTHONPATH"] = os.pathsep.join([*light, *filter(None, [PYTHONPATH])])


def marked(token: str, older: frozenset[str] = frozenset()) -> list[psutil.Process]:
    """Return all live processes with a test's token in their environment, and all forked commands.

    `older` has the process IDs of those that were there before: to look at them all takes longer than most tests.
    """
    wanted, found = f"{MARK}={token}".encode(), []
    forks = [address.encode() for address in forked_commands.servers]
    ours = {os.getpid(), *forked_commands.servers.values()}
    # psutil would take four times as long
    for name in filter(str.isdigit, frozenset(os.listdir("/proc")) - older):
        with suppress(OSError, psutil.Error):
            is_marked = wanted in Path("/proc", name, "environ").read_bytes()
            if not is_marked and forks:
                command = Path("/proc", name, "cmdline").read_bytes()
                is_marked = any(address in command for address in forks)
            if is_marked and int(name) not in ours:
                process = psutil.Process(int(name))
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
    return found


@pytest.fixture(autouse=True)
def guard(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail the test that leaves a process running, or the environment changed."""
    for name in [
        name for name in os.environ if name.startswith(("PACELINE_", "SLURM_", "OMPI_", "SBATCH_"))
    ]:
        monkeypatch.delenv(name)
    token = uuid.uuid4().hex
    monkeypatch.setenv(MARK, token)
    before, older = dict(os.environ), frozenset(os.listdir("/proc"))
    yield
    changed = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
    # torch sets its own with the first optimizer
    changed -= {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}
    changed -= {"TRITON_CACHE_DIR", "TRITON_PTXAS_PATH"}  # and these when it compiles for a GPU
    deadline = time.monotonic() + 10
    while (left := marked(token, older)) and time.monotonic() < deadline:
        time.sleep(0.05)
    leftovers = [f"{process.pid} {' '.join(process.cmdline())[:200]}" for process in left]
    for process in left:
        process.kill()
    assert not leftovers, "left running: " + "; ".join(leftovers)
    assert not changed, f"the environment was changed: {sorted(changed)}"


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """`ranks(function, 2, *args)`: run a module-level function on real ranks and return their results."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHONPATH)  # the whole torch, once for all
        harness = Ranks()
    yield harness
    harness.close()


Completed = subprocess.CompletedProcess[str]


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """The scratch folder of a test's runs."""
    return tmp_path / "scratch"


@pytest.fixture
def without_torch(guard: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An empty torch for all processes that the test starts: their scripts do not use it."""
    with pytest.MonkeyPatch.context() as patch:
        fake = str(write_fake_torch(tmp_path_factory.mktemp("light")))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [fake, PYTHONPATH])))
        yield


@pytest.fixture(scope="session")
def forked_cli() -> Iterator[forked_commands.Commands]:
    """Run `paceline` commands without the time that their imports take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(MARK, raising=False)
        server = forked_commands.Commands()
    yield server
    server.close()


@pytest.fixture
def paceline(
    tmp_path: Path, scratch: Path, forked_cli: forked_commands.Commands
) -> Callable[..., Completed]:
    """Run a `paceline` command without a terminal: `paceline("run", "train.py", cwd=...)`."""

    def run_paceline(
        *args: str,
        cwd: Path = tmp_path,
        timeout: float = 120,
        check: bool = False,
        **variables: str,
    ) -> Completed:
        environment = {
            **os.environ,
            "PACELINE_SCRATCH": str(scratch),
            "COLUMNS": "120",
            **variables,
        }
        done = forked_cli([*args], cwd=cwd, env=environment, timeout=timeout)
        assert not check or done.returncode == 0, (
            f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done

    return run_paceline
