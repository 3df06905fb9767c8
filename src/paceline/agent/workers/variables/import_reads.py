"""Which variables Python code reads while a zygote imports, and what they were: a rank's must be the same.

Imports may read variables of any name. What C and C++ code reads is unknown here: see `early_variables`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from paceline.agent.workers.variables.early_variables import READ_LATER, early_variables

# By name, as they were when an import first read them; None if they were not set. Forked processes inherit this.
reads: dict[str, str | None] = {}


_listed: set[str] = set()  # names that somebody who copies all variables reads next


class _RecordedEnviron(os._Environ[str]):
    """`os.environ`, while it notes what is read. A copy of all variables is none: it says nothing about their use."""

    def __iter__(self) -> Iterator[str]:
        for name in super().__iter__():
            _listed.add(name)
            yield name
            _listed.discard(name)

    def __getitem__(self, name: str) -> str:
        if name in _listed:
            return super().__getitem__(name)
        try:
            value = super().__getitem__(name)
        except KeyError:
            reads.setdefault(name, None)
            raise
        reads.setdefault(name, value)
        return value


@contextmanager
def record_reads() -> Iterator[None]:
    """Note in `reads` what imports read meanwhile."""
    plain = type(os.environ)
    os.environ.__class__ = _RecordedEnviron
    try:
        yield
    finally:
        os.environ.__class__ = plain


def find_difference(variables: Mapping[str, str], read: Mapping[str, str | None]) -> str | None:
    """Return a variable of the job that imports have read, and that was another then; None if there is none."""
    early = early_variables(variables)  # compared by themselves
    for name, value in variables.items():
        if name in read and read[name] != value and name not in early and not name.startswith(READ_LATER):
            return name
    return None
