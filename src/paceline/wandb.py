"""A stand-in for `import wandb` in scripts that run on several ranks: `import paceline.wandb as wandb`.

Rank 0 has the run. On the other ranks, with `--no-wandb`, and where the package, a key or the network is missing,
every call is safe: `init` returns an object that takes everything, `config` holds what was given. A run that goes on
after a stop goes on in W&B, too. Names that are not here are the real package's.

    with wandb.every_process():      each rank gets a run of its own, all in one group
        wandb.init(project="digits")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paceline.runtime.trackers.noop import NOTHING
from paceline.runtime.trackers.wandb.module import STANDIN


def init(**options: Any) -> Any:
    """Begin a run (rank 0), or get an object that does nothing. Takes what `wandb.init` takes, by name.

    With another project or group than the run at hand, that one is finished first.
    """
    return STANDIN.init(**options)


def log(data: dict[str, Any], *args: Any, **options: Any) -> None:
    STANDIN.log(data, *args, **options)


def finish(exit_code: int | None = None, **options: Any) -> None:
    STANDIN.finish(exit_code, **options)


def watch(models: Any, *args: Any, **options: Any) -> Any:
    """Log gradients and parameters. A model that `run.wrap` returned is watched as it is."""
    return STANDIN.attribute("watch")(models, *args, **options) if STANDIN.is_real else NOTHING


def sweep(sweep: Any, *args: Any, **options: Any) -> str:
    """Make a sweep: rank 0 does, and all ranks get its id. Called on all ranks."""
    return STANDIN.sweep(sweep, *args, **options)


def agent(
    sweep_id: str,
    function: Callable[[], Any] | None = None,
    entity: str | None = None,
    project: str | None = None,
    count: int | None = None,
    **options: Any,
) -> None:
    """Take points from a sweep: rank 0 asks, and `function` is called on all ranks with the same `wandb.config`.

    On several ranks an error in `function` ends the agent, and is raised. Called on all ranks.
    """
    STANDIN.agent(sweep_id, function, entity=entity, project=project, count=count, **options)


def every_process(on: bool = True) -> Any:
    """Give each rank a run of its own from now on, or within a `with`; all of them in one group."""
    before = STANDIN.every_process
    STANDIN.every_process = on

    @contextmanager
    def scope() -> Iterator[None]:
        STANDIN.every_process = on
        try:
            yield
        finally:
            STANDIN.every_process = before

    return scope()


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return STANDIN.attribute(name)
