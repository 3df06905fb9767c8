"""Join the ES modules of the pages into one script: a page that is opened as a file cannot import
any.

Each module becomes a function that returns its exports, and what it imports is taken from the
functions before it.
"""

from __future__ import annotations

import re
from pathlib import Path

_IMPORT = re.compile(r'^import \{ ([\w, $]+) \} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) (\w+))", re.MULTILINE)
_LEFT = re.compile(r"^(?:import|export)\b.*", re.MULTILINE)


def bundle_modules(folder: Path, entry: str = "app") -> str:
    """Return a module and all that it imports as one script. Raises ValueError if modules import
    each other.
    """
    parts: dict[str, str] = {}
    _add(folder, entry, parts, ())
    return '"use strict";\n' + "".join(parts.values())


def _add(folder: Path, name: str, parts: dict[str, str], on_the_way: tuple[str, ...]) -> None:
    if name in on_the_way:
        raise ValueError(f"modules import each other: {' -> '.join([*on_the_way, name])}")
    if name in parts:
        return
    text = (folder / f"{name}.js").read_text(encoding="utf-8")
    for _, other in _IMPORT.findall(text):
        _add(folder, other, parts, (*on_the_way, name))
    exported = _EXPORT.findall(text)
    body = _EXPORT.sub("", _IMPORT.sub(r"const { \1 } = $\2;\n", text))
    if left := _LEFT.search(body):
        raise ValueError(f"{name}.js: cannot bundle {left[0]!r}")
    parts[name] = f"const ${name} = (() => {{\n{body}return {{ {', '.join(exported)} }};\n}})();\n"
