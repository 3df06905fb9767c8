"""The points of a sweep (a grid, random points, or lines of a list) and the numbers of its
trials.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from paceline.agent.sweep_trial import to_text
from paceline.contract.redaction import redact_args
from paceline.contract.sweep_folder import Point, Search, is_active
from paceline.errors import SpecError
from paceline.spec.sweep import in_order
from paceline.spec.toml import parse_value

Space = Mapping[str, dict[str, Any]]
MAX_GRID = 1_000_000  # points: more must be a mistake in the file


@dataclass(frozen=True)
class PointRequest:
    """A point to try; None lets the sampler choose it when the trial starts."""

    point: dict[str, Any] | None
    program: str | None = None  # lists only
    args: list[str] | None = None

    @property
    def key(self) -> str:
        """What makes two points the same."""
        identity = [self.program, self.args] if self.args is not None else self.point
        return json.dumps(identity, sort_keys=True)


def request_points(search: Search, *, count: int | None) -> list[PointRequest]:
    """Return the points of a search space."""
    if search.chooses_late:
        return [PointRequest(None) for _ in range(count or 0)]
    if search.sampler == "random":
        return [
            PointRequest(draw(search.space, f"{search.seed}/{index}"))
            for index in range(count or 0)
        ]
    return [PointRequest(point) for point in itertools.islice(grid(search.space), count)]


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


def read_list(path: Path, *, script: str | None = None) -> list[PointRequest]:
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


def _parse_line(argv: list[str], script: str | None, *, where: str) -> PointRequest:
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
    return PointRequest(parse_options(argv), program=script, args=argv)


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
    known: Sequence[Point], requests: Iterable[PointRequest], *, seeds: Sequence[int | None]
) -> list[Point]:
    """Return the trials that a sweep lacks: new points, and more seeds of known points."""
    groups: dict[str, int] = {}
    existing = {(point.group, point.seed) for point in known}
    for point in known:
        if point.point is not None or point.args is not None:
            groups[PointRequest(point.point, point.program, point.args).key] = point.group
    number = max((point.number for point in known), default=-1) + 1
    free = max((point.group for point in known), default=-1) + 1
    made = []
    for index, request in enumerate(requests):
        # Points that the sampler chooses later differ only by their position.
        group = index if request.point is None else groups.get(request.key)
        if group is None:
            group = groups[request.key] = free
            free += 1
        for seed in seeds:
            if (group, seed) not in existing:
                existing.add((group, seed))
                made.append(
                    Point(
                        number,
                        group,
                        request.point,
                        seed=seed,
                        program=request.program,
                        args=request.args,
                    )
                )
                number += 1
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
