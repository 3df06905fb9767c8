"""Options that several verbs share, and what is common to commands that take a script."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from paceline.errors import UsageError
from paceline.spec import Flag, Program

F = TypeVar("F", bound=Callable[..., Any])

Words = Annotated[
    list[str] | None, typer.Argument(metavar="train.py [ARGS]", help="The script, and all that is its own.")
]
Module = Annotated[
    bool, typer.Option("-m", "--module", help="The script is a module's name, as in python -m.")
]
Config = Annotated[
    Path | None, typer.Option("--config", help="The file to read instead of the nearest paceline.toml.")
]
ClusterProfile = Annotated[
    str | None,
    typer.Option("--cluster-profile", metavar="NAME", help="Which [profiles.NAME] of the file to use."),
]
Style = Annotated[
    str | None, typer.Option("--style", help="What starts the ranks: fork, torchrun, spawn, ...")
]
Nproc = Annotated[int | None, typer.Option("--nproc", metavar="N", help="Ranks per node.")]
Cpu = Annotated[bool, typer.Option("--cpu", help="Leave GPUs alone.")]
Backend = Annotated[
    str | None, typer.Option("--backend", help="The process group's backend: nccl, gloo, ...")
]
Env = Annotated[
    list[str] | None, typer.Option("--env", metavar="K=V", help="A variable for the ranks (again for more).")
]
Param = Annotated[
    list[str] | None,
    typer.Option("--param", metavar="K=V", help="A hyper-parameter: run.params.K (again for more)."),
]
Experiment = Annotated[str | None, typer.Option("--experiment", help="The folder that groups runs.")]
Name = Annotated[str | None, typer.Option("--name", help="A name for the run.")]
Precision = Annotated[str | None, typer.Option("--precision", help="fp32, bf16 or fp16.")]
Seed = Annotated[int | None, typer.Option("--seed", help="The seed of everything.")]
Profile = Annotated[
    str | None,
    typer.Option("--profile", metavar="A:B", help="Profile steps A to B; the trace is in the run folder."),
]
MaxSteps = Annotated[
    int | None, typer.Option("--max-steps", metavar="N", help="End the training after N steps.")
]
StartFrom = Annotated[
    str | None, typer.Option("--start-from", metavar="RUN", help="Begin with another run's checkpoint.")
]
HangTimeout = Annotated[
    str | None,
    typer.Option(
        "--hang-timeout", metavar="TIME", help="Ranks silent for so long count as hung, such as 10m."
    ),
]
Preload = Annotated[
    list[str] | None,
    typer.Option("--preload", metavar="MODULE", help="Import it once, before the ranks are forked."),
]
Tee = Annotated[str | None, typer.Option("--tee", help="Whose lines to print: 0, all or none.")]
Debug = Annotated[bool, typer.Option("--debug", help="Debugging output of NCCL and torch.distributed.")]
Data = Annotated[
    list[str] | None,
    typer.Option("--data", metavar="PATH", help="Copy it to each node's own disk first (again for more)."),
]
Wandb = Annotated[
    bool | None,
    typer.Option("--wandb/--no-wandb", help="Log to W&B, or leave it alone whatever the script asks."),
]
WandbProject = Annotated[
    str | None, typer.Option("--wandb-project", metavar="NAME", help="Log to this project of W&B.")
]
WandbGroup = Annotated[
    str | None, typer.Option("--wandb-group", metavar="NAME", help="The group of the W&B run.")
]
WandbAllProcesses = Annotated[
    bool,
    typer.Option("--wandb-all-processes", help="Each rank logs a W&B run of its own, all in one group."),
]
Tensorboard = Annotated[
    bool, typer.Option("--tensorboard", help="Write TensorBoard's files too, below the run folder.")
]
NoSnapshot = Annotated[bool, typer.Option("--no-snapshot", help="Keep no copy of the code.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and do nothing.")]


def takes_a_script(function: F) -> F:
    """Mark a command whose options end where the user's script begins."""
    function.takes_a_script = True  # type: ignore[attr-defined]
    return function


