"""`paceline init`: write a commented paceline.toml for your cluster."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import console
from paceline.contract.foreign_records import make, parse_object
from paceline.contract.run_folder import write_atomically
from paceline.errors import ClusterError, NoSlurm, UsageError
from paceline.launch.checks.machine import SCRATCH_VARIABLES, describe, interfaces, settings
from paceline.slurm import commands as slurm
from paceline.slurm.partitions import Partition, find_partitions, query_partitions
from paceline.spec.load import FILE, profile_name, read_file
from paceline.spec.quantities import parse_seconds, slurm_time
from paceline.spec.shell_text import cluster as shown_cluster
from paceline.spec.shell_text import quote

if TYPE_CHECKING:
    from paceline.cli.on_cluster import Forwarded

MAX_FACTS = 1 << 20  # bytes that a cluster may send about itself
LARGEST = 1_000_000  # of a number of GPUs or cores
NO_SLURM = (
    "",
    "# There is no Slurm here. To work on a cluster over SSH, write its login node below; `paceline init --on alps`",
    "# then adds its partitions. So does `paceline init` on a login node.",
    "# [profiles.alps]",
    '# host = "login.example.org"',
)


def command(
    *,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    show: Annotated[bool, typer.Option("--print", help="Print it and write nothing.")] = False,
) -> int:
    """Write a commented paceline.toml in this folder, with a profile for your cluster.

    If there is one without a profile for this cluster, add the profile to it. With --on, ask that cluster for its
    partitions and add its profile to the paceline.toml here.
    """
    if shown_cluster():
        print(json.dumps(asdict(_facts_for_laptop())))
        return 0
    partitions = find_partitions() if slurm.available() else []
    config = settings() if partitions else {}
    name = profile_name(config.get("ClusterName", "")) or "cluster"
    profile = ClusterFacts.find(partitions, config).lines(name) if partitions else NO_SLURM
    text = project_file(Path.cwd().name, profile, os.environ)
    if show:
        print(text, end="")
        return 0
    file = Path.cwd() / FILE
    if not file.exists() or force:
        _write(file, text)
        print(f"wrote {file}")
    elif partitions and name not in read_file(file).get("profiles", {}):
        _append(file, profile)
        print(f"added [profiles.{name}] to {file}")
    else:
        raise UsageError(
            f"This folder already has a {FILE}.",
            hint="Print one with --print, or use --force. For a cluster over SSH, add its profile with --on CLUSTER.",
        )
    if partitions:
        print(f"  `paceline submit train.py` uses [profiles.{name}] on this cluster")
    return 0


def _facts_for_laptop() -> ClusterFacts:
    if not slurm.available():
        raise NoSlurm("sinfo was not found.", hint="Run this on a login node of your cluster.")
    if not (partitions := query_partitions()):
        raise ClusterError(
            "Slurm lists no partitions.", hint="Check with `sinfo` on the login node."
        )
    return ClusterFacts.find(partitions, settings())


def forwarded(asked: Forwarded) -> int:
    """Add the profile of the cluster that `--on` names to the file here."""
    from paceline.cli import on_cluster

    project, name = on_cluster.find_project(asked), asked.names[0]
    file = project.file or Path.cwd() / FILE
    if asked.values.get("force"):
        raise UsageError(
            "--force cannot be combined with --on.",
            hint="Remove the old lines from the file, or use --print.",
        )
    if not asked.values.get("show") and "job" in project.values.get("profiles", {}).get(name, {}):
        raise UsageError(
            f"{file} already has [profiles.{name}.job].", hint="Print the new lines with --print."
        )
    parent = "tool.paceline.profiles" if file.name == "pyproject.toml" else "profiles"
    line = on_cluster.Forwarded(asked.names, asked.key, ["init"], asked.values)
    connection, answer = on_cluster.call(line)
    if answer.code != 0:
        console.say(answer.errors.rstrip())
        return answer.code
    try:
        lines = ClusterFacts.read(answer.output[:MAX_FACTS]).lines(name, parent=parent)
    except ValueError:
        raise connection.unclear() from None
    if asked.values.get("show"):
        print("\n".join(lines).strip())
        return 0
    if project.file is None:
        _write(file, project_file(Path.cwd().name, lines, os.environ))
    else:
        _append(file, lines)
    print(
        f"added [{parent}.{name}.job] to {file}\n  `paceline submit --on {quote(name)} train.py` uses it"
    )
    return 0


def _append(file: Path, lines: Sequence[str]) -> None:
    """Add lines to a file, with the line endings that it has."""
    before = file.read_bytes().decode("utf-8")
    end = "\r\n" if "\r\n" in before else "\n"
    _write(file, end.join([before.rstrip(), *lines, ""]))


def _write(file: Path, text: str) -> None:
    """Write the file, all of it or nothing. A link stays, and an existing file keeps its permissions."""
    target = file.resolve()
    write_atomically(
        target, text, mode=stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o644
    )


def project_file(name: str, profile: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the text of the file."""
    folder_name = re.sub(r"[^A-Za-z0-9_ .+@=,-]", "-", name) or "project"
    lines = [
        "# Paceline's settings for this project. All keys are optional; flags override them.",
        "",
        "[project]",
        f"name = {toml(folder_name)}",
        *_scratch(environ),
        "",
        "[environment]",
        *_environment(environ),
        "",
        "[launch]",
        '# style = "fork"          # or srun, torchrun, spawn, mpirun, lightning, accelerate',
        '# preload = ["numpy"]     # imported once per node, before the ranks are forked',
        "",
        "[resume]",
        '# requeue = true          # requeue at the time limit, and resume ("always": the script resumes by itself)',
        "# requeues_per_day = 50   # end the run after this many requeues within a day",
        '# grace = "2m"            # save and stop this long before the time limit',
        "# max_attempts = 3        # failed attempts before giving up",
        '# exit_timeout = "30s"    # once a rank has exited, end the others after this long without progress',
        '# hang_timeout = "30m"    # treat ranks as hung after this long without a step',
        "",
        "[notify]",
        '# webhook = "SLACK_WEBHOOK"  # notify a chat when a run ends or stalls; set SLACK_WEBHOOK=https://... in .env',
        "",
        "[params]",
        "# lr = 0.1                # run.params.lr in the script; --param lr=0.2 overrides it",
    ]
    return "\n".join([*lines, *profile]) + "\n"


