"""What a person has to type to reach a sandbox in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.tools.sandbox import Sandbox, sandbox
from paceline.tools.sandbox.settings import SandboxPaths, SandboxRecord


def test_advice_names_the_folder_unless_it_is_the_default_one(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_SANDBOX", str(tmp_path / "usual"))
        assert SandboxPaths(tmp_path / "usual").dir_flag == ""
        with pytest.raises(UsageError) as caught:
            Sandbox(tmp_path / "a box")
        assert (
            caught.value.hint == f"Start one with `paceline sandbox up --dir '{tmp_path}/a box'`."
        )
        patch.setattr(sandbox, "require", lambda settings: None)
        patch.setattr(SandboxRecord, "load", lambda paths: object())
        with pytest.raises(UsageError, match="already running") as caught:
            Sandbox.up(tmp_path / "box", network="plain")
        assert caught.value.hint.endswith(f"To stop it: paceline sandbox down --dir {tmp_path}/box")
