"""Stop requests: by the stop file, by signals and by Ctrl-C."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.agent.stop import FILE, INTERRUPT, LOST, TERM, describe_cause
from paceline.contract.run_folder import RunFolder
from tests.agent.conftest import Launch, Launched, until

# A script without our runtime that saves on request, as many do.
SAVES = """
import os, signal, sys, time
from pathlib import Path
requests = []
signal.signal(signal.SIGUSR1, lambda *_: requests.append(1))
Path("listening-" + os.environ["RANK"]).write_text(str(os.getpid()))
while not requests:
    time.sleep(0.01)
Path("saved-" + os.environ["RANK"]).touch()
sys.exit(75)
"""

# As our runtime does it: writes into its slot that it has saved, and exits with 0.
RUNTIME = """
import os, signal, sys, time
from pathlib import Path
from paceline.contract.heartbeat_file import RUNNING, SAVED_AND_STOPPED, SLOT, slot_offset
def send_heartbeat(state):
    with open(os.environ["PACELINE_HEARTBEAT"], "r+b") as file:
        file.seek(slot_offset(int(os.environ["LOCAL_RANK"])))
        file.write(SLOT.pack(state, 3, os.getpid(), time.time(), 0.1))
requests = []
signal.signal(signal.SIGUSR1, lambda *_: requests.append(1))
send_heartbeat(RUNNING)
Path("listening-" + os.environ["RANK"]).write_text(str(os.getpid()))
while not requests:
    time.sleep(0.01)
