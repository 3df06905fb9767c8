"""Warm starts: `paceline run --warm`, with real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from paceline.agent.workers import warm as client
from paceline.agent.workers.warm import difference, read_conditions
from paceline.agent.workers.zygote.start import MessageSocket, ZygoteOptions
from tests.agent.conftest import is_alive, until
from tests.fake_torch import FAKE_TORCH

Paceline = Callable[..., "subprocess.CompletedProcess[str]"]
light = pytest.mark.usefixtures("without_torch")

# Each rank writes what it is into a file of its own: who forked its zygote, and what it has inherited.
SCRIPT = """
import torch
import json, os, resource, signal, subprocess, sys, threading
def parent(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])
def kind(fd):
    try:
        return os.path.basename(os.readlink(f"/proc/self/fd/{fd}")).partition(":")[0]
    except OSError:
        return ""
umask = os.umask(0)
os.umask(umask)
report = {
    "warm": parent(os.getppid()), "zygote": os.getppid(), "pid": os.getpid(),
    "environ": {name: text for name, text in os.environ.items() if not name.startswith("PACELINE_")},
    "cwd": os.getcwd(), "umask": umask, "path": sys.path, "argv": sys.argv, "flags": str(sys.flags),
    "streams": [str(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "limits": [resource.getrlimit(number) for number in range(16)],
    "ionice": subprocess.run(["ionice", "-p", str(os.getpid())], capture_output=True, text=True).stdout.strip(),
    "nice": os.nice(0), "cpus": sorted(os.sched_getaffinity(0)), "leads": os.getsid(0) == os.getpid(),
    "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
    "files": {fd: kind(fd) for fd in os.listdir("/proc/self/fd")}, "threads": len(os.listdir("/proc/self/task")),
    "input": sys.stdin.read(), "main": __name__, "random": __import__("random").random(),
}
with open(os.path.join(os.environ["PACELINE_LOGS"], f"report-{os.environ['RANK']}.json"), "w") as file:
    json.dump(report, file)
"""
OF_ONE_RUN = ("warm", "zygote", "pid", "random")  # what differs between any two runs
OF_ONE_PORT = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "WANDB_DIR")


@pytest.fixture(autouse=True)
def runtime_folder(guard: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place of the test's own for sockets. At the end of the test, its warm processes end."""
    folder = tmp_path / "sockets"
    folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        patch.setenv("PYTHONUSERBASE", str(tmp_path / "user"))
        patch.delenv("CI", raising=False)
        (tmp_path / "train.py").write_text(SCRIPT)
        yield folder
        for pid in client.find_processes():
            os.kill(pid, signal.SIGTERM)


def reports(scratch: Path) -> list[dict[str, Any]]:
    """Return what rank 0 of each run has written, the first run's first."""
    files = sorted(
        scratch.glob("*/*/*/attempt-1/report-0.json"), key=lambda path: path.stat().st_mtime_ns
    )
    return [json.loads(file.read_text()) for file in files]


def warm_process() -> int:
    (pid,) = client.find_processes()
    return pid


@light
def test_later_runs_are_served_by_one_process_and_see_edits(
    paceline: Paceline, tmp_path: Path, scratch: Path, runtime_folder: Path
) -> None:
    # editors make files in this folder all the time
    path = f"{os.environ['PYTHONPATH']}{os.pathsep}{tmp_path}"
    first = paceline(
        "run", "--cpu", "--warm", "--nproc", "1", "train.py", check=True, PYTHONPATH=path
    )
    assert "torch stays imported for your next runs, for 10m" in first.stderr
    pid = warm_process()
    for ranks in (1, 2):
        (tmp_path / "helper.py").write_text(f"number = {ranks}\n")
        (tmp_path / "train.py").write_text(
            f"{SCRIPT}\nimport helper; print('edited', helper.number)\n"
        )
        done = paceline(
            "run", "--cpu", "--warm", "--nproc", str(ranks), "train.py", check=True, PYTHONPATH=path
        )
        assert f"edited {ranks}" in done.stdout
        assert "stays imported" not in done.stderr
    assert [each["warm"] == pid for each in reports(scratch)] == [False, True, True]
    assert len({each["random"] for each in reports(scratch)}) == 3
    shown = paceline("clean", "--processes", check=True).stdout
    assert f"process {pid}  (warm process: torch stays imported" in shown
    assert warm_process() == pid
    assert "removed 1 of 1" in paceline("clean", "--processes", "--yes", check=True).stdout
    until(lambda: not is_alive(pid), "the end of the warm process")
    assert "nothing to clean up" in paceline("clean", "--processes", check=True).stdout
    assert not list(runtime_folder.rglob("warm-*"))


@light
@pytest.mark.slow  # warm and cold runs train the same weights below
def test_a_warm_rank_has_inherited_what_a_cold_one_has(tmp_path: Path, scratch: Path) -> None:
    """From its own command, and nothing of the run before."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def run(*options: str, folder: Path, **variables: str) -> None:
        script = str(tmp_path / "train.py")
        with open(script, encoding="utf-8") as text:
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "paceline",
                    "run",
                    "--cpu",
                    "--nproc",
                    "1",
                    *options,
                    script,
                    "x",
                ],
                cwd=folder,
                env={**os.environ, "PACELINE_SCRATCH": str(scratch), **variables},
                stdin=text,
                capture_output=True,
                check=True,
            )

    run("--warm", folder=tmp_path, HF_FIRST="1")
    run(folder=elsewhere, TZ="Asia/Tokyo")
    # These variables are compared, so the process of the first run would not be used again.
    run("--warm", folder=tmp_path, TZ="Asia/Tokyo", HF_FIRST="1")
    run("--warm", folder=elsewhere, TZ="Asia/Tokyo")
    _, cold, _, warm = reports(scratch)
    assert warm["warm"] == warm_process() != cold["warm"]
    assert warm["input"] == SCRIPT
    for each in (cold, warm):
        for name in OF_ONE_RUN:
            del each[name]
        each["environ"] = {
            name: text for name, text in each["environ"].items() if name not in OF_ONE_PORT
        }
    assert warm == cold


READS_EARLY = """
import torch
import os, sys, tempfile, time
print([os.environ["LR"], hash("text"), time.tzname[0], sys.path.count(os.environ["EXTRA"]), tempfile.gettempdir(),
       *(torch.environ.get(name) for name in ("TORCHINDUCTOR_X", "TORCHDYNAMO_X", "MALLOC_X", "OMP_X"))])
"""


@light
@pytest.mark.parametrize(
    "given",
    ["typed", *(pytest.param(each, marks=pytest.mark.slow) for each in ("file", "warm", "later"))],
)
def test_variables_of_the_job_act_as_in_a_new_process(
    paceline: Paceline, tmp_path: Path, given: str
) -> None:
    """Some are read by the interpreter when it starts, others when torch is imported."""
    fake = Path(os.environ["PYTHONPATH"])
    (fake / "torch" / "__init__.py").write_text(
        f"{FAKE_TORCH}\nimport os, tempfile\nenviron = dict(os.environ)\ntempfile.gettempdir()\n"
    )
    (tmp_path / "train.py").write_text(READS_EARLY)
    (tmp_path / "temporary").mkdir()
    extra = str(tmp_path / "extra")
    variables = {
        "LR": "2",
        "PYTHONHASHSEED": "7",
        "TZ": "Asia/Tokyo",
        "PYTHONPATH": f"{fake}{os.pathsep}{extra}",
        "EXTRA": extra,
        "TMPDIR": str(tmp_path / "temporary"),
        "TORCHINDUCTOR_X": "a",
        "TORCHDYNAMO_X": "b",
        "MALLOC_X": "c",
        "OMP_X": "d",
    }
    plain = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    typed = [text for name, value in variables.items() for text in ("--env", f"{name}={value}")]
    if given == "file":
        lines = [f"{name} = {value!r}" for name, value in variables.items()]
        (tmp_path / "paceline.toml").write_text("\n".join(["[environment.variables]", *lines]))
        typed = []
    warm = ["--warm"] if given in ("warm", "later") else []
    if given == "later":
        paceline(
            "run",
            "--cpu",
            "--warm",
            "--nproc",
            "1",
            "--env",
            "LR=1",
            "--env",
            f"EXTRA={extra}",
            "train.py",
        )
        paceline(
            "run", "--cpu", *warm, "--nproc", "1", *typed, "--env", "LR=1", "train.py", check=True
        )
        warmed = warm_process()
    done = paceline("run", "--cpu", *warm, "--nproc", "1", *typed, "train.py", check=True)
    assert done.stdout == plain
    if given == "later":
        assert warm_process() == warmed  # LR is read by ranks alone


@light
def test_counts_of_threads_that_a_zygote_cannot_have_start_new_processes(
    paceline: Paceline, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("import os; print(os.environ['OPENBLAS_NUM_THREADS'])")
    done = paceline(
        "run", "--cpu", "--nproc", "1", "--env", "OPENBLAS_NUM_THREADS=3", "train.py", check=True
    )
    assert done.stdout == "3\n"
    assert "instead of forking them: the zygote has OPENBLAS_NUM_THREADS=1" in done.stderr


@light
@pytest.mark.parametrize(
    "change",
    ["module", *(pytest.param(each, marks=pytest.mark.slow) for each in ("PYTHONPATH", "package"))],
)
def test_a_change_of_what_it_has_imported_replaces_it(
    paceline: Paceline, tmp_path: Path, scratch: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paceline("run", "--cpu", "--warm", "--nproc", "1", "train.py", check=True)
    before = warm_process()
    fake = Path(os.environ["PYTHONPATH"])
    if change == "PYTHONPATH":
        monkeypatch.setenv("PYTHONPATH", f"{fake}{os.pathsep}{tmp_path}")
    elif change == "module":
        text = (fake / "torch" / "__init__.py").read_text()
        (fake / "torch" / "__init__.py").write_text(f"{text}\n__version__ = 'another'\n")
    else:  # where pip installs packages for the user
        packages = (
            tmp_path / "user" / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
        )
        (packages / "site-packages" / "new").mkdir(parents=True)
    done = paceline("run", "--cpu", "--warm", "--nproc", "1", "train.py", check=True)
    assert "starting cold, because this has changed: " in done.stderr
    assert "torch stays imported for your next runs" in done.stderr
    until(lambda: not is_alive(before), "the end of the old process")
    assert warm_process() != before
    if change == "module":
        paceline("run", "--cpu", "--warm", "--nproc", "1", "train.py", check=True)
        served = [each["warm"] == warm_process() for each in reports(scratch)]
        assert served == [False, False, True]


@light
def test_it_ends_when_nobody_uses_it(
    paceline: Paceline, tmp_path: Path, runtime_folder: Path
) -> None:
    (tmp_path / "paceline.toml").write_text('[launch]\nwarm = "2s"\n')
    done = paceline("run", "--cpu", "--nproc", "1", "train.py", check=True)
    assert "stays imported for your next runs, for 2 s" in done.stderr
    until(lambda: not list(runtime_folder.rglob("warm-*")), "the end of the warm process")
    assert not client.find_processes()


@light
@pytest.mark.parametrize(
    "variables", [pytest.param({"CI": "true"}, marks=pytest.mark.slow), {"SLURM_JOB_ID": "7"}]
)
def test_jobs_and_ci_start_cold(paceline: Paceline, variables: dict[str, str]) -> None:
    done = paceline("run", "--cpu", "--warm", "--nproc", "1", "train.py", check=True, **variables)
    assert done.stderr.count("starting cold, because") == 1
    shown = paceline(
        "run",
        "--cpu",
        "--warm",
        "--style",
        "torchrun",
        "--dry-run",
        "train.py",
        check=True,
        **variables,
    )
    assert "the torchrun style does not fork ranks: --warm has no effect" in shown.stderr
    assert not client.find_processes()


@pytest.mark.slow
@light
def test_a_killed_process_costs_a_cold_start_and_nothing_else(
    paceline: Paceline, scratch: Path, runtime_folder: Path
) -> None:
    paceline("run", "--cpu", "--warm", "--nproc", "1", "train.py", check=True)
    killed = warm_process()
    os.kill(killed, signal.SIGKILL)
    assert list(runtime_folder.rglob("warm-*"))  # a socket that nobody listens to
    for _ in range(2):
        paceline("run", "--cpu", "--warm", "--nproc", "1", "train.py", check=True)
    served = [each["warm"] == warm_process() for each in reports(scratch)]
    assert served == [False, False, True]
    assert warm_process() != killed


def test_a_run_starts_even_if_no_process_can_stay(
    runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = runtime_folder / ("x" * 120)  # no socket can have such a path
    long.mkdir()
    options = ZygoteOptions("train.py", is_module=False, threads=1, preload=[], warm=1)
    left, right = socket.socketpair()
    with left, right, monkeypatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(long))
        assert client.stay_warm(MessageSocket(left), options, {}) is None
        patch.setattr(client, "make_own_folder", Mock(side_effect=PermissionError))
        assert client.stay_warm(MessageSocket(left), options, {}) is None


@light
def test_a_zygote_ends_if_its_command_is_gone_before_it_starts(
    paceline: Paceline, tmp_path: Path
) -> None:
    """It has the command's files where the warm process has its own, and must not go on in its place."""
    warmed = leave_warm_process(paceline, tmp_path)
    path = client._socket_path(sys.executable)
    connection = client._connect(path or "")
    assert connection is not None
    folder, null = os.open(".", os.O_PATH), os.open(os.devnull, os.O_RDWR)
    options = ZygoteOptions("train.py", is_module=False, threads=1, preload=[], warm=60)
    os.kill(warmed, signal.SIGSTOP)  # until the command is gone
    MessageSocket(connection).send(
        {
            "options": options.to_args(),
            "conditions": read_conditions(sys.executable, os.environ),
            "environ": dict(os.environ),
        },
        [null, null, null, folder],
    )
    connection.close()
    os.kill(warmed, signal.SIGCONT)
    paceline("run", "--cpu", "--warm", "--nproc", "1", "train.py", check=True)
    until(lambda: not psutil.Process(warmed).children(), "the end of both zygotes")
    assert warm_process() == warmed
    os.close(folder)
    os.close(null)


SLEEPS = """
import os, time
with open(f"started-{os.environ['NUMBER']}-{os.environ['RANK']}.partial", "w") as file:
    file.write(str(os.getpid()))
os.rename(file.name, file.name.removesuffix(".partial"))
while not os.path.exists("go"):
    time.sleep(0.02)
"""


class Started:
    """A run that waits for a file `go` in the folder of the test."""

    def __init__(self, folder: Path, number: int, ranks: int = 2) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "paceline",
                "run",
                "--cpu",
                "--warm",
                "--nproc",
                str(ranks),
                "--env",
                f"NUMBER={number}",
                "sleeps.py",
            ],
            cwd=folder,
            env={**os.environ, "PACELINE_SCRATCH": str(folder / "scratch")},
            stderr=subprocess.PIPE,
        )
        files = [folder / f"started-{number}-{rank}" for rank in range(ranks)]
        until(lambda: all(file.exists() for file in files), "the start of all ranks")
        self.ranks = [int(file.read_text()) for file in files]

    def wait(self) -> int:
        self.process.communicate(timeout=100)
        return self.process.returncode


