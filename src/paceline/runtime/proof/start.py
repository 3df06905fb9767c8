"""Start the recorder of this rank, once."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.contract import env
from paceline.contract.rank_records import ProofSpec
from paceline.runtime.distributed.identity import read_identity
from paceline.runtime.proof.patches import install
from paceline.runtime.proof.recorder import Recorder

_recorder: Recorder | None = None


def start_recorder() -> Recorder:
    """Start recording as the spec says that PACELINE_PROOF names. Called before the script, or by
    its session.
    """
    global _recorder
    if _recorder is None:
        identity = read_identity()
        spec = ProofSpec.read(Path(os.environ[env.PROOF]))
        _recorder = Recorder(spec, rank=identity.rank, world_size=identity.world_size)
        install(_recorder)
        atexit.register(_recorder.end_at_exit)
    return _recorder


def attach_recorder(run: Any) -> Callable[[], None]:
    """Let the recorder count steps as the session does. Returns what all ranks call at the end of
    the session.
    """
    recorder = start_recorder()
    recorder.attach(run)
    return recorder.end
