"""Files of a run folder come home: resumed, verified, and consistent while the run changes them. Without a network."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import pytest
from paceline.ssh.fetch.contents import ALL, LOGS, RECORDS, WEIGHTS, choose_contents
from paceline.ssh.fetch.download import Download, Fetched
from paceline.ssh.fetch.local_copy import LocalCopy
from paceline.ssh.fetch.remote_files import RemoteFiles
from paceline.ssh.fetch.server import FileServer

from paceline.cli.commands import fetch as cli_fetch
from paceline.contract.checkpoint.marker import Marker, compute_checksum, find_checkpoints
from paceline.contract.checkpoint.names import CHECKPOINT_MARKER, checkpoint_name
from paceline.contract.run_folder import RunFolder
from paceline.errors import ConnectionProblem, EnvironmentProblem, UsageError
from paceline.ssh.conversation import Conversation
from paceline.ssh.fetch import download, server

MB = 1 << 20


class Cluster:
    name = "alps"


class Link:
    """Stands for the connection: pipes to a server in a thread. `limit` cuts it after that many bytes."""

    cluster = Cluster()

    def __init__(self, server: FileServer, limit: int | None = None) -> None:
        (ask, self.asked), (answer, self.answered) = os.pipe(), os.pipe()
        self.connection, self.errors = self, "cut"
        self.input: IO[bytes] = os.fdopen(self.asked, "wb")
        self._answers = os.fdopen(answer, "rb")
        self.output: Any = _Cut(self._answers, limit) if limit is not None else self._answers
        self._thread = threading.Thread(target=self._serve, args=(server, ask))
        self._thread.start()

    def _serve(self, server: FileServer, ask: int) -> None:
        try:
            with os.fdopen(ask, "rb") as source, os.fdopen(self.answered, "wb") as sink:
                server.serve(source, sink)
        except BrokenPipeError:
            pass

    def close(self) -> int:
        self.input.close()
        self._answers.close()
        self._thread.join()
        return 0


class _Cut:
    def __init__(self, source: IO[bytes], limit: int) -> None:
        self._source, self._left = source, limit

    def readline(self, size: int) -> bytes:
        return self._source.readline(size)

    def read(self, size: int) -> bytes:
        self._left -= size
        return self._source.read(size) if self._left >= 0 else b""


class Quiet:
    def begin(self, total: int) -> None: ...
    def advance(self, size: int, name: str) -> None: ...


class At(Quiet):
    """Does something when a file begins to arrive."""

    def __init__(self, name: str, act: Callable[[], object]) -> None:
        self._name, self._act = name, act

    def advance(self, size: int, name: str) -> None:
        if name.endswith(self._name):
            self._name = "\0"
            self._act()


@contextmanager
def connected(folder: Path, limit: int | None = None) -> Iterator[RemoteFiles]:
    link = Link(FileServer(RunFolder(folder), status=lambda: "running"), limit)
    try:
        yield RemoteFiles(cast(Conversation, link))
    finally:
        if not link.input.closed:
            link.close()


def fetch(
    source: Path,
    target: Path,
    what: str = RECORDS,
    *,
    limit: int | None = None,
    overwrite: bool = False,
    progress: Quiet | None = None,
) -> Fetched:
    with connected(source, limit) as remote:
        made = Download(
            remote, what=what, overwrite=overwrite, cluster="alps", progress=progress or Quiet()
        )
        return made.run(lambda _: target)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder on the other side."""
    folder = tmp_path / "there" / "project" / "default" / "20260101-000000-abcd"
    write(folder / "run.json", b'{"name": "x"}')
    write(folder / "metrics.jsonl", b'{"step": 1}\n')
    write(folder / "attempt-1/rank-0.log", os.urandom(2 * MB))
    write(folder / "attempt-1/verdict", b"done")
    write(folder / "environment.sh", b"export TOKEN=secret")
    write(folder / "paceline.zip", b"the part of Paceline that runs in jobs")
    write(folder / "collected/old-run/environment.sh", b"export TOKEN=secret")
    write(folder / "collected/plot.png", b"plot")
    write(folder / "collected/model.pt", bytes(11 * MB))
    (folder / "claims").mkdir()
    (folder / "claims" / "1").symlink_to("1234-0")
    store = tmp_path / "there" / "project" / ".snapshots" / "hash"
    write(store / "train.py", b"print()")
    write(store / "setup/environment.sh", b"module load cuda")  # a file of the project's
    (folder / "code").symlink_to(store)
    (folder / "data").symlink_to("/etc")
    checkpoint(folder, 1)
    checkpoint(folder, 2)
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "here"


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def checkpoint(run: Path, step: int) -> Path:
    folder = run / "checkpoints" / checkpoint_name(step)
    write(folder / "share-00001-of-00001.safetensors", os.urandom(3 * MB))
    write(folder / "objects.json", b"{}")
    files = {path.name: compute_checksum(path) for path in sorted(folder.iterdir())}
    marker = Marker(step=step, epoch=0, world_size=1, save="1-1", time=0.0, files=files)
    write(folder / CHECKPOINT_MARKER, marker.to_json().encode())
    return folder


