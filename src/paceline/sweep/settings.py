"""What a sweep tries: its file or list, the flags over it, the job of each trial, its points (a
grid, random points, or lines of a list), and the numbers of its trials.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from paceline.agent.sweep_trial import to_text
from paceline.contract import wandb_server
from paceline.contract.redaction import redact_args
from paceline.contract.sweep_folder import Point, Search, is_active
from paceline.errors import EnvironmentProblem, SpecError, UsageError
from paceline.spec.job import Job, Program
from paceline.spec.load import ClusterProfile, find_file, load_job, repository_root
from paceline.spec.option import Flag
from paceline.spec.settings import parse_value
from paceline.spec.sweep import SweepFile, check_metric, in_order, load_sweep, with_flags
from paceline.spec.training_tables import SweepTable

TPE_PARALLEL = 4  # with more at once, TPE learns less from each
Space = Mapping[str, dict[str, Any]]
MAX_GRID = 1_000_000  # points: more must be a mistake in the file


@dataclass(frozen=True)
class SweepSettings:
    job: Job
    search: Search
    requests: list[Point]  # without their numbers
    seeds: list[int | None]
    pack: int
    scripts: tuple[str, ...]  # a list may name several
    tasks: int | None = None  # that run the trials, if fixed: the agents of a W&B sweep


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
    listed = None
    if path.suffix == ".toml":
        file = load_sweep(path, typed)
    elif path.suffix == ".py":
        file = _sweep_of_script(path, typed)
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
    if table.wandb_sweep is not None:
        return _wandb_settings(file, table.wandb_sweep, job, search, typed)
    requests = (
        request_points(search, count=table.count) if listed is None else listed[: table.count]
    )
    scripts = tuple(dict.fromkeys(each.program for each in requests if each.program)) or (script,)
    seeds = choose_seeds(table.seeds, job.runtime.seed)
    return SweepSettings(job, search, requests, seeds, table.pack, scripts)


def _wandb_settings(
    file: SweepFile, name: str, job: Job, search: Search, typed: Sequence[Flag]
) -> SweepSettings:
    """Return the settings of a sweep whose points W&B chooses: as many as its agents may
    request.
    """
    agents, count = count_agents(file.table, file.path)
    if name in [flag.value for flag in typed if flag.key == "wandb_sweep"]:
        name = (
            job.tables.tracking.wandb_sweep or name
        )  # a file wins over the flag, whichever file it is
    check_name(name)
    # A script's name alone would not tell its W&B sweeps apart.
    by_script = file.table.name is None and file.path.suffix == ".py"
    title = f"{file.name}-{name.rpartition('/')[2]}" if by_script else file.name
    search = replace(search, name=title, sampler="wandb", wandb_sweep=name, parallel=agents)
    return SweepSettings(
        with_wandb(job),
        search,
        request_points(search, count=count),
        [None],
        file.table.pack,
        (job.program.name,),
        tasks=agents,
    )


def _sweep_of_script(path: Path, typed: Sequence[Flag]) -> SweepFile:
    """Return the sweep of a script alone: the points come from an existing W&B sweep."""
    table = with_flags(SweepTable(script=path.name), typed)
    if table.wandb_sweep is None:
        raise UsageError(
            f"{path} is a script; a sweep also needs points to try.",
            hint="Name a sweep.toml, or a W&B sweep with --wandb-sweep ENTITY/PROJECT/ID.",
        )
    return SweepFile(path, table, {})


def _read_list(path: Path, typed: Sequence[Flag]) -> tuple[SweepFile, list[Point]]:
    if path.suffix != ".txt":
        raise UsageError(
            f"{path} is not a sweep file: use .toml or .txt.",
            hint="Use TOML with [sweep] and [space], or a list of command lines (.txt). Create a "
            "W&B sweep with `wandb sweep`, and add --wandb-sweep ENTITY/PROJECT/ID.",
        )
    table = with_flags(SweepTable(), typed)
    listed = read_list(path, script=table.script)
    table = table.model_copy(update={"script": table.script or listed[0].program})
    check_metric(table, path)
    return SweepFile(path, table, {}), listed


# -- points


def request(point: dict[str, Any] | None, **fields: Any) -> Point:
    """Return a point that has no number yet; None lets the sampler choose when the trial starts."""
    return Point(-1, -1, point, **fields)


def identity(point: Point) -> str:
    """Return what makes two points the same."""
    has_line = point.args is not None
    return json.dumps([point.program, point.args] if has_line else point.point, sort_keys=True)


def request_points(search: Search, *, count: int | None) -> list[Point]:
    """Return the points of a search space."""
    if search.chooses_late:
        return [request(None) for _ in range(count or 0)]
    if search.sampler == "random":
        return [
            request(draw(search.space, f"{search.seed}/{index}")) for index in range(count or 0)
        ]
    return [request(point) for point in itertools.islice(grid(search.space), count)]


def grid(space: Space) -> Iterator[dict[str, Any]]:
    """Yield all combinations, the first key slowest, without keys that don't apply and without
    duplicates.
    """
    size = math.prod(len(values(each)) for each in space.values())
    if size > MAX_GRID:
        raise SpecError(
            f"[space] has {size:,} combinations, more than {MAX_GRID:,}.",
            hint='Remove values, or set sampler = "random".',
        )
    keys = in_order(space)
    seen: set[str] = set()
    for chosen in itertools.product(*(values(space[key]) for key in keys)):
        point: dict[str, Any] = {}
        for key, value in zip(keys, chosen, strict=True):
            if is_active(space[key].get("when", {}), point):
                point[key] = value
        text = json.dumps(point)
        if text not in seen:
            seen.add(text)
            yield point


def values(each: Mapping[str, Any]) -> list[Any]:
    if "grid" in each:
        return list(each["grid"])
    low, high = each["integer"]
    return list(range(low, high + 1, each["step"]))


def draw(space: Space, seed: str) -> dict[str, Any]:
    """Return a random point. The same seed gives the same point, so a sweep that grows keeps its
    points.
    """
    generator = random.Random(seed)
    point: dict[str, Any] = {}
    for key in in_order(space):
        each = space[key]
        value = _draw(each, generator)
        if is_active(each.get("when", {}), point):
            point[key] = value
    return point


def _draw(each: Mapping[str, Any], generator: random.Random) -> Any:
    if "grid" in each:
        return generator.choice(each["grid"])
    if "uniform" in each:
        return generator.uniform(*each["uniform"])
    if "log_uniform" in each:
        low, high = each["log_uniform"]
        return math.exp(generator.uniform(math.log(low), math.log(high)))
    low, high = each["integer"]
    if each["log"]:
        return min(high, int(math.exp(generator.uniform(math.log(low), math.log(high + 1)))))
    return generator.randrange(low, high + 1, each["step"])


# -- lists
# -------------------------------------------------------------------------------------------------


def read_list(path: Path, *, script: str | None = None) -> list[Point]:
    """Read a text file with one command line per line: `train.py --lr 0.1`, or only the arguments
    of `script`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise SpecError(f"Cannot read {path}: {problem}.", hint="Check the path.") from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            argv = shlex.split(line, comments=True)
        except ValueError as problem:
            raise SpecError(
                f"{path}, line {number}: {str(problem).lower()}.",
                hint="Quote the line as you would in a shell.",
            ) from None
        if argv:
            found.append(_parse_line(argv, script, where=f"{path}, line {number}"))
    if not found:
        raise SpecError(
            f"{path} is empty.", hint="Write one command per line, such as `train.py --lr 0.1`."
        )
    return found


