"""A drop-in replacement for `import wandb` in scripts with several ranks: `import paceline.wandb as
wandb`.

Rank 0 has the run. On other ranks, with `--no-wandb`, and if the package, a key or the network is
missing, every call is safe: `init` returns an object that accepts every call, and `config` holds
what you passed. A resumed run continues its W&B run. All other names come from the real package.
"""

from __future__ import annotations

from typing import Any

from paceline.runtime.trackers.wandb_module import WANDB_MODULE

init = WANDB_MODULE.init
log = WANDB_MODULE.log
finish = WANDB_MODULE.finish
agent = WANDB_MODULE.agent


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return WANDB_MODULE.attribute(name)
