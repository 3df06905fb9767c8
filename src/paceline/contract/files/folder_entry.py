"""Files and folders that a class names once: `metrics = Entry("metrics.jsonl")`."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class HasPath(Protocol):
    @property
    def path(self) -> Path: ...


class Entry:
    """An attribute of a folder class: the path of one of its files or sub-folders."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: HasPath, owner: type | None = None) -> Path:
        return folder.path / self._name
