"""Start the probe of this rank, once."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.contract import env
from paceline.contract.files.probe_spec import ProbeSpec
from paceline.runtime.distributed.identity import read_identity
from paceline.runtime.probe.patches import install
from paceline.runtime.probe.recorder import Probe

_probe: Probe | None = None


def start_probe() -> Probe:
    """Start recording as the spec says that PACELINE_PROBE names. Called before the script, or by its session."""
    global _probe
    if _probe is None:
        identity = read_identity()
        spec = ProbeSpec.read(Path(os.environ[env.PROBE]))
        _probe = Probe(spec, rank=identity.rank, world_size=identity.world_size)
        install(_probe)
        atexit.register(_probe.end_at_exit)
    return _probe


def attach_probe(run: Any) -> Callable[[], None]:
    """Let the probe count steps as the session does. Returns what all ranks call at the end of the session."""
    probe = start_probe()
    probe.attach(run)
    return probe.end
