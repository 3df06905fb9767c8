"""The folders in which torch keeps code that it has compiled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.agent.workers import rank_variables
from paceline.agent.workers.rank_variables import (
    CACHE,
    EXTENSIONS,
    compile_cache_variables,
    node_image,
)
from paceline.contract.launch_spec import LaunchSpec
from tests.adversary.second_user import OWNER, STRANGER, call_as, needs_two_users, shared_folder


def spec(scratch: Path | str, project: str = "digits", python: str = "python3") -> LaunchSpec:
    return LaunchSpec(
        run_id="1",
        program="train.py",
        args=[],
        scratch=str(scratch),
        project=project,
        python=python,
    )


@pytest.mark.parametrize("name", [CACHE, EXTENSIONS])
def test_the_cache_is_private_and_the_same_for_all_runs_of_a_project(
    tmp_path: Path, name: str
) -> None:
    path = Path(compile_cache_variables(spec(tmp_path))[name])
    assert path.is_dir()
    own = tmp_path / f".cache-{os.geteuid()}"
    assert own.stat().st_mode & 0o777 == 0o700
    assert path.relative_to(own).parts[1:3] == ("digits", node_image())
    assert compile_cache_variables(spec(tmp_path))[name] == str(path)
    assert compile_cache_variables(spec(tmp_path, "words"))[name] != str(path)


def test_extensions_are_built_once_per_interpreter(tmp_path: Path) -> None:
    one, other = (
        compile_cache_variables(spec(tmp_path, python=python))
        for python in ("/a/python", "/b/python")
    )
    assert one[EXTENSIONS] != other[EXTENSIONS]
    assert one[CACHE] == other[CACHE]  # torch itself knows which compiled code is its own


def test_other_processors_have_another_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    here = node_image()
    assert here == node_image()
    monkeypatch.setattr(rank_variables, "_processor", lambda: "fpu avx512f")
    assert node_image() != here


def test_without_a_folder_of_its_own_the_run_uses_the_default_of_torch(tmp_path: Path) -> None:
    assert compile_cache_variables(spec("")) == {}
    (tmp_path / f".cache-{os.geteuid()}").write_text("in the way")
    assert compile_cache_variables(spec(tmp_path)) == {}


def test_where_all_files_belong_to_one_user_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 4321)
    assert compile_cache_variables(spec(tmp_path)) == {}


def test_where_others_could_rename_the_folder_nothing_is_kept(tmp_path: Path) -> None:
    tmp_path.chmod(0o775)
    assert compile_cache_variables(spec(tmp_path)) == {}
    tmp_path.chmod(0o1775)
    assert compile_cache_variables(spec(tmp_path))


@needs_two_users
def test_each_user_of_a_shared_scratch_folder_has_a_cache_of_their_own() -> None:
    with shared_folder() as scratch:
        scratch.chmod(0o1777)

        def use_the_cache() -> None:
            variables = compile_cache_variables(spec(scratch))
            (Path(variables[CACHE]) / "code.so").write_text("mine")
            assert (scratch / f".cache-{os.geteuid()}").stat().st_uid == os.geteuid()

        def change_the_other() -> None:
            other = scratch / f".cache-{OWNER}"
            for act in (lambda: os.listdir(other), lambda: os.rename(other, scratch / "elsewhere")):
                with pytest.raises(PermissionError):
                    act()

        call_as(OWNER, use_the_cache)
        call_as(STRANGER, use_the_cache)
        call_as(STRANGER, change_the_other)


@needs_two_users
def test_code_that_another_user_has_planted_is_not_used() -> None:
    with shared_folder() as scratch:
        scratch.chmod(0o1777)

        def plant() -> None:
            (scratch / f".cache-{OWNER}").mkdir(mode=0o777)

        def link() -> None:
            (scratch / f".cache-{OWNER}").symlink_to("/tmp")

        def use_no_cache() -> None:
            assert compile_cache_variables(spec(scratch)) == {}

        call_as(STRANGER, plant)
        call_as(OWNER, use_no_cache)
        (scratch / f".cache-{OWNER}").rmdir()
        call_as(STRANGER, link)
        call_as(OWNER, use_no_cache)
