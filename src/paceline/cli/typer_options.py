"""How commands take their options from the table, and the options that are not settings."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import console
from paceline.contract import env
from paceline.errors import UsageError
from paceline.spec.option import LIST, OUTPUT, PROJECT, SWITCH, VARIABLES, Flag, Option, read_flags
from paceline.spec.settings import options_of

if TYPE_CHECKING:
    from paceline.launch.resume import EarlierRun
    from paceline.spec.job import Job, Program
    from paceline.spec.load import ClusterProfile as ClusterProfileChoice

Command = Callable[..., int]

ScriptArgs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SCRIPT [ARGS]...",
        help="Your script and its arguments (default: script in [project]).",
    ),
]
Module = Annotated[bool, typer.Option("-m", "--module", help="Run a module, as in python -m.")]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="File to read instead of the nearest paceline.toml.",
        rich_help_panel=PROJECT,
    ),
]
ClusterProfile = Annotated[
    str | None,
    typer.Option(
        "--cluster-profile",
        metavar="NAME",
        help="Use [profiles.NAME] of that file, or none (default: that of this cluster).",
        rich_help_panel=PROJECT,
    ),
]
# Options that are no settings and that several commands have.
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Print what would be done, and do nothing.", rich_help_panel=OUTPUT
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Go ahead without asking.")]


@dataclass(frozen=True)
class Settings:
    """What was typed, for `load`."""

    flags: tuple[Flag, ...]
    params: tuple[str, ...]
    config: Path | None
    profile: str | None

    def load(
        self,
        program: Program,
        *,
        cwd: Path | None = None,
        flags: Sequence[Flag] | None = None,
        here: bool = False,
    ) -> Job:
        """Load the job; `flags` replaces what was typed. With `here`, it runs on this machine, not on the cluster."""
        from paceline.spec.load import load_job

        job = load_job(
            program,
            flags=self.flags if flags is None else flags,
            params=self.params,
            config=self.config,
            profile=self.profile,
            cwd=cwd,
            cluster=this_cluster(here=here),
        )
        if not here:
            self.note_profile(job)
        return job

    def find_program(
        self, args: Sequence[str] | None, *, is_module: bool, cwd: Path, command: str = "run"
    ) -> Program:
        """Return the script or module that was typed, or else that of `[project] script`."""
        from paceline.spec.job import Program

        if not args:
            job = self.load(Program(""), cwd=cwd, here=True)
            args = list(job.project.script)
            is_module = args[:1] == ["-m"]
            if args and args[0] and not is_module:
                args[0] = os.path.relpath(job.folder / args[0], cwd)
            args = args[is_module:]
        return find_program(args, is_module=is_module, cwd=cwd, command=command)

    def find_earlier(
        self, run: str, args: Sequence[str] | None, *, is_module: bool, cwd: Path, backend: str
    ) -> tuple[Job, EarlierRun, str]:
        """Return the job to resume, the run that it continues, and a note on it."""
        from paceline.launch.launch_spec import LOCAL
        from paceline.launch.resume import Typed, find_earlier_run
        from paceline.spec.job import Program

        typed = Typed(self.flags, self.params, self.config, self.profile)
        named = self.find_program(args, is_module=is_module, cwd=cwd) if args else None
        here = self.load(named or Program(""), cwd=cwd, here=backend == LOCAL)
        return find_earlier_run(run, named, typed=typed, here=here, backend=backend)

    def note_profile(self, job: Job) -> None:
        """Say which profile was chosen, unless the user has chosen it."""
        if job.profile is not None and self.profile is None and not os.environ.get(env.PROFILE):
            console.say_note(
                f"using the profile of this cluster: [profiles.{job.profile}] of {job.file}"
            )


def this_cluster(*, here: bool = False) -> ClusterProfileChoice:
    """Choose the profile of the cluster that this machine submits to; with `here`, only where its runs are."""
    from paceline.slurm.commands import cluster_name
    from paceline.spec.load import ClusterProfile

    return ClusterProfile(cluster_name, ("project",) if here else None)


def takes_settings(
    name: str,
    *,
    script: bool = False,
    shown: Sequence[str] = (),
    without: Collection[str] = (),
    names_a_run: Callable[[str], bool] | None = None,
) -> Callable[[Command], Command]:
    """Add the options that `paceline NAME` takes from the table to a command; it gets them as `settings`.

    With `script`, options end where the user's script begins, unless `names_a_run` says that it is none.
    `--help` shows only the groups and keys in `shown`, if any. Keys in `without` would do nothing here: they have no
    option.
    """

    def decorate(function: Command) -> Command:
        table = {
            option.parameter: (group, option)
            for group, option in options_of(name)
            if option.key not in without
        }

        def command(*, config: Path | None, cluster_profile: str | None, **given: Any) -> int:
            params = given.pop("param", None)
            keys = [
                (option, given.pop(name)) for name, (_, option) in table.items() if name in given
            ]
            settings = Settings(
                tuple(read_flags(keys, os.environ)), tuple(params or ()), config, cluster_profile
            )
            return function(**given, settings=settings)

        signature = inspect.signature(function, eval_str=True).parameters.values()
        own = [each for each in signature if each.name != "settings"]
        more = [_parameter(option, group, shown) for group, option in table.values()]
        more += [_keyword("config", Config), _keyword("cluster_profile", ClusterProfile)]
        own.sort(key=lambda each: each.kind)  # keywords come after the settings
        first = sum(each.kind != inspect.Parameter.KEYWORD_ONLY for each in own)
        command.__signature__ = inspect.Signature([*own[:first], *more, *own[first:]])  # type: ignore[attr-defined]
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__module__, command.__annotations__ = function.__module__, {}
        command.takes_a_script, command.names_a_run = script, names_a_run  # type: ignore[attr-defined]
        return command

    return decorate


def _keyword(name: str, annotation: object) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _parameter(option: Option, group: str, shown: Sequence[str]) -> inspect.Parameter:
    """Return an option of the table as typer wants it. Values stay strings: they are validated as those of the file."""
    kinds: dict[str, Any] = {
        SWITCH: bool | None,
        LIST: list[str] | None,
        VARIABLES: list[str] | None,
    }
    flags = option.flags
    if option.kind == SWITCH and option.sets is True:
        flags = (*flags[:-1], f"{flags[-1]}/{option.negative}")
    info = typer.Option(
        *flags,
        metavar=option.metavar,
        help=option.text,
        rich_help_panel=group,
        hidden=bool(shown) and group not in shown and option.key not in shown,
    )
    return _keyword(option.parameter, Annotated[kinds.get(option.kind, str | None), info])


def find_program(
    args: Sequence[str] | None, *, is_module: bool, cwd: Path, command: str = "run"
) -> Program:
    """Return the script or module that was typed; a script must exist. `command` is for the hint without one."""
    from paceline.spec.job import Program

    if not args or not args[0].strip():
        ranks = {"submit": "--gpus 2", "prove": "--ranks 1,2"}.get(command, "--nproc 2")
        raise UsageError(
            "There is no script to run.",
            hint=f"Name one, as in `paceline {command} {ranks} train.py --lr 0.1`,"
            ' or set script = "train.py" in [project] of paceline.toml.',
        )
    name, *rest = args
    if is_module:
        return Program(name, tuple(rest), is_module=True)
    if not (cwd / name).is_file():
        raise UsageError(
            f"There is no script {name!r} in {cwd}.",
            hint="Options of Paceline go before the script, the script's own after it. Use -m for a module.",
        )
    return Program(os.path.normpath(name), tuple(rest))


def require_folder(path: Path) -> None:
    """Raise UsageError if a file that was named for output has no folder to be in."""
    if not path.absolute().parent.is_dir():
        raise UsageError(
            f"Cannot write {path}: there is no folder {str(path.parent)!r}.",
            hint="Create it first, or name another file.",
        )
