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

MAX_BYTES = 500_000
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
        before = self.text[self.offset(_first_line(statement), 0) : self.start(statement)]
        before = (
            before if not getattr(statement, "decorator_list", None) else before.partition("@")[0]
        )
        # a form feed begins the column anew
        return before.rpartition("\f")[2] if not before.strip() else None

    # -- edits
    # -----------------------------------------------------------------------------------------

    def replace(self, node: ast.AST, text: str, reason: str) -> Edit:
        return Edit(self.start(node), self.end(node), text, reason)

    def replace_method(self, call: ast.Call, text: str, reason: str) -> Edit:
        """Replace `cuda()` of `model.cuda()`: what is before the dot stays, and may have changes
        of its own.
        """
        assert isinstance(call.func, ast.Attribute)
        return Edit(self.end(call.func) - len(call.func.attr), self.end(call), text, reason)

    def unwrap(self, outer: ast.AST, inner: ast.expr, reason: str) -> list[Edit]:
        """Leave only the inner part of an expression, which may have changes of its own."""
        simple = isinstance(inner, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
        first, last = ("", "") if simple else ("(", ")")
        return [
            Edit(self.start(outer), self.start(inner), first, reason),
            Edit(self.end(inner), self.end(outer), last, reason),
        ]

    def insert(self, offset: int, text: str, reason: str) -> Edit:
        return Edit(offset, offset, text, reason)

    def line_before(self, statement: ast.stmt, line: str, reason: str) -> Edit:
        """Add a simple statement before another one, as a line of its own if that one begins its
        line.
        """
        indent = self.indent(statement)
        if indent is None:  # as in `a = 1; b = 2`
            start = self.start(statement)
            return Edit(start, start, f"{line}; ", reason)
        offset = self.offset(_first_line(statement), 0)
        return Edit(offset, offset, f"{indent}{line}{self.newline}", reason)

    def line_after(self, statement: ast.stmt, line: str, reason: str) -> Edit:
        """Add a simple statement after another one, as a line of its own if that one has a line of
        its own.
        """
        indent = self.indent(statement)
        rest = _LINE_END.search(self.text, self.end(statement))
        tail = self._tail(statement)
        if indent is None or (tail and not tail.startswith("#")):
            return Edit(self.end(statement), self.end(statement), f"; {line}", reason)
        if rest is None:
            return Edit(len(self.text), len(self.text), f"{self.newline}{indent}{line}", reason)
        return Edit(rest.end(), rest.end(), f"{indent}{line}{self.newline}", reason)

    def under(self, statement: ast.stmt, head: str, reason: str) -> list[Edit | Remark]:
        """Put a statement under a line such as `if run.is_rank_zero:`."""
        if self.indent(statement) is None or self._tail(statement).startswith(";"):
            return [Remark(statement.lineno, f"put this under `{head}`: {reason}", must=True)]
        first = self.line_before(statement, head, reason)
        inside = {
            line
            for node in ast.walk(statement)
            if isinstance(node, (ast.JoinedStr, ast.Constant)) and node.end_lineno
            for line in range(node.lineno + 1, node.end_lineno + 1)
        }
        lines = [
            n for n in range(statement.lineno, (statement.end_lineno or 0) + 1) if n not in inside
        ]
        offsets = [
            offset
            for line in lines
            if not _LINE_END.match(self.text, offset := self.offset(line, 0))
        ]
        offsets = [
            re.compile(r"(?:[ \t]*\f)*").match(self.text, offset).end()  # type: ignore[union-attr]
            for offset in offsets
        ]
        more: list[Edit | Remark] = [Edit(offset, offset, self.unit, reason) for offset in offsets]
        return [first, *more]

    def add_argument(self, call: ast.Call, text: str, reason: str) -> Edit:
        """Add an argument at the end of a call."""
        given = [*call.args, *(each.value for each in call.keywords)]
        end = self.end(call) - 1
        tail = re.sub(r"#.*", "", self.text[max(map(self.end, given)) : end]) if given else ","
        return Edit(end, end, f", {text}" if "," not in tail else text, reason)

    def _tail(self, statement: ast.stmt) -> str:
        """Return what follows a statement in its line."""
        rest = _LINE_END.search(self.text, self.end(statement))
        return self.text[self.end(statement) : rest.start() if rest else None].strip()


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
    if len(content) > MAX_BYTES:
        raise UsageError(f"{path} has {len(content):,} bytes, which is too large for a script.")
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


def _first_line(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(each.lineno for each in decorators)])


def _indent_unit(tree: ast.Module, source: Source) -> str:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.For, ast.If, ast.ClassDef, ast.With)):
            outer, inner = source.indent(node), source.indent(node.body[0])
            if outer is not None and inner and inner.startswith(outer) and len(inner) > len(outer):
                return inner[len(outer) :]
    return "    "
