"""Permission to start, for a run that was submitted to several clusters: only one of them may
train.

The file `grant` in the run folder holds the one decision about this run, and the name of the
cluster that trains if it is another one. Whoever makes the file first has decided: the laptop that
grants or refuses, or the run's own agent if nobody has answered in time. It never changes
afterwards, so a requeued run keeps its permission, and one that was refused never trains.
"""

from __future__ import annotations

import os
from contextlib import suppress

from paceline.contract.files.foreign_records import read_bounded, read_object
from paceline.contract.run_folder import RunFolder, write_atomically

GRANTED, REFUSED, EXPIRED = "granted", "refused", "expired"
MAX_NAME = 200  # characters of a cluster's name
_LOCK = ".grant-lock"


def read_grant(run: RunFolder) -> str | None:
    """Return the decision; None if there is none yet.

    Lists the folder: a network file system may remember for a minute that a single file was not
    there.
    """
    try:
        if run.grant.name not in os.listdir(run.path):
            return None
    except OSError:
        return None
    return _read(run)[0]


def decide_grant(run: RunFolder, decision: str, winner: str = "") -> str:
    """Make a decision, unless there is one; return the one that counts. Raises OSError if there can
    be none.

    `winner` is the cluster that trains instead.
    """
    name = "".join(each for each in winner if each.isprintable())[:MAX_NAME]
    text = f"{decision} {name}".strip()
    draft = run.path / f".grant-{os.urandom(8).hex()}"
    write_atomically(draft, f"{text}\n", sync=True)
    try:
        os.link(draft, run.grant)  # it is there with its content, or not at all
    except FileExistsError:
        pass
    except OSError:  # no hard links here
        _decide_without_links(run, text)
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
    found = read_grant(run)
    if found is None:
        raise OSError(f"{run.grant} cannot be read")
    return found


def read_winner(run: RunFolder) -> str:
    """Return the cluster that trains instead of this run; empty if there is none."""
    return _read(run)[1]


def explain_refusal(run: RunFolder) -> str:
    """Return why a run never trains, for people; empty if nothing forbids it."""
    decision, winner = _read(run)
    if decision == REFUSED:
        return (
            f"{winner} started first"
            if winner
            else "`submit --first` was interrupted before a cluster started"
        )
    if decision == EXPIRED:
        return "no permission to start came from your laptop"
    return ""


def needs_grant(run: RunFolder) -> bool:
    """Return whether a run was submitted to several clusters, and has no permission to train."""
    if read_grant(run) == GRANTED:
        return False
    try:
        return bool(read_object(run.launch_spec).get("grant_timeout"))
    except (OSError, ValueError):
        return False


def _read(run: RunFolder) -> tuple[str | None, str]:
    """Return the decision and the cluster that trains instead."""
    try:
        decision, _, winner = (
            read_bounded(run.grant, 4 * MAX_NAME + 100).decode().strip().partition(" ")
        )
    except (OSError, ValueError):
        return None, ""
    return (decision, winner) if decision in (GRANTED, REFUSED, EXPIRED) else (None, "")


def _decide_without_links(run: RunFolder, text: str) -> None:
    """Decide by a symbolic link, which holds the decision: if its maker is killed, anybody can
    finish for it.
    """
    lock = run.path / _LOCK
    with suppress(FileExistsError):
        os.symlink(text, lock)
    write_atomically(run.grant, f"{os.readlink(lock)}\n", sync=True)
