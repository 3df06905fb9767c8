"""Signatures and docstrings, read from source files: the runtime imports torch, which a login node may lack."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import paceline

SOURCE = Path(paceline.__file__).parent
_HEADINGS = ("Args:", "Attributes:", "Raises:", "Returns:", "Yields:")


@dataclass(frozen=True)
class Callable:
    """A function, a method or a property."""

    name: str
    signature: str  # as one writes the call: "(model, *, mode="auto")"; empty for a property
    docstring: str

    @property
    def is_property(self) -> bool:
        return not self.signature


@functools.cache
def _parse(file: str) -> ast.Module:
    return ast.parse((SOURCE / file).read_text(encoding="utf-8"))


def find_class(file: str, name: str) -> ast.ClassDef:
    return next(
        node for node in _parse(file).body if isinstance(node, ast.ClassDef) and node.name == name
    )


def class_docstring(file: str, name: str) -> str:
    return ast.get_docstring(find_class(file, name)) or ""


def read_callable(file: str, name: str) -> Callable:
    """Return a function, or a class as what its constructor takes."""
    for node in _parse(file).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return _callable(node)
        if isinstance(node, ast.ClassDef) and node.name == name:
            made = next((each for each in node.body if _is_function(each, "__init__")), None)
            signature = _signature(made) if isinstance(made, ast.FunctionDef) else "()"
            return Callable(name, signature, ast.get_docstring(node) or "")
    raise LookupError(f"{file} has no {name}")


def read_members(file: str, name: str) -> Iterator[Callable]:
    """Yield the public methods and properties of a class, in order."""
    for node in find_class(file, name).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            decorators = [ast.unparse(each) for each in node.decorator_list]
            if "overload" not in decorators:
                yield _callable(node)


def read_fields(docstring: str, heading: str) -> dict[str, str]:
    """Return the names and texts of a section such as `Args:`."""
    found: dict[str, str] = {}
    name = ""
    for line in _section(docstring, heading):
        match = re.match(r"([\w, *]+?): (.*)", line)
        if match and not line.startswith(" "):
            name = match[1]
            found[name] = match[2]
        elif name:
            found[name] += f" {line.strip()}"
    return found


def body(docstring: str) -> str:
    """Return a docstring without its sections."""
    lines = []
    for line in docstring.splitlines():
        if line.strip() in _HEADINGS:
            break
        lines.append(line)
    return "\n".join(lines).strip()


def to_markdown(docstring: str) -> str:
    """Return a docstring with its sections as lists."""
    parts = [body(docstring)]
    for heading in _HEADINGS:
        fields = read_fields(docstring, heading)
        if fields:
            parts.append(
                "\n".join([heading, "", *(f"- `{name}`: {text}" for name, text in fields.items())])
            )
        elif lines := _section(docstring, heading):
            parts.append(f"{heading} {' '.join(line.strip() for line in lines)}")
    return "\n\n".join(parts)


def _section(docstring: str, heading: str) -> list[str]:
    lines = docstring.splitlines()
    start = next((index for index, line in enumerate(lines) if line.strip() == heading), None)
    if start is None:
        return []
    found = []
    for line in lines[start + 1 :]:
        if line and not line.startswith(" "):
            break
        if line.strip():
            found.append(line[4:])
    return found


def _is_function(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == name


def _callable(node: ast.FunctionDef) -> Callable:
    is_property = any(ast.unparse(each) == "property" for each in node.decorator_list)
    return Callable(
        node.name, "" if is_property else _signature(node), ast.get_docstring(node) or ""
    )


def _signature(node: ast.FunctionDef) -> str:
    """Return the parameters without annotations and without `self`."""
    args = node.args
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    listed = [_parameter(each, default) for each, default in zip(positional, defaults, strict=True)]
    if positional and positional[0].arg in ("self", "cls"):
        listed = listed[1:]
    if args.vararg:
        listed.append(f"*{args.vararg.arg}")
    elif args.kwonlyargs:
        listed.append("*")
    listed += [
        _parameter(each, default)
        for each, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    if args.kwarg:
        listed.append(f"**{args.kwarg.arg}")
    return f"({', '.join(listed)})"


def _parameter(parameter: ast.arg, default: ast.expr | None) -> str:
    return (
        parameter.arg
        if default is None
        else f"{parameter.arg}={ast.unparse(default).replace(chr(39), chr(34))}"
    )
