"""The implementation of `paceline.wandb`: wandb's functions, safe on every rank and without W&B.

Rank 0 has the run (within `every_process`, every rank has one). Other ranks, and all ranks if W&B
is off or not installed, get objects that accept every call. It works with and without a session,
and without torch.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import sys
import time
import types
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from paceline.errors import RunError, UsageError
from paceline.runtime.console import note
from paceline.runtime.distributed.identity import Identity, read_identity
from paceline.runtime.launch_context import LaunchContext
from paceline.runtime.trackers.base import RunInfo, Tracking, first_line
from paceline.runtime.trackers.wandb import points
from paceline.runtime.trackers.wandb.noop import NOOP, AttributeDict, NoopRun, as_mapping
from paceline.runtime.trackers.wandb.tracker import choose_id, init_run, rank_name

NAMES = ("project", "group", "entity")  # a change in one of these starts another run


class WandbModule:
    """The state behind the functions: this process's run, and whether every process has one."""

    def __init__(self) -> None:
        self.run: Any = None  # a W&B run or a NoopRun; None before `init`
        self.every_process = False
        self.session_run: Callable[[], Any] | None = None  # returns the W&B run of an open session
        self._is_shared = False  # whether `run` is the session's run
        self._point: points.Point | None = None  # on ranks that receive a sweep's points
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
    def is_per_rank(self) -> bool:
        every_process = self.every_process or self.tracking.wandb_all_processes
        return every_process and self.identity.is_distributed

    @property
    def is_real(self) -> bool:
        """Whether calls reach wandb: there is a run, or `init` could start one."""
        if self.run is not None:
            return not isinstance(self.run, NoopRun)
        return self.package is not None and (self.identity.rank == 0 or self.is_per_rank)

    # -- starting and finishing
    # ------------------------------------------------------------------------

    def init(self, **options: Any) -> Any:
        """`wandb.init`. A different project or group finishes the current run first."""
        names = {name: options.get(name) for name in NAMES}
        if self.run is None or self._starts_another(names, options.get("reinit")):
            self.finish()
            self._names = names
            self._runs += 1  # also without a run: all ranks must count alike
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
        point = self._point or points.current_point(os.environ)
        return {**as_mapping(options.get("config")), **point.values}

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
        if self.is_per_rank:
            rank = self.identity.rank
            common = options.get("id") or self._from_rank_zero(lambda: secrets.token_hex(4))
            group = options["group"] or os.environ.get("WANDB_RUN_GROUP")
            options["group"] = group or common
            options["id"] = rank_name(common, rank)
            options["name"] = rank_name(options.get("name") or common, rank)
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

    # -- sweeps
    # ----------------------------------------------------------------------------------------

    def sweep(self, *args: Any, **options: Any) -> str:
        """`wandb.sweep`: rank 0 creates it and all ranks get its id; empty without W&B."""
        if self.package is None:
            return ""
        return self._from_rank_zero(lambda: str(self.package.sweep(*args, **options)))

    def agent(
        self, sweep_id: str, function: Callable[[], Any] | None = None, **options: Any
    ) -> None:
        """`wandb.agent`: rank 0 requests points, and all ranks call `function` with the same
        `wandb.config`.
        """
        if self.package is None or not sweep_id:
            note("W&B is off: there is no sweep to run, so wandb.agent does not call the function")
        elif not self.identity.is_distributed:
            self.package.agent(sweep_id, function=function, **options)
        elif function is None:
            raise UsageError(
                "wandb.agent needs a function when there are several ranks.",
                hint="Pass the function that trains, or use paceline sweep --wandb-sweep.",
            )
        elif self.identity.rank == 0:
            self._lead(sweep_id, function, options)
        else:
            self._follow(function)

    def _lead(self, sweep_id: str, function: Callable[[], Any], options: dict[str, Any]) -> None:
        def train(point: points.Point) -> None:
            self._messages.send(json.dumps(asdict(point)))
            try:
                function()
            finally:
                self.finish(exit_code=1 if sys.exc_info()[0] else 0)

        try:
            points.run_points(sweep_id, train, **options)
        finally:
            self._messages.send("")
        self._messages.wait_until_received()

    def _follow(self, function: Callable[[], Any]) -> None:
        while text := self._messages.receive():
            self._point = points.Point(**json.loads(text))
            try:
                function()
            finally:
                self.finish()
                self._point = None

    @functools.cached_property
    def _messages(self) -> Messages:
        return Messages(self.identity)

    def _from_rank_zero(self, make: Callable[[], str]) -> str:
        """Return on all ranks what `make` returns on rank 0. All ranks must call it."""
        if self.identity.rank:
            return self._messages.receive()
        text = make()
        if self.identity.is_distributed:
            self._messages.send(text)
        return text


class Messages:
    """Messages from rank 0 to all ranks, with or without a session, through the store of the ranks'
    rendezvous.
    """

    def __init__(self, identity: Identity) -> None:
        import torch.distributed as dist

        from paceline.runtime.distributed.process_group import open_store

        self._peers = identity.world_size - 1
        self._count = 0  # messages so far: the same number on all ranks
        if dist.is_initialized():  # the script made the group, so the rendezvous address is in use
            store = dist.distributed_c10d._get_default_store()
            self._store: Any = dist.distributed_c10d.PrefixStore("paceline/messages", store)
        else:
            self._store = open_store(identity, timeout=None)

    def send(self, text: str) -> None:
        """Send a message to all ranks. Rank 0 only."""
        self._count += 1
        self._store.set(f"message/{self._count}", text)

    def receive(self) -> str:
        """Wait for rank 0's next message and return it."""
        from paceline.runtime.distributed.process_group import wait_for_key

        self._count += 1
        text = wait_for_key(self._store, f"message/{self._count}")
        if text is None:
            raise RunError(
                "Rank 0 failed while the other ranks waited for its message.",
                hint="See the error of rank 0.",
            )
        self._store.add("received", 1)
        return text

    def wait_until_received(self) -> None:
        """Wait until all ranks have received all messages: the store ends with rank 0."""
        while self._store.add("received", 0) < self._peers * self._count:
            time.sleep(0.02)


WANDB_MODULE = WandbModule()
