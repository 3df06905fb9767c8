"""`sweep` from another machine whose answer is lost: the same command, sent again, reports its jobs or submits them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from paceline.launch.confirmation import submission
from paceline.launch.confirmation.submission import abandoned_trials, begin_submission
from paceline.launch.confirmation.sweep_outcome import SweepOutcome

from paceline.contract.run_folder import SUBMITTING
from paceline.contract.sweep.folder import SUBMITTED, SweepFolder
from paceline.errors import ClusterError

# A command that carries out a submission: `record`, and what was typed.
COMMAND = """
import sys
from pathlib import Path
from paceline.cli import main
from paceline.launch.confirmation.submission import begin_submission
assert begin_submission(Path(sys.argv.pop(1))) is None
main()
"""
# The job of a call of sbatch is in `jobs`, unless `gone` exists. `signal` ends its caller, if its number of jobs is
# reached, after the job is queued.
TOOLS = {
    "sbatch": """\
cd "$(dirname "$0")"
for each; do case $each in */job.sbatch) folder=$(dirname "$each");; esac; done
number=$(( $(cat calls 2>/dev/null | wc -l) + 11 ))
echo "$number $*" >>calls
[ -e gone ] || printf '%s\\037%s\\n' "$number" "$folder" >>jobs
read -r after signal <signal && [ "$number" = "$after" ] && kill -s "$signal" $PPID && sleep 0.2
echo "$number" """,
    "squeue": """\
cd "$(dirname "$0")"
if [ -e silent ]; then echo "squeue: error: Socket timed out" >&2; exit 1; fi
case "$*" in *%Z*) cat jobs 2>/dev/null;; esac
exit 0""",
    "scancel": """echo "$@" >>"$(dirname "$0")/cancelled" """,
    "scontrol": "echo 'MaxArraySize = 2'",
    "sinfo": "exit 1",
    "sacct": "exit 1",
}


class Login:
    """A login node of a cluster that never starts a job, with a sweep of four trials: two arrays."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.project, self.record = folder / "bin", folder / "project", folder / "record"
        self.sweep = SweepFolder(folder / "scratch" / "project" / "default" / "four")

    def start(self) -> subprocess.CompletedProcess[str]:
        line = ["sweep", "--no-check", "--cpu", "--nproc", "1", "-t", "5", "sweep.toml"]
        return subprocess.run(
            [sys.executable, "-c", COMMAND, str(self.record), *line],
            cwd=self.project,
            env=dict(os.environ),
            capture_output=True,
            text=True,
            timeout=60,
        )

    def end_by(self, signal: str, *, after: int) -> None:
        (self.bin / "signal").write_text(f"{after} {signal}\n")

    def calls(self) -> list[str]:
        path = self.bin / "calls"
        return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def login(guard: None, tmp_path: Path) -> Iterator[Login]:
    made = Login(tmp_path)
    made.bin.mkdir()
    made.project.mkdir()
    for name, text in TOOLS.items():
        (made.bin / name).write_text(f"#!/bin/bash\n{text}\n")
        (made.bin / name).chmod(0o755)
    (made.bin / "signal").touch()
    (made.project / "train.py").touch()
    (made.project / "sweep.toml").write_text(
        '[sweep]\nscript = "train.py"\nname = "four"\n[space]\nx = [1, 2, 3, 4]\n'
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(made.bin), prepend=":")
        patch.setenv("PACELINE_SCRATCH", str(tmp_path / "scratch"))
        yield made


def ask(login: Login) -> SweepOutcome | None:
    """Ask as the same command does when it is sent again."""
    found = begin_submission(login.record)
    for descriptor in submission._descriptor:
        os.close(descriptor)
    submission._descriptor.clear()
    assert found is None or isinstance(found, SweepOutcome)
    return found


def numbers(folder: SweepFolder) -> list[int]:
    return [point.number for point in folder.read_points()]


def test_a_sweep_that_was_submitted_is_reported(login: Login) -> None:
    done = login.start()
    assert done.returncode == 0, done.stderr
    found = ask(login)
    assert found is not None
    assert (found.jobs, found.trials, found.missing) == (["11", "12"], 4, 0)
    assert found.sweep == login.sweep


