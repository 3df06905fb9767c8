"""`__main__` of Paceline on a login node. It imports from one file, which holds all modules compiled.

Home folders of clusters are often slow: a file operation may take 100 ms, and a command imports hundreds of modules.
Whatever is not in that file is imported from the folder as usual, so that nothing depends on it.
"""

import sys

# last, so that nobody looks into this folder for modules of Python itself
if __name__ == "__main__":
    sys.path.append(sys.path.pop(0))

import marshal
import os
import signal
from contextlib import suppress
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

INTERRUPTED_EXIT = 130
# Python starts without Ctrl-C. Until the command begins, there is nothing to clean up.
if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED_EXIT))

COMPLETE = "paceline-complete"  # name of a file: with it, this folder counts as complete
ABSENT = 97  # exit code: the laptop installs this again, and repeats what it has sent
# name of the file: {name of a module: (its file, whether it is a package, its code)}
MODULES = "modules"


class OneFile:
    """Finds and loads modules for Python's import."""

    def __init__(self, folder: str, modules: dict[str, tuple[str, bool, bytes]]) -> None:
        self.folder, self.modules = folder, modules

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self.modules:
            return None
        is_package, file = self.modules[name][1], self.get_filename(name)
        spec = ModuleSpec(name, self, origin=file, is_package=is_package)  # type: ignore[arg-type]
        spec.has_location = True
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations.append(os.path.dirname(file))
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """Python's own kind of module will do."""

    def exec_module(self, module: ModuleType) -> None:
        exec(self.get_code(module.__name__), module.__dict__)

    def get_code(self, name: str) -> CodeType:
        code: CodeType = marshal.loads(self.modules[name][2])
        return code

    def get_filename(self, name: str) -> str:
        return f"{self.folder}/{self.modules[name][0]}"

    def get_source(self, name: str) -> str:
        """Return the text of a module, for tracebacks."""
        with open(self.get_filename(name), encoding="utf-8") as file:
            return file.read()

    def get_data(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def get_resource_reader(self, name: str) -> Any:
        """Return what `importlib.resources` reads files of a package with: those are in the folder."""
        from importlib.readers import FileReader

        return FileReader(SimpleNamespace(path=self.get_filename(name)))  # type: ignore[arg-type]

    def is_package(self, name: str) -> bool:
        return self.modules[name][1]


def import_from_one_file(folder: str) -> None:
    try:
        with open(f"{folder}/{MODULES}", "rb") as file:
            modules = marshal.load(file)
    except (OSError, ValueError, EOFError, TypeError):
        sys.path.insert(0, folder)  # before other versions of the same packages
        return
    sys.meta_path.insert(0, OneFile(folder, modules))


def start() -> int | None:
    from paceline.ssh.remote.entry import main, note_end

    code = main()
    if code is None:  # the command of the request, as if it had been typed here
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            import_module("paceline.__main__").main()
        except SystemExit as end:
            note_end(end.code)
            raise
    return code


def mark_damage(folder: str) -> bool:
    """Let the next command install this again if files are missing. Return whether they are."""
    try:
        if import_module("paceline.ssh.remote.unpack").is_whole(folder):
            return False
    except ImportError:
        pass
    with suppress(OSError):
        os.unlink(f"{folder}/{COMPLETE}")
    return True


if __name__ == "__main__":
    here, arguments = sys.path[-1], sys.argv[1:]  # `receive`, or `run` and the name of a request
    try:
        import_from_one_file(here)
        sys.exit(start())
    except ImportError as problem:
        if not mark_damage(here):
            raise
        if arguments[:1] == ["receive"]:
            sys.exit(ABSENT)
        with suppress(OSError, IndexError):  # there may be secrets in it, and nobody will take it
            os.unlink(f"{os.path.dirname(here)}/{arguments[1]}")
        lost = f"paceline: error: Files of Paceline are missing in {here}: {problem}.\n  Repeat the command:"
        sys.exit(f"{lost} it installs them again.")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_EXIT)
