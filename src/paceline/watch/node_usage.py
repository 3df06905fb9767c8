"""What the nodes of a run did, in short: means and peaks over the samples that their agents took."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.contract.run_folder import RunFolder

READ = 2**20  # bytes of a file's end: some hours, of runs that may have lasted for weeks


@dataclass(frozen=True)
class NodeUsage:
    """One node, over the samples that were read. Shares are in percent, sizes in bytes."""

    node: int
    facts: dict[str, Any]  # the newest first line: host, cores, memory_total, gpus
    samples: list[dict[str, Any]] = field(repr=False)

    @property
    def host(self) -> str:
        return str(self.facts.get("host", "?"))

    def mean(self, key: str) -> float | None:
        found = self._numbers(self.samples, key)
        return fmean(found) if found else None

    def peak(self, key: str) -> float | None:
        return max(self._numbers(self.samples, key), default=None)

    def gpu_mean(self, key: str) -> float | None:
        found = self._numbers(self._gpus(), key)
        return fmean(found) if found else None

    def gpu_peak(self, key: str) -> float | None:
        """The most of any one GPU."""
        return max(self._numbers(self._gpus(), key), default=None)

    def _gpus(self) -> list[dict[str, Any]]:
        return [gpu for sample in self.samples for gpu in sample.get("gpus", ()) if isinstance(gpu, dict)]

    @staticmethod
    def _numbers(lines: Iterable[dict[str, Any]], key: str) -> list[float]:
        return [line[key] for line in lines if isinstance(line.get(key), (int, float))]

    def summary(self) -> str:
        """One line for people."""
        parts = [self.host]
        if (cpu := self.mean("cpu")) is not None:
            own = self.mean("own_cpu") or 0.0
            parts.append(
                f"CPU {cpu:.0f} % of {self.facts.get('cores', '?')} cores (the run: {own:.1f} cores)"
            )
        if (memory := self.peak("memory")) is not None:
            own = self.peak("own_memory") or 0.0
            parts.append(
                f"memory at most {_size(memory, self.facts.get('memory_total'))} (the run: {_gb(own)})"
            )
        gpus = self.facts.get("gpus") or []
        if gpus:
            parts.append(self._gpu_summary(gpus))
        return " · ".join(parts)

    def _gpu_summary(self, gpus: list[dict[str, Any]]) -> str:
        words = [f"{len(gpus)} x {gpus[0].get('name', 'GPU')}"]
        if (busy := self.gpu_mean("busy")) is not None:
            words.append(f"{busy:.0f} % busy")
        if (memory := self.gpu_peak("memory")) is not None:
            words.append(f"memory at most {_size(memory, gpus[0].get('memory'))}")
        if (power := self.gpu_mean("power")) is not None:
            words.append(f"{power:.0f} W")
        return ", ".join(words)


def read_node_usage(folder: RunFolder, *, max_nodes: int | None = None) -> list[NodeUsage]:
    """The nodes that have left samples, in order; those past `max_nodes` are left unread."""
    found = []
    for path in folder.system.glob("node-*.jsonl"):
        number = path.stem.removeprefix("node-")
        if number.isdigit():
            found.append((int(number), path))
    return [_read(number, path) for number, path in sorted(found)[:max_nodes]]


def _read(node: int, path: Path) -> NodeUsage:
    facts: dict[str, Any] = {}
    samples = []
    for line in _lines(path):
        try:
            value = json.loads(line)
        except ValueError:  # torn by a crash, or cut by where we began
            continue
        if not isinstance(value, dict):
            continue
        if "host" in value:
            facts = value
        else:
            samples.append(value)
    return NodeUsage(node, facts, samples)


def _lines(path: Path) -> list[bytes]:
    """The first line, which tells of the node, and the file's end."""
    try:
        with open(path, "rb") as file:
            first = file.readline()
            size = file.seek(0, 2)
            file.seek(max(len(first), size - READ))
            return [first, *file.read().splitlines()]
    except OSError:
        return []


def _gb(size: float) -> str:
    return f"{size / 2**30:.1f} GB"


def _size(used: float, total: object) -> str:
    return f"{used / 2**30:.1f} of {total / 2**30:.0f} GB" if isinstance(total, (int, float)) else _gb(used)