def leave_warm_process(paceline: Paceline, folder: Path) -> int:
    """Return the warm process that a first run has left behind."""
    (folder / "sleeps.py").write_text(SLEEPS)
    paceline("run", "--cpu", "--warm", "--nproc", "1", "train.py", check=True)
    return warm_process()


@light
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_their_command(paceline: Paceline, tmp_path: Path, signum: int) -> None:
    warmed = leave_warm_process(paceline, tmp_path)
    started = Started(tmp_path, 1)
    started.process.send_signal(signum)
    assert started.wait() == (130 if signum == signal.SIGINT else -signal.SIGKILL)
    until(lambda: not any(map(is_alive, started.ranks)), "the end of the ranks")
    until(lambda: not psutil.Process(warmed).children(), "the end of the zygote")
    assert warm_process() == warmed


@light
def test_two_runs_at_the_same_time_outlive_the_warm_process(
    paceline: Paceline, tmp_path: Path
) -> None:
    warmed = leave_warm_process(paceline, tmp_path)
    runs = [Started(tmp_path, 1), Started(tmp_path, 2)]
    assert len(psutil.Process(warmed).children()) == 2
    os.kill(warmed, signal.SIGKILL)
    until(lambda: not is_alive(warmed), "the end of the warm process")
    assert all(is_alive(rank) for run in runs for rank in run.ranks)
    (tmp_path / "go").touch()
    assert [run.wait() for run in runs] == [0, 0]


