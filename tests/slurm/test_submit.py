"""`paceline submit` and related commands on a real Slurm: odd environments, wrong values, failures, cancelling."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.slurm.harness import Cluster
from tests.slurm.runs import PLAIN, Paceline, diagnostics, project, rank_reports, run_of
from tests.until import until

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("without_torch")]
TIMEOUT = 400
SMALL = ("--style", "srun", "--gpus", "1", "--cpu", "--time", "10m", "--cpus-per-gpu", "1")

ARGUMENTS = [
    "a b",
    "it's",
    '"',
    "$(exit 1)",
    "`x`",
    "new\nline",
    ";",
    "a,b",
    "é",
    "",
    "--nodes",
    "*",
    "\\",
    "#",
]
NASTY = "a comma, a 'quote', a \"double\", $HOME, `x`\nand a second line\t\\ end"


def test_everything_odd_at_once(tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline) -> None:
    """A folder and a script with spaces, odd arguments, a nasty variable, and variables left by other jobs."""
    home = project(tmp_path / "my project (1)", name="my train.py")
    leftover_variables = {
        "SLURM_JOB_ID": "4242",
        "SLURM_NTASKS": "64",
        "SLURM_NNODES": "32",
        "SLURM_CPUS_PER_TASK": "99",
        "SLURM_NTASKS_PER_NODE": "7",
        "OMPI_COMM_WORLD_RANK": "3",
        "RANK": "5",
        "MASTER_ADDR": "nowhere",
        "SBATCH_PARTITION": "low",
        "SBATCH_TIMELIMIT": "1",
        "SBATCH_REQUEUE": "1",
        "UNASKED": "secret",
    }
    done = slurm_paceline(
        "submit",
        *SMALL,
        "--nodes",
        "2",
        "--env",
        f"NASTY={NASTY}",
        "--wait",
        "my train.py",
        *ARGUMENTS,
        cwd=home,
        timeout=TIMEOUT,
        **leftover_variables,
    )
    folder = run_of(done)
    assert done.returncode == 0, diagnostics(folder, done)
    assert "SBATCH_PARTITION sets partition to 'low'" in done.stderr
    ranks = rank_reports(folder)
    assert sorted(ranks) == [0, 1]
    for each in ranks.values():
        assert each["args"] == ARGUMENTS
        assert each["environ"]["NASTY"] == NASTY
        assert "UNASKED" not in each["environ"]
        assert each["WORLD_SIZE"] == "2"
        assert each["cwd"] == str(folder.work / home.name)
    assert cluster.show((folder.path / "job").read_text().strip())["Partition"] == "low"
    assert oct(folder.environment.stat().st_mode & 0o777) == "0o600"


def test_from_inside_a_job(tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline) -> None:
    home = project(tmp_path / "project")
    command = shlex.join(
        [sys.executable, "-m", "paceline", "submit", *SMALL, "--nodes", "2", "--wait", "train.py"]
    )
    log = tmp_path / "outer.log"
    scratch = shlex.quote(str(tmp_path / "scratch"))
    outer = cluster.submit(
        f"cd {shlex.quote(str(home))}\nexport PACELINE_SCRATCH={scratch}\nsrun -n1 {command}",
        "--nodes=1",
        "--ntasks=3",
        "--cpus-per-task=2",
        output=log,
    )
    assert cluster.wait(outer, timeout=TIMEOUT) == "COMPLETED", log.read_text()
    (run,) = (tmp_path / "scratch").glob("*/*/*/run.json")
    from paceline.contract.run_folder import RunFolder

    ranks = rank_reports(RunFolder(run.parent))
    assert {each["WORLD_SIZE"] for each in ranks.values()} == {"2"}
    assert len({each["host"] for each in ranks.values()}) == 2


def test_two_jobs_share_a_head_node(
    tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    """Each job finds its own port, and no agent joins the wrong run."""
    both = PLAIN + (
        "import pathlib, time\n"
        "here = pathlib.Path(os.environ['PACELINE_RUN']).parent\n"
        '(here / f\'up-{os.environ["SLURM_JOB_ID"]}-{os.environ["RANK"]}\').touch()\n'
        "while len(list(here.glob('up-*'))) < 4: time.sleep(0.1)\n"
    )
    home = project(tmp_path / "project", both)
    args = ("submit", *SMALL, "--nodes", "2", "--nodelist", "node1,node2", "train.py")
    runs = [run_of(slurm_paceline(*args, cwd=home, check=True)) for _ in range(2)]
    for run in runs:
        job = (run.path / "job").read_text().strip()
        assert cluster.wait(job, timeout=TIMEOUT) == "COMPLETED", diagnostics(run)
        assert {each["host"] for each in rank_reports(run).values()} == {"node1", "node2"}


TYPOS = [
    (
        ["--partition", "mian"],
        ["--partition names partition 'mian', which does not exist", "Did you mean 'main'?"],
    ),
    (
        ["--gpus", "1", "--gpu-type", "a10"],
        ["asks for 'a10' GPUs", "Did you mean 'a100'?", "up to 4 per node"],
    ),
    (["--gpus", "5"], ["--gpus is 5", "up to 4 per node"]),
    (["--time", "3 hours or so"], ['Invalid --time "3 hours or so": use a duration such as 90m']),
    (["--nodes", "9"], ["--nodes is 9, but partition main allows at most 4"]),
    (["--constraint", "fast"], ["Invalid feature specification", "--constraint"]),
    (["--sbatch-arg=--frobnicate"], ["unrecognized option '--frobnicate'", "--sbatch-arg"]),
    (["--sbatch-arg=--ntasks=4"], ["has --ntasks=4", "--nproc"]),
    (
        ["--after", "987654"],
        ["Invalid --after 987654: Slurm knows no job 987654", "--dependency afterok:987654"],
    ),
    (["--mem-per-node", "900G"], ["900G per node (--mem-per-node)", "up to 4000M"]),
]


def test_typos_are_found_before_submitting(
    tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    home = project(tmp_path / "project")
    project(home, "def f(:\n", name="broken.py")
    project(home, "import no_such_package_xyz\n", name="lacking.py")
    (home / "pkg" / "sub").mkdir(parents=True)
    project(home, "import pkg\n", name="pkg/sub/within.py")
    scripts = [
        (["broken.py"], ["broken.py does not compile: line 1"]),
        (["lacking.py"], ["imports no_such_package_xyz, which"]),
        (["pkg/sub/within.py"], ["imports pkg, which", "Use -m pkg.sub.within"]),
    ]
    for args, expected in [*TYPOS, *scripts]:
        script = [] if args[-1].endswith(".py") else ["train.py"]
        done = slurm_paceline("submit", *args, *script, cwd=home)
        assert done.returncode in (1, 2), (args, done.stderr)
        for text in expected:
            assert text in done.stderr, (args, done.stderr)
        assert "Traceback" not in done.stderr
    assert cluster.queue() == []
    assert not list((tmp_path / "scratch").glob("*/*/*")), "nothing half-made may remain"


def test_a_rank_fails_on_the_second_node(
    tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    """The error names it with its host and traceback; the other ranks, which would wait forever, are ended."""
    script = (
        PLAIN
        + 'import time\nif os.environ["RANK"] == "1": raise ValueError("no good")\ntime.sleep(3600)\n'
    )
    home = project(tmp_path / "project", script)
    done = slurm_paceline(
        "submit",
        *SMALL,
        "--nodes",
        "2",
        "--max-attempts",
        "1",
        "--wait",
        "train.py",
        cwd=home,
        timeout=TIMEOUT,
    )
    folder = run_of(done)
    assert done.returncode == 1, diagnostics(folder, done)
    failure = json.loads(folder.attempt(1).failure.read_text())
    host = rank_reports(folder)[1]["host"]
    assert (failure["rank"], failure["host"], failure["type"]) == (1, host, "ValueError")
    log = folder.slurm_log.read_text()
    assert f"rank 1 of 2 on host {host} failed" in log, log
    assert "ValueError: no good" in log
    shown = slurm_paceline("show", folder.path.name, cwd=home, check=True).stdout
    assert f"rank 1 on {host}: ValueError: no good" in shown
    assert "failed" in slurm_paceline("ps", cwd=home, check=True).stdout


@pytest.mark.parametrize("style", ["fork", pytest.param("srun", marks=pytest.mark.slow)])
def test_a_node_with_too_few_gpus_is_excluded(
    style: str, tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    """Preflight finds the node before ranks start; the job is requeued without it and completes."""
    poor = tmp_path / "python.sh"
    poor.write_text(
        f'#!/bin/bash\n[ "$SLURMD_NODENAME" = node2 ] && export CUDA_VISIBLE_DEVICES=0\nexec {sys.executable} "$@"\n'
    )
    poor.chmod(0o755)
    home = project(
        tmp_path / "project", config=f"[environment]\npython = {json.dumps(str(poor))}\n"
    )
    done = slurm_paceline(
        "submit",
        "--style",
        style,
        "--gpus",
        "2",
        "--nodes",
        "2",
        "--exclude",
        "node4",
        "--time",
        "10m",
        "--cpus-per-gpu",
        "1",
        "--wait",
        "train.py",
        cwd=home,
        timeout=TIMEOUT,
    )
    folder = run_of(done)
    assert done.returncode == 0, diagnostics(folder, done)
    job = (folder.path / "job").read_text().strip()
    assert (folder.job_start(f"{job}-0").excluded_nodes).read_text().split() == ["node2"]
    log = folder.slurm_log.read_text(encoding="utf-8")
    marked = {line.split()[1] for line in log.splitlines() if line.startswith("✗")}
    assert marked == {"node2"}, "the table marks it"
    assert "node node2: 1 of the 2 GPUs requested are visible" in log
    last = max(attempt.number for attempt in folder.attempts())
    assert {each["host"] for each in rank_reports(folder, attempt=last).values()} == {
        "node1",
        "node3",
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a node its own hosts file")
def test_a_node_cannot_resolve_the_head_node(
    tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    """The run fails, without a hang or a fallback to localhost, and names both nodes."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    home = project(tmp_path / "project")
    assert cluster.exec("node2", ["mount", "--bind", str(hosts), "/etc/hosts"]).returncode == 0
    try:
        done = slurm_paceline(
            "submit",
            *SMALL,
            "--nodes",
            "2",
            "--nodelist",
            "node1,node2",
            "--wait",
            "train.py",
            cwd=home,
            timeout=TIMEOUT,
        )
    finally:
        cluster.exec("node2", ["umount", "/etc/hosts"])
    folder = run_of(done)
    assert done.returncode == 1, diagnostics(folder, done)
    log = folder.slurm_log.read_text()
    assert re.search(r"node2.*node1", log), log
    assert rank_reports(folder) == {}


