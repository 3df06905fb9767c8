"""Run every command of the README, in order, in a copy of the project."""

from __future__ import annotations

import lzma
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.tools.sandbox import packages
from paceline.tools.sandbox.settings import Settings

ROOT = Path(__file__).parents[2]
MADE = ("make demo", "make test")
BUILD = ("Makefile", "pyproject.toml", "constraints.txt")


def blocks(text: str) -> list[list[str]]:
    """The commands of each ```sh block."""
    found = re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [block.strip().splitlines() for block in found]


COMMANDS = blocks((ROOT / "README.md").read_text(encoding="utf-8"))


def needs_slurm(commands: list[str]) -> bool:
    return any("sandbox" in command for command in commands)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The project as a newcomer has it: what git knows of, with a fifth of the digits."""
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "-C", ROOT, "ls-files", "-z", "examples", *BUILD],
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        target = tmp_path / "paceline" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    keep_digits(tmp_path / "paceline", parts=5)
    return tmp_path / "paceline"


def keep_digits(project: Path, *, parts: int) -> None:
    for path in project.rglob("*-ubyte.xz"):
        keep_one_of(parts, path)


def keep_one_of(parts: int, path: Path) -> None:
    """Cut off an IDX file: four bytes, the last of which counts the dimensions, then these, then the data."""
    content = lzma.decompress(path.read_bytes())
    head = 4 + 4 * content[3]
    count = struct.unpack(">I", content[4:8])[0] // parts
    data = content[head : head + (len(content) - head) // parts]
    path.write_bytes(
        lzma.compress(content[:4] + struct.pack(">I", count) + content[8:head] + data, preset=0)
    )


# `make test` plans these instead of training: tests/examples, tests/agent and tests/runtime train like that.
PLANNED = re.compile(r"paceline run (?=.*(?:--nodes 2|--max-restarts|--tensorboard))")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("trains", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_commands(copy: Path, tmp_path: Path, trains: bool) -> None:
    completed = [command for block in COMMANDS for command in block if command not in MADE]
    assert any(command.startswith("paceline submit") for command in completed)
    if any("sandbox" in command for command in completed) and (
        missing := packages.missing_packages(Settings())
    ):
        pytest.skip(f"the README's rehearsal needs Slurm: {' '.join(missing)}")
    if not trains:
        planned = [PLANNED.sub("paceline run --dry-run ", command) for command in completed]
        assert sum(command != typed for command, typed in zip(completed, planned, strict=True)) == 3
        # nothing to send
        completed = [command for command in planned if not command.startswith("paceline sync")]
    script = "\n".join(
        ["set -eu", "trap 'paceline sandbox down >/dev/null 2>&1 || true' EXIT"]
        + [f"echo '+ {index}'\n{command}" for index, command in enumerate(completed)]
    )
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PACELINE_SANDBOX": str(tmp_path / "sandbox"),
        # it is imported twenty times; `make demo` has the whole
        "PYTHONPATH": str(ROOT / "tests" / "light_torch"),
        "COLUMNS": "110",
    }
    keep_digits(copy, parts=4)
    environment.pop("PACELINE_SCRATCH", None)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=copy,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert done.stdout.count("final test accuracy") >= (3 if trains else 2)
    assert "#SBATCH --nodes=2" in done.stdout
    assert (copy / "model.safetensors").stat().st_size > 4 * 1_199_882


@pytest.mark.timeout(400)
def test_make_demo_reads_the_digits(copy: Path, tmp_path: Path) -> None:
    """Run a part of the demo, in the virtual environment of these tests."""
    (copy / ".make").mkdir()
    (copy / ".make" / "venv").touch()  # it is set up
    done = subprocess.run(
        ["make", "demo", "EPOCHS=1", f"VENV={Path(sys.executable).parents[1]}"],
        cwd=copy,
        env={**os.environ, "PACELINE_SCRATCH": str(tmp_path / "scratch"), "COLUMNS": "110"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    accuracy = re.search(r"final test accuracy: ([\d.]+)% of 400 images", done.stdout)
    assert accuracy, done.stdout[-2000:]
    assert float(accuracy[1]) >= 60, "a fifth of an epoch; tests/examples trains two"
    assert str(tmp_path / "scratch") in done.stdout + done.stderr, (
        "the run folder's path is printed"
    )
    assert re.search(r"^time line  .*█", done.stdout, flags=re.MULTILINE)
    assert re.search(r"^loss .*┤", done.stdout, flags=re.MULTILINE)
    assert "wrote the report to demo-report.html" in done.stdout


def test_the_two_commands_come_first() -> None:
    assert COMMANDS[0] == list(MADE)
    planned = subprocess.run(
        ["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "pytest" in planned.stdout


def test_links_resolve() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_paths_in_how_it_works_exist() -> None:
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .*\? \| (`.+`) \|$", page, flags=re.MULTILINE)
    paths = [path for row in rows for path in re.findall(r"`([^`]+)`", row)]
    assert len(paths) >= 20
    for path in paths:
        assert (ROOT / "src" / "paceline" / path).exists(), path