@pytest.mark.parametrize(("after", "jobs", "trials"), [(11, ["11"], 2), (12, ["11", "12"], 4)])
def test_jobs_of_a_command_that_was_killed_are_found(
    login: Login, after: int, jobs: list[str], trials: int
) -> None:
    login.end_by("KILL", after=after)
    assert login.start().returncode < 0
    assert len(login.sweep.read_jobs()) == len(jobs) - 1, "the last one is not recorded"
    (login.bin / "silent").touch()
    with pytest.raises(ClusterError, match="Cannot find out whether Slurm has the job"):
        begin_submission(login.record)
    (login.bin / "silent").unlink()
    found = ask(login)
    assert found is not None
    assert (found.jobs, found.trials, found.missing) == (jobs, trials, 4 - trials)
    assert [line["job"] for line in login.sweep.read_jobs()] == jobs
    assert (login.sweep.submission(1) / SUBMITTED).exists(), "otherwise its secrets stay"
    assert not (login.sweep.submission(1) / SUBMITTING).exists()
    assert ask(login) == found


def test_trials_without_a_job_are_submitted(login: Login) -> None:
    login.end_by("KILL", after=11)
    (login.bin / "gone").touch()  # killed before Slurm had the job
    assert login.start().returncode < 0
    assert numbers(login.sweep) == [0, 1, 2, 3]
    assert ask(login) is None
    assert abandoned_trials(login.sweep.path) == [0, 1, 2, 3]
    assert (login.sweep.submission(1) / "cancelled-tasks-1").exists(), (
        "the job ends at once if it comes later"
    )
    (login.bin / "gone").unlink()
    done = login.start()
    assert done.returncode == 0, done.stderr
    assert "submitted 4 trials of four as jobs 12, 13" in done.stdout
    assert numbers(login.sweep) == [0, 1, 2, 3]
    assert [line["submission"] for line in login.sweep.read_jobs()] == ["2", "2"]


@pytest.mark.parametrize("after", [11, 12])
def test_an_interrupted_command_leaves_no_jobs_and_no_trials(login: Login, after: int) -> None:
    login.end_by("INT", after=after)
    done = login.start()
    assert done.returncode == 130, done.stderr
    cancelled = (login.bin / "cancelled").read_text().split()
    assert cancelled == sorted({"11", str(after)}, reverse=True)
    assert not numbers(login.sweep)
    assert not login.sweep.read_jobs()
    assert ask(login) is None
    done = login.start()
    assert done.returncode == 0, done.stderr
    assert login.calls()[-2:] == [str(after + 1), str(after + 2)]


def test_what_is_left_of_a_command_that_was_killed_before_sbatch_is_removed(login: Login) -> None:
    login.start()
    submitted, sweep = login.sweep.submission(1), login.sweep
    sweep.jobs.unlink()
    for name in (SUBMITTED, "tasks-1", "tasks-2"):
        (submitted / name).unlink()
    login.record.write_text(json.dumps({"submission": str(submitted), "trials": [0, 1, 2, 3]}))
    assert ask(login) is None
    assert not submitted.exists(), "its secrets are gone"


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[[SweepOutcome], str]:
    from paceline.ssh.remote import entry

    def make(outcome: SweepOutcome) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PACELINE_ON_CLUSTER", "alps")
            entry._report_sweep(outcome)
        return capsys.readouterr().out

    return make


def test_the_report(report: Callable[[SweepOutcome], str], tmp_path: Path) -> None:
    sweep = SweepFolder(tmp_path / "lr")
    text = report(SweepOutcome(sweep, ["11", "12"], 4, 0))
    assert (
        "submitted 4 trials of lr as jobs 11, 12, when you typed this command earlier; not submitted again"
        in text
    )
    assert "paceline sweep show lr --on alps" in text
    assert "resubmit" not in text
    text = report(SweepOutcome(sweep, ["11"], 1, 3))
    assert "submitted 1 trial of lr as job 11, when" in text
    assert "paceline sweep --resubmit missing lr --on alps" in text
