"""`paceline submit --on`: the laptop's code runs on a real Slurm behind a real sshd."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.remote.lab import Lab
from tests.slurm.harness import Cluster

Laptop = Callable[..., subprocess.CompletedProcess[str]]
SCRIPT = """\
import hashlib, json, os, sys
from helper import TEXT
token = hashlib.sha256(os.environ.get("MY_TOKEN", "").encode()).hexdigest()
print(json.dumps({"args": sys.argv[1:], "text": TEXT, "token": token, "user": os.getuid()}))
"""
ARGS = [
    "--lr",
    "0.1",
    "a b",
    "it's",
    '"$(touch injected)"',
    "`x`",
    "a\nb",
    "é",
    "-",
    "--on",
    "elsewhere",
    "*",
]
SMALL = ("--on", "slurm", "--cpu", "--nproc", "1", "-t", "5")


@pytest.fixture
def slurm(slurm_node: Cluster, lab: Lab, project: Path, laptop: Laptop) -> Iterator[Laptop]:
    """A command of the laptop, logged in to `slurm`, in a repository with code."""
    (project / "train.py").write_text(SCRIPT)
    (project / "helper.py").write_text("TEXT = 'committed'\n")
    (project / ".gitignore").write_text("data/\n")
    commit = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first"]
    for argv in (["init", "-q"], ["add", "-A"], commit):
        subprocess.run(["git", *argv], cwd=project, check=True)
    laptop("login", "slurm", check=True)
    yield laptop
    slurm_node.clear()


def outputs(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[line.index("{") :]) for line in text.splitlines() if '{"args"' in line]


def test_the_laptops_code_runs_there(lab: Lab, project: Path, slurm: Laptop) -> None:
    """With what is not committed yet, without what git ignores; arguments arrive byte for byte."""
    cache = lab.home / ".cache/paceline"
    earlier = set(cache.glob("secrets-*"))  # of commands that never started
    (project / "helper.py").write_text("TEXT = 'changed since'\n")
    (project / "data").mkdir()
    (project / "data" / "big.bin").write_bytes(b"x" * 1000)
    script = str(project / "train.py")  # a path of the laptop's, which the cluster does not have
    done = slurm("submit", *SMALL, "-J", "first", "--follow", script, *ARGS, "--data=data/big.bin")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "these are not sent" in done.stderr
    assert "project: data/big.bin." in done.stderr
    assert "paceline data push data/big.bin --on slurm" in done.stderr
    (output,) = outputs(done.stdout)
    assert output["args"] == [*ARGS, "--data=data/big.bin"]
    assert output["text"] == "changed since"
    assert output["user"] == os.stat(lab.home).st_uid != os.getuid()
    assert re.search(r"paceline logs -f \S+ --on slurm", done.stdout)
    runs = json.loads(slurm("ps", "--on", "slurm", "--json", check=True).stdout)["runs"]
    run = next(each for each in runs if each["name"] == "first")
    assert run["status"] == "done"
    folder = lab.home / "paceline" / "project" / "default" / run["run_id"]
    assert folder.is_dir()
    record = json.loads((folder / "run.json").read_text())
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=project, text=True, capture_output=True, check=True
    )
    assert (record["code"]["commit"], record["code"]["changed"]) == (head.stdout.strip(), True)
    assert sorted(os.listdir(folder / "code")) == [
        ".gitignore",
        "helper.py",
        "paceline.toml",
        "train.py",
    ]
    assert outputs(slurm("logs", "first", "--on", "slurm", check=True).stdout)
    assert "first" in slurm("show", "--on", "slurm", "first", check=True).stdout
    assert not (project / "injected").exists()
    lab.wait_until_idle()
    assert set(cache.glob("secrets-*")) <= earlier


@pytest.mark.slow
@pytest.mark.parametrize("program", ["rsync", "tar"])
def test_only_what_has_changed_is_sent(
    lab: Lab, project: Path, slurm: Laptop, tmp_path: Path, program: str
) -> None:
    """Without rsync, too, the code arrives; with it, equal files are linked."""
    code, more = lab.home / ".cache/paceline/code", {}
    if program == "tar":
        (tmp_path / "rsync").write_text("#!/bin/sh\nexit 12\n")
        (tmp_path / "rsync").chmod(0o755)
        more["PATH"] = f"{tmp_path}:{lab.bin}:{os.environ['PATH']}"
    (project / "large.txt").write_text("large\n" * 1000)
    slurm("submit", *SMALL, "--dry-run", "train.py", check=True, **more)
    before = set(code.iterdir())
    (project / "helper.py").write_text("TEXT = 'again'\n")
    (project / "link.txt").symlink_to("large.txt")
    (project / "tool.sh").write_text("#!/bin/sh\n")
    (project / "tool.sh").chmod(0o755)
    slurm("submit", *SMALL, "--dry-run", "train.py", check=True, **more)
    (newest,) = [path / "project" for path in set(code.iterdir()) - before]
    assert os.readlink(newest / "link.txt") == "large.txt"
    assert os.access(newest / "tool.sh", os.X_OK)
    assert (newest / "large.txt").read_text() == "large\n" * 1000
    assert ((newest / "large.txt").stat().st_nlink > 1) == (program == "rsync")
    (newest / "large.txt").unlink()  # as sites do with old files of caches
    (newest / "helper.py").write_text("TEXT = 'changed there'\n")
    done = slurm("submit", *SMALL, "--follow", "train.py", check=True, **more)
    assert outputs(done.stdout)[0]["text"] == "again"
    assert (newest / "large.txt").read_text() == "large\n" * 1000


@pytest.mark.slow
def test_a_job_in_the_project_has_a_folder_of_its_own(
    lab: Lab, project: Path, slurm: Laptop
) -> None:
    (project / "results.csv").write_text("loss\n")
    (project / "config.json").write_text("[1]")
    (project / "train.py").write_text(
        "from pathlib import Path\n"
        "print('found', Path('results.csv').read_text().split(), Path('config.json').read_text())\n"
        "Path('results.csv').open('a').write('0.5\\n')\nPath('config.json').write_text('[2]')\nPath('model.pt').touch()\n"
    )
    work = lab.home / ".cache/paceline/work"
    slurm("submit", *SMALL, "--dry-run", "--workdir", "project", "train.py", check=True)
    earlier = set(work.glob("*"))
    for _ in range(2):
        done = slurm("submit", *SMALL, "--workdir", "project", "--follow", "train.py", check=True)
        assert "found ['loss'] [1]" in done.stdout
    own = set(work.iterdir()) - earlier
    assert len(own) == 2
    for folder in own:
        assert (folder / "project/results.csv").read_text() == "loss\n0.5\n"
        assert (folder / "project/model.pt").exists()


def test_secrets_go_over_the_connection_and_nowhere_else(
    lab: Lab, project: Path, slurm: Laptop
) -> None:
    secret = "hush-4711-hush"
    (project / ".env").write_text(f"MY_TOKEN={secret}\n")
    (project / ".env").chmod(0o600)
    done = slurm("submit", *SMALL, "--follow", "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MY_TOKEN (.env) will be sent to slurm" in done.stderr
    assert outputs(done.stdout)[0]["token"] == hashlib.sha256(secret.encode()).hexdigest()
    assert not lab.on_node(f"grep -rl {secret} {lab.home} || true").stdout
    # not started yet
    slurm("submit", *SMALL, "--script-only", str(lab.home / "job.sh"), "train.py", check=True)
    (holder,) = map(Path, lab.on_node(f"grep -rl {secret} {lab.home} || true").stdout.split())
    assert holder.name == "environment.sh"
    assert holder.stat().st_mode & 0o777 == 0o600


def test_a_script_that_would_not_be_sent_is_refused(project: Path, slurm: Laptop) -> None:
    (project / "data").mkdir()
    (project / "data" / "train.py").write_text(SCRIPT)
    done = slurm("submit", *SMALL, "data/train.py")
    assert done.returncode == 2
    assert "data/train.py would not be sent" in done.stderr
    (project / "huge.txt").write_bytes(b"1" * (3 << 20))
    done = slurm("submit", *SMALL, "--snapshot-limit", "1M", "train.py")
    assert "Most is in huge.txt" in done.stderr


@pytest.mark.slow  # test_forward.py has exit codes and errors of commands
def test_exit_codes_profiles_and_errors_are_those_of_the_other_side(
    project: Path, slurm: Laptop
) -> None:
    with (project / "paceline.toml").open("a") as file:
        file.write(
            '[profiles.slurm.project]\nexperiment = "far"\n[profiles.slurm.job]\npartition = "nowhere"\n'
        )
    done = slurm("submit", *SMALL, "train.py")
    assert done.returncode == 2
    assert "nowhere" in done.stderr
    partition = re.search(
        r"--partition=(\S+)", slurm("submit", *SMALL, "--dry-run", "train.py").stdout
    )
    assert partition is not None
    assert partition[1] == "nowhere"
    (project / "train.py").write_text("raise SystemExit(3)\n")
    done = slurm("submit", *SMALL, "-p", "main", "--max-attempts", "1", "--wait", "train.py")
    assert done.returncode == 1
    assert "exit code 3" in done.stderr
    done = slurm("env", "build", "--on", "slurm")
    assert f"{project.resolve()} has nothing to build from" in done.stderr
    with (project / "paceline.toml").open("a") as file:
        file.write('[profiles.slurm.environment]\nkind = "venv"\npath = "/root/venv"\n')
    done = slurm("submit", *SMALL, "-p", "main", "train.py")
    closed = f"environment.path in profile slurm of {project.resolve()}/paceline.toml"
    assert f"There is no venv in /root/venv ({closed})" in done.stderr
    assert "ask its owner for access" in done.stderr


def test_a_job_is_cancelled_from_the_laptop(
    slurm_node: Cluster, project: Path, slurm: Laptop
) -> None:
    (project / "train.py").write_text("import time\ntime.sleep(600)\n")
    (project / "sub").mkdir()
    slurm("submit", *SMALL, "-J", "long", "../train.py", check=True, cwd=project / "sub")
    slurm("cancel", "long", "--on", "slurm", check=True)
    done = slurm("wait", "long", "--on", "slurm")
    assert done.returncode != 0
    assert not slurm_node.queue()


@pytest.mark.slow
def test_a_sweeps_own_secrets_go_along_and_hints_name_the_cluster(
    lab: Lab, project: Path, slurm: Laptop
) -> None:
    (project / "keys.txt").write_text("OTHER_TOKEN=hush-0815\n")
    (project / "keys.txt").chmod(0o600)
    (project / "sweep.toml").write_text(
        '[sweep]\nscript = "train.py"\nname = "own"\n[space]\nx = [1, 2]\n'
        '[environment]\nsecrets = ["MY_TOKEN"]\nsecret_files = ["keys.txt"]\n'
    )
    done = slurm("sweep", *SMALL, "--parallel", "1", "sweep.toml", check=True, MY_TOKEN="hush-4712")
    assert "MY_TOKEN" in done.stderr
    assert "OTHER_TOKEN (keys.txt)" in done.stderr
    assert "paceline sweep show own --on slurm" in done.stdout
    assert "paceline sweep cancel own --on slurm" in done.stdout
    slurm("wait", "own", "--on", "slurm", check=True)
    (output, _) = outputs(slurm("logs", "own-0", "--on", "slurm", check=True).stdout * 2)
    assert output["token"] == hashlib.sha256(b"hush-4712").hexdigest()
    assert not list((lab.home / ".cache/paceline/code").glob("*/project/keys.txt"))
    done = slurm("logs", "--rank", "7", "own-0", "--on", "slurm")
    assert done.returncode == 2
    done = slurm("cancel", "own", "--on", "slurm")
    assert "paceline sweep cancel own --on slurm" in done.stderr


def test_it_asks_before_code_travels_for_the_first_time(
    lab: Lab, project: Path, slurm: Laptop
) -> None:
    code_there = lab.home / ".cache" / "paceline" / "code"

    def ask(answer: bytes | None, *more: str) -> tuple[int, str]:
        child, terminal = pty.fork()
        if child == 0:
            os.chdir(project)
            argv = [
                sys.executable,
                "-m",
                "paceline",
                "submit",
                *SMALL,
                *(more or ["--dry-run"]),
                "train.py",
            ]
            os.execve(sys.executable, argv, {**os.environ, **lab.variables, "MY_TOKEN": "hush"})
        seen = b""
        with suppress(OSError):  # the terminal is gone once the command is
            while part := os.read(terminal, 4096):
                seen += part
                if answer is not None and b"Send it? [y/N]" in seen:
                    os.write(terminal, answer)
                    answer = None
        _, status = os.waitpid(child, 0)
        os.close(terminal)
        return os.waitstatus_to_exitcode(status), seen.decode()

    def stored() -> int:
        return len(list(code_there.iterdir()))

    (project / "helper.py").write_text("TEXT = 'never seen before'\n")
    before = stored()
    code, seen = ask(b"n\n")
    assert code == 2
    assert "for the first time" in seen
    assert "Nothing was sent" in seen
    assert stored() == before
    assert ask(b"\n")[0] == 2
    assert stored() == before
    code, seen = ask(b"y\n")
    assert code == 0, seen
    assert stored() > before
    code, seen = ask(None)
    assert code == 0, seen
    assert "Send it?" not in seen
    sends_secrets = ("--script-only", f"{lab.home}/job.sbatch", "--secret", "MY_TOKEN")
    code, seen = ask(b"n\n", *sends_secrets)
    assert code == 2
    assert "MY_TOKEN (your environment) will be sent to slurm for the first time" in seen
    code, seen = ask(None, *sends_secrets, "--yes")
    assert code == 0, seen
    assert "Send it?" not in seen


def test_sweeps_shells_and_checks(lab: Lab, project: Path, slurm: Laptop) -> None:
    (project / "sweep.toml").write_text(
        '[sweep]\nscript = "train.py"\nname = "two"\n[space]\nx = [1, 2]\n'
    )
    slurm("sweep", *SMALL, "sweep.toml", check=True)
    assert json.loads(slurm("sweep", "show", "two", "--json", "--on", "slurm", check=True).stdout)
    assert "train.py compiles" in slurm("doctor", "--job", *SMALL, "train.py", check=True).stdout
    done = slurm(
        "shell", "--on", "slurm", "--cpu", "-t", "5", input="echo $SLURM_JOB_ID $(id -u); exit 5\n"
    )
    assert done.returncode == 5, done.stderr
    assert re.search(rf"^\d+ {os.stat(lab.home).st_uid}$", done.stdout, re.MULTILINE)
    assert "are not copied back to your laptop" in done.stderr


def test_the_partitions_of_the_cluster_go_into_its_profile(project: Path, slurm: Laptop) -> None:
    shown = slurm("init", "--on", "slurm", check=True).stdout
    assert '[profiles.slurm.job]\npartition = "main"\ngpus_per_node = 1\n' in shown
    with open(project / "paceline.toml", "a") as file:
        file.write(shown)
    script = slurm("submit", "--on", "slurm", "-t", "5", "--dry-run", "train.py", check=True).stdout
    assert "#SBATCH --partition=main\n" in script
    (project / "requirements.txt").write_text("numpy\n")
    assert (
        "#SBATCH --partition=main\n"
        in slurm("env", "build", "--on", "slurm", "--dry-run", check=True).stdout
    )
