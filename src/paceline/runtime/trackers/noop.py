"""Objects that take every call and do nothing: what a script holds where there is no W&B run."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any


class Nothing:
    """Callable, empty, false; every attribute, item and result of it is itself."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(
                name
            )  # or it would pass for an array, an iterator, and all else that is asked
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
        return "<nothing: there is no W&B run on this rank>"


NOTHING = Nothing()


class Values(dict[str, Any]):
    """`wandb.config` and `wandb.summary` where there is no run: a dictionary whose keys are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no {name!r} in this configuration") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def update(self, given: Any = None, allow_val_change: bool | None = None, **more: Any) -> None:  # type: ignore[override]
        super().update({**as_mapping(given), **more})

    def setdefaults(self, given: Any) -> None:
        for name, value in as_mapping(given).items():
            self.setdefault(name, value)

    def as_dict(self) -> dict[str, Any]:
        return dict(self)


class NoRun:
    """A W&B run on a rank that has none."""

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
        names = options or {}  # of `wandb.init`
        self.id = str(names.get("id") or "")
        self.name = str(names.get("name") or "")
        self.project = str(names.get("project") or "")
        self.group = str(names.get("group") or "")
        self.job_type = str(names.get("job_type") or "")
        self.dir = tempfile.gettempdir()
        self.config = Values(config or {})
        self.summary = Values()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return NOTHING

    def __enter__(self) -> NoRun:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


def as_mapping(given: Any) -> dict[str, Any]:
    """What `wandb.init(config=...)` takes, as a dictionary."""
    if given is None:
        return {}
    if isinstance(given, argparse.Namespace):
        return dict(vars(given))
    try:
        return dict(given)
    except (TypeError, ValueError):
        return {}
