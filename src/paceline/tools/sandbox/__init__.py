"""A real Slurm cluster on one machine, for trying things out and for tests."""

from __future__ import annotations

from paceline.tools.sandbox.packages import missing_packages
from paceline.tools.sandbox.sandbox import Node, Sandbox
from paceline.tools.sandbox.settings import NAMESPACES, PLAIN, Settings

__all__ = ["NAMESPACES", "PLAIN", "Node", "Sandbox", "Settings", "missing_packages"]
