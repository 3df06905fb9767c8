"""The output of a run: all ranks by time, from the end, as it grows, whatever the size of the logs."""

from __future__ import annotations

import json
import os
import random
import time
import tracemalloc
from pathlib import Path

import pytest

from paceline.agent.workers import output
from paceline.contract.run_folder import MARK_SIZE, RunFolder, format_mark, parse_mark, times_path
from paceline.watch.log_file import LogFile
from paceline.watch.run_log import RunLog


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.path.mkdir()
    made.run_json.write_text(json.dumps({"nodes": 1, "nproc": 2}))
    return made


def write_log(path: Path, timed: list[tuple[float | None, str]]) -> None:
    """Append pieces of output, each with the time at which it came."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for came, text in timed:
        size = path.stat().st_size if path.exists() else 0
        if came is not None:
            with open(times_path(path), "ab") as times:
                times.write(format_mark(size, came))
        with open(path, "ab") as log:
            log.write(text.encode())


def texts(lines: object) -> list[str]:
    return [f"{line.rank} {line.text}" for line in lines]  # type: ignore[attr-defined]


def test_ranks_are_merged_by_time(folder: RunFolder) -> None:
    attempt = folder.attempt(1)
    write_log(attempt.log(0), [(10.0, "a\nb\n"), (12.5, "c\n"), (14.0, "unfin")])
    write_log(attempt.log(1), [(11.0, "x\n"), (13.0, "y\nz\n")])
    everything = ["0 a", "0 b", "1 x", "0 c", "1 y", "1 z", "0 unfin"]
    assert texts(RunLog(folder).lines()) == everything
    assert [line.time for line in RunLog(folder).lines()] == [
        10.0,
        10.0,
        11.0,
        12.5,
        13.0,
        13.0,
        14.0,
    ]
    for count in range(9):
        assert (
            texts(RunLog(folder).tail(count))
            == everything[len(everything) - count if count <= 7 else 0 :]
        )
    assert (
        texts(RunLog(folder).tail(9, rank=1))
        == texts(RunLog(folder).lines(rank=1))
        == ["1 x", "1 y", "1 z"]
    )
    assert (
        texts(RunLog(folder).tail(9, complete=True))
        == texts(RunLog(folder).lines(complete=True))
        == everything[:-1]
    )


def test_attempts_follow_each_other(folder: RunFolder) -> None:
    write_log(folder.attempt(1).log(0), [(10.0, "first\n")])
    write_log(folder.attempt(2).log(1), [(9.0, "by a clock that is late\n")])
    write_log(folder.attempt(10).log(0), [(20.0, "last\n")])
    assert [(line.attempt, line.text) for line in RunLog(folder).tail(2)] == [
        (2, "by a clock that is late"),
        (10, "last"),
    ]
    assert [line.attempt for line in RunLog(folder).lines()] == [1, 2, 10]
    assert (
        texts(RunLog(folder).lines(attempt=2))
        == texts(RunLog(folder).tail(5, attempt=2))
        == ["1 by a clock that is late"]
    )
    assert RunLog(folder).tail(5, attempt=3) == []


def test_lines_without_times_come_log_after_log(folder: RunFolder) -> None:
    attempt = folder.attempt(1)
    write_log(attempt.log(0), [(None, "a\nb\n")])
    write_log(attempt.log(1), [(None, "x\ny\n")])
    lines = list(RunLog(folder).lines())
    assert texts(lines) == texts(RunLog(folder).tail(9)) == ["0 a", "0 b", "1 x", "1 y"]
    assert {line.time for line in lines} == {None}


def test_node_logs_have_the_rank_in_each_line(folder: RunFolder) -> None:
    attempt = folder.attempt(1)
    folder.run_json.write_text(json.dumps({"nodes": 2, "nproc": 128}))
    write_log(attempt.node_log(0), [(1.0, "[0] a\n[127] b\n[-1] torchrun\nno rank\n")])
    write_log(attempt.node_log(1), [(2.0, "[128] c\n[200] [1] d\n")])
    assert texts(RunLog(folder).lines()) == [
        "0 a",
        "127 b",
        "None torchrun",
        "None no rank",
        "128 c",
        "200 [1] d",
    ]
    assert texts(RunLog(folder).tail(9, rank=200)) == ["200 [1] d"]
    assert texts(RunLog(folder).lines(rank=127)) == ["127 b"]
    assert RunLog(folder).tail(9, rank=129) == []


def test_new_lines_come_once(folder: RunFolder) -> None:
    log, first, second = RunLog(folder), folder.attempt(1), folder.attempt(2)
    assert log.read_new() == []
    write_log(first.log(0), [(1.0, "a\npart")])
    assert texts(log.read_new()) == ["0 a"]
    assert texts(log.unfinished()) == ["0 part"]
    write_log(first.log(0), [(4.0, " two\n")])
    write_log(first.log(1), [(3.0, "x\n")])
    assert texts(log.read_new()) == ["1 x", "0 part two"]
    assert (log.read_new(), log.unfinished()) == ([], [])
    write_log(first.log(0), [(5.0, "cut off")])
    write_log(second.log(0), [(6.0, "again\n")])
    assert [(line.attempt, line.text) for line in log.read_new()] == [(1, "cut off"), (2, "again")]
    write_log(first.log(1), [(5.5, "late\n")])
    write_log(second.log(1), [(7.0, "end")])
    assert texts(log.read_new(finish=True)) == ["1 late", "1 end"]
    assert log.read_new(finish=True) == []


@pytest.mark.parametrize("way", ["tail", "lines"])
def test_new_lines_come_after_those_that_were_read(folder: RunFolder, way: str) -> None:
    attempt = folder.attempt(1)
    write_log(attempt.log(0), [(1.0, "a\nb\nbeg")])
    log = RunLog(folder)
    read = log.tail(2, complete=True) if way == "tail" else list(log.lines(complete=True))
    assert texts(read) == ["0 a", "0 b"]
    write_log(attempt.log(0), [(2.0, "un\n")])
    write_log(attempt.log(1), [(3.0, "x\n")])
    assert texts(log.read_new()) == ["0 begun", "1 x"]


def test_much_that_is_new_comes_in_parts(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.watch.run_log.READ_LIMIT", 1 << 18)
    expected = [f"line {number}" for number in range(100_000)]
    write_log(folder.attempt(1).log(0), [(1.0, "".join(f"{line}\n" for line in expected))])
    log, received, calls = RunLog(folder), [], 0
    while new := log.read_new():
        received += [line.text for line in new]
        calls += 1
    assert received == expected
    assert calls > 3


def test_a_progress_bar_is_its_last_state(folder: RunFolder) -> None:
    attempt = folder.attempt(1)
    bar = "".join(f"\r{number}%" for number in range(101))
    write_log(attempt.log(0), [(1.0, f"start\n{bar}\nnext\r\n{bar}")])
    assert (
        texts(RunLog(folder).lines())
        == texts(RunLog(folder).tail(9))
        == ["0 start", "0 100%", "0 next", "0 100%"]
    )
    log = RunLog(folder)
    assert texts(log.read_new()) == ["0 start", "0 100%", "0 next"]
    assert texts(log.unfinished()) == ["0 100%"]


def test_a_bar_that_redraws_itself_for_days_costs_no_memory(folder: RunFolder) -> None:
    path = folder.attempt(1).log(0)
    write_log(path, [(1.0, "start\n")])
    with open(path, "ab") as log:
        for number in range(60):
            log.write(b"".join(b"\r%d: some words %d" % (number, each) for each in range(5000)))
    tracemalloc.start()
    try:
        run_log = RunLog(folder)
        assert texts(run_log.read_new()) == ["0 start"]
        while run_log._logs[path].file.offset < path.stat().st_size:
            assert run_log.read_new() == []
        assert texts(run_log.unfinished()) == ["0 59: some words 4999"]
        assert texts(RunLog(folder).tail(5)) == ["0 start", "0 59: some words 4999"]
        assert texts(RunLog(folder).lines()) == ["0 start", "0 59: some words 4999"]
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_log_of_5_gb_opens_at_once(folder: RunFolder) -> None:
    """Nothing but its ends is read: the middle is a hole."""
    path = folder.attempt(1).log(0)
    size = 5 << 30
    write_log(path, [(1000.0, "first\n")])
    with open(path, "r+b") as log, open(times_path(path), "ab") as times:
        log.seek(size)
        log.write(b"\nhours later\nlast\n")
        for number in range(1, 100_000):
            times.write(format_mark(number * (size // 100_000), 1000.0 + number))
        times.write(format_mark(size, 200_000.0))
    before = _bytes_read()
    assert texts(RunLog(folder).tail(2)) == ["0 hours later", "0 last"]
    log = RunLog(folder)
    log.tail(1)
    write_log(path, [(200_001.0, "new\n")])
    assert [(line.time, line.text) for line in log.read_new()] == [(200_001.0, "new")]
    assert _bytes_read() - before < 4 << 20


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("seed", range(6))
def test_the_last_lines_are_those_of_all(
    folder: RunFolder, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the windows begin that `tail` reads, and however much each rank prints."""
    monkeypatch.setattr("paceline.watch.log_file.CHUNK", 64)
    monkeypatch.setattr("paceline.watch.run_log.WINDOW", 32)
    numbers = random.Random(seed)
    words = ["", "a", "some words", "10%\r20%", "\r\r", "\x1b[31mred", "é", "x" * 90]
    for rank, most in enumerate((3, 10, 100)):
        came = 1000.0
        for _ in range(numbers.randrange(most)):
            came += numbers.random()
            write_log(folder.attempt(1).log(rank), [(came, numbers.choice(words) + "\n")])
    log = RunLog(folder)
    everything = list(log.lines())
    for count in range(len(everything) + 2):
        assert log.tail(count) == everything[max(0, len(everything) - count) :]
    red = [line for line in everything if "red" in line.text]
    assert log.tail(5, grep="red") == red[-5:]


