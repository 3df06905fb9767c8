"""How large the house is: statements, modules and packages of each room, against its budget.

`make size` prints the table. `tests/test_architecture.py` lets nothing grow past its budget, or
past what it has today where it is still above it. A statement is an `ast.stmt` that is not a
docstring, so formatting does not change the number.
"""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "paceline"
COPIED = SOURCE / "tools" / "new" / "files"  # by `paceline new`: code of users

# The most statements that a room should have.
BUDGETS = {
    "(top)": 140,
    "contract": 1200,
    "spec": 1000,
    "launch": 2700,
    "slurm": 1250,
    "ssh": 1300,
    "staging": 1000,
    "agent": 4200,
    "runtime": 8300,
    "watch": 2600,
    "sweep": 1050,
    "ui": 1900,
    "cli": 2700,
    "tools": 3200,
}
# The same for all of them together, and for other measures.
TOTALS = {
    "statements": 32_500,
    "statements of the launch half": 19_900,
    "syntax nodes": 390_000,
    "modules": 340,
    "packages": 45,
    "modules in the longest chain of imports": 15,
    "lines of shell": 400,
    "lines of JavaScript": 1_900,
    "tables that the formatter skips": 20,
}
# What is still above its budget, as it is now. Lower these numbers as the code shrinks.
TODAY = {
    "agent": 5_539,
    "cli": 2_891,
    "contract": 1_374,
    "runtime": 8_699,
    "spec": 1_148,
    "sweep": 1_060,
    "statements": 33_614,
    "syntax nodes": 414_035,
    "lines of shell": 495,
}


@functools.cache
def trees() -> dict[str, tuple[Path, ast.Module]]:
    """Return every module of ours by its dotted name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        if COPIED not in path.parents:
            name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found[name.removesuffix(".__init__")] = (path, tree)
    return found


def room_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else "(top)"


def statements(tree: ast.AST) -> int:
    return sum(isinstance(node, ast.stmt) and not _is_docstring(node) for node in ast.walk(tree))


def _is_docstring(node: ast.stmt) -> bool:
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)


def rooms() -> dict[str, tuple[int, int, int, int]]:
    """Return the statements, syntax nodes, modules and packages of each room."""
    sizes, nodes, modules, packages = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for path, tree in trees().values():
        room = room_of(path)
        sizes[room] += statements(tree)
        nodes[room] += sum(1 for _ in ast.walk(tree))
        modules[room] += 1
        packages[room] += path.name == "__init__.py"
    return {room: (sizes[room], nodes[room], modules[room], packages[room]) for room in sizes}


def imports(tree: ast.Module) -> set[str]:
    """Return the modules of ours that a module imports when it is imported itself."""
    found, names, left = set(), set(), list(tree.body)
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.If | ast.Try) and "TYPE_CHECKING" not in ast.dump(node):
            left += [*node.body, *node.orelse]
    for name in names:
        parts = name.split(".")
        while parts and ".".join(parts) not in trees():
            parts.pop()
        found.add(".".join(parts))
    return found - {"", "paceline"}


@functools.cache
def chain(name: str) -> tuple[str, ...]:
    """Return the longest chain of imports that begins with a module."""
    longest = max((chain(each) for each in imports(trees()[name][1]) - {name}), key=len, default=())
    return (name, *longest)


def longest_chain() -> tuple[str, ...]:
    return max((chain(name) for name in trees()), key=len)


def lines(*endings: str) -> int:
    files = (path for path in SOURCE.rglob("*") if path.suffix in endings)
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def skipped() -> int:
    texts = (path.read_text(encoding="utf-8") for path, _ in trees().values())
    return sum(text.count("# fmt: skip") for text in texts)


# What a process of the command does until it starts agents, or sbatch.
_PROFILED = """
import os, sys
from paceline.__main__ import main
seen, root = set(), os.environ["ROOT"]
def look(frame, event, argument):
    code = frame.f_code
    # bodies of modules and classes are no functions, nor are comprehensions
    is_function = code.co_flags & 1 and not code.co_name.startswith("<")
    if event == "call" and is_function and code.co_filename.startswith(root):
        seen.add((code.co_filename, code.co_name, code.co_firstlineno))
        if code.co_name in ("wait", "run_sbatch"):
            sys.setprofile(None)
sys.argv = ["paceline", *sys.argv[1:]]
sys.setprofile(look)
try:
    main()
except SystemExit:
    pass
print("MEASURED", len({file for file, *_ in seen}), len(seen), file=sys.stderr)
"""


def measure_acts() -> None:
    """Print how many files and functions of ours `run` and `submit` go through until agents or
    sbatch start. Modules that are only imported do not count.
    """
    acts = {
        "run": (["run", "--cpu", "--nproc", "1", "train.py"], 60, 320),
        "submit": (["submit", "--no-check", "train.py"], 45, 200),
    }
    for name, (argv, files, functions) in acts.items():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "train.py").write_text("print('here')\n", encoding="utf-8")
            for command in ("sbatch", "squeue", "sinfo", "scontrol"):
                path = Path(folder) / command
                path.write_text("#!/bin/sh\necho 1\n", encoding="utf-8")
                path.chmod(0o755)
            environ = {**os.environ, "ROOT": str(SOURCE), "PACELINE_SCRATCH": f"{folder}/runs"}
            environ["PATH"] = f"{folder}:{os.environ['PATH']}"
            done = subprocess.run(
                [sys.executable, "-c", _PROFILED, *argv],
                cwd=folder,
                env=environ,
                capture_output=True,
                text=True,
                check=False,
            )
            found = [line for line in done.stderr.splitlines() if line.startswith("MEASURED")]
            measured = found[-1].split()[1:] if found else ["?", "?"]
            print(
                f"{name:<8} {measured[0]:>4} files (at most {files}), {measured[1]:>4} functions "
                f"(at most {functions}) of ours in the command's process"
            )


def totals() -> dict[str, int]:
    table = rooms()
    statements, nodes, modules, packages = (
        sum(column) for column in zip(*table.values(), strict=True)
    )
    run_half = table["agent"][0] + table["runtime"][0]
    measured = (
        *(statements, statements - run_half, nodes, modules, packages, len(longest_chain())),
        *(lines(".sh"), lines(".js"), skipped()),
    )
    return dict(zip(TOTALS, measured, strict=True))


def main() -> int:
    print(f"{'room':<10} {'statements':>10} {'at most':>8} {'modules':>8} {'packages':>9}")
    for room, (size, _, modules, packages) in sorted(
        rooms().items(), key=lambda row: list(BUDGETS).index(row[0])
    ):
        mark = "  over" if size > BUDGETS[room] else ""
        print(f"{room:<10} {size:>10,} {BUDGETS[room]:>8,} {modules:>8} {packages:>9}{mark}")
    print()
    for what, size in totals().items():
        over = "  over" if size > TOTALS[what] else ""
        print(f"{size:>8,} {what} (at most {TOTALS[what]:,}){over}")
    if "--acts" in sys.argv:
        measure_acts()
    if "--chain" in sys.argv:
        print("\n" + "\n".join(longest_chain()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
