"""The answers to everything that a page asks, as objects for JSON. A server sends them, and a
report contains them.

api/runs                    all rows (`Overview`), and the sweeps (`SweepOverview`)
api/runs/KEY                one run (`RunDetails`); KEY is a run id, or SWEEP-3 for a trial
api/runs/KEY/curves         its metrics; ?names=a,b selects some, and so does ?name= for each
api/runs/KEY/log            its output: ?rank= &attempt= &grep= &tail=
api/runs/KEY/diff           how the project's code has changed since it was started
api/sweeps, api/sweeps/NAME
api/cluster                 partitions, what is free in them, and your queue
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any

from paceline.contract.quote import quote
from paceline.contract.sweep.folder import SweepFolder
from paceline.contract.typed_command import to_type
from paceline.errors import EnvironmentProblem, UsageError
from paceline.launch.diff import compare_run
from paceline.sweep.report.summary import describe_sweep, describe_trials
from paceline.sweep.results import Sweep, read_sweep
from paceline.ui.web.cluster_answer import read_cluster
from paceline.ui.web.lookup import NoSuchRun, find_key, find_sweep_folder, find_sweeps
from paceline.ui.web.rows import Rows
from paceline.ui.web.run_actions import VERBS, act, allowed_verbs
from paceline.ui.web.run_reader import RunReader
from paceline.watch import origin
from paceline.watch.records import QueryStates
from paceline.watch.scheduler import query_states

MAX_READERS = 48  # runs whose curves are kept
MAX_TAIL = 5000  # lines of a log in one answer
DEFAULT_TAIL = 500
MAX_PATTERN = 500  # characters
MAX_DIFFERENCE = 1_000_000  # characters
SWEEP_INTERVAL = 3.0  # seconds between reads of a sweep, at least
IDLE_SHARE = 5  # reading that takes long is followed by a pause of so many times its duration
MAX_SWEEPS = 100  # in the list, newest first

Query = Mapping[str, Sequence[str]]
NO_QUERY: Query = MappingProxyType({})


class NotAllowed(UsageError):
    """The server was started to read only."""


class Answers:
    """Answers questions about the runs of a scratch folder. Threads may share it."""

    def __init__(
        self, scratch: Path, query: QueryStates = query_states, *, allow_actions: bool = False
    ) -> None:
        self.scratch = scratch
        self.allow_actions = allow_actions
        self.rows = Rows(scratch, query)
        self._query = query
        self._readers: OrderedDict[str, RunReader] = OrderedDict()
        self._lock = Lock()
        # until when an answer counts, and it
        self._sweeps: dict[tuple[Path, str], tuple[float, dict[str, Any]]] = {}
        self._sweep_lock = Lock()

    def reader(self, key: str) -> RunReader:
        """Return the reader of a run, the same for all who ask. Raises NoSuchRun."""
        known = self._readers.get(key)
        folder = find_key(key, self.scratch, known.folder if known else self.rows.folder(key))
        with self._lock:
            reader = self._readers.pop(key, None)
            if reader is None or reader.folder != folder:
                reader = RunReader(folder, self._query)
            self._readers[key] = reader
            while len(self._readers) > MAX_READERS:
                self._readers.popitem(last=False)
        return reader

    def runs(self) -> bytes:
        """Return the rows of all runs, as JSON already."""
        return self.rows.read()

    def run(self, key: str) -> dict[str, Any]:
        """Return everything about a run. `actions` are what a page may do to it."""
        reader = self.reader(key)
        details = reader.details()
        verbs = allowed_verbs(reader.folder, details["overview"]) if self.allow_actions else []
        return {**details, "actions": verbs}

    def act(self, key: str, verb: str) -> dict[str, Any]:
        """Cancel, stop or requeue a run. Raises NotAllowed if the server only reads."""
        if not self.allow_actions:
            raise NotAllowed(
                "This server is read-only.",
                hint="Start it with `paceline ui --allow-actions` to act on your runs.",
            )
        if verb not in VERBS:
            raise UsageError(f"Unknown action {verb[:50]!r}.")
        return {"message": act(self.reader(key).folder, verb)}

    def curves(self, key: str, query: Query = NO_QUERY) -> dict[str, Any]:
        names = [
            *query.get("name", ()),
            *(name for text in query.get("names", ()) for name in text.split(",") if name),
        ]
        return self.reader(key).curves(names or None)

    def log(self, key: str, query: Query = NO_QUERY) -> dict[str, Any]:
        rank, attempt = _number(query, "rank"), _number(query, "attempt")
        grep = _text(query, "grep")
        if len(grep) > MAX_PATTERN:
            raise UsageError(f"The text to search for has more than {MAX_PATTERN} characters.")
        tail = _number(query, "tail")
        count = min(DEFAULT_TAIL if tail is None else tail, MAX_TAIL)
        return self.reader(key).log(count, rank=rank, attempt=attempt, grep=grep)

    def difference(self, key: str) -> dict[str, Any]:
        """Return how the project's code has changed since a run was started, or in `note` why that
        is not known.
        """
        if (copy := origin.shown()) is not None:
            bring = to_type(f"fetch {quote(key)} --all")
            note = f"The code is on {copy.cluster}. To compare it here, fetch it: {bring}"
            return {"diff": "", "note": note}
        try:
            text = compare_run(self.reader(key).folder).to_text()
        except EnvironmentProblem as problem:
            return {"diff": "", "note": f"{problem.message} {problem.hint}"}
        note = (
            ""
            if len(text) <= MAX_DIFFERENCE
            else f"Only the first {MAX_DIFFERENCE:,} characters are shown."
        )
        return {"diff": text[:MAX_DIFFERENCE], "note": note}

    def sweeps(self) -> dict[str, Any]:
        """Return the newest sweeps, without their trials."""
        folders = find_sweeps(self.scratch)[:MAX_SWEEPS]
        return {"sweeps": [self._describe(folder, describe_sweep) for folder in folders]}

    def sweep(self, name: str) -> dict[str, Any]:
        """Return a sweep with its trials and Optuna's figures."""
        return self._describe(find_sweep_folder(name, self.scratch), describe_trials)

    def _describe(
        self, folder: SweepFolder, describe: Callable[[Sweep], dict[str, Any]]
    ) -> dict[str, Any]:
        """Describe a sweep, for all pages that ask within some seconds. What took long is kept
        longer.
        """
        key = (folder.path, describe.__name__)
        with self._sweep_lock:
            until, known = self._sweeps.get(key, (0.0, {}))
            began = time.monotonic()
            if began >= until:
                known = describe(read_sweep(folder, self._query))
                took = time.monotonic() - began
                self._sweeps[key] = (
                    time.monotonic() + max(SWEEP_INTERVAL, IDLE_SHARE * took),
                    known,
                )
            return known

    def find(self, path: str, query: Query = NO_QUERY) -> dict[str, Any] | bytes:
        """Return the answer to a path such as `api/runs/KEY/curves`, in bytes if it is JSON
        already.

        Raises NoSuchRun if there is none.
        """
        parts = path.split("/")
        known: dict[tuple[str, int, str], Callable[[], dict[str, Any] | bytes]] = {
            ("runs", 2, ""): self.runs,
            ("cluster", 2, ""): lambda: read_cluster(self.rows.by_job()),
            ("runs", 3, ""): lambda: self.run(parts[2]),
            ("runs", 4, "curves"): lambda: self.curves(parts[2], query),
            ("runs", 4, "log"): lambda: self.log(parts[2], query),
            ("runs", 4, "diff"): lambda: self.difference(parts[2]),
            ("sweeps", 2, ""): self.sweeps,
            ("sweeps", 3, ""): lambda: self.sweep(parts[2]),
        }
        answer = known.get(
            (parts[1] if len(parts) > 1 else "", len(parts), parts[3] if len(parts) == 4 else "")
        )
        if parts[0] != "api" or answer is None:
            raise NoSuchRun(f"There is no answer to {path[:100]!r}.")
        return answer()


def _text(query: Query, name: str) -> str:
    return next(iter(query.get(name, ())), "")


def _number(query: Query, name: str) -> int | None:
    """Return a number of a question; None if it has none."""
    text = _text(query, name)
    if text in ("", "all"):
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise UsageError(f"Invalid {name}: use a number, or leave it empty for all.")
    return int(text)
