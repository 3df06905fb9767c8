"""A build under way: what it prints, how far it is, and what became of it."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator

from paceline.cluster.environment.store import Built
from paceline.cluster.slurm import commands as slurm
from paceline.cluster.slurm.states import LIVE, WAITING
from paceline.errors import ClusterError, EnvironmentProblem
from paceline.plan.environment.build import BuildFolder

POLL = 0.3  # seconds between looks at the log
LATE = 30.0  # seconds that a shared file system may take to show what a node has written
ASK = 2.0  # seconds between questions to the scheduler


class Watch:
    """A build under way: what it prints, and how far it is."""

    def __init__(
        self,
        target: Built,
        folder: BuildFolder,
        *,
        job: str = "",
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.target = target
        self.folder = folder
        self.job = job
        self.process = process
        self.collected: set[str] = set()
        self.state = "starts"
        self._next = 0.0

    def is_over(self) -> bool:
        if self.process is not None:
            return self.process.poll() is not None
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + ASK
        try:
            found = slurm.states([self.job]).get(self.job)
        except ClusterError:
            return False  # a scheduler that does not answer for a moment says nothing about the build
        self.state = found.label if found is not None else "gone"
        return found is None or found.phase not in (LIVE, WAITING)

    def lines(self) -> Iterator[str | None]:
        """The log's lines as they come; None in between, so that a progress line can move."""
        position, rest = 0, b""
        while True:
            over = self.is_over()  # before reading: what was written until then is still read
            try:
                with open(self.folder.log, "rb") as log:
                    log.seek(position)
                    piece = log.read()
            except OSError:
                piece = b""
            position += len(piece)
            *whole, rest = (rest + piece).split(b"\n")
            for line in whole:
                text = line.decode(errors="replace")
                self._note(text)
                yield text
            if over:
                if rest:
                    yield rest.decode(errors="replace")
                return
            yield None
            time.sleep(POLL)

    def _note(self, line: str) -> None:
        match = re.match(r"\s*(?:Collecting ([\w.-]+)|Processing (?:\S*/)?([^-/\s]+)-\d\S*\.whl)", line)
        if match:
            self.collected.add(re.sub(r"[-_.]+", "-", match[1] or match[2]).lower())

    def progress(self) -> str:
        """Packages that pip has found so far, and those that are there."""
        if self.process is None and self.state != "running":
            return f"job {self.job} is {self.state}"
        names = {
            path.name.partition("-")[0]
            for path in self.target.path.glob("lib/python*/site-packages/*.dist-info")
        }
        if not names:
            return "under way"
        there = len(names - ({"pip", "setuptools"} - self.collected))  # every venv begins with these two
        return f"packages: {len(self.collected)} collected, {there} installed"

    def _ended_well(self) -> bool:
        return self.process.returncode == 0 if self.process is not None else self.state == "done"

    def errors(self, most: int = 12) -> list[str]:
        """The end of the log: pip's errors if there are any, else the last lines."""
        try:
            text = self.folder.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()  # engines of containers write in colours
        told = [line.strip() for line in lines if re.match(r"\s*(ERROR|error|FATAL)\b", line)]
        ours = [line for line in lines if line.startswith("paceline: ")][-1:]
        return [*told[-most:], *ours] or lines[-most:]

    def conclude(self) -> None:
        """Raise what went wrong, if it did."""
        deadline = time.monotonic() + LATE
        while self._ended_well() and not self.target.is_complete and time.monotonic() < deadline:
            time.sleep(POLL)
        if self.target.is_complete:
            shutil.rmtree(self.folder.path, ignore_errors=True)
            return
        where = f"job {self.job} ({self.state})" if self.job else "the build"
        told = "\n  ".join(self.errors())
        raise EnvironmentProblem(
            f"{where} failed: nothing was built\n  {told}" if told else f"{where} failed: nothing was built",
            hint=f"the whole log: {self.folder.log}",
        )
