"""The implementation of `paceline.wandb`: wandb's functions, safe on every rank and without W&B.

Rank 0 has the run. Other ranks, and all ranks if W&B is off or not installed, get objects that
accept every call. It works with and without a session, and without torch.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from paceline.errors import UsageError
from paceline.runtime.console import note
from paceline.runtime.distributed.identity import Identity, read_identity
from paceline.runtime.settings import LaunchContext
from paceline.runtime.trackers import wandb_points as points
from paceline.runtime.trackers.base import RunInfo, first_line
from paceline.runtime.trackers.wandb_run import choose_id, init_run


class Noop:
    """Callable and empty; every attribute, item and result is such an object."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return NOOP

    def __getattr__(self, name: str) -> Any:
        # or libraries would take it for an array, an iterator, ...
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return NOOP

    def __getitem__(self, key: Any) -> Any:
        return NOOP

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


NOOP = Noop()


class NoopRun(Noop):
    """What `wandb.init` and `run.wandb` return on a rank without a W&B run."""

    def __init__(self, config: Mapping[str, Any] | None = None, **options: Any) -> None:
        # of `wandb.init`
        names = ("id", "name", "project", "entity", "group", "job_type", "notes")
        vars(self).update({name: str(options.get(name) or "") for name in names})
        self.disabled = self.offline = True
        self.step = 0
        self.dir = tempfile.gettempdir()
        self.config = AttributeDict(config or {})
        self.summary = AttributeDict()

    def __bool__(self) -> bool:
        return True


class AttributeDict(dict[str, Any]):
    """`wandb.config` and `wandb.summary` without a run: a dictionary whose keys are also
    attributes.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"There is no {name!r} in this configuration.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def update(self, given: Any = None, allow_val_change: bool | None = None, **more: Any) -> None:  # type: ignore[override]
        super().update({**as_mapping(given), **more})

    def setdefaults(self, given: Any) -> None:
        for name, value in as_mapping(given).items():
            self.setdefault(name, value)

    def as_dict(self) -> dict[str, Any]:
        return dict(self)


def as_mapping(given: Any) -> dict[str, Any]:
    """Return what `wandb.init(config=...)` takes as a dictionary."""
    if isinstance(given, argparse.Namespace):
        return dict(vars(given))
    return dict(given) if isinstance(given, Mapping) else {}


class WandbModule:
    """The state behind the functions: this process's run."""

    def __init__(self) -> None:
        self.run: Any = None  # a W&B run or a NoopRun; None before `init`
        self._session_run: Callable[[], Any] | None = None  # returns the run of an open session
        self._is_shared = False  # whether `run` is the session's run
        self._runs = 0

    # -- which ranks have a run
    # ------------------------------------------------------------------------

    @functools.cached_property
    def context(self) -> LaunchContext:
        return LaunchContext.read()

    @functools.cached_property
    def identity(self) -> Identity:
        return read_identity()

    @functools.cached_property
    def package(self) -> Any:
        """The real wandb; None if it is off or not installed."""
        if self.context.tracking.get("wandb") is False:
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
        """Start a run on rank 0; on other ranks return an object that does nothing. Takes
        wandb.init's keyword arguments.

        With a run already, return that one, as wandb does; with `reinit=True`, finish it first.
        """
        if options.get("reinit") in (True, "finish_previous", "create_new"):
            self.finish()
        if self.run is None:
            self._runs += 1
            if self._session_run is None:
                self.run = self._start(options)
                return self.run
            self.run, self._is_shared = self._session_run(), True
        self.run.config.update(as_mapping(options.get("config")), allow_val_change=True)
        return self.run

    def _start(self, options: dict[str, Any]) -> Any:
        if self.is_real and options.get("mode") != "disabled":
            try:
                return self._start_real(options)
            except (self.package.Error, OSError) as error:
                note(f"W&B is disabled: {first_line(error)}")
        return NoopRun(**{**options, "config": self._config(options)})

    def _start_real(self, options: dict[str, Any]) -> Any:
        run = RunInfo.of(self.context)
        has_id = options.get("id") or points.RUN_ID in os.environ or points.SWEEP_ID in os.environ
        if run.run_id and not has_id:
            number = "" if self._runs == 1 else f"-{self._runs}"
            options = {"resume": "allow", **options, "id": f"{choose_id(run)}{number}"}
        return init_run(self.package, options, run, self.context.tracking)

    def _config(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the config of a rank without a run: what the script passed, overridden by the
        sweep's point.
        """
        return {**as_mapping(options.get("config")), **points.read_point(os.environ)}

    def finish(self, exit_code: int | None = None, **options: Any) -> None:
        """Finish the run; a session finishes its run itself."""
        run, is_own = self.run, self.is_real and not self._is_shared
        self.run, self._is_shared = None, False
        if run is not None and is_own:
            try:
                run.finish(exit_code=exit_code, **options)
            except (self.package.Error, OSError) as error:
                note(f"W&B did not finish: {first_line(error)}")

    def share(self, session_run: Callable[[], Any] | None) -> None:
        """Use the W&B run of a session; None when the session ends."""
        self._session_run = session_run
        if session_run is None and self._is_shared:
            self.run, self._is_shared = None, False

    # -- the rest
    # --------------------------------------------------------------------------------------

    def log(self, data: dict[str, Any], *args: Any, **options: Any) -> None:
        """Log to the run. Takes wandb.log's arguments."""
        if self.is_real and self.run is None:
            self.package.log(data, *args, **options)  # raises wandb's own error about `init`
        elif self.is_real:
            try:
                self.run.log(data, *args, **options)
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
        """Run points of a sweep: call `function` with each in `wandb.config`. Takes wandb.agent's
        keyword arguments.

        It trains in one process. For several ranks, use `paceline sweep --wandb-sweep`.
        """
        if self.package is None:
            note("W&B is off: there is no sweep to run, so wandb.agent does not call the function")
            return
        if self.identity.is_distributed:
            raise UsageError(
                f"wandb.agent was called on {self.identity.world_size} ranks.",
                hint="Use paceline sweep --wandb-sweep: each point is a run, on any number of "
                "ranks.",
            )

        def run_point() -> None:
            self.run = None  # wandb has finished that of the last point
            assert function is not None
            function()

        self.package.agent(sweep_id, function=function and run_point, **options)


WANDB_MODULE = WandbModule()
