"""The shape of the code: who imports whom, how large things are, what is public."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.spec.settings import TABLE
from tests import size

SOURCE = Path(paceline.__file__).parent
FOUNDATION = {"contract", "errors"}

# Each package, and the packages that it may import besides itself and the foundation.
MAY_IMPORT = {
    "contract": set(),
    "errors": set(),
    "staging": set(),  # what agents do on nodes, `paceline data stage` and `clean` do here
    "spec": set(),
    "slurm": {"spec"},
    "launch": {"spec", "slurm", "staging"},
    "watch": {"spec", "slurm"},
    "ssh": {"spec", "slurm", "launch", "watch"},
    "sweep": {"spec", "slurm", "launch", "watch"},
    "ui": {"spec", "slurm", "launch", "watch", "sweep"},
    "tools": {"spec", "slurm", "launch", "watch", "sweep"},
    "cli": {"spec", "slurm", "staging", "launch", "watch", "ssh", "sweep", "ui", "tools"},
    "agent": {"staging"},
    "runtime": set(),
    "wandb": {"runtime"},  # the public module of that name
}

# The only other imports from one package to another. What starts in a process of its own, or what a
# rank loads by name (the runtime, which may import torch), is no import.
EXCEPTIONS = {
    ("__main__", "paceline.cli"),
    (
        "__main__",
        "paceline.agent.workers.zygote.prestart",
    ),  # torch loads while the command line is parsed
    (
        "sweep",
        "paceline.agent.sweep_trial",
    ),  # local trials are opened and closed exactly as jobs do it
    (
        "launch",
        "paceline.agent.workers",
    ),  # the command passes on the zygote that it has started, warm or not
}

# the contract: `ps`, where there is no /proc
CALLS_SUBPROCESS = {"contract", "launch", "slurm", "ssh", "tools", "agent", "staging"}
MAX_MODULES = 25  # per folder; `cli/commands` has one file per command
MAX_FUNCTION_LINES = 95
NOUNS = {"staging", "training", "string", "timing", "forwarding"}  # name a thing


def files() -> list[Path]:
    copied = SOURCE / "tools" / "new" / "files"  # by `paceline new`: code of users
    return sorted(path for path in SOURCE.rglob("*.py") if copied not in path.parents)


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in files()}


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@functools.cache
def trees() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in files()]


@functools.cache
def imported(tree: ast.Module) -> set[str]:
    """Everything that a file imports, also inside functions, except what only type checkers see."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@functools.cache
def imported_modules(tree: ast.Module) -> set[str]:
    """The modules of ours that a file imports."""
    found = set()
    for name in imported(tree):
        parts = name.split(".")
        while parts and ".".join(parts) not in MODULES:
            parts.pop()
        found.add(".".join(parts))
    return found - {"", "paceline"}


def test_imports_point_one_way() -> None:
    for path, tree in trees():
        package = package_of(path)
        allowed = {package, *FOUNDATION, *MAY_IMPORT.get(package, set())}
        for name in imported_modules(tree):
            excepted = any(
                package == who and f"{name}.".startswith(f"{what}.") for who, what in EXCEPTIONS
            )
            assert name.split(".")[1] in allowed or excepted, (
                f"{path.relative_to(SOURCE)} imports {name}"
            )


def test_every_exception_is_used() -> None:
    used = {(package_of(path), name) for path, tree in trees() for name in imported_modules(tree)}
    for who, what in EXCEPTIONS:
        assert any(
            who == package and f"{name}.".startswith(f"{what}.") for package, name in used
        ), (who, what)


def test_no_module_imports_itself_in_a_circle() -> None:
    """Not even inside functions."""
    imports = {name_of(path): imported_modules(tree) for path, tree in trees()}
    done: set[str] = set()

    def visit(name: str, on_the_way: tuple[str, ...]) -> None:
        assert name not in on_the_way, " -> ".join([*on_the_way[on_the_way.index(name) :], name])
        if name not in done:
            for other in imports[name]:
                visit(other, (*on_the_way, name))
            done.add(name)

    for name in imports:
        visit(name, ())


