"""The page about the files of a run: each with what it holds, from the classes that name them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from paceline.cli.reference.docstrings import SOURCE, class_docstring, find_class
from paceline.cli.reference.entries import ROW, Entry, Page, Section

RUN = "contract/run_folder.py"
SWEEP = "contract/sweep/folder.py"
CHECKPOINT = "contract/checkpoint/names.py"
# Each section: its title, what one types to find it, the file and class that name its files, and an introduction.
_SECTIONS = (
    ("The run folder", "run folder", RUN, "RunFolder", ""),
    ("attempt-N", "attempt", RUN, "AttemptFolder", ""),
    ("job-starts/JOB-RESTARTS", "job-starts", RUN, "JobStartFolder", ""),
    (
        "The folder of a sweep",
        "sweep folder",
        SWEEP,
        "SweepFolder",
        "`<scratch>/<project>/<experiment>/<sweep>`.",
    ),
    (
        "trials/N",
        "trials",
        SWEEP,
        "TrialFolder",
        "The run folder of a trial, with these additional files.",
    ),
)


def make_page() -> Page:
    intro = (
        "A run is a folder of plain files: `cat`, `tail -f` and `jq` work. Every file has one writer, which appends to "
        "it or renames it into place, so a file that you read is never half written. `paceline show` prints the "
        "folder's path. [How it works](../how-it-works.md#the-run-folder) explains the words."
    )
    sections = [_section(*each) for each in _SECTIONS]
    sections.insert(3, _checkpoint())
    return Page("run-folder.md", "Files of a run", intro, sections)


def _section(title: str, name: str, file: str, kind: str, intro: str) -> Section:
    entries = [
        Entry((names, names.split("/")[-1]), _sentence(text), ROW)
        for names, text in _files(file, kind)
    ]
    return Section(title, (name,), intro or class_docstring(file, kind), entries=tuple(entries))


def _checkpoint() -> Section:
    texts = dict(_constants(CHECKPOINT))
    entries = [
        Entry((name,), _sentence(texts[name]), ROW)
        for name in ("complete.json", "objects.json", "sharded")
    ]
    for node in ast.parse((SOURCE / CHECKPOINT).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name in (
            "share_file",
            "shard_file",
            "state_file",
        ):
            suffix = ".json" if node.name == "state_file" else ".safetensors"
            text = (ast.get_docstring(node) or "").removeprefix(
                "Return the name of the file that holds "
            )
            entries.append(
                Entry((f"{node.name.split('_')[0]}-RANK-of-RANKS{suffix}",), _sentence(text), ROW)
            )
    return Section("checkpoints/step-N", ("checkpoints",), "", entries=tuple(entries))


def _constants(file: str) -> list[tuple[str, str]]:
    text = (SOURCE / file).read_text(encoding="utf-8")
    lines = text.splitlines()
    found = ((re.match(r'[A-Z_]+ = "([^"]+)"', line), number) for number, line in enumerate(lines))
    return [(match[1], _comment(lines, number)) for match, number in found if match]


def _comment(lines: list[str], number: int) -> str:
    """Return the comment behind a line of code, or the one above it."""
    if behind := lines[number].partition("  # ")[2]:
        return behind
    first = number
    while lines[first - 1].lstrip().startswith("# "):
        first -= 1
    return " ".join(line.strip()[2:] for line in lines[first:number])


def _files(file: str, kind: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the meaning of each file that a class names, in order."""
    lines = (SOURCE / file).read_text(encoding="utf-8").splitlines()
    for node in find_class(file, kind).body:
        if isinstance(node, ast.Assign) and (
            match := re.search(r'Entry\("([^"]+)"\)', lines[node.lineno - 1])
        ):
            yield match[1], _comment(lines, node.lineno - 1)
        elif isinstance(node, ast.FunctionDef) and (name := _returned_name(node)):
            yield name, (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")


def _returned_name(node: ast.FunctionDef) -> str:
    """Return the name in `return self.path / f"rank-{rank}.log"`, with N for the rank; "" for other methods."""
    last = node.body[-1]
    if (
        not isinstance(last, ast.Return)
        or not isinstance(last.value, ast.BinOp)
        or not ast.get_docstring(node)
    ):
        return ""
    folder, name = ast.unparse(last.value.left), ast.unparse(last.value.right)
    parts = [part for part in re.findall(r"\w+", folder) if part not in ("self", "path")]
    return "/".join([*parts, re.sub(r"\{[^}]+\}", "N", name.lstrip("f").strip("'\""))])


def _sentence(text: str) -> str:
    text = text[:1].upper() + text[1:] if text and text[0] != "`" else text
    return text if text.endswith(".") or not text else f"{text}."
