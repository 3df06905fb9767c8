"""Which points a sweep has: all combinations, points at random, or lines of a list; and the numbers of its trials."""

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

from paceline.agent.trial import shown
from paceline.contract.sweep_folder import Point, Search, is_active
from paceline.errors import SpecError
from paceline.spec.load import parse_value
from paceline.spec.sweep import in_order

Space = Mapping[str, dict[str, Any]]
MOST = 1_000_000  # points of a grid: more is a mistake in the file


@dataclass(frozen=True)
class Wanted:
    """A point that is asked for; None leaves it to the sampler."""

    point: dict[str, Any] | None
    program: str | None = None  # lists only
    args: list[str] | None = None

    @property
    def key(self) -> str:
        """What makes two points the same one."""
        told = [self.program, self.args] if self.args is not None else self.point
        return json.dumps(told, sort_keys=True)


def wanted_points(search: Search, *, count: int | None) -> list[Wanted]:
    """The points of a sweep that is described by ranges."""
    if search.asks:
        return [Wanted(None) for _ in range(count or 0)]
    if search.sampler == "random":
        return [Wanted(draw(search.space, f"{search.seed}/{index}")) for index in range(count or 0)]
    return [Wanted(point) for point in itertools.islice(grid(search.space), count)]


def grid(space: Space) -> Iterator[dict[str, Any]]:
    """All combinations, the first key slowest. Keys that do not apply are left out, and what is then equal is one."""
    size = math.prod(len(values(each)) for each in space.values())
    if size > MOST:
        raise SpecError(
            f"[space] has {size:,} combinations", hint='take values out, or choose sampler = "random"'
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
    """A point at random. The same seed gives the same point: a sweep that grows keeps those it has."""
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


# -- lists -------------------------------------------------------------------------------------------------


def read_list(path: Path, *, script: str | None = None) -> list[Wanted]:
    """A text file with one command line per line: `train.py --lr 0.1`, or only the arguments of `script`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise SpecError(f"{path}: cannot be read: {problem}", hint="check the path") from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as problem:
            raise SpecError(
                f"{path}, line {number}: {problem}", hint="quote it as one would for a shell"
            ) from None
        if words:
            found.append(_wanted(words, script, where=f"{path}, line {number}"))
    if not found:
        raise SpecError(f"{path} has no lines", hint="write one command line per line: train.py --lr 0.1")
    return found


def _wanted(words: list[str], script: str | None, *, where: str) -> Wanted:
    if re.fullmatch(r"python[\d.]*", PurePath(words[0]).name) and len(words) > 1:
        words = words[1:]
    if script is None:
        if words[0].startswith("-"):
            raise SpecError(
                f"{where}: begins with {words[0]!r}, and nothing says whose argument that is",
                hint="begin it with the script, or name one for all lines: --script train.py",
            )
        script, words = words[0], words[1:]
    elif words[0] == script:
        words = words[1:]
    return Wanted(options_of(words), program=script, args=words)


def options_of(words: Sequence[str]) -> dict[str, Any]:
    """What a command line says, as a point to show: `--lr 0.1 --fast` is lr and fast."""
    point: dict[str, Any] = {}
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not re.match(r"--?[A-Za-z]", word):
            continue
        key, equals, value = word.lstrip("-").partition("=")
        if not equals and position < len(words) and not re.match(r"--?[A-Za-z]", words[position]):
            value, equals = words[position], "="
            position += 1
        point[key] = parse_value(value) if equals else True
    return point


# -- numbers -----------------------------------------------------------------------------------------------


def new_trials(
    known: Sequence[Point], wanted: Iterable[Wanted], *, seeds: Sequence[int | None]
) -> list[Point]:
    """Trials that a sweep does not have yet: new points, and further seeds of those it has."""
    groups: dict[str, int] = {}
    there = {(point.group, point.seed) for point in known}
    for point in known:
        if point.point is not None or point.args is not None:
            groups[Wanted(point.point, point.program, point.args).key] = point.group
    number = max((point.number for point in known), default=-1) + 1
    free = max((point.group for point in known), default=-1) + 1
    made = []
    for index, each in enumerate(wanted):
        # Points that the sampler is still to choose are told apart by their place alone.
        group = index if each.point is None else groups.get(each.key)
        if group is None:
            group = groups[each.key] = free
            free += 1
        for seed in seeds:
            if (group, seed) not in there:
                there.add((group, seed))
                made.append(Point(number, group, each.point, seed=seed, program=each.program, args=each.args))
                number += 1
    return made


def seeds_of(count: int, first: int | None) -> list[int | None]:
    """One run of each point keeps the seed that the job has; several have seeds from that one on, or from 0."""
    return [None] if count == 1 else [(first or 0) + index for index in range(count)]


def told(point: Mapping[str, Any] | None) -> str:
    """A point in a line, for people."""
    if point is None:
        return "chosen when it begins"
    return " ".join(
        f"{key}={f'{value:.4g}' if isinstance(value, float) else shown(value)}"
        for key, value in point.items()
    )