def names(folder: Path) -> set[str]:
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    return found - {"fetched.json"}


SMALL = {
    "run.json",
    "metrics.jsonl",
    "attempt-1/rank-0.log",
    "attempt-1/verdict",
    "collected/plot.png",
    "claims/1",
}
SECRET = {"environment.sh", "collected/old-run/environment.sh"}
NEWEST = {
    f"checkpoints/step-00000002/{name}"
    for name in (CHECKPOINT_MARKER, "objects.json", "share-00001-of-00001.safetensors")
}


def test_a_run_that_holds_files_with_the_names_of_ours(run: Path, home: Path) -> None:
    """Such as one that was fetched on the other side, from a third cluster."""
    write(run / "fetched.json", b'{"of": "the script"}')
    write(run / ".fetch" / "journal.jsonl", b"{}")
    write(run / "collected" / "fetched.json", b"[1]")
    for what in (RECORDS, ALL):
        made = fetch(run, home / what, what)
        assert made.notes == [
            "fetched.json was left out: Paceline's own list of what it has fetched has this name"
        ]
        assert (home / what / "collected" / "fetched.json").read_bytes() == b"[1]"
        record = json.loads((home / what / "fetched.json").read_text())
        assert (
            record["cluster"],
            "fetched.json" in {each["name"] for each in record["files"]},
        ) == ("alps", False)
        assert not (home / what / ".fetch").exists()
        assert fetch(run, home / what, what).files == 0


def test_what_comes(run: Path, home: Path) -> None:
    fetch(run, home / "records")
    assert names(home / "records") == SMALL
    fetch(run, home / "logs", LOGS)
    assert names(home / "logs") == SMALL - {"metrics.jsonl", "collected/plot.png"}
    assert fetch(run, home / "weights", WEIGHTS).checkpoints == ["step-00000002"]
    assert names(home / "weights") == SMALL | NEWEST
    fetch(run, home / "all", ALL)
    all_files = {
        path.relative_to(run).as_posix()
        for path in run.rglob("*")
        if path.is_file() or path.is_symlink()
    }
    assert names(home / "all") == all_files - SECRET - {"data", "code"} | {
        "code/train.py",
        "code/setup/environment.sh",
    }
    for name in names(home / "all") - {"claims/1"}:
        assert (home / "all" / name).read_bytes() == (run / name).read_bytes(), name
        assert (home / "all" / name).stat().st_mtime_ns == (run / name).stat().st_mtime_ns
    assert os.readlink(home / "all" / "claims" / "1") == "1234-0"
    assert not (home / "all" / ".fetch").exists()
    shutil.rmtree(run / "checkpoints")
    fetch(run, home / "exported", WEIGHTS)
    assert names(home / "exported") == SMALL | {"collected/model.pt"}


