"""A copy of a cluster's runs, as `--on` keeps it on a laptop, made by hand."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.watch.origin import NEWS, STATES, ClusterCopy


def copy_of_run(
    base: Path,
    run: str,
    details: dict[str, Any],
    *,
    heard: float | None = None,
    act: Callable[[str, str], str] = lambda verb, run: "",
) -> ClusterCopy:
    """Make the copy of a running job, 7, of `alps`; `heard` is when the news came, by both clocks."""
    copy, heard = ClusterCopy("alps", base / "copy", act), time.time() if heard is None else heard
    folder = copy.scratch / run
    (folder / "claims").mkdir(parents=True)
    (folder / "claims" / "1").symlink_to("7-0")
    (folder / "run.json").write_text(json.dumps(details))
    (folder / "job").write_text("7")
    news = {"scratch": "/scratch/me", "there": heard, "here": heard, "problem": ""}
    (copy.base / NEWS).write_text(json.dumps(news))
    say_state(copy, "RUNNING")
    return copy


def say_state(copy: ClusterCopy, state: str) -> None:
    """Let Slurm say that the job is in another state."""
    jobs = {"7": ["7", state, "", "n1", "", "2:00:00", ""]}
    (copy.base / STATES).write_text(json.dumps({"jobs": jobs, "problem": "", "hint": ""}))
