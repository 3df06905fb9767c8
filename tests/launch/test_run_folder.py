"""Run folders: their path, and that none is left half-made."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import EnvironmentProblem, SpecError, UsageError
from paceline.launch import run_folder as folders
from paceline.launch.local_run import usable_gpus
from paceline.launch.submission import path_in_run, stored_run_half, take_snapshot, write_run_half
from paceline.spec.job import Job, Program
from paceline.spec.load import load_job
from paceline.spec.run_path import RunPath, new_run_id, run_path_of
from paceline.watch.records import newest_first


def job_in(folder: Path, text: str = "") -> Job:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "paceline.toml").write_text(text)
    return load_job(Program("train.py"), cwd=folder)


def test_scratch_from_environment_then_file_then_default(tmp_path: Path) -> None:
    plain = job_in(tmp_path / "p")
    configured = job_in(tmp_path / "q", '[project]\nscratch = "$WORK/${SUB}/x"')
    relative = job_in(tmp_path / "r", '[project]\nscratch = "../here"')
    variables = {"WORK": "/work", "SUB": "me"}
    assert folders.resolve_scratch(plain, {}) == tmp_path / "p" / "runs"
    assert folders.resolve_scratch(configured, variables) == Path("/work/me/x")
    assert folders.resolve_scratch(relative, {}) == tmp_path / "here"
    assert folders.resolve_scratch(configured, {**variables, "PACELINE_SCRATCH": "/big"}) == Path(
        "/big"
    )
    with pytest.raises(SpecError, match=r"\$SUB is not set"):
        folders.resolve_scratch(configured, {"WORK": "/work"})


def test_a_run_id_in_use_is_an_error_and_the_run_stays(tmp_path: Path) -> None:
    run_path = RunPath(tmp_path, "p", "e", new_run_id())
    with folders.open_run_folder(run_path, is_new=True):
        pass
    with pytest.raises(EnvironmentProblem, match="File exists"):
        with folders.open_run_folder(run_path, is_new=True):
            pass
    assert run_path.folder.path.is_dir()


def test_a_run_that_cannot_go_on_is_as_it_was(tmp_path: Path) -> None:
    run_path = RunPath(tmp_path, "p", "e", new_run_id())
    folder = run_path.folder
    with folders.open_run_folder(run_path, is_new=True):
        folder.run_json.write_text("first")
        folder.environment.touch(mode=0o600)
        folder.code.symlink_to("../somewhere")
        folder.cancelled.touch()

    def change() -> None:
        with folders.open_run_folder(run_path, is_new=False):
            folder.run_json.write_text("second")
            folder.environment.unlink()
            folder.code.unlink()
            folder.cancelled.unlink()
            folder.script.touch()
            raise SpecError("no")

    with pytest.raises(SpecError):
        change()
    assert folder.run_json.read_text() == "first"
    assert folder.environment.stat().st_mode & 0o777 == 0o600
    assert os.readlink(folder.code) == "../somewhere"
    assert sorted(os.listdir(folder.path)) == ["cancelled", "code", "environment.sh", "run.json"]


def test_a_failed_body_removes_only_its_own_folders(tmp_path: Path) -> None:
    scratch = tmp_path / "deep" / "scratch"
    run_path = RunPath(scratch, "p", "e", new_run_id())

    def fail() -> None:
        path = replace(run_path, run_id=new_run_id())
        with folders.open_run_folder(path, is_new=True):
            (path.folder.path / "half").write_text("x")
            raise SpecError("no")

    with pytest.raises(SpecError):
        fail()
    assert list(tmp_path.iterdir()) == []
    with folders.open_run_folder(run_path, is_new=True):
        pass
    with pytest.raises(SpecError):
        fail()
    assert list((scratch / "p" / "e").iterdir()) == [run_path.folder.path]


def test_only_a_new_scratch_folder_of_a_project_is_hidden_from_git_and_pytest(
    tmp_path: Path,
) -> None:
    def names(scratch: Path) -> list[str]:
        with folders.open_run_folder(RunPath(scratch, "p", "e", new_run_id()), is_new=True):
            return sorted(os.listdir(scratch))

    project = tmp_path / "project"
    (project / "mine").mkdir(parents=True)
    (project / "paceline.toml").touch()
    hidden = [".gitignore", "conftest.py", "p"]
    assert names(tmp_path / "no-project" / "runs") == names(project / "a" / "b") == hidden
    assert names(project / "a" / "b") == hidden
    # elsewhere, and a folder of the user's
    assert names(tmp_path / "scratch") == names(project / "mine") == ["p"]


def test_a_run_starts_if_the_files_for_git_and_pytest_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "SHIELDS", {"missing/.gitignore": "*", "conftest.py": ""})
    run_path = RunPath(tmp_path / "runs", "p", "e", new_run_id())
    with folders.open_run_folder(run_path, is_new=True):
        assert run_path.folder.path.is_dir()
    assert newest_first(tmp_path / "runs") == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB, which fills up like a disk."""
    path = tmp_path / "small"
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_is_an_error_and_leaves_nothing(small_disk: Path) -> None:
    run_path = RunPath(small_disk, "p", "e", new_run_id())
    with pytest.raises(EnvironmentProblem, match="No space left on device") as caught:
        with folders.open_run_folder(run_path, is_new=True):
            (run_path.folder.path / "big").write_bytes(b"0" * 2**20)
    assert "PACELINE_SCRATCH" in caught.value.hint
    assert list(small_disk.iterdir()) == []


