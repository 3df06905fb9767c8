"""Which framework a script uses, and what it does when it is asked to stop: a signal that asks it
to save, an exit code that says that it did.

Both are settings (`[resume] stop_signal` and `saved_exit_code`). A preset is what a framework does
by itself, and applies where nothing is set. Programs and the modules that they import are only
read, never run.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PLAIN_SIGNAL = "SIGUSR1"


@dataclass(frozen=True)
class Preset:
    """A framework that handles a signal itself: it saves, and the script ends with this exit
    code.
    """

    name: str
    modules: tuple[str, ...]  # a rank that imports one of them uses the framework
    packages: tuple[str, ...]  # what its scripts import
    mentions: str  # what a script that uses the framework contains
    resumes: str  # the argument with which a script resumes by itself
    stop_signal: str = "SIGTERM"
    saved_exit_code: int = 0

    def fits(self, source: str) -> bool:
        """Whether a module with this text uses the framework."""
        is_mentioned = re.search(self.mentions, source) is not None
        return is_mentioned and not _packages(source).isdisjoint(self.packages)

    def can_resume(self, sources: Iterable[str], args: Iterable[str]) -> bool:
        """Whether a program seems to resume by itself. If not, stopping it early would only make
        it start over.
        """
        return any(self.resumes in text for text in (*sources, *args))


# In the order of precedence. Accelerate has no handler: its scripts are plain.
PRESETS = (
    Preset(
        "Lightning Trainer",
        modules=("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer"),
        packages=("lightning", "pytorch_lightning"),
        mentions=r"\b(Trainer|LightningCLI)\b",
        resumes="ckpt_path",
    ),
    Preset(
        "Hugging Face Trainer",
        modules=("transformers.trainer",),
        packages=("transformers", "trl", "sentence_transformers"),
        mentions=r"\b\w*Trainer\b",
        resumes="resume_from_checkpoint",
    ),
)


MAX_FILES = 200  # that are read of one project


def read_program(
    program: str, *, is_module: bool, import_path: Sequence[str]
) -> tuple[Path | None, str]:
    """Return the file and the text of a program; (None, "") if it cannot be found without
    importing it.
    """
    names = [program]
    if is_module:
        name = program.replace(".", "/")
        names = [f"{path}/{name}{end}" for path in import_path for end in (".py", "/__main__.py")]
    path = next((Path(name) for name in names if os.path.isfile(name)), None)
    return path, "" if path is None else path.read_text(encoding="utf-8", errors="replace")


def imported_names(source: str) -> list[str]:
    """Return the dotted names that a module imports, also inside functions; relative ones begin
    with a dot.
    """
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError):
        return []
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            base = f"{'.' * bool(node.level)}{node.module or ''}"
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return names


def imports_runtime(source: str) -> bool:
    """Whether a program imports Paceline; otherwise it probably has no step boundaries."""
    return "paceline" in source and "paceline" in _packages(source)


def _packages(source: str) -> set[str]:
    return {name.split(".")[0] for name in imported_names(source)}


def read_sources(program: str, *, is_module: bool, import_path: Sequence[str]) -> list[str]:
    """Return the text of a program, then those of the modules beside it that it imports, directly
    or not.
    """
    path, text = read_program(program, is_module=is_module, import_path=import_path)
    if path is None:
        return []
    folders = [path.resolve().parent, *map(Path, import_path)]
    files, texts = [path.resolve()], [text]
    for importer, source in zip(files, texts, strict=False):  # both grow
        places = [*folders, importer.parent, importer.parent.parent]
        names = [name.strip(".").replace(".", "/") for name in imported_names(source)]
        for file in (
            Path(f"{place}/{name}{end}")
            for place in places
            for name in names
            for end in (".py", "/__init__.py")
        ):
            if file not in files and file.is_file() and len(files) < MAX_FILES:
                files.append(file)
                texts.append(file.read_text(encoding="utf-8", errors="replace"))
    return texts
