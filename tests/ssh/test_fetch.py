"""What `paceline fetch` brings, keeps and refuses: real files, with a shell instead of ssh."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.checkpoint import FileChecksum, Marker
from paceline.contract.run_folder import RunFolder
from paceline.errors import UsageError
from paceline.ssh.connection import Connection
from paceline.ssh.fetch import ALL, RECORDS, WEIGHTS, Fetched, choose_contents, fetch
from tests.ssh.local_connection import HERE

RSYNC = shutil.which("rsync") or ""
pytestmark = pytest.mark.skipif(not RSYNC, reason="install rsync")
RUN = "project/default/20260101-120000-aaaa"


@pytest.fixture
def there(guard: None, tmp_path: Path) -> Path:
    """A run on the cluster."""
    run = tmp_path / "there" / RUN
    snapshot = tmp_path / "there" / "snapshot"
    for name, text in {
        "run.json": "{}",
        "environment.sh": "TOKEN=x",
        "metrics.jsonl": "{}\n",
        "attempt-1/rank-0.log": "one\n",
        "job-starts/7-0/verdict": "done",
        "work/project/result.csv": "1",
        "work/project/train.py": "code",
        "work/project/.git/config": "[core]",
    }.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)
    snapshot.mkdir()
    (snapshot / "train.py").write_text("code")
    (snapshot / "environment.sh").write_text("module load cuda")
    (run / "code").symlink_to(snapshot)
    (run / "claims").mkdir()
    (run / "claims" / "1").symlink_to("7-0")
    (run / "work" / "project" / "outside").symlink_to("/etc")
    (run / "collected").mkdir()
    (run / "collected" / "huge.bin").write_bytes(bytes(11 << 20))
    for step in (10, 20):
        save(run, step)
    return run


def save(run: Path, step: int) -> None:
    folder, content = run / "checkpoints" / f"step-{step:08}", os.urandom(5000)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(content)
    files = {"model.safetensors": FileChecksum(len(content), zlib.crc32(content))}
    marker = Marker(step, 0, 1, "1", 0.0, objects={"model": "module"}, files=files)
    (folder / "complete.json").write_text(marker.to_json())


def bring(
    there: Path, here: Path, what: str = RECORDS, *, overwrite: bool = False, rsync: str = RSYNC
) -> Fetched:
    def ask(skip: Sequence[str]) -> tuple[Connection, Mapping[str, Any]]:
        contents = asdict(choose_contents(RunFolder(there), what, skip=skip))
        about = {"folder": str(there), "status": "done", "rsync": rsync}
        return HERE, json.loads(json.dumps({**about, **contents}))

    return fetch(ask, lambda listing: here, overwrite=overwrite, progress=False)


def names(folder: Path) -> set[str]:
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {path.relative_to(folder).as_posix() for path in found}


RECORDED = {
    "fetched.json",
    "run.json",
    "metrics.jsonl",
    "attempt-1/rank-0.log",
    "job-starts/7-0/verdict",
    "claims/1",
    "work/project/result.csv",
}


@pytest.mark.parametrize("rsync", [RSYNC, ""])
def test_records_come_without_secrets_code_and_what_is_large(
    there: Path, tmp_path: Path, rsync: str
) -> None:
    here = tmp_path / "here"
    made = bring(there, here, rsync=rsync)
    assert names(here) == RECORDED
    assert os.readlink(here / "claims" / "1") == "7-0"
    assert made.listing["skipped"] == ["work/project/outside -> /etc"]
    assert {row[0].partition("/")[0] for row in made.listing["left"]} == {
        "checkpoints",
        "collected",
        "work",
    }
    assert here.stat().st_mode & 0o077 == 0
    assert (made.files, made.missing, made.notes) == (6, {}, [])
    assert bring(there, here, rsync=rsync).files == 0


def test_the_newest_weights_or_all(there: Path, tmp_path: Path) -> None:
    weights = bring(there, tmp_path / "weights", WEIGHTS)
    assert weights.checkpoints == ["step-00000020"]
    found = {name for name in names(weights.folder) if name.startswith("checkpoints/")}
    assert found == {
        "checkpoints/step-00000020/complete.json",
        "checkpoints/step-00000020/model.safetensors",
    }
    everything = bring(there, tmp_path / "all", ALL)
    assert len(everything.checkpoints) == 2
    assert {"code/train.py", "code/environment.sh", "collected/huge.bin"} <= names(
        everything.folder
    )
    assert "environment.sh" not in names(everything.folder)
    assert not [name for name in names(everything.folder) if ".git" in name]


def test_a_damaged_checkpoint_is_left_out(there: Path, tmp_path: Path) -> None:
    (there / "checkpoints" / "step-00000020" / "model.safetensors").write_bytes(bytes(5000))
    made = bring(there, tmp_path / "here", WEIGHTS)
    assert made.checkpoints == ["step-00000010"]
    assert "step-00000020 was left out: model.safetensors has checksum" in made.notes[0]
    assert os.listdir(made.folder / "checkpoints") == ["step-00000010"]


def test_a_checkpoint_goes_on_where_it_was_interrupted(there: Path, tmp_path: Path) -> None:
    here, name = tmp_path / "here", "checkpoints/step-00000020/model.safetensors"
    (here / ".fetch" / name).parent.mkdir(parents=True)
    shutil.copy2(there / name, here / ".fetch" / name)
    before = (here / ".fetch" / name).stat().st_ino
    bring(there, here, WEIGHTS)
    assert (here / name).stat().st_ino == before
    assert not (here / ".fetch").exists()


def test_what_has_grown_comes_and_what_was_changed_here_stays(there: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    bring(there, here)
    with (there / "attempt-1" / "rank-0.log").open("a") as file:
        file.write("two\n")
    assert bring(there, here).files == 1
    assert (here / "attempt-1" / "rank-0.log").read_text() == "one\ntwo\n"
    (here / "work" / "project" / "result.csv").write_text("mine")
    made = bring(there, here)
    assert made.notes == [
        "work/project/result.csv was changed here since it was fetched; --overwrite restores it"
    ]
    (there / "work" / "project" / "result.csv").write_text("other")
    with (there / "attempt-1" / "rank-0.log").open("a") as file:
        file.write("three\n")
    assert (bring(there, here).files, bring(there, here).notes) == (1, made.notes)
    assert (here / "work" / "project" / "result.csv").read_text() == "mine"
    bring(there, here, overwrite=True)
    assert (here / "work" / "project" / "result.csv").read_text() == "other"


def test_an_older_log_does_not_make_records_look_changed(there: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    for name in ("attempt-1/rank-0.log", "job-starts/7-0/verdict", "run.json"):
        os.utime(there / name, (1e9, 1e9))
    bring(there, here)
    bring(there, here)
    with (there / "metrics.jsonl").open("a") as file:
        file.write("{}\n")
    made = bring(there, here)
    assert (made.files, made.notes) == (1, [])


def test_a_folder_of_the_users_own_is_left_alone(there: Path, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "notes").write_text("mine")
    with pytest.raises(UsageError, match="was not created by `paceline fetch`"):
        bring(there, tmp_path / "here")
    assert names(tmp_path / "here") == {"notes"}


def test_names_that_lead_elsewhere_do_not_come(there: Path, tmp_path: Path) -> None:
    listing = {
        "folder": str(there),
        "status": "done",
        "rsync": RSYNC,
        **asdict(choose_contents(RunFolder(there), RECORDS)),
    }
    (there.parent / "sibling").write_text("x")
    listing["files"] += [["../sibling", 1, 0, ""], ["fetched.json", 1, 0, ""]]
    made = fetch(
        lambda skip: (HERE, listing),
        lambda found: tmp_path / "a" / "b",
        overwrite=False,
        progress=False,
    )
    assert names(tmp_path / "a") == {f"b/{name}" for name in RECORDED}
    assert not made.missing