def test_a_file_in_place_of_the_scratch_folder(tmp_path: Path) -> None:
    (tmp_path / "scratch").write_text("")
    with pytest.raises(EnvironmentProblem, match="Cannot create the run folder"):
        with folders.open_run_folder(
            RunPath(tmp_path / "scratch", "p", "e", new_run_id()), is_new=True
        ):
            pass


def test_find_runs_by_folder_id_suffix_and_last(tmp_path: Path) -> None:
    for run_id in ("20300101-000000-aaaa", "20300102-000000-bbbb", "20300102-000000-cbbb"):
        folder = tmp_path / "p" / "e" / run_id
        folder.mkdir(parents=True)
        (folder / "run.json").write_text("{}")
    newest = tmp_path / "p" / "e" / "20300102-000000-cbbb"
    assert folders.find_run("aaaa", tmp_path).path.name == "20300101-000000-aaaa"
    assert folders.find_run("last", tmp_path).path == newest
    assert folders.find_run(str(newest), tmp_path / "elsewhere").path == newest
    assert run_path_of(folders.find_run("cbbb", tmp_path)) == RunPath(
        tmp_path, "p", "e", newest.name
    )
    assert folders.find_run("20300101", tmp_path).path.name == "20300101-000000-aaaa"
    with pytest.raises(
        UsageError, match="matches 2 runs: 20300102-000000-cbbb, 20300102-000000-bbbb"
    ):
        folders.find_run("bbb", tmp_path)
    with pytest.raises(UsageError, match="no run 'zzz'"):
        folders.find_run("zzz", tmp_path)


def test_a_run_is_found_by_its_earlier_jobs(tmp_path: Path) -> None:
    folder = tmp_path / "p" / "e" / "30300101-000000-aaaa"
    (folder / "job-starts" / "2-0").mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (folder / "job").write_text("4")
    for name in ("4", "2"):
        assert folders.find_run(name, tmp_path).path == folder


def test_find_runs_by_name_and_job_id(tmp_path: Path) -> None:
    for run_id, details in {
        "20300101-000000-aaaa": '{"name": "baseline"}',
        "20300102-000000-bbbb": "not JSON",
    }.items():
        folder = tmp_path / "p" / "e" / run_id
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(details)
    (folder / "job").write_text("4711\n")
    assert folders.find_run("baseline", tmp_path).path.name == "20300101-000000-aaaa"
    assert folders.find_run("4711", tmp_path).path == folder
    with pytest.raises(UsageError, match="no run '471'"):
        folders.find_run("471", tmp_path)
    for empty in ("", " "):
        with pytest.raises(UsageError, match="name is empty"):
            folders.find_run(empty, tmp_path)


def test_find_a_run_without_a_name_by_its_program(tmp_path: Path) -> None:
    """That is what `paceline ps` shows instead."""
    for number, details in enumerate(
        ('{"program": "train.py"}', '{"name": "big", "program": "train.py"}')
    ):
        folder = tmp_path / "p" / "e" / f"2030010{number}-000000-000{number}"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(details)
    assert folders.find_run("train.py", tmp_path).path.name.endswith("0000")
    with pytest.raises(UsageError, match="no run 'train'"):
        folders.find_run("train", tmp_path)


def test_names_and_job_ids_come_before_the_ends_of_run_ids(tmp_path: Path) -> None:
    for number, run_id in enumerate(("20300101-000000-a017", "20300102-000000-bbba")):
        folder = tmp_path / "p" / "e" / run_id
        folder.mkdir(parents=True)
        (folder / "run.json").write_text('{"name": "a"}' if number == 0 else "{}")
        (folder / "job").write_text(f"{2 + number * 15}\n")
    for name, expected in {
        "a": "a017",
        "2": "a017",
        "17": "bbba",
        "017": "a017",
        "ba": "bbba",
    }.items():
        assert folders.find_run(name, tmp_path).path.name.endswith(expected)
    with pytest.raises(UsageError, match="'20' matches 2 runs"):
        folders.find_run("20", tmp_path)


