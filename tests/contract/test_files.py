"""A file that a user names for output: replaced as a whole if it is one, written into if it is a pipe or a device."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from paceline.contract.files import open_output, write_output


def test_a_file_is_replaced_as_a_whole_and_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    path.chmod(0o600)
    before = path.stat().st_ino
    with contextlib.suppress(RuntimeError), open_output(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert path.read_text() == "old"
    write_output(path, "new")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o600)
    assert path.stat().st_ino != before
    assert os.listdir(tmp_path) == ["report.html"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_a_link(tmp_path: Path, exists: bool) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "page", tmp_path / "link"
    if exists:
        target.write_text("old")
    link.symlink_to("there/page")
    write_output(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert os.listdir(target.parent) == ["page"]


def test_a_pipe_gets_what_is_written(tmp_path: Path) -> None:
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    write_output(pipe, "new")
    if not pipe.is_fifo():  # let the reader go
        os.unlink(pipe)
        pytest.fail("the pipe was replaced")
    reader.join()
    assert found == ["new"]
    assert os.listdir(tmp_path) == ["pipe"]


@pytest.mark.parametrize("to_file", [True, False])
def test_standard_output_is_a_place_to_write_to(tmp_path: Path, to_file: bool) -> None:
    code = (
        "import os; from pathlib import Path; from paceline.contract.files import *\n"
        "print('before'); write_output(Path('link'), 'text\\n'); print('after', is_standard_output(Path('link')))"
    )
    # A link of our own: if it were replaced, /dev/stdout would not be.
    (tmp_path / "link").symlink_to("/proc/self/fd/1")
    path = tmp_path / "out"
    with path.open("wb") as file:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            stdout=file if to_file else subprocess.PIPE,
            check=True,
        )
    assert (path.read_bytes() if to_file else done.stdout) == b"before\ntext\nafter True\n"
    assert (tmp_path / "link").is_symlink()
