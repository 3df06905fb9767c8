"""Checks of an environment before a job is submitted, and which variables of the submitter are passed."""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.contract.redaction import REDACTED, redact, redact_args
from paceline.contract.run_folder import USED_BY_JOBS
from paceline.errors import SpecError
from paceline.launch import checks as disk
from paceline.launch import checks as job_checks
from paceline.launch.checks import check_disk, check_folder, check_program, file_system
from paceline.launch.environment.store import check_built
from paceline.slurm.partitions import Partition
from paceline.spec.findings import GOOD, PROBLEM, WARNING
from tests.adversary.second_user import STRANGER, call_as, needs_two_users, shared_folder
from tests.launch.environment.jobs import bare, job_in, plan_of

PASSWORD = "http://ann:hush@proxy.example.org:3128"


@pytest.mark.parametrize(
    ("keys", "text", "hint"),
    [
        (
            {"environment__kind": "venv", "environment__path": "gone"},
            "There is no venv in",
            "paceline env build",
        ),
        (
            {"environment__kind": "conda", "environment__path": "/gone"},
            "/gone/bin/python cannot",
            "conda env list",
        ),
        (
            {"environment__python": "/gone/python3"},
            "/gone/python3 cannot be run here",
            "Correct the path.",
        ),
        (
            {"environment__python": "/etc/passwd"},
            "/etc/passwd cannot be run here: Permission denied",
            "Correct",
        ),
    ],
)
def test_a_missing_python(tmp_path: Path, keys: dict[str, str], text: str, hint: str) -> None:
    job = job_in(tmp_path / "p", **keys)
    (problem,) = check_program(job, plan_of(job, bare()))
    assert problem.level == PROBLEM
    assert text in problem.text
    assert "(--environment__p" in problem.text, "its source is named"
    assert hint in problem.hint


@needs_two_users
def test_a_scratch_folder_that_may_not_be_used() -> None:
    """It is named, and no check breaks off."""
    with shared_folder() as folder:
        (folder / "closed").mkdir(mode=0o700)
        plan = plan_of(job_in(folder / "p"), bare())
        closed = replace(plan.run_path, scratch=folder / "closed" / "runs")

        def check() -> None:
            (found,) = check_folder(replace(plan, run_path=closed), [])
            assert found.level == PROBLEM
            assert f"cannot write to the scratch folder {closed.scratch}" in found.text

        call_as(STRANGER, check)


def test_imports_from_a_path_that_the_script_adds(tmp_path: Path) -> None:
    lines = "import __main__\nimport sys\nsys.path.insert(0, 'lib')\nimport nowhere_to_be_seen\n"
    for script, level in ((lines, WARNING), (lines.replace("sys.path", "sys.argv"), PROBLEM)):
        job = job_in(tmp_path / "p", script)
        *_, found = check_program(job, plan_of(job, bare()))
        assert (found.about, found.level) == ("imports", level)
        assert "imports nowhere_to_be_seen, which" in found.text, "and nothing else is missed"


def test_the_runtime_needs_torch(tmp_path: Path) -> None:
    job = job_in(tmp_path / "p", "import paceline\n", environment__python="/usr/bin/python3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_ON_CLUSTER", "alps")
        *_, found = check_program(job, plan_of(job, {**bare(), "PYTHONNOUSERSITE": "1"}))
    assert (found.about, found.level) == ("imports", PROBLEM)
    assert found.text == "train.py imports torch, which /usr/bin/python3 does not have."
    assert "[profiles.alps.environment]" in found.hint
    assert "`paceline env build --on alps`" in found.hint


def test_a_disk_that_takes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    assert check_disk(tmp_path / "runs").level == GOOD
    with monkeypatch.context() as patch:
        patch.setattr(disk.os, "fsync", fail)
        found = check_disk(tmp_path / "runs")
    assert found.level == PROBLEM
    assert found.text.endswith("runs: Disk quota exceeded.")
    assert list(tmp_path.iterdir()) == []


def test_the_file_system_of_a_path(tmp_path: Path) -> None:
    mounts, real = tmp_path / "mounts", tmp_path.resolve()
    mounts.write_text(
        f"/dev/sda1 / ext4 rw 0 0\nmgs:/fs {real.parent} lustre rw 0 0\n"
        f"/dev/sdb {real}\\040x xfs rw 0 0\n"
    )
    assert file_system(tmp_path / "below", mounts) == "lustre"
    assert file_system(Path("/"), mounts) == "ext4"
    assert file_system(Path(f"{real} x/y"), mounts) == "xfs"
    assert file_system(tmp_path, tmp_path / "absent") == ""


def test_a_full_disk_is_a_sentence_with_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(job_in(tmp_path / "p"), bare())
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    (found,) = [each for each in check_folder(plan, []) if each.about == "disk"]
    scratch = plan.run_path.scratch
    assert (found.level, found.text) == (
        PROBLEM,
        f"The scratch folder {scratch} has little space left: 0.0 GB free.",
    )


