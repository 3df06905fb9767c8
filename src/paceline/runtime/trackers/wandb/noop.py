"""Objects that accept every call and do nothing, for scripts on ranks without a W&B run."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any


class Noop:
    """Callable, empty and false; every attribute, item and result is the object itself."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if _is_special(name):  # or libraries would take it for an array, an iterator, ...
            raise AttributeError(name)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        pass

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return False

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def __repr__(self) -> str:
        return "<no W&B run on this rank>"


NOOP = Noop()


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


class NoopRun:
    """What `wandb.init` and `run.wandb` return on a rank without a W&B run."""

    disabled = True
    offline = True
    resumed = False
    step = 0
    starting_step = 0
    sweep_id: str | None = None
    url: str | None = None
    entity = ""
    notes: str | None = None
    tags: tuple[str, ...] = ()

    def __init__(
        self, config: Mapping[str, Any] | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        options = options or {}  # of `wandb.init`
        self.id = str(options.get("id") or "")
        self.name = str(options.get("name") or "")
        self.project = str(options.get("project") or "")
        self.group = str(options.get("group") or "")
        self.job_type = str(options.get("job_type") or "")
        self.dir = tempfile.gettempdir()
        self.config = AttributeDict(config or {})
        self.summary = AttributeDict()

    def __getattr__(self, name: str) -> Any:
        if _is_special(name):
            raise AttributeError(name)
        return NOOP

    def __enter__(self) -> NoopRun:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def as_mapping(given: Any) -> dict[str, Any]:
    """Return what `wandb.init(config=...)` takes as a dictionary."""
    if given is None:
        return {}
    if isinstance(given, argparse.Namespace):
        return dict(vars(given))
    try:
        return dict(given)
    except (TypeError, ValueError):
        return {}
