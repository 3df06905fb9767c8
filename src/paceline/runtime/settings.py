"""What a session is told: its settings, the script's parameters, and what the agent knows."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from paceline.contract import env
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder
from paceline.errors import UsageError

PRECISIONS = ("fp32", "bf16", "fp16")

# Words in the names of metrics that say which direction is better.
LOWER_IS_BETTER = {
    "loss",
    "nll",
    "ce",
    "bce",
    "perplexity",
    "ppl",
    "bpc",
    "bpb",
    "error",
    "err",
    "mae",
    "mse",
    "rmse",
    "mape",
    "wer",
    "cer",
    "ter",
    "fid",
    "kid",
    "kl",
    "divergence",
    "distance",
    "regret",
    "brier",
    "ece",
}
HIGHER_IS_BETTER = {
    "accuracy",
    "acc",
    "top1",
    "top5",
    "precision",
    "recall",
    "f1",
    "auc",
    "auroc",
    "auprc",
    "roc",
    "ap",
    "map",
    "miou",
    "iou",
    "dice",
    "bleu",
    "rouge",
    "meteor",
    "chrf",
    "r2",
    "reward",
    "return",
    "score",
    "psnr",
    "ssim",
    "correlation",
    "likelihood",
    "elbo",
}


@dataclass(frozen=True)
class Settings:
    """The arguments of `paceline.session`, which documents them. The launch spec may override
    each.
    """

    seed: int | None = None
    deterministic: bool = False
    precision: str = "fp32"
    backend: str | None = None
    cpu: bool = False
    timeout: float | None = None
    max_steps: int | None = None
    save_every_steps: int | None = None
    save_every_seconds: float | None = 300.0
    keep_last: int = 2
    keep_every: int | None = None
    best: str | None = None
    start_from: str | None = None
    start_continue: bool = False
    start_strict: bool = True
    on_nonfinite: str = "stop"
    straggler_factor: float = 1.5
    replica_check: int = 100
    debug: bool = False
    progress: bool = True
    report: bool = True
    mesh: Mapping[str, int] | None = None
    bind: bool = True
    """Bind each rank to the CPUs next to its GPU, unless it is already bound. Set by the command
    line only.
    """

    def validate(self) -> Settings:
        """Return these settings. Raises UsageError if one is invalid."""
        if self.precision not in PRECISIONS:
            raise UsageError(
                f"Unknown precision {self.precision!r}.",
                hint=f"Use one of {', '.join(PRECISIONS)}.",
            )
        if self.on_nonfinite not in ("stop", "skip", "ignore"):
            raise UsageError(
                f"Unknown on_nonfinite {self.on_nonfinite!r}.",
                hint="Use one of stop, skip, ignore.",
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
                    f"{name} is {value!r}, but must be positive.",
                    hint=f"Leave {name} out to turn it off.",
                )
        best_metric(self.best)
        if self.start_continue and self.start_from is None:
            raise UsageError(
                "start_continue needs start_from.",
                hint="Name the run to continue, or leave it out.",
            )
        if self.replica_check < 0:
            raise UsageError(
                f"replica_check is {self.replica_check}, but must be 0 or more.",
                hint="Use 0 to turn it off.",
            )
        return self

    @property
    def asks_for_saves(self) -> str | None:
        """The setting that says when to save, or which checkpoint to keep; None if there is
        none.
        """
        if self.save_every_steps is not None:
            return "save_every_steps"
        if self.save_every_seconds not in (None, Settings.save_every_seconds):
            return "save_every_seconds"
        return "best" if self.best is not None else None

    def override(self, values: Mapping[str, Any]) -> Settings:
        """Return these settings with those of the launch spec. Names that are not settings are
        ignored.
        """
        known = {field.name for field in fields(self)}
        return replace(
            self,
            **{key: value for key, value in values.items() if key in known and value is not None},
        )


def best_metric(best: str | None) -> tuple[str, str] | None:
    """Return the metric that `best` names, and "min" or "max"; None for None.

    The direction is stated ("loss:min") or follows from a usual name ("val_loss", "accuracy").
    """
    if best is None:
        return None
    name, colon, mode = best.rpartition(":")
    if not colon:
        name = best
        words = {word for word in re.split(r"[^a-z0-9]+", best.lower()) if word}
        known = [
            mode
            for mode, usual in (("min", LOWER_IS_BETTER), ("max", HIGHER_IS_BETTER))
            if words & usual
        ]
        mode = known[0] if len(known) == 1 else ""
    if not name or mode not in ("min", "max"):
        metric = name or "loss"
        raise UsageError(
            f"best={best!r} does not say whether a lower or a higher value is better.",
            hint=f'Write best="{metric}:min" or best="{metric}:max".',
        )
    return name, mode


@dataclass(frozen=True)
class LaunchContext:
    """What this rank knows from its agent: the run folder, the attempt and the launch spec. All are
    absent in a script that no agent started.
    """

    folder: RunFolder | None = None
    attempt: int = 1
    launch_spec: LaunchSpec | None = None
    heartbeat_file: str | None = None

    @property
    def tracking(self) -> dict[str, Any]:
        """What `[tracking]` of paceline.toml and flags have set."""
        return self.launch_spec.tracking if self.launch_spec else {}

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> LaunchContext:
        """Read the variables and files that an agent sets up."""
        environ = os.environ if environ is None else environ
        if not environ.get(env.RUN):
            return cls(heartbeat_file=environ.get(env.HEARTBEAT))
        folder = RunFolder(Path(environ[env.RUN]))
        try:
            launch_spec = LaunchSpec.from_json(folder.launch_spec.read_text(encoding="utf-8"))
        except FileNotFoundError:
            launch_spec = None
        return cls(
            folder, int(environ.get(env.ATTEMPT, "1")), launch_spec, environ.get(env.HEARTBEAT)
        )


class Params(dict[str, Any]):
    """The script's parameters, as `params["lr"]` or `params.lr`. Read-only, and the same on all
    ranks.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            super().__setitem__(key, Params(value) if isinstance(value, dict) else value)

    def __getattr__(self, key: str) -> Any:
        if key in self:
            return self[key]
        raise AttributeError(
            f"There is no parameter {key!r}. Set it with --param {key}=... or in [params] of "
            f"paceline.toml, or use run.params.get({key!r}, default)."
        )

    def __setitem__(self, key: str, value: Any) -> None:
        raise AttributeError("run.params is read-only, so that all ranks have the same values.")

    __setattr__ = __setitem__

    def __reduce__(self) -> Any:  # otherwise a copy would set the items
        return Params, (dict(self),)
