"""The folders and names that a script sees: from its agent, or defaults without one."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.contract import env
from paceline.contract.run_folder import RunFolder

DEFAULT_EXPERIMENT = "default"


@dataclass(frozen=True)
class Paths:
    """The values of the `PACELINE_*` variables. A path is None if no agent has created that
    folder.
    """

    source_dir: Path
    project: str
    experiment: str
    scratch_dir: Path | None = None
    data_dir: Path | None = None
    checkpoints_dir: Path | None = None
    logs_dir: Path | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str], folder: RunFolder | None) -> Paths:
        """Read the variables. `folder` holds the checkpoints of a script that no agent started."""

        def path(name: str) -> Path | None:
            return Path(environ[name]) if environ.get(name) else None

        source = path(env.SOURCE_DIR) or _script_folder()
        return cls(
            source_dir=source,
            project=environ.get(env.PROJECT) or source.name,
            experiment=environ.get(env.EXPERIMENT) or DEFAULT_EXPERIMENT,
            scratch_dir=path(env.SCRATCH_DIR) or path(env.SCRATCH),
            data_dir=path(env.DATA),
            checkpoints_dir=path(env.CHECKPOINTS) or (folder.checkpoints if folder else None),
            logs_dir=path(env.LOGS),
        )


def _script_folder() -> Path:
    """Return the folder of the running script; in a notebook or console, the current folder."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(os.path.abspath(file)).parent if file else Path.cwd()