def test_long_lines_come_in_pieces(folder: RunFolder) -> None:
    path = folder.attempt(1).log(0)
    write_log(path, [(1.0, "x" * 1_000_000 + "\nend\n")])
    for lines in (
        RunLog(folder).tail(100),
        list(RunLog(folder).lines()),
        RunLog(folder).read_new(),
    ):
        assert lines[-1].text == "end"
        assert sum(len(line.text) for line in lines[:-1]) == 1_000_000
        assert max(len(line.text) for line in lines) < 500_000


def test_long_lines_of_a_node_log_keep_their_rank(folder: RunFolder) -> None:
    path = folder.attempt(1).node_log(0)
    path.parent.mkdir(parents=True)
    with open(path, "wb") as log:
        pipes = {rank: output.LinePrefixer(f"[{rank}] ", log.write) for rank in (0, 1)}
        for _ in range(7):  # pieces of output, as they come from pipes
            for rank, prefixer in pipes.items():
                prefixer.write(str(rank).encode() * output.CHUNK)
        for prefixer in pipes.values():
            prefixer.write(b"\n")
    for rank in (0, 1):
        for found in (
            list(RunLog(folder).lines(rank=rank)),
            RunLog(folder).tail(1000, rank=rank),
            RunLog(folder).read_new(rank=rank),
        ):
            assert {line.rank for line in found} == {rank}
            assert "".join(line.text for line in found) == str(rank) * 7 * output.CHUNK
    assert {line.rank for line in RunLog(folder).lines()} == {0, 1}


