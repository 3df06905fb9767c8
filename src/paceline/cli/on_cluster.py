"""`--on CLUSTER`: carry out a command on a login node. One mechanism for all commands, before their own code runs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from paceline.cli import console
from paceline.contract.env import ON_CLUSTER
from paceline.errors import PacelineError, UsageError
from paceline.spec.option_table import PROJECT, TABLE, VARIABLES, options_of

if TYPE_CHECKING:
    from paceline.cluster.ssh.clusters import Cluster, ProjectFile
    from paceline.cluster.ssh.code import Parcel
    from paceline.spec import Job

HERE = "here"  # as --on: this machine, whatever paceline.toml says
ALL = "all"
# Commands that have the option, by the name of their module.
FORWARDED = frozenset({
    "submit", "sweep", "sweep_show", "sweep_cancel", "ps", "show", "logs", "wait", "metrics", "report", "cancel",
    "export", "sync", "doctor", "shell", "env", "data", "clean",
})  # fmt: skip
NEEDS_CODE = frozenset({"submit", "sweep", "doctor", "env", "shell"})
TAKES_SECRETS = frozenset({"submit", "sweep", "doctor"})
# Commands that write files: the parameter, and the file that is written without it.
OUTPUTS: dict[str, dict[str, str | None]] = {
    "report": {"output": "report.html"}, "export": {"output": "model.safetensors"}, "metrics": {"output": None},
    "sweep_show": {"csv": None, "report": None}, "submit": {"script_only": None},
}  # fmt: skip
PASSED_ON = ("NO_COLOR", "COLORTERM", "COLUMNS")  # variables of this terminal


class Forwarded(Exception):
    """Raised in place of a command that is to run elsewhere. `names` are clusters, `line` what to run there."""

    def __init__(self, names: Sequence[str], module: str, args: list[str], values: Mapping[str, Any]) -> None:
        super().__init__()
        self.names, self.module, self.line, self.values = names, module, args, values


def module_of(function: Any) -> str:
    return str(getattr(function, "__module__", "")).rpartition(".")[2]


def option() -> Any:
    """Return the option for typer."""
    import typer

    described = next(each for each in TABLE[PROJECT] if each.key == "project.on")
    info = typer.Option(described.name, metavar=described.metavar, help=described.help, rich_help_panel=PROJECT)

    def carrier(on: str | None = None) -> None:
        """Typer makes options of parameters only."""

    carrier.__annotations__ = {"on": Annotated[str | None, info], "return": None}
    app = typer.Typer(add_completion=False)
    app.command()(carrier)
    made: Any = next(each for each in typer.main.get_command(app).params if each.name == "on")
    made.expose_value = False
    return made


def forward_if_asked(command: Any, ctx: Any, typed: list[str], script: list[str], values: Mapping[str, Any]) -> None:
    """Raise `Forwarded` if `--on` or a default names a cluster."""
    names = _chosen(values.get("on"), values.get("config"))
    if names and (values.get("on") or not values.get("local")):  # --local, typed alone, means this machine
        path = ctx.command_path.split()[1:]
        args = [*path, *without_option(typed, command.params), *script]
        raise Forwarded(names, module_of(command.callback), args, values)


def _chosen(on: str | None, config: str | None) -> list[str]:
    if os.environ.get(ON_CLUSTER) or on == HERE or (on is None and shutil.which("sbatch")):
        return []
    from paceline.cluster.ssh.clusters import ON, ProjectFile

    name = on or os.environ.get(ON) or ProjectFile.find(Path.cwd(), Path(config) if config else None).default
    return [each for each in (name or "").split(",") if each and each != HERE]


def without_option(typed: Sequence[str], params: Sequence[Any]) -> list[str]:
    """Return what was typed without `--on`. Variables that were named without a value get this machine's."""
    takers = {flag: each for each in params if each.param_type_name == "option" for flag in each.opts}
    variables = {flag for group in TABLE.values() for each in group if each.kind == VARIABLES for flag in each.flags}
    kept: list[str] = []
    words = iter(typed)
    for word in words:
        if word == "--":
            return [*kept, word, *words]
        flag, equals, value = word.partition("=") if word.startswith("--") else (word[:2], "", word[2:])
        taker = takers.get(flag)
        if taker is None or taker.is_flag:
            kept.append(word)
            continue
        parts = [word] if equals or value else [word, next(words, "")]
        if flag in variables:
            text = value if equals else parts[1]
            parts = [flag, text if "=" in text or text not in os.environ else f"{text}={os.environ[text]}"]
        kept += parts if flag != "--on" else []
    return kept


# -- what goes there ---------------------------------------------------------------------------------------------


def forward(asked: Forwarded) -> int:
    """Carry out a command on a cluster and return its exit code."""
    from paceline.cluster.ssh import forward as remote
    from paceline.cluster.ssh.clusters import ProjectFile, find_cluster
    from paceline.cluster.ssh.connection import Connection
    from paceline.cluster.ssh.request import Request

    config = asked.values.get("config")
    project = ProjectFile.find(Path.cwd(), Path(config) if config else None)
    if len(asked.names) > 1 or asked.names[0] == ALL:
        return _forward_to_each(asked, sorted(project.clusters()) if asked.names[0] == ALL else asked.names)
    _require_full_path(asked)
    cluster = find_cluster(asked.names[0], project)
    connection = Connection(cluster)
    connection.require()
    job = _load(asked, cluster)
    parcel = _pack(asked, job, project)
    secrets = _secrets(job) if asked.module in TAKES_SECRETS else None
    if secrets is not None and secrets.values:
        console.say_note(f"secrets that go to {cluster.name}: {secrets.describe()}")
    request = Request(
        asked.line, _relative(Path.cwd(), parcel.folder), parcel.code, _variables(cluster),
        secrets.values if secrets is not None else {}, secrets.sources if secrets is not None else {},
    )  # fmt: skip
    return remote.forward(connection, request, parcel, note=console.say_note)


