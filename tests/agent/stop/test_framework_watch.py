"""The stop contract of scripts without the runtime: presets of frameworks, and the settings that override them."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.agent.conftest import Launch, Launched, until

# A framework that saves on SIGTERM, as the Trainer of transformers does with a just-in-time checkpoint.
FRAMEWORK = """
import os, signal, time
from pathlib import Path
def train(number, *, resume_from_checkpoint=None):
    requests, rank = [], os.environ["RANK"]
    before = signal.signal(number, lambda *_: requests.append(1))
    Path("listening-" + rank).write_text(str(os.getpid()))
    while not requests:
        time.sleep(0.01)
    Path("saved-" + rank).touch()
    signal.signal(number, before)
    time.sleep(0.5)  # the script goes on for a while
"""
RESUMES = "import library\nlibrary.start(15, resume_from_checkpoint=True)\n"
STARTS_OVER = "import library\nlibrary.start(15)\n"


@pytest.fixture
def framework(tmp_path: Path) -> None:
    """A module beside the script imports the framework, inside a function."""
    package = tmp_path / "fake" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "trainer.py").write_text(FRAMEWORK)
    library = "def start(*args, **options):\n    from transformers.trainer import train\n    train(*args, **options)\n"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "library.py").write_text(library)


def listening(started: Launched) -> None:
    for rank in (0, 1):
        started.await_file(f"listening-{rank}")


def has_saved(started: Launched) -> bool:
    return all((started.run.path / f"saved-{rank}").exists() for rank in (0, 1))


@pytest.mark.usefixtures("framework")
def test_before_the_time_limit_a_framework_gets_its_own_signal(launch: Launch) -> None:
    """It saves and exits with 0: the run is stopped, not done, and goes back into the queue."""
    reports = "import paceline\n"  # to a sweep, perhaps, but it opens no session
    started = launch(reports + RESUMES, env={"SLURM_JOB_ID": "1"})
    listening(started)
    started.job_start.stop.touch()
    assert started.wait() == 0, started.err()
    assert started.verdicts() == ("stopped", "stopped")
    assert started.job_start.requeue.exists()
    assert has_saved(started)
    assert "the script gets SIGTERM, which the Hugging Face Trainer handles itself" in started.err()
    assert not (started.run.path / "stops-without-progress").exists()
    events = (started.run.events / "agent-0.jsonl").read_text().splitlines()
    names = [each["name"] for each in map(json.loads, events) if each["event"] == "framework"]
    assert names == ["Hugging Face Trainer"]


@pytest.mark.usefixtures("framework")
def test_after_ctrl_c_a_framework_gets_its_own_signal_and_no_other(launch: Launch) -> None:
    """Not even once it has removed its handler: KeyboardInterrupt would end what the script does after training."""
    started = launch(RESUMES + "import os\nopen('end-' + os.environ['RANK'], 'w')")
    listening(started)
    started.process.send_signal(signal.SIGINT)
    assert started.wait() == 130, started.err()
    assert started.verdicts() == ("stopped", "stopped")
    assert has_saved(started)
    assert len(list(started.run.path.glob("end-*"))) == 2


@pytest.mark.usefixtures("framework")
@pytest.mark.parametrize(
    ("script", "settings"),
    [(STARTS_OVER, {}), (RESUMES, {"stop_signal": "SIGUSR1"})],
    ids=["it would start over", "SIGUSR1 is set"],
)
def test_where_no_preset_applies_a_script_runs_until_the_time_limit(
    launch: Launch, script: str, settings: dict[str, str]
) -> None:
    started = launch(script, **settings)
    listening(started)
    started.job_start.stop.touch()
    until(lambda: "runs until the time limit" in started.err(), "the note")
    assert not has_saved(started)
    started.run.cancelled.touch()
    assert started.wait() == 0, started.err()
    assert has_saved(started), "once the run is cancelled, it gets SIGTERM"


@pytest.mark.usefixtures("framework")
@pytest.mark.parametrize("style", ["fork", "srun"])
def test_settings_override_the_preset(launch: Launch, style: str) -> None:
    script = "import sys, library\nlibrary.start(1)\nsys.exit(3)"
    ranks = 2 if style == "fork" else 1
    started = launch(
        script,
        env={"SLURM_JOB_ID": "1"},
        stop_signal="SIGHUP",
        saved_exit_code=3,
        style=style,
        nproc=ranks,
    )
    for rank in range(ranks):
        started.await_file(f"listening-{rank}")
    started.job_start.stop.touch()
    assert started.wait() == 0, started.err()
    assert started.verdicts() == ("stopped", "stopped")
    assert started.job_start.requeue.exists()
    assert "the script gets SIGHUP, as set by stop_signal" in started.err()
    assert not (started.run.path / "stops-without-progress").exists()


def test_exit_code_0_means_saved_if_that_is_set(launch: Launch) -> None:
    """The handler appears only after the request."""
    script = """
import os, signal, time
from pathlib import Path
from paceline.contract.heartbeat_file import HEADER
Path("listening-" + os.environ["RANK"]).write_text("1")
def stop_requested():
    with open(os.environ["PACELINE_HEARTBEAT"], "rb") as file:
        return HEADER.unpack(file.read(HEADER.size))[2]
while not stop_requested():
    time.sleep(0.01)
time.sleep(0.3)
requests = []
signal.signal(signal.SIGUSR1, lambda *_: requests.append(1))
while not requests:
    time.sleep(0.01)
"""
    started = launch(script, env={"SLURM_JOB_ID": "1"}, saved_exit_code=0)
    listening(started)
    started.job_start.stop.touch()
    assert started.wait() == 0, started.err()
    assert started.verdicts() == ("stopped", "stopped")


def test_the_exit_code_that_is_set_stops_without_a_request(launch: Launch) -> None:
    started = launch("import sys; sys.exit(9)", saved_exit_code=9)
    assert started.wait() == 0
    assert started.verdicts() == ("stopped", "stopped")
