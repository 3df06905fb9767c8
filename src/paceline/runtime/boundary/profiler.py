"""A window of steps under torch's profiler, written as a trace that a browser opens."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch

from paceline.errors import UsageError


class ProfilerWindow:
    """`10:13` records steps 10, 11 and 12: as in a Python slice, the last is not part of it."""

    def __init__(self, window: str | None, *, folder: Path | None, rank: int) -> None:
        self.first = self.last = -1
        if window:
            match = re.fullmatch(r"(\d+):(\d+)", window)
            if not match or int(match[1]) >= int(match[2]) or int(match[1]) < 1:
                raise UsageError(
                    f"profile={window!r} is no window of steps", hint="'10:13' records steps 10, 11 and 12."
                )
            self.first, self.last = int(match[1]), int(match[2])
        self.path = (folder or Path.cwd()) / f"profile-rank-{rank}.json"
        self._profiler: Any = None

    @property
    def wanted(self) -> bool:
        return self.first >= 0

    def boundary(self, done: int) -> None:
        """Called with the number of steps done so far, ahead of the next one."""
        if self._profiler is None and done + 1 == self.first:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()
        elif self._profiler is not None and done + 1 >= self.last:
            self.close()

    def close(self) -> None:
        """Write the trace; also when training ends within the window."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        self.first = -1
        profiler.stop()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self.path))
            print(f"paceline: trace written: {self.path}", file=sys.stderr, flush=True)
        except (OSError, RuntimeError) as error:
            print(f"paceline: no trace: {error}", file=sys.stderr, flush=True)
