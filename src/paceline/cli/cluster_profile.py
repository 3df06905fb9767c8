"""The profile of a cluster in paceline.toml: what Slurm reports there, and what `paceline init` writes from it.

With `--on`, the cluster sends facts and the laptop writes the lines. Settings can name commands that run on the
laptop, so no text from a cluster is ever written as one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.contract.files.foreign_records import make, parse_object
from paceline.launch.checks.machine import describe, interfaces
from paceline.slurm.partitions import Partition
from paceline.spec.quantities import parse_seconds, slurm_time

LARGEST = 1_000_000  # of a number of GPUs or cores


@dataclass(frozen=True)
class ClusterFacts:
    version: str  # of Slurm
    requeues: bool  # by default
    partitions: dict[str, str]  # by name, with a description
    partition: str  # the one for jobs
    time: str
    gpus_per_node: int
    cpus_per_gpu: int
    gpu_types: list[str]
    interfaces: list[str]

    @classmethod
    def find(cls, partitions: Sequence[Partition], config: Mapping[str, str]) -> ClusterFacts:
        """Return the facts of this cluster. `config` are the settings of its Slurm."""
        best = _best(partitions)
        return cls(
            version=config.get("SLURM_VERSION", "?"),
            requeues=config.get("JobRequeue") != "0",
            partitions={each.name: describe(each) for each in partitions},
            partition=best.name,
            time=slurm_time(best.max_time) if best.max_time else "1-00:00:00",
            gpus_per_node=max(best.gpu_types.values(), default=0),
            cpus_per_gpu=_share(best),
            gpu_types=[kind for kind in best.gpu_types if kind],
            interfaces=interfaces(),
        )

    @classmethod
    def read(cls, text: bytes) -> ClusterFacts:
        """Read what a cluster has sent. Raises ValueError if it is anything else."""
        found = make(cls, parse_object(text))
        parse_seconds(found.time)
        if not found.partition or not (
            0 <= found.gpus_per_node < LARGEST and 0 < found.cpus_per_gpu < LARGEST
        ):
            raise ValueError("it has an impossible value")
        return found

    def lines(self, name: str, *, parent: str = "profiles") -> list[str]:
        """Return the lines of its profile, without a character that ends a comment or acts on a terminal."""
        table = f"{parent}.{_key(name)}"
        lines = ["", f"# The cluster {name}, Slurm {self.version}. Its partitions:"]
        lines += [f"#   {each}: {text}" for each, text in self.partitions.items()]
        if not self.requeues:
            lines.append(
                "# It does not requeue jobs by default; Paceline requests requeueing, or submits a follow-up job."
            )
        lines += [f"[{table}.job]", f"partition = {toml(self.partition)}"]
        if self.gpus_per_node:
            lines.append(f"gpus_per_node = {self.gpus_per_node}")
            if self.gpu_types:
                lines.append(
                    f"# gpu_type = {toml(self.gpu_types[0])}    # of: {', '.join(self.gpu_types)}"
                )
            lines.append(f"cpus_per_gpu = {self.cpus_per_gpu}")
        lines += [
            f"time = {toml(self.time)}",
            '# account = "my-account"',
            "# nodes = 2",
            "",
            f"# [{table}.environment]",
            "# Paceline finds the network interface of each node. To choose one yourself"
            f" (this machine has: {', '.join(self.interfaces) or 'none'}):",
            '# variables = { NCCL_SOCKET_IFNAME = "ib0", GLOO_SOCKET_IFNAME = "ib0" }',
        ]
        return [_one_line(line) for line in lines]


def toml(value: str) -> str:
    """Return a string in TOML syntax, which is that of JSON but for control characters."""
    return json.dumps(_one_line(value), ensure_ascii=False)


def _one_line(text: str) -> str:
    return "".join(each if each.isprintable() else "\ufffd" for each in text)


def _key(name: str) -> str:
    """Return a name as a key of TOML."""
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else toml(name)


def _best(partitions: Sequence[Partition]) -> Partition:
    """Return the default partition if it has GPUs or none has; otherwise the first that has."""
    default = [each for each in partitions if each.is_default]
    with_gpus = [each for each in partitions if each.gpu_types]
    if default and (default[0].gpu_types or not with_gpus):
        return default[0]
    return (with_gpus or list(partitions))[0]


def _share(partition: Partition) -> int:
    shares = [kind.cpus // kind.gpu_count for kind in partition.kinds if kind.gpu_count]
    return max(1, min(shares, default=1))
