"""The implementation of `paceline.wandb`: wandb's functions, safe on every rank and without W&B.

Rank 0 has the run (within `every_process`, every rank has one). Other ranks, and all ranks if W&B
is off or not installed, get objects that accept every call. It works with and without a session,
and without torch.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.contract import wandb_server
from paceline.errors import UsageError
from paceline.runtime.console import note
from paceline.runtime.distributed.identity import Identity, read_identity
from paceline.runtime.launch_context import LaunchContext
from paceline.runtime.trackers.base import RunInfo, Tracking, first_line
from paceline.runtime.trackers.thread import FINISH_TIMEOUT
from paceline.runtime.trackers.wandb import agent, channel, service
from paceline.runtime.trackers.wandb.noop import NOOP, AttributeDict, NoopRun, as_mapping
from paceline.runtime.trackers.wandb.tracker import choose_id, offline_note, rank_name

NAMES = ("project", "group", "entity")  # a change in one of these starts another run


class WandbModule:
    """The state behind the functions: this process's run, and whether every process has one."""

    def __init__(self) -> None:
        self.run: Any = None  # a W&B run or a NoopRun; None before `init`
        self.every_process = False
        self._session_run: Callable[[], Any] | None = None  # returns the W&B run of an open session
        self._is_shared = False  # whether `run` is the session's run
        self.point: agent.Point | None = None  # on ranks that receive a sweep's points from rank 0
        self._is_real = False
        self._runs = 0
        self._names: dict[str, Any] = {}
        self._has_warned = False

    # -- which ranks have a run
    # ------------------------------------------------------------------------

    @functools.cached_property
    def context(self) -> LaunchContext:
        return LaunchContext.read()

    @functools.cached_property
    def tracking(self) -> Tracking:
        return Tracking.of(self.context.launch_spec)

    @property
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
            self.note(f"W&B is disabled: {first_line(error)} (pip install wandb)")
            return None
        return wandb

    @property
    def is_per_rank(self) -> bool:
        return (
            self.every_process or self.tracking.wandb_all_processes
        ) and self.identity.world_size > 1

    @property
    def may_have_run(self) -> bool:
        return self.package is not None and (self.identity.rank == 0 or self.is_per_rank)

    @property
    def is_real(self) -> bool:
        """Whether calls reach wandb: there is a run, or `init` could start one."""
        return self._is_real if self.run is not None else self.may_have_run

    def note(self, text: str) -> None:
        """Print one warning per process, on rank 0."""
        if not self._has_warned and self.identity.rank == 0:
            note(text)
        self._has_warned = True

    # -- starting and finishing
    # ------------------------------------------------------------------------

    def init(self, **options: Any) -> Any:
        """`wandb.init`. A different project or group finishes the current run first."""
        names = {name: options.get(name) for name in NAMES}
        if self.run is not None and not self._starts_another(names, options.get("reinit")):
            self.run.config.update(as_mapping(options.get("config")), allow_val_change=True)
            return self.run
        self.finish()
        self._names = names
        self._runs += 1  # also without a run: all ranks must count alike
        shared = self._session_run() if self._session_run is not None else None
        if shared is not None:
            shared.config.update(as_mapping(options.get("config")), allow_val_change=True)
            self.run, self._is_real, self._is_shared = shared, True, True
        elif self.may_have_run and options.get("mode") != "disabled":
            self.run = self._start(self._choose_options(options))
            self._is_real = not isinstance(self.run, NoopRun)
        else:
            self.run, self._is_real = NoopRun(self._config(options), options), False
        return self.run

    def _starts_another(self, names: dict[str, Any], reinit: Any) -> bool:
        if reinit in (True, "finish_previous", "create_new"):
            return True
        return any(
            value is not None and value != self._names.get(name) for name, value in names.items()
        )

    def _config(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the config of a rank without a run: what the script passed, overridden by the
        sweep's point.
        """
        given = as_mapping(options.get("config"))
        if self.point is not None:
            return {**given, **self.point.values}
        return {**given, **agent.current_point(os.environ).values}

    def _choose_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return options for `wandb.init`: `[tracking]` first, then the script's, then defaults of
        the run folder.
        """
        tracking = self.tracking
        fixed = {
            "project": tracking.wandb_project,
            "group": tracking.wandb_group,
            "entity": tracking.wandb_entity,
        }
        options = {**options, **{name: value for name, value in fixed.items() if value is not None}}
        folder, launch_spec = self.context.folder, self.context.launch_spec
        has_id = options.get("id") or agent.RUN_ID in os.environ or agent.SWEEP_ID in os.environ
        if launch_spec is not None and folder is not None and not has_id:
            # The same after a resume; a script that starts several runs starts them in the same
            # order.
            first = choose_id(RunInfo(run_id=launch_spec.run_id, folder=folder.path), os.environ)
            options["id"] = first if self._runs == 1 else f"{first}-{self._runs}"
            options.setdefault("resume", "allow")
        if folder is not None and "WANDB_DIR" not in os.environ and not options.get("dir"):
            folder.trackers.mkdir(exist_ok=True)
            options["dir"] = str(folder.trackers)
        if self.is_per_rank:
            self._name_by_rank(options)
        if not options.get("mode"):
            mode, problem = wandb_server.choose_mode(os.environ, tracking.wandb_mode)
            options["mode"] = mode
            if problem:
                self._warn_offline(problem, options)
        return options

    def _name_by_rank(self, options: dict[str, Any]) -> None:
        rank = self.identity.rank
        common = options.get("id") or channel.broadcast(lambda: os.urandom(4).hex())
        options["group"] = options.get("group") or os.environ.get("WANDB_RUN_GROUP") or common
        options["id"] = rank_name(common, rank)
        options["name"] = rank_name(options.get("name") or common, rank)

    def _warn_offline(self, problem: str, options: dict[str, Any]) -> None:
        launch_spec = self.context.launch_spec
        folder = Path(options.get("dir") or os.environ.get("WANDB_DIR") or ".", "wandb")
        self.note(offline_note(problem, folder, launch_spec.run_id if launch_spec else ""))

    def _start(self, options: dict[str, Any]) -> Any:
        wandb = self.package
        try:
            run = wandb.init(**options)
            service.limit_exit_hook(FINISH_TIMEOUT)
            return run
        except (wandb.Error, OSError) as error:
            if options.get("mode") == wandb_server.ONLINE:
                self._warn_offline(first_line(error), options)
                return self._start({**options, "mode": wandb_server.OFFLINE})
            self.note(f"W&B is disabled: {first_line(error)}")
            return NoopRun(self._config(options), options)

    def finish(self, exit_code: int | None = None, **options: Any) -> None:
        """`wandb.finish`, which returns even if the service hangs."""
        run, is_own = self.run, self._is_real and not self._is_shared
        self.run, self._is_real, self._is_shared = None, False, False
        if run is None or not is_own:
            return
        try:
            if service.run_within(
                FINISH_TIMEOUT, lambda: run.finish(exit_code=exit_code, **options)
            ):
                return
            self._has_warned = False
            self.note(f"W&B did not finish within {FINISH_TIMEOUT:.0f} s: giving up on it")
            service.kill_service()
        except (self.package.Error, OSError) as error:
            self.note(f"W&B did not finish: {first_line(error)}")
        service.forget_service(self.package)

    def share(self, session_run: Callable[[], Any] | None) -> None:
        """Use the W&B run of a session; None when the session ends."""
        self._session_run = session_run
        if session_run is None and self._is_shared:
            self.run, self._is_real, self._is_shared = None, False, False

    # -- the rest
    # --------------------------------------------------------------------------------------

    def log(self, *args: Any, **options: Any) -> None:
        if self.run is None and self.may_have_run:
            self.package.log(*args, **options)  # raises wandb's own error about `init`
        elif self._is_real:
            try:
                self.run.log(*args, **options)
            except ConnectionError as error:
                self.note(f"W&B gets no more values: {first_line(error)}")
                self.run, self._is_real = NoopRun(dict(self.run.config)), False

    def attribute(self, name: str) -> Any:
        """Return any other name of wandb. Without a run, its functions do nothing; its classes are
        the real ones.
        """
        if name == "run":
            return self.run
        if name in ("config", "summary"):
            if self.run is not None:
                return getattr(self.run, name)
            return (
                getattr(self.package, name)
                if self.may_have_run
                else AttributeDict(self._config({}))
            )
        if self.package is None:
            return NOOP
        found = getattr(self.package, name)
        is_function = callable(found) and not isinstance(found, (type, types.ModuleType))
        return NOOP if is_function and not self.is_real else found

    def sweep(self, *args: Any, **options: Any) -> str:
        """`wandb.sweep`: rank 0 creates it and all ranks get its id; empty without W&B."""
        if self.package is None:
            return ""
        return channel.broadcast(lambda: str(self.package.sweep(*args, **options)))

    def agent(
        self, sweep_id: str, function: Callable[[], Any] | None = None, **options: Any
    ) -> None:
        """`wandb.agent`: rank 0 requests points, and all ranks call `function` with the same
        `wandb.config`.
        """
        if self.package is None or not sweep_id:
            self.note(
                "W&B is off: there is no sweep to run, so wandb.agent does not call the function"
            )
            return
        if self.identity.world_size == 1:
            self.package.agent(sweep_id, function=function, **options)
            return
        if function is None:
            raise UsageError(
                "wandb.agent needs a function when there are several ranks.",
                hint="Pass the function that trains, or use paceline sweep --wandb-sweep.",
            )
        if self.identity.rank == 0:
            self._lead(sweep_id, function, options)
        else:
            self._follow(function)

    def _lead(self, sweep_id: str, function: Callable[[], Any], options: dict[str, Any]) -> None:
        known = {key: options.get(key) for key in ("count", "project", "entity")}

        def train(point: agent.Point) -> None:
            channel.send(point.to_json())
            try:
                function()
            finally:
                self.finish(exit_code=1 if sys.exc_info()[0] else 0)

        try:
            agent.run_points(sweep_id, train, **known)
        finally:
            channel.send("")
        channel.wait_until_received()

    def _follow(self, function: Callable[[], Any]) -> None:
        while text := channel.receive():
            self.point = agent.Point.from_json(text)
            try:
                function()
            finally:
                self.finish()
                self.point = None


WANDB_MODULE = WandbModule()