def test_a_last_line_without_an_end_of_an_attempt_that_is_over(folder: RunFolder) -> None:
    write_log(folder.attempt(1).log(0), [(1.0, "a\nthe last words")])
    write_log(folder.attempt(2).log(0), [(2.0, "b\nbegun")])
    everything = ["0 a", "0 the last words", "0 b"]
    assert texts(RunLog(folder).lines(complete=True)) == everything
    assert texts(RunLog(folder).tail(9, complete=True)) == everything
    assert texts(RunLog(folder).tail(9)) == [*everything, "0 begun"]


def test_output_that_comes_late_is_read_before_that_of_the_next_attempt(folder: RunFolder) -> None:
    write_log(folder.attempt(1).log(0), [(1.0, "a\nend of 1")])
    write_log(folder.attempt(2).log(0), [(2.0, "b\nbegun")])
    reader = RunLog(folder)
    assert texts(reader.tail(1, complete=True)) == ["0 b"]
    write_log(folder.attempt(2).log(0), [(3.0, " and done\nlate\n")])
    write_log(folder.attempt(2).log(1), [(3.0, "another log\n")])
    write_log(folder.attempt(3).log(0), [(4.0, "c\n")])
    new = [line for _ in range(3) for line in reader.read_new()]
    assert texts(new) == ["0 begun and done", "0 late", "1 another log", "0 c"]


