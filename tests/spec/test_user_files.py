"""Whose a run folder is, and what a link to one is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.spec import user_files
from paceline.spec.user_files import is_own_folder, is_trusted, require_own_folder


def make_run(folder: Path) -> Path:
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    return folder


def become_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = os.geteuid()
    monkeypatch.setattr(user_files.os, "geteuid", lambda: mine + 4321)
    monkeypatch.setattr(user_files, "ROOT", -2)  # the test may run as root


def test_a_link_to_a_run_is_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "run")
    (tmp_path / "link").symlink_to("run")
    become_another_user(monkeypatch)
    assert not is_own_folder(tmp_path / "link")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_a_folder_of_another_user_is_theirs_even_if_anybody_may_write_to_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.chmod(0o777)
    os.chown(run, 65534, 65534)
    assert not is_own_folder(run)
    assert not is_trusted(run)
    with pytest.raises(UsageError, match="Run run is not yours"):
        require_own_folder(run, "Run")
