"""Results come back complete and never over newer ones; leftovers are removed, and nothing else is."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.contract import files
from paceline.staging import cleanup
from paceline.staging.cleanup import (
    CollectResult,
    Owner,
    active_jobs,
    find_leftovers,
    make_private_folder,
    make_run_folder,
    remove_leftovers,
    this_process,
)
from paceline.staging.copy import remove_tree
from tests.staging.trees import ODD, content


def write(path: Path, text: str, *, when: float = 1000.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (when, when))
    return path


def collect(
    data: Path, back: Path, *patterns: str, staged: tuple[str, ...] = (), keep_newer: bool = False
) -> CollectResult:
    return cleanup.collect(data, back, patterns=patterns, staged=staged, keep_newer=keep_newer)


def test_matching_files_are_collected_and_staged_data_is_not(tmp_path: Path) -> None:
    data, back = tmp_path / "data", tmp_path / "back"
    write(data / "out" / "a" / ODD, "odd")
    write(data / "out" / ".hidden", "hidden")
    write(data / "table[1].csv", "1,2")
    write(data / "plots" / "x.png", "x")
    write(data / "plots" / "x.raw", "raw")
    write(data / "images" / "0.png", "staged")
    (data / "out" / "latest").symlink_to("a")
    found = collect(data, back, "out", "table[1].csv", "**/*.png", "nothing/*", staged=("images",))
    assert len(found.sizes) == 5
    assert not found.problems
    assert content(back / "out") == content(data / "out")
    collected = {
        str(path.relative_to(back))
        for path in back.rglob("*")
        if not path.is_dir() or path.is_symlink()
    }
    assert collected == {f"out/a/{ODD}", "out/.hidden", "out/latest", "table[1].csv", "plots/x.png"}
    assert collect(data, back, "out", "plots/x.png").sizes == []  # all of it is there


def test_what_was_left_on_a_node_replaces_older_results_only(tmp_path: Path) -> None:
    data, back = tmp_path / "data", tmp_path / "back"
    write(data / "a", "of this run", when=2000)
    write(data / "b", "of this run", when=2000)
    write(back / "a", "newer", when=3000)
    write(back / "b", "older", when=1000)
    found = collect(data, back, "*", keep_newer=True)
    assert (len(found.sizes), len(found.outdated)) == (1, 1)
    assert (back / "a").read_text() == "newer"
    assert (back / "b").read_text() == "of this run"


def test_a_run_replaces_its_results_whatever_the_clocks_say(tmp_path: Path) -> None:
    """The first host's clock is an hour ahead."""
    fast, slow, back = tmp_path / "fast", tmp_path / "slow", tmp_path / "run" / "collected"
    write(fast / "a", "first", when=3700)
    assert collect(fast, back, "*").sizes
    write(slow / "a", "second", when=200)
    (slow / ("long" * 60)).write_text("a long name")
    (slow / "link").symlink_to("a")
    assert len(collect(slow, back, "*").sizes) == 3
    assert (back / "a").read_text() == "second"
    (slow / "link").unlink()
    (slow / "link").symlink_to("b")
    assert len(collect(slow, back, "*").sizes) == 1
    assert os.readlink(back / "link") == "b"
    assert {path.name for path in back.iterdir()} == {"a", "link", "long" * 60}


def test_results_are_complete_or_absent_and_one_error_does_not_affect_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, back = tmp_path / "data", tmp_path / "back"
    write(data / "bad", "twelve bytes")
    write(data / "good", "good")
    real = os.replace

    def refuse(source: Path, target: Path) -> None:
        if Path(target).name == "bad":
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    found = collect(data, back, "*")
    assert found.problems == ["'bad': No space left on device"]
    assert [path.name for path in back.iterdir()] == ["good"]


ENDED = 4_194_305  # beyond the largest process id


