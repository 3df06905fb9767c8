"""The output of ranks: logs, the console, and failures of either."""

from __future__ import annotations

import os
import pty
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.agent.workers.output import LinePrefixer, OutputCapture
from tests.agent.conftest import Launch
from tests.small_disk import mount_small_disk

TALKS = """
import os, sys
rank = os.environ["RANK"]
for number in range(2000):
    sys.stdout.write(f"{rank} {number} " + "x" * (number % 200) + "\\n")
    if number % 50 == 0:
        sys.stdout.flush()
sys.stdout.write("no end")
"""


def test_all_ranks_on_the_console_in_whole_lines(launch: Launch) -> None:
    started = launch(TALKS, nproc=3, tee="all")
    assert started.wait() == 0, started.err()
    lines = started.out().splitlines()
    assert len(lines) == 3 * 2001
    for rank in range(3):
        own = [line.removeprefix(f"[{rank}] ") for line in lines if line.startswith(f"[{rank}] ")]
        expected = [f"{rank} {number} " + "x" * (number % 200) for number in range(2000)] + [
            "no end"
        ]
        assert own == expected
        assert started.log(rank) == "\n".join(expected)


def test_nothing_on_the_console(launch: Launch) -> None:
    started = launch(TALKS, nproc=1, tee="none")
    assert started.wait() == 0
    assert (started.out(), started.err()) == ("", "")
    assert started.log(0).endswith("no end")


def test_output_of_rank_zero_passes_unchanged(launch: Launch) -> None:
    """A bar that redraws itself, text without a newline, bytes that are not UTF-8."""
    script = (
        "import sys; sys.stdout.buffer.write(b'10%\\r20%\\r\\xff\\x00'); sys.stderr.write('bar\\r')"
    )
    started = launch(f"import os; os.environ['RANK']; {script}")
    assert started.wait() == 0, started.err()
    assert (started.console / "out").read_bytes() == b"10%\r20%\r\xff\x00"
    assert (started.console / "err").read_bytes() == b"bar\r"
    assert b"10%\r20%\r\xff\x00" in started.attempt().log(0).read_bytes()


@pytest.mark.parametrize(
    ("printed", "expected"),
    [([b""], ""), ([b"one\n", b"two\n"], ""), ([b"one\n", b"10%\r20%", b""], "\n")],
)
def test_a_note_gets_a_line_of_the_terminal_to_itself(
    printed: list[bytes], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = OutputCapture(
        log_path=lambda rank: tmp_path / "log", shared_log=None, tee="0", warn=print
    )
    output._console[1].close()
    for data in printed:
        output._show(1, data)
    monkeypatch.setattr(os, "isatty", lambda descriptor: True)
    assert (output.line_break(), output.line_break()) == (expected, "")
    output.start()
    output.close()


def test_the_last_state_of_a_redrawn_line_is_shown_with_a_prefix() -> None:
    written: list[bytes] = []
    lines = LinePrefixer("[3] ", written.append)
    for piece in (b"10%\r", b"20%\rdone\r\nne", b"xt\n\npart"):
        lines.write(piece)
    lines.write(b"")
    assert b"".join(written) == b"[3] done\n[3] next\n[3] \n[3] part\n"


def test_a_terminal_is_a_terminal_for_rank_zero(launch: Launch) -> None:
    master, slave = pty.openpty()
    script = "import os, sys; print(os.environ['RANK'], sys.stdout.isatty(), sys.stderr.isatty(), os.isatty(0))"
    try:
        started = launch(script, stdout=slave)
        os.close(slave)
        assert started.wait() == 0, started.err()
        seen = b""
        while not seen.endswith(b"\n"):
            seen += os.read(master, 4096)
        assert seen == b"0 True False False\r\n"
    finally:
        os.close(master)
    assert started.log(0) == "0 True False False\n"
    assert started.log(1) == "1 False False False\n"


def test_a_closed_console_does_not_end_the_run(launch: Launch) -> None:
    reader, writer = os.pipe()
    script = """
import time
from pathlib import Path
print("first", flush=True)
while not Path("gone").exists():
    time.sleep(0.01)
for number in range(20000):
    print("more", number)
print("last")
"""
    started = launch(script, stdout=writer)
    os.close(writer)
    seen = b""
    while not seen.endswith(b"\n"):
        more = os.read(reader, 4096)
        assert more, started.err()
        seen += more
    os.close(reader)
    (started.run.path / "gone").touch()
    assert started.wait() == 0, started.err()
    assert started.verdicts() == ("done", "done")
    assert started.log(0).endswith("last\n")
    assert started.err().count("cannot write the console") == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few hundred kilobytes."""
    with mount_small_disk(tmp_path / "small", "256k") as folder:
        yield folder


def test_a_full_disk_does_not_end_the_run(launch: Launch, small_disk: Path, tmp_path: Path) -> None:
    script = """
import os
from pathlib import Path
for number in range(20000):
    print("many words that fill a disk", number)
if os.environ["RANK"] == "1":
    Path(os.environ["OUTSIDE"]).write_text("trained to the end")
"""
    started = launch(script, folder=small_disk, env={"OUTSIDE": str(tmp_path / "result")})
    assert started.wait() == 0, started.err()
    assert (tmp_path / "result").read_text() == "trained to the end"
    assert started.out().endswith("a disk 19999\n")
    assert started.err().count("No space left on device; the run continues") == 1


def test_a_removed_folder_does_not_end_the_run(launch: Launch, tmp_path: Path) -> None:
    script = """
import shutil, sys
from pathlib import Path
shutil.rmtree(Path("attempt-1"))
print("still here")
sys.exit(6)
"""
    started = launch(script, nproc=1)
    assert started.wait() == 1
    assert started.out() == "still here\n"
    assert "rank 0 of 1" in started.err()
    assert "exit code 6" in started.err()
    assert "warning: cannot write" in started.err()


@pytest.mark.slow
def test_more_than_128_ranks_share_one_log(launch: Launch) -> None:
    started = launch("import os; print('rank', os.environ['RANK'])", nproc=130)
    assert started.wait() == 0, started.err()
    lines = started.attempt().node_log(0).read_text().splitlines()
    assert sorted(lines) == sorted(f"[{rank}] rank {rank}" for rank in range(130))
    assert not list(started.attempt().path.glob("rank-*"))
