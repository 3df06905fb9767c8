"""`paceline sweep`: many runs, each a point of a search space; `sweep show` and `sweep cancel`."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from paceline.cli import console, runs, typer_options
from paceline.cli.console import Column, fit, print_columns
from paceline.contract.environment_file import forget_secrets
from paceline.contract.files import is_standard_output, write_output
from paceline.contract.foreign_records import read_fields
from paceline.contract.run_folder import RunFolder, write_atomically
from paceline.contract.sweep_folder import DONE, FAILED, SweepFolder
from paceline.errors import UsageError
from paceline.slurm import commands as slurm
from paceline.slurm import squeue_and_sacct
from paceline.spec.option import LAUNCH, PROJECT, RESOURCES, SWEEP, Flag
from paceline.spec.quantities import show_seconds
from paceline.spec.settings import TABLE, options_of
from paceline.spec.shell_text import cluster, quote, to_type
from paceline.sweep.folder import find_pids
from paceline.sweep.report import make_sweep_overview, to_csv
from paceline.sweep.results import (
    MISSING,
    PENDING,
    RUNNING,
    Row,
    Sweep,
    best_first,
    find_own_sweep,
    find_sweep,
    has_repeats,
    read_sweep,
    rows,
    to_label,
    value_text,
)

if TYPE_CHECKING:
    from paceline.sweep.settings import SweepSettings

# Keys whose flags set `[sweep]`, and not the settings of trials.
OWN_KEYS = {option.key for option in TABLE[SWEEP]}
COLOURS = {
    "done": "green",
    "pruned": "grey50",
    "failed": "red",
    "missing": "yellow",
    "running": "cyan",
    "pending": "grey30",
}
MAX_FAILURES = 10  # different reasons to show


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
    sweep = (LocalSweep if local else SlurmSweep)(load(file, settings, here=local))
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
    flag, used = own.get("tracking.wandb_sweep"), found.search.wandb_sweep
    if flag and flag.value != used:
        console.say_note(f"{flag.name} is {flag.value}, but {path} or its settings name {used}")
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
    from paceline.spec.settings import read_file

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


# -- sweep show ------------------------------------------------------------------------------------


def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="The sweep's name or its prefix, its folder, or `last`."
        ),
    ] = "last",
    *,
    count: Annotated[int, typer.Option("-n", "--count", help="Show N rows; 0 shows all.")] = 20,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write all trials to FILE.")
    ] = None,
    as_json: typer_options.AsJson = False,
) -> int:
    """Show a sweep: its trials, best first, its progress and its failures.

    \b
      paceline sweep show                          the newest sweep
      paceline sweep show digits --csv digits.csv  all trials, for other programs
      paceline report digits -o digits.html        one page: Optuna's figures, and a table that sorts and filters
    """
    sweep = read_sweep(find_sweep(name, runs.scratch_here()))
    if csv is not None:
        typer_options.require_folder(csv)
        write_output(csv.absolute(), to_csv(sweep))
        say = console.say_note if is_standard_output(csv) else print
        say(f"wrote the trials to {csv}")
    if as_json:
        console.print_json(
            sweep=make_sweep_overview(sweep).to_json(),
            trials=[trial.to_json() for trial in sweep.trials],
        )
    elif csv is None:
        _print(sweep, best_first(sweep, rows(sweep)), count)
    return 0


def _print(sweep: Sweep, ordered: list[Row], count: int) -> None:
    """Print how far the sweep is, its rows, and its failures."""
    out = console.console()
    listed = ordered if count <= 0 else ordered[:count]
    shown, dropped = fit(_columns(sweep, listed), out.width)
    aim = "larger" if sweep.maximizes else "smaller"
    counts = " · ".join(f"{number:,} {state}" for state, number in sweep.counts.items())
    head = f"  {sweep.metric}, {aim} is better\n{sweep.folder.path}"
    out.print(Text.assemble((console.printable(sweep.name), "bold"), console.printable(head)))
    out.print(f"{counts} of {len(sweep.trials):,}\n")
    print_columns(out, shown)
    if dropped:
        names = ", ".join(column.title for column in dropped)
        out.print(f"[dim]hidden columns: {names} (write all: --csv FILE)[/]")
    if len(listed) < len(ordered):
        more = f"… and {len(ordered) - len(listed):,} more (-n 0 shows all, --csv FILE writes them)"
        out.print(f"[dim]{more}[/]")
    for line in _failures(sweep):
        out.print(line)


def _columns(sweep: Sweep, listed: Sequence[Row]) -> list[Column]:
    """Return the columns of the table. In a narrow terminal, parameters drop out: first those that never vary."""
    repeats = has_repeats(sweep)
    varying = {key for key in sweep.keys if len({str(row.point.get(key)) for row in listed}) > 1}
    parameters = [
        Column(console.cell(key), 1 + at, wraps_at=10)
        if key in varying
        else Column(console.cell(key), 1 + at + len(sweep.keys))
        for at, key in enumerate(sweep.keys)
    ]
    columns = [
        Column("TRIAL"),
        Column("STATE", wraps_at=9),
        Column(console.cell(sweep.metric), justify="left" if repeats else "right"),
        *parameters,
        Column("TIME", rank=1 + 2 * len(sweep.keys)),
    ]
    for row in listed:
        numbers = [str(trial.number) for trial in row.trials]
        cells = (
            ",".join(numbers[:4]) + ",…" * (len(numbers) > 4),
            f"[{COLOURS[row.state]}]{row.status}[/]",
            value_text(row),
            *(
                console.cell(to_label(row.point[key])) if key in row.point else ""
                for key in sweep.keys
            ),
            "" if row.seconds is None else show_seconds(row.seconds),
        )
        for column, text in zip(columns, cells, strict=True):
            column.cells.append(text)
    return columns


def _failures(sweep: Sweep) -> list[Text]:
    """Return which trials failed, are missing or have no value, grouped by reason, and how to run them again."""
    lines: list[Text] = []
    for state in (DONE, FAILED, MISSING):
        reasons: dict[str, list[str]] = {}
        for trial in sweep.trials:
            if trial.state == state and (state != DONE or trial.error):
                error = trial.error or "no error recorded"
                reasons.setdefault(error, []).append(str(trial.number))
        if reasons:
            title = "done, without a value" if state == DONE else state
            lines.append(Text(f"\n{title}", "dim"))
        most_first = sorted(reasons.items(), key=lambda each: -len(each[1]))
        for error, numbers in most_first[:MAX_FAILURES]:
            more = f", … ({len(numbers):,})" if len(numbers) > 6 else ""
            trials = f"trial {', '.join(numbers[:6])}{more}: "
            lines.append(Text.assemble((trials, COLOURS[state]), console.printable(error)))
        if reasons and state != DONE:
            again = f"sweep {_local(sweep)}--resubmit {state} {quote(sweep.name)}"
            lines.append(Text(f"run again: {to_type(again)}", "dim"))
    return lines


def _local(sweep: Sweep) -> str:
    """Return the option that runs trials here, if the newest submission did so."""
    found = sweep.folder.submission(1).parent.glob("[0-9]*/run.json")
    newest = max(found, key=lambda path: int(path.parent.name), default=None)
    is_local = newest is not None and read_fields(newest).get("backend") == "local"
    return "--local " if is_local and not cluster() else ""


# -- sweep cancel ----------------------------------------------------------------------------------


def cancel(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The sweep's name or folder, or `last`.")
    ],
) -> int:
    """Cancel a sweep: stop its running trials, and start no more.

    It stays cancelled until you continue it: paceline sweep --resubmit missing NAME
    """
    sweep = find_own_sweep(name, runs.scratch_here())
    pids = {pid for path in sweep.trials.glob("*") for pid in find_pids(RunFolder(path))}
    counts = read_sweep(sweep, squeue_and_sacct.states).counts
    if counts and not pids and not counts.keys() & {RUNNING, PENDING, MISSING}:
        ended = ", ".join(f"{count:,} {state}" for state, count in counts.items())
        print(f"{sweep.name} has already ended: {ended}")
        return 0
    # Marked first, so that no trial starts in the meantime.
    write_atomically(sweep.cancelled, f"{time.time():.0f}\n")
    for pid in pids:
        with suppress(ProcessLookupError):  # it just ended
            os.kill(pid, signal.SIGTERM)  # it stops the agents of its trials
    jobs = {str(line["job"]) for line in sweep.read_jobs()}
    # The folder of a trial that continues in another job names that job.
    others = {job for path in sweep.trials.glob("*/job") if (job := path.read_text().strip())}
    jobs |= {job for job in others if job.partition("_")[0] not in jobs}
    if jobs:
        slurm.cancel_jobs(sorted(jobs))
    for path in sweep.path.glob("submissions/*/environment.sh"):
        forget_secrets(path)
    print(f"cancelled {sweep.name}")
    return 0
