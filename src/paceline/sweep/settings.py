"""The settings of a sweep: its file or list, the flags over it, and the job of each trial."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.contract.sweep_folder import Search
from paceline.errors import UsageError
from paceline.spec.job import Job, Program
from paceline.spec.load import ClusterProfile, find_file, load_job, repository_root
from paceline.spec.sweep import SweepFile, check_metric, in_order, load_sweep, with_flags
from paceline.spec.training_tables import SweepTable
from paceline.spec.typed_flags import Flag
from paceline.sweep.points import PointRequest, choose_seeds, read_list, request_points
from paceline.sweep.wandb import (
    SUFFIXES,
    check_name,
    choose_name,
    count_agents,
    read_wandb_file,
    sweep_of_script,
    with_wandb,
)

TPE_PARALLEL = 4  # with more at once, TPE learns less from each


@dataclass(frozen=True)
class SweepSettings:
    job: Job
    search: Search
    requests: list[PointRequest]
    seeds: list[int | None]
    pack: int
    scripts: tuple[str, ...]  # a list may name several
    tasks: int | None = None  # that run the trials, if fixed: the agents of a W&B sweep
    wandb_config: dict[str, Any] | None = None  # the W&B sweep to create


def read_settings(
    path: Path,
    *,
    typed: Sequence[Flag],
    flags: Sequence[Flag],
    params: Iterable[str] = (),
    config: Path | None = None,
    profile: str | None = None,
    cluster: ClusterProfile | None = None,
) -> SweepSettings:
    """Read a sweep's file. `typed` are flags for keys of `[sweep]`, `flags` those for its jobs."""
    listed, config_of_wandb = None, None
    if path.suffix in SUFFIXES:
        file, config_of_wandb = read_wandb_file(path, typed)
    elif path.suffix == ".toml":
        file = load_sweep(path, typed)
    elif path.suffix == ".py":
        file = sweep_of_script(path, typed)
    else:
        file, listed = _read_list(path, typed)
    table = file.table
    folder = file.path.resolve().parent
    script = table.module or table.script or ""
    program = Program(script, is_module=table.module is not None)
    if config is None and find_file(folder, repository_root(folder)) is None:
        # Without a repository, the project's file may be in the current folder.
        config = find_file(Path.cwd(), repository_root(Path.cwd()))
    here = Path.cwd().resolve()
    tables = {**file.tables, "job": {"name": file.name, **file.tables.get("job", {})}}
    job = load_job(
        program,
        flags=flags,
        params=params,
        config=config,
        profile=profile,
        cluster=cluster,
        cwd=folder,
        overlay=(tables, file.path),
        # as for `paceline run` of a script below
        default_folder=here if folder.is_relative_to(here) else None,
    )
    search = Search(
        name=file.name,
        metric=table.metric,
        direction=table.direction,
        sampler=table.sampler if listed is None else "list",
        prune=table.prune,
        prune_after=table.prune_after,
        seed=table.seed,
        space={key: file.space[key] for key in in_order(file.space)},
        args=list(table.args),
        arguments=table.arguments,
        parallel=table.parallel,
        file=str(file.path.resolve()),
        script=next(
            (flag.value for flag in reversed(typed) if flag.key == "script" and flag.value), ""
        ),
    )
    if config_of_wandb is not None or table.wandb_sweep is not None:
        return _wandb_settings(file, config_of_wandb, job, search, typed)
    requests = (
        request_points(search, count=table.count) if listed is None else listed[: table.count]
    )
    scripts = tuple(dict.fromkeys(each.program for each in requests if each.program)) or (script,)
    seeds = choose_seeds(table.seeds, job.runtime.seed)
    return SweepSettings(job, search, requests, seeds, table.pack, scripts)


def _wandb_settings(
    file: SweepFile, config: dict[str, Any] | None, job: Job, search: Search, typed: Sequence[Flag]
) -> SweepSettings:
    """Return the settings of a sweep whose points W&B chooses: as many as its agents may
    request.
    """
    agents, count = count_agents(file.table, file.path, cap=(config or {}).get("run_cap"))
    name = file.table.wandb_sweep or ""
    if name in [flag.value for flag in typed if flag.key == "wandb_sweep"]:
        name = job.tracking.wandb_sweep or name  # a file wins over the flag, whichever file it is
    if name:
        check_name(name)
    search = replace(
        search, name=choose_name(file, name), sampler="wandb", wandb_sweep=name, parallel=agents
    )
    return SweepSettings(
        with_wandb(job, os.environ),
        search,
        request_points(search, count=count),
        [None],
        file.table.pack,
        (job.program.name,),
        tasks=agents,
        wandb_config=None if name else config,
    )


def _read_list(path: Path, typed: Sequence[Flag]) -> tuple[SweepFile, list[PointRequest]]:
    if path.suffix != ".txt":
        raise UsageError(
            f"{path} is not a sweep file: use .toml, .txt or .yml.",
            hint="Use TOML with [sweep] and [space], a list of command lines (.txt), or W&B's own "
            "file (.yml).",
        )
    table = with_flags(SweepTable(), typed)
    listed = read_list(path, script=table.script)
    table = table.model_copy(update={"script": table.script or listed[0].program})
    check_metric(table, path)
    return SweepFile(path, table, {}), listed
