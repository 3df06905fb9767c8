"""The run half of this package as one zip: what a job needs besides torch, in the version that submitted it."""

from __future__ import annotations

import hashlib
import importlib.util
import marshal
import os
import secrets
import shutil
import sys
import zipfile
from pathlib import Path

import paceline

FILES = ("__init__.py", "errors.py", "wandb.py", "py.typed")
ROOMS = ("contract", "agent", "runtime")
# `python paceline.zip` starts a agent; with `trial` it opens or closes one of a sweep. Not `-m`: that would put the
# current folder, and whatever lies in it, ahead of the standard library. Readable by any Python, so that one that is
# too old can say so.
MAIN = b"""\
import sys

if sys.version_info < (3, 10):
    told = "paceline: %s is Python %d.%d, and a run needs 3.10 or newer: see [environment] in paceline.toml"
    sys.exit(told % ((sys.executable,) + tuple(sys.version_info[:2])))

if sys.argv[1:2] == ["trial"]:
    from paceline.agent.trial import main

    sys.exit(main(sys.argv[2:]))

from paceline.agent.main import main

sys.exit(main())
"""
SAME_DATE = (1980, 1, 1, 0, 0, 0)  # equal content gives an equal zip
UNCHECKED = (1).to_bytes(
    4, "little"
)  # a .pyc that is valid by its place: zips keep times to two seconds only


def write_run_half(destination: Path, *, store: Path, compiled: bool = False) -> None:
    """Put the zip at `destination`. Equal ones are made once per `store`, and shared by hard links."""
    kept = stored_run_half(store, compiled=compiled)
    try:
        os.link(kept, destination)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(kept, destination)


def stored_run_half(store: Path, *, compiled: bool = False) -> Path:
    """The zip in the store, made if it is not there.

    `compiled` adds byte code for this Python: nodes that run another one fall back to the source.
    """
    sources = _sources()
    digest = hashlib.sha256(sys.implementation.cache_tag.encode() if compiled else b"")
    for name, content in sources.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    kept = store / f"paceline-{digest.hexdigest()[:20]}.zip"
    if not kept.is_file():
        store.mkdir(parents=True, exist_ok=True)
        _write(kept, sources, compiled=compiled)
    return kept


def _sources() -> dict[str, bytes]:
    package = Path(paceline.__file__).parent
    paths = [package / name for name in FILES]
    for room in ROOMS:
        paths += sorted((package / room).rglob("*.py"))
    found = {
        path.relative_to(package.parent).as_posix(): path.read_bytes() for path in paths if path.is_file()
    }
    return {"__main__.py": MAIN, **found}


def _write(path: Path, sources: dict[str, bytes], *, compiled: bool) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        # Stored, not deflated: a node reads it once, and needs no zlib for it.
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
            for name, content in sources.items():
                archive.writestr(zipfile.ZipInfo(name, SAME_DATE), content)
                if compiled and name.endswith(".py"):
                    archive.writestr(zipfile.ZipInfo(f"{name}c", SAME_DATE), _byte_code(name, content))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _byte_code(name: str, source: bytes) -> bytes:
    code = compile(source, name, "exec", dont_inherit=True)
    header = importlib.util.MAGIC_NUMBER + UNCHECKED + importlib.util.source_hash(source)
    return header + marshal.dumps(code)
