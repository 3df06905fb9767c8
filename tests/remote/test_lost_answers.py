"""A link that is lost in the middle of `submit`: the same command, typed again, submits nothing twice."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.remote.lab import Lab
from tests.remote.relay import Relay
from tests.remote.test_forward import start
from tests.slurm.harness import Cluster
from tests.until import until

Laptop = Callable[..., subprocess.CompletedProcess[str]]
SUBMIT = (
    "submit",
    "--on",
    "link",
    "--cpu",
    "--nproc",
    "1",
    "-t",
    "5",
    "--no-check",
    "train.py",
    "a b",
)
# An sbatch that tells when Slurm has the job, and gives its answer when it is allowed to. The job does not start, since
# then it would record its own id.
SBATCH = """\
#!/bin/sh
case "$*" in *--test-only*|*--version*) exec {sbatch} "$@";; esac
answer=$({sbatch} --begin=now+1hour "$@") || exit
touch "$HOME/accepted"
while [ -e "$HOME/hold" ]; do sleep 0.05; done
echo "$answer"
"""


@pytest.fixture
def waiting(
    lab: Lab, slurm_link: Relay, project: Path, laptop: Laptop
) -> Iterator[subprocess.Popen[str]]:
    """A command whose job Slurm has, and whose answer is still to come."""
    tools = lab.home / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "sbatch").write_text(SBATCH.format(sbatch=shutil.which("sbatch")))
    (tools / "sbatch").chmod(0o755)
    (lab.home / "hold").touch()
    (project / "train.py").write_text("import time\ntime.sleep(600)\n")
    (project / "paceline.toml").write_text(
        '[profiles.link]\nhost = "link"\nsetup = "PATH=$HOME/tools:$PATH"\n'
    )
    lab.configure("ServerAliveInterval 1", "ServerAliveCountMax 2")
    laptop("login", "link", check=True)
    with start(
        lab,
        *SUBMIT,
        cwd=project,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as it:
        until((lab.home / "accepted").exists)
        yield it
    for path in (lab.home / "accepted", lab.home / "hold", tools / "sbatch"):
        path.unlink(missing_ok=True)


SLOW = [pytest.param(end, marks=pytest.mark.slow) for end in ("killed", "silent", "command killed")]


@pytest.mark.parametrize("end", ["cut", *SLOW])
def test_the_same_command_gives_one_job(
    lab: Lab,
    laptop: Laptop,
    slurm_node: Cluster,
    slurm_link: Relay,
    *,
    waiting: subprocess.Popen[str],
    end: str,
) -> None:
    (first,) = slurm_node.queue()
    if end == "cut":  # the command there notices, and withdraws the job
        slurm_link.cut()
    elif end == "killed":  # nothing there can notice
        lab.cut()
    # as by a limit on memory: the connection stays open
    elif end == "command killed":
        (process,) = [each for each in lab.processes() if "start.py" in each]
        os.kill(int(process.split()[0]), signal.SIGKILL)
        (lab.home / "hold").unlink()
    else:  # the command there goes on, and its answer does not arrive
        slurm_link.stall()
        (lab.home / "hold").unlink()
    output, errors = waiting.communicate(timeout=60)
    assert waiting.returncode == 1, output
    assert "The job may or may not be in the queue" in errors
    assert "repeat the command. It reports the job if there is one" in errors
    slurm_link.cut()
    lab.wait_until_empty(60)
    slurm_link.restore()
    (lab.home / "hold").unlink(missing_ok=True)
    laptop("login", "link", check=True)
    if end == "killed":
        assert_nothing_happens_while_slurm_is_silent(lab, laptop, slurm_node)
    # the same command: this only answers a question
    again = laptop("submit", "--yes", *SUBMIT[1:], check=True)
    assert "looks for its job first" in again.stderr
    (job,) = slurm_node.queue()
    assert f"as job {job.partition('_')[0]}" in again.stdout.replace("submitted", "", 1)
    assert (job == first) == (end != "cut") == ("not submitted again" in again.stdout)
    assert re.search(r"paceline logs -f \S+ --on link", again.stdout)
    lab.wait_until_idle()
    if end == "silent":  # its answer has arrived, so the same command once more is one more job
        laptop(*SUBMIT, check=True)
        assert len(slurm_node.queue()) == 2


def assert_nothing_happens_while_slurm_is_silent(
    lab: Lab, laptop: Laptop, slurm_node: Cluster
) -> None:
    squeue = lab.home / "tools" / "squeue"
    squeue.write_text("#!/bin/sh\necho 'squeue: error: Socket timed out' >&2\nexit 1\n")
    squeue.chmod(0o755)
    try:
        done = laptop(*SUBMIT)
    finally:
        squeue.unlink()
    assert done.returncode == 1, done.stdout
    assert (
        "Cannot find out whether Slurm has the job: squeue failed: Socket timed out" in done.stderr
    )
    assert (
        "Nothing was submitted or cancelled. Repeat your command once Slurm responds."
        in done.stderr
    )
    assert len(slurm_node.queue()) == 1
