"""The run half of this package as one zip: all that a job needs besides torch, in the version that
submitted it.
"""

from __future__ import annotations

import hashlib
import io
import marshal
import os
import shutil
import sys
import zipfile
from importlib.util import MAGIC_NUMBER, source_hash
from pathlib import Path

import paceline
from paceline.contract.files import replace_file

FILES = ("__init__.py", "errors.py", "wandb.py", "py.typed")
PACKAGES = ("contract", "staging", "agent", "runtime")
# `python paceline.zip` starts an agent; with `trial` it begins or ends a trial of a sweep. We don't
# use `-m`, which would put the current folder ahead of the standard library. Any Python can parse
# this, so an old one can report that it is too old.
MAIN = b"""\
import sys

if sys.version_info < (3, 10):
    error = "paceline: error: %s is Python %d.%d, but a run needs 3.10 or newer."
    hint = "\\n  Set python in [environment] of paceline.toml."
    sys.exit((error + hint) % ((sys.executable,) + tuple(sys.version_info[:2])))

if sys.argv[1:2] == ["trial"]:
    from paceline.agent.sweep_trial import main

    sys.exit(main(sys.argv[2:]))

from paceline.agent.main import main

sys.exit(main())
"""
FIXED_DATE = (1980, 1, 1, 0, 0, 0)  # equal content gives an equal zip
UNCHECKED = (1).to_bytes(4, "little")  # .pyc files are not checked against their source's time


def write_run_half(destination: Path, *, store: Path, compiled: bool = False) -> None:
    """Write the zip to `destination`, as a hard link to the one in `store` where possible."""
    stored = stored_run_half(store, compiled=compiled)
    destination.unlink(missing_ok=True)  # a link to the store's must not be overwritten
    try:
        os.link(stored, destination)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(stored, destination)


def stored_run_half(store: Path, *, compiled: bool = False) -> Path:
    """Return the path of the zip in the store, and create it if it is missing.

    `compiled` adds byte code for this Python; nodes with another Python fall back to the source.
    """
    sources = _sources()
    # Whoever owns a zip can change it, so each user has their own.
    digest = hashlib.sha256(f"{os.geteuid()} {compiled and sys.implementation.cache_tag}".encode())
    for name, content in sources.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    path = store / f"paceline-{digest.hexdigest()[:20]}.zip"
    if path.is_symlink() or not path.exists() or path.stat().st_uid != os.geteuid():
        store.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as file:
            file.write(_pack(sources, compiled=compiled))
    return path


def _sources() -> dict[str, bytes]:
    package = Path(paceline.__file__).parent
    paths = [package / name for name in FILES]
    for name in PACKAGES:
        paths += sorted((package / name).rglob("*.py"))
    found = {path.relative_to(package.parent).as_posix(): path.read_bytes() for path in paths}
    return {"__main__.py": MAIN, **found}


def _pack(sources: dict[str, bytes], *, compiled: bool) -> bytes:
    """Return the zip with these files, and the byte code of the modules if it is wanted."""
    packed = io.BytesIO()
    # Not compressed: each node reads it only once, possibly with a Python that lacks zlib.
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for name, content in sources.items():
            archive.writestr(zipfile.ZipInfo(name, FIXED_DATE), content)
            if compiled and name.endswith(".py"):
                header = MAGIC_NUMBER + UNCHECKED + source_hash(content)
                code = marshal.dumps(compile(content, name, "exec", dont_inherit=True))
                archive.writestr(zipfile.ZipInfo(f"{name}c", FIXED_DATE), header + code)
    return packed.getvalue()