def test_a_cancelled_run_stays_cancelled(
    tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    home = project(tmp_path / "project", PLAIN + "import time\ntime.sleep(3600)\n")
    folder = run_of(slurm_paceline("submit", *SMALL, "train.py", cwd=home, check=True))
    job = (folder.path / "job").read_text().strip()
    until(lambda: rank_reports(folder), "no rank starts", details=lambda: diagnostics(folder))
    listed = slurm_paceline("ps", cwd=home, check=True).stdout
    assert folder.path.name in listed
    assert "running" in listed
    assert "report " in slurm_paceline("logs", cwd=home, check=True).stdout
    waiting = run_of(
        slurm_paceline(
            "submit", *SMALL, "--after", folder.path.name, "train.py", cwd=home, check=True
        )
    )
    assert (
        f"waits for job {job}"
        in slurm_paceline("show", waiting.path.name, cwd=home, check=True).stdout
    )
    slurm_paceline("cancel", folder.path.name, cwd=home, check=True)
    assert cluster.wait(job, timeout=TIMEOUT) == "CANCELLED"
    # A run that waits for it does not wait for ever.
    assert cluster.wait(waiting.job.read_text().strip(), timeout=TIMEOUT) == "CANCELLED"
    assert (
        f"job {job} did not succeed"
        in slurm_paceline("show", waiting.path.name, cwd=home, check=True).stdout
    )
    refused = slurm_paceline("submit", *SMALL, "--after", folder.path.name, "train.py", cwd=home)
    assert "that run has ended: cancelled" in refused.stderr
    assert cluster.restarts(job) == 0
    assert "cancelled" in slurm_paceline("ps", cwd=home, check=True).stdout
    # It goes on only if asked to, here with other code, arguments and limits.
    project(home, PLAIN)
    args = ("submit", "--resume", folder.path.name, "--time", "5m", "--wait", "train.py", "again")
    done = slurm_paceline(*args, cwd=home, timeout=TIMEOUT)
    assert done.returncode == 0, diagnostics(folder, done)
    assert run_of(done) == folder
    report = rank_reports(folder, attempt=2)[0]
    assert report["args"] == ["again"]
    assert report["environ"]["SLURM_JOB_ID"] != job
    shown = slurm_paceline("show", folder.path.name, cwd=home, check=True).stdout
    assert f"{report['environ']['SLURM_JOB_ID']} (earlier: {job})" in shown


def test_a_script_can_be_submitted_by_hand(
    tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    home = project(tmp_path / "project")
    file = tmp_path / "by hand.sbatch"
    done = slurm_paceline(
        "submit",
        *SMALL,
        "--env",
        "ASKED=1",
        "--script-only",
        str(file),
        "train.py",
        cwd=home,
        check=True,
    )
    folder = run_of(done)
    assert cluster.queue() == []
    job = cluster.run(["sbatch", "--parsable", str(file)]).stdout.strip()
    assert cluster.wait(job, timeout=TIMEOUT) == "COMPLETED", diagnostics(folder)
    (rank,) = rank_reports(folder).values()
    assert rank["environ"]["ASKED"] == "1"


# The controller takes the job, but answers after sbatch has given up.
LATE_SBATCH = """\
#!/bin/bash
case " $* " in *" --test-only "*) exec /usr/bin/sbatch "$@" ;; esac
kill -STOP {controller}
(sleep {seconds}; kill -CONT {controller}) >/dev/null 2>&1 &
/usr/bin/sbatch "$@"
"""


@pytest.mark.slow
def test_a_submission_that_is_confirmed_too_late(
    tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    home = project(tmp_path / "project")
    timeout = int(
        re.findall(r"MessageTimeout\s*= (\d+)", cluster.run(["scontrol", "show", "config"]).stdout)[
            0
        ]
    )
    shim = tmp_path / "bin" / "sbatch"
    shim.parent.mkdir()
    controller = (
        (Path(cluster.environment["SLURM_CONF"]).parent.parent / "run" / "slurmctld.pid")
        .read_text()
        .strip()
    )
    shim.write_text(LATE_SBATCH.format(controller=controller, seconds=timeout + 2))
    shim.chmod(0o755)
    done = slurm_paceline(
        "submit",
        *SMALL,
        "train.py",
        cwd=home,
        timeout=TIMEOUT,
        PATH=f"{shim.parent}:{os.environ['PATH']}",
    )
    folder = run_of(done)
    job = (folder.path / "job").read_text().strip()
    assert f"as job {job}" in done.stdout
    assert cluster.wait(job, timeout=TIMEOUT) == "COMPLETED", diagnostics(folder, done)
    assert 0 in rank_reports(folder)


def test_a_queued_job_runs_the_code_as_submitted(
    tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    """Also, one run can wait for another with `--after`."""
    slow = "import pathlib, time\nwhile not pathlib.Path(GO).exists(): time.sleep(0.1)\n"
    proceed = tmp_path / "go"
    home = project(tmp_path / "project", f"GO = {str(proceed)!r}\n{slow}")
    first = run_of(slurm_paceline("submit", *SMALL, "train.py", cwd=home, check=True))
    project(home, PLAIN)
    after = slurm_paceline("submit", *SMALL, "--after", "last", "train.py", cwd=home, check=True)
    second = run_of(after)
    project(home, "raise SystemExit('not the code that was submitted')\n")
    job = (second.path / "job").read_text().strip()
    assert cluster.show(job)["Dependency"].startswith(
        f"afterok:{(first.path / 'job').read_text().strip()}"
    )
    proceed.touch()
    assert cluster.wait(job, timeout=TIMEOUT) == "COMPLETED", diagnostics(second)
    assert rank_reports(second)[0]["file"].startswith(
        str(os.path.realpath(second.path.parent.parent))
    )


def test_a_shell_has_the_job_environment(
    tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    """Without a terminal the shell exits at once; what it prints first is enough."""
    home = project(
        tmp_path / "project",
        config='[environment]\nsetup = ["echo I am on $HOSTNAME: $GREETING"]\n'
        '[environment.variables]\nGREETING = "it\'s me"\n',
    )
    # An empty home folder, so that no start-up files interfere.
    done = slurm_paceline(
        "shell",
        "--gpus",
        "1",
        "--time",
        "5m",
        cwd=home,
        timeout=TIMEOUT,
        HOME=str(tmp_path),
        PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    )
    assert "I am on node" in done.stdout, done.stderr
    assert "it's me" in done.stdout


def test_doctor_and_init_query_the_cluster(
    tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    home = project(tmp_path / "project")
    seen = slurm_paceline("doctor", cwd=home, check=True).stdout
    assert "4 of 4 nodes usable" in seen
    assert "4 x a100" in seen
    checked = slurm_paceline(
        "doctor", "--job", "--gpus", "2", "train.py", cwd=home, check=True
    ).stdout
    assert "would start at" in checked
    slurm_paceline("init", cwd=home, check=True)
    script = slurm_paceline("submit", "--dry-run", "train.py", cwd=home, check=True)
    assert "#SBATCH --gres=gpu:4\n" in script.stdout
    assert "#SBATCH --partition=main\n" in script.stdout
    again = slurm_paceline("init", cwd=home)
    assert again.returncode == 2
    assert "--force" in again.stderr
