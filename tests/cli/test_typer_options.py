"""The table of options: one declaration per flag, a flag for every key, and `--help` in groups."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from paceline.cli import dispatch, run_command, typer_options
from paceline.cli.commands import doctor, env, run, shell, submit, sweep
from paceline.errors import UsageError
from paceline.spec.option import PATH, SWITCH, Option, read_flags
from paceline.spec.settings import TABLE, Tables, options_of

Paceline = Callable[..., "subprocess.CompletedProcess[str]"]

MODULES = {
    "run": run,
    "submit": submit,
    "sweep": sweep,
    "doctor": doctor,
    "shell": shell,
    "env": env,
}
ALL = [option for group in TABLE.values() for option in group]
TABLES = {name: field.annotation for name, field in Tables.model_fields.items()}


def keys() -> dict[str, Any]:
    """Every key of paceline.toml, and its type."""
    found: dict[str, Any] = {"params": dict}
    for table, kind in TABLES.items():
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= {
                f"{table}.{key}": field.annotation for key, field in kind.model_fields.items()
            }
    return found


def typed(command: str, **values: Any) -> list[tuple[Option, Any]]:
    table = {option.parameter: option for _, option in options_of(command)}
    return [(table[name], value) for name, value in values.items()]


@pytest.mark.parametrize("key", keys())
def test_every_key_has_a_flag(key: str) -> None:
    assert [
        option.flags
        for option in ALL
        if option.key == key and (option.flags or key == "project.script")
    ]


@pytest.mark.parametrize("option", ALL, ids=lambda option: option.name)
def test_every_option_sets_a_key_that_exists(option: Option) -> None:
    assert option.key in keys() or option.key.startswith("sweep.")
    assert option.help.endswith(".")
    assert option.help[0].isupper() or option.help.startswith(("online", "`"))
    if not option.flags:  # the script itself is typed, not a flag
        assert option.key == "project.script" or option.key.startswith("sweep.")
        return
    assert (option.metavar is None) == (option.kind == SWITCH)


@pytest.mark.parametrize("command", MODULES)
def test_every_flag_is_declared_once(command: str) -> None:
    """In the table, or by the one command that has it."""
    flags = Counter(flag for _, option in options_of(command) for flag in option.flags)
    assert not [flag for flag, count in flags.items() if count > 1]
    own = Counter(flags_written_in(MODULES[command]) + flags_written_in(typer_options))
    assert not [flag for flag, count in own.items() if count > 1]
    assert not set(own) & {flag for option in ALL for flag in (*option.flags, option.negative)}


def flags_written_in(module: Any) -> list[str]:
    """The flags that a module gives to typer.Option, without those of subcommands below."""
    tree = ast.parse(inspect.getsource(module).partition("\n# -- sweep show")[0])
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "typer.Option"
    ]
    texts = [arg.value for call in calls for arg in call.args if isinstance(arg, ast.Constant)]
    return [str(text) for text in texts if str(text).startswith("-")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("shell --node n1", "--node needs a run"),
        ("shell 1a2b --gpus 2", "--gpus applies to a new allocation, but 1a2b has one already"),
        ("shell --mail me", "--mail applies to `paceline submit`, not to `paceline shell`"),
        ("sync 1a2b --all", "--all cannot be combined with a run (1a2b)"),
        ("inspect data --warm train.py", "--warm applies to `paceline run`"),
    ],
)
def test_an_option_that_would_do_nothing_is_an_error(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        dispatch(line.split())


def test_a_shell_takes_any_time_limit_since_it_is_not_requeued(
    guard: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "paceline.toml").write_text('[resume]\ngrace = "10m"\n')
    monkeypatch.chdir(tmp_path)
    dispatch(["shell", "--time", "15m", "--dry-run"])
    assert "--time=00:15:00" in capsys.readouterr().out


def test_flags_are_named_as_typed() -> None:
    found = read_flags(
        typed(
            "submit", gpus="0", exclusive=True, check=False, data=["a"], env=["A=1", "B"], venv="x"
        ),
        {"B": "2"},
    )
    assert [(flag.name, flag.key, flag.value) for flag in found] == [
        ("--gpus", "job.gpus_per_node", 0),
        ("--exclusive", "job.exclusive", True),
        ("--no-check", "launch.check", False),
        ("--data", "data.stage", ["a"]),
        ("--env", "environment.variables", {"A": "1", "B": "2"}),
        ("--venv", "environment.path", "x"),
        ("--venv", "environment.kind", "venv"),
    ]
    assert found[5].path == PATH


@pytest.mark.parametrize(
    "values",
    [
        {"wandb": False, "wandb_project": "x"},
        {"wandb": False, "wandb_all_processes": True},
        {"environment": "venv", "image": "x"},
        {"venv": "a", "conda": "b"},
        {"max_attempts": "2", "max_restarts": "1"},
    ],
)
def test_contradictions_name_both_flags(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="conflict"):
        read_flags(typed("submit", **values), {})
    assert read_flags(typed("submit", wandb=False, wandb_all_processes=False), {})


@pytest.mark.parametrize("command", ["run", "submit", "sweep"])
def test_restarts_are_attempts_after_the_first(command: str) -> None:
    assert [flag.value for flag in read_flags(typed(command, max_restarts="0"), {})] == [1]
    assert [
        (flag.name, flag.key, flag.value)
        for flag in read_flags(typed(command, max_restarts="x"), {})
    ] == [("--max-restarts", "resume.max_attempts", "x")]


@pytest.mark.parametrize(
    ("text", "value"), [(" 2", 2), ("+2 ", 2), ("-1", -1), ("\u0662", "\u0662"), ("2 3", "2 3")]
)
def test_numbers_are_ascii_digits(text: str, value: object) -> None:
    assert [flag.value for flag in read_flags(typed("submit", nodes=text), {})] == [value]


JOB_ONLY = [
    "--image=x",
    "--conda=x",
    "--setup=x",
    "--load-module=x",
    "--bind=x",
    "--engine=x",
    "--engine-option=x",
    "--purge-modules",
    "--no-purge-modules",
    "--module-path=x",
    "--requirements=x",
    "--constraints=x",
    "--with-horovod",
    "--no-horovod",
    "--base-python=x",
    "--base-image=x",
    "--system-packages",
    "--proxies",
    "--gpu-binding=one",
    "--mpirun-over=ranks",
]


@pytest.mark.parametrize("arg", JOB_ONLY)
def test_run_rejects_options_of_jobs(arg: str) -> None:
    flag = arg.partition("=")[0]
    with pytest.raises(UsageError) as caught:
        run_command(["run", "--dry-run", arg, "train.py"])
    assert caught.value.message == f"{flag} applies to `paceline submit`, not to `paceline run`."


def test_typed_paths_are_right_in_a_job(paceline: Paceline, tmp_path: Path) -> None:
    """A job starts in its run folder."""
    inner = tmp_path / "inner"
    inner.mkdir()
    for name in ("train.py", "python3"):
        (inner / name).touch()
    (tmp_path / "paceline.toml").touch()
    args = [
        "--image",
        "/torch.sif",
        "--load-module",
        "cuda",
        "--module-path",
        "modules",
        "--bind",
        "data:/data:ro",
    ]
    for python, is_path in (("env/bin/python", True), ("python3", False)):
        text = paceline(
            "submit", "--dry-run", *args, "--python", python, "train.py", cwd=inner, check=True
        ).stdout
        for part in (f"module use {inner}/modules", f"--bind {inner}/data:/data:ro", python):
            assert part in text
        assert (f"{inner}/{python}" in text) == is_path


def test_short_forms_work_as_in_sbatch(paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    short = ["-N", "2", "-t", "1-12", "-p", "gpu", "-A", "me", "-J", "mine", "--gpus-per-node", "4"]
    long = ["--nodes=2", "--time=36h", "--partition=gpu", "--account=me", "--name=mine", "--gpus=4"]
    shown = [
        paceline("submit", "--dry-run", *args, "train.py", check=True).stdout
        for args in (short, long)
    ]
    lines = [{line for line in text.splitlines() if line.startswith("#SBATCH")} for text in shown]
    for line in (
        "--nodes=2",
        "--time=1-12:00:00",
        "--partition=gpu",
        "--account=me",
        "--job-name=mine",
    ):
        assert f"#SBATCH {line}" in lines[0]
    different = [
        line for line in lines[0] ^ lines[1] if "--output" not in line and "--chdir" not in line
    ]
    assert not different


def test_options_that_used_to_need_the_file(paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    args = [
        "--image",
        "/images/torch.sif",
        "--bind",
        "/data:/data:ro",
        "--load-module",
        "cuda/12.4",
        "--setup",
        "ulimit -c 0",
    ]
    shown = paceline("submit", "--dry-run", *args, "train.py", check=True).stdout
    for part in ("/images/torch.sif", "/data:/data:ro", "module load cuda/12.4"):
        assert part in shown


def test_help_shows_groups_and_examples(paceline: Paceline) -> None:
    text = paceline("submit", "--help", check=True).stdout
    groups = ["Resources:", "Launch:", "Restarts and checkpoints:", "Data:", "Trackers:", "Output:"]
    positions = [text.index(f"\n{group}") for group in groups]
    assert positions == sorted(positions)
    resources = text[positions[0] : positions[1]]
    first = [
        "-N, --nodes N",
        "--gpus, --gpus-per-node N",
        "-t, --time TIME",
        "-p, --partition",
        "-A, --account",
        "-J, --name",
    ]
    assert [resources.index(flags) for flags in first] == sorted(
        resources.index(flags) for flags in first
    )
    assert "GPUs per node (not in total" in resources
    assert text.index("Examples:") > positions[-1]


@pytest.mark.parametrize(
    ("typed", "ours"),
    {
        "--gpu": "--gpus",
        "--gres": "--gpus",
        "--ntasks-per-node": "--nproc",
        "--cpus-per-task": "--cpus-per-gpu",
        "--nnodes": "--nodes",
        "--nproc_per_node": "--nproc",
        "--max_restarts": "--max-restarts",
        "--partiton": "--partition",
        "-n": "--nproc",
        "-c": "--cpus-per-gpu",
    }.items(),
)
def test_unknown_options_suggest_what_was_meant(typed: str, ours: str) -> None:
    with pytest.raises(UsageError) as error:
        dispatch(["submit", typed, "1", "train.py"])
    assert typed in error.value.message
    assert ours in error.value.message


@pytest.mark.parametrize(
    ("command", "message", "hint"),
    [
        ("run --gpus 3 t.py", "--gpus applies to `paceline submit`, not to", "use --nproc 2"),
        ("submit --array=1-4 t.py", "No such option: --array.", "Use `paceline sweep`"),
        ("submit --master-port=1 t.py", "--master-port", "Paceline finds the nodes and a free"),
        ("submit --gpus a100:4 FILE", 'Invalid --gpus "a100:4": use a whole', "Write --gpus 4"),
        ("run --env =x FILE", "use letters, digits and _ in the name of a variable", ""),
        ("run --env --x FILE", "Invalid --env --x: the variable is not set here.", ""),
        ("run --notify-on foo FILE", 'Invalid --notify-on "foo": use one of done', ""),
        ("ui --port x", "--port", "See `paceline ui --help`"),
        ("sandbox upp", "upp", "See `paceline sandbox --help`"),
        ("run --lr 0.1 t.py", "--lr", "Options of your script go after it: paceline run train.py"),
        ("run --name --dry-run t.py", "--name needs a value, but --dry-run follows it.", ""),
        ("sumbit t.py", "There is no command 'sumbit'.", "Did you mean `paceline submit`?"),
        ("t.py --lr 1", "There is no command 't.py'.", "Did you mean `paceline run t.py`?"),
        ("status", "There is no command 'status'.", "Did you mean `paceline ps`?"),
    ],
)
def test_mistakes_are_explained(command: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as error:
        dispatch([__file__ if word == "FILE" else word for word in command.split()])
    assert message in error.value.message
    assert hint in error.value.hint


def test_the_shell_completes_commands_and_options(paceline: Paceline) -> None:
    def complete(line: str) -> list[str]:
        asked = {
            "_PACELINE_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split(" ")) - 1),
        }
        return paceline(**asked).stdout.split()

    assert complete("paceline su") == ["submit"]
    assert {"run", "submit", "ps"} <= set(complete("paceline "))
    assert "--no-requeue" in complete("paceline submit --no-r")
    assert complete("paceline sandbox kill") == ["kill-node"]
    assert "--csv" in complete("paceline sweep show --")
    assert "complete_bash" in paceline("--show-completion", "bash").stdout


def test_the_scratch_flag_wins(paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    text = paceline("run", "--dry-run", "--scratch", "elsewhere", "train.py", check=True).stdout
    assert str(tmp_path / "elsewhere") in text


@pytest.mark.parametrize("command", ["run", "submit", "run -m"])
def test_an_empty_name_is_no_script(command: str) -> None:
    with pytest.raises(UsageError, match="There is no script to run"):
        dispatch([*command.split(), ""])


def test_a_wrong_venv_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not an executable here"):
        dispatch(["run", "--venv", str(tmp_path / "nope"), __file__])


@pytest.mark.parametrize("command", ["run", "ps", "sweep", "sweep show", "env build", "data"])
def test_there_is_help_by_every_usual_name(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for typed in (
        [*command.split(), "--help"],
        [*command.split(), "-h"],
        ["help", *command.split()],
    ):
        dispatch(typed)
        texts.append(capsys.readouterr().out)
    assert texts[0].startswith(f"Usage: paceline {command} ")
    assert texts == texts[:1] * 3


def test_help_after_a_script_is_for_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    dispatch(["run", "--dry-run", __file__, "-h"])
    assert "test_typer_options.py -h\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("submit", "[OPTIONS] SCRIPT [ARGS]..."),
        ("shell", "[OPTIONS] [RUN]"),
        ("cancel", "[OPTIONS] RUN..."),
        ("sandbox exec", "[OPTIONS] NODE COMMAND..."),
    ],
)
def test_help_shows_how_to_type_a_command(paceline: Paceline, command: str, usage: str) -> None:
    text = paceline(*command.split(), "--help", check=True).stdout
    assert text.startswith(f"Usage: paceline {command} {usage}\n")


WITHOUT_PLUGINS = """
import importlib.metadata, sys
def refuse(**_):
    raise SystemExit("it reads the metadata of all packages")
importlib.metadata.entry_points = refuse
from paceline.cli import main
main(["run", "--dry-run", "--nproc", "1", "t.py"])
"""


def test_a_run_does_not_look_for_plugins_of_pydantic(tmp_path: Path) -> None:
    """It would read a file of every installed package."""
    (tmp_path / "t.py").touch()
    command = [sys.executable, "-c", WITHOUT_PLUGINS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("command", "arg", "expected"),
    [
        ("submit", "--warm", "--warm applies to `paceline run`, not to `paceline submit`."),
        (
            "prove",
            "--nproc",
            "--nproc applies to `paceline run` and `paceline submit`, not to `paceline prove`.",
        ),
    ],
)
def test_options_of_another_command_are_named(command: str, arg: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        run_command([command, arg, "train.py"])
    assert caught.value.message == expected


def test_help_says_what_applies_to_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for name in ("run", "submit", "shell"):
        dispatch([name, "--help"])
        shown[name] = capsys.readouterr().out
    assert "--cpu" in shown["shell"]
    assert ["nodes to simulate on this machine" in shown[name] for name in shown] == [
        True,
        False,
        False,
    ]