def _parse_line(argv: list[str], script: str | None, *, where: str) -> Point:
    if re.fullmatch(r"python[\d.]*", PurePath(argv[0]).name) and len(argv) > 1:
        argv = argv[1:]
    if script is None:
        if argv[0].startswith("-"):
            raise SpecError(
                f"{where}: the line starts with {argv[0]!r} and names no script.",
                hint="Start it with the script, or name one for all lines with --script.",
            )
        script, argv = argv[0], argv[1:]
    elif argv[0] == script:
        argv = argv[1:]
    return request(parse_options(argv), program=script, args=argv)


def parse_options(args: Sequence[str]) -> dict[str, Any]:
    """Return the options of a command line as a point to display: `--lr 0.1 --fast` is lr and fast.

    Secrets are hidden: the trial gets the line itself.
    """
    args, is_option = redact_args(args), re.compile(r"--?[A-Za-z]").match
    point: dict[str, Any] = {}
    for arg, following in itertools.zip_longest(args, args[1:], fillvalue="-x"):
        if is_option(arg):
            key, equals, value = arg.lstrip("-").partition("=")
            if not equals and not is_option(following):
                equals, value = "=", following
            point[key] = parse_value(value) if equals else True
    return point


# -- numbers
# -----------------------------------------------------------------------------------------------


