"""A failed rank is named, the others end, and no process is left behind."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.agent import rank_failures, retry_policy
from paceline.agent.rank_failures import Failure, RankExit, decide_verdict, first_failure
from paceline.contract.heartbeat_file import READY
from paceline.contract.run_folder import read_verdict
from paceline.watch.failure import describe_failure
from tests.agent.conftest import Launch, is_alive, until
from tests.small_disk import mount_small_disk

# Rank 1 fails; rank 0 would run forever.
FAILING = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    {deed}
time.sleep(3600)
"""


OPENS_SESSION = (
    "import paceline.runtime.step_boundary.heartbeat as it; "
    "it.Heartbeat(os.environ['PACELINE_HEARTBEAT'], 1).mark_session()"
)


@pytest.mark.parametrize(
    ("deed", "how", "seen"),
    [
        (
            "import no_such_module",
            "ModuleNotFoundError: No mod",
            "ModuleNotFoundError: No module named 'no_such_module'",
        ),
        (
            "raise ValueError('ünïcode\\nsecond line')",
            "ValueError: ünïcode\n  at train.py:4 in <module>: ",
            "ünïcode",
        ),
        (
            "import argparse; argparse.ArgumentParser().error('no x')",
            "exit code 2: train.py: error: no x",
            "no x",
        ),
        (
            "import json; json.loads('{')",
            "JSONDecodeError: Expecting property name",
            "at train.py:4 in <module>: ",
        ),
        ("sys.exit(5)", "exit code 5", ""),
        ("sys.exit('too bad')", "exit code 1: too bad", "too bad"),
        ("os._exit(3)", "exit code 3", ""),
        ("sys.exit(256)", "exit code 1", ""),
        (f"{OPENS_SESSION}; os._exit(0)", "exit code 0: it left its open session", ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL", ""),
        (
            "os.kill(os.getpid(), signal.SIGSEGV)",
            "killed by SIGSEGV",
            "Fatal Python error: Segmentation fault",
        ),
        ("os.kill(os.getpid(), signal.SIGTERM)", "killed by SIGTERM", ""),
        ("1 +", "exit code 1", "SyntaxError"),
        (
            "import threading; threading.excepthook = None; raise BaseException('bare')",
            "BaseException: bare",
            "bare",
        ),
    ],
)
def test_the_failing_rank_is_named(launch: Launch, deed: str, how: str, seen: str) -> None:
    started = launch(FAILING.format(deed=deed))
    assert started.wait() == 1
    assert started.verdicts() == ("failed", "failed")
    failure = started.failure()
    if seen != "SyntaxError":  # which every rank meets
        assert failure["rank"] == 1
        assert f"rank 1 of 2 on host {failure['host']} failed: {how}" in started.err()
    assert seen in started.err() + started.out()
    assert seen in failure["traceback"] or seen.startswith("at ")
    assert failure["log"] == str(started.attempt().log(failure["rank"]))
    # As Python prints it, without our own frames.
    assert "paceline/agent" not in failure["traceback"] or "Fatal" in seen
    assert started.events() == ["node", "started", "launch", "ranks", "failed"]


def test_the_error_of_a_data_worker_is_the_original_one() -> None:
    trace = """Caught KeyError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 349, in _worker_loop
    data = fetcher.fetch(index)
           ^^^^^^^^^^^^^^^^^^^^
  File "/project/data.py", line 7, in __getitem__
    raise KeyError("item 0 is broken")
KeyError: 'item 0 is broken'
see the manual
"""
    assert (
        rank_failures.unwrap(trace)
        == "'item 0 is broken' (in DataLoader worker process 0)\nsee the manual"
    )
    assert rank_failures.find_user_frame(trace).startswith("data.py:7 in __getitem__")
    assert rank_failures.unwrap("Caught it.\nOriginal") == "Caught it.\nOriginal"
    assert rank_failures.shorten(f"one\n{'x' * 1000}") == f"one\n{'x' * 300}…"


def test_a_script_that_clashes_with_its_launch_style_gets_a_hint() -> None:
    taken = "RuntimeError: The server socket has failed to listen on any local network address. code: -98 EADDRINUSE"
    failure = Failure(retry_policy.ERROR, "here", 0, 1, message=taken)
    assert "MASTER_PORT" in failure.hint("fork")
    assert "--style spawn" in failure.hint("fork")
    spawned = replace(
        failure, traceback='File ".../torch/multiprocessing/spawn.py", line 1, in start_processes'
    )
    assert spawned.hint("torchrun").startswith("each rank calls mp.spawn: use --style spawn")
    assert spawned.hint("spawn") == ""
    assert replace(failure, message="ValueError: 98").hint("fork") == ""


@pytest.mark.parametrize(
    ("ending", "said"),
    [("sys.exit(process.exitcode)", "exit code 1"), ("raise OSError(process.exitcode)", "OSError")],
)
def test_a_script_that_starts_processes_without_a_guard_gets_a_hint(
    launch: Launch, ending: str, said: str
) -> None:
    script = f"""
import multiprocessing, sys
process = multiprocessing.get_context("spawn").Process(target=print)
process.start()
process.join()
{ending}
"""
    started = launch(script, style="spawn")
    assert started.wait() == 1
    assert f"{said}: {rank_failures.UNGUARDED}\n  at " in started.err()
    assert 'under `if __name__ == "__main__":`' in "\n".join(describe_failure(started.run))


def test_the_first_of_several_failures_is_named(launch: Launch) -> None:
    """Rank 2 fails, and the others because of it, though rank 0 is the first to be gone."""
    script = """
import os, sys, time
from pathlib import Path
mark = Path("failed")
if os.environ["RANK"] == "2":
    import atexit
    atexit.register(lambda: [time.sleep(0.02) for _ in range(1500) if not Path("follower").exists()])
    mark.touch()
    raise RuntimeError("the cause")
while not mark.exists():
    time.sleep(0.01)
if os.environ["RANK"] == "0":
    import atexit
    atexit.register(Path("follower").touch)
raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")
"""
    started = launch(script, nproc=3, kill_after=60)
    assert started.wait() == 1
    assert started.failure()["rank"] == 2
    assert started.failure()["message"] == "the cause"


def test_the_report_tells_the_first_error_from_its_consequences() -> None:
    failure = Failure(
        retry_policy.ERROR, "here", 1, 1, type="ValueError", message="bad", log="/runs/rank-1.log"
    )
    head, log = "rank 1 of 4 on host here failed: ValueError: bad", "  log: /runs/rank-1.log"
    assert failure.format(4, with_traceback=False) == f"{head}\n{log}"
    one = "  this failed first; the error of rank 0 is a consequence: the connection was lost"
    assert failure.format(4, with_traceback=False, consequences=[0]).splitlines() == [
        head,
        one,
        log,
    ]
    assert "of 3 other ranks is" in failure.format(4, with_traceback=False, consequences=[0, 2, 3])


def test_a_lost_connection_is_never_the_cause() -> None:
    early = Failure(
        retry_policy.ERROR,
        "a",
        0,
        1,
        type="RuntimeError",
        message="Connection reset by peer",
        time=1.0,
    )
    late = Failure(retry_policy.KILLED, "b", 1, -9, time=2.0)
    assert first_failure([early, late]) is late
    assert first_failure([early]) is early


def test_a_rank_that_ended_normally_explains_a_lost_connection() -> None:
    lost = Failure(
        retry_policy.ERROR,
        "a",
        0,
        1,
        type="RuntimeError",
        message="Connection closed by peer",
        time=2.0,
    )
    crash = Failure(retry_policy.KILLED, "b", 1, -9, time=3.0)
    waited = RankExit(0, 1, 2.0, READY, 0, lost)
    _, failure = decide_verdict(
        [lost], [waited, RankExit(1, 0, 1.0, READY, 0)], stop_requested=False
    )
    assert failure is not None
    assert failure.error.startswith(
        "RuntimeError: Rank 1 has exited normally without joining the collective"
    )
    assert failure.ended_ranks == (1,)
    assert failure.is_consequence
    _, failure = decide_verdict(
        [lost, crash], [waited, RankExit(1, -9, 3.0, READY, 0, crash)], stop_requested=False
    )
    assert failure == crash
    _, failure = decide_verdict(
        [lost], [waited, RankExit(1, -15, 3.0, READY, 0)], stop_requested=False
    )
    assert failure == lost


def test_a_rank_that_ignores_sigterm_is_killed(launch: Launch) -> None:
    script = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["RANK"] == "0":
    Path("deaf").write_text(str(os.getpid()))
while not Path("deaf").exists():
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    sys.exit(7)
while True:
    time.sleep(1)
"""
    started = launch(script, kill_after=0.5)
    assert started.wait() == 1
    assert started.failure()["rank"] == 1
    assert not is_alive(int((started.run.path / "deaf").read_text()))


CHILDREN = """
import os, subprocess, sys, time
from pathlib import Path
if os.environ["RANK"] == "0":
    # One in the rank's own group, one that has left it, one whose parent is gone.
    plain = subprocess.Popen(["sleep", "3600"])
    apart = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    shell = subprocess.run(
        ["sh", "-c", "setsid sleep 3600 >/dev/null 2>&1 & echo $!"], stdout=subprocess.PIPE, text=True
    )
    Path("partial").write_text(f"{plain.pid} {apart.pid} {shell.stdout}")
    os.rename("partial", "children")
    DEED
"""


@pytest.mark.parametrize(
    ("deed", "code"), [("sys.exit(0)", 0), ("os.kill(os.getpid(), 9)", 1), ("raise ValueError", 1)]
)
@pytest.mark.parametrize("style", ["fork", "srun"])
def test_child_processes_of_ranks_end_with_them(
    launch: Launch, deed: str, code: int, style: str
) -> None:
    started = launch(CHILDREN.replace("DEED", deed), nproc=1, style=style)
    assert started.wait() == code, started.err()
    pids = [int(word) for word in (started.run.path / "children").read_text().split()]
    assert len(pids) == 3
    until(lambda: not any(map(is_alive, pids)), "the end of what the rank had started")


def test_everything_ends_when_the_agent_is_killed(launch: Launch) -> None:
    script = """
import os, subprocess, time
from pathlib import Path
child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
name = "pids-" + os.environ["RANK"]
Path("." + name).write_text(f"{os.getpid()} {child.pid} {os.getppid()}")
os.rename("." + name, name)
time.sleep(3600)
"""
    started = launch(script)
    pids = [int(word) for rank in (0, 1) for word in started.await_file(f"pids-{rank}").split()]
    started.process.kill()
    until(lambda: not any(map(is_alive, pids)), "the end of ranks, their children and the zygote")


def test_a_killed_zygote_is_a_failure_and_a_new_one_serves_the_restart(launch: Launch) -> None:
    script = """
import os, signal, sys, time
from pathlib import Path
if os.environ["PACELINE_ATTEMPT"] == "2":
    sys.exit(0)
Path("zygote-" + os.environ["RANK"]).write_text(str(os.getppid()))
time.sleep(3600)
"""
    started = launch(script, max_restarts=1)
    zygotes = {started.await_file(f"zygote-{rank}") for rank in (0, 1)}
    assert len(zygotes) == 1
    os.kill(int(zygotes.pop()), signal.SIGKILL)
    assert started.wait() == 0, started.err()
    assert "killed by SIGKILL" in started.err()
    assert started.verdicts() == ("failed", "done")


def test_standard_input_after_a_restart(launch: Launch, tmp_path: Path) -> None:
    """A file is read again from where it was at first."""
    script = (
        "import os, sys; print(sys.stdin.read()); sys.exit(os.environ['PACELINE_ATTEMPT'] == '1')"
    )
    (tmp_path / "input").write_text("header\nconfig\n")
    with open(tmp_path / "input", "rb") as file:
        os.lseek(file.fileno(), len("header\n"), os.SEEK_SET)
        started = launch(script, nproc=1, max_restarts=1, stdin=file)
        assert started.wait() == 0, started.err()
    assert [started.log(0, attempt).strip() for attempt in (1, 2)] == ["config", "config"]


def test_a_restart_uses_the_same_zygote(launch: Launch) -> None:
    script = """
import os, sys, time
from pathlib import Path
me = {name: os.environ[name] for name in ("MASTER_PORT", "PACELINE_ATTEMPT", "TORCHELASTIC_RESTART_COUNT")}
print(me["PACELINE_ATTEMPT"], me["TORCHELASTIC_RESTART_COUNT"], os.getppid(), flush=True)
if os.environ["RANK"] == "0":
    Path("printed").touch()
elif not Path("fixed").exists():
    while not Path("printed").exists():  # the other rank ends once this one fails
        time.sleep(0.01)
    Path("fixed").touch()
    sys.exit(9)
"""
    started = launch(script, max_restarts=2)
    assert started.wait() == 0, started.err()
    assert [each.number for each in started.run.attempts()] == [1, 2]
    assert started.verdicts() == ("failed", "done")
    first, second = started.log(0, 1).split(), started.log(0, 2).split()
    assert (first[0], second[0]) == ("1", "2")
    assert (first[1], second[1]) == ("0", "1")
    assert first[2] == second[2], "the same process forked both"
    assert started.events() == [
        "node",
        "started",
        "launch",
        "ranks",
        "failed",
        "restarted",
        "launch",
        "ranks",
        "done",
    ]


HANGS = """
import os, signal, time
from paceline.contract.heartbeat_file import RUNNING, SLOT, slot_offset
def send_heartbeat(step):
    with open(os.environ["PACELINE_HEARTBEAT"], "r+b") as file:
        file.seek(slot_offset(int(os.environ["LOCAL_RANK"])))
        file.write(SLOT.pack(RUNNING, step, os.getpid(), time.time(), 0.1))
def stuck_here():
    time.sleep(3600)
send_heartbeat(4 if os.environ["RANK"] == "1" else 5)
"""


def test_a_hang_is_ended_with_stacks(launch: Launch) -> None:
    started = launch(HANGS + "stuck_here()", hang_timeout=0.5)
    began = time.monotonic()
    assert started.wait() == 1
    assert time.monotonic() - began < 90
    assert started.failure()["cause"] == "hang"
    assert started.failure()["rank"] == 1
    assert "is stuck at step 4" in started.err()
    for rank in (0, 1):
        assert "stuck_here" in started.attempt().stacks(rank).read_text()


CRASHES_ON_SIGUSR2 = """
import ctypes
libc = ctypes.CDLL(None)
libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.signal(signal.SIGUSR2, ctypes.cast(libc.abort, ctypes.c_void_p))
"""


def test_a_rank_that_crashes_while_stacks_are_dumped_has_still_hung(launch: Launch) -> None:
    """Python may crash when it prints the stacks of running threads."""
    started = launch(HANGS + CRASHES_ON_SIGUSR2 + "stuck_here()", hang_timeout=0.5)
    assert started.wait() == 1
    assert (started.failure()["cause"], started.failure()["rank"]) == ("hang", 1)


def test_a_hang_leaves_the_scripts_own_signal_alone(launch: Launch) -> None:
    """A script may save and exit on SIGUSR2; its ranks then have no stacks."""
    own = "signal.signal(signal.SIGUSR2, lambda *_: print('got SIGUSR2', flush=True))\n"
    started = launch(HANGS + own + "stuck_here()", hang_timeout=0.5)
    assert started.wait() == 1
    assert (started.failure()["cause"], started.failure()["rank"]) == ("hang", 1)
    assert "got SIGUSR2" not in started.log(0) + started.log(1)
    assert not started.attempt().stacks(0).exists()


UNSAVED_STATE = """
import contextlib, os, time
from paceline.contract.heartbeat_file import FINISHED, SLOT, UNSAVED, slot_offset
if os.environ["RANK"] == "0":
    with open(os.environ["PACELINE_HEARTBEAT"], "r+b") as file:
        os.pwrite(file.fileno(), SLOT.pack(FINISHED, 7, os.getpid(), time.time(), 0.1), slot_offset(0))
        os.pwrite(file.fileno(), UNSAVED.pack(7 + 1), UNSAVED.offset(0))
    with contextlib.suppress(OSError), open("ballast", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
"""


def test_a_run_whose_last_state_could_not_be_saved_is_marked(
    launch: Launch, tmp_path: Path
) -> None:
    """The mark goes into space that was reserved: the disk may be full."""
    with mount_small_disk(tmp_path / "small", "2m") as disk:
        started = launch(UNSAVED_STATE, folder=disk / "run")
        assert started.wait() == 0, started.err()
        assert (
            started.job_start.unsaved.read_text() == "the last state (step 7) could not be saved\n"
        )
        assert read_verdict(started.job_start.verdict) == "done"
    assert "warning: the last state (step 7) could not be saved" in started.err()
