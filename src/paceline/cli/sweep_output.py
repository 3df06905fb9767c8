"""W&B sweeps on the command line: which one it is, and whether its service can be asked, before anything is queued."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from paceline.cli import console
from paceline.cluster.secrets.secrets import read_secrets
from paceline.contract.sweep_folder import Search
from paceline.sweep.folder import Ledger
from paceline.sweep.settings import Setting
from paceline.sweep.wandb_service import check_reachable, create_sweep


def warn_of_two(setting: Setting, file: Path, typed: str | None) -> None:
    """What a file says wins over the flag, and both are shown."""
    found = setting.search.wandb_sweep
    if typed is None or typed == found:
        return
    said = setting.job.source("tracking.wandb_sweep") if found == setting.job.tracking.wandb_sweep else ""
    where = said or f"[sweep] wandb_sweep in {file}"
    console.say_note(f"--wandb-sweep is {typed}, and {where} is {found}: the latter is used")


def settle(search: Search, setting: Setting, ledger: Ledger) -> Search:
    """Refuse what cannot be asked; make the sweep that a sweep.yml describes, unless an earlier start has made it."""
    if search.sampler != "wandb":
        return search
    filed = {**setting.job.environment.variables, **read_secrets(setting.job, os.environ).values}
    check_reachable({**os.environ, **filed})
    if not search.wandb_sweep:
        known = "" if ledger.is_new else ledger.folder.read_search().wandb_sweep
        assert setting.wandb_config is not None
        search = replace(search, wandb_sweep=known or create_sweep(setting.wandb_config, filed))
    console.say_note(f"points come from the W&B sweep {search.wandb_sweep}")
    ledger.folder.asked_for_all.unlink(missing_ok=True)  # it may have got more points since
    return search
