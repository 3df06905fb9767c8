"""`paceline run` as a command: arguments, run folders, errors, signals."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.contract.checkpoint import checkpoint_step, find_checkpoints
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder
from paceline.watch.records import read_record

Paceline = Callable[..., "subprocess.CompletedProcess[str]"]

light = pytest.mark.usefixtures("without_torch")  # whose script does not use it

SCRIPT = """\
import json, os, sys
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "PACELINE_RUN", "ODD"]
report = {"argv": sys.argv, "path": sys.path[0], "cwd": os.getcwd(), "name": __name__}
report |= {name: os.environ.get(name) for name in names}
with open(f"report-{report['RANK']}.json", "w") as file:
    json.dump(report, file)
"""

# Torch reads its variable when it is imported.
WITH_TORCH = "import torch.distributed\nassert torch.distributed.get_debug_level().name == 'DETAIL', 'too early'\n"

ODD_ARGS = [
    "a b",
    "it's",
    'say "hi"',
    "$(touch pwned)",
    "`touch pwned`",
    "$HOME",
    "two\nlines\n",
    "a;b&c|d",
    "a,b",
    "é漢🙂",
    "",
    "*",
    "~",
    "\\n",
    "--nproc",
    "7",
    "--help",
    "--",
    "-m",
    "tab\t.",
    "#no",
    "!x",
    "{a,b}",
    "\x01",
    "a=b",
    os.fsdecode(b"no\xffutf"),
]


def read_report(folder: Path, rank: int) -> dict[str, str]:
    value: dict[str, str] = json.loads((folder / f"report-{rank}.json").read_text())
    return value


def only_run(scratch: Path) -> RunFolder:
    (path,) = scratch.glob("*/*/*/run.json")
    return RunFolder(path.parent)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "my project"
    folder.mkdir()
    return folder


def test_arguments_arrive_byte_for_byte_and_the_folder_is_complete(
    paceline: Paceline, project: Path, scratch: Path
) -> None:
    script = project / "my script.py"
    script.write_text(WITH_TORCH + SCRIPT)
    odd = "a, 'b'\n$(c) é"
    done = paceline(
        "run",
        "--nproc",
        "2",
        "--env",
        f"ODD={odd}",
        "--env",
        "API_KEY=hush",
        "--param",
        "lr=0.5",
        "--experiment",
        "odd",
        "--debug",
        "my script.py",
        *ODD_ARGS,
        cwd=project,
        check=True,
    )
    for rank in (0, 1):
        report = read_report(project, rank)
        assert report["argv"] == [str(script), *ODD_ARGS]
        assert (report["RANK"], report["WORLD_SIZE"], report["GROUP_RANK"], report["ODD"]) == (
            str(rank),
            "2",
            "0",
            odd,
        )
        assert (report["path"], report["cwd"], report["name"]) == (
            str(project),
            str(project),
            "__main__",
        )
    assert not (project / "pwned").exists()

    folder = only_run(scratch)
    assert folder.path.parent == scratch / "my project" / "odd"
    assert "done after" in done.stderr
    assert str(folder.path) in done.stderr
    assert folder.attempt(1).verdict.read_text().strip() == "done"
    assert (folder.code / "my script.py").read_text() == WITH_TORCH + SCRIPT
    assert stat.S_IMODE(folder.launch_spec.stat().st_mode) == 0o600
    launch_spec = LaunchSpec.from_json(folder.launch_spec.read_text())
    assert (launch_spec.args, launch_spec.params, launch_spec.nproc) == (ODD_ARGS, {"lr": 0.5}, 2)
    record = folder.run_json.read_text()
    assert "hush" not in record
    assert json.loads(record)["spec"]["environment"]["variables"]["API_KEY"] == "***"


@light
def test_two_nodes_and_a_module(paceline: Paceline, project: Path) -> None:
    package = project / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "inner.py").write_text("import package\n" + SCRIPT)
    paceline(
        "run",
        "--nodes",
        "2",
        "--nproc",
        "1",
        "-m",
        "package.inner",
        "-m",
        "x y",
        cwd=project,
        check=True,
    )
    for rank in (0, 1):
        report = read_report(project, rank)
        assert report["argv"] == [str(package / "inner.py"), "-m", "x y"]
        assert (
            report["RANK"],
            report["WORLD_SIZE"],
            report["GROUP_RANK"],
            report["LOCAL_RANK"],
        ) == (str(rank), "2", str(rank), "0")


@light
def test_a_mistake_of_the_command_line_is_explained(
    paceline: Paceline, project: Path, scratch: Path
) -> None:
    package = project / "pkg" / "sub"
    package.mkdir(parents=True)
    text = "import pkg\nimport argparse\nargparse.ArgumentParser().parse_args()\n"
    (package / "train.py").write_text(text)
    inside = paceline("run", "--cpu", "--nproc", "1", "pkg/sub/train.py", cwd=project)
    assert "to continue: paceline run --resume" in inside.stderr
    typed = (
        "run",
        "--cpu",
        "--nproc",
        "1",
        "-m",
        "pkg.sub.train",
        "--max-restarts=2",
        "--nproc",
        "2",
        "--lr",
        "1",
    )
    late = paceline(*typed, cwd=project)
    assert late.returncode == 1
    assert (
        "the script got --max-restarts, --nproc: options of Paceline go before the script"
        in late.stderr
    )
    [again] = re.findall("to continue with other arguments: paceline (.*) ARGUMENTS", late.stderr)
    paceline(*again.split(), cwd=project, check=True)


@light
def test_a_run_resumes_in_its_folder(paceline: Paceline, project: Path, scratch: Path) -> None:
    (project / "train.py").write_text(
        "import sys, os; sys.exit(int(not os.path.exists('ready')))\n"
    )
    failed = paceline("run", "--nproc", "1", "train.py", "arg", cwd=project)
    assert failed.returncode == 1
    assert "failed after" in failed.stderr
    folder = only_run(scratch)
    again = f"to continue: paceline run --resume {folder.path.name} (from the script's own checkpoint, if any)"
    assert again in failed.stderr
    assert folder.attempt(1).verdict.read_text().strip() == "failed"
    (project / "ready").touch()
    paceline("run", "--resume", "last", "--param", "x=1", cwd=project, check=True)
    assert only_run(scratch) == folder
    assert folder.attempt(2).verdict.read_text().strip() == "done"
    launch_spec = LaunchSpec.from_json(folder.launch_spec.read_text())
    assert (launch_spec.nproc, launch_spec.args, launch_spec.params) == (1, ["arg"], {"x": 1})
    record = json.loads(folder.run_json.read_text())
    assert (record["program"], record["args"]) == ("train.py", ["arg"]), (
        "what it runs now, as it was typed"
    )
    paceline(
        "run",
        "--resume",
        "last",
        "--nproc",
        "2",
        "train.py",
        "--api-key",
        "hush",
        cwd=project,
        check=True,
    )
    record = json.loads(folder.run_json.read_text())
    assert (record["program"], record["args"], record["nproc"]) == (
        "train.py",
        ["--api-key", "***"],
        2,
    )
    assert record["command"] == [
        "paceline",
        "run",
        "--resume",
        "last",
        "--nproc",
        "2",
        "train.py",
        "--api-key",
        "***",
    ]
    assert [start["command"][2:4] for start in record["earlier"]] == [
        ["--nproc", "1"],
        ["--resume", "last"],
    ]


def test_a_dry_run_creates_nothing(paceline: Paceline, project: Path, scratch: Path) -> None:
    (project / "train.py").write_text("raise SystemExit('it ran')")
    options = ("--nodes", "2", "--nproc", "3", "--env", "TOKEN=hush", "--hang-timeout", "5m")
    done = paceline("run", "--dry-run", *options, "train.py", "a b", cwd=project)
    assert done.returncode == 0, done.stderr
    for word in (f"run folder  {scratch}", "6 ranks on 2 nodes", " 'a b'\n"):
        assert word in done.stdout
    assert "hush" not in done.stdout
    assert [path.name for path in project.iterdir()] == ["train.py"]
    assert not scratch.exists()


WRONG = {
    "no script": (["run"], 2, "There is no script to run."),
    "a script that does not exist": (["run", "tran.py"], 2, "There is no script 'tran.py'"),
    "a script in a folder": (["run", "./tran.py"], 2, "There is no script './tran.py'"),
    "no script to submit": (["submit"], 2, "`paceline submit --gpus 2 train.py --lr 0.1`"),
    "a folder": (["run", "."], 2, "There is no script '.'"),
    "no ranks": (["run", "--nproc", "0", "train.py"], 2, "Invalid --nproc 0: use at least 1."),
    "a word for a number": (
        ["run", "--nproc", "two", "train.py"],
        2,
        'Invalid --nproc "two": use a whole number.',
    ),
    "an unknown option": (["run", "--nprc", "2", "train.py"], 2, "--nprc"),
    "an address for torchrun": (
        ["run", "--standalone", "train.py"],
        2,
        "Paceline finds the nodes and a free port",
    ),
    "an unknown command": (
        ["runn"],
        2,
        "There is no command 'runn'.\n  Did you mean `paceline run`?",
    ),
    "a command of another name": (["resum"], 2, "Did you mean `paceline submit --resume RUN`?"),
    "a script for a command": (["train.py"], 2, "Did you mean `paceline run train.py`?"),
    "nothing like it": (["zzzz"], 2, "There is no command 'zzzz'."),
    "a style of Slurm": (["run", "--style", "srun", "train.py"], 2, "paceline submit"),
    "a bad variable": (["run", "--env", "A B=1", "train.py"], 2, "Invalid --env {A B}"),
    "a variable that is not set": (
        ["run", "--env", "NOT_SET_HERE", "train.py"],
        2,
        "Invalid --env NOT_SET_HERE",
    ),
    "a bad param": (["run", "--param", "lr", "train.py"], 2, "Invalid --param 'lr': use key=value"),
    "no such run": (["run", "--resume", "zzzz"], 2, "'zzzz'"),
    "a bad file": (
        ["run", "--config", "bad.toml", "train.py"],
        2,
        "Unknown key 'nods' in [job] of bad.toml.",
    ),
    "a negative number of restarts": (
        ["run", "--max-restarts", "-1", "train.py"],
        2,
        "Invalid --max-restarts -1",
    ),
    "restarts and attempts": (
        ["run", "--max-restarts", "1", "--max-attempts", "2", "train.py"],
        2,
        "conflict",
    ),
    "W&B on and off": (["run", "--no-wandb", "--wandb-project", "x", "train.py"], 2, "conflict"),
    "two environments": (
        ["submit", "--venv", "a", "--image", "b", "train.py"],
        2,
        "--venv and --image conflict",
    ),
    "a venv and a conda": (
        ["submit", "--venv", "a", "--conda", "b", "train.py"],
        2,
        "--venv and --conda conflict",
    ),
    "a container": (
        ["run", "--environment", "container", "--config", "image.toml", "train.py"],
        2,
        "paceline submit",
    ),
    "a missing secret file": (
        ["run", "--secret-file", "s.env", "train.py"],
        2,
        "--secret-file names s.env, which",
    ),
    "a bad time": (
        ["submit", "--time", "5x", "train.py"],
        2,
        'Invalid --time "5x": use a duration such as 90m',
    ),
    "a short form": (
        ["submit", "-N", "none", "train.py"],
        2,
        'Invalid --nodes "none": use a whole number.',
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_command_line_is_one_clear_error(
    case: str, paceline: Paceline, project: Path, scratch: Path
) -> None:
    (project / "train.py").touch()
    (project / "bad.toml").write_text("[job]\nnods = 1")
    (project / "image.toml").write_text('[environment]\nimage = "x.sif"')
    args, code, part = WRONG[case]
    done = paceline(*args, cwd=project)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("paceline: error: ")
    assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2, done.stderr
    assert not scratch.exists()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a tmpfs with some options, where that is permitted."""
    made: list[Path] = []

    def mount_it(option: str) -> Path:
        path = tmp_path / f"mount-{len(made)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", option, "tmpfs", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
        made.append(path)
        return path

    yield mount_it
    for path in made:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.parametrize(
    ("option", "reason"), [("ro", "Read-only file system"), ("size=12k", "No space left")]
)
def test_a_scratch_that_cannot_be_written(
    option: str, reason: str, mount: Callable[[str], Path], paceline: Paceline, project: Path
) -> None:
    (project / "train.py").write_text("raise SystemExit('it ran')")
    folder = mount(option)
    done = paceline("run", "train.py", cwd=project, PACELINE_SCRATCH=str(folder))
    assert done.returncode == 1
    assert reason in done.stderr
    assert "PACELINE_SCRATCH" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 2, done.stderr
    assert not list(folder.glob("*/default")), "a run folder"


