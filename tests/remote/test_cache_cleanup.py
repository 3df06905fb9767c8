"""The cache on a login node: what nobody has used for a month goes, and nothing that is in use."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.contract.env import ON_CLUSTER
from paceline.contract.files.sent_code import SentCode, keep_sent
from paceline.ssh.remote import cache_cleanup
from paceline.ssh.remote.cache_cleanup import UNUSED, clean_cache, note_use
from paceline.ssh.remote.code_store import CodeStore, key_of
from paceline.ssh.remote.unpack import COMPLETE

LONG_AGO = time.time() - UNUSED - 86_400


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def install(cache: Path, name: str, moment: float) -> Path:
    folder = cache / name
    folder.mkdir(parents=True)
    (folder / COMPLETE).touch()
    os.utime(folder / COMPLETE, (moment, moment))
    return folder


def send(cache: Path, name: str, moment: float) -> Path:
    """Return a sent project with one file of its own, last used at some moment."""
    content = f"print({name!r})".encode()
    code = SentCode(name, {"train.py": ("file", len(content), hashlib.sha256(content).hexdigest())})
    store = CodeStore(cache)
    (key,) = {key_of(each) for each in code.files.values()}
    path = store._object(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (moment, moment))
    folder = store.build(code)
    os.utime(folder.parent, (moment, moment))
    return folder


def objects(cache: Path) -> int:
    return sum(1 for _ in (cache / "objects").glob("??/*"))


def test_what_is_unused_goes_and_the_rest_stays(cache: Path) -> None:
    now = time.time()
    own, new = install(cache, "1-own", LONG_AGO), install(cache, "1-new", now)
    old, running = install(cache, "1-old", LONG_AGO), install(cache, "1-running", LONG_AGO)
    project, fresh = send(cache, "unused", LONG_AGO), send(cache, "fresh", now)
    kept, open_one = send(cache, "kept", LONG_AGO), send(cache, "open", LONG_AGO)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ON_CLUSTER, "alps")
        keep_sent(kept)
    os.utime(kept.parent, (LONG_AGO, LONG_AGO))
    assert objects(cache) == 4
    sleeper = [
        sys.executable,
        "-c",
        "import sys; print(flush=True); sys.stdin.read()",
        str(running),
    ]
    with subprocess.Popen(
        sleeper, cwd=open_one, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin
        assert process.stdout
        process.stdout.readline()  # Linux shows the arguments only once the new program is loaded
        clean_cache(cache, own)
        process.stdin.close()
    assert [path.exists() for path in (own, new, running, fresh, kept, open_one)] == [True] * 6
    assert not old.exists()
    assert not project.exists()
    assert objects(cache) == 2  # the kept project has copies
    assert not list(cache.rglob(".partial-*"))


def test_submissions_are_remembered_for_a_week(cache: Path) -> None:
    folder = cache / cache_cleanup.SUBMISSIONS
    folder.mkdir(parents=True)
    for name, days in (("recent", 6), ("old", 8)):
        (folder / name).touch()
        then = time.time() - days * 86_400
        os.utime(folder / name, (then, then))
    clean_cache(cache, install(cache, "1-own", LONG_AGO))
    assert os.listdir(folder) == ["recent"]


def test_it_looks_once_a_day(cache: Path) -> None:
    own = install(cache, "1-own", LONG_AGO)
    clean_cache(cache, own)
    old = install(cache, "1-old", LONG_AGO)
    clean_cache(cache, own)
    assert old.exists()
    os.utime(cache / cache_cleanup.STAMP, (LONG_AGO, LONG_AGO))
    clean_cache(cache, own)
    assert not old.exists()


def test_use_is_noted(cache: Path) -> None:
    used = install(cache, "1-used", LONG_AGO)
    note_use(used)
    clean_cache(cache, install(cache, "1-own", LONG_AGO))
    assert used.exists()
    note_use(cache / "nothing")
    clean_cache(cache / "nothing", used)
