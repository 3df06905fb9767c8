"""`paceline sweep`: many runs, each a point of a search space."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import console, typer_options
from paceline.contract.sweep_folder import DONE, FAILED, SweepFolder
from paceline.errors import UsageError
from paceline.spec.option import LAUNCH, PROJECT, RESOURCES, SWEEP
from paceline.spec.settings import TABLE, options_of
from paceline.spec.typed_flags import Flag

if TYPE_CHECKING:
    from paceline.sweep.settings import SweepSettings

# Keys whose flags set `[sweep]`, and not the settings of trials.
OWN_KEYS = {option.key for option in TABLE[SWEEP]}


@typer_options.takes_settings("sweep", shown=(SWEEP, RESOURCES, LAUNCH, PROJECT))
def command(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="sweep.toml, a list of command lines (.txt), or the name of a sweep.",
        ),
    ],
    *,
    settings: typer_options.Settings,
    local: Annotated[
        bool,
        typer.Option(
            "--local", help="Run on this machine instead of Slurm.", rich_help_panel=SWEEP
        ),
    ] = False,
    resubmit: Annotated[
        str | None,
        typer.Option(
            "--resubmit",
            metavar="failed|missing",
            help="Rerun failed or missing trials of this sweep.",
            rich_help_panel=SWEEP,
        ),
    ] = None,
    dry_run: typer_options.DryRun = False,
) -> int:
    """Start many runs: every point of a grid, random points, or points that TPE chooses.

    Each trial is a full run, with checkpoints, requeue and resume. Its point is in run.params, and is passed to
    the script as --key value. All settings of `paceline submit` work here too, for each trial.

    \b
      paceline sweep sweep.toml                      as job arrays on Slurm
      paceline sweep --local --count 4 sweep.toml    here, the first four points
      paceline sweep --pack 4 --gpus 1 sweep.toml    four trials share a node
      paceline sweep experiment_configurations.txt   one command line per line
      paceline sweep --wandb-sweep me/digits/ab12 --parallel 4 --count 10 train.py
      paceline sweep --resubmit failed NAME          run failed trials again
      paceline sweep --count 100 sweep.toml          again: adds the trials that are missing
      paceline sweep show NAME                       its trials, best first
      paceline sweep cancel NAME                     cancel it
    """
    from paceline.sweep.local_sweep import LocalSweep
    from paceline.sweep.slurm_sweep import SlurmSweep

    if resubmit not in (None, "failed", "missing"):
        raise UsageError(f'Invalid --resubmit "{resubmit}": use failed or missing.')
    known = OWN_KEYS | {option.key for _, option in options_of("run")}
    others = [flag.name for flag in settings.flags if flag.key not in known]
    if local and others:
        raise UsageError(
            f"{others[0]} applies to jobs on Slurm, not to a sweep with --local.", hint="Omit it."
        )
    sweep = (LocalSweep if local else SlurmSweep)(
        load(file, settings, here=local), ConsoleReporter()
    )
    if dry_run:
        print(sweep.describe(resubmit))
        return 0
    return sweep.run(resubmit)


def load(file: str, settings: typer_options.Settings, *, here: bool) -> SweepSettings:
    """Load a sweep: its file, and what was typed. With `here`, its trials run on this machine."""
    from paceline.sweep.settings import read_settings

    path, known = find_file(file)
    own = {flag.key: flag for flag in settings.flags if flag.key in OWN_KEYS}
    typed = [
        *(flags_of_sweep(known, path) if known else ()),
        *(replace(flag, key=key.split(".")[1]) for key, flag in own.items()),
    ]
    flags = [flag for flag in settings.flags if flag.key not in OWN_KEYS]
    if known and not any(flag.key == "project.experiment" for flag in flags):
        flags.append(Flag("--experiment", "project.experiment", known.path.parent.name))
    found = read_settings(
        path,
        typed=typed,
        flags=flags,
        params=settings.params,
        config=settings.config,
        profile=settings.profile,
        cluster=typer_options.this_cluster(here=here),
    )
    if not here:
        settings.note_profile(found.job)
    typed_sweep = own["tracking.wandb_sweep"].value if "tracking.wandb_sweep" in own else None
    used = found.search.wandb_sweep
    if typed_sweep not in (None, used):
        console.say_note(f"--wandb-sweep is {typed_sweep}, but {path} or its settings name {used}")
    program = found.job.program
    for name in found.scripts:  # all of them exist
        typer_options.find_program([name], is_module=program.is_module, cwd=found.job.cwd)
    return found


def find_file(name: str) -> tuple[Path, SweepFolder | None]:
    """Return a file; or a sweep that was named, and the file it was started from."""
    path = Path(name)
    if path.is_file():
        return path, None
    if path.suffix in (".toml", ".txt", ".yml", ".yaml", ".py"):
        raise UsageError(
            f"There is no file {name!r} here.", hint="See the examples of `paceline sweep --help`."
        )
    from paceline.cli import runs
    from paceline.sweep.results import find_own_sweep

    sweep = find_own_sweep(name, runs.scratch_here())
    known = Path(sweep.read_search().file)
    if not known.is_file():
        raise UsageError(
            f"The sweep {sweep.name!r} was started from {known}, which is gone.",
            hint="Name its file instead.",
        )
    return known, sweep


def flags_of_sweep(sweep: SweepFolder, path: Path) -> list[Flag]:
    """Return what a sweep has and its file has not: flags that were typed when it was started."""
    from paceline.spec.toml import read_file

    search, points = sweep.read_search(), sweep.read_points()
    written = read_file(path).get("sweep", {}) if path.suffix == ".toml" else {}
    found: dict[str, Any] = {"name": search.name, "wandb_sweep": search.wandb_sweep or None}
    found["script"] = search.script or None
    if "metric" not in written:
        found["metric"] = search.metric
    if search.sampler in ("random", "tpe") and "count" not in written:
        found["count"] = len({point.group for point in points})
    if search.sampler == "wandb":
        found["parallel"] = search.parallel
        found["count"] = math.ceil(len(points) / (search.parallel or 1))
    return [Flag(f"the sweep {sweep.name}", key, value) for key, value in found.items()]


class ConsoleReporter:
    """Prints what a sweep reports."""

    def line(self, text: str) -> None:
        print(text, flush=True)

    def note(self, text: str) -> None:
        console.say_note(text)

    def trial(self, text: str, state: str) -> None:
        colour = {DONE: console.GREEN, FAILED: console.RED}.get(state, console.GREY)
        console.say(f"paceline: {text}", colour=colour)
