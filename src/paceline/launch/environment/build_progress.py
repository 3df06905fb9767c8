"""Follow a build: what it prints, how far it is, and how it ended."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from paceline.contract.typed_command import cluster, to_type
from paceline.errors import ClusterError, EnvironmentProblem
from paceline.launch.environment.build_script import BuildFolder
from paceline.launch.environment.store import StoredEnvironment
from paceline.slurm.job_states import squeue_and_sacct
from paceline.slurm.job_states.meanings import LIVE, WAITING, JobState

POLL_INTERVAL = 0.3  # seconds between reads of the log
FILE_TIMEOUT = 30.0  # seconds that a shared file system may take to show what a node has written
STATE_INTERVAL = 2.0  # seconds between looks at the state of the job
LAST_LOOKS = 10  # questions to the scheduler after the script has ended, until the job has

NO_NETWORK = re.compile(  # in the words of pip, curl, git and container engines
    r"name resolution|name or service not known|nodename nor servname|could not resolve|no such host"
    r"|network is unreachable|no route to host|failed to establish a new connection|connection (?:timed out|refused)"
    r"|connect ?timeout|cannot connect to proxy|i/o timeout",
    re.IGNORECASE,
)

QueryStates = Callable[[Iterable[str]], Mapping[str, JobState]]


class BuildProgress:
    """A running build: what it prints, and how far it is."""

    def __init__(
        self,
        target: StoredEnvironment,
        folder: BuildFolder,
        *,
        job: str = "",
        process: subprocess.Popen[bytes] | None = None,
        query: QueryStates = squeue_and_sacct.states,
    ) -> None:
        self.target = target
        self.folder = folder
        self.job = job
        self.process = process
        self.query = query  # how to find out the state of the job while it builds
        self.collected: set[str] = set()
        self.state = "starting"
        self._next = 0.0
        self._last_looks = 0

    def is_over(self) -> bool:
        if self.process is not None:
            return self.process.poll() is not None
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + STATE_INTERVAL
        try:
            found = self._choose_query()([self.job]).get(self.job)
        except ClusterError:
            # the scheduler does not respond for a moment: the build may still be running
            return False
        self.state = found.label if found is not None else "gone"
        return found is None or found.phase not in (LIVE, WAITING)

    def _choose_query(self) -> QueryStates:
        """Ask Slurm itself once the script has ended, which removes its variables last: the job ends in a moment."""
        if self.folder.environment.exists() or self._last_looks == LAST_LOOKS:
            return self.query
        self._last_looks += 1
        return squeue_and_sacct.states

    def lines(self) -> Iterator[str | None]:
        """Yield the log's lines as they come; None in between, so that a progress line can move."""
        position, rest = 0, b""
        while True:
            over = self.is_over()  # before reading: what was written by then is still read
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
                self._count_packages(text)
                yield text
            if over:
                if rest:
                    yield rest.decode(errors="replace")
                return
            yield None
            time.sleep(POLL_INTERVAL)

    def _count_packages(self, line: str) -> None:
        match = re.match(
            r"\s*(?:Collecting ([\w.-]+)|Processing (?:\S*/)?([^-/\s]+)-\d\S*\.whl)", line
        )
        if match:
            self.collected.add(re.sub(r"[-_.]+", "-", match[1] or match[2]).lower())

    def progress(self) -> str:
        """Return how many packages pip has collected and installed so far."""
        if self.process is None and self.state != "running":
            return f"job {self.job} is {self.state}"
        names = {
            path.name.partition("-")[0]
            for path in self.target.path.glob("lib/python*/site-packages/*.dist-info")
        }
        if not names:
            return "building"
        # every venv starts with these two
        installed = len(names - ({"pip", "setuptools"} - self.collected))
        return f"packages: {len(self.collected)} collected, {installed} installed"

    def _succeeded(self) -> bool:
        return self.process.returncode == 0 if self.process is not None else self.state == "done"

    def errors(self, max_lines: int = 12) -> list[str]:
        """Return pip's errors from the log if there are any, else its last lines."""
        lines = self._read_log()
        errors = [line.strip() for line in lines if re.match(r"\s*(ERROR|error|FATAL)\b", line)]
        ours = [line for line in lines if line.startswith("paceline: ")][-1:]
        return [*errors[-max_lines:], *ours] or lines[-max_lines:]

    def _read_log(self) -> list[str]:
        try:
            text = self.folder.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        # container engines write in colours
        return re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()

    def check_result(self, *, is_shown: bool = False) -> None:
        """Raise if the build failed. `is_shown`: its log is above the error already."""
        deadline = time.monotonic() + FILE_TIMEOUT
        while self._succeeded() and not self.target.is_complete and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL)
        if self.target.is_complete:
            shutil.rmtree(self.folder.path, ignore_errors=True)
            return
        builder = (
            f"Job {self.job}{'' if self.state == 'failed' else f' ({self.state})'}"
            if self.job
            else "The build"
        )
        where = f" on {name}" if (name := cluster()) else ""
        raise EnvironmentProblem(
            "\n  ".join(
                [f"{builder} failed: nothing was built.", *([] if is_shown else self.errors())]
            ),
            hint=f"{self._advise()}The full log is in {self.folder.log}{where}.",
        )

    def _advise(self) -> str:
        """Return what to do if packages cannot be downloaded; empty if something else is wrong."""
        if not any(NO_NETWORK.search(line) for line in self._read_log()):
            return ""
        settings = "https_proxy, or PIP_INDEX_URL of a mirror, in variables of [environment]"
        if self.process is not None:
            return f"This machine cannot reach the package index. If it needs a proxy, set {settings}.\n  "
        here = "on the login node" if cluster() else "here"
        return (
            f"The node cannot reach the package index: compute nodes often have no internet access. Build {here}"
            f" instead:\n    {to_type('env build --local')}\n  If nodes have a proxy or a mirror, set {settings}.\n  "
        )
