"""Where and how a run starts: the keys, each with its type, default and meaning."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from paceline.spec.option import (
    ANY,
    BIND,
    BUILD,
    FOLDER,
    NAME_OR_PATH,
    NONE,
    OUTPUT,
    PATH,
    PROGRAM,
    PROVABLE,
    QUEUE,
    RUNS,
    Option,
)
from paceline.spec.values import (
    FolderName,
    Gpus,
    Line,
    Mebibytes,
    Nodes,
    PerNode,
    RunName,
    StringOrList,
    Strings,
    Style,
    Table,
    TimeLimit,
    UserPath,
    UserPaths,
    Variables,
    Warm,
)


class Project(Table):
    experiment: Annotated[
        FolderName, Option("--experiment NAME", "Experiment name; runs are grouped by it.")
    ] = "default"
    name: Annotated[
        FolderName | None,
        Option("--project NAME", "Project name (default: the folder's).", BUILD | PROVABLE),
    ] = None
    script: Annotated[
        StringOrList,
        Option(
            "",
            "Default script, or a list of the script and its arguments; relative to the "
            "project folder.",
            NONE,
        ),
    ] = ()
    scratch: Annotated[
        Line | None,
        Option(
            "--scratch DIR",
            "Folder for run folders (default: $PACELINE_SCRATCH, or `runs` in the project).",
            BUILD | PROVABLE,
            path=PATH,
        ),
    ] = None
    on: Annotated[
        Line | None,
        Option(
            "--on CLUSTER",
            "Cluster to use over SSH: a profile with a host (default: $PACELINE_ON); "
            "`here` means this machine.",
            NONE,
        ),
    ] = None
    snapshot: Annotated[
        bool, Option("--snapshot", "Run a copy of the code, taken when you submit (default).")
    ] = True
    snapshot_limit: Annotated[
        Mebibytes,
        Option("--snapshot-limit SIZE", "Maximum size of the code snapshot (default: 200M)."),
    ] = 200
    exclude: Annotated[
        Strings,
        Option(
            "--snapshot-exclude PATTERN",
            "Files to leave out of the code snapshot, besides those git ignores.",
        ),
    ] = ()
    workdir: Annotated[
        Literal["snapshot", "project"],
        Option(
            "--workdir snapshot|project",
            "Where relative paths start: in the run's copy of the project (default), or in "
            "the project itself.",
            RUNS - {"run"},
        ),
    ] = "snapshot"


class Resources(Table):
    """`[job]`: what to request from the scheduler."""

    nodes: Annotated[
        Nodes,
        Option("-N --nodes N", "Number of nodes.", QUEUE),
        Option("-N --nodes N", "Number of nodes to simulate on this machine.", {"run"}),
    ] = 1
    gpus_per_node: Annotated[
        Gpus | None,
        Option(
            "--gpus --gpus-per-node N",
            "GPUs per node (not in total, as sbatch's --gpus); one rank runs on each.",
            QUEUE | {"env"},
        ),
    ] = None
    time: Annotated[
        TimeLimit | None,
        Option(
            "-t --time TIME",
            "Time limit: 90m, 2h30m, or Slurm's own forms: 30 (minutes), 2:30:00, 1-12 "
            "(days-hours).",
            QUEUE | {"env"},
        ),
    ] = None
    partition: Annotated[
        Line | None,
        Option(
            "-p --partition NAME", "Partition, or several separated by commas.", QUEUE | {"env"}
        ),
    ] = None
    account: Annotated[
        Line | None, Option("-A --account NAME", "Account to charge.", QUEUE | {"env"})
    ] = None
    name: Annotated[
        RunName | None,
        Option(
            "-J --name NAME",
            "Name of the run and its job (default: the script's).",
            RUNS - {"sweep"},
        ),
    ] = None
    gpu_type: Annotated[
        Line | None, Option("--gpu-type NAME", "GPU type, as your cluster names it.", QUEUE)
    ] = None
    cpus_per_gpu: Annotated[
        PerNode | None,
        Option(
            "--cpus-per-gpu N",
            "CPU cores per GPU, or per rank without GPUs (default: a fair share).",
            QUEUE,
        ),
        Option("--cpus N", "CPU cores of the build job.", {"env"}),
    ] = None
    mem_per_gpu: Annotated[
        Mebibytes | None,
        Option("--mem-per-gpu SIZE", "Memory per GPU, or per rank without GPUs, e.g. 32G.", QUEUE),
    ] = None
    mem_per_node: Annotated[
        Mebibytes | None,
        Option("--mem-per-node SIZE", "Memory per node, e.g. 256G.", QUEUE),
        Option("--mem SIZE", "Memory of the build job, e.g. 16G.", {"env"}),
    ] = None
    qos: Annotated[Line | None, Option("--qos NAME", "Quality of service.", QUEUE)] = None
    constraint: Annotated[
        Line | None, Option("--constraint FEATURES", "Features that the nodes must have.", QUEUE)
    ] = None
    reservation: Annotated[
        Line | None, Option("--reservation NAME", "Reservation to use.", QUEUE)
    ] = None
    nodelist: Annotated[
        Line | None, Option("--nodelist NODES", "Nodes to use, e.g. node[1-4].", QUEUE)
    ] = None
    exclude: Annotated[
        Line | None, Option("--exclude NODES", "Nodes to avoid, e.g. node[1-4].", QUEUE)
    ] = None
    exclusive: Annotated[bool, Option("--exclusive", "Request exclusive nodes.", QUEUE)] = False
    dependency: Annotated[
        Line | None, Option("--dependency SPEC", "Slurm dependency, e.g. afterok:1234.", QUEUE)
    ] = None
    comment: Annotated[
        Line | None, Option("--comment TEXT", "Comment for Slurm's accounting.", QUEUE)
    ] = None
    mail: Annotated[
        Line | None,
        Option(
            "--mail ADDRESS", "Email address to notify when the run ends or fails.", RUNS - {"run"}
        ),
    ] = None
    extra: Annotated[
        Strings, Option("--sbatch-arg ARG", "Extra sbatch argument, e.g. --switches=1.", QUEUE)
    ] = ()


class Launch(Table):
    nproc: Annotated[
        PerNode | None, Option("--nproc N", "Ranks per node (default: one per GPU).")
    ] = None
    style: Annotated[
        Style,
        Option(
            "--style STYLE",
            "What starts the ranks: fork (default), srun, torchrun, spawn, mpirun, "
            "lightning or accelerate.",
        ),
    ] = "fork"
    preload: Annotated[
        Strings,
        Option(
            "--preload MODULE", "Module to import once per node before ranks are forked.", PROVABLE
        ),
    ] = ()
    gpu_binding: Annotated[
        Literal["all", "one"],
        Option(
            "--gpu-binding all|one",
            "GPUs that each rank sees: all GPUs of its node (default), or only its own.",
            RUNS - {"run"},
        ),
    ] = "all"
    mpirun_over: Annotated[
        Literal["ranks", "torchrun"],
        Option(
            "--mpirun-over ranks|torchrun",
            "What mpirun starts: each rank (default), or one torchrun per node.",
            RUNS - {"run"},
        ),
    ] = "ranks"
    warm: Annotated[
        Warm,
        Option(
            "--warm",
            "Keep a process with torch imported for your next runs; it ends after 10m "
            "without use (warm in [launch]).",
            {"run"},
        ),
    ] = 0
    check: Annotated[
        bool, Option("--check", "Check the job before it is queued and when it starts (default).")
    ] = True
    fitness: Annotated[
        bool,
        Option(
            "--fitness",
            "First measure GPUs, cores and links of all nodes (up to 30 s), and exclude "
            "slow nodes.",
        ),
    ] = False
    debug: Annotated[
        bool, Option("--debug", "Enable debug output of NCCL and torch.distributed.")
    ] = False
    tee: Annotated[
        Literal["0", "all", "none"],
        Option(
            "--tee 0|all|none",
            "Print output of rank 0 (default), all ranks, or none.",
            group=OUTPUT,
        ),
    ] = "0"


class Environment(Table):
    modules: Annotated[
        Strings, Option("--load-module NAME", "Environment module to load.", QUEUE | {"env"})
    ] = ()
    path: Annotated[
        Line | None,
        Option(
            "--venv PATH",
            "Use the venv in this folder.",
            PROVABLE | {"shell"},
            path=PATH,
            implies=("environment.kind", "venv"),
        ),
        Option(
            "--conda ENV",
            "Use this conda environment (name or folder).",
            QUEUE,
            path=NAME_OR_PATH,
            implies=("environment.kind", "conda"),
        ),
    ] = None
    image: Annotated[
        UserPath | None,
        Option(
            "--image IMAGE",
            "Use this container image.",
            QUEUE,
            path=NAME_OR_PATH,
            implies=("environment.kind", "container"),
        ),
    ] = None
    kind: Annotated[
        Literal["current", "venv", "conda", "container"],
        Option(
            "--environment KIND",
            "Kind of environment: current (default: this Python), venv, conda or container.",
            BUILD,
        ),
    ] = "current"
    variables: Annotated[
        Variables, Option("--env K=V", "Environment variable for the ranks.", PROVABLE | {"shell"})
    ] = Field(default_factory=dict)
    secrets: Annotated[
        Strings,
        Option(
            "--secret NAME",
            "Variable to take from your shell; never written to scripts or logs.",
            ANY,
        ),
    ] = ()
    secret_files: Annotated[
        Strings | None,
        Option(
            "--secret-file FILE",
            "File of secrets (default: .env, ~/.config/paceline/secrets.env, ~/.netrc, ...).",
            ANY,
            path=PATH,
        ),
    ] = None
    binds: Annotated[
        UserPaths,
        Option("--bind OUTSIDE:INSIDE", "Folder to mount in the container.", QUEUE, path=BIND),
    ] = ()
    engine: Annotated[
        Literal["apptainer", "singularity", "pyxis"],
        Option(
            "--engine NAME",
            "Container engine: apptainer (default), singularity or pyxis.",
            QUEUE | {"env"},
        ),
    ] = "apptainer"
    engine_options: Annotated[
        Strings,
        Option(
            "--engine-option OPTION",
            "Extra option for the engine's `exec`, or for srun with pyxis.",
            QUEUE,
        ),
    ] = ()
    python: Annotated[
        Line | None,
        Option(
            "--python PATH",
            "Python interpreter, if not the environment's own.",
            PROVABLE | {"shell"},
            path=PROGRAM,
        ),
    ] = None
    module_paths: Annotated[
        Strings,
        Option(
            "--module-path DIR",
            "Extra module folder, as for `module use`.",
            QUEUE | {"env"},
            path=FOLDER,
        ),
    ] = ()
    purge: Annotated[
        bool | None,
        Option(
            "--purge-modules",
            "Unload all modules first (default, if you load any).",
            QUEUE | {"env"},
        ),
    ] = None
    setup: Annotated[
        Strings,
        Option("--setup COMMAND", "Shell command to run in the job before the launch.", QUEUE),
    ] = ()
    proxies: Annotated[
        bool, Option("--proxies", "Pass on http_proxy, https_proxy and no_proxy.", QUEUE)
    ] = False
    requirements: Annotated[
        StringOrList,
        Option(
            "--requirements FILE",
            "Requirements file: requirements.txt, pyproject.toml[extra] or a lock file.",
            QUEUE,
            path=PATH,
        ),
    ] = ()
    constraints: Annotated[
        Line | None,
        Option(
            "--constraints FILE",
            "Version constraints, in a file for pip.",
            QUEUE | {"env"},
            path=PATH,
        ),
    ] = None
    base_python: Annotated[
        Line | None,
        Option(
            "--base-python PATH",
            "Python to build a venv with (default: python3 of the modules, or this one).",
            QUEUE,
            path=NAME_OR_PATH,
        ),
        Option(
            "--python --base-python PATH",
            "Python to build a venv with (default: python3 of the modules, or this one).",
            {"env"},
            path=NAME_OR_PATH,
        ),
    ] = None
    base: Annotated[
        UserPath | None,
        Option(
            "--base-image IMAGE",
            "Image to build the container from, e.g. docker://python:3.12.",
            QUEUE | {"env"},
            path=NAME_OR_PATH,
            implies=("environment.kind", "container"),
        ),
    ] = None
    system_packages: Annotated[
        bool,
        Option(
            "--system-packages", "Let a venv see the packages of its base Python.", QUEUE | {"env"}
        ),
    ] = False
    horovod: Annotated[
        bool, Option("--with-horovod", "Compile Horovod for the venv's torch.", QUEUE | {"env"})
    ] = False
