"""What is left for others to find: secrets in the files of sweeps, and in the folders of runs that are over."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.agent.agent import Agent
from paceline.agent.stop import Requests
from paceline.agent.sweep_trial import main as close_or_open_trial
from paceline.agent.sweep_trial import open_trial
from paceline.cli.commands.clean import find_ended_secrets
from paceline.contract.environment_file import REQUIRED, forget_secrets, secret_names
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import DONE, RunFolder
from paceline.contract.sweep_folder import Search, SweepFolder
from paceline.launch.actions import cancel_run
from paceline.launch.environment.activation import environment_file
from paceline.launch.secrets import Secrets
from paceline.slurm.job_states import JobState
from paceline.spec.job import Program
from paceline.spec.load import load_job
from paceline.spec.run_path import RunPath
from paceline.sweep.folder import SweepWriter
from paceline.sweep.settings import new_trials, read_list
from tests.launch.plan.slurm.test_stop_and_requeue import DONE as IS_DONE
from tests.launch.plan.slurm.test_stop_and_requeue import FAILED, Bench

HUSH = "hush-5d41402abc4b"
ENVIRONMENT = f"export PLAIN=1\n# Secrets until the run is over: A_KEY B\nexport A_KEY={HUSH}\nexport B=$'{HUSH}\\n'\n"
REDUCED = "export PLAIN=1\n" + REQUIRED.format("A_KEY") + REQUIRED.format("B")


def readable_by_others(folder: Path) -> dict[str, str]:
    """Return the texts of the files that others could read."""
    files = (
        path
        for path in folder.rglob("*")
        if path.is_file() and stat.S_IMODE(path.stat().st_mode) & 0o077
    )
    return {str(path.relative_to(folder)): path.read_text() for path in files}


# -- sweeps ------------------------------------------------------------------------------------------------


def make_sweep(
    tmp_path: Path, search: Search, listed: Path | None = None
) -> tuple[SweepFolder, Path]:
    writer = SweepWriter(RunPath(tmp_path, "project", "base", search.name))
    submission = writer.folder.submission(1)
    submission.mkdir(parents=True)
    launch_spec = LaunchSpec("submission", "/code/train.py", list(search.args), experiment="base")
    (submission / "launch.json").touch(mode=0o600)
    (submission / "launch.json").write_text(launch_spec.to_json())
    (submission / "run.json").write_text("{}")
    (submission / "programs.json").write_text('{"train.py": "/code/train.py"}')
    requests = read_list(listed) if listed is not None else []
    writer.add_trials(search, new_trials([], requests, seeds=[None]))
    return writer.folder, submission


def test_arguments_of_a_sweep_are_hidden_from_others(tmp_path: Path) -> None:
    args = ["--api-key", HUSH, f"--db=https://{HUSH}@host/x", "--lr", "{lr}"]
    sweep, submission = make_sweep(
        tmp_path, Search("s", sampler="grid", space={"lr": {"grid": [1]}}, args=args)
    )
    with open(sweep.points, "a") as file:
        file.write(json.dumps({"number": 0, "group": 0, "point": {"lr": 1}}) + "\n")
    trial = open_trial(sweep, submission, 0)
    assert LaunchSpec.from_json(trial.launch_spec.read_text()).args == [*args[:-1], "1"], (
        "the script gets them"
    )
    assert json.loads(trial.run_json.read_text())["args"] == [
        "--api-key",
        "***",
        "--db=https://***@host/x",
        "--lr",
        "1",
    ]
    assert not [name for name, text in readable_by_others(tmp_path).items() if HUSH in text]


def test_lines_of_a_list_are_hidden_from_others(tmp_path: Path) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text(f"train.py --lr 1 --hf-token={HUSH}\ntrain.py --lr 2 --password {HUSH}2\n")
    lines.chmod(0o600)
    sweep, submission = make_sweep(tmp_path, Search("s", sampler="list"), lines)
    for number, point in enumerate(({"lr": 1, "hf-token": "***"}, {"lr": 2, "password": "***"})):
        trial = open_trial(sweep, submission, number)
        assert HUSH in LaunchSpec.from_json(trial.launch_spec.read_text()).args[-1]
        assert json.loads(trial.trial.read_text())["point"] == point
    assert not [name for name, text in readable_by_others(tmp_path).items() if HUSH in text]


def test_a_sweep_without_secrets_stays_readable(tmp_path: Path) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("train.py --lr 1\n")
    sweep, _ = make_sweep(tmp_path, Search("s", sampler="list"), lines)
    umask = os.umask(0o22)
    os.umask(umask)
    assert stat.S_IMODE(sweep.points.stat().st_mode) == 0o666 & ~umask


# -- environment.sh ----------------------------------------------------------------------------------------


def test_secrets_come_last_in_the_environment_file(tmp_path: Path) -> None:
    (tmp_path / "paceline.toml").write_text(
        '[environment]\nproxies = true\nvariables = { A_KEY = "1", PLAIN = "2" }\n'
    )
    job = load_job(Program("train.py"), cwd=tmp_path)
    environ = {"PATH": "/bin", "https_proxy": f"http://ann:{HUSH}@proxy:3128"}
    text = environment_file(
        job, environ, Secrets({"LATER": f"{HUSH}\n# Secrets until"}, {"LATER": ".env"})
    )
    assert secret_names(text) == ["https_proxy", "LATER", "A_KEY"]
    path = tmp_path / "environment.sh"
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")
    assert forget_secrets(path)
    reduced = path.read_text(encoding="utf-8")
    assert HUSH not in reduced
    assert "export PLAIN=2\n" in reduced
    assert reduced.endswith("".join(map(REQUIRED.format, ("https_proxy", "LATER", "A_KEY"))))
    assert forget_secrets(path)
    assert path.read_text(encoding="utf-8") == reduced


def write_environment(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(ENVIRONMENT)
    return path


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def head_agent(run: RunFolder, **settings: Any) -> Agent:
    launch_spec = LaunchSpec("r", "train.py", [], **settings)
    environ = {"SLURM_JOB_ID": "7", "PACELINE_JOB_START": "7-0"}
    return Agent(run, launch_spec, environ=environ, requests=Requests(), zygote=None)


@pytest.mark.parametrize(
    ("verdict", "settings", "is_over"),
    [
        ("done", {}, True),
        ("failed", {}, True),
        ("stopped", {}, False),
        (None, {}, False),
        ("stopped", {"requeue": False}, False),
    ],
    ids=["done", "failed", "requeued", "no verdict", "stopped"],
)
def test_secrets_go_when_the_run_is_over(
    tmp_path: Path, verdict: str | None, settings: dict[str, Any], is_over: bool
) -> None:
    path = write_environment(tmp_path / "environment.sh")
    agent = head_agent(RunFolder(tmp_path), **settings)
    if verdict is not None:
        agent.verdicts.write_verdict(verdict)
    agent.cleanup.close()
    assert path.read_text() == (REDUCED if is_over else ENVIRONMENT)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(each.name for each in tmp_path.glob("environment*")) == ["environment.sh"]


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_job_that_is_ended_from_outside_keeps_its_secrets_unless_cancelled(
    tmp_path: Path, cancelled: bool
) -> None:
    path = write_environment(tmp_path / "environment.sh")
    agent = head_agent(RunFolder(tmp_path))
    if cancelled:
        agent.run.cancelled.touch()
    agent.requests.by_term = True
    agent.verdicts.write_verdict("failed")
    agent.cleanup.close()
    assert path.read_text() == (REDUCED if cancelled else ENVIRONMENT)


def test_a_job_that_srun_ends_after_its_verdict_keeps_no_secrets(tmp_path: Path) -> None:
    path = write_environment(tmp_path / "environment.sh")
    agent = head_agent(RunFolder(tmp_path))
    agent.verdicts.write_verdict("failed")
    agent.requests.by_term = True  # another agent has failed
    agent.cleanup.close()
    assert path.read_text() == REDUCED


def test_a_later_start_asks_for_the_secrets(bench: Bench) -> None:
    path = write_environment(bench.run / "environment.sh")
    source = 'source "$paceline_run/environment.sh" || paceline_fail "no"'
    bench.carry_out(FAILED, setup=source)
    assert forget_secrets(path)
    code, out = bench.carry_out(IS_DONE, setup=source, SLURM_JOB_ID="8", A_KEY="again")
    assert code == 1
    assert "The value of B was removed when this run ended. Export B" in out
    assert (
        bench.carry_out(
            IS_DONE, setup=source, SLURM_JOB_ID="8", SLURM_RESTART_COUNT="1", A_KEY="again", B="too"
        )[0]
        == 0
    )


def test_the_last_trial_of_a_submission_removes_its_secrets(tmp_path: Path) -> None:
    sweep, submission = make_sweep(tmp_path, Search("s", sampler="grid"))
    (submission / "tasks-1").write_text("2 9\n3 4 5\n")
    path = write_environment(submission / "environment.sh")

    def close(number: int) -> None:
        sweep.trial(number).path.mkdir(parents=True)
        trial = {"number": number, "group": number, "point": {}, "seed": None, "optuna": None}
        sweep.trial(number).trial.write_text(json.dumps(trial))
        assert (
            close_or_open_trial(["close", str(sweep.path), str(submission), str(number), DONE]) == 0
        )

    close(4)
    close(5)
    assert path.read_text() == ENVIRONMENT, "more arrays may follow, and trial 9 has not ended"
    (submission / "submitted").touch()
    close(6)
    assert path.read_text() == ENVIRONMENT, "trial 9 has not ended"
    close(9)
    assert path.read_text() == REDUCED


def make_run(
    scratch: Path, name: str, *, job: str, verdict: str | None = None, age: float = 0
) -> Path:
    folder = RunFolder(scratch / "project" / "base" / name)
    start = folder.path / "job-starts" / f"{job}-0"
    start.mkdir(parents=True)
    folder.run_json.write_text("{}")
    folder.job.write_text(job)
    folder.claims.mkdir()
    (folder.claims / "1").symlink_to(f"{job}-0")
    if verdict is not None:
        (start / "verdict").write_text(verdict)
    os.utime(start, (start.stat().st_mtime - age,) * 2)
    return write_environment(folder.environment)


def test_clean_finds_the_secrets_of_runs_that_are_over(tmp_path: Path) -> None:
    expected = {
        make_run(tmp_path, "done", job="1", verdict="done"),
        make_run(tmp_path, "lost", job="2"),
        make_run(tmp_path, "stopped-long-ago", job="3", verdict="stopped", age=8 * 86400),
        make_run(tmp_path, "timeout", job="4"),
    }
    make_run(tmp_path, "running", job="5")
    make_run(tmp_path, "waiting", job="6")
    make_run(tmp_path, "stopped", job="7", verdict="stopped")
    make_run(tmp_path, "preempted", job="8")
    without = make_run(tmp_path, "without", job="9", verdict="done")
    without.write_text("export PLAIN=1\n")
    sweep = SweepFolder(tmp_path / "project" / "base" / "sweep")
    for number, ended in ((1, True), (2, False)):
        path = write_environment(sweep.submission(number) / "environment.sh")
        expected |= {path} if ended else set()
    sweep.trial(0).path.mkdir(parents=True)
    (sweep.trial(0).path / "result.json").touch()
    jobs = [
        {"job": "20", "submission": "1", "tasks": {"0": [0]}},
        {"job": "21", "submission": "2", "tasks": {"0": [1]}},
    ]
    sweep.jobs.write_text("".join(json.dumps(line) + "\n" for line in jobs))
    known = {"4": "TIMEOUT", "5": "RUNNING", "6": "PENDING", "8": "PREEMPTED", "21_0": "RUNNING"}

    def query(wanted: Iterable[str]) -> Mapping[str, JobState]:
        return {job: JobState(job, known[job], "", "", "", "") for job in wanted if job in known}

    found = find_ended_secrets(tmp_path, query)
    assert {Path(each.path) for each in found} == expected
    assert all("secrets: A_KEY, B" in each.reason and HUSH not in each.reason for each in found)
    assert all(each.remove() for each in found)
    assert {path.read_text() for path in expected} == {REDUCED}
    assert not find_ended_secrets(tmp_path, query)


def test_cancelling_a_queued_run_removes_its_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_run(tmp_path, "queued", job="1")
    monkeypatch.setattr("paceline.slurm.commands.cancel_jobs", lambda jobs: None)
    cancel_run(RunFolder(path.parent), running=False)
    assert path.read_text() == REDUCED
