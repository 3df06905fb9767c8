"""`paceline top` on a real local run, driven by Textual's pilot."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import cli
from paceline.contract.run_folder import RunFolder
from paceline.errors import EnvironmentProblem, UsageError
from paceline.launch import actions
from paceline.ui.terminal import app as top
from paceline.watch import overview
from paceline.watch.overview import Overview
from paceline.watch.records import Record, find_runs
from tests.ui.terminal.screen import TIMEOUT, Screen, drive

# Trains until a file says how to go on: quickly, but never faster than the test.
SCRIPT = """\
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
import paceline

here = Path(__file__).parent
with paceline.session(cpu=True, report=False, progress=False) as run:
    for step in run.steps(range(100000)):
        run.log(loss=10 / (step + 1), **{"[b]odd\\x1b[2J": 1.0})
        if step % 20 == 0:
            print(f"line {step} [red]kept[/red] \\x1b[31mred\\x1b[0m \\x1b]0;title\\x07", flush=True)
        finish = torch.tensor([(here / "finish").exists()], dtype=torch.int)
        dist.all_reduce(finish)  # ranks see the file at different times
        if finish:
            break
        time.sleep(0.05)
print("the needle is here", flush=True)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "LIST_INTERVAL", 0.5)
    monkeypatch.setattr(top, "RUN_INTERVAL", 0.3)
    monkeypatch.setattr("paceline.ui.run_reader.DETAILS", 0.5)
    monkeypatch.setattr("paceline.ui.run_reader.DETAILS_OF_ENDED", 0.5)


