"""What can go wrong, drawn as a tree. Every error says what was found, what was expected, and what to do.

PacelineError
├── UsageError        the command line, or a value given to a function
│   └── SpecError     paceline.toml: names the file and the key
├── EnvironmentProblem  this machine lacks something, or a path cannot be used
├── ClusterError      the scheduler refused, or cannot be asked
└── RunError          the training itself
    ├── LaunchError     ranks could not be started, or one of them failed
    ├── DeviceError     two ranks on one GPU, a GPU that is not there
    ├── CheckpointError nothing to resume from, or state that does not fit
    └── NonFinite       a loss that is not a number
"""

from __future__ import annotations


class PacelineError(Exception):
    """A problem with a way out: `hint` is the line that says what to do."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint))


def _rebuild(kind: type[PacelineError], message: str, hint: str) -> PacelineError:
    return kind(message, hint=hint)


class UsageError(PacelineError):
    exit_code = 2


class SpecError(UsageError):
    pass


class EnvironmentProblem(PacelineError):
    pass


class ClusterError(PacelineError):
    pass


class RunError(PacelineError):
    pass


class LaunchError(RunError):
    pass


class DeviceError(RunError):
    pass


class CheckpointError(RunError):
    pass


class NonFinite(RunError):
    pass
