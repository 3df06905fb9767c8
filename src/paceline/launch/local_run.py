"""A run on this machine: its plan (the launch spec and the agents that carry it out), and a folder
that is ready for them.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.contract import env
from paceline.contract.gpus import VISIBLE_DEVICES, visible_devices
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.redaction import redact_args
from paceline.errors import EnvironmentProblem, SpecError
from paceline.launch.launch_spec import LOCAL, RankCounts, make_launch_spec, staging_request
from paceline.launch.run_folder import claim_run, open_run_folder
from paceline.launch.secrets import (
    NO_SECRETS,
    Secrets,
    choose_secrets,
    hidden_variables,
    plain_variables,
)
from paceline.launch.submission import Submission, fill_folder
from paceline.spec.job import Job
from paceline.spec.run_path import RunPath
from paceline.spec.shell_text import command_line
from paceline.spec.user_files import expand_home
from paceline.staging.request import check_sources

if TYPE_CHECKING:
    from paceline.launch.resume import EarlierRun

DEFAULT_RANKS = 2  # without GPUs: the fewest that show what distributed code does
LOCAL_STYLES = ("fork", "torchrun", "spawn", "lightning", "accelerate")
# Not `-m`: that would put the current folder, and whatever is in it, ahead of the standard library.
START_AGENT = (
    "import sys; sys.path[:1] = filter(None, sys.path[:1]); from paceline.agent.main "
    "import main; sys.exit(main())"
)


@dataclass(frozen=True)
class Machine:
    """The cores and GPUs of this machine."""

    cores: int
    gpus: int
    system: str = "Linux"  # platform.system()
    # the GPUs as CUDA_VISIBLE_DEVICES names them; empty means 0, 1, ...
    devices: tuple[str, ...] = ()

    def device_names(self) -> tuple[str, ...]:
        return self.devices or tuple(str(number) for number in range(self.gpus))


@dataclass(frozen=True)
class AgentCommand:
    """The command that starts one agent, and the variables to add for it."""

    argv: tuple[str, ...]
    variables: dict[str, str]

    @property
    def is_head(self) -> bool:
        return self.variables[env.AGENT].startswith("0/")


@dataclass(frozen=True)
class LocalPlan:
    """Everything that a run on this machine needs."""

    run_path: RunPath
    rank_counts: RankCounts
    launch_spec: LaunchSpec
    agents: tuple[AgentCommand, ...]
    notes: tuple[str, ...] = ()  # what was chosen instead of what was requested, and why
    # for the agents' environment
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    secrets_summary: str = ""  # their names, and where each comes from

    def show(self, *, code: str) -> str:
        """Return what a dry run prints. `code` says which code the ranks run."""
        lines = [
            f"run folder  {self.run_path.folder.path}",
            f"code        {code}",
            f"ranks       {self.rank_counts} ({self.launch_spec.style} style)",
            *(f"note        {note}" for note in self.notes),
            *([f"secrets     {self.secrets_summary}"] if self.secrets_summary else []),
        ]
        spec = self.launch_spec
        program = [*(["-m"] if spec.is_module else []), spec.program, *redact_args(spec.args)]
        lines.append(f"command     {command_line([spec.python, *program])}")
        return "\n".join(lines)


def local_rank_counts(job: Job, machine: Machine, old: LaunchSpec | None = None) -> RankCounts:
    """Return the numbers of a run on this machine: several nodes here share its cores and its
    GPUs.
    """
    default = old.nodes if old is not None else 1
    nodes = job.resources.nodes if job.is_typed("job.nodes") else default
    visible = 0 if job.runtime.cpu else machine.gpus
    nproc = job.launch.nproc
    if nproc is None:
        nproc = max(1, visible // nodes) if visible else DEFAULT_RANKS
    if visible and nproc * nodes > visible:
        source = job.source("launch.nproc") if job.launch.nproc else job.source("job.nodes")
        raise SpecError(
            f"{source} asks for {nproc * nodes} ranks, but this machine has {visible} "
            f"GPU{'s' if visible > 1 else ''}.",
            hint=f"Ask for at most {visible} in total, or add --cpu.",
        )
    gpus = nproc if visible else 0
    return RankCounts(nodes, nproc, gpus, max(1, machine.cores // (nproc * nodes)))


def choose_style(job: Job, machine: Machine) -> tuple[str, list[str]]:
    """Return the style that works here, and a note if it is not the requested one."""
    style = job.launch.style
    if style not in LOCAL_STYLES and job.is_typed("launch.style"):
        raise SpecError(
            f"The {style} style needs a Slurm allocation.",
            hint=f"Use `paceline submit`, or one of these styles: {', '.join(LOCAL_STYLES)}.",
        )
    if style not in LOCAL_STYLES:
        source = job.source("launch.style")
        return "fork", [f"the {style} style ({source}) needs Slurm, so this run uses fork"]
    # macOS can fork, but its own libraries crash afterwards
    if machine.system != "Linux" and style in ("fork", "lightning", "accelerate"):
        note = f"the {style} style needs Linux, so this run uses spawn on {machine.system}"
        return "spawn", [note]
    return style, []


# The keys that change how many ranks a run has; without them, it keeps its number when it goes on.
_COUNT_KEYS = ("job.nodes", "launch.nproc", "runtime.cpu", "job.gpus_per_node")


def plan_local(
    job: Job,
    *,
    run_path: RunPath,
    machine: Machine,
    python: str,
    environ: Mapping[str, str] | None = None,
    old: LaunchSpec | None = None,
    file_secrets: Secrets = NO_SECRETS,
    path_in_job: Callable[[Path], Path] = lambda path: path,
) -> LocalPlan:
    """Return the plan. `old` is the launch spec of a run that goes on.

    `file_secrets` are the secrets that files hold; those that are only named are looked up in
    `environ`. `path_in_job` maps a path of the project to where the ranks find it.
    """
    if old is not None and not any(map(job.is_typed, _COUNT_KEYS)):
        rank_counts = RankCounts(old.nodes, old.nproc, old.gpus, old.threads)
    else:
        rank_counts = local_rank_counts(job, machine, old)
    style, notes = choose_style(job, machine)
    # Secrets go to the agents' environment: the launch spec is a file.
    secrets = choose_secrets(job, environ=environ or {}, file_secrets=file_secrets, in_a_job=False)
    variables = plain_variables(job)
    if job.runtime.cpu and machine.gpus:
        # for scripts that choose their device without the runtime
        variables.setdefault(VISIBLE_DEVICES, "")
    launch_spec = make_launch_spec(
        job,
        run_path=run_path,
        rank_counts=rank_counts,
        python=python,
        style=style,
        variables=variables,
        path_in_job=path_in_job,
        # none here, unless requested
        max_restarts=(job.resume.max_attempts or 1) - 1,
    )
    return LocalPlan(
        run_path,
        rank_counts,
        launch_spec,
        _agent_commands(run_path, launch_spec, machine=machine, python=python),
        tuple(notes),
        secrets={**secrets.values, **hidden_variables(job)},
        secrets_summary=secrets.describe(),
    )


def _agent_commands(
    run_path: RunPath, launch_spec: LaunchSpec, *, machine: Machine, python: str
) -> tuple[AgentCommand, ...]:
    argv: tuple[str, ...] = (python, "-c", START_AGENT)
    # Even a single agent gets its index: the variables of an allocation may be set here.
    common = {env.RUN: str(run_path.folder.path)}
    if python != sys.executable:
        # Another interpreter finds the run half in the run folder.
        argv = (python, str(run_path.folder.run_half))
        common["PYTHONPATH"] = str(run_path.folder.run_half)
    commands = []
    for number in range(launch_spec.nodes):
        variables = {**common, env.AGENT: f"{number}/{launch_spec.nodes}"}
        # each node has GPUs of its own, as real nodes do
        if launch_spec.nodes > 1 and launch_spec.gpus:
            first = number * launch_spec.gpus
            variables[VISIBLE_DEVICES] = ",".join(
                machine.device_names()[first : first + launch_spec.gpus]
            )
        commands.append(AgentCommand(argv, variables))
    return tuple(commands)


def detect_machine(environ: Mapping[str, str]) -> Machine:
    """Return the cores and GPUs that a run on this machine may use."""
    gpus = usable_gpus(environ)
    devices = tuple(visible_devices(environ) or ())[:gpus]
    # an allocation may restrict the cores of this process
    may_use = getattr(os, "sched_getaffinity", None)
    cores = len(may_use(0)) if may_use else os.cpu_count() or 1
    return Machine(cores=cores, gpus=gpus, system=platform.system(), devices=devices)


def current_folder() -> Path:
    """Return the current folder."""
    try:
        return Path.cwd()
    except OSError:
        raise EnvironmentProblem(
            "The current folder no longer exists.", hint="Change to a folder that exists."
        ) from None


def interpreter(job: Job) -> str:
    """Return the Python that runs the ranks on this machine: the configured one, the venv's, or
    this one.
    """
    if job.environment.kind in ("conda", "container") and job.is_typed("environment.kind"):
        raise SpecError(
            f"{job.source('environment.kind')} sets kind = {job.environment.kind}, which applies "
            "to `paceline submit`.",
            hint="Use --venv or --python on this machine.",
        )
    if job.environment.kind == "venv" and job.environment.path is None:
        from paceline.launch.environment.store import require_built, resolve_environment

        job = resolve_environment(job, os.environ)
        require_built(job)
    requested = job.environment.python
    if requested is None and job.environment.kind == "venv" and job.environment.path is not None:
        requested = str(expand_home(job.environment.path) / "bin" / "python")
    if requested is None:
        return sys.executable
    found = shutil.which(job.folder / requested if os.sep in requested else requested)
    if found is None:
        key = "environment.python" if job.environment.python else "environment.path"
        raise SpecError(
            f"{job.source(key)} requires {requested}, which is not an executable here.",
            hint="Fix the path.",
        )
    return os.path.abspath(found)


def usable_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Return the number of GPUs that a rank could use, by device files: that is what a container
    sees.
    """
    present = len(list(devices.glob("nvidia[0-9]*")))
    if not present and (devices / "kfd").exists():  # AMD
        present = len(list((devices / "dri").glob("renderD*")))
    visible = visible_devices(environ)
    return present if visible is None else min(present, len(visible))


