"""How a run used its nodes: means and peaks over the samples that their agents took."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.contract.files.foreign_records import NUMBER, parse_object
from paceline.contract.files.shared_folders import open_without_waiting
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
        found = self._numbers(self.samples, key)
        return fmean(found) if found else None

    def peak(self, key: str) -> float | None:
        return max(self._numbers(self.samples, key), default=None)

    @staticmethod
    def _numbers(lines: Iterable[dict[str, Any]], key: str) -> list[float]:
        return [line[key] for line in lines if _is_number(line.get(key))]


def read_node_usage(folder: RunFolder, *, max_nodes: int | None = None) -> list[NodeUsage]:
    """Return the usage of the first `max_nodes` nodes that have samples."""
    found = []
    for path in folder.system.glob("node-*.jsonl"):
        number = path.stem.removeprefix("node-")
        if number.isdigit():
            found.append((int(number), path))
    return [_read(number, path) for number, path in sorted(found)[:max_nodes]]


def _read(node: int, path: Path) -> NodeUsage:
    details: dict[str, Any] = {}
    samples = []
    for line in _lines(path):
        try:
            value = parse_object(line)
        except ValueError:  # truncated by a crash, or by where we start reading
            continue
        if "host" in value:
            details = value
        else:
            samples.append(value)
    return NodeUsage(node, details, samples)


def _lines(path: Path) -> list[bytes]:
    """Return the header line, which describes the node, and the end of the file."""
    try:
        with open(open_without_waiting(path, follow=True), "rb") as file:
            first = file.readline(TAIL_BYTES)
            size = file.seek(0, 2)
            file.seek(max(len(first), size - TAIL_BYTES))
            return [first, *file.read(TAIL_BYTES).splitlines()]
    except OSError:
        return []


def _is_number(value: object) -> bool:
    return isinstance(value, NUMBER) and abs(value) < 1e18  # not NaN either