TRAINS = """
import hashlib, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)))
torch.manual_seed(dist.get_rank())
for _ in range(10):
    loss = model(torch.randn(16, 32)).square().mean()
    loss.backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight -= 0.1 * weight.grad
            weight.grad = None
weights = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
print("threads", torch.get_num_threads(), "weights", hashlib.sha256(weights).hexdigest())
dist.destroy_process_group()
"""


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_warm_and_cold_runs_train_the_same_weights(
    paceline: Paceline, tmp_path: Path, ranks: int
) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    # The first run leaves a process that was made for another number of threads.
    other = paceline("run", "--cpu", "--warm", "--nproc", str(3 - ranks), "train.py", check=True)
    warmed = warm_process()
    cold = paceline("run", "--cpu", "--nproc", str(ranks), "train.py", check=True)
    warm = paceline("run", "--cpu", "--warm", "--nproc", str(ranks), "train.py", check=True)
    assert warm_process() == warmed
    assert "weights" in cold.stdout
    assert warm.stdout == cold.stdout != other.stdout


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("os.umask(0o77)", "Umask"),
        ("resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 << 20))", "the limits (ulimit)"),
        ("os.environ.update(SYMPY_DEBUG='1')", "SYMPY_DEBUG"),
        ("os.environ.update(LR='1', LS_COLORS='x', HF_TOKEN='y')", "LR"),
        (
            "os.environ.update(PWD='/', CUDA_VISIBLE_DEVICES='1', WANDB_MODE='offline', SSH_TTY='x')",
            None,
        ),
        ("os.environ.update(ROCR_VISIBLE_DEVICES='1', HIP_VISIBLE_DEVICES='1')", None),
    ],
)
def test_what_a_fork_cannot_change_must_be_the_same(change: str, named: str | None) -> None:
    code = (
        "import ctypes, json, os, resource, signal, sys\n"
        "from paceline.agent.workers.warm import read_conditions\n"
        f"{change}\nprint(json.dumps(read_conditions(sys.executable, os.environ)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert difference(read_conditions(sys.executable, os.environ), json.loads(done.stdout)) == named


@pytest.mark.slow
@light
def test_one_that_does_not_answer_is_replaced(paceline: Paceline) -> None:
    paceline("run", "--cpu", "--warm", "--nproc", "1", "train.py", check=True)
    stopped = warm_process()
    os.kill(stopped, signal.SIGSTOP)
    done = paceline("run", "--cpu", "--warm", "--nproc", "1", "train.py", check=True)
    assert "starting cold, because the warm process is not responding" in done.stderr
    assert "torch stays imported" in done.stderr
    assert warm_process() != stopped
    until(lambda: not is_alive(stopped), "the end of the old process")


def test_a_script_that_reads_an_open_file_of_the_shell_starts_cold(
    paceline: Paceline, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("import sys; print(open(sys.argv[1]).read())")
    command = f"{sys.executable} -m paceline run --cpu --warm --nproc 1 train.py <(echo text)"
    for _ in range(2):
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        assert "text" in done.stdout
    assert "starting cold, because an argument names an open file of your shell" in done.stderr
