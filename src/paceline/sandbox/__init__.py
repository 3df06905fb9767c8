"""A real Slurm on one machine, to rehearse on and to test with."""

from __future__ import annotations

from paceline.sandbox.packages import missing_packages
from paceline.sandbox.sandbox import Node, Sandbox, is_orphaned
from paceline.sandbox.settings import NAMESPACES, PLAIN, Settings

__all__ = ["NAMESPACES", "PLAIN", "Node", "Sandbox", "Settings", "is_orphaned", "missing_packages"]
