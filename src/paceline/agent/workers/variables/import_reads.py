"""Which variables Python code reads while a zygote imports, and their values: a rank must have the
same values.

Imports may read variables of any name. What C and C++ code reads is unknown here: see
`early_variables`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from paceline.agent.workers.variables.early_variables import READ_LATER, early_variables

# By name, as they were when an import first read them; None if they were not set. Forked processes
# inherit this.
reads: dict[str, str | None] = {}


class _Listing:
    """Somebody goes through all names. Who reads all of them in this order makes a copy, perhaps
    with a filter.

    That is not noted: it says nothing about their use, and torch itself imports modules that do it
    (`items()`).
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names, self._values = names, dict[str, str]()

    def takes(self, name: str, value: str) -> bool:
        """Whether this is the next read of a copy, as far as anybody knows yet."""
        done = len(self._values)
        if done < len(self._names) and self._names[done] == name:
            self._values[name] = value
            return True
        return False

    def end(self) -> None:
        """Note what was read if that was no copy."""
        if len(self._values) < len(self._names):
            for name, value in self._values.items():
                reads.setdefault(name, value)


_listing = _Listing()  # the last one


class _RecordedEnviron(os._Environ[str]):
    """`os.environ`, while it notes what is read."""

    def __iter__(self) -> Iterator[str]:
        names = list(super().__iter__())
        _begin_listing(names)
        return iter(names)

    def __getitem__(self, name: str) -> str:
        try:
            value = super().__getitem__(name)
        except KeyError:
            reads.setdefault(name, None)
            raise
        if not _listing.takes(name, value):
            reads.setdefault(name, value)
        return value


def _begin_listing(names: Sequence[str]) -> None:
    global _listing
    _listing.end()
    _listing = _Listing(names)


@contextmanager
def record_reads() -> Iterator[None]:
    """Note in `reads` what imports read meanwhile."""
    plain = type(os.environ)
    os.environ.__class__ = _RecordedEnviron
    try:
        yield
    finally:
        os.environ.__class__ = plain
        _begin_listing(())


def find_difference(variables: Mapping[str, str], read: Mapping[str, str | None]) -> str | None:
    """Return a variable of the job that imports have read, and that was another then; None if
    there is none.
    """
    early = early_variables(variables)  # compared by themselves
    for name, value in variables.items():
        if (
            name in read
            and read[name] != value
            and name not in early
            and not name.startswith(READ_LATER)
        ):
            return name
    return None
