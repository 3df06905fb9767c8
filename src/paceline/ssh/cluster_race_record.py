"""What this machine knows about a run that was submitted to several clusters, and which one it has chosen.

The choice is on the disk before any cluster hears of it, and is made once: whatever happens to this machine, at most
one cluster ever gets permission. Another one is chosen only if the first has answered that it will never train.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field

from paceline.contract.files.foreign_records import make, read_object
from paceline.contract.files.state_folder import state_folder
from paceline.contract.run_folder import write_atomically
from paceline.errors import UsageError


@dataclass
class ClusterRaceRecord:
    id: str
    folder: str  # where the command was typed
    config: str | None = None
    created: float = 0.0
    command: str = ""  # a digest of what was typed: there may be secrets in it
    # cluster -> id, from before the job is sent there
    submissions: dict[str, str] = field(default_factory=dict)
    runs: dict[str, str] = field(default_factory=dict)  # cluster -> run, once its answer is here
    out: list[str] = field(default_factory=list)  # clusters that will not train
    chosen: str | None = None
    is_granted: bool = False  # the chosen one has confirmed it
    is_given_up: bool = False  # nobody who has no permission yet gets it any more
    is_over: bool = False

    @classmethod
    def begin(
        cls, config: str | None, line: Sequence[str] = (), clusters: Sequence[str] = ()
    ) -> ClusterRaceRecord:
        return cls(secrets.token_hex(4), os.getcwd(), config, time.time(), _digest(line, clusters))

    @classmethod
    def load(cls, name: str) -> ClusterRaceRecord:
        try:
            return make(cls, read_object(state_folder("first") / f"{os.path.basename(name)}.json"))
        except (OSError, ValueError):
            known = ", ".join(each.id for each in unfinished()) or "none"
            raise UsageError(
                f"There is no unfinished submission {name!r}.",
                hint=f"Those that are unfinished: {known}.",
            ) from None

    def save(self) -> None:
        """Write it to the disk, and return only when it is there."""
        folder = state_folder("first")
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(
            folder / f"{self.id}.json", json.dumps(asdict(self), indent=1) + "\n", sync=True
        )
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def send(self, cluster: str) -> str:
        """Note that a cluster is about to get the job; return the id of this submission."""
        self.submissions[cluster] = secrets.token_hex(12)
        self.save()
        return self.submissions[cluster]

    def take_back(self, cluster: str) -> None:
        """Note that a cluster has no job, and gets none."""
        self.submissions.pop(cluster, None)
        self.save()

    def note_run(self, cluster: str, run: str) -> None:
        self.runs[cluster] = run
        self.save()

    def give_up(self) -> None:
        self.is_given_up = True
        self.save()

    def choose(self, cluster: str) -> None:
        assert self.chosen is None
        self.chosen = cluster
        self.save()

    def drop(self, cluster: str) -> None:
        """Note that a cluster will never train: it has said so itself."""
        self.out = sorted({*self.out, cluster})
        self.chosen = None if self.chosen == cluster else self.chosen
        self.save()

    def confirm(self) -> None:
        self.is_granted = True
        self.save()

    def finish(self) -> None:
        self.is_over = True
        self.save()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other commands from deciding about the same runs."""
        state_folder("first").mkdir(parents=True, exist_ok=True)
        with open(state_folder("first") / f"{self.id}.lock", "w", encoding="ascii") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UsageError(
                    f"Another command is already handling {self.id}.",
                    hint="Let that command finish, or interrupt it first.",
                ) from None
            yield


def unfinished() -> list[ClusterRaceRecord]:
    """Return the submissions that were interrupted, oldest first."""
    found = []
    for path in state_folder("first").glob("*.json"):
        try:
            record = make(ClusterRaceRecord, read_object(path))
        except (OSError, ValueError):
            continue
        if not record.is_over:
            found.append(record)
    return sorted(found, key=lambda record: record.created)


def find_interrupted(line: Sequence[str], clusters: Sequence[str]) -> ClusterRaceRecord | None:
    """Return the newest submission of the same command from this folder that may have jobs and that nobody finishes."""
    command = _digest(line, clusters)
    for record in reversed(unfinished()):
        if (
            record.command == command
            and record.folder == os.getcwd()
            and (record.submissions or record.runs)
        ):
            with suppress(UsageError), record.locked():
                if not (found := ClusterRaceRecord.load(record.id)).is_over:
                    return found
    return None


def _digest(line: Sequence[str], clusters: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps([sorted({*clusters}), *line]).encode()).hexdigest()[:32]