def test_links(run: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those into the run itself work here, too; those to elsewhere are named, except what every run has."""
    project = run.parents[3] / "live"
    (run / "data").unlink()
    (run / "work/live").mkdir(parents=True)
    write(run / "launch.json", json.dumps({"work": {"project": str(project)}}).encode())
    (run / "work/live/data").symlink_to(project / "data")  # Paceline makes it, and `code`
    (run / "collected/last.json").symlink_to(run / "collected/plot.png")
    (run / "collected/best").symlink_to(os.path.realpath(run / "attempt-1"))
    (run / "itself").symlink_to(f"{run}/")
    (run / "checkpoints/latest").symlink_to(run / "checkpoints/step-00000002")
    assert not choose_contents(RunFolder(run), RECORDS).skipped
    made = fetch(run, home, ALL)
    assert os.readlink(home / "collected/last.json") == "plot.png"
    assert os.readlink(home / "collected/best") == "../attempt-1"
    assert os.readlink(home / "itself") == "."
    assert os.readlink(home / "checkpoints/latest") == "step-00000002"
    assert made.notes == []
    assert cli_fetch._describe(made, ALL, "alps") == 0
    assert "  links" not in capsys.readouterr().out
    (run / "results").symlink_to("/data/big")
    (run / "work/live/out").symlink_to("/data/out")
    (run / "near").symlink_to("../near")
    (run / "tricky").symlink_to(f"{run}/../near")
    (run / "checkpoints/old").symlink_to("/data/old")
    made = fetch(run, home, ALL)
    assert not any(os.path.lexists(home / name) for name in ("results", "near", "tricky"))
    made.missing["x"] = "Permission denied"
    assert cli_fetch._describe(made, ALL, "alps") == 1
    said = capsys.readouterr()
    line = f"checkpoints/old -> /data/old, near -> ../near, results -> /data/big, tricky -> {run}/../near"
    assert sorted(made.listing.contents.skipped) == [
        *line.split(", "),
        "work/live/out -> /data/out",
    ]
    assert said.out.count(" -> ") == 5
    assert "Everything else" not in said.err
    made.listing.contents.skipped = [f"{number} -> /data" for number in range(20)]
    cli_fetch._describe(made, ALL, "alps")
    assert "7 -> /data and 12 more: not fetched" in capsys.readouterr().out


def test_only_what_is_new_is_sent(run: Path, home: Path) -> None:
    first = fetch(run, home, WEIGHTS)
    assert first.files == 5 + 3
    assert fetch(run, home, WEIGHTS).size == 0
    with (run / "attempt-1/rank-0.log").open("ab") as log:
        log.write(b"more")
    assert fetch(run, home).size == len(b"more")
    (run / "run.json").write_bytes(b'{"name": "longer"}')
    assert fetch(run, home).files == 1
    for name in ("attempt-1/rank-0.log", "run.json"):
        assert (home / name).read_bytes() == (run / name).read_bytes()
    content = bytearray((run / "attempt-1/rank-0.log").read_bytes())
    content[0] ^= 1  # what was fetched earlier is no longer how the file begins
    (run / "attempt-1/rank-0.log").write_bytes(content + b"yet more")
    fetch(run, home)
    assert (home / "attempt-1/rank-0.log").read_bytes() == content + b"yet more"


def test_a_cut_link_is_resumed_and_no_part_has_the_name_of_a_file(run: Path, home: Path) -> None:
    total = fetch(run, home.with_name("whole"), WEIGHTS).size
    with pytest.raises(ConnectionProblem, match="lost: cut"):
        fetch(run, home, WEIGHTS, limit=total - MB)
    assert names(home) >= SMALL
    assert not (home / "checkpoints").exists()
    assert {name.split("/")[0] for name in names(home) - SMALL} == {".fetch"}
    again = fetch(run, home, WEIGHTS)
    assert again.checkpoints == ["step-00000002"]
    assert again.size < 2 * MB
    assert names(home) == SMALL | NEWEST
    assert find_checkpoints(home)


WEIGHTS_NAME = "collected/weights.json"
SHARE = "checkpoints/step-00000002/share-00001-of-00001.safetensors"


def saved_again(run: Path, home: Path) -> None:
    """Fetch a run whose weights and newest checkpoint are saved again afterwards, in the same sizes."""
    write(run / WEIGHTS_NAME, os.urandom(2 * MB))
    fetch(run, home, WEIGHTS)
    write(run / WEIGHTS_NAME, os.urandom(2 * MB))
    write(run / "metrics.jsonl", b'{"step": 2}\n')
    shutil.rmtree(run / "checkpoints/step-00000002")
    checkpoint(run, 2)


def is_as_there(run: Path, home: Path, name: str) -> bool:
    record = {
        each["name"]: each["sha256"]
        for each in json.loads((home / "fetched.json").read_text())["files"]
    }
    content = (home / name).read_bytes()
    return (
        content == (run / name).read_bytes() and record[name] == hashlib.sha256(content).hexdigest()
    )


POINTS = (
    "fsync",
    "fsync share",
    "replace weights.json",
    "replace metrics.jsonl",
    "rename step-00000002",
    "rename replaced-",
    "first replace weights.json",
    "first rename step-00000002",
)
# where `make test` also kills it just after the call
DONE = ("replace weights.json", "rename step-00000002")
KILLED = [
    pytest.param(point, is_done, marks=pytest.mark.slow if is_done and point not in DONE else ())
    for point in POINTS
    for is_done in (False, True)
]


@pytest.mark.parametrize(("point", "is_done"), KILLED)
def test_a_killed_command_leaves_nothing_old_that_counts_as_new(
    run: Path, home: Path, point: str, is_done: bool
) -> None:
    call, _, name = point.removeprefix("first ").partition(" ")
    if point.startswith("first"):
        write(run / WEIGHTS_NAME, os.urandom(2 * MB))
    else:
        saved_again(run, home)
    child = os.fork()
    if child == 0:  # dies in this call: before it has an effect, or after
        original = getattr(os, call)

        def die(*args: Any) -> None:
            where = os.readlink(f"/proc/self/fd/{args[0]}") if call == "fsync" else str(args[1])
            if name not in where.rpartition("/")[2]:
                original(*args)
                return
            if is_done:
                original(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        try:
            setattr(os, call, die)
            fetch(run, home, WEIGHTS)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    made = fetch(run, home, WEIGHTS)
    assert (made.checkpoints, made.notes, made.missing) == (["step-00000002"], [], {})
    assert all(is_as_there(run, home, each) for each in (WEIGHTS_NAME, SHARE, "metrics.jsonl"))
    assert not (home / ".fetch").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_leaves_nothing_old_that_counts_as_new(
    run: Path, home: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_again(run, home)

    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        for _ in range(2):
            with pytest.raises(EnvironmentProblem, match="The disk of"):
                fetch(run, home, WEIGHTS)
    assert fetch(run, home, WEIGHTS).checkpoints == ["step-00000002"]
    assert all(is_as_there(run, home, each) for each in (WEIGHTS_NAME, SHARE))


def test_a_part_that_does_not_fit_is_sent_again(run: Path, home: Path) -> None:
    total = fetch(run, home.with_name("whole"), WEIGHTS).size
    with pytest.raises(ConnectionProblem):
        fetch(run, home, WEIGHTS, limit=total - MB)
    (part,) = (home / ".fetch").rglob("share-*")
    content = bytearray(part.read_bytes())
    content[100] ^= 1
    part.write_bytes(content)
    assert fetch(run, home, WEIGHTS).checkpoints == ["step-00000002"]
    assert (home / "checkpoints").is_dir()
    for name in NEWEST:
        assert (home / name).read_bytes() == (run / name).read_bytes()


def test_a_checkpoint_that_the_run_removes_meanwhile(run: Path, home: Path) -> None:
    """It comes whole, since its files are open on the other side; one that has gone is replaced by the newest."""
    remove = At("rank-0.log", lambda: shutil.rmtree(run / "checkpoints" / "step-00000002"))
    assert fetch(run, home, WEIGHTS, progress=remove).checkpoints == ["step-00000002"]
    assert names(home) == SMALL | NEWEST


def test_a_checkpoint_that_is_gone_is_replaced(
    run: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as where open files do not outlive their removal
    monkeypatch.setattr(FileServer, "_hold", lambda *_: None)

    def rotate() -> None:
        shutil.rmtree(run / "checkpoints" / "step-00000002")
        checkpoint(run, 3)

    made = fetch(run, home, WEIGHTS, progress=At("rank-0.log", rotate))
    assert made.checkpoints == ["step-00000003"]
    assert "step-00000002 was removed" in " ".join(made.notes)
    assert os.listdir(home / "checkpoints") == ["step-00000003"]


def test_a_damaged_checkpoint_is_left_out_by_name(run: Path, home: Path) -> None:
    share = run / "checkpoints" / "step-00000002" / "share-00001-of-00001.safetensors"
    content = bytearray(share.read_bytes())
    content[5] ^= 1
    share.write_bytes(content)
    made = fetch(run, home, WEIGHTS)
    assert made.checkpoints == ["step-00000001"]
    assert "step-00000002 is damaged on alps" in " ".join(made.notes)
    assert os.listdir(home / "checkpoints") == ["step-00000001"]


def test_what_was_changed_here_is_not_overwritten(run: Path, home: Path) -> None:
    fetch(run, home)
    (home / "metrics.jsonl").write_bytes(b"mine")
    (home / "notes.txt").write_bytes(b"mine, too")
    made = fetch(run, home)  # nothing new there, so nothing to overwrite
    assert made.notes == [
        "metrics.jsonl was changed here since it was fetched; --overwrite restores it"
    ]
    assert (home / "metrics.jsonl").read_bytes() == b"mine"
    (run / "metrics.jsonl").write_bytes(b'{"step": 2}\n')
    with pytest.raises(UsageError, match=r"Changed in .* since they were fetched: metrics.jsonl"):
        fetch(run, home)
    assert (home / "metrics.jsonl").read_bytes() == b"mine"
    fetch(run, home, overwrite=True)
    assert (home / "metrics.jsonl").read_bytes() == b'{"step": 2}\n'
    assert (home / "notes.txt").read_bytes() == b"mine, too"
    shutil.rmtree(home)
    home.mkdir()
    (home / "run.json").write_bytes(b"a run of this machine")
    with pytest.raises(UsageError, match="was not created by `paceline fetch`"):
        fetch(run, home)


def test_what_was_changed_here_alone_is_restored_if_you_ask_for_it(run: Path, home: Path) -> None:
    fetch(run, home, WEIGHTS)
    changed = ["metrics.jsonl", "attempt-1/rank-0.log", "claims/1", *sorted(NEWEST)]
    for name in changed:
        (home / name).unlink()
        (home / name).write_bytes(b"mine")
    (home / "claims/1").unlink()
    made = fetch(run, home, WEIGHTS, overwrite=True)
    assert (made.checkpoints, made.notes) == (["step-00000002"], [])
    for name in changed:
        assert (
            (home / name).read_bytes() == (run / name).read_bytes() if name != "claims/1" else True
        )
    assert os.readlink(home / "claims" / "1") == "1234-0"
    again = fetch(run, home, WEIGHTS)
    assert (again.files, again.notes) == (0, [])


def test_a_file_that_is_rewritten_while_it_is_sent_is_sent_again(run: Path, home: Path) -> None:
    log = run / "attempt-1/rank-0.log"
    final = os.urandom(MB)

    def rewrite() -> None:
        log.write_bytes(final)

    fetch(run, home, progress=At("rank-0.log", rewrite))
    assert (home / "attempt-1/rank-0.log").read_bytes() in (final, log.read_bytes())


def test_a_file_that_is_rewritten_and_longer_is_not_taken_for_one_that_has_grown(
    run: Path, home: Path
) -> None:
    """The rest of it was still to be read: the first part is old, and the others are new."""
    names = ("collected/result.csv", "attempt-1/rank-0.log")
    for name in names:
        old, new = os.urandom(5 * MB), os.urandom(6 * MB)
        write(run / name, old)
        fetch(
            run,
            home / name,
            progress=At(name, lambda path=run / name, new=new: path.write_bytes(new)),
        )
        assert (home / name / name).read_bytes() == new


def test_a_log_that_grows_while_it_is_sent_comes_as_it_was(run: Path, home: Path) -> None:
    log = run / "attempt-1/rank-0.log"
    old = os.urandom(5 * MB)
    log.write_bytes(old)

    def grow() -> None:
        with log.open("ab") as file:
            file.write(b"more\n")

    made = fetch(run, home, progress=At("rank-0.log", grow))
    assert made.missing == {}
    assert (home / "attempt-1/rank-0.log").read_bytes() == old
    assert fetch(run, home).size == len(b"more\n")


def test_a_file_that_never_rests_is_named_and_everything_else_comes(
    run: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # it does not fit into a pipe, packed or not
    write(run / "collected/result.csv", os.urandom(5 * MB))
    monkeypatch.setattr(download, "PAUSE", 0.0)

    class Always(Quiet):
        def advance(self, size: int, name: str) -> None:
            if name == "collected/result.csv":
                with (run / name).open("ab") as file:
                    file.write(b"x")

    made = fetch(run, home, progress=Always())
    assert made.missing == {"collected/result.csv": "it changed during every attempt to send it"}
    assert names(home) == SMALL


def test_what_cannot_be_read_there_is_named(
    run: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = [run / "work/project/secret", run / "checkpoints/step-00000003"]
    single = run / "work/project/single.json"
    for path in (*(each / "file" for each in hidden), single):
        write(path, b"{}")
    scan, open_regular = os.scandir, server.open_regular

    def look(path: Any) -> Any:
        if str(path) in map(str, hidden):  # it may be the number of an open folder
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    def open_file(path: Path, **options: bool) -> Any:
        if path == single:
            raise PermissionError(13, "Permission denied", str(path))
        return open_regular(path, **options)

    monkeypatch.setattr(os, "scandir", look)  # also root may read everything
    monkeypatch.setattr(server, "open_regular", open_file)
    made, everything = fetch(run, home / "records"), fetch(run, home / "all", ALL)
    missing = {
        "work/project/secret": "Permission denied",
        "work/project/single.json": "Permission denied",
    }
    assert made.missing == missing
    assert names(home / "records") == SMALL
    assert everything.missing == {**missing, "checkpoints/step-00000003": "Permission denied"}
    assert "code/train.py" in names(home / "all")


def test_one_command_at_a_time(run: Path, home: Path) -> None:
    with LocalCopy(home).opened(), pytest.raises(UsageError, match="Another command"):
        fetch(run, home)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a/../../x", "", "a//b", ".fetch/x", "a\0b", "fetched.json"]
)
def test_names_lead_nowhere_else(home: Path, name: str) -> None:
    with pytest.raises(EnvironmentProblem, match="not a valid name for a file"):
        LocalCopy(home).path(name)


def test_strange_names_arrive(run: Path, home: Path) -> None:
    strange = ["a b", "$(x)", "new\nline", "é", "\x1b[31m", "-rf", "*"]
    for name in strange:
        write(run / "collected" / name, name.encode())
    fetch(run, home)
    assert {path.name for path in (home / "collected").iterdir()} == {*strange, "plot.png"}
    assert json.loads((home / "fetched.json").read_text())["cluster"] == "alps"


def test_a_copy_of_the_code_is_no_result(run: Path) -> None:
    write(run / "work/project/train.py", b"print()")
    write(run / "work/project/result.json", b"{}")
    found = {file.name for file in choose_contents(RunFolder(run), RECORDS).files}
    assert {name for name in found if name.startswith("work")} == {"work/project/result.json"}


def test_a_result_of_the_size_of_its_original_is_no_copy_of_the_code(run: Path) -> None:
    write(run / "code/best.json", b'{"accuracy": 0.10}')
    os.utime(run / "code/best.json", (1, 1))
    write(run / "work/project/best.json", b'{"accuracy": 0.97}')
    found = {file.name for file in choose_contents(RunFolder(run), RECORDS).files}
    assert "work/project/best.json" in found
    write(run / "work/project/best.json", b'{"accuracy": 0.10}')
    found = {file.name for file in choose_contents(RunFolder(run), RECORDS).files}
    assert "work/project/best.json" not in found
