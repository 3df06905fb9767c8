"""The mirror of a run folder: complete, resumable at any byte, and closed to whatever a stream may hold."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.contract.run_folder import RunFolder
from paceline.contract.run_path import is_run_path
from paceline.errors import ClusterError, ConnectionProblem
from paceline.slurm.job_states.meanings import JobState
from paceline.ssh.mirror import follower, frames, reader, run_files, write_lock
from paceline.ssh.mirror.changes import RunChanges
from paceline.ssh.mirror.follower import Follower
from paceline.ssh.mirror.frames import HEAD, MARK, BadStream, Frame, FrameReader, FrameWriter
from paceline.ssh.mirror.job_states import from_row, keep_states, read_states, to_row
from paceline.ssh.mirror.mirror_folder import REFRESHED, Mirror
from paceline.ssh.mirror.reader import Scope
from paceline.ssh.mirror.run_files import Copy, kind_of
from paceline.ssh.mirror.session import update
from paceline.ssh.mirror.write_lock import MirrorBusy
from paceline.watch import viewpoint
from paceline.watch.logs.merged_log import RunLog
from paceline.watch.overview import make_overview
from paceline.watch.records import read_record
from paceline.watch.scheduler.evidence import Evidence
from paceline.watch.viewpoint import Viewpoint, look_at

RUN = "project/default/20260101-120000-aaaa"
LOG = "attempt-1/rank-0.log"
MUCH = 1 << 30


@pytest.fixture
def there(tmp_path: Path) -> Path:
    folder = tmp_path / "there" / RUN
    for each in ("attempt-1", "events", "claims", "job-starts/7-0"):
        (folder / each).mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (folder / "job").write_text("7")
    (folder / "claims" / "1").symlink_to("7-0")
    return folder


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    made = Mirror(tmp_path / "mirror")
    made.create()
    return made


def changes(there: Path, mirror: Mirror | None = None, log_bytes: int = MUCH) -> RunChanges:
    """A reader that has just been started, and knows what the mirror has."""
    copies = (
        {path: Copy(*row) for path, row in mirror.copies(RUN).items()} if mirror is not None else {}
    )
    return RunChanges(there.parents[2], RUN, copies, log_bytes)


def stream_of(found: Iterable[Frame]) -> bytes:
    stream = io.BytesIO()
    writer = FrameWriter(stream)
    for frame in found:
        writer.write(frame)
    return stream.getvalue()


def send(found: RunChanges, mirror: Mirror) -> list[str]:
    """Send what has changed; return the paths in their order."""
    sent = []
    reader = FrameReader(io.BytesIO(stream_of(found.collect())))
    while (arrived := reader.read()) is not None:
        mirror.apply(arrived)
        sent.append(str(arrived.values.get("path", "claim")))
    return sent


def test_a_mirror_has_what_is_there_and_then_what_is_new(there: Path, mirror: Mirror) -> None:
    (there / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    found = changes(there)
    assert set(send(found, mirror)) == {"run.json", "job", "metrics.jsonl", "claim"}
    assert send(found, mirror) == []
    with (there / "metrics.jsonl").open("a") as file:
        file.write('ep": 2}\n')
    (there / "job").write_text("8")
    assert send(found, mirror) == ["metrics.jsonl", "job"]
    here = mirror.folder / RUN
    for name in ("metrics.jsonl", "job", "run.json"):
        assert (here / name).read_bytes() == (there / name).read_bytes()
        assert (here / name).stat().st_mtime_ns == (there / name).stat().st_mtime_ns
    assert os.readlink(here / "claims" / "1") == "7-0"
    # after a lost connection: nothing comes twice
    assert send(changes(there, mirror), mirror) == ["claim"]
    (there / "job").unlink()
    assert send(found, mirror) == ["job"]
    assert not (here / "job").exists()


def test_every_cut_of_the_stream_is_survived(there: Path, mirror: Mirror, tmp_path: Path) -> None:
    (there / LOG).write_bytes(os.urandom(600_000))
    stream = stream_of(changes(there).collect())
    for cut in [*range(0, 400, 7), *range(400, len(stream), len(stream) // 40)]:
        shutil.rmtree(mirror.folder)
        mirror.create()
        source = FrameReader(io.BytesIO(stream[:cut]))
        with pytest.raises(BadStream) if cut else pytest.raises(StopIteration):
            while (frame := source.read()) is not None:
                mirror.apply(frame)
            raise BadStream if cut else StopIteration
        send(changes(there, mirror), mirror)
        assert (mirror.folder / RUN / LOG).read_bytes() == (there / LOG).read_bytes()


class SentLog:
    """A log of three lines that a mirror has, and the reader that has sent it."""

    def __init__(self, there: Path, mirror: Mirror) -> None:
        self.there, self.mirror = there, mirror
        self.path, self.copy = there / LOG, mirror.folder / RUN / LOG
        self.path.write_bytes(b"a\nb\nc\n")
        self.reader = changes(there)
        self.send()

    def send(self, *, again: bool = False) -> None:
        """Send what has changed; with `again`, by a reader that starts only now."""
        if again:
            self.reader = changes(self.there, self.mirror)
        send(self.reader, self.mirror)


@pytest.fixture
def sent_log(there: Path, mirror: Mirror) -> SentLog:
    return SentLog(there, mirror)


@pytest.mark.parametrize(
    "new", [b"other lines\n", b"a\nb\n", b"a\nb\nc\nd\n", b"", b"a\nX\nc\nd\n"]
)
@pytest.mark.parametrize("again", [True, False])
def test_a_file_that_is_replaced_or_becomes_shorter_is_sent_anew(
    sent_log: SentLog, new: bytes, again: bool
) -> None:
    replacement = sent_log.path.with_suffix(".new")
    replacement.write_bytes(new)
    os.replace(replacement, sent_log.path)
    sent_log.send(again=again)
    assert sent_log.copy.read_bytes() == new


@pytest.mark.parametrize(
    "new", [b"other lines\n", b"a\nb\nC\n", b"A\nb\nc\n", b"a\nX\nc\nd\n", b"d\n" * 500]
)
@pytest.mark.parametrize("again", [True, False])
def test_a_file_that_is_cut_off_in_place_and_grows_again_is_sent_anew(
    sent_log: SentLog, new: bytes, again: bool
) -> None:
    """It is as long as before, or longer, when somebody looks again. Whoever follows it sees all lines."""
    followed = RunLog(RunFolder(sent_log.mirror.folder / RUN))
    assert [line.text for line in followed.read_new()] == ["a", "b", "c"]
    sent_log.path.write_bytes(new)
    os.utime(sent_log.path, ns=(time.time_ns() + 10**9,) * 2)
    sent_log.send(again=again)
    assert sent_log.copy.read_bytes() == new
    assert [line.text for line in followed.read_new()] == new.decode().splitlines()
    with sent_log.path.open("ab") as file:
        file.write(b"one more\n")
    sent_log.send()
    assert [line.text for line in followed.read_new()] == ["one more"]


def test_whoever_follows_a_log_does_not_see_it_twice_when_more_of_its_beginning_comes(
    there: Path, mirror: Mirror
) -> None:
    """Another command may want all of a log of which the mirror had the end."""
    log = there / LOG
    log.write_bytes(b"".join(b"line %d\n" % number for number in range(100)))
    send(changes(there, log_bytes=50), mirror)
    followed = RunLog(RunFolder(mirror.folder / RUN))
    assert [line.text for line in followed.read_new()][-1] == "line 99"
    send(changes(there, mirror), mirror)
    with log.open("ab") as file:
        file.write(b"line 100\n")
    send(changes(there, mirror), mirror)
    assert (mirror.folder / RUN / LOG).read_bytes() == log.read_bytes()
    assert [line.text for line in followed.read_new()] == ["line 100"]


def test_two_streams_may_write_one_mirror(there: Path, mirror: Mirror) -> None:
    log = there / LOG
    log.write_bytes(b"one\n")
    first, second = changes(there), changes(there)
    send(first, mirror)
    with log.open("ab") as file:
        file.write(b"two\n")
    send(second, mirror)
    with log.open("ab") as file:
        file.write(b"three\n")
    send(first, mirror)
    send(second, mirror)
    assert (mirror.folder / RUN / LOG).read_bytes() == b"one\ntwo\nthree\n"


def test_of_a_huge_log_the_end_comes_first_and_readers_see_whole_lines(
    there: Path, mirror: Mirror
) -> None:
    lines = [f"line {number}" for number in range(20_000)]
    (there / LOG).write_text("\n".join(lines) + "\n")
    send(changes(there, log_bytes=1000), mirror)
    here = RunFolder(mirror.folder / RUN)
    shown = [line.text for line in RunLog(here).lines()]
    assert 50 < len(shown) < 100
    assert shown == lines[-len(shown) :]
    assert [line.text for line in RunLog(here).read_new()] == shown
    assert [line.text for line in RunLog(here).tail(1000)] == shown
    with (there / LOG).open("a") as file:
        file.write("more\n")
    send(changes(there, mirror, log_bytes=1000), mirror)  # goes on
    assert [line.text for line in RunLog(here).lines()] == [*shown, "more"]
    send(changes(there, mirror), mirror)  # all of it is wanted now
    assert [line.text for line in RunLog(here).lines()] == [*lines, "more"]


def test_the_verdict_comes_after_all_that_was_written_before_it(
    there: Path, mirror: Mirror
) -> None:
    (there / LOG).write_text("last words\n")
    (there / "job-starts" / "7-0" / "verdict").write_text("done")
    sent = send(changes(there), mirror)
    assert sent.index("attempt-1/rank-0.log") < sent.index("job-starts/7-0/verdict")


def test_no_record_is_left_out_for_the_logs_of_many_ranks(
    there: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a thousand ranks that started again several times: the last logs come, and all that views need."""
    monkeypatch.setattr(run_files, "MAX_LOGS", 100)
    found = changes(there)
    for attempt in (1, 2, 3):
        (there / f"attempt-{attempt}").mkdir(exist_ok=True)
        for rank in range(20):
            (there / f"attempt-{attempt}" / f"rank-{rank}.log").touch()
            (there / f"attempt-{attempt}" / f"rank-{rank}.times").touch()
        (there / f"attempt-{attempt}" / "verdict").write_text("failed")
        (there / "job-starts" / f"7-{attempt}").mkdir()
        (there / "job-starts" / f"7-{attempt}" / "verdict").write_text("failed")
        send(found, mirror)
    here = mirror.folder / RUN
    records = [
        "run.json",
        "job",
        *(f"attempt-{number}/verdict" for number in (1, 2, 3)),
        *(f"job-starts/7-{number}/verdict" for number in (1, 2, 3)),
    ]
    assert [name for name in records if not (here / name).is_file()] == []
    listed = run_files.list_files(there)
    assert {name for name in listed if "rank-" not in name} == set(records)
    logs = {
        attempt: sum(name.startswith(f"attempt-{attempt}/rank-") for name in listed)
        for attempt in (1, 2, 3)
    }
    assert logs == {3: 40, 2: 40, 1: 20}