class LocalRun(Submission):
    """A run to start here, new or again. Nothing is written before `prepare`."""

    def __init__(
        self,
        job: Job,
        *,
        earlier: EarlierRun | None = None,
        in_copy: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`variables` are set for the ranks, besides those of the job."""
        in_copy = in_copy or (earlier is not None and earlier.keeps_code)
        super().__init__(job, in_copy=in_copy, earlier=earlier)
        plan = plan_local(
            self.job,
            run_path=self.run_path,
            machine=detect_machine(os.environ),
            python=interpreter(self.job),
            environ=os.environ,
            old=earlier.launch_spec if earlier is not None else None,
            file_secrets=self.secrets,
            path_in_job=self.path_in_job,
        )
        spec = plan.launch_spec
        spec = replace(spec, variables={**spec.variables, **(variables or {})})
        if earlier is not None:
            spec = replace(spec, trial=earlier.launch_spec.trial)
        self.plan: LocalPlan = replace(plan, launch_spec=spec)

    def prepare(self, command: Sequence[str]) -> tuple[str, ...]:
        """Open the run folder and fill it; return notes for the user. `command` is recorded as what
        the user typed.
        """
        plan, folder, earlier = self.plan, self.folder, self.earlier
        if plan.launch_spec.data:
            scratch = self.run_path.scratch
            check_sources(staging_request(self.job, scratch=scratch, environ=os.environ))
        if earlier is not None:
            claim_run(folder)
        with open_run_folder(self.run_path, is_new=earlier is None):
            folder.cancelled.unlink(missing_ok=True)
            notes = fill_folder(
                self.job,
                run_path=self.run_path,
                launch_spec=plan.launch_spec,
                command=command,
                backend=LOCAL,
                in_copy=self.in_copy,
                earlier=earlier,
            )
            if earlier is None:
                claim_run(folder)
        return (*plan.notes, *self.notes, *notes)