def find_program(words: Sequence[str] | None, *, is_module: bool, cwd: Path) -> Program:
    """The script or module that was typed, checked to be there."""
    if not words:
        raise UsageError(
            "there is no script to start", hint="such as: paceline run --nproc 2 train.py --lr 0.1"
        )
    name, args = words[0], tuple(words[1:])
    if is_module:
        return Program(name, args, is_module=True)
    path = cwd / name
    if path.is_dir():
        raise UsageError(
            f"{name} is a folder, expected a script", hint=f"name a file in it, such as {name}/train.py"
        )
    if not path.is_file():
        raise UsageError(f"there is no script {name!r} in {cwd}", hint=_nearby(path))
    if not os.access(path, os.R_OK):
        raise UsageError(
            f"the script {name!r} cannot be read", hint=f"mend its permissions: chmod u+r {name}"
        )
    return Program(os.path.normpath(name), args)


def _nearby(path: Path) -> str:
    import difflib

    try:
        scripts = sorted(entry.name for entry in path.parent.iterdir() if entry.suffix == ".py")
    except OSError:
        return f"there is no folder {path.parent}"
    close = difflib.get_close_matches(path.name, scripts, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return "options of Paceline come before the script, the script's own after it; use -m for a module"


def tracking_flags(
    *, wandb: bool | None, project: str | None, group: str | None, all_processes: bool, tensorboard: bool
) -> list[Flag]:
    """The flags of trackers. Who names a project, a group or all processes wants W&B."""
    named = {"--wandb-project": project, "--wandb-group": group, "--wandb-all-processes": all_processes}
    typed = [name for name, value in named.items() if value]
    if wandb is False and typed:
        raise UsageError(f"--no-wandb and {typed[0]} contradict each other", hint="leave one of them out")
    on = wandb if wandb is not None else True if typed else None
    return [
        Flag("--no-wandb" if wandb is False else "--wandb", "tracking.wandb", on),
        Flag("--wandb-project", "tracking.wandb_project", project),
        Flag("--wandb-group", "tracking.wandb_group", group),
        Flag("--wandb-all-processes", "tracking.wandb_all_processes", all_processes or None),
        Flag("--tensorboard", "tracking.tensorboard", tensorboard or None),
    ]


def parse_variables(texts: Sequence[str] | None) -> dict[str, str] | None:
    """`--env K=V` texts as variables; `--env K` takes the value that is set here."""
    if not texts:
        return None
    variables = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            if name not in os.environ:
                raise UsageError(
                    f"--env {name}: there is no such variable here", hint=f"write --env {name}=VALUE"
                )
            value = os.environ[name]
        variables[name] = value
    return variables


# What each option sets in paceline.toml's tables, by the name of its parameter. `--no-X` sets it to false.
KEYS = {
    "nodes": "job.nodes", "gpus": "job.gpus_per_node", "gpu_type": "job.gpu_type", "cpus_per_gpu": "job.cpus_per_gpu",
    "mem_per_gpu": "job.mem_per_gpu", "mem_per_node": "job.mem_per_node", "time": "job.time",
    "partition": "job.partition", "account": "job.account", "qos": "job.qos", "constraint": "job.constraint",
    "reservation": "job.reservation", "nodelist": "job.nodelist", "exclude": "job.exclude",
    "exclusive": "job.exclusive", "comment": "job.comment", "mail": "job.mail", "sbatch_arg": "job.extra",
    "name": "job.name",
    "style": "launch.style", "nproc": "launch.nproc", "preload": "launch.preload", "tee": "launch.tee",
    "debug": "launch.debug", "no_check": "launch.check",
    "cpu": "runtime.cpu", "backend": "runtime.backend", "precision": "runtime.precision", "seed": "runtime.seed",
    "max_steps": "runtime.max_steps", "profile": "runtime.profile", "start_from": "runtime.start_from",
    "env": "environment.variables", "experiment": "project.experiment", "no_snapshot": "project.snapshot",
    "hang_timeout": "resume.hang_timeout", "max_attempts": "resume.max_attempts", "grace": "resume.grace",
    "no_requeue": "resume.requeue", "data": "data.stage",
}  # fmt: skip


def flags_of(**typed: Any) -> list[Flag]:
    """The options of a verb as they were typed, each by the name of its parameter."""
    found = []
    for name, value in typed.items():
        if value is False or value == [] or value is None:  # a switch or a list that was not typed
            continue
        meant = False if name.startswith("no_") else parse_variables(value) if name == "env" else value
        found.append(Flag(f"--{name.replace('_', '-')}", KEYS[name], meant))
    return found
