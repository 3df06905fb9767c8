"""What `paceline sweep` prints while it starts and runs trials."""

from __future__ import annotations

from pathlib import Path

from paceline.cli import console
from paceline.contract.sweep.folder import DONE, FAILED
from paceline.sweep.settings import SweepSettings


class ConsoleReporter:
    """Prints what a sweep reports."""

    def line(self, text: str) -> None:
        print(text, flush=True)

    def note(self, text: str) -> None:
        console.say_note(text)

    def trial(self, text: str, state: str) -> None:
        colour = {DONE: console.GREEN, FAILED: console.RED}.get(state, console.GREY)
        console.say(f"paceline: {text}", colour=colour)


def warn_of_conflict(settings: SweepSettings, file: Path, typed: str | None) -> None:
    """Print both W&B sweeps if a file names another one than --wandb-sweep: the file wins."""
    found = settings.search.wandb_sweep
    if typed is None or typed == found:
        return
    source = (
        settings.job.source("tracking.wandb_sweep")
        if found == settings.job.tracking.wandb_sweep
        else ""
    )
    where = source or f"[sweep] wandb_sweep in {file}"
    console.say_note(f"--wandb-sweep is {typed}, but {where} is {found}: using {found}")
