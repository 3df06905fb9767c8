"""A Job on this machine: the order, and the agents that carry it out."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from paceline.contract import env
from paceline.contract.gpus import VISIBLE_DEVICES
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder
from paceline.errors import SpecError
from paceline.plan.launch_spec import carry_over, make_launch_spec
from paceline.plan.quote import command_line, quote
from paceline.plan.run_path import RunPath
from paceline.plan.run_record import hide, hide_in_values, hide_in_words
from paceline.plan.secrets import NO_SECRETS, Secrets, choose_secrets, hidden_variables, plain_variables
from paceline.plan.shape import Machine, Shape, local_shape
from paceline.spec import Job

LOCAL_STYLES = ("fork", "torchrun", "spawn", "lightning", "accelerate")
# Not `-m`: that would put the current folder, and whatever lies in it, ahead of the standard library.
START = (
    "import sys; sys.path[:1] = filter(None, sys.path[:1]); "
    "from paceline.agent.main import main; sys.exit(main())"
)
FORKING_SYSTEMS = ("Linux",)  # macOS can fork, and its own libraries crash after it


@dataclass(frozen=True)
class Starter:
    """One agent: what to run, and the variables that it needs besides those that are there."""

    argv: tuple[str, ...]
    variables: dict[str, str]


@dataclass(frozen=True)
class LocalPlan:
    run_path: RunPath
    shape: Shape
    launch_spec: LaunchSpec
    agents: tuple[Starter, ...]
    notes: tuple[str, ...] = ()  # what was chosen instead of what was asked, and why
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)  # for the agents' environment
    secrets_summary: str = ""  # their names, and where each comes from

    def show(self, *, copies: str) -> str:
        """The plan as text: what a dry run prints."""
        lines = [
            f"run folder  {self.run_path.folder.path}",
            f"code        {copies}",
            f"ranks       {self.shape} ({self.launch_spec.style} style)",
            *(f"note        {note}" for note in self.notes),
            *([f"secrets     {self.secrets_summary}"] if self.secrets_summary else []),
        ]
        for number, starter in enumerate(self.agents):
            name = f"agent {number}" if len(self.agents) > 1 else "agent"
            settings = " ".join(f"{key}={quote(value)}" for key, value in starter.variables.items())
            lines.append(f"{name:<11} {settings} {command_line(starter.argv)}")
        lines.append(f"order       {RunFolder(self.run_path.folder.path).launch_spec.name}:")
        told = asdict(self.launch_spec)
        told["variables"] = {name: hide(name, value) for name, value in self.launch_spec.variables.items()}
        told["args"], told["params"] = (
            hide_in_words(self.launch_spec.args),
            hide_in_values(self.launch_spec.params),
        )
        lines += [f"  {key} = {json.dumps(value, ensure_ascii=False)}" for key, value in told.items()]
        return "\n".join(lines)


def choose_style(job: Job, machine: Machine) -> tuple[str, list[str]]:
    """The style that serves here, and what to say when it is not the one that was asked."""
    style = job.launch.style
    typed = job.is_typed("launch.style")
    if style not in LOCAL_STYLES:
        if typed:
            raise SpecError(
                f"--style {style}: the {style} style needs a Slurm allocation",
                hint=f"use `paceline submit`, or one of: {', '.join(LOCAL_STYLES)}",
            )
        return "fork", [f"the {style} style ({job.source('launch.style')}) needs Slurm: fork is used here"]
    if style in ("fork", "lightning", "accelerate") and machine.system not in FORKING_SYSTEMS:
        return "spawn", [f"the {style} style needs Linux, and this is {machine.system}: spawn is used"]
    return style, []


def local_restarts(job: Job) -> int:
    """Relaunches after a failure: none here, unless asked."""
    return (job.resume.max_attempts or 1) - 1


def plan_local(
    job: Job,
    *,
    run_path: RunPath,
    machine: Machine,
    python: str,
    old: LaunchSpec | None = None,
    environ: Mapping[str, str] | None = None,
    filed: Secrets = NO_SECRETS,
) -> LocalPlan:
    """All that a run on this machine needs. `old` is the order of a run that goes on.

    `filed` are the secrets that files hold; `environ` is where those are looked for that are named.
    """
    shape = local_shape(job, machine)
    style, notes = choose_style(job, machine)
    # Secrets are handed to the agents themselves: the order is a file.
    secrets = choose_secrets(job, environ=environ or {}, filed=filed, in_a_job=False)
    variables = plain_variables(job)
    if job.runtime.cpu and machine.gpus:
        variables.setdefault(VISIBLE_DEVICES, "")  # for scripts that do not ask the runtime for their device
    launch_spec = make_launch_spec(
        job, run_path=run_path, shape=shape, python=python, style=style, variables=variables,
        max_restarts=local_restarts(job),
    )  # fmt: skip
    if old is not None:
        launch_spec = replace(carry_over(old, launch_spec, job), python=python)
        shape = Shape(launch_spec.nodes, launch_spec.nproc, launch_spec.gpus, launch_spec.threads)
    return LocalPlan(
        run_path, shape, launch_spec, _starters(run_path, launch_spec, machine=machine, python=python), tuple(notes),
        secrets={**secrets.values, **hidden_variables(job)}, secrets_summary=secrets.describe(),
    )  # fmt: skip


def _starters(
    run_path: RunPath, launch_spec: LaunchSpec, *, machine: Machine, python: str
) -> tuple[Starter, ...]:
    argv: tuple[str, ...] = (python, "-c", START)
    # The place is said even to a agent that is alone: an allocation's variables may stand around it.
    common = {env.RUN: str(run_path.folder.path)}
    if python != sys.executable:
        # Another interpreter finds the run half in the run folder.
        argv = (python, str(run_path.folder.run_half))
        common["PYTHONPATH"] = str(run_path.folder.run_half)
    starters = []
    for number in range(launch_spec.nodes):
        variables = {**common, env.AGENT: f"{number}/{launch_spec.nodes}"}
        if launch_spec.nodes > 1 and launch_spec.gpus:  # each node here has GPUs of its own, as real nodes do
            first = number * launch_spec.gpus
            variables[VISIBLE_DEVICES] = ",".join(machine.device_names()[first : first + launch_spec.gpus])
        starters.append(Starter(argv, variables))
    return tuple(starters)


def launch_spec_text(launch_spec: LaunchSpec) -> str:
    """The order as a file holds it; arguments that are no UTF-8 are kept as escapes."""
    text = launch_spec.to_json()
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(asdict(launch_spec), indent=1) + "\n"
    return text


def program_words(launch_spec: LaunchSpec) -> Sequence[str]:
    """The user's command, for people."""
    return [*(["-m"] if launch_spec.is_module else []), launch_spec.program, *launch_spec.args]