def test_grep_reads_what_a_terminal_shows(folder: RunFolder) -> None:
    path = folder.attempt(1).log(0)
    write_log(
        path, [(1.0, "loss 1.5\nloss \x1b[1m2.5\x1b[0m\nother\n" + "x\n" * 20_000 + "loss 3.5\n")]
    )
    expected = ["0 loss 1.5", "0 loss \x1b[1m2.5\x1b[0m", "0 loss 3.5"]
    assert (
        texts(RunLog(folder).lines(grep="loss"))
        == texts(RunLog(folder).tail(9, grep="loss"))
        == expected
    )
    assert texts(RunLog(folder).tail(9, grep="loss 2.5")) == expected[1:2]
    assert RunLog(folder).tail(1, grep="loss 2.5")[0].plain == "loss 2.5"


def test_a_search_has_a_limit(folder: RunFolder) -> None:
    for number in (1, 2):
        for rank in (0, 1):
            write_log(
                folder.attempt(number).log(rank), [(1.0, f"{number} loss {rank}\n" + "x\n" * 500)]
            )
    found = [f"{rank} {number} loss {rank}" for number in (1, 2) for rank in (0, 1)]
    assert texts(RunLog(folder).tail(9, grep="loss")) == found
    assert texts(RunLog(folder).tail(9, grep="loss", scan=1 << 20)) == found
    assert texts(RunLog(folder).tail(9, grep="loss", scan=2020)) == found[2:]
    assert texts(RunLog(folder).tail(9, grep="loss", scan=1000)) == []
    assert texts(RunLog(folder).tail(2, scan=1000)) == ["1 x", "1 x"]
    assert len(RunLog(folder).tail(9000, rank=0, scan=1003)) == 501, "no part of a line"


@pytest.mark.parametrize(
    "harm", ["link", "pipe", "folder", "unreadable times", "times of zeros", "bytes"]
)
def test_foreign_files_do_no_harm(folder: RunFolder, tmp_path: Path, harm: str) -> None:
    attempt = folder.attempt(1)
    write_log(attempt.log(0), [(1.0, "good\n")])
    path = attempt.log(1)
    if harm == "link":
        path.symlink_to("/etc/passwd")
    elif harm == "pipe":
        os.mkfifo(path)
    elif harm == "folder":
        path.mkdir()
    elif harm == "unreadable times":
        times_path(attempt.log(0)).write_bytes(b"\xff" * 1000)
    elif harm == "times of zeros":
        times_path(attempt.log(0)).write_bytes(bytes(MARK_SIZE * 10))
    else:
        path.write_bytes(bytes(range(256)))
    for lines in (
        RunLog(folder).tail(9, rank=0),
        list(RunLog(folder).lines(rank=0)),
        RunLog(folder).read_new(rank=0),
    ):
        assert texts(lines) == ["0 good"]
    for line in [
        *RunLog(folder).tail(99),
        *RunLog(folder).lines(),
        *RunLog(folder).read_new(finish=True),
    ]:
        assert "root:" not in line.text
        assert not any(ord(each) < 32 and each != "\t" for each in line.plain)


