"""Which files a queued job reads: those of the submission, or with --no-snapshot the current ones; where it writes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from paceline.contract.run_folder import RunFolder
from tests.slurm.harness import Cluster
from tests.slurm.runs import PLAIN, Paceline, diagnostics, project, rank_reports, run_of
from tests.until import until

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("without_torch")]
SMALL = ("--style", "srun", "--nproc", "1", "--cpu", "--time", "10m", "--sbatch-arg=--hold")


def test_code_changes_while_a_job_is_queued(
    tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    home = project(tmp_path / "project", "import part\n" + PLAIN + "print('part', part.VALUE)\n")
    (home / "part.py").write_text("VALUE = 'then'\n")
    snapshotted = slurm_paceline("submit", *SMALL, "train.py", cwd=home, check=True)
    live = slurm_paceline("submit", *SMALL, "--no-snapshot", "train.py", cwd=home, check=True)
    (home / "part.py").write_text("VALUE = 'now'\n")
    folders = [run_of(completed) for completed in (snapshotted, live)]
    jobs = [folder.job.read_text().strip() for folder in folders]
    cluster.run(["scontrol", "release", *jobs])
    roots = (folders[0].work / "project", home)
    for folder, job, where, value in zip(folders, jobs, roots, ("then", "now"), strict=True):
        assert cluster.wait(job, timeout=300) == "COMPLETED", diagnostics(folder)
        assert rank_reports(folder)[0]["file"] == str(where / "train.py")
        assert rank_reports(folder)[0]["cwd"] == str(where)
        assert rank_reports(folder)[0]["environ"]["PACELINE_SOURCE_DIR"] == str(where)
        assert f"part {value}\n" in folder.attempt(1).log(0).read_text()
    assert not folders[1].code.exists()
    changed = slurm_paceline("show", str(folders[0].path), "--diff", cwd=home, check=True)
    assert changed.stdout.splitlines()[:2] == ["--- run/part.py", "+++ now/part.py"]
    in_place = slurm_paceline("show", str(folders[1].path), "--diff", cwd=home)
    assert in_place.returncode == 1
    assert "runs, or ran, in place" in in_place.stderr


# Reads its settings as many scripts do, and resumes from a file of its own.
READS = """\
import os, signal, sys, time
from pathlib import Path

if "fail" in sys.argv:
    open("model.pt")
exec(open("configurator.py").read())
print("read", open("config.yaml").read(), value, open("data/x.bin").read(), open("../beside.txt").read())
root = Path(__file__).resolve().parent
print("beside the script", (root / "data/x.bin").exists(), (root / "config.yaml").read_text())
state = Path("out") / os.environ["RANK"]
if state.exists():
    print("continues", state.read_text())
    raise SystemExit
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
state.parent.mkdir(exist_ok=True)
state.write_text("from the first start")
while "stop" in sys.argv:
    time.sleep(0.05)
"""


def read_lines(folder: RunFolder, rank: int, *, attempt: int = 1) -> list[str]:
    return folder.attempt(attempt).log(rank).read_text().splitlines()


@pytest.mark.slow
def test_relative_paths_of_a_queued_job(
    tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    home = project(tmp_path / "project", READS)
    subprocess.run(["git", "init", "-q", str(home)], check=True)
    for folder in (home, home / "sub"):
        (folder / "data").mkdir(parents=True)
        (folder / "data/x.bin").write_text("data")
        (folder / "train.py").write_text(READS)
        (folder / "config.yaml").write_text("then")
        (folder / "configurator.py").write_text("value = 'then'")
    (home / "beside.txt").write_text("beside")
    (home / ".gitignore").write_text("data/\nout/\n")
    (tmp_path / "beside.txt").write_text("beside")
    hold = ("--cpu", "--nproc", "1", "--time", "10m", "--sbatch-arg=--hold")
    submitted = [
        slurm_paceline("submit", "--nodes", "2", *hold, "train.py", "stop", cwd=home, check=True),
        slurm_paceline(
            "submit", "--style", "srun", *hold, "train.py", cwd=home / "sub", check=True
        ),
        slurm_paceline(
            "submit",
            "--style",
            "srun",
            "--workdir",
            "project",
            *hold,
            "train.py",
            cwd=home,
            check=True,
        ),
        slurm_paceline(
            "submit", "--style", "srun", *hold, "train.py", "fail", cwd=home, check=True
        ),
    ]
    forked, nested, live, failed = (run_of(completed) for completed in submitted)
    work = forked.work / "project"
    assert f"  files   {work}\n" in submitted[0].stdout
    for folder in (home, home / "sub"):
        (folder / "config.yaml").write_text("now")
        (folder / "configurator.py").write_text("value = 'now'")
    jobs = [folder.job.read_text().strip() for folder in (forked, nested, live, failed)]
    cluster.run(["scontrol", "release", *jobs])

    # Two nodes, forked ranks: stopped before the time limit, and continued in the same working directory.
    started = [work / f"out/{rank}" for rank in (0, 1)]
    until(
        lambda: all(path.exists() for path in started),
        "no rank starts",
        details=lambda: diagnostics(forked),
        within=300,
    )
    cluster.run(["scancel", "--batch", "--signal=USR1", jobs[0]])
    for folder, job in zip((forked, nested, live), jobs, strict=False):
        assert cluster.wait(job, timeout=300) == "COMPLETED", diagnostics(folder)
    for rank in (0, 1):
        assert read_lines(forked, rank) == [
            "read then then data beside",
            "beside the script True then",
        ]
        assert read_lines(forked, rank, attempt=2)[2] == "continues from the first start"
    assert sorted(path.relative_to(work).as_posix() for path in work.rglob("*")) == [
        "out",
        "out/0",
        "out/1",
    ]
    assert f"files written in {work}: out/\n" in forked.slurm_log.read_text()
    shown = slurm_paceline("show", str(forked.path), cwd=home, check=True).stdout
    assert f"{work}: out/\n" in shown

    # From a folder of the project, with srun.
    assert read_lines(nested, 0) == ["read then then data beside", "beside the script True then"]
    assert (nested.work / "project/sub/out/0").read_text() == "from the first start"
    changed = slurm_paceline("show", str(nested.path), "--diff", cwd=home, check=True)
    names = ["config.yaml", "configurator.py", "sub/config.yaml", "sub/configurator.py"]
    assert re.findall(r"^\+\+\+ now/(.*)", changed.stdout, re.MULTILINE) == names

    # A failed run keeps the files that its traceback names, and no links.
    assert cluster.wait(jobs[3], timeout=300) == "FAILED", diagnostics(failed)
    assert (failed.work / "project/train.py").exists()
    assert not (failed.work / "project/data").is_symlink()
    assert f"relative paths start in {failed.work / 'project'}" in failed.slurm_log.read_text()

    # With --workdir project only the code is that of the submission, and `show --diff` says so.
    assert read_lines(live, 0)[0] == "read now now data beside"
    assert (home / "out/0").exists()
    assert (
        "reads other files from the project"
        in slurm_paceline("show", str(live.path), "--diff", cwd=home).stderr
    )
