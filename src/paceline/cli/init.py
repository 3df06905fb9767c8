"""`paceline init`: a commented paceline.toml, from what the cluster answers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline.cluster.checks.machine import SCRATCH_VARIABLES, describe, interfaces, settings
from paceline.cluster.slurm import commands as slurm
from paceline.cluster.slurm.partitions import Partition, find_partitions
from paceline.contract.run_folder import write_atomically
from paceline.errors import UsageError
from paceline.spec.load import FILE
from paceline.spec.quantities import slurm_time


def command(
    *,
    force: Annotated[bool, typer.Option("--force", help="Replace the file that is there.")] = False,
    show: Annotated[bool, typer.Option("--print", help="Print it, and write nothing.")] = False,
) -> int:
    """Write a commented paceline.toml here, with a profile for the cluster that answers."""
    partitions = find_partitions() if slurm.available() else []
    text = project_file(Path.cwd().name, partitions, settings() if partitions else {}, os.environ)
    if show:
        print(text, end="")
        return 0
    file = Path.cwd() / FILE
    if file.exists() and not force:
        raise UsageError(f"there is a {FILE} here already", hint="look at a new one with --print, or --force")
    write_atomically(file, text)
    print(f"wrote {file}")
    if partitions:
        name = profile_name(settings())
        print(f"  use its cluster profile: paceline submit --cluster-profile {name} train.py")
    return 0


def profile_name(told: Mapping[str, str]) -> str:
    name = re.sub(r"[^A-Za-z0-9_-]", "-", told.get("ClusterName", ""))
    return name or "cluster"


def project_file(
    name: str, partitions: Sequence[Partition], told: Mapping[str, str], environ: Mapping[str, str]
) -> str:
    """The file's text."""
    folder_name = re.sub(r"[^A-Za-z0-9_ .+@=,-]", "-", name) or "project"
    lines = [
        "# Paceline's settings for this project. Flags win over them; every key may be left out.",
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
        "# requeue = true          # go back into the queue when the time is up",
        '# grace = "2m"            # how long before the limit the ranks save and stop',
        "# max_attempts = 3        # failures before the run is given up",
        '# hang_timeout = "30m"    # silence after which ranks count as hung',
        "",
        "[params]",
        "# lr = 0.1                # run.params.lr in the script; --param lr=0.2 wins",
    ]
    return "\n".join([*lines, *_profile(partitions, told)]) + "\n"


def toml(value: str) -> str:
    """A text as TOML writes it: JSON's strings are TOML's too."""
    return json.dumps(value, ensure_ascii=False)


def _scratch(environ: Mapping[str, str]) -> list[str]:
    for name in SCRATCH_VARIABLES:
        if environ.get(name):
            return [f'scratch = "${name}/paceline"    # where run folders go: a disk that all nodes see']
    return ['# scratch = "/shared/me/paceline"    # where run folders go: a disk that all nodes see']


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
        '# secrets = ["WANDB_API_KEY"]    # taken from your shell; they stand in no script and no log',
    ]


def _profile(partitions: Sequence[Partition], told: Mapping[str, str]) -> list[str]:
    if not partitions:
        return [
            "",
            "# There is no Slurm here: type `paceline init` on a login node for a profile of its cluster.",
        ]
    name = profile_name(told)
    lines = ["", f"# The cluster {name}, Slurm {told.get('SLURM_VERSION', '?')}. Its partitions:"]
    lines += [f"#   {each.name}: {describe(each)}" for each in partitions]
    if told.get("JobRequeue") == "0":
        lines.append(
            "# Its jobs are not requeued by default; Paceline asks for it, or submits a continuation."
        )
    best = _best(partitions)
    lines += [f"[profiles.{name}.job]", f"partition = {toml(best.name)}"]
    gpus = max(best.gpu_types.values(), default=0)
    if gpus:
        lines.append(f"gpus_per_node = {gpus}")
        kinds = [kind for kind in best.gpu_types if kind]
        if kinds:
            lines.append(f"# gpu_type = {toml(kinds[0])}    # of: {', '.join(kinds)}")
        lines.append(f"cpus_per_gpu = {_share(best)}")
    limit = slurm_time(best.max_time) if best.max_time else "1-00:00:00"
    lines += [f"time = {toml(limit)}", '# account = "my-account"', "# nodes = 2"]
    lines += [
        "",
        f"# [profiles.{name}.environment]",
        "# The network interface is found on each node. To choose one yourself"
        f" (this machine has: {', '.join(interfaces()) or 'none'}):",
        '# variables = { NCCL_SOCKET_IFNAME = "ib0", GLOO_SOCKET_IFNAME = "ib0" }',
    ]
    return lines


def _best(partitions: Sequence[Partition]) -> Partition:
    """The default partition if it has GPUs or none has; else the first that has."""
    default = [each for each in partitions if each.is_default]
    with_gpus = [each for each in partitions if each.gpu_types]
    if default and (default[0].gpu_types or not with_gpus):
        return default[0]
    return (with_gpus or list(partitions))[0]


def _share(partition: Partition) -> int:
    shares = [kind.cpus // kind.gpu_count for kind in partition.kinds if kind.gpu_count]
    return max(1, min(shares, default=1))
