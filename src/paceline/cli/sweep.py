"""`paceline sweep`: many runs, each a point of a search space."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import options, single_command
from paceline.cli.submit import option
from paceline.cli.sweep_output import ConsoleReporter, warn_of_conflict
from paceline.contract.sweep_folder import SweepFolder
from paceline.errors import UsageError
from paceline.spec import Flag
from paceline.spec.load import read_file
from paceline.sweep.settings import SweepSettings, read_settings

# Verbs of its own: the first word, and the module whose `command` does it. Anything else starts a sweep.
WORDS = {
    "show": "paceline.cli.sweep_show",
    "cancel": "paceline.cli.sweep_cancel",
}


def app(*, args: list[str], prog_name: str, standalone_mode: bool) -> Any:
    """What typer would make of a group, with `paceline sweep FILE` as what it does by itself."""
    if args and args[0] in WORDS:
        function = importlib.import_module(WORDS[args[0]]).command
        return single_command(function)(
            args=args[1:], prog_name=f"{prog_name} {args[0]}", standalone_mode=standalone_mode
        )
    return single_command(command)(args=args, prog_name=prog_name, standalone_mode=standalone_mode)


def command(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="sweep.toml, a list of command lines (.txt), W&B's sweep.yml, or a sweep's name.",
        ),
    ],
    *,
    count: Annotated[int | None, option("--count", "How many points.", metavar="N")] = None,
    parallel: Annotated[int | None, option("--parallel", "Trials at the same time.", metavar="K")] = None,
    seeds: Annotated[
        int | None, option("--seeds", "Runs of each point, with a seed each.", metavar="S")
    ] = None,
    local: Annotated[bool, option("--local", "On this machine instead of Slurm.")] = False,
    pack: Annotated[int | None, option("--pack", "Small trials that share one job.", metavar="N")] = None,
    resubmit: Annotated[
        str | None,
        option(
            "--resubmit", "Run trials again: those that failed, or are missing.", metavar="failed|missing"
        ),
    ] = None,
    wandb_sweep: Annotated[
        str | None,
        option("--wandb-sweep", "Points come from this sweep of W&B.", metavar="ENTITY/PROJECT/ID"),
    ] = None,
    metric: Annotated[str | None, option("--metric", "The number to look at.")] = None,
    script: Annotated[
        str | None, option("--script", "The script, where a list has only its arguments.")
    ] = None,
    name: Annotated[str | None, option("--name", "The sweep's name; else the file's.")] = None,
    nodes: Annotated[int | None, option("--nodes", "Nodes of each trial.", metavar="N")] = None,
    gpus: Annotated[int | None, option("--gpus", "GPUs on each node of a trial.", metavar="N")] = None,
    gpu_type: Annotated[str | None, option("--gpu-type", "Their model, as the cluster calls it.")] = None,
    cpus_per_gpu: Annotated[
        int | None, option("--cpus-per-gpu", "Cores per GPU (else a fair share).")
    ] = None,
    mem_per_gpu: Annotated[str | None, option("--mem-per-gpu", "Memory per GPU.", metavar="32G")] = None,
    mem_per_node: Annotated[str | None, option("--mem-per-node", "Memory per node.", metavar="256G")] = None,
    time: Annotated[str | None, option("--time", "The time limit of a trial.", metavar="2h")] = None,
    partition: Annotated[str | None, option("--partition", "The partition, or several with commas.")] = None,
    account: Annotated[str | None, option("--account", "The account that pays.")] = None,
    qos: Annotated[str | None, option("--qos", "The quality of service.")] = None,
    constraint: Annotated[str | None, option("--constraint", "Features that the nodes must have.")] = None,
    exclude: Annotated[str | None, option("--exclude", "Nodes that must not be used.")] = None,
    exclusive: Annotated[bool, option("--exclusive", "Share the nodes with nobody.")] = False,
    sbatch_arg: Annotated[
        list[str] | None,
        option("--sbatch-arg", "A further argument of sbatch (again for more).", metavar="ARG"),
    ] = None,
    style: options.Style = None,
    nproc: options.Nproc = None,
    cpu: options.Cpu = False,
    env: options.Env = None,
    param: options.Param = None,
    experiment: options.Experiment = None,
    max_steps: options.MaxSteps = None,
    max_attempts: Annotated[
        int | None, option("--max-attempts", "Failures before a trial is given up.", metavar="N")
    ] = None,
    config: options.Config = None,
    cluster_profile: options.ClusterProfile = None,
    no_snapshot: options.NoSnapshot = False,
    no_check: Annotated[bool, option("--no-check", "Do not look for problems first.")] = False,
    dry_run: options.DryRun = False,
) -> int:
    """Start many runs: every point of a grid, points at random, or points that TPE chooses.

    \b
    paceline sweep sweep.toml                      as job arrays on Slurm
    paceline sweep --local --count 4 sweep.toml    here, the first four points
    paceline sweep --parallel 8 --seeds 5 sweep.toml
    paceline sweep --pack 4 --gpus 1 sweep.toml    four trials share a node
    paceline sweep experiment_configurations.txt   one command line per line
    paceline sweep sweep.yml                       W&B's own file; its agents are tasks of a job array
    paceline sweep --wandb-sweep me/digits/ab12 --parallel 4 --count 10 train.py
    paceline sweep --resubmit failed NAME          those that failed, once more
    paceline sweep --count 100 sweep.toml          typed again: adds what is not there yet
    paceline sweep show NAME                       its trials, best first
    paceline sweep cancel NAME                     end it, and keep it ended

    Each trial is a run of its own, with checkpoints, requeue and resume. Its point is in run.params, and follows the
    script as --key value.
    """
    if resubmit not in (None, "failed", "missing"):
        raise UsageError(f"--resubmit: found {resubmit!r}, expected failed or missing")
    path, known = find_file(file)
    typed = [
        *(said_before(known, path) if known else ()),
        Flag("--count", "count", count),
        Flag("--parallel", "parallel", parallel),
        Flag("--seeds", "seeds", seeds),
        Flag("--pack", "pack", pack),
        Flag("--wandb-sweep", "wandb_sweep", wandb_sweep),
        Flag("--metric", "metric", metric),
        Flag("--script", "script", script),
        Flag("--name", "name", name),
    ]
    experiment = experiment or (known.path.parent.name if known else None)
    flags = options.flags_of(
        nodes=nodes, gpus=gpus, gpu_type=gpu_type, cpus_per_gpu=cpus_per_gpu, mem_per_gpu=mem_per_gpu,
        mem_per_node=mem_per_node, time=time, partition=partition, account=account, qos=qos,
        constraint=constraint, exclude=exclude, exclusive=exclusive, sbatch_arg=sbatch_arg, style=style,
        nproc=nproc, cpu=cpu, env=env, experiment=experiment, max_steps=max_steps, max_attempts=max_attempts,
        no_snapshot=no_snapshot, no_check=no_check,
    )  # fmt: skip
    settings = read_settings(
        path, typed=typed, flags=flags, params=param or (), config=config, profile=cluster_profile
    )
    warn_of_conflict(settings, path, wandb_sweep)
    check_scripts(settings)
    from paceline.sweep.local import LocalSweep
    from paceline.sweep.slurm import SlurmSweep

    start = (LocalSweep if local else SlurmSweep)(settings, ConsoleReporter())
    if dry_run:
        print(start.describe(resubmit))
        return 0
    return start.run(resubmit)


def find_file(word: str) -> tuple[Path, SweepFolder | None]:
    """A file; or a sweep by its name, and the file that it was started from."""
    path = Path(word)
    if path.is_file():
        return path, None
    if path.suffix in (".toml", ".txt", ".yml", ".yaml", ".py"):
        raise UsageError(
            f"there is no file {word!r} here", hint="`paceline sweep --help` shows what it holds"
        )
    from paceline.cli import runs
    from paceline.sweep.results import find_sweep

    sweep = find_sweep(word, runs.scratch_here())
    known = Path(sweep.read_search().file)
    if not known.is_file():
        raise UsageError(
            f"the sweep {sweep.name!r} was started from {known}, which is gone", hint="name its file instead"
        )
    return known, sweep


def said_before(sweep: SweepFolder, path: Path) -> list[Flag]:
    """What the file alone does not say of a sweep that was named: it may have been typed when it was started."""
    search, who = sweep.read_search(), f"the sweep {sweep.name}"
    written = read_file(path).get("sweep", {}) if path.suffix == ".toml" else {}
    found = [Flag(who, "name", search.name), Flag(who, "wandb_sweep", search.wandb_sweep or None)]
    found.append(Flag(who, "script", search.script or None))
    if "metric" not in written:
        found.append(Flag(who, "metric", search.metric))
    if search.sampler in ("random", "tpe") and "count" not in written:
        found.append(Flag(who, "count", len({point.group for point in sweep.read_points()})))
    if search.sampler == "wandb":
        found.append(Flag(who, "parallel", search.parallel))
        each = math.ceil(len(sweep.read_points()) / (search.parallel or 1))
        found.append(Flag(who, "count", each))
    return found


def check_scripts(settings: SweepSettings) -> None:
    """Every script that trials would start is there."""
    program = settings.job.program
    for name in settings.scripts:
        options.find_program([name], is_module=program.is_module, cwd=settings.job.cwd)
