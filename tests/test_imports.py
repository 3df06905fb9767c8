"""Imports point one way, the launch half starts without torch, and the public surface is what it was."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

SOURCE = Path(paceline.__file__).parent
FOUNDATION = {"contract", "errors"}

# Each room, and the rooms that it may import besides itself and the foundation.
MAY_IMPORT = {
    "contract": set(),
    "errors": set(),
    "spec": set(),
    "plan": {"spec"},
    "cluster": {"spec", "plan"},
    "watch": {"spec", "plan", "cluster"},
    "sandbox": {"spec", "plan", "cluster", "watch"},
    "sweep": {"spec", "plan", "cluster", "watch"},
    "cli": {"spec", "plan", "cluster", "watch", "sandbox", "sweep"},
    "agent": set(),
    "runtime": set(),
    "wandb": {"runtime"},  # the public module of that name
}

# Single modules that may be imported across the halves, each free of torch.
BRIDGES = {
    (
        "__main__",
        "paceline.agent.workers.zygote.prestart",
    ),  # the zygote that `paceline run` starts ahead of itself
    ("__main__", "paceline.cli"),
    ("sweep", "paceline.agent.trial"),  # trials on this machine are opened as jobs open theirs
    ("cli", "paceline.agent.staging"),
    ("cluster", "paceline.agent.staging"),  # `data stage`, `clean` and checks do here what agents do on nodes
}

CALLS_SUBPROCESS = {"cluster", "sandbox", "agent"}


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Full names of what a file imports, also inside functions; not what only type checkers see."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", files(), ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_imports_point_one_way(path: Path) -> None:
    room = room_of(path)
    for name in imported(path):
        parts = name.split(".")
        if parts[0] != "paceline" or (
            not (SOURCE / parts[-1]).with_suffix(".py").exists() and len(parts) < 2
        ):
            continue
        target = parts[1] if len(parts) > 1 else ""
        if not target or not ((SOURCE / target).is_dir() or (SOURCE / f"{target}.py").is_file()):
            continue  # somebody else's, or a name of the package itself, such as __version__
        allowed = {room, *FOUNDATION, *MAY_IMPORT.get(room, set())}
        bridged = any(room == who and f"{name}.".startswith(f"{module}.") for who, module in BRIDGES)
        assert target in allowed or bridged, f"{room} imports {name}"


def test_only_runtime_imports_torch_and_only_some_rooms_start_processes() -> None:
    for path in files():
        room, names = room_of(path), {name.split(".")[0] for name in imported(path)}
        if room not in ("runtime", "agent"):
            assert "torch" not in names, path
        if room not in CALLS_SUBPROCESS:
            assert "subprocess" not in names, path


def test_node_needs_the_standard_library_only() -> None:
    for path in files():
        if room_of(path) not in ("agent", *FOUNDATION):
            continue
        roots = {name.split(".")[0] for name in imported(path)}
        # The zygote and the ranks import torch for the script, where the script's Python has it.
        outside = roots - set(sys.stdlib_module_names) - {"paceline", "torch", "numpy", "optuna"}
        assert not outside, f"{path} imports {outside}"


@pytest.mark.parametrize(
    "code",
    [
        "import paceline",
        "import paceline.cli",
        "import importlib, paceline.cli\nfor module, _ in paceline.cli.VERBS.values(): importlib.import_module(module)",
        "import sys; sys.argv = ['paceline', '--help']; from paceline.__main__ import main\n"
        "try: main()\nexcept SystemExit as end: assert not end.code",
        "import paceline.agent",
    ],
)  # fmt: skip
def test_torch_is_not_imported(code: str) -> None:
    check = f"{code}\nimport sys; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_imports_nothing_heavy() -> None:
    check = (
        "import sys; sys.argv = ['paceline', '--help']; from paceline.__main__ import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "heavy = {'pydantic', 'typer', 'rich', 'psutil', 'asyncio'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "paceline run train.py" in done.stdout


def test_the_public_surface_is_what_it_was() -> None:
    assert paceline.__all__ == [
        "Identity", "PacelineError", "Run", "ShardedIterable", "Tracker", "read_identity", "report", "seed_everything",
        "session", "spawn", "wandb", "__version__",
    ]  # fmt: skip
    assert dir(paceline) == sorted(paceline.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        paceline.nothing  # noqa: B018


def test_a_run_has_these_public_attributes() -> None:
    with paceline.session(cpu=True, report=False) as run:
        assert [name for name in dir(run) if not name.startswith("_")] == [
            "autocast", "backward", "checkpoints_dir", "data_dir", "device", "epoch", "epochs", "evaluate",
            "experiment", "folder", "group", "identity", "is_rank_zero", "join", "loader", "local_rank", "log",
            "logs_dir", "mean", "params", "print", "project", "rank", "rank_zero_first", "report", "resume", "save",
            "scratch_dir", "seed_everything", "settings", "should_stop", "source_dir", "step", "steps", "sum", "update",
            "wandb", "world_size", "wrap",
        ]  # fmt: skip
    assert [field.name for field in dataclasses.fields(paceline.Identity)] == [
        "rank", "world_size", "local_rank", "local_world_size", "node", "num_nodes", "source",
    ]  # fmt: skip


def test_every_verb_is_there_and_has_help() -> None:
    from paceline.cli import VERBS

    for name, (module, _) in VERBS.items():
        path = SOURCE.parent / (module.replace(".", "/") + ".py")
        assert path.is_file(), f"the verb {name!r} names {module}, which does not exist"
