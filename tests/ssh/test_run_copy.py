"""The copy of a cluster's runs: what comes, grows and goes, with a shell instead of ssh."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.errors import ConnectionProblem
from paceline.ssh.connection import Connection
from paceline.ssh.run_copy import LITTLE, Follower, News, RunCopy, RunList, parse_lines
from paceline.watch.log_file import skipped_bytes
from paceline.watch.origin import ClusterCopy, read_job_states, show, status
from tests.ssh.local_connection import HERE
from tests.until import until

RSYNC = shutil.which("rsync") or ""
pytestmark = pytest.mark.skipif(not RSYNC, reason="install rsync")
RUN = "project/default/20260101-120000-aaaa"
OTHER = "project/default/20260101-120000-bbbb"
VIEWED = {
    "run.json": "{}",
    "metrics.jsonl": '{"step": 1}\n',
    "attempt-1/rank-0.log": "one\n",
    "attempt-1/rank-0.times": "0\n",
    "job-starts/7-0/process": "x",
    "checkpoints/step-00000010/complete.json": "{}",
}


@pytest.fixture
def there(guard: None, tmp_path: Path) -> Path:
    scratch = tmp_path / "there"
    make_run(scratch / RUN)
    return scratch


def make_run(run: Path) -> None:
    others = {
        "environment.sh": "TOKEN=x",
        "paceline.zip": "zip",
        "work/weights.bin": "bytes",
        "checkpoints/step-00000010/model.safetensors": "bytes",
        "job-starts/7-0/inside.sh": "TOKEN=x",
    }
    for name, text in {**VIEWED, **others}.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)
    (run / "claims").mkdir()
    (run / "claims" / "1").symlink_to("7-0")
    (run / "attempt-1" / "rank-1.log").symlink_to("/etc/passwd")
    os.mkfifo(run / "attempt-1" / "rank-2.log")


def names(folder: Path) -> set[str]:
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {path.relative_to(folder).as_posix() for path in found}


@pytest.mark.parametrize("has_rsync", [True, False])
def test_only_what_views_need_comes(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_rsync: bool
) -> None:
    copy, listed = RunCopy(tmp_path / "here"), RunList(there)
    rsync = {} if has_rsync else {"rsync": ""}
    copy.apply(HERE, {**listed.read_news(), **rsync})
    assert names(copy.folder / RUN) == {*VIEWED, "claims/1"}
    assert os.readlink(copy.folder / RUN / "claims" / "1") == "7-0"
    assert copy.base.stat().st_mode & 0o077 == 0
    with (there / RUN / "attempt-1" / "rank-0.log").open("a") as file:
        file.write("two\n")
    (there / RUN / "config.json").write_text("{}")
    (there / RUN / "job-starts" / "7-0" / "process").unlink()
    copy.apply(HERE, {**listed.read_news(), **rsync})
    assert (copy.folder / RUN / "attempt-1" / "rank-0.log").read_text() == "one\ntwo\n"
    assert "config.json" in names(copy.folder / RUN)
    assert "job-starts/7-0/process" not in names(copy.folder / RUN)


def test_a_large_log_begins_with_a_hole_and_grows(there: Path, tmp_path: Path) -> None:
    log = there / RUN / "attempt-1" / "rank-0.log"
    log.write_bytes(b"x" * 1_000_000)
    copy, listed = RunCopy(tmp_path / "here"), RunList(there)
    copy.apply(HERE, listed.read_news())
    here = copy.folder / RUN / "attempt-1" / "rank-0.log"
    assert skipped_bytes(here) == 1_000_000 - LITTLE
    assert here.read_bytes()[:-LITTLE] == bytes(1_000_000 - LITTLE)
    assert here.read_bytes()[-LITTLE:] == b"x" * LITTLE
    with log.open("a") as file:
        file.write("end\n")
    # another process, which knows only what lies here
    RunCopy(copy.base).apply(HERE, listed.read_news())
    assert here.read_bytes()[-4:] == b"end\n"
    assert skipped_bytes(here) == 1_000_000 - LITTLE
    log.with_name("new").write_text("another file\n" * 100_000)
    log.with_name("new").rename(log)
    copy = RunCopy(copy.base)
    copy.apply(HERE, listed.read_news())
    assert here.read_bytes()[-LITTLE:] == log.read_bytes()[-LITTLE:]
    assert skipped_bytes(here) == log.stat().st_size - LITTLE


def test_runs_that_are_gone_go(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(there / OTHER)
    copy = RunCopy(tmp_path / "here")
    copy.apply(HERE, RunList(there).read_news())
    assert {RUN, OTHER} <= {
        str(path.relative_to(copy.folder)) for path in copy.folder.glob("*/*/*")
    }
    shutil.rmtree(there / OTHER)
    copy.apply(HERE, RunList(there).read_news())
    assert not (copy.folder / OTHER).exists()
    assert (copy.folder / RUN).exists()


def test_names_that_lead_elsewhere_do_not_come(there: Path, tmp_path: Path) -> None:
    (there / "secret").write_text("x")
    news = RunList(there).read_news()
    news["files"][RUN]["../../../secret"] = [1, 0, 0]
    news["files"]["../outside/a"] = news["files"][RUN]
    copy = RunCopy(tmp_path / "here")
    copy.apply(HERE, news)
    assert names(copy.folder) == {f"{RUN}/{name}" for name in (*VIEWED, "claims/1")}


def test_states_of_jobs_come_with_the_time_at_which_they_were_asked(tmp_path: Path) -> None:
    row = ["7", "RUNNING", "", "n1", 0.0, "1:00", ""]
    news = {"runs": [], "files": {}, "scratch": "/scratch", "rsync": RSYNC, "time": 1.0}
    copy = RunCopy(tmp_path)
    copy.apply(HERE, {**news, "jobs": {"7": row, "8": None}, "problem": "", "hint": ""})
    found = read_job_states(tmp_path, ["7", "8", "9"])
    assert (found["7"].label, found["7"].nodes) == ("running", "n1")
    assert found["7"].start == time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(0))
    assert "8" not in found
    assert found["9"].label == "unknown"
    assert ClusterCopy("alps", tmp_path, lambda verb, run: "").news()["there"] == 1.0


def test_a_follower_notes_a_lost_connection_and_goes_on(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.ssh.run_copy.PAUSE", 0.01)
    listed, is_open, is_odd, said = RunList(there), [True], [False], list[str]()

    @contextmanager
    def stream() -> Iterator[tuple[Connection, Iterator[News]]]:
        def lines() -> Iterator[bytes]:
            while is_open[0]:
                if is_odd[0]:
                    yield b"oops\n"
                yield f"{json.dumps(listed.read_news())}\n".encode()
                time.sleep(0.01)
            yield b'{"cut o'

        if not is_open[0]:
            raise ConnectionProblem("You are not logged in to alps.")
        yield HERE, parse_lines(lines())

    base = tmp_path / "here"
    Follower(base, stream, cluster="alps", say=said.append).begin()
    assert names(base / "runs" / RUN) == {*VIEWED, "claims/1"}
    with show(ClusterCopy("alps", base, lambda verb, run: "")):
        assert status() == ""
        is_open[0] = False
        until(lambda: "no connection to alps since" in status())
        (there / RUN / "config.json").write_text("{}")
        is_open[0] = True
        until(lambda: status() == "")
        until((base / "runs" / RUN / "config.json").exists)
        is_odd[0] = True
        until(lambda: "list of runs cannot be read: oops" in status())
        is_odd[0] = False
        until(lambda: status() == "")
    assert len(said) == 4
    assert said[1] == said[3] == "connected to alps again"
    # a second one waits for the first to end
    Follower(base, stream, cluster="alps", say=said.append).begin()
    is_open[0] = False


def test_what_prevents_the_start_is_raised(tmp_path: Path) -> None:
    @contextmanager
    def stream() -> Iterator[tuple[Connection, Iterator[News]]]:
        raise ConnectionProblem("You are not logged in to alps.")
        yield HERE, iter(())

    with pytest.raises(ConnectionProblem, match="not logged in"):
        Follower(tmp_path / "here", stream, cluster="alps", say=print).begin()
