"""How a run used its nodes: means and peaks over the samples that their agents took."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.contract.files.foreign_records import NUMBER, parse_object
from paceline.contract.files.shared_places import open_without_waiting
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

    def gpu_mean(self, key: str) -> float | None:
        found = self._numbers(self._gpus(), key)
        return fmean(found) if found else None

    def gpu_peak(self, key: str) -> float | None:
        """The highest value of any GPU."""
        return max(self._numbers(self._gpus(), key), default=None)

    def _gpus(self) -> list[dict[str, Any]]:
        return [gpu for sample in self.samples for gpu in _objects(sample.get("gpus"))]

    @staticmethod
    def _numbers(lines: Iterable[dict[str, Any]], key: str) -> list[float]:
        return [line[key] for line in lines if _is_number(line.get(key))]

    def summary(self) -> str:
        """Return one line for display."""
        parts = [self.host]
        if (cpu := self.mean("cpu")) is not None:
            own = self.mean("own_cpu") or 0.0
            cores = self.details.get("cores", "?")
            parts.append(f"CPU {cpu:.0f} % of {cores} cores (this run: {own:.1f} cores)")
        if (memory := self.peak("memory")) is not None:
            own = self.peak("own_memory") or 0.0
            used = _size(memory, self.details.get("memory_total"))
            parts.append(f"peak memory {used} (this run: {_gb(own)})")
        gpus = _objects(self.details.get("gpus"))
        if gpus:
            parts.append(self._gpu_summary(gpus))
        return " · ".join(parts)

    def _gpu_summary(self, gpus: list[dict[str, Any]]) -> str:
        parts = [f"{len(gpus)} x {gpus[0].get('name', 'GPU')}"]
        if (busy := self.gpu_mean("busy")) is not None:
            parts.append(f"{busy:.0f} % busy")
        if (memory := self.gpu_peak("memory")) is not None:
            parts.append(f"peak memory {_size(memory, gpus[0].get('memory'))}")
        if (power := self.gpu_mean("power")) is not None:
            parts.append(f"{power:.0f} W")
        return ", ".join(parts)


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


def _objects(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _is_number(value: object) -> bool:
    return isinstance(value, NUMBER) and abs(value) < 1e18  # not NaN either


def _gb(size: float) -> str:
    return f"{size / 2**30:.1f} GB"


def _size(used: float, total: Any) -> str:
    return f"{used / 2**30:.1f} of {total / 2**30:.0f} GB" if _is_number(total) else _gb(used)