def test_folders_and_functions_are_small() -> None:
    for folder in {path.parent for path in files()} - {SOURCE / "cli" / "commands"}:
        modules = [path.name for path in folder.glob("*.py") if not path.name.startswith("__")]
        assert len(modules) <= MAX_MODULES, f"{folder.relative_to(SOURCE)}: {len(modules)} modules"
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= MAX_FUNCTION_LINES, (
                    f"{path.relative_to(SOURCE)}: {node.name} has {length} lines"
                )


def test_nothing_grows_past_its_budget() -> None:
    """`make size` shows where each room is. A budget that holds has no place in TODAY."""
    measured = {room: row[0] for room, row in size.rooms().items()} | size.totals()
    budgets = size.BUDGETS | size.TOTALS
    for what, number in measured.items():
        most = size.TODAY.get(what, budgets[what])
        assert number <= most, f"{what}: {number} of at most {most}"
    assert all(most > budgets[what] for what, most in size.TODAY.items())


def test_modules_are_named_by_what_they_hold() -> None:
    gerunds = [
        path
        for path in files()
        if path.stem.endswith("ing") and path.stem.split("_")[-1] not in NOUNS
    ]
    assert not gerunds


def test_only_runtime_imports_torch_and_only_some_packages_start_processes() -> None:
    for path, tree in trees():
        package, names = package_of(path), {name.split(".")[0] for name in imported(tree)}
        if package not in ("runtime", "agent"):
            assert "torch" not in names, path
        if package not in CALLS_SUBPROCESS:
            assert "subprocess" not in names, path


# Flags that mean something else on each command, so that each says what.
OWN_MEANING = {
    "--all": "all runs of a list, all files of a run, or all runs to send",
    "--count": "rows that a list shows; points of a sweep",
    "-n": "rows or lines to show",
    "--follow": "what follows differs: lines, a file, or a run that was just submitted",
    "--local": "what runs here: a build, or the trials of a sweep",
    "--output": "what is written: weights, numbers, or a page",
    "-o": "short for --output",
    "--project": "the name of a new run's project, or a filter of a list",
    "--resume": "`run` takes over runs of this machine, `submit` those of Slurm",
    "-t": "the time limit of a job, or times before lines",
    "--timeout": "of collectives, or how long `wait` waits",
    "--to": "a path on the cluster, or here",
    "--yes": "with --on, it is about code and secrets that are sent",
}


def test_flags_have_one_declaration() -> None:
    """Beside its key, in typer_options.py, or by the one command that has it."""
    found: dict[str, set[str]] = {}
    for option in (each for group in TABLE.values() for each in group):
        for flag in option.all_flags:
            found.setdefault(flag, set()).add("the table of options")
    for path, tree in trees():
        for node in (each for each in ast.walk(tree) if isinstance(each, ast.Call)):
            hidden = any(each.arg == "hidden" for each in node.keywords)
            if ast.unparse(node.func) == "typer.Option" and not hidden:
                flags = [str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)]
                for flag in (flag for flag in flags if flag.startswith("-")):
                    found.setdefault(flag, set()).add(f"{path.name}:{node.lineno}")
    twice = {flag: sorted(where) for flag, where in found.items() if len(where) > 1}
    assert {flag: where for flag, where in twice.items() if flag not in OWN_MEANING} == {}
    assert set(OWN_MEANING) <= set(twice), "a flag that has one declaration needs no reason"


