"""A real Slurm cluster on one machine, for trying things out and for tests."""

from __future__ import annotations

from paceline.sandbox.packages import missing_packages
from paceline.sandbox.sandbox import Node, Sandbox
from paceline.sandbox.settings import NAMESPACES, PLAIN, Settings

__all__ = ["NAMESPACES", "PLAIN", "Node", "Sandbox", "Settings", "missing_packages"]
