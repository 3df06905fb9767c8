"""`paceline logs`: what it prints of several ranks and attempts, and its errors."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from pathlib import Path

import pytest

from paceline import cli
from paceline.cli.commands import logs
from paceline.cli.commands.logs import LogPrinter, WaitNotes
from paceline.contract.run_folder import RunFolder, format_mark, times_path
from paceline.errors import UsageError
from paceline.slurm.job_states import JobState
from paceline.watch.records import read_record
from paceline.watch.run_log import LogLine, RunLog, RunMonitor, follow
from tests.cli.test_views import Terminal, folder

__all__ = ["folder"]


def write(path: Path, *pieces: tuple[float, str]) -> None:
    path.parent.mkdir(exist_ok=True)
    with open(path, "ab") as log, open(times_path(path), "ab") as times:
        for came, text in pieces:
            times.write(format_mark(log.tell(), came))
            log.write(text.encode())


def test_all_ranks_and_attempts_in_order(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    now = time.time()
    first, second = folder.attempt(1), folder.attempt(2)
    write(first.log(0), (now - 900, "a\n"), (now - 700, "10%\r20%\r"), (now - 690, "30%\n"))
    write(first.log(1), (now - 800, "b\x1b[2J\n"))
    write(second.log(0), (now - 60, "again\nloss 1\n"))
    second.start.write_text("7-1 400\n")

    def printed(*args: str) -> str:
        assert cli.dispatch(["logs", *args]) == 0
        return capsys.readouterr().out

    between = "--- attempt 2 ---\n"
    everything = f"[0] a\n[1] b\x1b[2J\n[0] 30%\n{between}[0] again\n[0] loss 1\n"
    assert printed() == everything
    assert printed("-n", "3") == f"[0] 30%\n{between}[0] again\n[0] loss 1\n"
    assert printed("--rank", "1") == "b\x1b[2J\n"
    assert printed("--attempt", "2", "--grep", "loss") == "[0] loss 1\n"
    assert printed("-t", "--tail", "1").endswith(" [0] loss 1\n")
    assert printed("-t", "--tail", "1").startswith(
        time.strftime("%Y-%m-%d %H:%M:%S ", time.localtime(now - 60))
    )
    assert printed("--tail", "0") == ""


def test_who_asks_for_some_lines_gets_these_alone(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt = folder.attempt(1)
    write(attempt.log(0), (time.time(), "a\nValueError: no\n"))
    attempt.failure.write_text(
        json.dumps({"rank": 0, "host": "n1", "type": "ValueError", "message": "no"})
    )
    folder.job_start("pid-1-a").path.mkdir(parents=True)
    folder.claims.mkdir()
    (folder.claims / "1").symlink_to("pid-1-a")
    folder.job_start("pid-1-a").verdict.write_text("failed\n")

    def failure(*args: str) -> bool:
        assert cli.dispatch(["logs", *args]) == 0
        return "rank 0 on n1: ValueError: no" in capsys.readouterr().err

    assert failure()
    assert failure("--rank", "1" if attempt.log(1).exists() else "0")
    assert failure("-f", "--tail", "1")  # it says how the run has ended
    for some in (["--tail", "1"], ["--grep", "a"], ["--attempt", "1"]):
        assert not failure(*some), some


def test_a_run_of_one_rank_has_no_prefix(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.run_json.write_text('{"nodes": 1, "nproc": 1}')
    write(folder.attempt(1).log(0), (1.0, "a\n"))
    assert cli.dispatch(["logs"]) == 0
    assert capsys.readouterr().out == "a\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--rank", "x"], "Invalid value for '--rank'"),
        (["--tail", "-1"], "Invalid value for '--tail'"),
        (
            ["-f", "--attempt", "1"],
            "-f cannot be combined with --attempt: it follows the newest attempt.",
        ),
        (["--rank", "9"], "has no rank 9."),
        (["-f", "--rank", "9"], "has no rank 9."),
    ],
)
def test_wrong_options(folder: RunFolder, args: list[str], message: str) -> None:
    write(folder.attempt(1).log(0), (1.0, "a\n"))
    with pytest.raises(UsageError) as error:
        cli.dispatch(["logs", *args])
    assert message in error.value.message


def test_a_terminal_gets_coloured_ranks_and_bars_that_are_drawn_over(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "get_terminal_size", lambda: os.terminal_size((12, 24)))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    printer = LogPrinter(terminal, prefixes=True)
    bars = [LogLine(None, 0, 1, "old"), LogLine(None, 1, 1, "\x1b[2J10% of many steps")]
    printer.print([LogLine(None, 0, 1, "a\x1b[2J"), LogLine(None, 1, 1, "\x1b[31mb")], bars=bars)
    printer.print([LogLine(None, 0, 1, "c")], bars=bars)
    printer.print([], bars=bars)
    printer.print([])
    zero, one = "\x1b[36m[0] \x1b[0m", "\x1b[33m[1] \x1b[0m"
    bar = "\r\x1b[K[1] 10% of "
    shown = f"{zero}a\n{one}\x1b[31mb\x1b[0m\n{bar}\r\x1b[K{zero}c\n{bar}\r\x1b[K"
    assert terminal.getvalue() == shown


def test_a_terminal_gets_no_escape_sequences_but_colours(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder.attempt(1).log(0), (1.0, "\x1b]0;title\x07a\n"))
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert cli.dispatch(["logs", "--rank", "0"]) == 0
    assert isinstance(sys.stdout, io.StringIO)
    assert sys.stdout.getvalue() == "a\n"


def test_follow_says_why_a_run_waits(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.job.write_text("7\n")
    states = [
        ("PENDING", "Priority"),
        ("PENDING", "Priority"),
        ("PENDING", "Resources"),
        ("RUNNING", ""),
        ("RUNNING", ""),
    ]
    notes = WaitNotes()
    for state, reason in states:
        answer = {"7": JobState("7", state, reason=reason, nodes="node1")}
        notes.update(read_record(folder, lambda _, answer=answer: answer))  # type: ignore[misc]
    said = [
        line.removeprefix(f"paceline: {folder.path.name} is ")
        for line in capsys.readouterr().err.splitlines()
    ]
    assert said == [
        "queued (waits for nodes: other jobs come first)",
        "queued (waits for nodes to become free)",
        "running (node1)",
    ]


def test_a_bar_is_followed_while_it_grows(folder: RunFolder) -> None:
    """Neither the bar nor the line that ends it is lost."""
    path = folder.attempt(1).log(0)
    write(path, (1.0, "start\n10%\r"))
    folder.job.write_text("7\n")
    state = ["RUNNING"]
    monitor = RunMonitor(
        folder, lambda each: read_record(each, lambda _: {"7": JobState("7", state[0])})
    )
    run_log, bars, lines = RunLog(folder), [], []
    for new in follow(run_log, monitor):
        bars += [bar.text for bar in run_log.unfinished()]
        lines += [line.text for line in new]
        if bars == ["10%"]:
            write(path, (2.0, "20%"))
        elif bars[-1] == "20%" and "done" not in lines:
            write(path, (3.0, "\rdone\n"))
        if "done" in lines:
            state[0] = "COMPLETED"
            monitor.next = 0.0
    assert lines == ["start", "done"]
    assert bars[0] == "10%"
    assert bars[-1] == "20%"
