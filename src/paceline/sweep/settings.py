"""What was asked of a sweep: its file or list, what was typed over it, and the job that each trial is."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.contract.sweep_folder import Search
from paceline.errors import SpecError, UsageError
from paceline.spec import Flag, Job, Program, load_job
from paceline.spec.load import find_file, repository_root
from paceline.spec.sweep import SweepFile, SweepTable, check_means, in_order, load_sweep, with_flags
from paceline.spec.wandb_sweep import SUFFIXES, WandbFile
from paceline.sweep.points import Wanted, read_list, seeds_of, wanted_points
from paceline.sweep.wandb_service import check_name
from paceline.sweep.wandb_setting import file_of_script, file_of_wandb, name_of, shares, with_wandb

TPE_PARALLEL = 4  # more at once, and it has learned less from each


@dataclass(frozen=True)
class Setting:
    job: Job
    search: Search
    wanted: list[Wanted]
    seeds: list[int | None]
    pack: int
    scripts: tuple[str, ...]  # lists may name several
    tasks: int | None = None  # into which the trials go, where that was said: the agents of a W&B sweep
    wandb_config: dict[str, Any] | None = None  # the W&B sweep that is to be made


def read_setting(
    path: Path,
    *,
    typed: Sequence[Flag],
    flags: Sequence[Flag],
    params: Iterable[str] = (),
    config: Path | None = None,
    profile: str | None = None,
) -> Setting:
    """`typed` are flags of the sweep's own (keys of `[sweep]`), `flags` those of its jobs."""
    told = None
    if path.suffix in SUFFIXES:
        file, told = file_of_wandb(path, typed)
        listed = None
    else:
        file, listed = _read(path, typed)
    table = file.table
    folder = file.path.resolve().parent
    script = table.module or table.script or ""
    program = Program(script, is_module=table.module is not None)
    if config is None and find_file(folder, repository_root(folder)) is None:
        # A project without a repository: its file may lie where the command is typed.
        config = find_file(Path.cwd(), repository_root(Path.cwd()))
    here = Path.cwd().resolve()
    tables = {**file.tables, "job": {"name": file.name, **file.tables.get("job", {})}}
    job = load_job(
        program,
        flags=flags,
        params=params,
        config=config,
        profile=profile,
        cwd=folder,
        over=(tables, file.path),
        around=here if folder.is_relative_to(here) else None,  # as for `paceline run` of a script down there
    )
    search = Search(
        name=file.name, metric=table.metric, direction=table.direction,
        sampler=table.sampler if listed is None else "list", prune=table.prune, prune_after=table.prune_after,
        seed=table.seed, space={key: file.space[key] for key in in_order(file.space)}, args=list(table.args),
        arguments=table.arguments, parallel=table.parallel, file=str(file.path.resolve()),
        script=next((flag.value for flag in reversed(typed) if flag.key == "script" and flag.value), ""),
    )  # fmt: skip
    if told is not None or table.wandb_sweep is not None:
        return _of_wandb(file, told, job, search, typed)
    wanted = wanted_points(search, count=table.count) if listed is None else listed[: table.count]
    scripts = tuple(dict.fromkeys(each.program for each in wanted if each.program)) or (script,)
    seeds = seeds_of(table.seeds, job.runtime.seed)
    return Setting(job, search, wanted, seeds, table.pack, scripts)


def _of_wandb(
    file: SweepFile, told: WandbFile | None, job: Job, search: Search, typed: Sequence[Flag]
) -> Setting:
    """Points that W&B's service chooses: as many as its agents may ask for."""
    agents, count = shares(file.table, file.path, points=told.points if told else None)
    name = file.table.wandb_sweep or ""
    if name in [flag.value for flag in typed if flag.key == "wandb_sweep"]:
        name = job.tracking.wandb_sweep or name  # what a file says wins, wherever it stands
    if name:
        check_name(name)
    search = replace(
        search, name=name_of(file, name), sampler="wandb", wandb_sweep=name, parallel=agents
    )  # fmt: skip
    return Setting(
        with_wandb(job, os.environ), search, wanted_points(search, count=count), [None], file.table.pack,
        (job.program.name,), tasks=agents, wandb_config=told.config if told and not name else None,
    )  # fmt: skip


def _read(path: Path, typed: Sequence[Flag]) -> tuple[SweepFile, list[Wanted] | None]:
    if path.suffix == ".toml":
        return load_sweep(path, typed), None
    if path.suffix == ".py":
        return file_of_script(path, typed), None
    if path.suffix != ".txt":
        raise UsageError(
            f"{path}: found {path.suffix or 'no ending'}, expected .toml, .txt or .yml",
            hint="a sweep's file is TOML with [sweep] and [space]; a list of command lines ends in .txt, W&B's in .yml",
        )
    table = with_flags(SweepTable(), typed)
    listed = read_list(path, script=table.script)
    first = listed[0].program
    if table.script is None:
        table = table.model_copy(update={"script": first})
    check_means(table, path)
    if table.sampler == "tpe":
        raise SpecError(
            f"{path}: a list has its points, and tpe would choose others", hint="write a sweep.toml"
        )
    return SweepFile(path, table, {}), listed