# -- what a stream may hold ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "run",
    [
        "../a/b",
        "/a/b/c",
        "a/b",
        "a//c",
        "a/../c",
        "a/b/..",
        ".snapshots/b/c",
        "a/b/c/d",
        "a/b/c/trials/x",
        "a/b\n/c",
        "",
        "a/b/c/trials/../../..",
        "a\0/b/c",
        "a/b/.lock",
        "..\\a/b/c",
        "./b/c",
        "../b/c",
        "..a/b/c",
        "a/.snapshots/c",
    ],
)
def test_only_paths_of_runs_are_accepted(mirror: Mirror, run: str) -> None:
    assert not is_run_path(run)
    with pytest.raises(BadStream):
        mirror.apply(Frame(frames.RECORD, {"run": run, "path": "run.json", "modified": 0}, b"{}"))
    assert not list(mirror.folder.rglob("run.json"))


def test_the_folder_of_a_project_may_begin_with_a_dot(there: Path) -> None:
    scratch, run = there.parents[2], ".dots/default/20260101-120000-aaaa"
    (scratch / run).mkdir(parents=True)
    answer = io.BytesIO()
    asked = io.BytesIO(f"{Scope([run]).to_json()}\n".encode())
    reader.Reader(scratch, lambda name: scratch / name, asked, answer).serve()
    frame = FrameReader(io.BytesIO(answer.getvalue())).read()
    assert frame is not None
    assert (frame.kind, frame.values.get("runs")) == (frames.FOUND, [run])


