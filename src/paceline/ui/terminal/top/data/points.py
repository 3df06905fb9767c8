"""The parameters of a trial."""

from __future__ import annotations

from typing import Any

from paceline.contract.files.foreign_records import read_object
from paceline.contract.run_folder import RunFolder
from paceline.contract.sweep.folder import TrialFolder


def read_point(folder: RunFolder) -> dict[str, Any]:
    """Return the parameters of a trial that has started; nothing of other runs."""
    try:
        point = read_object(TrialFolder(folder.path).trial).get("point")
    except (OSError, ValueError):
        return {}
    return point if isinstance(point, dict) else {}
