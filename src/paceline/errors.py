"""The errors that several parts of Paceline raise, as a tree. Each says what is wrong and what to
do.

PacelineError
├── UsageError        a wrong command line, or a wrong argument of a function
│   └── SpecError     a wrong value in paceline.toml; names the file and the key
├── EnvironmentProblem  this machine lacks something, or a path cannot be used
├── ClusterError      the scheduler fails or does not respond
│   ├── NoSlurm         this machine has no Slurm
│   │   └── NotConfigured  it has only Slurm's programs
│   ├── NoAnswer        Slurm does not answer in time
│   ├── ConnectionProblem  a cluster cannot be reached over SSH
│   └── JobRejected   sbatch rejected the job, for a `reason`
└── RunError          the training itself
    ├── LaunchError     ranks did not start, or one of them failed
    ├── DeviceError     two ranks on one GPU, or a missing GPU
    ├── CheckpointError nothing to resume from, or state that does not fit
    │   └── TakenOver   another start of the run has its folder now
    ├── NonFinite       a loss that is NaN or infinite
    └── ReplicasDiffer  a model whose replicas are no longer the same on all ranks

An error that only one part raises is a subclass of one of these, next to the code that raises it:
`RunNotFound`,
`CodeTooLarge`, `AgentsMissing` and others.
"""

from __future__ import annotations

from collections.abc import Sequence


class PacelineError(Exception):
    """A problem and its solution: `hint` says what to do. `earlier` are further problems, found
    before this one.
    """

    exit_code = 1

    def __init__(
        self, message: str, *, hint: str = "", earlier: Sequence[PacelineError] = ()
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.earlier = tuple(earlier)

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


class NoSlurm(ClusterError):
    """Slurm is not installed here, or not configured: nobody was asked."""


class NotConfigured(NoSlurm):
    """Slurm's programs are installed here, but this machine belongs to no cluster."""


class NoAnswer(ClusterError):
    """Slurm did not answer in time. It may still have done what it was asked to."""


class ConnectionProblem(ClusterError):
    """There is no connection to a cluster's login node, or it cannot be opened."""


class JobRejected(ClusterError):
    """sbatch rejected the job; `reason` is its own message."""

    def __init__(self, message: str = "", *, reason: str = "", hint: str = "") -> None:
        super().__init__(message or f"sbatch rejected the job: {reason}.", hint=hint)
        self.reason = reason


class RunError(PacelineError):
    pass


class LaunchError(RunError):
    pass


class DeviceError(RunError):
    pass


class CheckpointError(RunError):
    pass


class TakenOver(CheckpointError):
    """Another start of the run, or another run, has the folder now: this one may not write there
    any more.
    """


class NonFinite(RunError):
    pass


class ReplicasDiffer(RunError):
    pass


def in_one_line(text: str) -> str:
    """Return the first line of an error as text ("ValueError: ..."), with the advice of one of
    ours.
    """
    first, *more = text.splitlines() or [""]
    is_ours = any(f"{name}: " in first for name in _names(PacelineError))
    advice = more[-1] if is_ours and more and more[-1].startswith("  ") else ""
    return f"{first} {advice.strip()}" if advice else first


def _names(kind: type[PacelineError]) -> list[str]:
    return [kind.__name__, *(name for each in kind.__subclasses__() for name in _names(each))]