@pytest.mark.parametrize(
    "path",
    [
        "../run.json",
        "/etc/passwd",
        "environment.sh",
        "code/x.py",
        "checkpoints/step-1/model.safetensors",
        "work/a",
        "attempt-1/../../x",
        "events/../run.json",
        "attempt-1/rank-0.log/..",
        "claims/1",
        "job-starts/../verdict",
        "",
        "events/a\n.jsonl",
        ".run.json",
        "paceline.zip",
        "attempt-1/rank-0.log\n",
    ],
)
def test_only_files_of_views_are_accepted(mirror: Mirror, path: str) -> None:
    assert kind_of(path) is None
    for kind in (frames.RECORD, frames.DATA, frames.GONE):
        with pytest.raises(BadStream):
            mirror.apply(
                Frame(
                    kind,
                    {"run": RUN, "path": path, "modified": 0, "offset": 0, "relation": 1},
                    b"x",
                )
            )


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("claim", {"number": 1, "name": "../../x"}),
        ("claim", {"number": 0, "name": "a"}),
        ("claim", {"number": "1"}),
        ("claim", {"number": 10**9, "name": "a"}),
        ("data", {"path": "metrics.jsonl", "offset": -1, "relation": 1}),
        ("data", {"path": "metrics.jsonl", "offset": 1 << 60, "relation": 1}),
        ("data", {"path": "metrics.jsonl"}),
        ("data", {"path": "metrics.jsonl", "offset": 5, "relation": 0}),
        ("data", {"path": 3}),
        ("strange", {}),
        ("jobs", {"jobs": {"1": "x"}, "problem": "", "hint": ""}),
        ("jobs", {"jobs": []}),
        ("pass", {"time": "now"}),
        ("jobs", {"jobs": {"1": ["1", "R", "", "", 1e300, "", ""]}, "problem": "", "hint": ""}),
        ("pass", {}),
    ],
)
def test_what_makes_no_sense_is_refused(mirror: Mirror, kind: str, values: dict[str, Any]) -> None:
    with pytest.raises(BadStream):
        mirror.apply(Frame(kind, {"run": RUN, "modified": 0, **values}, b"x"))