def test_a_mistyped_job_id_changes_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "p" / "e" / "20300101-000000-a017"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"name": "7b"}')
    (folder / "job").write_text("4711\n")
    for part in ("017", "203", "7"):  # the end of the id, its start, and the start of the name
        assert folders.find_run(part, tmp_path).path == folder, "to look at"
        with pytest.raises(
            UsageError, match=f"No run has the job id {part}.*{folder.name}"
        ) as caught:
            folders.find_own_run(part, tmp_path)
        assert caught.value.hint == f"If you mean that run, give its whole id: {folder.name}"
    for name in ("4711", "a017", "7b", folder.name, "20300101-", "last"):
        assert folders.find_own_run(name, tmp_path).path == folder
    (folder / "run.json").write_text('{"name": "017"}')
    assert folders.find_own_run("017", tmp_path).path == folder, "its whole name"
    trial = tmp_path / "p" / "e" / "digits" / "trials" / "3"
    trial.mkdir(parents=True)
    (trial / "run.json").write_text("{}")
    monkeypatch.chdir(trial.parent)
    assert folders.find_own_run("3", tmp_path).path == trial, "a folder"


def test_find_runs_by_the_start_of_their_name(tmp_path: Path) -> None:
    for number, name in enumerate(("lm-big", "lm-base", "vit", "vit")):
        folder = tmp_path / "p" / "e" / f"2030010{number}-000000-000{number}"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(f'{{"name": "{name}"}}')
    assert folders.find_run("lm-bi", tmp_path).path.name.endswith("0000")
    for part, listed in {
        "lm-b": "matches 2 runs: 20300101-000000-0001 (lm-base), 20300100-000000-0000 (lm-big).",
        "vit": "matches 2 runs: 20300103-000000-0003 (vit), 20300102-000000-0002 (vit).",
    }.items():
        with pytest.raises(UsageError, match=re.escape(listed)):
            folders.find_run(part, tmp_path)
    with pytest.raises(UsageError, match="no run 'big'"):
        folders.find_run("big", tmp_path)
    trial = tmp_path / "p" / "e" / "digits" / "trials" / "3"
    trial.mkdir(parents=True)
    (trial / "run.json").write_text("{}")
    (folder / "run.json").write_text('{"name": "digits-30"}')
    assert folders.find_run("digits-3", tmp_path).path == trial, "a trial's whole name"


@pytest.mark.parametrize("scratch", [".", "..", "runs", "../elsewhere"])
def test_snapshots_exclude_runs_wherever_they_are(scratch: str, tmp_path: Path) -> None:
    job = job_in(tmp_path / "p")
    (tmp_path / "p" / "train.py").touch()
    run_path = RunPath((tmp_path / "p" / scratch).resolve(), "p", "e", "id")
    for _ in range(2):  # the second time, the first run's files exist, too
        run_path = replace(run_path, run_id=new_run_id())
        with folders.open_run_folder(run_path, is_new=True):
            (run_path.folder.path / "log").touch()
            snapshot = take_snapshot(job, run_path, [], required=True)
        assert snapshot is not None
        assert {path.name for path in snapshot.path.iterdir()} == {"paceline.toml", "train.py"}


def test_path_in_run(tmp_path: Path) -> None:
    job = job_in(tmp_path / "p")
    run_path = RunPath(tmp_path / "s", "p", "e", "id")
    work = run_path.folder.path / "work" / "p"
    assert path_in_run(Path("a/train.py"), job=job, run_path=run_path) == work / "a" / "train.py"
    assert path_in_run(Path("../other.py"), job=job, run_path=run_path) == tmp_path / "other.py"


@pytest.mark.parametrize("compiled", [False, True])
def test_the_run_half_works_from_its_zip(compiled: bool, tmp_path: Path) -> None:
    store = tmp_path / "store"
    for name in ("one.zip", "two.zip"):
        write_run_half(tmp_path / name, store=store, compiled=compiled)
    assert os.path.samefile(tmp_path / "one.zip", tmp_path / "two.zip")
    assert len(list(store.iterdir())) == 1
    code = (
        "import paceline.contract, paceline.errors, paceline.agent, sys\n"
        "assert 'one.zip' in paceline.agent.__file__, paceline.agent.__file__\n"
        f"assert paceline.contract.__file__.endswith('c') == {compiled}, paceline.contract.__file__\n"
        "try: import paceline.cli\n"
        "except ModuleNotFoundError: print('right')"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "one.zip")}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "right\n", done.stderr


def test_a_run_half_in_the_store_is_used_again_unless_it_is_a_link(tmp_path: Path) -> None:
    """Jobs run what is in it, whoever has put a link of that name there."""
    path = stored_run_half(tmp_path)
    written = path.stat().st_ino
    assert stored_run_half(tmp_path).stat().st_ino == written
    elsewhere = tmp_path / "elsewhere"
    os.rename(path, elsewhere)
    path.symlink_to(elsewhere)
    assert not stored_run_half(tmp_path).is_symlink()


def test_gpus_are_counted_by_device_files_and_visibility(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    counts = [
        usable_gpus(environ, tmp_path)
        for environ in (
            {},
            {"CUDA_VISIBLE_DEVICES": "0,2"},
            {"CUDA_VISIBLE_DEVICES": ""},
            {"CUDA_VISIBLE_DEVICES": "1,-1,2"},
        )
    ]
    assert counts == [3, 2, 0, 1]