send_heartbeat(SAVED_AND_STOPPED)
"""

SLEEPS = """
import os, time
from pathlib import Path
Path("listening-" + os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(3600)
"""


def listening(started: Launched, ranks: int = 2) -> None:
    for rank in range(ranks):
        started.await_file(f"listening-{rank}")


def touch_stop(started: Launched) -> None:
    started.job_start.stop.touch()


def send_term(started: Launched) -> None:
    started.process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("script", "ask"),
    [(SAVES, touch_stop), (RUNTIME, touch_stop), (RUNTIME, send_term), (SLEEPS, send_term)],
    ids=["own-handler-file", "runtime-file", "runtime-term", "no-handler-term"],
)
@pytest.mark.parametrize("style", ["fork", "srun"])
def test_stop(launch: Launch, script: str, ask: Callable[[Launched], None], style: str) -> None:
    ranks = 2 if style == "fork" else 1
    started = launch(script, style=style, nproc=ranks)
    listening(started, ranks)
    ask(started)
    assert started.wait() == 0, started.err()
    assert started.verdicts() == ("stopped", "stopped")
    assert "stopped" in started.events()
    expected = {
        SAVES: "the script handles SIGUSR1 itself",
        RUNTIME: "the ranks save and stop",
        SLEEPS: f": {LOST}",
    }
    assert expected[script] in started.err()
    if script == SAVES:
        assert all((started.run.path / f"saved-{rank}").exists() for rank in range(ranks))


def test_a_script_that_resumes_by_itself_is_ended_and_requeued(launch: Launch) -> None:
    """Without `requeue = "always"` it runs on until the time limit, and the run says so."""
    started = launch(SLEEPS, env={"SLURM_JOB_ID": "1"}, requeue_always=True)
    listening(started)
    touch_stop(started)
    assert started.wait() == 0, started.err()
    assert started.verdicts() == ("stopped", "stopped")
    assert started.job_start.requeue.exists()
    assert LOST in started.err()


def test_a_script_that_goes_on_after_sigterm_is_requeued_before_the_time_limit(
    launch: Launch,
) -> None:
    flag = "import signal; signal.signal(15, lambda *_: None)\nwhile True: time.sleep(1)"
    script = SLEEPS.replace("time.sleep(3600)", flag)
    started = launch(
        script, env={"SLURM_JOB_ID": "1"}, requeue_always=True, stop_timeout=2.0, kill_after=0.2
    )
    listening(started)
    touch_stop(started)
    assert started.wait() == 0, started.err()
    assert started.verdicts() == ("stopped", "stopped")
    assert started.job_start.requeue.exists()
    assert "did not stop within 1 s and were killed: 0, 1" in started.err()


@pytest.mark.parametrize("state", ["starting", "training"])
def test_a_run_that_has_trained_is_requeued_before_the_time_limit(
    launch: Launch, tmp_path: Path, state: str
) -> None:
    """Its ranks may need longer than the grace time to start again, or for a step. Slurm would end the run for good."""
    stays = RUNTIME.partition("while not requests")[0] + "time.sleep(3600)\n"
    if state == "starting":  # again, with a script that does not import the runtime itself
        (tmp_path / "run" / "events").mkdir(parents=True)
        RunFolder(tmp_path / "run").rank_events.touch()
    script = SLEEPS if state == "starting" else stays
    started = launch(script, env={"SLURM_JOB_ID": "1"}, stop_timeout=2.0, kill_after=0.2)
    listening(started)
    touch_stop(started)
    assert started.wait() == 0, started.err()
    assert started.verdicts() == ("stopped", "stopped")
    assert started.job_start.requeue.exists()
    assert "did not stop within 1 s and were killed: 0, 1" in started.err()
    will = {"starting": "the ranks have not begun to train", "training": "the ranks save and stop"}
    assert will[state] in started.err()


def test_a_handler_that_only_prints_stacks(launch: Launch) -> None:
    """It is no reason to wait for the deadline: the script gets SIGTERM before."""
    script = SLEEPS.replace(
        "import os, time",
        "import faulthandler, os, signal, time\nfaulthandler.register(signal.SIGUSR1)",
    )
    started = launch(script, stop_timeout=2.0)
    listening(started)
    send_term(started)
    assert started.wait() == 0, started.err()
    assert started.verdicts() == ("stopped", "stopped")
    assert "were killed" not in started.err()


def test_no_restart_after_a_stop_request(launch: Launch) -> None:
    raises = "import os, signal, time\ndef end(*_): raise OSError('disk full')\nsignal.signal(signal.SIGTERM, end)"
    started = launch(SLEEPS.replace("import os, time", raises), max_restarts=3)
    listening(started)
    send_term(started)
    assert started.wait() == 1, started.err()
    assert started.verdicts() == ("failed", "failed")
    assert "no restart: a stop was requested" in started.err()


def test_a_script_whose_session_another_module_opens_is_not_told_that_it_cannot_save(
    launch: Launch,
) -> None:
    """Its own text does not import Paceline, and it has not come to its first step."""
    marks = """
name = "paceline.runtime.step_boundary.heartbeat"
it = __import__(name, fromlist=["Heartbeat"])
it.Heartbeat(os.environ["PACELINE_HEARTBEAT"], int(os.environ["LOCAL_RANK"])).mark_session()
"""
    started = launch(SLEEPS.replace("from pathlib", f"{marks}from pathlib"), nproc=1)
    listening(started, 1)
    send_term(started)
    assert started.wait() == 0, started.err()
    assert "the ranks have not begun to train, so they have nothing to save" in started.err()


def test_a_script_that_takes_no_stop_request(launch: Launch) -> None:
    """At the end of its time it runs on; once the run is cancelled, it is ended."""
    started = launch(SLEEPS)
    listening(started)
    touch_stop(started)
    until(lambda: "runs until the time limit" in started.err(), "the note")
    assert "--requeue-always" in started.err()
    started.run.cancelled.touch()
    assert started.wait() == 0, started.err()
    assert started.verdicts() == ("stopped", "stopped")


def test_sigterm_leaves_a_script_the_time_to_save(launch: Launch) -> None:
    """One that saves on SIGUSR1 is not ended by SIGTERM while it does."""
    script = SAVES.replace('Path("saved', 'time.sleep(1)\nPath("saved')
    started = launch(script)
    listening(started)
    send_term(started)
    assert started.wait() == 0, started.err()
    assert all((started.run.path / f"saved-{rank}").exists() for rank in (0, 1))


def test_a_request_before_the_ranks_start_is_explained_later(
    launch: Launch, tmp_path: Path
) -> None:
    """Before, nobody knows which signals the script handles."""
    job_start = tmp_path / "run" / "job-starts" / "here"
    job_start.mkdir(parents=True)
    for path in (job_start / "stop", tmp_path / "run" / "cancelled"):
        path.touch()
    slow = "import os, time\nif 'RANK' in os.environ: time.sleep(0.6)\n"
    (tmp_path / "fake" / "sitecustomize.py").write_text(slow)
    started = launch(SLEEPS, style="srun", nproc=1)
    assert started.wait() == 0, started.err()
    first, _, rest = started.err().partition(
        "stop requested (paceline cancel --save) while the ranks start\n"
    )
    assert rest, first
    assert LOST not in first
    assert LOST in rest


def test_a_scheduler_that_ends_torchrun(launch: Launch) -> None:
    """It passes SIGTERM on and fails, although all ranks have stopped as they should."""
    script = SAVES.replace("SIGUSR1", "SIGTERM").replace("os.getpid()", "os.getppid()")
    started = launch(script, style="torchrun", light=False)
    agents = {int(started.await_file(f"listening-{rank}")) for rank in (0, 1)}
    assert len(agents) == 1
    os.kill(agents.pop(), signal.SIGTERM)
    assert started.wait() == 0, started.err()
    assert started.verdicts() == ("stopped", "stopped")


def test_a_failure_while_stopping_is_a_failure(launch: Launch) -> None:
    script = SAVES.replace("sys.exit(75)", "sys.exit(75 if os.environ['RANK'] == '0' else 4)")
    started = launch(script)
    listening(started)
    started.job_start.stop.touch()
    assert started.wait() == 1
    assert started.verdicts() == ("failed", "failed")
    assert started.failure()["rank"] == 1


def test_exit_code_0_after_sigterm_is_a_stop(launch: Launch) -> None:
    """Many scripts save in a handler of SIGTERM and leave with `sys.exit(0)`: they are not done."""
    handler = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))"
    started = launch(SLEEPS.replace("import os, time", f"import os, signal, sys, time\n{handler}"))
    listening(started)
    send_term(started)
    assert started.wait() == 0, started.err()
    assert started.verdicts() == ("stopped", "stopped")


@pytest.mark.parametrize("leave", ["pass", "sys.exit(1)", "raise"])
def test_ctrl_c_reaches_a_script_without_the_runtime(launch: Launch, leave: str) -> None:
    """It may save when it catches KeyboardInterrupt, as under torchrun. Lightning exits with 1 then."""
    saves = (
        f'except KeyboardInterrupt:\n    Path("saved-" + os.environ["RANK"]).touch()\n    {leave}'
    )
    script = SLEEPS.replace("time.sleep(3600)", f"try:\n    time.sleep(3600)\n{saves}")
    started = launch(script.replace("import os, time", "import os, sys, time"))
    listening(started)
    started.process.send_signal(signal.SIGINT)
    assert started.wait() == 130
    assert all((started.run.path / f"saved-{rank}").exists() for rank in (0, 1))
    assert started.verdicts() == ("stopped", "stopped")
    assert "stop requested (Ctrl-C): the script gets SIGINT" in started.err()
    assert "Traceback" not in started.err() + started.log(0)


@pytest.mark.parametrize("script", [RUNTIME, SAVES], ids=["runtime", "own-handler"])
def test_ctrl_c_lets_the_ranks_save(launch: Launch, script: str) -> None:
    """A rank that listens for SIGUSR1 gets nothing else: SIGINT would end it."""
    started = launch(script)
    listening(started)
    started.process.send_signal(signal.SIGINT)
    assert started.wait() == 130
    assert started.verdicts() == ("stopped", "stopped")
    assert "press Ctrl-C again to end at once" in started.err()


def test_ctrl_c_twice_ends_at_once(launch: Launch) -> None:
    """Even a script that takes no signal. The run is stopped: the user ended it, and it has not failed."""
    started = launch(
        "import signal; signal.signal(2, signal.SIG_IGN)\n" + SLEEPS, kill_after=3600.0
    )
    listening(started)
    started.process.send_signal(signal.SIGINT)
    until(lambda: "stop_requested" in started.events(), "the first Ctrl-C")
    time.sleep(0.25)  # the same signal within a fifth of a second counts once
    started.process.send_signal(signal.SIGINT)
    assert started.wait() == 130
    assert started.verdicts() == ("stopped", "stopped")
    assert (
        "killed immediately by Ctrl-C: nothing was saved since the last checkpoint" in started.err()
    )


def test_ctrl_c_during_the_imports(launch: Launch, tmp_path: Path) -> None:
    """Before any rank starts."""
    (tmp_path / "fake" / "slow_to_import.py").write_text(
        "import pathlib, time\npathlib.Path('importing').touch()\ntime.sleep(3600)\n"
    )
    started = launch("", preload=["slow_to_import"])
    until((tmp_path / "importing").exists, "the import")
    started.process.send_signal(signal.SIGINT)
    assert started.wait() == 130
    assert started.verdicts()[1] == "stopped"
    assert "interrupted before the ranks started" in started.err()


def test_ranks_that_do_not_stop_are_ended_at_the_deadline(launch: Launch) -> None:
    """Rank 0 stops on SIGTERM. Rank 1 ignores it."""
    deaf = "import os, signal\nif os.environ['RANK'] == '1': signal.signal(15, signal.SIG_IGN)\n"
    started = launch(deaf + SLEEPS, stop_timeout=1.0, kill_after=0.2)
    listening(started)
    touch_stop(started)  # for a script that does not listen, this alone changes nothing
    until(lambda: "stop_requested" in started.events(), "the stop file is seen")
    send_term(started)
    assert started.wait() == 0, started.err()
    assert started.verdicts() == ("stopped", "stopped")
    assert "did not stop within 1 s and were killed: 1; stacks: " in started.err()
    assert "train.py" in started.attempt().stacks(1).read_text()


# On SIGTERM rank 0 ends at once. Rank 1 notices that, and not its own signal. Rank 2 takes its time to save.
PEERS = """
import os, signal, sys, time
from pathlib import Path
rank, requests = os.environ["RANK"], []
handlers = {"0": signal.SIG_DFL, "1": signal.SIG_IGN, "2": lambda *_: requests.append(1)}
signal.signal(signal.SIGTERM, handlers[rank])
Path("listening-" + rank).write_text(str(os.getpid()))
if rank == "1":
    while not Path("listening-0").exists() or Path("/proc", Path("listening-0").read_text()).exists():
        time.sleep(0.005)
    raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")
while not requests:
    time.sleep(0.01)
time.sleep(1)
Path("saved").touch()
sys.exit(75)
"""


@pytest.mark.parametrize("to", ["agent", "rank"])
def test_a_connection_that_a_stopping_rank_closes_is_not_a_failure(launch: Launch, to: str) -> None:
    """A scheduler may signal the ranks before their agent."""
    started = launch(PEERS, nproc=3, kill_after=0.2)
    listening(started, 3)
    if to == "rank":
        os.kill(int(started.await_file("listening-0")), signal.SIGTERM)
        until(lambda: started.attempt().error(1).exists(), "rank 1 notices")
    send_term(started)
    assert started.wait() == 0, started.err()
    assert started.verdicts() == ("stopped", "stopped")
    assert (started.run.path / "saved").exists()


def test_a_second_request_ends_the_run_at_once(launch: Launch) -> None:
    """Even a script that ignores SIGTERM."""
    deaf = "import signal; signal.signal(15, signal.SIG_IGN)\nwhile True: time.sleep(1)"
    started = launch(SLEEPS.replace("time.sleep(3600)", deaf), kill_after=3600.0)
    listening(started)
    send_term(started)
    time.sleep(1.2)  # requests within a second count as one
    send_term(started)
    assert started.wait() == 0
    assert started.verdicts() == ("stopped", "stopped")
    assert "killed immediately by a second stop request" in started.err()


NOW = 1_700_000_000.0


@pytest.mark.parametrize(
    ("way", "left", "cancelled", "expected"),
    [
        (FILE, 60, False, "time limit in 60 s"),
        (
            FILE,
            None,
            False,
            "SIGUSR1 to the batch script, sent by Slurm near the time limit or by hand",
        ),
        (FILE, None, True, "paceline cancel --save"),
        (FILE, 3600, False, "SIGUSR1 to the batch script"),
        (FILE, 3600, True, "paceline cancel --save"),
        (TERM, 3600, False, "SIGTERM: preemption or scancel"),
        (TERM, 0, False, "the time limit is reached"),
        (TERM, 3600, True, "paceline cancel"),
        (INTERRUPT, 3600, False, "Ctrl-C"),
    ],
)
def test_a_stop_names_its_cause(
    way: int, left: int | None, cancelled: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW)
    environ = {"SLURM_JOB_ID": "1"} | (
        {} if left is None else {"SLURM_JOB_END_TIME": str(int(NOW) + left)}
    )
    assert describe_cause(way, cancelled=cancelled, environ=environ, grace=120.0) == expected
