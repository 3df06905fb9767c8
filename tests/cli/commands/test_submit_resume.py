"""`paceline submit --resume` with stand-ins for Slurm's commands, and `paceline run --resume` on a login node."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.cli.commands import run as cli_run
from paceline.contract.checkpoint import CHECKPOINT_MARKER
from paceline.contract.run_folder import RunFolder
from paceline.errors import UsageError

Completed = subprocess.CompletedProcess[str]

# `jobs` has one line per job: its id and its state. `rejected` makes sbatch fail; `slow` makes it wait.
COMMANDS = {
    "sbatch": """\
cd "$(dirname "$0")"
if [ -e rejected ]; then echo "sbatch: error: no such partition" >&2; exit 1; fi
if [ -e slow ]; then touch asked; fi
while [ -e slow ]; do sleep 0.02; done
number=$(( $(cat jobs 2>/dev/null | wc -l) + 11 ))
echo "$number $*" >>submitted
ls "$RUNS"/*/*/*/cancelled 2>/dev/null >>marks
echo "$number PENDING" >>jobs
echo "$number" """,
    "squeue": """\
cd "$(dirname "$0")"
while read -r job state; do
    printf '%s\\037%s\\037None\\037\\037\\0370:00\\n' "$job" "$state"
done <jobs""",
    "scancel": """cd "$(dirname "$0")"; sed -i "s/^$1 .*/$1 CANCELLED/" jobs""",
    "sinfo": "exit 1",
    "sacct": "exit 1",
    "scontrol": "exit 1",
}


@dataclass(frozen=True)
class Login:
    """A login node of a cluster that never starts a job."""

    bin: Path
    project: Path
    scratch: Path
    call: Callable[..., Completed]

    def __call__(self, *args: str, **options: str) -> Completed:
        path = f"{self.bin}:{os.environ['PATH']}"
        return self.call(*args, cwd=self.project, PATH=path, RUNS=str(self.scratch), **options)

    def submit(self, *args: str) -> Completed:
        done = self("submit", "--no-check", *args)
        assert done.returncode == 0, done.stderr
        return done

    def end(self, state: str) -> None:
        lines = (self.bin / "jobs").read_text().splitlines()
        (self.bin / "jobs").write_text("".join(f"{line.split()[0]} {state}\n" for line in lines))

    @property
    def run(self) -> RunFolder:
        (path,) = self.scratch.glob("*/*/*/run.json")
        return RunFolder(path.parent)

    def spec(self) -> dict[str, object]:
        value: dict[str, object] = json.loads(self.run.launch_spec.read_text())
        return value


@pytest.fixture
def login(tmp_path: Path, scratch: Path, paceline: Callable[..., Completed]) -> Login:
    made = Login(tmp_path / "bin", tmp_path / "project", scratch, paceline)
    made.bin.mkdir()
    made.project.mkdir()
    for name, text in COMMANDS.items():
        (made.bin / name).write_text(f"#!/bin/bash\n{text}\n")
        (made.bin / name).chmod(0o755)
    (made.project / "train.py").write_text("print('first')\n")
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): os.readlink(path).encode()
        if path.is_symlink()
        else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_a_run_goes_on_in_the_queue(login: Login) -> None:
    login.submit(
        "--time",
        "10m",
        "--name",
        "mine",
        "--param",
        "lr=1",
        "--env",
        "A=1",
        "train.py",
        "--epochs",
        "2",
    )
    first = login.run
    live = login("submit", "--no-check", "--resume", "mine")
    assert live.returncode == 2
    assert f"Run {first.path.name} is queued as job 11." in live.stderr
    (login.project / "train.py").write_text("print('second')\n")
    cancelled = login("cancel", "mine")
    again = f"paceline submit --resume {first.path.name}  (its ranks had not started)"
    assert f"  continue  {again}\n" in cancelled.stdout
    assert f"continue   {again}\n" in login("show").stdout

    # Slurm rejects the new job: all is as it was.
    before = contents(first.path)
    (login.bin / "rejected").touch()
    refused = login("submit", "--no-check", "--resume", "11", "train.py")
    assert "no such partition" in refused.stderr
    assert contents(first.path) == before
    assert first.cancelled.exists()
    (login.bin / "rejected").unlink()

    # Without a script, the run keeps its arguments, its code and what is not typed.
    again = login.submit("--resume", "mine", "--time", "2h", "--nodes", "2")
    assert "the copy that the run already has" in again.stderr
    assert f"submitted {first.path.name} as job 12: 2 nodes" in again.stdout
    assert (first.code / "train.py").read_text() == "print('first')\n"
    script, spec = first.script.read_text(), login.spec()
    assert "#SBATCH --time=02:00:00\n" in script
    assert "#SBATCH --job-name=mine\n" in script
    assert (spec["args"], spec["nodes"], spec["params"]) == (["--epochs", "2"], 2, {"lr": 1})
    assert spec["variables"] == {"A": "1"}
    assert not first.cancelled.exists()
    assert not (login.bin / "marks").read_text(), "no job was submitted while the mark was there"
    shown = login("show", "mine").stdout
    assert "12 (earlier: 11)" in shown
    record = json.loads(first.run_json.read_text())
    assert (record["nodes"], len(record["earlier"])) == (2, 1)

    # With a script, it takes these arguments and today's code.
    login.end("FAILED")
    new = login.submit("--resume", "last", "train.py", "--epochs", "5")
    assert f"a new copy of {login.project}" in new.stderr
    assert (first.code / "train.py").read_text() == "print('second')\n"
    assert login.spec()["args"] == ["--epochs", "5"]
    assert "#SBATCH --time=02:00:00\n" in first.script.read_text()
    assert login("show", "mine").stdout.splitlines()[5:10] == [
        "command    paceline submit --no-check --resume last train.py --epochs 5",
        "script     train.py --epochs 5",
        "earlier    paceline submit --no-check --time 10m --name mine --param lr=1 --env A=1 train.py --epochs 2",
        "           paceline submit --no-check --resume mine --time 2h --nodes 2",
        f"folder     {first.path}",
    ]


def test_a_submission_whose_answer_was_lost_finds_its_job(login: Login) -> None:
    typed = ("submit", "--no-check", "train.py")
    assert login(*typed, PACELINE_REQUEST="abc1").returncode == 0
    run = login.run.path.name
    again = login(*typed, PACELINE_REQUEST="abc1", PACELINE_REPEATED="1")
    assert f"submitted {run} as job 11, when you typed this command earlier" in again.stdout
    other = login(*typed, PACELINE_REQUEST="def2", PACELINE_REPEATED="1")
    assert "as job 12" in other.stdout, "nothing of it was submitted"
    assert len((login.bin / "submitted").read_text().splitlines()) == 2


def test_a_run_resumes_in_its_environment_unless_its_requirements_change(login: Login) -> None:
    (login.project / "requirements.txt").write_text("numpy\n")
    (login.project / "new.txt").write_text("numpy\nscipy\n")
    login.submit("--environment", "venv", "--requirements", "requirements.txt", "train.py")
    login.end("CANCELLED")
    (login.project / "requirements.txt").write_text("torch\n")
    submitted, again, other = (
        set(re.findall(r"\.environments/(\w+)", text))
        for text in (
            login.run.script.read_text(),
            login("submit", "--resume", "last", "--dry-run").stdout,
            login("submit", "--resume", "last", "--dry-run", "--requirements", "new.txt").stdout,
        )
    )
    assert submitted == again != other
    assert len(submitted) == len(other) == 1


def test_a_secret_in_setup_is_hidden_and_goes_on(login: Login) -> None:
    lines = ["ulimit -n 4096", "export FOO_TOKEN='hush one'", "export FOO_TOKEN=hush2; export B=1"]
    login.submit(*(f"--setup={line}" for line in lines), "--param=api_key=hush3", "train.py")
    folder = login.run
    record = json.loads(folder.run_json.read_text())
    assert record["spec"]["environment"]["setup"] == [
        lines[0],
        "export FOO_TOKEN='***'",
        "export FOO_TOKEN=*** export B=1",
    ]
    login.end("FAILED")
    login.submit("--resume", "last")
    assert "\n".join(lines) in folder.script.read_text(), "the job has the lines themselves"
    readable = [
        path for path in folder.path.rglob("*") if path.is_file() and path.stat().st_mode & 0o077
    ]
    assert folder.run_json in readable
    assert not [path for path in readable if b"hush" in path.read_bytes()]


def test_a_run_of_another_version_goes_on(login: Login) -> None:
    """Its launch spec has no lines of `setup`, and its record has a key that nobody knows."""
    login.submit("--setup=ulimit -n 4096", "train.py")
    folder = login.run
    spec, record = (json.loads(path.read_text()) for path in (folder.launch_spec, folder.run_json))
    del spec["setup"]
    record["spec"]["data"]["verify"] = "size"
    folder.launch_spec.write_text(json.dumps(spec))
    folder.run_json.write_text(json.dumps(record))
    login.end("FAILED")
    login.submit("--resume", "last")
    assert "\nulimit -n 4096\n" in folder.script.read_text()


def test_two_commands_do_not_submit_one_run(login: Login) -> None:
    login.submit("--name", "mine", "train.py")
    login.end("FAILED")
    (login.bin / "slow").touch()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(login, "submit", "--no-check", "--resume", "mine")
        try:
            while not (login.bin / "asked").exists():
                assert not first.done(), first.result().stderr
                time.sleep(0.02)
            second = pool.submit(login, "submit", "--no-check", "--resume", "mine")
            wait([second], timeout=30)
        finally:
            (login.bin / "slow").unlink()
    assert (first.result().returncode, second.result().returncode) == (0, 2)
    assert f"Another command is submitting run {login.run.path.name} now." in second.result().stderr
    assert len((login.bin / "submitted").read_text().splitlines()) == 2
    assert login.run.job.read_text() == "12\n"


def test_a_local_run_goes_on_in_the_queue(login: Login) -> None:
    first = login(
        "run",
        "--cpu",
        "--nproc",
        "1",
        "--param",
        "lr=3",
        "--name",
        "loc",
        "--env",
        "FOO=1",
        "--env",
        "API_KEY=hush",
        "--max-restarts",
        "2",
        "train.py",
        "--epochs",
        "2",
    )
    assert first.returncode == 0, first.stderr
    (login.project / "paceline.toml").write_text('[job]\npartition = "gpu"\n')
    done = login.submit("--resume", "loc", "--time", "1h")
    assert (
        f"{login.run.path.name} is done and has no checkpoint: its script starts from the beginning"
        in done.stderr
    )
    assert "pass these --env variables again if needed: API_KEY" in done.stderr
    assert f"a new copy of {login.project}" in done.stderr
    assert "#SBATCH --partition=gpu\n" in login.run.script.read_text()
    spec = login.spec()
    assert (spec["args"], spec["params"], spec["program"]) == (
        ["--epochs", "2"],
        {"lr": 3},
        f"{login.run.work}/project/train.py",
    )
    assert (spec["variables"], spec["max_restarts"]) == ({"FOO": "1"}, 2)
    assert "name       loc\n" in login("show", "loc").stdout


def test_a_run_that_is_done_needs_more_to_do(login: Login) -> None:
    login.submit("--name", "mine", "train.py", "--epochs", "2")
    run = login.run
    end_well(login, "11")
    before = contents(run.path)
    for more in ([], ["--time", "8h", "--nodes", "2"], ["--dry-run"]):
        refused = login("submit", "--no-check", "--resume", "mine", *more)
        assert refused.returncode == 2
        assert f"Run {run.path.name} is done, so there is nothing left to do." in refused.stderr
        assert f"paceline submit --resume {run.path.name} train.py --epochs 20" in refused.stderr
        assert "paceline submit --name NEW train.py" in refused.stderr
    assert contents(run.path) == before
    assert len((login.bin / "submitted").read_text().splitlines()) == 1

    # More epochs; then that job never starts, and the run is submitted once more as it is.
    assert "is done" not in login.submit("--resume", "mine", "train.py", "--epochs", "20").stderr
    assert login.spec()["args"] == ["--epochs", "20"]
    login.end("FAILED")
    login.submit("--resume", "mine")
    end_well(login, "13")
    login.submit("--resume", "mine", "train.py", "--epochs", "20")
    end_well(login, "14")
    (run.path / "job-starts" / "14-0" / "unsaved").touch()  # its last steps are repeated
    login.submit("--resume", "mine")
    end_well(login, "15")
    login.submit("--resume", "mine", "--param", "epochs=30")
    end_well(login, "16")
    login.submit("--resume", "mine", "--env", "EPOCHS=30")


def end_well(login: Login, job: str) -> None:
    """Do what a job does until its run is done, with a checkpoint."""
    run = login.run
    start = run.path / "job-starts" / f"{job}-0"
    start.mkdir(parents=True)
    (start / "verdict").write_text("done\n")
    run.claims.mkdir(exist_ok=True)
    (run.claims / str(len(list(run.claims.iterdir())) + 1)).symlink_to(start.name)
    checkpoint = run.path / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / CHECKPOINT_MARKER).write_text("{}")
    login.end("COMPLETED")


def test_a_slurm_run_is_not_trained_on_a_login_node_by_accident(
    tmp_path: Path, login: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run-1")
    folder.path.mkdir()
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(login.bin))
        patch.delenv("SLURM_JOB_ID", raising=False)
        cli_run.require_place(folder)  # a local run
        folder.job.write_text("11\n")
        with pytest.raises(UsageError, match=r"submitted to Slurm \(job 11\)") as refused:
            cli_run.require_place(folder)
        assert "paceline submit --resume run-1" in refused.value.hint
        patch.setenv("SLURM_JOB_ID", "5")  # inside an allocation
        cli_run.require_place(folder)


def test_after_a_run_that_is_over(login: Login) -> None:
    login.submit("--name", "first", "train.py")
    first = login.run
    shown = login("submit", "--dry-run", "--after", "first", "train.py").stdout
    assert "--dependency=afterok:11 --kill-on-invalid-dep=yes" in shown
    login.end("FAILED")
    refused = login("submit", "--no-check", "--after", "first", "train.py")
    assert refused.returncode == 2
    assert "Invalid --after first: that run has ended: failed." in refused.stderr
    assert f"paceline submit --resume {first.path.name}" in refused.stderr
    (login.bin / "jobs").write_text("11 FAILED\n12 COMPLETED\n13 FAILED\n")
    assert (
        "--after 13: job 13 has ended: failed."
        in login("submit", "--after", "13", "train.py").stderr
    )
    done = login.submit("--after", "12", "train.py")
    assert "12 is already done" in done.stderr
    assert "--dependency" not in (login.bin / "submitted").read_text()
