"""How a run used its nodes: means and peaks over the samples that their agents took."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from paceline.contract.files import open_without_waiting
from paceline.contract.foreign_records import (
    NUMBER,
    Fields,
    keep_valid,
    parse_objects,
    read_objects,
)
from paceline.contract.heartbeat_file import RUNNING
from paceline.contract.run_folder import RunFolder

TAIL_BYTES = 2**20  # read from the end of each file: some hours of a run that may last weeks


@dataclass(frozen=True)
class NodeUsage:
    """Usage of one node over the samples that were read. Shares are in percent, sizes in bytes."""

    node: int
    details: dict[str, Any]  # host, cores, memory_total and gpus, from the newest header line
    samples: list[dict[str, Any]] = field(repr=False)

    @property
    def host(self) -> str:
        return str(self.details.get("host", "?"))

    def mean(self, key: str) -> float | None:
        found = self._numbers(key)
        return fmean(found) if found else None

    def peak(self, key: str) -> float | None:
        return max(self._numbers(key), default=None)

    def _numbers(self, key: str) -> list[float]:
        values = (line.get(key) for line in self.samples)
        # not NaN either
        return [value for value in values if isinstance(value, NUMBER) and abs(value) < 1e18]


def read_node_usage(folder: RunFolder, *, max_nodes: int | None = None) -> list[NodeUsage]:
    """Return the usage of the first `max_nodes` nodes that have samples."""
    found = []
    for path in folder.system.glob("node-*.jsonl"):
        number = path.stem.removeprefix("node-")
        if number.isdigit():
            found.append((int(number), path))
    return [_read(number, path) for number, path in sorted(found)[:max_nodes]]


def _read(node: int, path: Path) -> NodeUsage:
    """Read the header line, which describes the node, and the end of the file."""
    lines: list[bytes] = []
    with suppress(OSError), open(open_without_waiting(path, follow=True), "rb") as file:
        lines.append(file.readline(TAIL_BYTES))
        size = file.seek(0, 2)
        file.seek(max(len(lines[0]), size - TAIL_BYTES))
        lines += file.read(TAIL_BYTES).splitlines()
    found = list(parse_objects(lines))
    headers = [line for line in found if "host" in line]
    details = headers[-1] if headers else {}
    return NodeUsage(node, details, [line for line in found if "host" not in line])


RECENT = 40  # samples of a node
TAIL = 16384  # bytes of the samples of node 0
ROW_LENGTH = 8  # of a rank in a sample
MIN_SECONDS = 4.0  # of samples, before shares of time mean anything
FACTOR = 1.5  # a rank's own part of a step, in medians; as `straggler_factor`
PAIR_FACTOR = 2.0  # of two ranks, neither is "the others"
MIN_SHARE = 0.1  # of a step that a slow rank must cost the others


@dataclass(frozen=True)
class RankSample:
    """A rank as its agent saw it at one moment."""

    time: float
    host: str
    rank: int
    state: int  # of `contract.heartbeat_file`
    step: int
    age: float | None  # seconds since its last heartbeat
    process: str  # the kernel's state letter
    seconds_per_step: float
    waited: float  # seconds, for data, since its first step
    own: float  # seconds of a step before it exchanges gradients


def newest_samples(use: NodeUsage) -> NodeUsage:
    """Return only the samples of the newest job start, and of those the last ones."""
    details = clean_sample(use.details)
    began = details.get("time", 0)
    samples = [
        each
        for line in use.samples[-RECENT:]
        if (each := clean_sample(line)).get("time", -1) >= began
    ]
    return NodeUsage(use.node, details, samples)


def clean_sample(line: dict[str, Any]) -> dict[str, Any]:
    fields: Fields = {
        "time": NUMBER,
        "gpus": list,
        "ranks": list,
        "own_cores": int,
        "cores": int,
        "memory_limit": int,
    }
    sample = keep_valid(line, fields)
    if "gpus" in sample:
        sample["gpus"] = [gpu if isinstance(gpu, dict) else {} for gpu in sample["gpus"]]
    return sample


def read_ranks(usage: Iterable[NodeUsage]) -> dict[int, list[RankSample]]:
    found: dict[int, list[RankSample]] = {}
    for use in usage:
        for sample in use.samples:
            for row in sample.get("ranks") or []:
                if _is_row(row):
                    rank, state, step, age, process, *times = row
                    found.setdefault(rank, []).append(
                        RankSample(
                            sample["time"], use.host, rank, state, step, age, process, *times
                        )
                    )
    return dict(sorted(found.items()))


def read_first_rank(folder: RunFolder) -> RankSample | None:
    """Return how far rank 0 of a live run is, as its agent saw it last. Reads only the end of the
    samples.
    """
    samples = map(clean_sample, read_objects(folder.node_metrics(0), limit=TAIL))
    usage = NodeUsage(0, {}, [sample for sample in samples if "time" in sample])
    return next(reversed(read_ranks([usage]).get(0, [])), None)


def _is_row(row: object) -> bool:
    if not isinstance(row, list) or len(row) != ROW_LENGTH:
        return False
    numbers = [*row[5:], 0 if row[3] is None else row[3]]
    if not (isinstance(row[4], str) and all(isinstance(each, int) for each in row[:3])):
        return False
    return all(isinstance(each, NUMBER) and math.isfinite(each) for each in numbers)


def slow_ranks(ranks: Mapping[int, Sequence[RankSample]]) -> dict[int, float]:
    """Compare the medians of the ranks' own seconds per step."""
    own = {}
    for rank, samples in ranks.items():
        known = [each.own for each in samples if each.state == RUNNING and each.own > 0]
        if len(known) >= 2 and samples[-1].time - samples[0].time >= MIN_SECONDS:
            own[rank] = median(known)
    if len(own) < 2:
        return {}
    ordered = sorted(own.values())
    typical = ordered[(len(ordered) - 1) // 2]
    factor = PAIR_FACTOR if len(own) == 2 else FACTOR
    step = max(samples[-1].seconds_per_step for samples in ranks.values())
    return {
        rank: each / typical
        for rank, each in own.items()
        if each > factor * typical and each - typical > max(0.005, MIN_SHARE * step)
    }
