"""Profile a window of steps with torch.profiler, and write a Chrome trace."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.runtime.console import note


class ProfilerWindow:
    """`10:13` profiles steps 10, 11 and 12: like a Python slice, it excludes its end."""

    def __init__(self, window: str | None, *, folder: Path | None, rank: int) -> None:
        self.first = self.end = -1
        if window:
            match = re.fullmatch(r"(\d+):(\d+)", window)
            if not match or int(match[1]) >= int(match[2]) or int(match[1]) < 1:
                raise UsageError(
                    f"profile={window!r} is not a window of steps.",
                    hint="Give the first step and the step after the last, such as '10:13' for "
                    "10, 11 and 12.",
                )
            self.first, self.end = int(match[1]), int(match[2])
        self.path = (folder or Path.cwd()) / f"profile-rank-{rank}.json"
        self._profiler: Any = None

    @property
    def is_on(self) -> bool:
        return self.first >= 0

    def after_step(self, done: int) -> None:
        """Start or stop the profiler. `done` is the number of steps done so far."""
        if self._profiler is None and done + 1 == self.first:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()
        elif self._profiler is not None and done + 1 >= self.end:
            self.close()

    def close(self) -> None:
        """Write the trace, also when training ends inside the window."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        self.first = -1
        profiler.stop()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self.path))
            note(f"wrote the profile to {self.path}")
        except (OSError, RuntimeError) as error:
            note(f"could not write the profile: {error}")
