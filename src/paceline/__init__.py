"""Paceline takes a PyTorch script from a laptop to every GPU of a Slurm cluster, and keeps it
running until it is done.

Public names are resolved on first use, so that `import paceline` does not import torch.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # importing typing's would take longer than everything else here
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

# Each public name and its module.
_NAMES = {
    "Identity": "paceline.runtime.distributed.identity",
    "PacelineError": "paceline.errors",
    "Run": "paceline.runtime.run",
    "ShardedIterable": "paceline.runtime.data.sharded_iterable",
    "Tracker": "paceline.runtime.trackers.base",
    "count_flops": "paceline.runtime.training.flops",
    "read_identity": "paceline.runtime.distributed.identity",
    "report": "paceline.runtime.metrics.report",
    "seed_everything": "paceline.runtime.randomness",
    "session": "paceline.runtime.session",
    "spawn": "paceline.runtime.distributed.spawn",
    "start": "paceline.runtime.start",
    "transformer_flops": "paceline.runtime.training.flops",
}

_MODULES = ("wandb",)  # public modules

__all__ = [*sorted([*_NAMES, *_MODULES]), "__version__"]  # noqa: PLE0604 - the names are strings from a table

if TYPE_CHECKING:
    from paceline.errors import PacelineError as PacelineError
    from paceline.runtime.data.sharded_iterable import ShardedIterable as ShardedIterable
    from paceline.runtime.distributed.identity import Identity as Identity
    from paceline.runtime.distributed.identity import read_identity as read_identity
    from paceline.runtime.distributed.spawn import spawn as spawn
    from paceline.runtime.metrics.report import report as report
    from paceline.runtime.randomness import seed_everything as seed_everything
    from paceline.runtime.run import Run as Run
    from paceline.runtime.session import session as session
    from paceline.runtime.start import start as start
    from paceline.runtime.trackers.base import Tracker as Tracker
    from paceline.runtime.training.flops import count_flops as count_flops
    from paceline.runtime.training.flops import transformer_flops as transformer_flops


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(importlib.import_module(_NAMES[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"paceline.{name}")
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
