"""What a script has passed to `run.config`."""

from __future__ import annotations

from typing import Any

from paceline.contract.files.foreign_records import parse_object, read_bounded
from paceline.contract.run_folder import RunFolder


def read_config(folder: RunFolder) -> dict[str, Any]:
    """Return the settings of a run; empty if its script has passed none."""
    try:
        return parse_object(read_bounded(folder.config))
    except (OSError, ValueError):
        return {}


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings under names such as `model.width`."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= (
            flatten(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else {f"{prefix}{name}": value}
        )
    return found