def test_a_link_to_a_folder_is_not_an_attempt(folder: RunFolder, tmp_path: Path) -> None:
    write_log(tmp_path / "elsewhere" / "rank-0.log", [(1.0, "secret\n")])
    (folder.path / "attempt-1").symlink_to(tmp_path / "elsewhere")
    assert (RunLog(folder).tail(9), list(RunLog(folder).lines()), RunLog(folder).read_new()) == (
        [],
        [],
        [],
    )


def test_marks_round_trip() -> None:
    for offset, came in ((0, 0.0), (5 << 40, 1763377415.125), (10**16 - 1, 9999999999.999)):
        mark = format_mark(offset, came)
        assert (len(mark), parse_mark(mark)) == (MARK_SIZE, (offset, came))
    for damaged in (
        b"",
        mark[:-1],
        mark.replace(b".", b"1"),
        mark.replace(b" ", b"_"),
        b"-" + mark[1:],
    ):
        assert parse_mark(damaged) is None


def test_the_agent_writes_few_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(output.time, "time", lambda: clock[0])
    log = output.TimedLog(tmp_path / "rank-0.log", pytest.fail)
    for _ in range(6000):  # a minute of 100 writes per second
        log.write(b"many words\n")
        clock[0] += 0.01
    clock[0] += 3600.0
    log.write(b"after an hour\n")
    clock[0] -= 7200.0  # somebody sets the clock back
    log.write(b"the last line\n")
    log.close()
    content = times_path(tmp_path / "rank-0.log").read_bytes()
    marks = [
        parse_mark(content[start : start + MARK_SIZE])
        for start in range(0, len(content), MARK_SIZE)
    ]
    assert 60 <= len(marks) <= 60 + output.MARKS_AT_ONCE + 3
    assert marks == sorted(marks)  # type: ignore[type-var]
    assert marks[-2:] == [(66_000, 4660.0), (66_014, 4660.0)]


def test_a_log_that_is_written_while_it_is_read(folder: RunFolder) -> None:
    """Neither a line nor its time is lost, wherever a write ends."""
    attempt = folder.attempt(1)
    attempt.path.mkdir()
    log, written, numbers = RunLog(folder), b"", random.Random(1)
    timed = output.TimedLog(attempt.log(0), pytest.fail)
    received: list[str] = []
    content = "".join(
        f"{number} é {'x' * numbers.randrange(200)}\n" for number in range(500)
    ).encode()
    while len(written) < len(content):
        piece = content[len(written) : len(written) + numbers.randrange(1, 900)]
        written += piece
        timed.write(piece)
        new = log.read_new()
        assert all(line.time is not None and abs(line.time - time.time()) < 3600 for line in new)
        received += [line.text for line in new]
    timed.close()
    assert received == content.decode().splitlines()


def test_lines_that_come_while_the_end_is_read_are_not_lost(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder.attempt(1).log(0)
    write_log(path, [(None, "one\ntwo\n")])
    line_start = LogFile.line_start

    def slow_line_start(file: LogFile, offset: int) -> int:
        found = line_start(file, offset)
        path.write_text("one\ntwo\nthree\n")
        return found

    log = RunLog(folder)
    with monkeypatch.context() as patch:
        patch.setattr(LogFile, "line_start", slow_line_start)
        assert texts(log.tail(10, complete=True)) == ["0 one", "0 two"]
    assert texts(log.read_new()) == ["0 three"]
