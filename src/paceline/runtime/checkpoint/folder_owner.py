"""Which process may write into a checkpoint folder: two live runs in one folder would remove each
other's checkpoints.

A file names the process that came last. A new one is refused while that process lives on the same
host; otherwise it takes the folder over, and the older one notices before its next commit. In the
run folder of an agent, the claim of the job start decides as well, and the processes of an earlier
attempt refuse nobody: their agent has ended them, or is about to.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.contract import env
from paceline.contract.claims import describe_processes, find_successor, live_pids
from paceline.contract.foreign_records import read_fields
from paceline.contract.run_folder import RunFolder, write_atomically
from paceline.errors import CheckpointError, TakenOver

FILE = ".in-use"
TAKEN_OVER_HINT = "This process was cut off or paused and presumed dead. The other one continues."


class FolderOwner:
    """Holds a folder for this process, from `acquire` to `release`. Only rank 0 has one."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._me = json.loads(describe_processes([os.getpid()]))
        for name in (env.RUN, env.JOB_START, env.ATTEMPT):
            self._me[name] = os.environ.get(name, "")
        self._is_named = False  # whether the file names this process, until another one comes

    def acquire(self) -> None:
        """Take the folder. Raises CheckpointError if another live process here has it, or another
        job start has this run.

        A folder that can't be written has no owner: saving there fails, and says so.
        """
        check_claim()
        owner = read_fields(self.path)
        pids = [pid for pid in live_pids(owner) if pid != os.getpid()]
        if pids and not self._is_earlier_attempt(owner):
            raise CheckpointError(
                f"Another run is using {self.path.parent}: process {pids[0]} on {owner['host']}.",
                hint="Stop that run, or use a different folder for this one. To start from its "
                "checkpoints, use start_from.",
            )
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(self._me) + "\n")
            self._is_named = True

    def _is_earlier_attempt(self, owner: Mapping[str, Any]) -> bool:
        run, *attempt = (env.RUN, env.JOB_START, env.ATTEMPT)
        is_same_run = bool(self._me[run]) and owner.get(run) == self._me[run]
        return is_same_run and any(owner.get(name) != self._me[name] for name in attempt)

    def check(self) -> None:
        """Raise TakenOver if another start of this run, or another run, has the folder now."""
        check_claim()
        owner = read_fields(self.path) if self._is_named else {}
        if owner and owner != self._me:
            raise TakenOver(
                f"Another run has taken over {self.path.parent}, on {owner.get('host')}.",
                hint=TAKEN_OVER_HINT,
            )

    def release(self) -> None:
        """Give the folder back."""
        if self._is_named and read_fields(self.path) == self._me:
            self.path.unlink(missing_ok=True)


def check_claim() -> None:
    """Raise TakenOver if another job start has the run folder: this one was cut off, and the run
    goes on elsewhere.
    """
    run, job_start = os.environ.get(env.RUN), os.environ.get(env.JOB_START)
    if not run or not job_start:
        return
    successor = find_successor(RunFolder(Path(run)), job_start)
    if successor:
        raise TakenOver(
            f"Job start {job_start} no longer has run {Path(run).name}: job start {successor} has "
            "taken over.",
            hint=TAKEN_OVER_HINT,
        )
