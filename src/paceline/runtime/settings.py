"""What a session was asked to do: the script's own arguments, over them what the command line said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from paceline.errors import UsageError

PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Settings:
    """All that `paceline.session` takes; the run's order may override each of them."""

    seed: int | None = None
    """Seeds Python, NumPy and torch; the loader's order and augmentation too. None leaves them alone."""
    deterministic: bool = False
    precision: str = "fp32"
    """What `run.autocast` computes in: fp32, bf16, or fp16 with a gradient scaler."""
    backend: str | None = None
    """Of the process group. None: what the device needs."""
    cpu: bool = False
    timeout: float | None = None
    """Seconds that a collective may take before it counts as lost. None: torch's own default."""
    profile: str | None = None
    """'10:13' records steps 10, 11 and 12 into a trace in the run folder."""
    max_steps: int | None = None
    save_every_steps: int | None = None
    save_every_seconds: float | None = 300.0
    keep_last: int = 2
    keep_every: int | None = None
    best: str | None = None
    """Keep the checkpoint with the best value of this metric: 'accuracy', or 'min:loss'."""
    start_from: str | None = None
    """Another run's folder, or a checkpoint, whose state a fresh run begins with."""
    on_nonfinite: str = "stop"
    """A loss that is not a number: 'stop' the run, 'skip' the step (one device sync per update), or 'ignore'."""
    straggler_factor: float = 1.5
    """A rank whose own part of a step takes this many times the median is named. 0: none is."""
    debug: bool = False
    progress: bool = True
    report: bool = True
    bind: bool = True
    """Bind a rank to the CPUs next to its GPU, where nobody has bound it yet."""

    def checked(self) -> Settings:
        if self.precision not in PRECISIONS:
            raise UsageError(
                f"precision={self.precision!r} is not known", hint=f"One of {', '.join(PRECISIONS)}."
            )
        if self.on_nonfinite not in ("stop", "skip", "ignore"):
            raise UsageError(
                f"on_nonfinite={self.on_nonfinite!r} is not known", hint="One of stop, skip, ignore."
            )
        for name in (
            "max_steps",
            "save_every_steps",
            "save_every_seconds",
            "keep_last",
            "keep_every",
            "timeout",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(
                    f"{name}={value!r} is not positive", hint=f"Leave {name} out to do without it."
                )
        return self

    def overridden(self, given: Mapping[str, Any]) -> Settings:
        """These settings with what the command line said; names that belong to others are left alone."""
        known = {each.name for each in fields(self)}
        return replace(
            self, **{key: value for key, value in given.items() if key in known and value is not None}
        )


class Params(Mapping[str, Any]):
    """The script's hyper-parameters: read-only, the same on all ranks, as `params["lr"]` or `params.lr`."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        held = {
            key: Params(value) if isinstance(value, dict) else value for key, value in (values or {}).items()
        }
        object.__setattr__(self, "_values", held)

    _values: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __getattr__(self, key: str) -> Any:
        try:
            return self._values[key]
        except KeyError:
            raise AttributeError(
                f"no parameter {key!r}: give it by --param {key}=... or in [params] of paceline.toml, "
                f"or use run.params.get({key!r}, default)"
            ) from None

    def __setattr__(self, key: str, value: Any) -> None:
        raise AttributeError("run.params is read-only: all ranks must hold the same")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Params({self._values!r})"