def _forward_to_each(asked: Forwarded, names: Sequence[str]) -> int:
    """List the runs of several clusters, one after the other. One that cannot be reached does not hide the others."""
    if asked.module != "ps" or asked.values.get("json"):
        raise UsageError("This takes one cluster.", hint=f"Run it once for each of {', '.join(names)}.")
    worst = 0
    for name in names:
        print(f"{console.printable(name)}:", flush=True)
        try:
            code = forward(Forwarded([name], asked.module, asked.line, asked.values))
        except PacelineError as problem:
            console.say_error(problem)
            code = problem.exit_code
        worst = max(worst, code)
    return worst


def _require_full_path(asked: Forwarded) -> None:
    """Raise an error for a file that would be written into the copy of the project over there, where nobody looks."""
    for key, default in OUTPUTS.get(asked.module, {}).items():
        value = asked.values.get(key) or default
        if value and not str(value).startswith("/"):
            raise UsageError(
                f"{value} would be written on {asked.names[0]}, not here.",
                hint="Give it a full path on the cluster, e.g. /scratch/me/" + Path(str(value)).name,
            )


def _load(asked: Forwarded, cluster: Cluster) -> Job:
    """Load the job as far as this machine is concerned: which code and which secrets it has."""
    from paceline.cli.options import Settings, find_program
    from paceline.spec import Program
    from paceline.spec.typed_flags import read_flags

    values, cwd = asked.values, Path.cwd()
    table = [option for _, option in options_of(asked.module) if option.key != "params"]
    flags = read_flags([(option, values.get(option.parameter)) for option in table], os.environ)
    profile = values.get("cluster_profile") or (cluster.name if cluster.has_profile else "none")
    config = Path(values["config"]) if values.get("config") else None
    program = Program("")
    if asked.module == "submit" and values.get("args"):
        program = find_program(values["args"], is_module=bool(values.get("module")), cwd=cwd, command="submit")
    return Settings(tuple(flags), (), config, profile).load(program, cwd=cwd, here=True)


def _pack(asked: Forwarded, job: Job, project: ProjectFile) -> Parcel:
    from paceline.cluster.ssh.code import pack_code, pack_settings
    from paceline.spec.load import repository_root

    is_project = project.file is not None or repository_root(Path.cwd()) is not None
    names_code = asked.module in ("submit", "sweep") or asked.values.get("args") or asked.values.get("files")
    if asked.module not in NEEDS_CODE or not (is_project or names_code):
        return pack_settings(job.folder, [project.file] if project.file is not None else [])
    parcel = pack_code(job, os.environ)
    if parcel.skipped_secrets:
        console.say_note(f"secrets left out of the code: {', '.join(parcel.skipped_secrets)}")
    if asked.module == "submit" and not job.program.is_module and job.program.name:
        _require_sent(job.program.name, job, parcel)
    if asked.module == "sweep" and Path(asked.values["file"]).is_file():
        _require_sent(asked.values["file"], job, parcel)
    left = [each for each in job.program.args if _stays_here(each, job, parcel)]
    if left:
        console.say_note(f"these stay here, since git ignores them or they lie outside the project: {', '.join(left)}")
    return parcel


def _require_sent(name: str, job: Job, parcel: Parcel) -> None:
    if _stays_here(name, job, parcel):
        raise UsageError(
            f"{name} would not be sent: git ignores it, or it lies outside the project {job.folder}.",
            hint="Only the project's code goes to the cluster: what git tracks, and new files that it does not ignore.",
        )


def _stays_here(name: str, job: Job, parcel: Parcel) -> bool:
    """Whether a name is a file or a folder here that is not sent."""
    path = job.cwd / name
    if not name or not os.path.lexists(path):
        return False
    inside = os.path.relpath(os.path.join(os.path.realpath(path.parent), path.name), parcel.folder).replace(os.sep, "/")
    return inside != "." and inside not in parcel.code.files and not any(
        each.startswith(f"{inside}/") for each in parcel.code.files
    )  # fmt: skip


def _secrets(job: Job) -> Any:
    from paceline.cluster.secrets.secrets import read_secrets
    from paceline.plan.secrets import choose_secrets

    return choose_secrets(job, environ=os.environ, file_secrets=read_secrets(job, os.environ), in_a_job=False)


def _variables(cluster: Cluster) -> dict[str, str]:
    from paceline.spec.load import PROFILE

    profile = {PROFILE: cluster.name} if cluster.has_profile else {}
    return {ON_CLUSTER: cluster.name, **profile, **{name: os.environ[name] for name in PASSED_ON if name in os.environ}}


def _relative(cwd: Path, folder: Path) -> str:
    relative = os.path.relpath(cwd.resolve(), folder).replace(os.sep, "/")
    return "." if relative.startswith("..") else relative
