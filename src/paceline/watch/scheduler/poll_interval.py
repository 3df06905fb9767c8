"""How often Paceline asks the scheduler."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

from paceline.contract.env import POLL_INTERVAL
from paceline.contract.files.foreign_records import read_bounded
from paceline.errors import UsageError
from paceline.spec.quantities import parse_seconds
from paceline.spec.site import find_site

DEFAULT = 60.0
SANDBOX_FILE = "poll-interval"  # beside the slurm.conf of a sandbox, which you share with nobody


def poll_interval() -> float:
    """Return for how many seconds an answer of the scheduler counts: never less than the site
    allows.
    """
    at_least = float(find_site().limits.poll_interval or 0)
    return max(at_least, _chosen(at_least or DEFAULT))


def _chosen(default: float) -> float:
    text = os.environ.get(POLL_INTERVAL, "") or _sandbox_interval()
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = _parse(text)
    if not (math.isfinite(seconds) and seconds >= 0):
        raise _invalid(text)
    return seconds


def _sandbox_interval() -> str:
    conf = os.environ.get("SLURM_CONF", "")
    with suppress(OSError, ValueError):
        return (
            read_bounded(Path(conf).with_name(SANDBOX_FILE), 100).decode().strip() if conf else ""
        )
    return ""


def _parse(text: str) -> float:
    try:
        return float(parse_seconds(text))
    except ValueError:
        raise _invalid(text) from None


def _invalid(text: str) -> UsageError:
    return UsageError(
        f"Invalid {POLL_INTERVAL} {text!r}.", hint="Use seconds, or a duration such as 90s or 2m."
    )
