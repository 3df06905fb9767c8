"""Objects that accept every call and do nothing, for scripts on ranks without a W&B run."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any


class Noop:
    """Callable and empty; every attribute, item and result is such an object."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return NOOP

    def __getattr__(self, name: str) -> Any:
        # or libraries would take it for an array, an iterator, ...
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return NOOP

    def __getitem__(self, key: Any) -> Any:
        return NOOP

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


NOOP = Noop()


class NoopRun(Noop):
    """What `wandb.init` and `run.wandb` return on a rank without a W&B run."""

    def __init__(self, config: Mapping[str, Any] | None = None, **options: Any) -> None:
        # of `wandb.init`
        names = ("id", "name", "project", "entity", "group", "job_type", "notes")
        vars(self).update({name: str(options.get(name) or "") for name in names})
        self.disabled = self.offline = True
        self.step = 0
        self.dir = tempfile.gettempdir()
        self.config = AttributeDict(config or {})
        self.summary = AttributeDict()

    def __bool__(self) -> bool:
        return True


class AttributeDict(dict[str, Any]):
    """`wandb.config` and `wandb.summary` without a run: a dictionary whose keys are also
    attributes.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"There is no {name!r} in this configuration.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def update(self, given: Any = None, allow_val_change: bool | None = None, **more: Any) -> None:  # type: ignore[override]
        super().update({**as_mapping(given), **more})

    def setdefaults(self, given: Any) -> None:
        for name, value in as_mapping(given).items():
            self.setdefault(name, value)

    def as_dict(self) -> dict[str, Any]:
        return dict(self)


def as_mapping(given: Any) -> dict[str, Any]:
    """Return what `wandb.init(config=...)` takes as a dictionary."""
    if isinstance(given, argparse.Namespace):
        return dict(vars(given))
    return dict(given) if isinstance(given, Mapping) else {}