def test_a_file_in_place_of_the_scratch(paceline: Paceline, project: Path, tmp_path: Path) -> None:
    (project / "train.py").touch()
    (tmp_path / "file").touch()
    done = paceline("run", "train.py", cwd=project, PACELINE_SCRATCH=str(tmp_path / "file"))
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "Cannot create the run folder" in done.stderr


@light
def test_the_copy_of_the_code_has_what_the_run_started_with(
    paceline: Paceline, project: Path, scratch: Path
) -> None:
    (project / "model.py").write_text("layers = 2")
    (project / "train.py").write_text(
        "import os; open('written-' + os.environ['RANK'], 'w').close()"
    )
    done = paceline("run", "--nproc", "2", "train.py", cwd=project)
    assert done.returncode == 0, done.stderr
    folder = only_run(scratch)
    assert sorted(path.name for path in folder.code.iterdir()) == ["model.py", "train.py"]
    code = json.loads(folder.run_json.read_text())["code"]
    assert (code["folder"], code["snapshot"], code["files"]) == (
        str(project),
        folder.code.resolve().name,
        2,
    )


@light
def test_a_run_that_is_resumed_has_a_copy_of_the_code_that_it_runs_now(
    paceline: Paceline, project: Path, scratch: Path
) -> None:
    (project / "train.py").write_text("raise SystemExit(1)")
    paceline("run", "--cpu", "--nproc", "1", "train.py", cwd=project)
    folder = only_run(scratch)
    for text in ("print('resumed')", "print('again')"):
        (project / "train.py").write_text(text)
        paceline("run", "--resume", "last", cwd=project.parent, check=True)
        code = json.loads(folder.run_json.read_text())["code"]
        assert (code["folder"], code["snapshot"]) == (str(project), folder.code.resolve().name)
        assert (folder.code / "train.py").read_text() == text