def test_environment_names_are_in_one_table() -> None:
    """Also prefixes of names, but not `PACELINE_` itself."""
    for path, tree in trees():
        texts = {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        names = {text for text in texts if re.fullmatch(r"PACELINE_\w+", text)}
        assert not names or path == SOURCE / "contract" / "env.py", (
            f"{path.relative_to(SOURCE)} has {names}"
        )


def test_agents_need_the_standard_library_only() -> None:
    for path, tree in trees():
        if package_of(path) not in ("agent", "staging", *FOUNDATION):
            continue
        roots = {name.split(".")[0] for name in imported(tree)}
        # The zygote and the ranks import torch for the script, and a trial imports Optuna where its
        # sweep needs it.
        outside = roots - set(sys.stdlib_module_names) - {"paceline", "torch", "numpy", "optuna"}
        assert not outside, f"{path} imports {outside}"


@pytest.mark.parametrize(
    "code",
    [
        "import paceline",
        "import paceline.cli",
        "import importlib, paceline.cli.command_table\n"
        "for module, _ in paceline.cli.command_table.COMMANDS.values(): "
        "importlib.import_module(module)",
        "import sys; sys.argv = ['paceline', '--help']; from paceline.__main__ import main\n"
        "try: main()\nexcept SystemExit as end: assert not end.code",
        "import paceline.agent",
    ],
)
def test_torch_is_not_imported(code: str) -> None:
    check = f"{code}\nimport sys; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_each_command_imports_what_it_uses() -> None:
    """Tests fork commands from a process that has imported all of them."""
    code = (
        "import gc, importlib, os, pydantic.dataclasses, typer.main\n"
        "from paceline.cli import command_table as cli\n"
        "gc.disable()\n"
        "for name in [*(module for module, _ in cli.COMMANDS.values()), *cli.SERVERS.values()]:\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        importlib.import_module(name)\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(pid, 0)[1] == 0, name\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_imports_nothing_heavy() -> None:
    check = (
        "import sys; sys.argv = ['paceline', '--help']; from paceline.__main__ import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "heavy = {'pydantic', 'typer', 'rich', 'psutil', 'asyncio'} & set(sys.modules); assert "
        "not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "paceline run train.py" in done.stdout


def test_the_public_surface_is_what_it_was() -> None:
    assert paceline.__all__ == [
        "Identity",
        "PacelineError",
        "Run",
        "ShardedIterable",
        "Tracker",
        "count_flops",
        "read_identity",
        "report",
        "seed_everything",
        "session",
        "spawn",
        "start",
        "transformer_flops",
        "wandb",
        "__version__",
    ]
    assert dir(paceline) == sorted(paceline.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        paceline.nothing  # noqa: B018


def test_a_run_has_these_public_attributes() -> None:
    with paceline.session(cpu=True, report=False) as run:
        assert [name for name in dir(run) if not name.startswith("_")] == [
            "autocast",
            "backward",
            "capture",
            "checkpoints_dir",
            "config",
            "data_dir",
            "device",
            "dp_rank",
            "dp_size",
            "end",
            "epoch",
            "epochs",
            "evaluate",
            "experiment",
            "folder",
            "gather",
            "group",
            "identity",
            "is_rank_zero",
            "join",
            "loader",
            "local_rank",
            "log",
            "logs_dir",
            "mean",
            "mesh",
            "params",
            "print",
            "project",
            "rank",
            "rank_zero_first",
            "report",
            "resume",
            "save",
            "scale_lr",
            "scratch_dir",
            "seed_everything",
            "settings",
            "should_stop",
            "source_dir",
            "step",
            "steps",
            "sum",
            "throughput",
            "update",
            "wandb",
            "world_size",
            "wrap",
        ]
    assert [field.name for field in dataclasses.fields(paceline.Identity)] == [
        "rank",
        "world_size",
        "local_rank",
        "local_world_size",
        "node",
        "num_nodes",
        "source",
    ]


def test_every_command_has_a_module_and_nothing_else_is_there() -> None:
    from paceline.cli.command_table import COMMANDS

    for name, (module, _) in COMMANDS.items():
        path = SOURCE / "cli" / "commands" / f"{name}.py"
        assert path.is_file(), f"the command {name!r} has no file {path}"
        assert module == name_of(path)
    for path in (SOURCE / "cli" / "commands").glob(
        "[!_]*.py"
    ):  # a subcommand begins with its command
        assert path.stem.split("_")[0] in COMMANDS, path
