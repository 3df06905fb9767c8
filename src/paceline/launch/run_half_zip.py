"""The run half of this package as one zip: all that a job needs besides torch, in the version that
submitted it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import marshal
import os
import secrets
import shutil
import sys
import zipfile
import zlib
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

import paceline
from paceline.contract.files.foreign_records import read_bounded

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
MAX_SIZE = 64 << 20  # bytes of a zip that is looked at
UNCHECKED = (1).to_bytes(4, "little")  # .pyc files are not checked against their source's time


def write_run_half(destination: Path, *, store: Path, compiled: bool = False) -> None:
    """Write the zip to `destination`, as a hard link to the one in `store` where possible."""
    stored = stored_run_half(store, compiled=compiled)
    try:
        os.link(stored, destination)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(stored, destination)


def stored_run_half(store: Path, *, compiled: bool = False) -> Path:
    """Return the path of the zip in the store, and create it if it is missing or not what its name
    says.

    `compiled` adds byte code for this Python; nodes with another Python fall back to the source.
    """
    sources = _sources()
    digest = hashlib.sha256(sys.implementation.cache_tag.encode() if compiled else b"")
    for name, content in sources.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    path = _path_of(store, digest.hexdigest()[:20])
    if not _is_intact(path, sources, compiled=compiled):
        store.mkdir(parents=True, exist_ok=True)
        _write(
            path,
            _pack(
                sources,
                {name: _byte_code(name, sources[name]) for name in _compiled(sources, compiled)},
            ),
        )
    return path


def _path_of(store: Path, digest: str) -> Path:
    """Return the path of the zip. Whoever owns one can change it, so nobody uses another user's."""
    path = store / f"paceline-{digest}.zip"
    try:
        is_ours = path.lstat().st_uid == os.geteuid()
    except OSError:
        is_ours = True
    return path if is_ours else store / f"paceline-{digest}-{os.geteuid()}.zip"


def _is_intact(path: Path, sources: dict[str, bytes], *, compiled: bool) -> bool:
    """Whether a file is the zip that its name says. Jobs run what is in it."""
    try:
        stored = b"" if path.is_symlink() else read_bounded(path, MAX_SIZE)
        with zipfile.ZipFile(io.BytesIO(stored)) as archive:
            codes = {name: archive.read(f"{name}c") for name in _compiled(sources, compiled)}
    except (
        OSError,
        ValueError,
        KeyError,
        EOFError,
        NotImplementedError,
        RuntimeError,
        zlib.error,
        zipfile.BadZipFile,
    ):
        return False
    return all(code.startswith(_header(sources[name])) for name, code in codes.items()) and (
        stored == _pack(sources, codes)
    )


def _compiled(sources: dict[str, bytes], compiled: bool) -> list[str]:
    return [name for name in sources if compiled and name.endswith(".py")]


def _sources() -> dict[str, bytes]:
    package = Path(paceline.__file__).parent
    paths = [package / name for name in FILES]
    for name in PACKAGES:
        paths += sorted((package / name).rglob("*.py"))
    found = {path.relative_to(package.parent).as_posix(): path.read_bytes() for path in paths}
    return {"__main__.py": MAIN, **found}


def _pack(sources: dict[str, bytes], codes: dict[str, bytes]) -> bytes:
    """Return the zip with these files, and the byte code of some of them."""
    packed = io.BytesIO()
    # Not compressed: each node reads it only once, possibly with a Python that lacks zlib.
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for name, content in sources.items():
            archive.writestr(zipfile.ZipInfo(name, FIXED_DATE), content)
            if name in codes:
                archive.writestr(zipfile.ZipInfo(f"{name}c", FIXED_DATE), codes[name])
    return packed.getvalue()


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _byte_code(name: str, source: bytes) -> bytes:
    return _header(source) + marshal.dumps(_code(name, source))


class ByteCodeCache(SourceFileLoader):
    """Reads the byte code that Python keeps of a module, if it fits the time and size of its file.
    Writes none.
    """

    def __init__(self, name: str, path: Path, source: bytes) -> None:
        super().__init__(name, str(path))
        self.source = source

    def get_data(self, path: str) -> bytes:
        return self.source if path == self.path else super().get_data(path)

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        """Do nothing: the folder may be far away, and whoever imports the module writes it."""


def _code(name: str, source: bytes) -> CodeType:
    """Return a module's code. Python has usually compiled it already, and reading that is much
    faster.
    """
    # otherwise there is no byte code beside the files
    if isinstance(paceline.__loader__, SourceFileLoader):
        cache = ByteCodeCache(name, Path(paceline.__file__).parent.parent / name, source)
        with contextlib.suppress(
            OSError, ImportError, SyntaxError, EOFError, TypeError, ValueError
        ):
            code = cache.get_code(name)  # raises these for a damaged file
            if code is not None:
                return _rename(code, name)
    return compile(source, name, "exec", dont_inherit=True)


def _rename(code: CodeType, name: str) -> CodeType:
    """Return the code with the path that tracebacks of a job show."""
    constants = tuple(
        _rename(each, name) if isinstance(each, CodeType) else each for each in code.co_consts
    )
    return code.replace(co_filename=name, co_consts=constants)


def _header(source: bytes) -> bytes:
    return importlib.util.MAGIC_NUMBER + UNCHECKED + importlib.util.source_hash(source)
