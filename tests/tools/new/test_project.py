"""`paceline new`: each template makes a project whose test passes and which trains; bad input leaves nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.spec.job import Program
from paceline.spec.load import load_job
from paceline.tools.new.project import (
    COMMON,
    FILES,
    TEMPLATES,
    check_name,
    create_project,
    find_template,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[3]
Paceline = Callable[..., "subprocess.CompletedProcess[str]"]

# What each project prints last, and between which numbers the result is. The README of the project promises it.
RESULTS = {
    "blank": (r"final test error: ([\d.]+)", 0.0, 0.01),
    "mnist": (r"final test accuracy: ([\d.]+)%", 90.0, 100.0),
    "text": (r"final perplexity: ([\d.]+)", 1.0, 2.0),
    "classify": (r"final test accuracy: ([\d.]+)%", 95.0, 100.0),
    "stream": (r"final test accuracy: ([\d.]+)%", 95.0, 100.0),
    "lightning": (r"final test accuracy: ([\d.]+)%", 95.0, 100.0),
    "accelerate": (r"final test accuracy: ([\d.]+)%", 95.0, 100.0),
    "hf": (r"final perplexity: ([\d.]+)", 1.0, 3.0),
}
# The others take longer, and their scripts are those of the examples, which have tests of their own.
SOME = [pytest.param(name, marks=() if name == "mnist" else pytest.mark.slow) for name in TEMPLATES]


@pytest.mark.parametrize("template", SOME)
def test_the_test_of_a_new_project_passes(
    template: str, tmp_path: Path, paceline: Paceline
) -> None:
    made = paceline("new", "my.project-1", "--template", template, check=True)
    folder = tmp_path / "my.project-1"
    assert "  cd my.project-1\n" in made.stdout
    assert "  paceline run " in made.stdout
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {*TEMPLATES[template].files, *COMMON.values()}
    for name in COMMON.values():
        assert not re.search(r"@\w+@", (folder / name).read_text(encoding="utf-8")), (
            f"{name} has a gap"
        )
    job = load_job(Program(""), cwd=folder)
    assert (job.project.name, job.project.script[0]) == ("my.project-1", "train.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "1 passed" in done.stdout
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    "template",
    [pytest.param(name, marks=() if name == "blank" else pytest.mark.slow) for name in TEMPLATES],
)
def test_a_new_project_trains(template: str, tmp_path: Path, paceline: Paceline) -> None:
    create_project("project", TEMPLATES[template], tmp_path)
    done = paceline(
        "run", "--cpu", "--nproc", "2", cwd=tmp_path / "project", check=True, timeout=500
    )
    pattern, least, most = RESULTS[template]
    found = re.search(pattern, done.stdout)
    assert found, done.stdout + done.stderr
    assert least < float(found[1]) <= most, "the README promises it"


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "a b",
        ".",
        "..",
        "../x",
        "a/b",
        "/tmp/x",
        "-x",
        "--help",
        "_x",
        ".x",
        "x.",
        "com1.py",
        "x" * 65,
        "train.py",
        "a\nb",
        "a\x1b[31m",
        "a;b",
        "$HOME",
        "~",
        "a\\b",
        "a:b",
        '"',
    ],
)
def test_bad_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as problem:
        create_project(name, TEMPLATES["blank"], tmp_path)
    assert problem.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["a", "digits", "my-project_2", "v1.0", "2026", "Größe", "漢字", "x" * 64]
)
def test_good_names(name: str, tmp_path: Path) -> None:
    check_name(name)
    create_project(name, TEMPLATES["blank"], tmp_path)
    assert load_job(Program(""), cwd=tmp_path / name).project_name == name


@pytest.mark.parametrize("kind", ["file", "folder", "dangling link"])
def test_what_is_there_stays(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "project"
    if kind == "file":
        path.write_text("mine")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("nowhere")
    with pytest.raises(UsageError, match="A file or folder named project already exists"):
        create_project("project", TEMPLATES["blank"], tmp_path)
    assert list(tmp_path.iterdir()) == [path]
    assert not path.is_dir() or list(path.iterdir()) == []


def test_unknown_templates_and_names_on_the_command_line(
    tmp_path: Path, paceline: Paceline
) -> None:
    with pytest.raises(UsageError) as problem:
        find_template("MINST")
    assert "The templates are blank, mnist" in problem.value.hint
    done = paceline("new", "x", "--template", "\x1b[31mred")
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert "\x1b" not in done.stderr
    assert "The templates are blank, mnist" in done.stderr


def test_the_wheel_is_told_to_contain_the_files(tmp_path: Path) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    included = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included == {
        f"examples/{each.example}": f"paceline/tools/new/files/examples/{each.example}"
        for each in TEMPLATES.values()
        if each.example
    }
    for template in TEMPLATES.values():
        assert all((template.folder / name).is_file() for name in template.files)
    assert all((FILES / "common" / name).is_file() for name in COMMON)


@pytest.mark.slow
def test_a_wheel_has_everything(tmp_path: Path) -> None:
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--quiet",
        "--wheel-dir",
        str(tmp_path),
        str(ROOT),
    ]
    done = subprocess.run(build, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no wheel can be built here: {done.stderr[-300:]}")
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    for name in TEMPLATES:
        done = subprocess.run(
            [sys.executable, "-m", "paceline", "new", name, "--template", name],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        create_project(f"{name}.expected", TEMPLATES[name], tmp_path)
        for path in (tmp_path / f"{name}.expected").rglob("*"):
            made = tmp_path / name / path.relative_to(tmp_path / f"{name}.expected")
            # these have the name in them
            if path.is_file() and path.name not in ("paceline.toml", "README.md"):
                assert made.read_bytes() == path.read_bytes()
            assert made.exists()
