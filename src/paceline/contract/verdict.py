"""Verdicts (`done`, `stopped`, `failed`) and exit codes."""

from __future__ import annotations

from pathlib import Path

from paceline.contract.foreign_records import read_bounded

# EX_TEMPFAIL: a script without the runtime asks to be resumed; also of a run that stopped early
STOPPED_EXIT = 75
USAGE_EXIT = 2  # the command line or a configuration file is wrong
INTERRUPTED_EXIT = 130  # Ctrl-C
# Ctrl-C after a submission over SSH was answered: only watching the run has ended
UNWATCHED_EXIT = 97
UNSETTLED_EXIT = 98  # nobody knows whether an earlier submission has led to a job
RESTART_EXIT = 76  # of a head agent: an agent was killed, so start all of them again

DONE, STOPPED, FAILED = "done", "stopped", "failed"
VERDICTS = (DONE, STOPPED, FAILED)
# how people see a run that is done, but whose last state could not be saved
DONE_UNSAVED = "done, not saved"


def read_verdict(path: Path | str) -> str | None:
    """Return the verdict in a file; None if there is none, because the run still runs or ended
    without one.
    """
    try:
        word = read_bounded(path, 100).decode().strip()
    except (OSError, ValueError):
        return None
    return word if word in VERDICTS else None
