"""The text of a program and of the project's modules that it imports. They are only read, never
run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.contract.framework_presets import PRESETS, Preset

MAX_FILES = 200  # that are read of one project


def read_program(
    program: str, *, is_module: bool, import_path: Sequence[str]
) -> tuple[Path | None, str]:
    """Return the file and the text of a program; (None, "") if it cannot be found without
    importing it.
    """
    paths = [Path(program)]
    if is_module:
        module = Path(*program.split("."))
        paths = [
            Path(folder) / path
            for folder in import_path
            for path in (module.parent / f"{module.name}.py", module / "__main__.py")
        ]
    for path in paths:
        try:
            return path, path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
    return None, ""


def imported_names(source: str) -> list[str]:
    """Return the dotted names that a module imports, also inside functions; relative ones begin
    with dots.
    """
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError):
        return []
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names += [
                base,
                *(f"{base}{'.' if node.module else ''}{alias.name}" for alias in node.names),
            ]
    return names


def imports_runtime(source: str) -> bool:
    """Whether a program imports Paceline; otherwise it probably has no step boundaries."""
    return "paceline" in source and any(
        name.split(".")[0] == "paceline" for name in imported_names(source)
    )


def opens_session(source: str) -> bool:
    """Whether a program seems to train with the runtime; one that only calls `paceline.report`
    does not.
    """
    return imports_runtime(source) and re.search(r"\b(session|start)\b", source) is not None


def read_sources(program: str, *, is_module: bool, import_path: Sequence[str]) -> list[str]:
    """Return the text of a program, then those of the modules beside it that it imports, directly
    or not.
    """
    path, text = read_program(program, is_module=is_module, import_path=import_path)
    if path is None:
        return []
    folders = [
        *(Path(folder) for folder in import_path),
        *([] if is_module else [path.resolve().parent]),
    ]
    found, pending = {path: text}, [path]
    while pending and len(found) < MAX_FILES:
        importer = pending.pop()
        for name in imported_names(found[importer]):
            for file, its_text in _read_module(name, importer, folders):
                if file not in found:
                    found[file] = its_text
                    pending.append(file)
    return list(found.values())


def find_preset(sources: Sequence[str]) -> Preset | None:
    """Return the preset of the framework that a program seems to use; a program with the runtime
    needs none.
    """
    if not sources or opens_session(sources[0]):
        return None
    packages = {
        source: {name.split(".")[0] for name in imported_names(source)} for source in sources
    }
    return next(
        (
            preset
            for preset in PRESETS
            for source in sources
            if preset.fits(source, packages[source])
        ),
        None,
    )


def _read_module(name: str, importer: Path, folders: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    relative = name.lstrip(".")
    level = len(name) - len(relative)
    for folder in importer.parents[level - 1 : level] if level else folders:
        base = folder.joinpath(*relative.split("."))
        for path in (
            (base.with_suffix(".py"), base / "__init__.py") if relative else (base / "__init__.py",)
        ):
            try:
                yield path.resolve(), path.read_text(encoding="utf-8", errors="replace")
            except (OSError, ValueError):
                continue