def new_trials(
    known: Sequence[Point], requests: Iterable[Point], *, seeds: Sequence[int | None]
) -> list[Point]:
    """Return the trials that a sweep lacks: new points, and more seeds of known points."""
    # Points that the sampler chooses later differ only by their position.
    groups = {
        identity(point): point.group
        for point in known
        if point.point is not None or point.args is not None
    }
    existing = {(point.group, point.seed) for point in known}
    numbers = itertools.count(max((point.number for point in known), default=-1) + 1)
    free = itertools.count(max((point.group for point in known), default=-1) + 1)
    made = []
    for index, point in enumerate(requests):
        name = identity(point)
        if point.point is not None and name not in groups:
            groups[name] = next(free)
        group = index if point.point is None else groups[name]
        for seed in (seed for seed in seeds if (group, seed) not in existing):
            existing.add((group, seed))
            made.append(replace(point, number=next(numbers), group=group, seed=seed))
    return made


def choose_seeds(count: int, first: int | None) -> list[int | None]:
    """Return the seeds of each point: the job's own for one run, else consecutive ones from that
    (or 0) on.
    """
    return [None] if count == 1 else [(first or 0) + index for index in range(count)]


def describe_point(point: Mapping[str, Any] | None) -> str:
    """Return a point as `key=value ...`."""
    if point is None:
        return "chosen when it starts"
    return " ".join(
        f"{key}={f'{value:.4g}' if isinstance(value, float) else to_text(value)}"
        for key, value in point.items()
    )


DEFAULT_AGENTS = 4  # with more at once, the search learns less from each
ALTERNATIVE = 'or let Paceline search, which needs no service: sampler = "tpe" in a sweep.toml'


def with_wandb(job: Job) -> Job:
    """Turn W&B on: the search learns only from what trials log there."""
    if job.tables.tracking.wandb is not None:
        return job
    tracking = job.tables.tracking.model_copy(update={"wandb": True})
    return replace(job, tables=job.tables.model_copy(update={"tracking": tracking}))


def count_agents(table: SweepTable, path: Path) -> tuple[int, int]:
    """Return the number of agents, and of all their trials."""
    agents = table.parallel or DEFAULT_AGENTS
    if table.seeds != 1:
        raise SpecError(
            f"seeds in {path} is {table.seeds}, but each point of a W&B sweep is one run.",
            hint="Make the seed a parameter of the W&B sweep.",
        )
    if table.count is None:
        raise SpecError(
            "This W&B sweep needs the number of points per agent.",
            hint=f"Add --count 10 for ten points on each of {agents} agents (--parallel).",
        )
    return agents, agents * table.count


def check_name(sweep: str) -> None:
    """Raise unless this is a sweep's id, alone or with its project and entity."""
    if not re.fullmatch(r"([^/\s]+/){0,2}[^/\s]+", sweep):
        raise UsageError(
            f"Invalid W&B sweep {sweep!r}.", hint="Write ENTITY/PROJECT/ID, as on the sweep's page."
        )


def check_reachable(environ: Mapping[str, str]) -> None:
    """Raise before anything is queued if agents could not reach W&B: they would all wait in
    vain.
    """
    message = f"This sweep gets its points from W&B at {wandb_server.base_url(environ)}, but"
    if environ.get("WANDB_MODE") in ("offline", "disabled"):
        raise EnvironmentProblem(
            f"{message} WANDB_MODE is {environ['WANDB_MODE']!r}.",
            hint=f"Unset WANDB_MODE, {ALTERNATIVE}",
        )
    if problem := wandb_server.unreachable(environ):
        raise EnvironmentProblem(
            f"{message} {problem}.",
            hint="Use a machine with network access, set WANDB_BASE_URL or https_proxy, "
            f"{ALTERNATIVE}",
        )
    if problem := wandb_server.missing_key(environ):
        raise EnvironmentProblem(f"{message} {problem}.", hint=wandb_server.KEY_HINT)
