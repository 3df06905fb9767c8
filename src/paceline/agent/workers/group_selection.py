"""Which worker group runs the attempts of an agent: forked by a zygote, started by torchrun, or as
new processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from paceline.agent.health.heartbeat import Heartbeats
from paceline.agent.launcher_placement import Placement
from paceline.agent.workers.exec_ranks import ExecRanks
from paceline.agent.workers.forked_ranks import ForkedRanks, Interrupted, UnsafeToFork
from paceline.agent.workers.started_ranks import StartedRanks
from paceline.agent.workers.torchrun_ranks import TorchrunRanks
from paceline.contract import env
from paceline.contract.launch_spec import LaunchSpec
from paceline.errors import LaunchError


class GroupSelection:
    """Selects a worker group once; restarts use the same one. `zygote` is the one that `main`
    started.
    """

    def __init__(
        self,
        launch_spec: LaunchSpec,
        environ: Mapping[str, str],
        *,
        zygote: ForkedRanks | None,
        interrupted: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self._launch_spec, self._environ = launch_spec, environ
        self._zygote = zygote
        self._selected: StartedRanks | None = None
        self._interrupted, self._say = interrupted, say

    def select(self, placement: Placement, heartbeats: Heartbeats) -> StartedRanks:
        """Return the worker group for the next attempt. Wait until its zygote has imported
        torch.
        """
        if self._zygote is not None and self._zygote_is_ready():
            return self._zygote
        if self._selected is None:
            style = self._launch_spec.style
            # mpirun starts one agent per rank, or one per node whose ranks torchrun starts.
            per_rank = placement.count == self._launch_spec.world_size
            if style == "torchrun" or (style == "mpirun" and not per_rank):
                self._selected = TorchrunRanks(heartbeats)
            else:
                self._selected = ExecRanks(per_node=style == "spawn")
        return self._selected

    def close(self) -> None:
        for group in (self._selected, self._zygote):
            if group is not None:
                group.close()

    def _zygote_is_ready(self) -> bool:
        """Wait for the zygote; replace one that was killed, and close one that must not fork."""
        assert self._zygote is not None
        if self._zygote.gone:
            self._zygote.close()
            environ = {name: value for name, value in self._environ.items() if name != env.ZYGOTE}
            self._zygote = ForkedRanks.prepare(self._launch_spec, environ)
        try:
            self._zygote.wait_until_ready(self._interrupted, self._say)
        except Interrupted:
            raise LaunchError("Interrupted before the ranks started.") from None
        except UnsafeToFork as why:
            self._say(f"starting ranks as new processes instead of forking them: {why}")
            self._zygote.close()
            self._zygote = None
            return False
        return True
