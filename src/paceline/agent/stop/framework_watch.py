"""Notices which frameworks a rank imports, wherever the import is: in the script, in the project
or in a library.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from paceline.agent.health import heartbeat
from paceline.agent.stop.framework_common_step import CommonStep
from paceline.contract.frameworks import PRESETS

MODULES = {
    module: number for number, preset in enumerate(PRESETS, start=1) for module in preset.modules
}


def watch_frameworks(heartbeat_file: str, local_rank: int) -> None:
    """From now on, tell the agent about frameworks that this process imports, and about those it
    already has.
    """
    watch = FrameworkWatch(heartbeat_file, local_rank)
    for module in MODULES.keys() & sys.modules.keys():
        watch.report(module)
    sys.meta_path.insert(0, watch)


class FrameworkWatch:
    """Asked first for every module that is not imported yet; it never finds one."""

    def __init__(self, heartbeat_file: str, local_rank: int) -> None:
        self._heartbeat_file, self._local_rank, self._pid = heartbeat_file, local_rank, os.getpid()
        self._is_first = True
        self._steps: CommonStep | None = None  # to be installed as soon as torch is imported

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if os.getpid() == self._pid:
            if self._steps is not None and self._steps.install():
                self._steps = None
            if name in MODULES:
                self.report(name)
        return None

    def report(self, module: str) -> None:
        heartbeat.write_framework(
            self._heartbeat_file, local_rank=self._local_rank, number=MODULES[module]
        )
        if self._is_first and os.path.exists(self._heartbeat_file):
            self._is_first = False
            steps = CommonStep(self._heartbeat_file, self._local_rank)
            self._steps = None if steps.install() else steps
