"""Code on its way to a cluster, with a shell instead of ssh."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.ssh import code
from tests.ssh.local_connection import HERE


@pytest.fixture
def cache(guard: None, tmp_path: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield tmp_path / "cache"


def test_without_rsync_a_repair_keeps_the_folder_in_which_a_command_may_work(
    tmp_path: Path, cache: Path
) -> None:
    settings = tmp_path / "project" / "paceline.toml"
    settings.parent.mkdir()
    settings.write_text("[project]\n")
    parcel = code.pack_settings(settings.parent, settings)
    place = code.locate(parcel)
    code.send(HERE, parcel, place, like="", rsync=False)
    (folder,) = (cache / "paceline" / "code").glob("*/project")
    before = folder.stat().st_ino
    (folder / "paceline.toml").write_text("damaged")
    (folder / "notes").write_text("of a shell")
    complete = f"{place}{code.is_complete(parcel)} && echo code; exit 0\n"
    assert HERE.call(complete).output == b""
    code.send(HERE, parcel, place, like="", rsync=False)
    assert HERE.call(complete).output == b"code\n"
    assert (folder / "paceline.toml").read_text() == "[project]\n"
    assert (folder / "notes").read_text() == "of a shell"
    assert folder.stat().st_ino == before
