"""The text of a script, and edits that leave everything else unchanged: comments, layout, line
endings, encoding.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from paceline.errors import UsageError

_LINE_END = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True)
class Edit:
    """Replace the text between two offsets."""

    start: int
    end: int
    text: str
    reason: str


@dataclass(frozen=True)
class Remark:
    """What a person should look at, and in which line; 0 means the whole script.

    With `must`, the script does not train as it should until somebody has done it.
    """

    line: int
    text: str
    must: bool = False


class Source:
    """A script as text and as a tree whose positions are offsets into the text."""

    def __init__(self, text: str, name: str = "script", encoding: str = "utf-8") -> None:
        self.text, self.name, self.encoding = text, name, encoding
        self.tree = _parse(text, name)
        ends = [match.end() for match in _LINE_END.finditer(text)]
        self._starts = [0, *ends, len(text) + 1]
        found = _LINE_END.findall(text)
        self.newline = max(set(found), key=found.count) if found else "\n"
        self.unit = _indent_unit(self.tree, self)

    def offset(self, line: int, column: int) -> int:
        """Return the offset of a position of `ast`, which counts columns in bytes of UTF-8."""
        start = self._starts[line - 1]
        if column <= 0:
            return start
        whole = self.text[start : self._starts[line] if line < len(self._starts) else None]
        return start + len(
            whole.encode("utf-8", "surrogatepass")[:column].decode("utf-8", "surrogatepass")
        )

    def start(self, node: ast.AST) -> int:
        return self.offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]

    def end(self, node: ast.AST) -> int:
        return self.offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def text_of(self, node: ast.AST) -> str:
        return self.text[self.start(node) : self.end(node)]

    def indent(self, statement: ast.stmt) -> str | None:
        """Return what a statement is indented by; None if something else is before it in its
        line.
        """
        before = self.text[self.offset(statement.lineno, 0) : self.start(statement)]
        # a form feed begins the column anew
        return before.rpartition("\f")[2] if not before.strip() else None

    # -- edits
    # -----------------------------------------------------------------------------------------

    def replace(self, node: ast.AST, text: str, reason: str) -> Edit:
        return Edit(self.start(node), self.end(node), text, reason)

    def line_before(self, statement: ast.stmt, line: str, reason: str) -> Edit:
        """Add a simple statement before another one, as a line of its own if that one begins its
        line.
        """
        indent, start = self.indent(statement), self.start(statement)
        glue = "; " if indent is None else f"{self.newline}{indent}"  # as in `a = 1; b = 2`
        return Edit(start, start, f"{line}{glue}", reason)

    def line_after(self, statement: ast.stmt, line: str, reason: str) -> Edit:
        """Add a simple statement after another one, as a line of its own if that one has a line of
        its own.
        """
        indent, end = self.indent(statement), self.end(statement)
        rest = _LINE_END.search(self.text, end)
        tail = self.text[end : rest.start() if rest else None].strip()
        if indent is None or (tail and not tail.startswith("#")):
            return Edit(end, end, f"; {line}", reason)
        if rest is None:
            return Edit(len(self.text), len(self.text), f"{self.newline}{indent}{line}", reason)
        return Edit(rest.end(), rest.end(), f"{indent}{line}{self.newline}", reason)

    def add_argument(self, call: ast.Call, text: str, reason: str) -> Edit:
        """Add an argument at the end of a call."""
        given = [*call.args, *(each.value for each in call.keywords)]
        end = max(map(self.end, given), default=self.end(call) - 1)
        return Edit(end, end, f", {text}" if given else text, reason)


def apply(source: Source, edits: Iterable[Edit]) -> str:
    """Return the text with all edits. Those at the same offset come in the order in which they are
    given.
    """
    ordered = sorted(edits, key=lambda edit: (edit.start, edit.end))
    for one, two in pairwise(ordered):
        if two.start < one.end:
            raise ValueError(f"two changes overlap: {one.text!r} and {two.text!r}")
    parts, position = [], 0
    for edit in ordered:
        parts += [source.text[position : edit.start], edit.text]
        position = edit.end
    return "".join([*parts, source.text[position:]])


def read_source(path: Path) -> Source:
    """Read a script in the encoding that it declares."""
    content = path.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return Source(content.decode(encoding), str(path), encoding)
    except (SyntaxError, UnicodeDecodeError) as problem:
        raise UsageError(
            f"Python cannot read {path} as text: {problem}.", hint="Fix its encoding."
        ) from None


def _parse(text: str, name: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as problem:
        line = getattr(problem, "lineno", None)
        where = f" in line {line}" if line else ""
        what = getattr(problem, "msg", None) or str(problem)
        raise UsageError(
            f"{name} is not valid Python{where}: {what}.",
            hint="Fix that first: `python` shows the same error.",
        ) from None
    except (RecursionError, MemoryError):
        raise UsageError(f"{name} is nested too deeply to read.") from None


def _indent_unit(tree: ast.Module, source: Source) -> str:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.For, ast.If, ast.ClassDef, ast.With)):
            outer, inner = source.indent(node), source.indent(node.body[0])
            if outer is not None and inner and inner.startswith(outer) and len(inner) > len(outer):
                return inner[len(outer) :]
    return "    "
