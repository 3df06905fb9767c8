"""Runs on the login node, before Paceline is there: unpack an archive from standard input into the cache.

Its text is sent as it is, so it needs nothing but Python 3.10. Several machines may do this at the same time: each
unpacks to a name of its own, and the first to rename it into place wins.
"""

import hashlib
import marshal
import os
import shutil
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor

# a file that the folder has once everything is in it: a list of its files
COMPLETE = "paceline-complete"
MODULES = "modules"  # a file with all modules, as `start` reads it
RARE = ("pygments/lexers/", "pygments/styles/", "paceline/templates/files/")  # not worth compiling
THREADS = 32
ABANDONED = 86_400  # seconds after which a half unpacked folder counts as left behind


def install(cache: str, name: str, digest: str) -> None:
    os.umask(0o077)
    os.makedirs(cache, exist_ok=True)
    remove_abandoned(cache)
    final = os.path.join(cache, name)
    if is_whole(final):
        return
    partial = tempfile.mkdtemp(prefix=".partial-", dir=cache)
    try:
        archive = os.path.join(partial, "archive")
        if receive(archive) != digest:
            raise OSError("the archive arrived incomplete; try again")
        content = os.path.join(partial, "content")
        with zipfile.ZipFile(archive) as packed:
            extract(packed, content)
            write_modules(packed, content, final)
            write(os.path.join(content, COMPLETE), list_files(packed, content).encode("utf-8"))
        try:
            os.rename(content, final)
        except OSError:
            if not os.path.isdir(final):
                raise
            if not is_whole(final):  # clusters remove files that nobody has used for long
                os.rename(final, os.path.join(partial, "damaged"))
                os.rename(content, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def list_files(packed: zipfile.ZipFile, folder: str) -> str:
    """Return a line with the size and the name of each file that was unpacked, and of that with all modules."""
    sizes = {info.filename: info.file_size for info in packed.infolist()}
    sizes[MODULES] = os.path.getsize(os.path.join(folder, MODULES))
    return "".join(f"{size} {name}\n" for name, size in sizes.items())


def is_whole(folder: str) -> bool:
    """Whether all files are there as they were unpacked."""
    try:
        with open(os.path.join(folder, COMPLETE), encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, ValueError):
        return False
    with ThreadPoolExecutor(THREADS) as pool:
        return bool(lines) and all(
            pool.map(lambda line: is_there(folder, *line.split(" ", 1)), lines)
        )


def is_there(folder: str, size: str, name: str = "") -> bool:
    try:
        return os.path.getsize(os.path.join(folder, name)) == int(size)
    except (OSError, ValueError):
        return False


def extract(packed: zipfile.ZipFile, folder: str) -> None:
    """Write all files, many at a time: each operation may take long on a file system that is far away."""
    names = packed.namelist()
    folders = {os.path.dirname(name) for name in names}
    folders |= {parent for name in folders for parent in parents(name)}
    os.mkdir(folder)
    with ThreadPoolExecutor(THREADS) as pool:
        for depth in sorted({name.count("/") for name in folders if name}):
            level = [
                os.path.join(folder, name)
                for name in sorted(folders)
                if name and name.count("/") == depth
            ]
            list(pool.map(os.mkdir, level))
        written = [
            pool.submit(write, os.path.join(folder, name), packed.read(name)) for name in names
        ]
        for each in written:
            each.result()


def parents(name: str) -> list[str]:
    parts = name.split("/")
    if ".." in parts or name.startswith("/"):
        raise OSError(f"{name} is not inside the archive")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def write(path: str, content: bytes) -> None:
    with open(path, "xb", buffering=0) as file:
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]


def write_modules(packed: zipfile.ZipFile, folder: str, final: str) -> None:
    """Compile all modules into one file: with it, a command opens a few files instead of hundreds."""
    modules = {}
    for name in packed.namelist():
        if name.endswith(".py") and name != "__main__.py" and not name.startswith(RARE):
            try:
                code = compile(packed.read(name), f"{final}/{name}", "exec", dont_inherit=True)
            except (SyntaxError, ValueError):  # a template, or for another Python
                continue
            module, is_package = name[:-3].replace("/", "."), name.endswith("/__init__.py")
            modules[module[: -len(".__init__")] if is_package else module] = (
                name,
                is_package,
                marshal.dumps(code),
            )
    write(os.path.join(folder, MODULES), marshal.dumps(modules))


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
        if (
            entry.name.startswith(".partial-")
            and time.time() - entry.stat(follow_symlinks=False).st_mtime > ABANDONED
        ):
            shutil.rmtree(entry.path, ignore_errors=True)


if __name__ == "__main__":
    try:
        install(*sys.argv[1:4])
    except OSError as problem:
        sys.exit(f"{problem.strerror or problem}: {problem.filename or sys.argv[1]}")
