"""A real Slurm whose jobs run in a real container: its image has torch, and nothing of Paceline.

These tests run inside the root that `tests.debian13.root` makes, which is where the image is.
"""

from __future__ import annotations

from pathlib import Path

from tests.slurm.conftest import cluster, sandbox, slurm_paceline

__all__ = ["cluster", "sandbox", "slurm_paceline"]

IMAGE = Path("/mnt/image")
CONFIG = f"""
[environment]
kind = "container"
image = "{IMAGE}"
"""

collect_ignore_glob = [] if IMAGE.is_dir() else ["test_*.py"]