@pytest.fixture
def squeue(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """An environment whose scheduler answers with some lines of bash."""

    def answering(script: str) -> dict[str, str]:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        (folder / "squeue").write_text(f"#!/bin/bash\n{script}\n")
        (folder / "squeue").chmod(0o755)
        return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURMD_NODENAME": "n1"}

    return answering


def test_folders_of_another_user_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their markers would make us copy their files into our folders."""
    destination = tmp_path / "home" / "mine"
    destination.mkdir(parents=True)
    theirs = make_private_folder(tmp_path / "disk")
    run = theirs / "run-x"
    owner = Owner(run="r", job_start="l", node=0, host="n1", **{**this_process(), "pid": ENDED})
    make_run_folder(run, replace(owner, collect=["*"], destination=str(destination)))
    (run / "data" / "planted").write_text("not mine")
    environ = {"SLURMD_NODENAME": "n1"}
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / theirs.name).symlink_to(theirs)
    assert not remove_leftovers(linked, environ, job_start="l")
    with monkeypatch.context() as patched:
        patched.setattr(files, "own_folder_name", lambda: theirs.name)
        patched.setattr(os, "geteuid", lambda: theirs.stat().st_uid + 1)
        assert not remove_leftovers(theirs.parent, environ, job_start="l")
    assert not list(destination.iterdir())
    # in our own folder the marker counts
    assert remove_leftovers(theirs.parent, environ, job_start="l") == [run]
    assert (destination / "planted").exists()


def test_only_folders_of_finished_runs_are_removed(
    tmp_path: Path, squeue: Callable[[str], dict[str, str]]
) -> None:
    private = make_private_folder(tmp_path)
    mine = Owner(run="r", job_start="l", node=0, host="n1", **this_process())
    owners = {
        "live": mine,
        "ended": replace(mine, pid=ENDED),
        "reused": replace(mine, started="another boot 1"),
        "elsewhere": replace(mine, pid=ENDED, host="n2"),
        "container": replace(mine, pid=ENDED, namespace="pid:[1]"),
        "job-11": replace(mine, job="11", pid=ENDED),
        "job-12": replace(mine, job="12", pid=ENDED),
        "job-13": replace(mine, job="13", pid=ENDED),
        "other-cluster": replace(mine, job="14", cluster="b"),
        "earlier": replace(mine, job="15", job_start="15-0"),
    }
    for name, owner in owners.items():
        make_run_folder(private / f"run-{name}", owner)
    (private / "run-unmarked").mkdir()

    def over(environ: dict[str, str]) -> set[str]:
        mine = {**environ, "SLURM_JOB_ID": "15", "SLURM_CLUSTER_NAME": "a"}
        return {
            each.path.name.removeprefix("run-")
            for each in find_leftovers(tmp_path, mine, job_start="15-1")
        }

    certain = {"ended", "reused", "earlier"}
    assert over(squeue("exit 1")) == certain  # the scheduler does not answer: jobs may be alive
    answering = squeue("printf '11 RUNNING\\n13 PENDING\\n15 RUNNING\\n'")
    assert active_jobs(answering) == {"11", "15"}
    assert over(answering) == certain | {"job-12", "job-13"}
    removed = remove_leftovers(
        tmp_path, {**answering, "SLURM_JOB_ID": "15", "SLURM_CLUSTER_NAME": "a"}, job_start="15-1"
    )
    assert len(removed) == 5
    assert (private / "run-job-11").is_dir()
    assert (private / "run-live").is_dir()


def test_variables_of_the_user_hide_no_job(squeue: Callable[[str], dict[str, str]]) -> None:
    environ = squeue('[ -n "$SQUEUE_PARTITION" ] || echo 11 RUNNING')
    assert active_jobs({**environ, "SQUEUE_PARTITION": "low"}) == {"11"}


def test_cleanup_collects_results_first(tmp_path: Path) -> None:
    private = make_private_folder(tmp_path / "disk")
    back = tmp_path / "run" / "collected"
    back.parent.mkdir()
    owner = Owner(
        run="r",
        job_start="l",
        node=0,
        host="n1",
        destination=str(back),
        collect=["out"],
        **{**this_process(), "pid": ENDED},
    )
    make_run_folder(private / "run-a", owner)
    write(private / "run-a" / "data" / "out" / "result", "42")
    make_run_folder(private / "run-b", replace(owner, collected=True))
    write(private / "run-b" / "data" / "out" / "had it", "43")
    assert len(remove_leftovers(tmp_path / "disk", {"SLURMD_NODENAME": "n1"}, job_start="")) == 2
    assert (back / "out" / "result").read_text() == "42"
    assert not (back / "out" / "had it").exists()
    assert not list(private.iterdir())


def test_read_only_folders_are_removed_too(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    write(tree / "a" / "b" / "file", "x")
    for folder in (tree / "a" / "b", tree / "a"):
        folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert remove_tree(tree)


def test_clean_lists_first_and_removes_with_yes(
    paceline: Callable[..., object], tmp_path: Path
) -> None:
    private = make_private_folder(tmp_path / "disk")
    owner = Owner(
        run="r", job_start="l", node=0, host=os.uname().nodename, **{**this_process(), "pid": ENDED}
    )
    make_run_folder(private / "run-a", owner)
    make_run_folder(private / "run-b", replace(owner, pid=os.getpid()))
    args = ("clean", "--folder", str(tmp_path / "disk"))
    shown = paceline(*args, check=True)
    assert "run-a" in shown.stdout  # type: ignore[attr-defined]
    assert "run-b" not in shown.stdout  # type: ignore[attr-defined]
    assert (private / "run-a").is_dir()
    paceline(*args, "--yes", check=True)
    assert [path.name for path in private.iterdir()] == ["run-b"]
