"""Requirements from every kind of file, and golden build scripts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.errors import SpecError
from paceline.launch.environment.build import plan_build
from paceline.launch.environment.build_script import BuildResources, definition, venv_steps
from paceline.launch.environment.store import environment_inputs, read_requirements
from tests.launch.environment.cases import HERE, texts
from tests.launch.environment.jobs import job_in

AGAIN = "if the change is meant: python -m tests.launch.environment.cases, then read the difference"


@pytest.mark.parametrize("name", texts())
def test_build_scripts_match_the_golden_ones(name: str) -> None:
    assert texts()[name] == (HERE / name).read_text(encoding="utf-8"), AGAIN


def test_no_golden_file_is_unused() -> None:
    assert {path.name for path in HERE.iterdir()} == set(texts()), AGAIN


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_passes() -> None:
    done = subprocess.run(
        ["shellcheck", "--exclude=SC1090,SC1091", *HERE.glob("*.sbatch")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_requirements_files_and_their_references(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    (folder / "parts").mkdir(parents=True)
    (folder / "wheels").mkdir()
    (folder / "requirements.txt").write_text(
        "# what it needs\ntorch==2.6.0  # the engine\n-r parts/more.txt\n-cparts/held.txt\n"
        "numpy \\\n    >=1.26\n--find-links wheels\n"
    )
    (folder / "parts" / "more.txt").write_text("-r even.txt\nrich>=13 ; python_version > '3'\n")
    (folder / "parts" / "even.txt").write_text("﻿psutil\n", encoding="utf-8")
    (folder / "parts" / "held.txt").write_text("psutil<9\n")
    found = read_requirements(job_in(folder))
    assert found.lines == [
        "torch==2.6.0  # the engine",
        "psutil",
        "rich>=13 ; python_version > '3'",
        "numpy \\",
        ">=1.26",
        f"--find-links {folder / 'wheels'}",
    ]
    assert found.constraints == ["psutil<9"]


def test_pyproject_with_extras(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "mine"\ndependencies = ["torch>=2.6"]\n'
        '[project.optional-dependencies]\ngpu = ["nvidia-ml-py"]\nall = ["mine[gpu]", "rich"]\n'
        'most = ["Mine[all, most]", "psutil"]\n'
    )
    assert read_requirements(job_in(folder)).lines == ["torch>=2.6"]
    job = job_in(folder, environment__requirements="pyproject.toml[all]")
    assert read_requirements(job).lines == ["torch>=2.6", "rich", "nvidia-ml-py"]
    job = job_in(folder, environment__requirements="pyproject.toml[most]")
    lines = ["torch>=2.6", "psutil", "rich", "nvidia-ml-py"]
    assert read_requirements(job).lines == lines, (
        "an index may have a stranger's package called mine"
    )
    with pytest.raises(SpecError, match="has no extra 'gpus'"):
        read_requirements(job_in(folder, environment__requirements=["pyproject.toml[gpus]"]))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("uv.lock", "", "uv export"),
        ("poetry.lock", "", "poetry export"),
        ("environment.yml", "", "conda env create"),
        ("pyproject.toml", "[tool.poetry]\n", "poetry export"),
        ("pyproject.toml", '[project]\nname = "p"\ndynamic = ["dependencies"]\n', "pip-compile"),
        ("requirements.txt", "-r gone.txt\n", "gone.txt, which does not exist"),
        ("requirements.txt", "./gone\n", "The requirement './gone' refers to"),
        ("Pipfile.lock", "{}", "pipenv requirements --hash"),
        ("pyproject.toml", "[project\n", "is not valid TOML"),
    ],
)
def test_errors_about_unsupported_requirements_say_what_to_do(
    tmp_path: Path, name: str, text: str, expected: str
) -> None:
    folder = tmp_path / "p"
    folder.mkdir()
    (folder / name).write_text(text)
    with pytest.raises(SpecError) as caught:
        read_requirements(job_in(folder))
    assert expected in str(caught.value)


def test_on_a_cluster_errors_name_the_folder_of_the_laptop(tmp_path: Path) -> None:
    sent = tmp_path / "cache" / "project"
    sent.mkdir(parents=True)
    (sent / "paceline.toml").write_text('[environment]\nrequirements = ["gone.txt"]\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_ON_CLUSTER", "alps")
        patch.setenv("PACELINE_SENT_FOLDER", str(sent))
        patch.setenv("PACELINE_LAPTOP_FOLDER", "/home/ann/project")
        with pytest.raises(SpecError) as named:
            read_requirements(job_in(sent))
        (sent / "paceline.toml").unlink()
        with pytest.raises(SpecError) as nothing:
            read_requirements(job_in(sent))
    assert (
        "in /home/ann/project/paceline.toml names /home/ann/project/gone.txt, which does not"
        in named.value.message
    )
    assert nothing.value.message.startswith(
        "/home/ann/project has nothing to build from: none of requirements.lock"
    )
    assert "or git ignores it, so that it was not sent" in nothing.value.message
    assert "paceline env build FILE --on alps" in nothing.value.hint


def test_the_key_depends_on_the_content_only(tmp_path: Path) -> None:
    def key(folder: Path, text: str, **keys: object) -> str:
        folder.mkdir(exist_ok=True)
        (folder / "requirements.txt").write_text(text)
        job = job_in(
            folder, environment__kind="venv", environment__requirements="requirements.txt", **keys
        )
        return environment_inputs(job, {"PATH": "/usr/bin:/bin"}).key

    package = tmp_path / "a" / "package"
    package.mkdir(parents=True)
    (package / "pyproject.toml").write_text("")
    first = key(tmp_path / "a", "rich\n")
    assert key(tmp_path / "b", "# the same\n\nrich\n") == first
    assert key(tmp_path / "a", "rich==13\n") != first
    assert key(tmp_path / "a", "rich\n", environment__system_packages=True) != first
    assert key(tmp_path / "a", "rich\n", environment__horovod=True) != first
    with_package = key(tmp_path / "a", "./package\n")
    (package / "code.py").write_text("x = 1\n")
    changed = key(tmp_path / "a", "./package\n")
    assert changed != with_package
    linked = key(tmp_path / "a", "-e ./package\n")
    (package / "code.py").write_text("x = 2\n")
    assert key(tmp_path / "a", "./package\n") != changed
    assert key(tmp_path / "a", "-e ./package\n") == linked, "a link shows what the folder has"


def test_torch_is_installed_first_with_all_options_of_the_file(tmp_path: Path) -> None:
    """Without `--pre` it would be another torch, which then stays."""
    job = job_in(tmp_path / "p", project__scratch=str(tmp_path))
    options = [
        "--pre",
        "--extra-index-url https://wheels.example.org",
        "--trusted-host wheels.example.org",
    ]
    (job.folder / "requirements.txt").write_text("\n".join([*options, "-e .", "torch", "rich"]))
    (job.folder / "pyproject.toml").write_text('[project]\nname = "p"\n')
    plan = plan_build(job, environment_inputs(job, {}), {}, BuildResources())
    assert plan.files["first.txt"].splitlines() == [*options, "torch"]


def test_uv_builds_only_what_it_reads_as_pip_does() -> None:
    def steps(*lines: str, **more: bool) -> str:
        return "\n".join(venv_steps(python="python3", version="3.12", lines=lines, **more))

    assert "uv venv" in steps("torch", "--extra-index-url https://wheels.example.org").replace(
        '"$uv"', "uv"
    )
    assert "$uv" not in steps("--pre", "torch")
    assert "$uv" not in steps("torch", horovod=True)


def test_variables_in_requirements_are_passed_and_stored_nowhere_else(tmp_path: Path) -> None:
    job = job_in(tmp_path / "p", project__scratch=str(tmp_path))
    (job.folder / "requirements.txt").write_text(
        "mine @ git+https://${GIT_TOKEN}@git.example.org/mine.git\n"
    )
    environ = {"GIT_TOKEN": "hush", "OTHER_TOKEN": "hush-too"}
    plan = plan_build(job, environment_inputs(job, environ), environ, BuildResources())
    assert plan.environment == "export GIT_TOKEN=hush\n"
    assert "hush" not in "".join(plan.files.values()) + str(plan.submitter)


def test_options_of_a_package_are_not_a_path(tmp_path: Path) -> None:
    job = job_in(tmp_path / "p")
    line = 'mpi4py --config-settings="--build-option=--mpicc=/opt/mpi/bin/mpicc"'
    (job.folder / "requirements.txt").write_text(line)
    found = read_requirements(job)
    assert (found.lines, found.local) == ([line], {})


def test_a_base_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.sif").write_text("one")
    with monkeypatch.context() as patch:
        patch.setenv("HOME", str(tmp_path))
        job = job_in(tmp_path / "p", environment__kind="container", environment__base="~/torch.sif")
        assert environment_inputs(job, {}).base == str(tmp_path / "torch.sif")


def test_a_replaced_image_is_another_base(tmp_path: Path) -> None:
    job = job_in(tmp_path / "p", environment__kind="container", environment__base="torch.sif")
    with pytest.raises(SpecError, match="which does not exist"):
        environment_inputs(job, {})
    (tmp_path / "p" / "torch.sif").write_text("one")
    first = environment_inputs(job, {}).key
    assert environment_inputs(job, {}).key == first
    (tmp_path / "p" / "torch.sif").write_text("another")
    assert environment_inputs(job, {}).key != first


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--index-url https://ann:hush@wheels.example.org", "would put a password into the image"),
        ("mine @ git+https://hush@git.example.org/mine.git", "would put a password into the image"),
        ("./package", "outside of the image"),
        ("-e .", "outside of the image"),
        ("mine @ file:///home/ann/mine", "outside of the image"),
    ],
)
def test_forbidden_lines_in_an_image_definition(line: str, expected: str) -> None:
    with pytest.raises(SpecError, match=expected) as caught:
        definition(base="docker://python:3.12", origin="requirements.txt", lines=[line])
    assert "hush" not in str(caught.value)
