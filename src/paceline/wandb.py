"""A drop-in replacement for `import wandb` in scripts with several ranks: `import paceline.wandb as
wandb`.

Rank 0 has the run. On other ranks, with `--no-wandb`, and if the package, a key or the network is
missing, every call is safe: `init` returns an object that accepts every call, and `config` holds
what you passed. A resumed run continues its W&B run. All other names come from the real package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.runtime.trackers.wandb_module import WANDB_MODULE
from paceline.runtime.trackers.wandb_noop import NOOP


def init(**options: Any) -> Any:
    """Start a run on rank 0; on other ranks return an object that does nothing. Takes wandb.init's
    keyword arguments.

    A different project or group finishes the current run first.
    """
    return WANDB_MODULE.init(**options)


def log(data: dict[str, Any], *args: Any, **options: Any) -> None:
    WANDB_MODULE.log(data, *args, **options)


def finish(exit_code: int | None = None, **options: Any) -> None:
    WANDB_MODULE.finish(exit_code, **options)


def watch(models: Any, *args: Any, **options: Any) -> Any:
    """Log gradients and parameters. You can pass a model that `run.wrap` returned."""
    return (
        WANDB_MODULE.attribute("watch")(models, *args, **options) if WANDB_MODULE.is_real else NOOP
    )


def agent(sweep_id: str, function: Callable[[], Any] | None = None, **options: Any) -> None:
    """Run points of a sweep: call `function` with each in `wandb.config`. Takes wandb.agent's
    keyword arguments.

    It trains in one process. For several ranks, use `paceline sweep --wandb-sweep`.
    """
    WANDB_MODULE.agent(sweep_id, function, **options)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return WANDB_MODULE.attribute(name)
