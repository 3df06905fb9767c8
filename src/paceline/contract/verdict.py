"""How an attempt ends: `done`, `stopped` or `failed`, and the exit codes that mean something."""

from __future__ import annotations

from pathlib import Path

STOPPED_EXIT = 75  # EX_TEMPFAIL: a script that does not use the runtime says "stopped, resume me"
USAGE_EXIT = 2  # the command line or a configuration file is wrong
INTERRUPTED_EXIT = 130  # Ctrl-C


DONE, STOPPED, FAILED = "done", "stopped", "failed"
VERDICTS = (DONE, STOPPED, FAILED)


def read_verdict(path: Path) -> str | None:
    """The verdict in a file, or None when there is none (a run with no verdict has failed, or still runs)."""
    try:
        word = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return word if word in VERDICTS else None
