"""What was asked of a sweep: its file or list, what was typed over it, and the job that each trial is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import SpecError, UsageError
from paceline.spec import Flag, Job, Program, load_job
from paceline.spec.load import find_file, repository_root
from paceline.spec.sweep import SweepFile, SweepTable, check_means, in_order, load_sweep, with_flags
from paceline.sweep.points import Wanted, read_list, seeds_of, wanted_points
from paceline.trials import Search

TPE_PARALLEL = 4  # more at once, and it has learned less from each


@dataclass(frozen=True)
class Setting:
    job: Job
    search: Search
    wanted: list[Wanted]
    seeds: list[int | None]
    pack: int
    scripts: tuple[str, ...]  # lists may name several


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
    file, listed = _read(path, typed)
    table = file.table
    folder = file.path.resolve().parent
    script = table.module or table.script or ""
    program = Program(script, is_module=table.module is not None)
    if config is None and find_file(folder, repository_root(folder)) is None:
        # A project without a repository: its file may lie where the command is typed.
        config = find_file(Path.cwd(), repository_root(Path.cwd()))
    tables = {**file.tables, "job": {"name": file.name, **file.tables.get("job", {})}}
    job = load_job(
        program,
        flags=flags,
        params=params,
        config=config,
        profile=profile,
        cwd=folder,
        over=(tables, file.path),
    )
    search = Search(
        name=file.name, metric=table.metric, direction=table.direction,
        sampler=table.sampler if listed is None else "list", prune=table.prune, prune_after=table.prune_after,
        seed=table.seed, space={key: file.space[key] for key in in_order(file.space)}, args=list(table.args),
        arguments=table.arguments, parallel=table.parallel, file=str(file.path.resolve()),
    )  # fmt: skip
    if search.asks and search.parallel is None:
        search = replace(search, parallel=TPE_PARALLEL)
    wanted = wanted_points(search, count=table.count) if listed is None else listed[: table.count]
    scripts = tuple(dict.fromkeys(each.program for each in wanted if each.program)) or (script,)
    seeds = seeds_of(table.seeds, job.runtime.seed)
    return Setting(job, search, wanted, seeds, table.pack, scripts)


def _read(path: Path, typed: Sequence[Flag]) -> tuple[SweepFile, list[Wanted] | None]:
    if path.suffix == ".toml":
        return load_sweep(path, typed), None
    if path.suffix != ".txt":
        raise UsageError(
            f"{path}: found {path.suffix or 'no ending'}, expected .toml or .txt",
            hint="a sweep's file is TOML with [sweep] and [space]; a list of command lines ends in .txt",
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
