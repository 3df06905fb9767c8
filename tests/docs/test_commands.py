"""Execute the commands of the guides on one sandbox, in a project that has what the pages speak of."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.contract.run_folder import STOPPED
from paceline.tools.sandbox import packages
from paceline.tools.sandbox.settings import Settings
from tests.docs.commands import OWN_TESTS, SKIPPED_PAGES, as_typed, is_executed
from tests.docs.pages import ROOT, blocks, pages
from tests.forked_cli import Commands, Completed

SEARCH = """
[sweep]
name = "digits"
script = "train.py"
metric = "loss"
args = ["--epochs", "1"]

[space]
lr = [0.1, 0.01]

[launch]
nproc = 1

[runtime]
cpu = true
"""
PREPARED = """
set -e
paceline sweep --local --parallel 1 digits.toml
paceline run --cpu --nproc 2 --name teacher train.py --epochs 1
paceline export last -o model.safetensors
mkdir -p ~/models/gpt2 && cp model.safetensors ~/models/gpt2/
paceline sandbox up --nodes 4 --gpus 8
"""
# what needs a shell; other commands are forked
SHELL = re.compile(r"[|&;<>()$`~]")
COMMENT = re.compile(r"\s#.*")
# they found something
MAY_EXIT_WITH_1 = ("paceline doctor", "paceline sync", "paceline clean", "paceline logs --grep")


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="paceline-guide-") as name:
        yield Path(name)


def make_project(folder: Path) -> None:
    folder.mkdir()
    found = {block.title: block.text for block in blocks("docs/tutorial.md") if block.title}
    sweeps = blocks("docs/sweeps.md")
    files = {
        "train.py": found["train.py"].replace("parse_args()", "parse_known_args()[0]"),
        "digits.toml": SEARCH,
        "sweep.toml": next(block.text for block in sweeps if block.language == "toml"),
        "experiment_configurations.txt": next(
            block.text for block in sweeps if block.text.startswith("# one command")
        ),
        "requirements.txt": "numpy\n",
        "requirements.lock": "numpy==2.0.0\n",
        "pyproject.toml": '[project]\nname = "spirals"\nversion = "1"\noptional-dependencies.gpu = ["numpy"]\n',
        "paceline.toml": '[project]\nscript = "train.py"\n',
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def guide_commands() -> list[str]:
    listed = [
        as_typed(command)
        for page in pages()
        if page not in OWN_TESTS and not page.startswith(SKIPPED_PAGES)
        for block in blocks(page)
        if block.language == "sh"
        for command in block.commands
        if is_executed(block, command)
    ]
    return list(dict.fromkeys(listed))


def copy_as_stopped(run: Path) -> str:
    """Copy a run as an older one that was stopped; return its id."""
    copy = run.with_name("20200101-120000-57cd")
    shutil.copytree(run, copy, symlinks=True)
    for verdict in copy.glob("job-starts/*/verdict"):
        verdict.write_text(STOPPED)
    record = copy / "run.json"
    record.write_text(record.read_text().replace('"teacher"', '"stopped"'))
    return copy.name


def with_names(commands: list[str], run_id: str, stopped: str) -> list[tuple[str, list[int]]]:
    """Return what to type in this project for each command, and its exit codes if it works."""
    names = {"OTHER-RUN": run_id, "RUN": run_id, "SWEEP": "digits", "my-sweep": "digits"}
    # a run that is done has nothing left to do
    names |= {"--resume last --time": f"--resume {stopped} --time"}
    names |= {"--rank 3": "--rank 1", "--attempt 2": "--attempt 1"}  # what this run has
    typed = []
    for command in commands:
        for name, meant in names.items():
            command = command.replace(f" {name}", f" {meant}")  # noqa: PLW2901
        typed.append((command, [0, 1] if command.startswith(MAY_EXIT_WITH_1) else [0]))
    return typed


@pytest.mark.slurm
@pytest.mark.timeout(600)
@pytest.mark.slow  # test_readme.py types commands of each kind
def test_the_commands_of_the_guides_work(home: Path, forked_cli: Commands) -> None:
    if missing := packages.missing_packages(Settings()):
        pytest.skip(f"the guides need Slurm: {' '.join(missing)}")
    commands = guide_commands()
    assert len(commands) > 40
    make_project(home / "spirals")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PACELINE_S", "SLURM"))
    }
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(home),
        "COLUMNS": "120",
        "PYTHONPATH": str(ROOT / "tests" / "light_torch"),
    }

    def bash(script: str) -> Completed:
        return subprocess.run(
            ["bash", "-c", script],
            cwd=home / "spirals",
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=500,
        )

    def execute(command: str) -> Completed:
        command = COMMENT.sub("", command)
        if SHELL.search(command) or not command.startswith("paceline "):
            return bash(command)
        return forked_cli(
            shlex.split(command)[1:], cwd=home / "spirals", env=environment, timeout=500
        )

    try:
        prepared = bash(PREPARED)
        assert prepared.returncode == 0, prepared.stdout[-3000:] + prepared.stderr[-3000:]
        (run,) = (home / "spirals/runs/spirals/default").glob("2*")
        variables = bash('eval "$(paceline sandbox env)"; env -0').stdout.split("\0")
        environment |= dict(line.split("=", 1) for line in variables if line)
        for command, allowed in with_names(commands, run.name, copy_as_stopped(run)):
            done = execute(command)
            assert done.returncode in allowed, f"{command}\n{done.stdout}\n{done.stderr}"
    finally:
        bash("paceline clean --processes --yes; paceline sandbox down")


@pytest.mark.slurm
def test_the_sandbox_from_python_works(tmp_path: Path) -> None:
    if missing := packages.missing_packages(Settings(network="plain")):
        pytest.skip(f"no Slurm: {' '.join(missing)}")
    (code,) = (block.text for block in blocks("docs/sandbox.md") if block.language == "python")
    with tempfile.TemporaryDirectory(prefix="paceline-box-") as folder:
        done = subprocess.run(
            [sys.executable, "-c", code.replace("/tmp/box", f"{folder}/box")],
            capture_output=True,
            text=True,
            timeout=200,
        )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 2