@light
def test_too_much_code_is_a_warning(paceline: Paceline, project: Path, scratch: Path) -> None:
    (project / "train.py").touch()
    (project / "paceline.toml").write_text('[project]\nsnapshot_limit = "1M"')
    (project / "weights.bin").write_bytes(b"0" * 2**21)
    done = paceline("run", "--nproc", "1", "train.py", cwd=project, check=True)
    assert "no snapshot of the code was taken" in done.stderr
    assert "weights.bin" in done.stderr
    assert not only_run(scratch).code.exists()


# -- signals -------------------------------------------------------------------------------------------

SLEEP = """\
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(75))
open(f"ready-{os.environ['RANK']}", "w").write(str(os.getpid()))
time.sleep(300)
"""


def start(project: Path, scratch: Path, *args: str, script: str = SLEEP) -> subprocess.Popen[str]:
    (project / "train.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "run", *args, "train.py"],
        cwd=project,
        env={**os.environ, "PACELINE_SCRATCH": str(scratch)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 90
    while len([path for path in project.glob("ready-*") if path.read_text()]) < 2:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "the ranks never started"
        time.sleep(0.05)
    return process


TRAIN = """\
import pathlib, time, torch
import paceline
with paceline.session(cpu=True) as run:
    model = run.wrap(torch.nn.Linear(1, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    run.resume(model=model, opt=opt)
    for x in run.steps(iter(lambda: torch.ones(1), None)):
        run.backward(model(x).sum())
        run.update(opt)
        pathlib.Path(f"ready-{run.rank}").write_text(str(run.step))
        time.sleep(0.01)
"""


def test_ctrl_c_in_a_terminal_saves_and_stops(project: Path, scratch: Path) -> None:
    """A terminal sends SIGINT to the whole foreground process group, of which only the command is a member."""
    (project / "train.py").write_text(TRAIN)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(project)
        os.environ |= {"PACELINE_SCRATCH": str(scratch), "TERM": "xterm"}
        os.execv(
            sys.executable,
            [sys.executable, "-m", "paceline", "run", "--nproc", "2", "--cpu", "train.py"],
        )
    shown = b""
    while data := read_terminal(terminal):
        shown += data
        if len(list(project.glob("ready-*"))) == 2 and b"^C" not in shown:
            os.write(terminal, b"\x03")
    text = shown.decode(errors="replace")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130, text
    os.close(terminal)
    folder = only_run(scratch)
    (saved,) = find_checkpoints(folder.path)
    step = checkpoint_step(saved.name)
    note = "stop requested (Ctrl-C): the ranks save and stop; press Ctrl-C again to end at once"
    assert f"\r\npaceline: {note}" in text, "on a line of its own"
    assert f"stopped at step {step}, saved" in text
    assert f"to continue: paceline run --resume {folder.path.name} (from step {step})" in text
    assert "Traceback" not in text
    assert read_record(folder).status == "stopped"


def read_terminal(terminal: int) -> bytes:
    """Return what is printed next; nothing once the other end is closed."""
    if not select.select([terminal], [], [], 0.05)[0]:
        return b"\0"
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


@light
def test_ctrl_c_reaches_the_ranks_of_all_nodes(project: Path, scratch: Path) -> None:
    process = start(
        project,
        scratch,
        "--nodes",
        "2",
        "--nproc",
        "1",
        script=SLEEP.replace("signal.signal(", "print("),
    )
    process.send_signal(signal.SIGINT)
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 130, stderr
    assert "(from the script's own checkpoint, if any)" in stderr
    assert "Traceback" not in stderr
    # The guard of all tests now waits for every process that this one started.


@light
def test_many_ctrl_c_before_the_ranks_start_are_one(project: Path, scratch: Path) -> None:
    """Whatever starts or ends just then: the agent, its imports, or this command itself."""
    (project / "train.py").write_text(SLEEP)
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "run", "--nproc", "1", "--cpu", "train.py"],
        cwd=project,
        env={**os.environ, "PACELINE_SCRATCH": str(scratch)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not list(scratch.glob("*/*/*/launch.json")):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    stderr = process.communicate()[1]
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr


@light
@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_request_to_stop_is_passed_on(nodes: str, project: Path, scratch: Path) -> None:
    """To the ranks of all nodes, whether the script saves on SIGUSR1 or handles no signal."""
    script = SLEEP if nodes == "1" else SLEEP.replace("signal.signal(", "print(")
    process = start(
        project, scratch, "--nodes", nodes, "--nproc", "2" if nodes == "1" else "1", script=script
    )
    process.send_signal(signal.SIGTERM)
    stderr = process.communicate(timeout=60)[1]
    # `paceline run a.py && b.py` does not go on with half a model
    assert process.returncode == 75, stderr
    folder = only_run(scratch)
    assert folder.attempt(1).verdict.read_text().strip() == "stopped"
    assert f"paceline run --resume {folder.path.name}" in stderr


@light
def test_a_cancelled_run_is_cancelled_wherever_it_is_shown(
    project: Path, scratch: Path, paceline: Callable[..., Any]
) -> None:
    process = start(project, scratch, "--nproc", "2", script=SLEEP)
    asked = paceline("cancel", "last", check=True).stdout
    assert "to save and stop" in asked
    assert "  (from where it stops)" in asked
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 75, stderr
    assert "paceline: cancelled after" in stderr
    assert "stopped after" not in stderr
    shown = json.loads(paceline("show", "last", "--json", check=True).stdout)
    verdicts = [each["verdict"] for each in shown["attempts"]]
    assert {shown["overview"]["status"], *verdicts} == {"cancelled"}
    text = paceline("show", "last", check=True).stdout
    assert "stopped" not in text.split("config")[0]
    assert paceline("wait", "last").returncode == 75


def is_alive(pid: int) -> bool:
    """Whether a process still runs; one that has ended and waits to be collected does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@light
@pytest.mark.parametrize("victim", ["command", "agent"])
def test_a_killed_process_leaves_nothing_running(victim: str, project: Path, scratch: Path) -> None:
    process = start(project, scratch, "--nproc", "2")
    started = [int((project / f"ready-{rank}").read_text()) for rank in (0, 1)]
    if victim == "command":
        process.kill()
    else:
        agents = [
            child
            for child in psutil.Process(process.pid).children()
            if "paceline.agent.main" in child.cmdline()[-1]
        ]
        assert len(agents) == 1
        agents[0].kill()
    process.communicate(timeout=60)
    # a killed agent is started again, and gives up
    assert process.returncode == {"command": -9, "agent": 1}[victim]
    deadline = time.monotonic() + 60
    while any(is_alive(pid) for pid in started):
        assert time.monotonic() < deadline, f"ranks live on without their {victim}"
        time.sleep(0.1)


def test_flags_that_a_script_without_a_session_ignores(paceline: Paceline, project: Path) -> None:
    (project / "plain.py").write_text("print('trained')\n")
    one = ("run", "--cpu", "--nproc", "1")
    done = paceline(*one, "--max-steps", "5", "--seed", "1", "plain.py", cwd=project, check=True)
    text = (
        "paceline: --max-steps and --seed had no effect: the script does not use paceline.session\n"
    )
    assert text in done.stderr.replace("--seed and --max-steps", "--max-steps and --seed")


COUNTS_DOWN = """\
import sys, torch, paceline
with paceline.session(cpu=True, report=False, progress=False) as run:
    model = run.wrap(torch.nn.Linear(1, 1, bias=False))
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    run.resume(model=model, opt=opt)
    print("begins with", run.step, model.weight.item(), flush=True)
    for _ in run.epochs(int(sys.argv[1])):
        for _ in run.steps(range(2)):
            run.backward(model(torch.ones(1, 1)).sum())
            run.update(opt)
"""


def test_runs_that_start_from_others(paceline: Paceline, project: Path, scratch: Path) -> None:
    """From a file's weights, then with nothing left to do, then as the continuation of another run."""
    import torch

    (project / "train.py").write_text(COUNTS_DOWN)
    torch.save({"weight": torch.tensor([[9.0]])}, project / "model.pt")
    one = ("run", "--cpu", "--nproc", "1")
    first = paceline(
        *one, "--seed", "1", "--init-from", "model.pt", "train.py", "1", cwd=project, check=True
    )
    assert "begins with 0 9.0\n" in first.stdout
    assert "had no effect" not in first.stderr
    again = paceline("run", "--resume", "last", cwd=project, check=True)
    assert "begins with 2 7.0\n" in again.stdout
    assert re.search(r"done after .*, with nothing left to do: ", again.stderr)
    continued = paceline(
        *one, "--start-from", "last", "--continue", "train.py", "2", cwd=project, check=True
    )
    assert "begins with 2 7.0\n" in continued.stdout
    assert len(list(scratch.glob("*/*/*/run.json"))) == 2
