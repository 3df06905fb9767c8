"""`paceline init`: write a commented paceline.toml for your cluster."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline.contract.files import write_output
from paceline.errors import ClusterError, UsageError
from paceline.launch.checks import SCRATCH_VARIABLES, describe
from paceline.slurm import commands as slurm
from paceline.slurm.partitions import Partition, find_partitions
from paceline.spec.load import profile_name
from paceline.spec.quantities import slurm_time
from paceline.spec.settings import FILE, read_file
from paceline.spec.shell_text import cluster

PROJECT = """\
# Paceline's settings for this project. All keys are optional; flags override them.

[project]
name = {name}
{scratch}    # for run folders: a disk that all nodes see

[environment]
{environment}
{modules}
# variables = {{ NCCL_DEBUG = "INFO" }}
# secrets = ["WANDB_API_KEY"]    # taken from your shell; never written to scripts or logs

[launch]
# style = "fork"          # or srun, torchrun, spawn, mpirun, lightning, accelerate
# preload = ["numpy"]     # imported once per node, before the ranks are forked

[resume]
# requeue = true          # requeue at the time limit, and resume ("always": the script resumes by itself)
# requeues_per_day = 50   # end the run after this many requeues within a day
# grace = "2m"            # save and stop this long before the time limit
# max_attempts = 3        # failed attempts before giving up
# exit_timeout = "30s"    # once a rank has exited, end the others after this long without progress
# hang_timeout = "30m"    # treat ranks as hung after this long without a step

[notify]
# webhook = "SLACK_WEBHOOK"  # notify a chat when a run ends or stalls; set SLACK_WEBHOOK=https://... in .env

[params]
# lr = 0.1                # run.params.lr in the script; --param lr=0.2 overrides it
"""
CURRENT = """\
# kind = "venv"          # or current, conda, container
# requirements = "requirements.txt"    # built by `paceline env build`; or path = "/home/me/venv\""""
NO_SLURM = """
# There is no Slurm here. To work on a cluster over SSH, write its login node below; `paceline init --on alps`
# then adds its partitions. So does `paceline init` on a login node.
# [profiles.alps]
# host = "login.example.org"
"""
PROFILE = """
# The cluster {name}. Its partitions:
{partitions}
[{table}.job]
partition = {partition}
{gpus}time = {time}
# account = "my-account"
# nodes = 2

# [{table}.environment]
# Paceline finds the network interface of each node. To choose one yourself:
# variables = {{ NCCL_SOCKET_IFNAME = "ib0", GLOO_SOCKET_IFNAME = "ib0" }}
"""


def command(
    *,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    show: Annotated[bool, typer.Option("--print", help="Print it and write nothing.")] = False,
) -> int:
    """Write a commented paceline.toml in this folder, with a profile for your cluster.

    If there is one without a profile for this cluster, add the profile to it. With --on, print the profile of that
    cluster, for the paceline.toml here.
    """
    partitions = find_partitions() if slurm.available() else []
    there = cluster()
    if there and not partitions:
        raise ClusterError("Slurm lists no partitions.", hint="Check with `sinfo` there.")
    name = there or (profile_name(slurm.cluster_name() or "") if partitions else "")
    profile = describe_cluster(partitions, name or "cluster") if partitions else NO_SLURM
    file = Path.cwd() / FILE
    if there:
        print(profile, end="")
    elif show:
        print(project_file(os.environ) + profile, end="")
    elif not file.exists() or force:
        write_output(file, project_file(os.environ) + profile)
        print(f"wrote {file}")
    elif partitions and name not in read_file(file).get("profiles", {}):
        write_output(file, f"{file.read_text(encoding='utf-8').rstrip()}\n{profile}")
        print(f"added [profiles.{name}] to {file}")
    else:
        raise UsageError(
            f"This folder already has a {FILE}.",
            hint="Print one with --print, or use --force. --on CLUSTER prints the profile of a cluster over SSH.",
        )
    return 0


def project_file(environ: Mapping[str, str]) -> str:
    """Return the text of the file, without a profile."""
    scratch = next((name for name in SCRATCH_VARIABLES if environ.get(name)), "")
    loaded = [name for name in environ.get("LOADEDMODULES", "").split(":") if name]
    environment = CURRENT
    for kind, variable in (("conda", "CONDA_PREFIX"), ("venv", "VIRTUAL_ENV")):
        if environ.get(variable):
            environment = f'kind = "{kind}"\npath = {toml(environ[variable])}'
    return PROJECT.format(
        name=toml(re.sub(r"[^A-Za-z0-9_ .+@=,-]", "-", Path.cwd().name) or "project"),
        scratch=f'scratch = "${scratch}/paceline"' if scratch else '# scratch = "/shared/me/runs"',
        environment=environment,
        modules=f"modules = {json.dumps(loaded)}" if loaded else '# modules = ["cuda/12.4"]',
    )


def describe_cluster(partitions: Sequence[Partition], name: str) -> str:
    """Return the profile of a cluster. Jobs go to a partition with GPUs, the default if it has some."""
    best = max(partitions, key=lambda each: (bool(each.gpu_types), each.is_default))
    types = [kind for kind in best.gpu_types if kind]
    gpus = ""
    if best.gpu_types:
        shares = [kind.cpus // kind.gpu_count for kind in best.kinds if kind.gpu_count]
        gpus = f"gpus_per_node = {max(best.gpu_types.values())}\n"
        gpus += f"# gpu_type = {toml(types[0])}    # of: {', '.join(types)}\n" if types else ""
        gpus += f"cpus_per_gpu = {max(1, min(shares, default=1))}\n"
    key = name if re.fullmatch(r"[\w-]+", name, re.ASCII) else toml(name)
    return PROFILE.format(
        name=name,
        partitions="\n".join(f"#   {each.name}: {describe(each)}" for each in partitions),
        table=f"profiles.{key}",
        partition=toml(best.name),
        gpus=gpus,
        time=toml(slurm_time(best.max_time) if best.max_time else "1-00:00:00"),
    )


def toml(value: str) -> str:
    """Return a string in TOML syntax, which is that of JSON but for control characters."""
    return json.dumps(
        "".join(each if each.isprintable() else "\ufffd" for each in value), ensure_ascii=False
    )
