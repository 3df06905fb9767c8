"""The implementation of `paceline.wandb`: wandb's functions, safe on every rank and without W&B.

Rank 0 has the run. Other ranks, and all ranks if W&B is off or not installed, get objects that
accept every call. It works with and without a session, and without torch.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable
from typing import Any

from paceline.errors import UsageError
from paceline.runtime.console import note
from paceline.runtime.distributed.identity import Identity, read_identity
from paceline.runtime.settings import LaunchContext
from paceline.runtime.trackers import wandb_points as points
from paceline.runtime.trackers.base import RunInfo, Tracking, first_line
from paceline.runtime.trackers.wandb_noop import NOOP, AttributeDict, NoopRun, as_mapping
from paceline.runtime.trackers.wandb_run import choose_id, init_run

NAMES = ("project", "group", "entity")  # a change in one of these starts another run


class WandbModule:
    """The state behind the functions: this process's run."""

    def __init__(self) -> None:
        self.run: Any = None  # a W&B run or a NoopRun; None before `init`
        self.session_run: Callable[[], Any] | None = None  # returns the W&B run of an open session
        self._is_shared = False  # whether `run` is the session's run
        self._runs = 0
        self._names: dict[str, Any] = {}

    # -- which ranks have a run
    # ------------------------------------------------------------------------

    @functools.cached_property
    def context(self) -> LaunchContext:
        return LaunchContext.read()

    @functools.cached_property
    def tracking(self) -> Tracking:
        return Tracking.of(self.context.launch_spec)

    @functools.cached_property
    def identity(self) -> Identity:
        return read_identity()

    @functools.cached_property
    def package(self) -> Any:
        """The real wandb; None if it is off or not installed."""
        if self.tracking.wandb is False:
            return None
        try:
            import wandb
        except ImportError as error:
            if self.identity.rank == 0:
                note(f"W&B is disabled: {first_line(error)} (pip install wandb)")
            return None
        return wandb

    @property
    def is_real(self) -> bool:
        """Whether calls reach wandb: there is a run, or `init` could start one."""
        if self.run is not None:
            return not isinstance(self.run, NoopRun)
        return self.package is not None and self.identity.rank == 0

    # -- starting and finishing
    # ------------------------------------------------------------------------

    def init(self, **options: Any) -> Any:
        """`wandb.init`. A different project or group finishes the current run first."""
        names = {name: options.get(name) for name in NAMES}
        if self.run is None or self._starts_another(names, options.get("reinit")):
            self.finish()
            self._names = names
            self._runs += 1
            shared = self.session_run() if self.session_run is not None else None
            if shared is None:
                self.run = self._start(options)
                return self.run
            self.run, self._is_shared = shared, True
        self.run.config.update(as_mapping(options.get("config")), allow_val_change=True)
        return self.run

    def _starts_another(self, names: dict[str, Any], reinit: Any) -> bool:
        if reinit in (True, "finish_previous", "create_new"):
            return True
        return any(
            value is not None and value != self._names.get(name) for name, value in names.items()
        )

    def _start(self, options: dict[str, Any]) -> Any:
        if self.is_real and options.get("mode") != "disabled":
            launch_spec = self.context.launch_spec
            send = launch_spec.run_id if launch_spec else ""
            try:
                return init_run(
                    self.package, self._choose_options(options), self.tracking, send=send
                )
            except (self.package.Error, OSError) as error:
                note(f"W&B is disabled: {first_line(error)}")
        return NoopRun(**{**options, "config": self._config(options)})

    def _config(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the config of a rank without a run: what the script passed, overridden by the
        sweep's point.
        """
        return {**as_mapping(options.get("config")), **points.read_point(os.environ)}

    def _choose_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return options for `wandb.init`: `[tracking]` first, then the script's, then defaults of
        the run folder.
        """
        tracking, options = self.tracking, {**options}
        options["project"] = tracking.wandb_project or options.get("project")
        options["group"] = tracking.wandb_group or options.get("group")
        options["entity"] = tracking.wandb_entity or options.get("entity")
        folder, launch_spec = self.context.folder, self.context.launch_spec
        has_id = options.get("id") or points.RUN_ID in os.environ or points.SWEEP_ID in os.environ
        if launch_spec is not None and not has_id:
            first = choose_id(RunInfo(run_id=launch_spec.run_id), os.environ)
            options["id"] = first if self._runs == 1 else f"{first}-{self._runs}"
            options.setdefault("resume", "allow")
        if folder is not None and "WANDB_DIR" not in os.environ and not options.get("dir"):
            folder.trackers.mkdir(exist_ok=True)
            options["dir"] = str(folder.trackers)
        return options

    def finish(self, exit_code: int | None = None, **options: Any) -> None:
        """`wandb.finish`; a session finishes its run itself."""
        run, is_own = self.run, self.is_real and not self._is_shared
        self.run, self._is_shared = None, False
        if run is not None and is_own:
            try:
                run.finish(exit_code=exit_code, **options)
            except (self.package.Error, OSError) as error:
                note(f"W&B did not finish: {first_line(error)}")

    def share(self, session_run: Callable[[], Any] | None) -> None:
        """Use the W&B run of a session; None when the session ends."""
        self.session_run = session_run
        if session_run is None and self._is_shared:
            self.run, self._is_shared = None, False

    # -- the rest
    # --------------------------------------------------------------------------------------

    def log(self, *args: Any, **options: Any) -> None:
        if self.is_real and self.run is None:
            self.package.log(*args, **options)  # raises wandb's own error about `init`
        elif self.is_real:
            try:
                self.run.log(*args, **options)
            # its service has ended: a signal to all processes of a job reaches it, too
            except ConnectionError as error:
                note(f"W&B gets no more values: {first_line(error)}")
                self.run = NoopRun(dict(self.run.config))

    def attribute(self, name: str) -> Any:
        """Return any other name of wandb. Without a run, its functions do nothing; its classes are
        the real ones.
        """
        if name == "run":
            return self.run
        if name in ("config", "summary") and (self.run is not None or not self.is_real):
            return (
                getattr(self.run, name) if self.run is not None else AttributeDict(self._config({}))
            )
        if self.package is None:
            return NOOP
        found = getattr(self.package, name)
        is_function = callable(found) and not isinstance(found, (type, types.ModuleType))
        return NOOP if is_function and not self.is_real else found

    def agent(
        self, sweep_id: str, function: Callable[[], Any] | None = None, **options: Any
    ) -> None:
        """`wandb.agent`, which trains in one process."""
        if self.package is None or not sweep_id:
            note("W&B is off: there is no sweep to run, so wandb.agent does not call the function")
            return
        if self.identity.is_distributed:
            raise UsageError(
                f"wandb.agent was called on {self.identity.world_size} ranks.",
                hint="Use paceline sweep --wandb-sweep: each point is a run, on any number of "
                "ranks.",
            )
        self.package.agent(sweep_id, function=function, **options)


WANDB_MODULE = WandbModule()
