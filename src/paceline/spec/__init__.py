"""What the user asked for: frozen, validated data from `paceline.toml` and the command line.

Names are resolved on first use, so that the table of options alone imports no pydantic.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.spec.job import Job, Program
    from paceline.spec.load import load_job
    from paceline.spec.typed_flags import Flag

__all__ = ["Flag", "Job", "Program", "load_job"]

_MODULES = {"Flag": "typed_flags", "Job": "job", "Program": "job", "load_job": "load"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'paceline.spec' has no attribute {name!r}")
    return getattr(importlib.import_module(f"paceline.spec.{_MODULES[name]}"), name)
