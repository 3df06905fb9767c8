"""`paceline warm`: the processes that `paceline run --warm` keeps for the next run."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.parser import GroupedCommand
from paceline.contract.files.size import show_size
from paceline.errors import UsageError
from paceline.launch.local.warm_start import read_status
from paceline.launch.local.warm_start import stop as stop_processes
from paceline.spec.quantities import show_seconds

ABOUT = (
    "Show or end the processes that `paceline run --warm` keeps for your next runs. Without a subcommand, it"
    " shows them."
)

app = typer.Typer(
    add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, help=ABOUT
)


@app.callback(invoke_without_command=True)
def group(context: typer.Context) -> None:
    """Show or end the processes that `paceline run --warm` keeps for your next runs.

    Without a subcommand, it shows them.
    """
    if context.invoked_subcommand is None:
        status()


@app.command(cls=GroupedCommand)
def status() -> int:
    """Show each process that has torch imported: its memory, the runs that it has served, and when it ends."""
    found = read_status()
    if not found:
        print("no warm process; `paceline run --warm train.py` starts one")
    for each in found:
        if each["kind"] == "silent":
            print(f"process {each['pid']} is not responding; `paceline warm stop` ends it")
            continue
        ends = (
            f"ends in {show_seconds(each['left'])}"
            if not each["running"]
            else f"{each['running']} running"
        )
        print(
            f"process {each['pid']}: torch {each['torch']} of {each['python']}, {show_size(each['memory'])}, "
            f"{each['served']} warm start{'s'[: each['served'] != 1]}, {ends}"
        )
    return 0


@app.command(cls=GroupedCommand)
def stop(
    pids: Annotated[
        list[int] | None,
        typer.Argument(
            metavar="[PROCESS]...", help="Process ids, as `paceline warm status` shows."
        ),
    ] = None,
) -> int:
    """End these processes now, or all. Runs that they have started continue."""
    ended = stop_processes(pids or None)
    for missing in sorted({*(pids or ())} - {each["pid"] for each in ended}):
        raise UsageError(
            f"Process {missing} is not a warm process.", hint="See `paceline warm status`."
        )
    print("\n".join(f"ended process {each['pid']}" for each in ended) or "no warm process")
    return 0
