"""What this rank knows from its agent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.contract import env
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder
from paceline.errors import EnvironmentProblem


@dataclass(frozen=True)
class LaunchContext:
    """The run folder, the attempt and the launch spec. All are absent in a script that no agent
    started.
    """

    folder: RunFolder | None = None
    attempt: int = 1
    launch_spec: LaunchSpec | None = None
    heartbeat_file: str | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> LaunchContext:
        """Read the variables and files that an agent sets up. Raises EnvironmentProblem for a bad
        launch spec.
        """
        environ = os.environ if environ is None else environ
        if not environ.get(env.RUN):
            return cls(heartbeat_file=environ.get(env.HEARTBEAT))
        folder = RunFolder(Path(environ[env.RUN]))
        try:
            launch_spec = LaunchSpec.from_json(folder.launch_spec.read_text(encoding="utf-8"))
        except FileNotFoundError:
            launch_spec = None
        except (OSError, ValueError, TypeError) as error:
            raise EnvironmentProblem(
                f"Cannot read {folder.launch_spec}: {error}.",
                hint=f"Check that {env.RUN} names the run folder, or unset it.",
            ) from None
        return cls(
            folder, int(environ.get(env.ATTEMPT, "1")), launch_spec, environ.get(env.HEARTBEAT)
        )
