"""Nothing that a cluster sends is written outside the folder, and a file may become a folder or a link. No network."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

import pytest
from paceline.ssh.fetch.contents import RECORDS, Contents, RemoteFile
from paceline.ssh.fetch.download import Download, Fetched
from paceline.ssh.fetch.frames import write_frame, write_line
from paceline.ssh.fetch.local_copy import LocalCopy
from paceline.ssh.fetch.remote_files import Listing, RemoteFiles
from paceline.ssh.fetch.safe_path import is_contained
from paceline.ssh.fetch.server import FileServer

from paceline.cli import dispatch
from paceline.cli.commands import fetch as cli_fetch
from paceline.contract.run_folder import RunFolder
from paceline.errors import EnvironmentProblem, UsageError
from paceline.ssh.conversation import Conversation
from tests.remote.test_fetch_transfer import Link, Quiet, fetch, write

FILE = {"name": "evil/keys", "size": 5, "mtime_ns": 5, "executable": False, "link": None}


class Hostile(FileServer):
    """Adds files to the list that lie nowhere, and changes what it says of them."""

    def __init__(
        self, run: Path, files: list[dict[str, Any]], *, listing: Any = None, arrival: Any = None
    ) -> None:
        super().__init__(RunFolder(run), status=lambda: "running")
        self._files, self._listing, self._arrival = files, listing or {}, arrival or {}

    def _list(self, what: str, skip: list[str]) -> dict[str, Any]:
        answer = super()._list(what, skip)
        return {**answer, "files": [*self._files, *answer["files"]], **self._listing}

    def _send(self, name: str, offset: int, sink: IO[bytes]) -> None:
        if name != FILE["name"]:
            super()._send(name, offset, sink)
            return
        write_line(sink, {"name": name, "size": 5, "mtime_ns": 5, "offset": 0, **self._arrival})
        write_frame(sink, b"evil\n", compress=False)
        write_frame(sink, b"", compress=False)
        write_line(
            sink, {"sha256": hashlib.sha256(b"evil\n").hexdigest(), "size": 5, "changed": False}
        )


def fetch_from(server: FileServer, home: Path, *, overwrite: bool = False) -> Fetched:
    link = Link(server)
    remote = RemoteFiles(cast(Conversation, link))
    try:
        made = Download(remote, what=RECORDS, overwrite=overwrite, cluster="alps", progress=Quiet())
        return made.run(lambda _: home)
    finally:
        link.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "there" / "project" / "default" / "20260101-000000-abcd"
    write(folder / "run.json", b"{}")
    write(folder / "collected" / "plot.png", b"plot")
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "here"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    write(tmp_path / "victim" / "keys", b"mine")
    return tmp_path / "victim"


def is_untouched(victim: Path) -> bool:
    return os.listdir(victim) == ["keys"] and (victim / "keys").read_bytes() == b"mine"


@pytest.mark.parametrize("target", ["{victim}", "../victim", "collected"])
def test_no_file_is_written_through_a_link_of_the_list(
    run: Path, home: Path, victim: Path, target: str
) -> None:
    link = {**FILE, "name": "evil", "size": 0, "link": target.format(victim=victim)}
    made = fetch_from(Hostile(run, [link, FILE]), home)
    assert any(note.startswith("evil was left out") for note in made.notes)
    assert is_untouched(victim)
    assert not (home / "evil").is_symlink()
    assert (home / "evil" / "keys").read_bytes() == b"evil\n"
    assert not (home / "collected" / "keys").exists()


def test_no_file_is_written_through_a_link_that_is_here(
    run: Path, home: Path, victim: Path
) -> None:
    fetch(run, home)
    (home / "evil").symlink_to(victim)
    with pytest.raises(UsageError, match=r"Changed in .*: evil"):
        fetch_from(Hostile(run, [FILE]), home)
    assert is_untouched(victim)
    fetch_from(Hostile(run, [FILE]), home, overwrite=True)
    assert is_untouched(victim)
    assert (home / "evil" / "keys").read_bytes() == b"evil\n"


def test_no_file_is_written_through_a_link_among_the_parts(home: Path, victim: Path) -> None:
    with LocalCopy(home).opened() as local:
        (home / ".fetch" / "files").mkdir()
        (home / ".fetch" / "files" / "evil").symlink_to(victim)
        (home / ".fetch" / "files" / "other").symlink_to(victim / "keys")
        for name in ("evil/keys", "other"):
            assert local.offset(RemoteFile(name, 5, 5)) == 0
            file, _ = local.open_part(name, 0)
            with file:
                file.write(b"evil")
    assert is_untouched(victim)


def test_a_link_that_only_seems_to_stay_inside(run: Path, home: Path, victim: Path) -> None:
    (run / "collected/x/y").mkdir(parents=True)
    (run / "collected/x/y/z").symlink_to("../..")
    (run / "collected/e").symlink_to("x/y/z/../../victim")
    made = fetch(run, home)
    assert any(note.startswith("collected/e was left out") for note in made.notes)
    assert os.readlink(home / "collected/x/y/z") == "../.."
    assert not os.path.lexists(home / "collected/e")
    (run / "collected/e").unlink()
    write(run / "collected/e/keys", b"evil")
    fetch(run, home)
    assert is_untouched(victim)
    assert (home / "collected/e/keys").read_bytes() == b"evil"


@pytest.mark.parametrize(
    ("name", "target", "is_inside"),
    [
        ("a", "b/c", True),
        ("a/b", "../c", True),
        ("a/b/c", "../../d/e", True),
        ("a", ".", True),
        ("a", "..", False),
        ("a/b", "../../c", False),
        ("a", "/etc", False),
        ("a", "b/../c", False),
        ("a", "", False),
        ("a", "./..", False),
        ("a", "b\0", False),
    ],
)
def test_targets_of_links(name: str, target: str, is_inside: bool) -> None:
    assert is_contained(name, target) is is_inside


def _as_link(path: Path) -> None:
    path.symlink_to("plot.png")


def _as_file(path: Path) -> None:
    write(path, b"a file")


def _as_folder(path: Path) -> None:
    write(path / "sub" / "model.json", b"in a folder")


KINDS = {"link": _as_link, "file": _as_file, "folder": _as_folder}


@pytest.mark.parametrize("before", KINDS)
@pytest.mark.parametrize("after", KINDS)
def test_a_file_becomes_something_else_and_back(
    run: Path, home: Path, before: str, after: str
) -> None:
    for make in (KINDS[before], KINDS[after], KINDS[before]):
        _replace(run / "collected/x", make)
        fetch(run, home)
        here, there = home / "collected/x", run / "collected/x"
        assert (here.is_symlink(), here.is_dir()) == (there.is_symlink(), there.is_dir())
        content = "sub/model.json" if there.is_dir() else ""
        assert (here / content).read_bytes() == (there / content).read_bytes()
        assert (home / "collected/plot.png").read_bytes() == b"plot"
        assert fetch(run, home).files == 0


def _replace(path: Path, make: Callable[[Path], None]) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    make(path)


def test_a_link_to_a_folder_becomes_a_folder(run: Path, home: Path) -> None:
    write(run / "collected/best/model.json", b"best")
    (run / "collected/latest").symlink_to("best")
    fetch(run, home)
    _replace(run / "collected/latest", lambda path: write(path / "model.json", b"latest"))
    fetch(run, home)
    assert (home / "collected/best/model.json").read_bytes() == b"best"
    assert (home / "collected/latest/model.json").read_bytes() == b"latest"


def test_changes_in_a_folder_that_becomes_a_file_are_kept(run: Path, home: Path) -> None:
    write(run / "collected/x/a", b"a")
    fetch(run, home)
    write(home / "collected/x/notes", b"mine")
    _replace(run / "collected/x", _as_file)
    with pytest.raises(UsageError, match=r"Changed in .*: collected/x/notes"):
        fetch(run, home)
    assert (home / "collected/x/notes").read_bytes() == b"mine"
    fetch(run, home, overwrite=True)
    assert (home / "collected/x").read_bytes() == b"a file"


@pytest.mark.parametrize(
    "arrival",
    [
        {"name": "run.json"},
        {"name": "../x"},
        {"name": 5},
        {"offset": 3},
        {"offset": -1},
        {"offset": 10**12},
        {"size": 3},
        {"size": 10**18},
        {"size": "5"},
        {"mtime_ns": 1 << 70},
    ],
)
def test_wrong_arrivals(run: Path, home: Path, arrival: dict[str, Any]) -> None:
    with pytest.raises(EnvironmentProblem, match="alps sent"):
        fetch_from(Hostile(run, [FILE], arrival=arrival), home)
    assert not (home / "evil").exists()


@pytest.mark.parametrize(
    "listing",
    [
        {"key": "../../x"},
        {"key": ".."},
        {"key": "a/b"},
        {"key": 5},
        {"run_path": []},
        {"run_path": ["a", ".."]},
        {"left": 5},
        {"files": [{}]},
        {"files": 5},
        {"files": [{**FILE, "size": -1}]},
        {"checkpoints": ["../x"]},
        {"status": None},
        {"checkpoints": [".git"]},
        {"key": ".git"},
        {"key": "bin"},
        {"key": "20260101-000000-ffff"},
        {"run_path": ["project", ".snapshots"]},
        {"run_path": ["project", ".snapshots", "20260101-000000-abcd"]},
        {"run_path": ["bin"], "key": "bin"},
        {"run_path": ["a", "b", "bin"], "key": "bin"},
        {"run_path": ["a", "b", ".git"], "key": ".git"},
        {"run_path": ["a", "b", ".git", "trials", "3"], "key": ".git-3"},
        {"run_path": ["a", "b", "c", "trials", "x"], "key": "c-x"},
        {"run_path": ["a", "b", "c", "code", "3"], "key": "c-3"},
    ],
)
def test_wrong_listings(run: Path, home: Path, listing: dict[str, Any]) -> None:
    with pytest.raises(EnvironmentProblem, match=r"alps (sent a list|listed a folder)"):
        fetch_from(Hostile(run, [], listing=listing), home)
    assert not home.exists()


@pytest.mark.parametrize(
    ("run_path", "key"),
    [
        ("a/b/20260101-000000-abcd", "20260101-000000-abcd"),
        (".a/b/lr sweep/trials/12", "lr sweep-12"),
    ],
)
def test_names_of_runs(run: Path, home: Path, run_path: str, key: str) -> None:
    made = fetch_from(Hostile(run, [], listing={"run_path": run_path.split("/"), "key": key}), home)
    assert (made.listing.key, "/".join(made.listing.run_path)) == (key, run_path)


@pytest.mark.parametrize(
    "name", [".git/config", ".git/hooks/post-checkout", "collected/.GIT/config", "work/p/.git"]
)
def test_a_repository_is_left_out(run: Path, home: Path, name: str) -> None:
    """Git runs commands that the configuration of a repository names, also for `git status`."""
    write(run / name, b"[core]\nfsmonitor = touch /tmp/x")
    write(run / "collected" / ".gitignore", b"*")
    made = fetch(run, home)
    folder = name[: name.lower().index(".git") + len(".git")]
    assert made.notes == [f"{folder} was left out: git runs commands that such a folder names"]
    assert not (home / folder).exists()
    assert (home / "collected" / ".gitignore").exists()


def test_a_trial_is_not_fetched_into_a_sweep_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "paceline.toml", b"")
    listing = Listing(
        "/far", "sweep-3", ("project", "default", "sweep", "trials", "3"), "done", Contents()
    )
    folder = tmp_path.joinpath("runs", *listing.run_path)
    assert cli_fetch._target(listing, None) == folder
    write(tmp_path / "runs/project/default/sweep/sweep.json", b"{}")
    with pytest.raises(UsageError, match="is a sweep on this machine"):
        cli_fetch._target(listing, None)
    assert cli_fetch._target(listing, tmp_path / "to") == tmp_path / "to" / "sweep-3"


def test_what_was_fetched_is_not_executed_here(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records of a run name the script, the interpreter and the variables: those are the cluster's to choose."""
    home = tmp_path / "runs" / "project" / "default" / run.name
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "paceline.toml", b"")
    write(tmp_path / "train.py", b"")
    with LocalCopy(home).opened():  # killed on the way
        write(home / "run.json", b"{}")
    commands = [
        ["run", "--resume", "last"],
        ["run", "--resume", "last", "--here"],
        ["submit", "--resume", run.name],
        ["cancel", run.name],
        ["run", "--resume", str(home), "train.py"],
    ]
    for command in commands:
        with pytest.raises(UsageError, match="was fetched from a cluster") as raised:
            dispatch(command)
        assert "--on CLUSTER" in raised.value.hint
    (home / "run.json").unlink()
    fetch(run, home)
    for command in commands:
        with pytest.raises(UsageError, match="was fetched from a cluster") as raised:
            dispatch(command)
        assert "--on alps" in raised.value.hint
    write(run / "sweep.json", b"{}")
    fetch(run, home)
    for command in (["sweep", "--resubmit", "missing", str(home)], ["sweep", "cancel", str(home)]):
        with pytest.raises(UsageError, match="was fetched from a cluster"):
            dispatch(command)


def test_what_was_fetched_is_for_its_owner_alone(run: Path, home: Path) -> None:
    (run / "collected/plot.png").chmod(0o755)
    before = os.umask(0o022)
    try:
        fetch(run, home)
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    modes = {
        path.name: path.stat().st_mode & 0o777
        for path in (home, *home.rglob("*"))
        if not path.is_symlink()
    }
    folders = {path.name for path in (home, *home.rglob("*")) if path.is_dir()}
    assert modes == {name: 0o700 if name in {*folders, "plot.png"} else 0o600 for name in modes}
