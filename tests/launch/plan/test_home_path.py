"""`~` in paths that people type."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.spec.user_files import expand_home


def test_home_folders() -> None:
    home = Path(os.path.expanduser("~"))
    assert expand_home("~/data") == home / "data"
    assert expand_home(Path("~")) == home
    assert (
        expand_home(f"~{getpass.getuser()}/data")
        == Path(os.path.expanduser(f"~{getpass.getuser()}")) / "data"
    )
    assert expand_home("a/~nosuch") == Path("a/~nosuch")
    assert expand_home("./~nosuch") == Path("~nosuch")
    assert expand_home("") == Path()


@pytest.mark.parametrize("path", ["~nosuch-user/x", Path("~nosuch-user")])
def test_a_user_who_does_not_exist_is_named(path: Path | str) -> None:
    with pytest.raises(UsageError, match="there is no user 'nosuch-user'") as raised:
        expand_home(path)
    assert f"./{path}" in raised.value.hint
