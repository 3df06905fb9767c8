"""The folder in which torch.compile keeps what it has compiled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.agent.workers.variables import compile_cache
from paceline.agent.workers.variables.compile_cache import CACHE, compile_cache_variables, node_image
from paceline.contract.launch_spec import LaunchSpec


def spec(scratch: Path | str, project: str = "digits") -> LaunchSpec:
    return LaunchSpec(run_id="1", program="train.py", args=[], scratch=str(scratch), project=project)


def test_the_cache_is_private_and_the_same_for_all_runs_of_a_project(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    path = Path(compile_cache_variables(spec(tmp_path))[CACHE])
    assert path.parent.parent == tmp_path / ".cache" / "compile"
    assert path.stat().st_mode & 0o777 == 0o700
    assert compile_cache_variables(spec(tmp_path))[CACHE] == str(path)
    assert compile_cache_variables(spec(tmp_path, "words"))[CACHE] != str(path)


def test_other_processors_have_another_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    here = node_image()
    assert here == node_image()
    monkeypatch.setattr(compile_cache, "_processor", lambda: "fpu avx512f")
    assert node_image() != here


def test_without_a_folder_of_its_own_the_run_uses_the_default_of_torch(tmp_path: Path) -> None:
    assert compile_cache_variables(spec("")) == {}
    (tmp_path / ".cache").write_text("in the way")
    assert compile_cache_variables(spec(tmp_path)) == {}


def test_a_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_cache_variables(spec(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert compile_cache_variables(spec(tmp_path)) == {}