def _scratch(environ: Mapping[str, str]) -> list[str]:
    for name in SCRATCH_VARIABLES:
        if environ.get(name):
            return [f'scratch = "${name}/paceline"    # for run folders: a disk that all nodes see']
    return ['# scratch = "/shared/me/paceline"    # for run folders: a disk that all nodes see']


def _environment(environ: Mapping[str, str]) -> list[str]:
    loaded = [name for name in environ.get("LOADEDMODULES", "").split(":") if name]
    if environ.get("VIRTUAL_ENV"):
        lines = ['kind = "venv"', f"path = {toml(environ['VIRTUAL_ENV'])}"]
    elif environ.get("CONDA_PREFIX"):
        lines = ['kind = "conda"', f"path = {toml(environ['CONDA_PREFIX'])}"]
    else:
        lines = [
            '# kind = "venv"          # or current, conda, container',
            '# requirements = "requirements.txt"    # built by `paceline env build`; or path = "/home/me/venv"',
        ]
    modules = f"modules = {json.dumps(loaded)}" if loaded else '# modules = ["cuda/12.4"]'
    return [
        *lines,
        modules,
        '# variables = { NCCL_DEBUG = "INFO" }',
        '# secrets = ["WANDB_API_KEY"]    # taken from your shell; never written to scripts or logs',
    ]


# -- the profile of a cluster ---------------------------------------------------------------------
#
# With `--on`, the cluster sends facts and the laptop writes the lines. Settings can name commands that
# run on the laptop, so no text from a cluster is ever written as one.


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