def test_a_link_in_the_mirror_is_not_followed(mirror: Mirror, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (mirror.folder / "project").symlink_to(outside)
    with pytest.raises(BadStream, match="is a link"):
        mirror.apply(Frame(frames.RECORD, {"run": RUN, "path": "run.json", "modified": 0}, b"{}"))
    assert not list(outside.rglob("run.json"))
    (mirror.folder / "project").unlink()
    (mirror.folder / RUN).mkdir(parents=True)
    (outside / "file").write_text("mine")
    (mirror.folder / RUN / "metrics.jsonl").symlink_to(outside / "file")
    with pytest.raises(OSError, match="not a regular file"):
        mirror.apply(
            Frame(
                frames.DATA,
                {"run": RUN, "path": "metrics.jsonl", "offset": 4, "relation": 0, "modified": 0},
                b"x",
            )
        )
    assert (outside / "file").read_text() == "mine"


def framed(
    plain: bytes, *, length: int | None = None, checksum: int | None = None, mark: bytes = MARK
) -> bytes:
    content = zlib.compress(plain)
    size = len(content) if length is None else length
    return HEAD.pack(mark, size, zlib.crc32(content) if checksum is None else checksum) + content


@pytest.mark.parametrize(
    "stream",
    [
        b"Welcome to the cluster\n",
        framed(b"{}\n", length=0xFFFFFFFF),
        framed(b'{"kind":"pass"}\n', checksum=1),
        framed(b"{}\n"),
        framed(b"[]\n"),
        framed(b'{"kind":1}\n'),
        framed(b"no json\n"),
        HEAD.pack(MARK, 4, zlib.crc32(b"none")) + b"none",
        framed(b'{"kind":"x"}\n' + bytes(64 << 20)),
        framed(b"[" * 100_000),
        framed(b"{}", mark=b"PLm0"),
    ],
)
def test_a_stream_that_is_none_is_refused(mirror: Mirror, stream: bytes) -> None:
    with pytest.raises(BadStream):
        FrameReader(io.BytesIO(stream)).read()
    with pytest.raises(ConnectionProblem, match="cannot be used"):
        update(mirror, Scope(["last"]), lambda: _Said(stream), cluster="alps")


class _Said:
    """A reader that says this, whatever it is asked."""

    def __init__(self, stream: bytes) -> None:
        self.output = io.BytesIO(stream)

    def __enter__(self) -> _Said:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def send(self, content: bytes) -> None:
        pass

    def end(self) -> None:
        pass


def test_names_that_are_no_runs_are_refused(mirror: Mirror) -> None:
    said = Frame(
        frames.FOUND,
        {"scratch": "/s", "names": {"last": "../../etc"}, "runs": [], "left_out": 0, "time": 1},
    )
    with pytest.raises(ConnectionProblem, match="cannot be used"):
        update(mirror, Scope(["last"]), lambda: _Said(stream_of([said])), cluster="alps")


# -- the scheduler, and the clock ---------------------------------------------------------------------------------


def test_states_of_jobs_travel_whatever_the_time_zone(mirror: Mirror) -> None:
    state = JobState("7", "PENDING", "Priority", "", "2026-01-01T12:00:00", "0:00", "0:0")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TZ", "UTC")
            time.tzset()
            row = json.loads(json.dumps(to_row(state)))
            patch.setenv("TZ", "Asia/Tokyo")
            time.tzset()
            there = from_row(row)
    finally:
        time.tzset()
    assert there == JobState("7", "PENDING", "Priority", "", "2026-01-01T21:00:00", "0:00", "0:0")
    keep_states(mirror.base, {"7": row, "8": None}, "", "")
    found = read_states(mirror.base, ["7", "8", "9"])
    assert found["7"].state == "PENDING"
    assert "8" not in found  # Slurm does not know it
    assert found["9"].label == "unknown"  # nobody has asked about it
    keep_states(mirror.base, {}, "Slurm does not answer.", "Wait.")
    with pytest.raises(ClusterError, match="Slurm does not answer"):
        read_states(mirror.base, ["7"])


def test_a_run_that_was_last_seen_yesterday_is_not_called_dead(there: Path, mirror: Mirror) -> None:
    yesterday = time.time() - 86400
    (there / "system").mkdir()
    (there / "launch.json").write_text('{"system_metrics": 15}')
    (there / "system" / "node-0.jsonl").write_text("{}\n")
    (there / "metrics.jsonl").write_text(
        json.dumps({"time": yesterday - 2, "step": 5, "loss": 1.0}) + "\n"
    )
    for path in there.rglob("*"):
        os.utime(path, (yesterday, yesterday), follow_symlinks=False)
    send(changes(there), mirror)
    mirror.apply(
        Frame(
            frames.JOBS,
            {
                "jobs": {"7": ["7", "RUNNING", "", "n1", "", "2:00:00", ""]},
                "problem": "",
                "hint": "",
            },
        )
    )
    mirror.apply(Frame(frames.PASS, {"time": yesterday}))
    table = json.loads((mirror.base / "heard.json").read_text())
    (mirror.base / "heard.json").write_text(json.dumps({**table, "here": yesterday}))
    view = Viewpoint("alps", mirror, lambda verb, run: "")
    with look_at(view):
        row = make_overview(read_record(RunFolder(mirror.folder / RUN)))
        assert viewpoint.now() == yesterday
        assert viewpoint.clock() == {"now": yesterday, "runs": False}
    assert row.status == "running"
    assert row.detail == "n1"


def test_the_age_of_a_run_is_that_of_its_own_copy(there: Path, mirror: Mirror) -> None:
    """Another run's stream, which goes on for minutes, makes this one no fresher."""
    send(changes(there), mirror)
    mirror.apply(Frame(frames.PASS, {"time": 1000.0}))
    mirror.refresh([RUN, "../../outside", "project/default/never-arrived"])
    table = json.loads((mirror.base / REFRESHED).read_text())
    assert list(table) == [RUN]
    (mirror.base / REFRESHED).write_text(json.dumps({RUN: table[RUN] - 480}))
    folder = mirror.folder / RUN
    with look_at(Viewpoint("alps", mirror, lambda verb, run: "", status=lambda: "no connection")):
        assert (
            470
            < viewpoint.age(folder) - viewpoint.age(mirror.folder / "project/default/other")
            < 490
        )
        assert 510 < viewpoint.now(folder) < 530
        assert viewpoint.now() == 1000.0
    with look_at(Viewpoint("alps", mirror, lambda verb, run: "")):
        assert viewpoint.clock()["runs"]
        assert viewpoint.age(folder) == 0
        assert viewpoint.now(folder) >= 1000.0
    (mirror.base / REFRESHED).write_text("[broken")
    assert mirror.refreshed(folder) == 0


# -- the reader ---------------------------------------------------------------------------------------------------

SERVE = """
import sys
from pathlib import Path
from paceline.ssh.mirror import reader
scratch = Path(sys.argv[1])
sys.exit(reader.serve(scratch, lambda name: scratch / name))
"""


@pytest.fixture
def process(there: Path) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-c", SERVE, str(there.parents[2])]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        yield started
        started.kill()


def test_the_reader_ends_when_nobody_listens(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    # with a sign of life meanwhile
    process.stdin.write(f"{Scope([RUN], follow=True).to_json()}\n\n{{}}\n".encode())
    process.stdin.flush()
    kinds = set()
    arriving = FrameReader(process.stdout)
    while (frame := arriving.read()) is not None and frame.kind != frames.PASS:
        kinds.add(frame.kind)
    assert kinds >= {frames.FOUND, frames.RECORD, frames.CLAIM}
    process.stdin.close()
    assert process.wait(timeout=60) == 0


def test_the_reader_ends_when_the_other_side_falls_silent(process: subprocess.Popen[bytes]) -> None:
    """The connection stays open: nobody closes the input."""
    assert process.stdin is not None
    process.stdin.write(f"{Scope([RUN], follow=True, silence=1.0).to_json()}\n{{}}\n".encode())
    process.stdin.flush()
    assert process.wait(timeout=80) == 0
    assert process.stdout is not None
    arriving, kinds = FrameReader(process.stdout), set()
    while (frame := arriving.read()) is not None:
        kinds.add(frame.kind)
    assert {frames.FOUND, frames.PASS} <= kinds


class _Silent(_Said):
    """A reader that falls silent after what it says; the connection stays open until somebody ends it."""

    def __init__(self, stream: bytes) -> None:
        source, sink = os.pipe()
        os.write(sink, stream)
        self.output, self._sink = open(source, "rb"), open(sink, "wb")  # type: ignore[assignment]  # noqa: SIM115

    def end(self) -> None:
        self._sink.close()

    def __exit__(self, *_: Any) -> None:
        self.output.close()


def test_a_reader_that_falls_silent_counts_as_lost(mirror: Mirror) -> None:
    said = Frame(
        frames.FOUND,
        {"scratch": "/s", "names": {"last": RUN}, "runs": [RUN], "left_out": 0, "time": 1},
    )
    with pytest.raises(ConnectionProblem, match="connection to alps was lost"):
        update(
            mirror, Scope(["last"], silence=1.0), lambda: _Silent(stream_of([said])), cluster="alps"
        )


def test_the_reader_says_what_is_wrong(process: subprocess.Popen[bytes]) -> None:
    output, _ = process.communicate(f"{Scope(['../../..']).to_json()}\n{{}}\n".encode(), timeout=60)
    frame = FrameReader(io.BytesIO(output)).read()
    assert frame is not None
    assert frame.kind == frames.ERROR
    assert "is not in" in frame.text("message")


def test_a_scheduler_that_is_down_stays_so_whichever_runs_are_due(
    there: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks it for runs without a job, or for those that are over: it answers only if it is asked."""
    without_job, over = (
        "project/default/20260101-130000-bbbb",
        "project/default/20260101-140000-cccc",
    )
    scratch = there.parents[2]
    for run in (without_job, over):
        (scratch / run / "job-starts" / "8-0").mkdir(parents=True)
    (scratch / over / "job").write_text("8")
    (scratch / over / "claims").mkdir()
    (scratch / over / "claims" / "1").symlink_to("8-0")
    verdict = RunFolder(scratch / over).job_start("8-0").verdict
    verdict.write_text("done\n")
    os.utime(verdict, (1, 1))
    is_down = True

    def answer(seen: dict[str, Evidence]) -> dict[str, JobState]:
        if is_down and not all(each.is_closed for each in seen.values()):
            raise ClusterError("Slurm is down.")
        return {job: JobState(job, "RUNNING") for job in seen}

    monkeypatch.setattr(reader, "query_states", answer)
    asking = reader.Reader(scratch, Path, io.BytesIO(), io.BytesIO())

    def look(*due: str) -> None:
        if (frame := asking._query_jobs(due)) is not None:
            mirror.apply(frame)

    look(RUN)
    for due in ([], [without_job], [over], [over, without_job]):
        look(*due)
        with pytest.raises(ClusterError, match=r"Slurm is down\."):
            read_states(mirror.base, ["7"])
    is_down = False
    look()
    assert read_states(mirror.base, ["7"])["7"].state == "RUNNING"


def test_a_list_has_the_newest_runs_and_the_trials_of_sweeps(there: Path) -> None:
    scratch, sweep = there.parents[2], "b/c/digits"
    for run in ("b/c/20260101-130000-bbbb", "b/c/20260101-110000-cccc"):
        (scratch / run).mkdir(parents=True)
        (scratch / run / "run.json").write_text("{}")
    for trial in ("0", "1", "x"):
        (scratch / sweep / "trials" / trial).mkdir(parents=True)
    (scratch / sweep / "sweep.json").write_text("{}")
    began = time.mktime((2026, 1, 1, 12, 30, 0, 0, 0, -1))
    os.utime(scratch / sweep / "sweep.json", (began, began))
    found = reader.Reader(scratch, Path, io.BytesIO(), io.BytesIO())._list(Scope(newest=3), [])
    assert found == [
        "b/c/20260101-130000-bbbb",
        sweep,
        f"{sweep}/trials/1",
        f"{sweep}/trials/0",
        RUN,
    ]


def test_a_sweep_that_was_named_comes_whole_however_many_trials_it_has(there: Path) -> None:
    scratch, sweep, count = there.parents[2], "b/c/digits", reader.MAX_RUNS + 20
    for trial in range(count):
        (scratch / sweep / "trials" / str(trial)).mkdir(parents=True)
    (scratch / sweep / "sweep.json").write_text("{}")
    found = reader.Reader(scratch, Path, io.BytesIO(), io.BytesIO())._list(Scope([sweep]), [sweep])
    assert set(found) == {sweep, *(f"{sweep}/trials/{trial}" for trial in range(count))}


def test_a_list_keeps_its_runs_and_says_how_many_trials_it_leaves_out(
    there: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = there.parents[2]
    for sweep in ("b/c/digits", "b/c/letters"):
        for trial in range(5):
            (scratch / sweep / "trials" / str(trial)).mkdir(parents=True)
        (scratch / sweep / "sweep.json").write_text("{}")
    monkeypatch.setattr(reader, "MAX_RUNS", 8)
    monkeypatch.setattr(reader, "MAX_TRIALS", 4)
    asked, answer, said = io.BytesIO(f"{Scope(newest=3).to_json()}\n".encode()), io.BytesIO(), []
    reader.Reader(scratch, Path, asked, answer).serve()
    frame = FrameReader(io.BytesIO(answer.getvalue())).read()
    assert frame is not None
    runs = frame.values["runs"]
    assert len(runs) == 8
    # also the oldest one, whatever the sweeps before it have
    assert {RUN, "b/c/digits", "b/c/letters"} < set(runs)
    with pytest.raises(ConnectionProblem):
        update(
            mirror,
            Scope(newest=3),
            lambda: _Said(answer.getvalue()),
            cluster="alps",
            warn=said.append,
        )
    assert said == ["only the newest trials of large sweeps are shown; 5 older ones are left out"]


@pytest.mark.parametrize(
    "bad",
    [
        Frame(frames.RECORD, {"run": RUN, "path": "run.json", "modified": 10**30}, b"{}"),
        Frame(frames.RECORD, {"run": "p/e/\ud800", "path": "run.json", "modified": 1}, b"{}"),
        Frame(frames.ALIVE, {"time": 10**400}),
    ],
)
def test_no_value_is_more_than_a_bad_stream(mirror: Mirror, bad: Frame) -> None:
    with pytest.raises(BadStream):
        mirror.apply(bad)


def test_a_follower_that_dies_says_so(mirror: Mirror) -> None:
    def connect() -> Any:
        raise RuntimeError("unexpected")

    with pytest.raises(ConnectionProblem, match="unexpected"):
        Follower(
            mirror, Scope(names=["last"]), connect, cluster="alps", say=lambda line: None
        ).begin()


FOLLOW = """
import sys, time
from pathlib import Path
from paceline.ssh.mirror.reader import Scope
from paceline.ssh.mirror.follower_lock import FollowerLock
lock = FollowerLock(Path(sys.argv[1]), Scope(["last"], follow=True), {"last": sys.argv[2]})
assert lock.take()
lock.tell(None)
print("here", flush=True)
time.sleep(600)
"""


def test_whoever_waits_for_a_command_that_is_stopped_follows_itself(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Ctrl-Z: it keeps its lock. As long as it lives, there is one stream for both."""
    monkeypatch.setattr(follower, "PATIENCE", 3.0)
    said = Frame(
        frames.FOUND,
        {"scratch": "/s", "names": {"last": RUN}, "runs": [], "left_out": 0, "time": 1},
    )
    passes: list[Any] = []

    def connect() -> _Silent:
        passes.append(None)
        return _Silent(stream_of([said, Frame(frames.PASS, {"time": 1})]))

    made = Follower(
        mirror, Scope(["last"], follow=True), connect, cluster="alps", say=lambda line: None
    )
    argv = [sys.executable, "-c", FOLLOW, str(mirror.base), RUN]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"here\n"
            made.begin()
            assert (len(passes), made._is_alone) == (1, False)
            os.kill(other.pid, signal.SIGSTOP)
            deadline = time.monotonic() + 40
            while len(passes) < 2 and time.monotonic() < deadline:
                time.sleep(0.05)
            assert len(passes) == 2
        finally:
            made.close()
            other.kill()


HOLD = """
import sys, time
from pathlib import Path
from paceline.ssh.mirror.mirror_folder import Mirror
with Mirror(Path(sys.argv[1])).lock():
    print("here", flush=True)
    time.sleep(600)
"""


def test_a_command_that_is_stopped_while_it_writes_is_named(
    there: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else may write then. Readers go on, and whoever has a stream says what it waits for."""
    monkeypatch.setattr(write_lock, "PATIENCE", 0.2)
    monkeypatch.setattr(follower, "PAUSES", (0.05, 0.1))
    send(changes(there), mirror)
    mirror.apply(Frame(frames.PASS, {"time": 1000.0}))
    news = [
        Frame(
            frames.FOUND,
            {"scratch": "/s", "names": {"last": RUN}, "runs": [], "left_out": 0, "time": 1},
        ),
        Frame(frames.GONE, {"run": RUN, "path": "run.json"}),
        Frame(frames.PASS, {"time": 2000.0}),
    ]
    said: list[str] = []
    made = Follower(
        mirror,
        Scope(newest=5, follow=True),
        lambda: _Silent(stream_of(news)),
        cluster="alps",
        say=said.append,
    )
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(mirror.base)], stdout=subprocess.PIPE
    ) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"here\n"
            os.kill(other.pid, signal.SIGSTOP)
            while psutil.Process(other.pid).status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)
            with pytest.raises(
                MirrorBusy, match=f"Process {other.pid} is stopped while it writes"
            ) as raised:
                update(mirror, Scope(["last"]), lambda: _Said(stream_of(news)), cluster="alps")
            assert f"kill -CONT {other.pid}" in raised.value.hint
            assert mirror.heard().there == 1
            assert read_record(RunFolder(mirror.folder / RUN)).job == "7"
            made.begin()
            while not said:
                time.sleep(0.01)
            assert f"Process {other.pid} is stopped" in made.status()
            assert f"kill -CONT {other.pid}" in said[0]
            assert "no connection" not in said[0]
        finally:
            other.kill()
        while made.status():
            time.sleep(0.01)
    made.close()
    assert said[-1] == "receiving updates from alps again"


def test_a_file_from_before_1970_is_mirrored_once(there: Path, mirror: Mirror) -> None:
    os.utime(there / "run.json", (-5, -5))
    send(changes(there), mirror)
    assert (mirror.folder / RUN / "run.json").read_text() == "{}"
    assert "run.json" not in [
        frame.values.get("path") for frame in changes(there, mirror).collect()
    ]


def test_runs_that_the_mirror_knows_come_without_their_logs(there: Path, mirror: Mirror) -> None:
    """A list needs no logs, and a run may be gone."""
    log, scratch = there / "attempt-1" / "rank-0.log", there.parents[2]
    log.write_text("a line\n")
    send(changes(there), mirror)
    mirror.refresh([RUN])
    before = mirror.refreshed(mirror.folder / RUN)
    with log.open("a") as file:
        file.write("another line\n")
    (there / "cancelled").write_text("1\n")
    (there / "metrics.jsonl").write_text('{"step": 1}\n')
    scope = Scope(known=[RUN, f"{RUN}-gone", "../outside"], logs=False)
    copies = {RUN: mirror.copies(RUN)}
    source = io.BytesIO(f"{scope.to_json()}\n{json.dumps(copies)}\n".encode())
    answer = io.BytesIO()
    served = reader.Reader(scratch, lambda name: scratch / name, source, answer)
    served._listen = lambda timeout: None  # type: ignore[method-assign]
    served._query_jobs = lambda runs: None  # type: ignore[method-assign]
    assert served.serve() == 0
    update(mirror, scope, lambda: _Said(answer.getvalue()), cluster="alps")
    here = mirror.folder / RUN
    assert (here / "cancelled").exists()
    assert (here / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert (here / "attempt-1" / "rank-0.log").read_text() == "a line\n"
    assert mirror.refreshed(here) == before < mirror.seen(here)
    send(changes(there, mirror), mirror)
    assert (here / "attempt-1" / "rank-0.log").read_text() == "a line\nanother line\n"
