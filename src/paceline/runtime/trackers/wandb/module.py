"""What `paceline.wandb` is made of: wandb's functions, safe on every rank and where there is no W&B.

One rank has the run (each of them within `every_process`); the others, and all of them when W&B is off or missing,
get objects that take every call. Works with and without a session, and without torch.
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
from paceline.runtime.distributed.identity import Identity, read_identity
from paceline.runtime.launch_context import LaunchContext
from paceline.runtime.trackers import channel
from paceline.runtime.trackers.base import RunInfo, Tracking, first_line, warn
from paceline.runtime.trackers.feed import PATIENCE
from paceline.runtime.trackers.noop import NOTHING, NoRun, Values, as_mapping
from paceline.runtime.trackers.wandb import agent, service
from paceline.runtime.trackers.wandb.run import choose_id, rank_name

NAMES = ("project", "group", "entity")  # of which another one means another run


class Standin:
    """The state behind the functions: this process's run, and whether every process has one."""

    def __init__(self) -> None:
        self.run: Any = None  # real or not; None before `init`
        self.every_process = False
        self._session_run: Callable[[], Any] | None = None  # the W&B run of an open session, if it has one
        self._is_shared = False  # it is the session's run that `run` holds
        self.point: agent.Point | None = None  # on ranks to which rank 0 hands the points of a sweep
        self._is_real = False
        self._runs = 0
        self._names: dict[str, Any] = {}
        self._told = False

    # -- who and whether -------------------------------------------------------------------------------

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
        """The real wandb; None when it is not wanted or not there, which is said once, on rank 0."""
        if self.tracking.wandb is False:
            return None
        try:
            import wandb
        except ImportError as error:
            self.tell(f"W&B is left out: {first_line(error)} (pip install wandb)")
            return None
        return wandb

    @property
    def everyone(self) -> bool:
        return (self.every_process or self.tracking.wandb_all_processes) and self.identity.world_size > 1

    @property
    def may_have_a_run(self) -> bool:
        return self.package is not None and (self.identity.rank == 0 or self.everyone)

    @property
    def is_real(self) -> bool:
        """Whether calls reach wandb: there is a run, or one could be begun."""
        return self._is_real if self.run is not None else self.may_have_a_run

    def tell(self, text: str) -> None:
        """One warning in a process is enough, and one process."""
        if not self._told and self.identity.rank == 0:
            warn(text)
        self._told = True

    # -- beginning and ending --------------------------------------------------------------------------

    def init(self, **options: Any) -> Any:
        """`wandb.init`. With another project or group than before, the run before is finished."""
        names = {name: options.get(name) for name in NAMES}
        if self.run is not None and not self._begins_another(names, options.get("reinit")):
            self.run.config.update(as_mapping(options.get("config")), allow_val_change=True)
            return self.run
        self.finish()
        self._names = names
        self._runs += 1  # also where there is none: ranks count alike
        shared = self._session_run() if self._session_run is not None else None
        if shared is not None:
            shared.config.update(as_mapping(options.get("config")), allow_val_change=True)
            self.run, self._is_real, self._is_shared = shared, True, True
        elif self.may_have_a_run and options.get("mode") != "disabled":
            self.run = self._begin(self._chosen(options))
            self._is_real = not isinstance(self.run, NoRun)
        else:
            self.run, self._is_real = NoRun(self._config(options), options), False
        return self.run

    def _begins_another(self, names: dict[str, Any], reinit: Any) -> bool:
        if reinit in (True, "finish_previous", "create_new"):
            return True
        return any(value is not None and value != self._names.get(name) for name, value in names.items())

    def _config(self, options: dict[str, Any]) -> dict[str, Any]:
        """What a rank without a run has as its configuration: what was given, and the sweep's point over it."""
        given = as_mapping(options.get("config"))
        if self.point is not None:
            return {**given, **self.point.values}
        return {**given, **agent.current_point(os.environ).values}

    def _chosen(self, options: dict[str, Any]) -> dict[str, Any]:
        """The script's options; over them what the command line says; under them what a run folder offers."""
        said = self.tracking
        over = {"project": said.wandb_project, "group": said.wandb_group, "entity": said.wandb_entity}
        options = {**options, **{name: value for name, value in over.items() if value is not None}}
        folder, launch_spec = self.context.folder, self.context.launch_spec
        has_id = options.get("id") or agent.RUN_ID in os.environ or agent.SWEEP_ID in os.environ
        if launch_spec is not None and folder is not None and not has_id:
            # The same after a resume; a script that begins several runs begins them in the same order.
            first = choose_id(RunInfo(run_id=launch_spec.run_id, folder=folder.path), os.environ)
            options["id"] = first if self._runs == 1 else f"{first}-{self._runs}"
            options.setdefault("resume", "allow")
        if folder is not None and "WANDB_DIR" not in os.environ and not options.get("dir"):
            folder.trackers.mkdir(exist_ok=True)
            options["dir"] = str(folder.trackers)
        if self.everyone:
            self._name_by_rank(options)
        if not options.get("mode"):
            mode, problem = wandb_server.choose_mode(os.environ, said.wandb_mode)
            options["mode"] = mode
            if problem:
                self.tell(f"W&B: {problem}: {self._kept_in(options)}")
        return options

    def _name_by_rank(self, options: dict[str, Any]) -> None:
        rank = self.identity.rank
        common = options.get("id") or channel.same_on_all(lambda: os.urandom(4).hex())
        options["group"] = options.get("group") or os.environ.get("WANDB_RUN_GROUP") or common
        options["id"] = rank_name(common, rank)
        options["name"] = rank_name(options.get("name") or common, rank)

    def _kept_in(self, options: dict[str, Any]) -> str:
        launch_spec = self.context.launch_spec
        send = f"; send it later: paceline sync {launch_spec.run_id}" if launch_spec else ""
        place = Path(options.get("dir") or os.environ.get("WANDB_DIR") or ".", "wandb")
        return f"the run is kept in {place}{send}"

    def _begin(self, options: dict[str, Any]) -> Any:
        wandb = self.package
        try:
            run = wandb.init(**options)
            service.guard_the_exit(PATIENCE)
            return run
        except (wandb.Error, OSError) as error:
            if options.get("mode") == wandb_server.ONLINE:
                self.tell(f"W&B: {first_line(error)}: {self._kept_in(options)}")
                return self._begin({**options, "mode": wandb_server.OFFLINE})
            self.tell(f"W&B is left out: {first_line(error)}")
            return NoRun(self._config(options), options)

    def finish(self, exit_code: int | None = None, **options: Any) -> None:
        """`wandb.finish`, which comes to its end even when the service does not."""
        run, is_own = self.run, self._is_real and not self._is_shared
        self.run, self._is_real, self._is_shared = None, False, False
        if run is None or not is_own:
            return
        try:
            if service.within(PATIENCE, lambda: run.finish(exit_code=exit_code, **options)):
                return
            self._told = False
            self.tell(f"W&B did not finish within {PATIENCE:.0f} s: it is left behind")
            service.end_service()
        except (self.package.Error, OSError) as error:
            self.tell(f"W&B did not finish: {first_line(error)}")
        service.forget_service(self.package)

    def share(self, session_run: Callable[[], Any] | None) -> None:
        """A session that has a W&B run lends it; None takes it back."""
        self._session_run = session_run
        if session_run is None and self._is_shared:
            self.run, self._is_real, self._is_shared = None, False, False

    # -- the rest --------------------------------------------------------------------------------------

    def log(self, *args: Any, **options: Any) -> None:
        if self.run is None and self.may_have_a_run:
            self.package.log(*args, **options)  # wandb's own words about `init`
        elif self._is_real:
            try:
                self.run.log(*args, **options)
            except ConnectionError as error:
                self.tell(f"W&B gets no more values: {first_line(error)}")
                self.run, self._is_real = NoRun(dict(self.run.config)), False

    def attribute(self, name: str) -> Any:
        """Whatever else wandb has. Where there is no run, its functions do nothing; its classes are themselves."""
        if name == "run":
            return self.run
        if name in ("config", "summary"):
            if self.run is not None:
                return getattr(self.run, name)
            return getattr(self.package, name) if self.may_have_a_run else Values(self._config({}))
        if self.package is None:
            return NOTHING
        found = getattr(self.package, name)
        is_function = callable(found) and not isinstance(found, (type, types.ModuleType))
        return NOTHING if is_function and not self.is_real else found

    def sweep(self, *args: Any, **options: Any) -> str:
        """`wandb.sweep`: rank 0 makes it, all ranks get its id. Empty when there is no W&B."""
        if self.package is None:
            return ""
        return channel.same_on_all(lambda: str(self.package.sweep(*args, **options)))

    def agent(self, sweep_id: str, function: Callable[[], Any] | None = None, **options: Any) -> None:
        """`wandb.agent`: rank 0 asks, and all ranks call `function` with the same point in `wandb.config`."""
        if self.package is None or not sweep_id:
            self.tell("W&B is off: there is no sweep to take points from, and the function is not called")
            return
        if self.identity.world_size == 1:
            self.package.agent(sweep_id, function=function, **options)
            return
        if function is None:
            raise UsageError(
                "wandb.agent without a function, on several ranks",
                hint="Give it the function that trains, or use paceline sweep --wandb-sweep.",
            )
        if self.identity.rank == 0:
            self._lead(sweep_id, function, options)
        else:
            self._follow(function)

    def _lead(self, sweep_id: str, function: Callable[[], Any], options: dict[str, Any]) -> None:
        known = {key: options.get(key) for key in ("count", "project", "entity")}

        def carry_out(point: agent.Point) -> None:
            channel.tell(channel.encode(point))
            try:
                function()
            finally:
                self.finish(exit_code=1 if sys.exc_info()[0] else 0)

        try:
            agent.each_point(sweep_id, carry_out, **known)
        finally:
            channel.tell("")
        channel.wait_until_heard()

    def _follow(self, function: Callable[[], Any]) -> None:
        while text := channel.hear():
            self.point = channel.decode(text)
            try:
                function()
            finally:
                self.finish()
                self.point = None


STANDIN = Standin()