def test_a_scratch_folder_on_a_local_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(job_in(tmp_path / "p"), bare())
    monkeypatch.setattr(job_checks, "file_system", lambda path: "ext4")
    partitions = [Partition("main")]
    assert [
        found.level for found in check_folder(plan, partitions) if found.about == "run folder"
    ] == [WARNING]
    conf = tmp_path / "slurm.conf"
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_CONF", str(conf))
        for text, level in (
            ("ClusterName=sandbox\nSlurmctldHost=localhost(::1)\n", GOOD),
            ("ClusterName=big\n", WARNING),
        ):
            conf.write_text(text)  # the nodes of the sandbox are on this machine
            assert [
                found.level
                for found in check_folder(plan, partitions)
                if found.about == "run folder"
            ] == [level]
    plan.run_path.scratch.mkdir(parents=True, exist_ok=True)
    (plan.run_path.scratch / USED_BY_JOBS).touch()
    assert [
        found.level for found in check_folder(plan, partitions) if found.about == "run folder"
    ] == [GOOD]


def test_proxies_are_passed_by_name_in_one_file(tmp_path: Path) -> None:
    environ = bare(https_proxy=PASSWORD, NO_PROXY="localhost", OTHER_PROXY="x")
    plan = plan_of(
        job_in(tmp_path / "p", environment__proxies=True, launch__style="mpirun"), environ
    )
    assert f"export https_proxy={PASSWORD}\n" in plan.environment_file
    assert "export NO_PROXY=localhost\n" in plan.environment_file
    assert "OTHER_PROXY" not in plan.environment_file
    assert "hush" not in plan.script + plan.show() + plan.launch_spec.to_json()
    assert "-x https_proxy}" in plan.script, "mpirun carries it to the other nodes, by name"
    assert "proxy" not in plan_of(job_in(tmp_path / "p"), environ).environment_file.lower()


def test_an_address_with_a_password_is_a_secret(tmp_path: Path) -> None:
    variables = {"HTTPS_PROXY": PASSWORD, "ADDRESS": "http://proxy:3128/a:b@c"}
    plan = plan_of(job_in(tmp_path / "p", environment__variables=variables), bare())
    assert plan.launch_spec.variables == {"ADDRESS": "http://proxy:3128/a:b@c"}
    assert f"export HTTPS_PROXY={PASSWORD}\n" in plan.environment_file
    assert redact("HTTPS_PROXY", PASSWORD) == REDACTED
    token = "mine @ git+https://hush@git.example.org/mine.git"
    assert redact("", token) == REDACTED
    assert redact_args([token]) == ["mine @ git+https://***@git.example.org/mine.git"]
    for open_to_all in (
        "git+ssh://git@git.example.org/mine.git",
        "https://example.org/?mail=a@b",
        "user@host",
    ):
        assert redact("", open_to_all) == open_to_all


def test_modules_of_the_login_shell_are_passed_only_if_needed(tmp_path: Path) -> None:
    environ = bare(
        MODULEPATH="/m", LOADEDMODULES="gcc/13", _ModuleTable001_="eyJ", LMOD_SETTARG="no"
    )
    venv = {"environment__kind": "venv", "environment__path": "/v"}
    nothing = plan_of(job_in(tmp_path / "p", **venv), environ).environment_file
    assert "MODULE" not in nothing
    purged = plan_of(
        job_in(tmp_path / "p", **venv, environment__modules=["a"]), environ
    ).environment_file
    for name in ("MODULEPATH=/m", "LOADEDMODULES=gcc/13", "_ModuleTable001_=eyJ"):
        assert f"export {name}\n" in purged
    plan = plan_of(
        job_in(tmp_path / "p", **venv, environment__modules=["a"], environment__purge=False),
        environ,
    ).environment_file
    assert "MODULEPATH=/m" in plan
    assert "gcc/13" not in plan, "its variables stay behind, so it must not pass for loaded"


def test_unused_requirements(tmp_path: Path) -> None:
    (found,) = check_built(job_in(tmp_path / "p", environment__requirements="requirements.txt"))
    assert (found.level, found.hint) == (WARNING, 'Set kind = "venv" in [environment].')
    assert check_built(job_in(tmp_path / "p")) == []
    (found,) = check_built(job_in(tmp_path / "p", environment__image="torch.sif"))
    assert (found.level, found.hint) == (WARNING, 'Set kind = "container" in [environment].')


def test_a_venv_needs_a_path_or_requirements(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="there is no path") as caught:
        job_in(tmp_path / "p", environment__kind="venv")
    assert "or requirements to build it from" in caught.value.hint
    with pytest.raises(SpecError, match="there is no image"):
        job_in(tmp_path / "p", environment__kind="container")
    assert plan_of(job_in(tmp_path / "p"), bare()).launch_spec.python == sys.executable