@pytest.fixture
def local_run(tmp_path: Path, scratch: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run of two ranks on this machine."""
    (tmp_path / "train.py").write_text(SCRIPT)
    scratch.mkdir()
    environ = {**os.environ, "PACELINE_SCRATCH": str(scratch)}
    command = [
        sys.executable,
        "-m",
        "paceline",
        "run",
        "--nproc",
        "2",
        "--cpu",
        "--name",
        "[i]tiny",
        "train.py",
    ]
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL) as process:
        yield process
        process.terminate()


def the_run(scratch: Path) -> RunFolder:
    (found,) = find_runs(scratch)
    return found


def last_step(text: str) -> int:
    """Return the number at the right end of the curve's axis, in the left pane; 0 before there is a curve."""
    lines = text.splitlines()
    axis = [number for number, line in enumerate(lines) if "└─" in line]
    words = lines[axis[0] + 1][:32].split() if axis else []
    return int(words[-1]) if words and words[-1].isdigit() else 0


def test_a_local_run_from_its_start_to_its_end(
    local_run: subprocess.Popen[bytes], tmp_path: Path, scratch: Path
) -> None:
    async def work(screen: Screen) -> None:
        await screen.until("[i]tiny", "running", "1 running", "local · 2 ranks")
        before = await screen.until("loss 0.", "line 20 [red]kept[/red] red", "goodput", "training")
        assert "\x1b" not in before
        drawn = last_step(before)
        while last_step(screen.text) <= drawn:  # the curve grows
            await screen.pilot.pause(0.1)
        await screen.press("m")
        await screen.until("[b]odd")
        (tmp_path / "finish").touch()
        await screen.until("done", "1 over", "the needle is here", gone="1 running")
        await screen.press("slash")
        await screen.until("search the log:")
        await screen.type("needle")
        found = await screen.until("with 'needle'", gone="[red]kept")
        assert found.count("the needle is here") == 2, "both ranks print it"
        await screen.press("escape")
        await screen.until("[red]kept", gone="with 'needle'")
        await screen.press("c")
        await screen.until("has already ended: done")
        await screen.press("r")
        await screen.until("cannot be requeued")

    drive(scratch, work)
    assert local_run.wait(timeout=60) == 0


def test_cancel_asks_first_and_names_the_run(
    local_run: subprocess.Popen[bytes], scratch: Path
) -> None:
    async def work(screen: Screen) -> None:
        await screen.until("[i]tiny", "running", "loss 0.", "CPU")
        run = the_run(scratch)
        for refusal in ("n", "escape", "enter"):  # enter takes what is focused: no
            await screen.press("c")
            await screen.until(f"Let run {run.path.name}", "[i]tiny, a local run", "save and stop?")
            await screen.press(refusal)
            await screen.until("Nothing was done")
        assert not run.cancelled.exists()
        await screen.press("enter")
        text = await screen.until("ranks", "command", "folder", gone="WHERE / WHY")
        assert len(text.splitlines()) == 40
        await screen.press("escape")
        await screen.until("WHERE / WHY")
        await screen.press("s", "y")
        await screen.until("saves and stops")
        await screen.until("cancelled", "1 over", gone="1 running")
        assert run.cancelled.exists()

    drive(scratch, work, size=(120, 40))
    assert local_run.wait(timeout=60) != 0


def write_run(scratch: Path, name: str, *, job: str = "") -> RunFolder:
    folder = RunFolder(scratch / "project" / "default" / name)
    folder.path.mkdir(parents=True)
    folder.run_json.write_text(
        f'{{"run_id": "{name}", "program": "train.py", "nodes": 1, "nproc": 1}}'
    )
    if job:
        folder.job.write_text(f"{job}\n")
    return folder


def test_keys_select_filter_and_help_and_a_resize_changes_the_columns(scratch: Path) -> None:
    for number in range(30):
        write_run(scratch, f"20260101-1200{number:02}-00{number:02}")

    async def work(screen: Screen) -> None:
        text = await screen.until("30 over", "20260101-120029-0029 · local")
        lines = text.splitlines()  # with a scrollbar
        assert lines[1].index("STATUS") == lines[2].index("lost")
        await screen.press("j", "down", "k")
        await screen.until("20260101-120028-0028 · local")
        await screen.press("G")
        await screen.until("20260101-120000-0000 · local")
        await screen.press("g", "question_mark")
        await screen.until("you are asked before anything happens")
        await screen.press("escape", "f", "0", "0", "0", "8")
        await screen.until("filter: 0008", gone="0029")  # while it is typed
        await screen.press("enter", "escape", "f")
        await screen.type("0007 lost")
        await screen.until("20260101-120007-0007 · local", "filter: 0007 lost", gone="0029")
        await screen.press("escape")
        await screen.until("0008", "0007", gone="filter:")  # the selected run stays in view
        await screen.press("g")
        await screen.until("20260101-120029-0029 · local")
        assert "GOODPUT" not in screen.text
        await screen.pilot.resize_terminal(140, 30)
        await screen.until("GOODPUT", "RANKS")
        await screen.press("tab", "tab")
        assert screen.app.focused.id == "log"

    drive(scratch, work)


def test_all_panes_show_the_same_numbers(scratch: Path) -> None:
    """The newest ones, whoever reads them first, also of a run with so many that its curve is thinned out."""
    run = write_run(scratch, "20260101-120000-0000")
    run.events.mkdir()
    began = [("node", 0.0), ("launch", 1.0), ("training", 1000.0), ("failed", 5000.0)]
    write_lines(
        run.events / "agent-0.jsonl",
        [{"event": name, "time": moment, "attempt": 1} for name, moment in began],
    )
    write_lines(
        run.metrics,
        [{"step": n, "time": 1000.0 + n, "loss": 2 + (-1) ** n} for n in range(1, 4000)],
    )

    def shown(text: str) -> tuple[list[str], list[str]]:
        """Return each loss and each share of goodput: of the list, the plot and the facts."""
        row = next(line for line in text.splitlines() if "train.py 0000" in line)
        rest = text.replace(row, "")
        losses = re.findall(r"(\d\.\d+)", row) + re.findall(r"loss (\S+)", rest)
        return losses, re.findall(r"(\d+)% ", row) + re.findall(r"training (\d+)%", rest)

    async def work(screen: Screen) -> None:
        # after the first time, the list is read only if it must hurry
        screen.app._pollers[0]._interval = 3600.0
        for step, loss, hurry in (
            (4000, "1.234", False),
            (4001, "1.567", False),
            (4002, "1.789", True),
        ):
            write_lines(run.metrics, [{"step": step, "time": 1000.0 + step, "loss": float(loss)}])
            if hurry:
                screen.app._pollers[0].hurry()
            deadline = time.monotonic() + TIMEOUT
            while "train.py 0000" not in screen.text or shown(screen.text)[0] != [loss] * 3:
                assert time.monotonic() < deadline, screen.text
                await screen.pilot.pause(0.05)
            shares = shown(screen.text)[1]
            assert len(shares) == 2
            assert len(set(shares)) == 1

    drive(scratch, work, size=(120, 40))


def write_lines(path: Path, lines: list[dict[str, object]]) -> None:
    with open(path, "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_the_screen_answers_while_the_file_system_does_not(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(scratch, "20260101-120000-0000")
    stuck = threading.Event()
    monkeypatch.setattr("paceline.ui.run_reader.read_details", lambda _: stuck.wait())

    async def work(screen: Screen) -> None:
        await screen.until("1 over")
        await screen.press("question_mark")
        await screen.until("you are asked before")
        await screen.press("escape", "f")
        await screen.type("nothing")
        await screen.until("filter: nothing", gone="0000")

    drive(scratch, work)
    assert any(each.name == "paceline-run" for each in threading.enumerate()), "it was not stuck"
    stuck.set()


def test_a_folder_that_cannot_be_read_hides_no_other(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(scratch, "20260101-120000-0000")
    bad = write_run(scratch, "20260101-120000-0001")
    real = overview.make_overview

    def make(record: Record) -> Overview:
        if record.folder == bad:
            raise RuntimeError("nobody has foreseen this")
        return real(record)

    monkeypatch.setattr(overview, "make_overview", make)

    async def work(screen: Screen) -> None:
        await screen.until("1 over", "20260101-120000-0000")

    drive(scratch, work)


def test_an_empty_scratch_folder_says_what_to_do(scratch: Path) -> None:
    async def work(screen: Screen) -> None:
        await screen.until("No runs in", "paceline run train.py")
        await screen.press("c", "slash", "enter", "m", "space", "G")

    drive(scratch, work)


def test_the_run_of_another_user_is_only_looked_at(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(scratch, "20260101-120000-0000", job="7")
    monkeypatch.setattr("paceline.ui.actions.is_own_folder", lambda _: False)
    monkeypatch.setattr(actions, "cancel_run", None)

    async def work(screen: Screen) -> None:
        await screen.until("20260101-120000-0000 · job 7")
        await screen.press("c")
        await screen.until("belongs to another user")

    drive(scratch, work, query=lambda jobs: {})


def test_without_a_terminal_or_textual_the_command_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UsageError, match="needs a terminal"):
        cli.dispatch(["top"])
    monkeypatch.setitem(sys.modules, "textual", None)
    with pytest.raises(EnvironmentProblem) as problem:
        cli.dispatch(["top"])
    assert "pip install 'paceline[ui]'" in problem.value.hint


@pytest.mark.parametrize(
    "colours", [{}, {"NO_COLOR": "1", "TERM": "xterm-256color", "COLORTERM": "truecolor"}]
)
def test_the_command_draws_on_a_terminal_and_quits(
    scratch: Path, tmp_path: Path, colours: dict[str, str]
) -> None:
    write_run(scratch, "20260101-120000-\u00e9\u202e")
    environ = {
        **os.environ,
        "PACELINE_SCRATCH": str(scratch),
        "TERM": "xterm",
        "COLORTERM": "",
        **colours,
    }
    parent, child = pty.openpty()
    os.set_blocking(parent, True)
    command = [sys.executable, "-m", "paceline", "top"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environ, stdin=child, stdout=child, stderr=child
    ) as process:
        os.close(child)
        printed = b""
        while b"1 over" not in printed:
            printed += os.read(parent, 65536)
        os.write(parent, b"q")
        with open(parent, "rb", buffering=0) as rest:
            try:
                while part := rest.read(65536):
                    printed += part
            except OSError:  # the terminal is gone
                pass
        assert process.wait(timeout=60) == 0
    assert "\u202e".encode() not in printed
    assert b"38;2;" not in printed, "colours are the terminal's own"
    assert (b"\x1b[36m" in printed or b";36" in printed) == (not colours)
    assert re.search(rb"\x1b\[(\d+;)*7[;m]", printed), "the selected run is marked without a colour"
    if colours:
        assert not re.search(rb"\x1b\[(\d+;)*[34][0-8][;m]", printed), "not even black on black"


def test_the_log_follows_its_end_after_a_run_was_opened_and_left(scratch: Path) -> None:
    """The pane is lower while the run has the screen, and higher in a larger terminal."""
    folder = write_run(scratch, "talks")
    log = folder.path / "attempt-1" / "rank-0.log"
    log.parent.mkdir()
    log.write_text("".join(f"line {number}\n" for number in range(200)))

    async def work(screen: Screen) -> None:
        async def follows(number: int) -> None:
            with log.open("a") as file:
                file.write(f"line {number}\n")
            await screen.until(f"line {number}")

        await screen.until("line 199")
        await screen.press("enter")
        await follows(200)
        await screen.press("escape")
        await follows(201)
        for size in ((80, 60), (80, 24), (120, 40)):
            await screen.pilot.resize_terminal(*size)
            await follows(300 + size[1])
        await screen.press("tab", "tab", "k", "k", "k")
        assert screen.app.focused.id == "log"
        before = screen.app.focused.scroll_offset.y
        with log.open("a") as file:
            file.write("line 500\n")
        await screen.until("206 lines")
        assert screen.app.focused.scroll_offset.y == before  # the user reads
        await screen.press("escape", "enter", "escape")
        assert "line 500" not in screen.text
        await screen.press("tab", "tab", "G")
        await follows(501)

    drive(scratch, work)
