"""Runs on the login node, before Paceline is there: unpack an archive from standard input into the cache.

Its text is sent as it is, so it needs nothing but Python 3.10. Several machines may do this at the same time: each
unpacks to a name of its own, and the first to rename it into place wins.
"""

import hashlib
import os
import shutil
import sys
import tempfile
import time
import zipfile

COMPLETE = "paceline-complete"  # a file that the folder has once everything is in it
ABANDONED = 86_400  # seconds after which a half unpacked folder counts as left behind


def install(cache: str, name: str, digest: str) -> None:
    os.umask(0o077)
    os.makedirs(cache, exist_ok=True)
    remove_abandoned(cache)
    final = os.path.join(cache, name)
    if os.path.exists(os.path.join(final, COMPLETE)):
        return
    partial = tempfile.mkdtemp(prefix=".partial-", dir=cache)
    try:
        archive = os.path.join(partial, "archive")
        if receive(archive) != digest:
            raise OSError("the archive did not arrive complete; try again")
        content = os.path.join(partial, "content")
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(content)
        with open(os.path.join(content, COMPLETE), "w", encoding="ascii") as mark:
            mark.write(digest)
        try:
            os.rename(content, final)
        except OSError:
            if not os.path.exists(os.path.join(final, COMPLETE)):
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def receive(path: str) -> str:
    """Write standard input to a file and return its checksum."""
    total = hashlib.sha256()
    with open(path, "wb") as file:
        while part := sys.stdin.buffer.read(1 << 20):
            total.update(part)
            file.write(part)
    return total.hexdigest()


def remove_abandoned(cache: str) -> None:
    for entry in os.scandir(cache):
        if entry.name.startswith(".partial-") and time.time() - entry.stat(follow_symlinks=False).st_mtime > ABANDONED:
            shutil.rmtree(entry.path, ignore_errors=True)


if __name__ == "__main__":
    try:
        install(*sys.argv[1:4])
    except OSError as problem:
        sys.exit(f"{problem.strerror or problem}: {problem.filename or sys.argv[1]}")
