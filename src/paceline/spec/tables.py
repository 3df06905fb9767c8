"""The tables of `paceline.toml`, as frozen data. One line under each key says what it means."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from paceline.spec.quantities import parse_mebibytes, parse_seconds

Style = Literal["fork", "srun", "torchrun", "spawn", "mpirun", "lightning", "accelerate"]


def _words(value: object) -> object:
    """A TOML array becomes a tuple, so that the table stays frozen."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(word, str) for word in value):
        raise ValueError('a list of texts such as ["one", "two"]')
    return tuple(value)


def _one_or_more(value: object) -> object:
    """A text alone stands for a list of one."""
    return _words([value] if isinstance(value, str) else value)


def _variables(value: object) -> object:
    if not isinstance(value, dict):
        raise ValueError('a table such as { NAME = "value" }')
    for name, text in value.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
            raise ValueError(f"names of environment variables, and {name!r} is none")
        if isinstance(text, bool) or not isinstance(text, (str, int, float)):
            raise ValueError(f"a text or a number for {name}")
        if "\0" in str(text):
            raise ValueError(f"a text without NUL characters for {name}")
    return {name: str(text) for name, text in value.items()}


def _folder_name(value: str) -> str:
    if not re.fullmatch(r"[\w][\w .+@=,-]*", value):
        raise ValueError("a name that can be a folder's: letters, digits, and any of . _ - + = @")
    return value


def _window(value: str) -> str:
    match = re.fullmatch(r"(\d+):(\d+)", value)
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError('steps as "first:end", such as "10:13"')
    return value


def _from_home(value: str) -> str:
    """`~/` as a shell would have it: where these values go, no shell looks at them."""
    return os.path.expanduser(value) if value.startswith("~/") else value


def _one_line(value: str) -> str:
    if not value or "\n" in value or "\0" in value:
        raise ValueError("a text of one line")
    return value


Seconds = Annotated[int, BeforeValidator(parse_seconds)]
Mebibytes = Annotated[int, BeforeValidator(parse_mebibytes)]
Words = Annotated[tuple[str, ...], BeforeValidator(_words)]
Names = Annotated[tuple[str, ...], BeforeValidator(_one_or_more)]
Variables = Annotated[dict[str, str], BeforeValidator(_variables)]
FolderName = Annotated[str, AfterValidator(_folder_name)]
Line = Annotated[str, AfterValidator(_one_line)]
Place = Annotated[Line, AfterValidator(_from_home)]
Places = Annotated[Words, AfterValidator(lambda words: tuple(map(_from_home, words)))]
Count = Annotated[int, Field(ge=1)]


class Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Project(Table):
    name: FolderName | None = None
    """The project's name; else the name of its folder."""
    scratch: Line | None = None
    """Where run folders go; `$PACELINE_SCRATCH` wins over it; else `runs` beside the file."""
    experiment: FolderName = "default"
    """The folder that groups runs."""
    snapshot: bool = True
    """Copy the code at submission, so that a queued job runs what was there then."""
    snapshot_limit: Mebibytes = 200
    """The most that a copy of the code may hold."""
    exclude: Words = ()
    """Patterns of files that no copy holds, besides those that git ignores."""


class Resources(Table):
    """`[job]`: what to ask the scheduler for."""

    nodes: Count = 1
    """How many nodes."""
    gpus_per_node: Annotated[int, Field(ge=0)] | None = None
    """GPUs on each node; one rank runs per GPU."""
    gpu_type: Line | None = None
    """The scheduler's name of the GPU model."""
    cpus_per_gpu: Count | None = None
    """CPU cores for each GPU (for each rank where there are no GPUs)."""
    mem_per_gpu: Mebibytes | None = None
    """Memory for each GPU (for each rank where there are no GPUs)."""
    mem_per_node: Mebibytes | None = None
    """Memory of each node."""
    time: Seconds | None = None
    """The time limit."""
    partition: Line | None = None
    """The partition, or several with commas."""
    account: Line | None = None
    """The account that pays."""
    qos: Line | None = None
    """The quality of service."""
    constraint: Line | None = None
    """Features that the nodes must have."""
    reservation: Line | None = None
    """The reservation to run in."""
    nodelist: Line | None = None
    """Nodes that must be used, in the scheduler's notation."""
    exclude: Line | None = None
    """Nodes that must not be used."""
    dependency: Line | None = None
    """A dependency in the scheduler's notation."""
    exclusive: bool = False
    """Share the nodes with nobody."""
    name: Line | None = None
    """The job's name; else the script's."""
    comment: Line | None = None
    """A comment for the accounting."""
    mail: Line | None = None
    """The address that is told when the job ends or fails."""
    extra: Words = ()
    """Further arguments of sbatch, as they are."""


class Environment(Table):
    kind: Literal["current", "venv", "conda", "container"] = "current"
    """Where the ranks' Python lives: the one that runs now, a venv, a conda environment or a container."""
    path: Line | None = None
    """The venv's folder, or the conda environment's name or folder."""
    python: Line | None = None
    """The interpreter, where it is not the environment's own."""
    modules: Words = ()
    """Environment modules to load."""
    module_paths: Words = ()
    """Further folders of module files, as for `module use`."""
    purge: bool | None = None
    """Unload all modules first; else only where modules are asked for."""
    setup: Words = ()
    """Lines of shell that the job runs before the launch."""
    variables: Variables = {}
    """Environment variables for the ranks."""
    proxies: bool = False
    """Take http_proxy, https_proxy, no_proxy and the like along from the submitter's environment."""
    requirements: Names = ()
    """What `paceline env build` installs: requirements.txt, pyproject.toml, Pipfile or Pipfile.lock."""
    constraints: Line | None = None
    """Versions that the installation is held to; else constraints.txt beside the requirements."""
    base_python: Line | None = None
    """The Python that a venv is built with; else python3 of the modules, or the one that runs now."""
    system_packages: bool = False
    """A venv that is built sees the packages of that Python too."""
    horovod: bool = False
    """A venv that is built has Horovod, compiled for its torch."""
    base: Place | None = None
    """The image that `paceline env build` makes the container's image from, such as docker://python:3.12."""
    secrets: Words = ()
    """Variables that are taken from the submitter's environment, and stand in no script and no log."""
    secret_files: Words | None = None
    """Files of secrets; else .env, ~/.config/paceline/secrets.env, ~/wandb_credentials.txt and ~/.netrc."""
    engine: Literal["apptainer", "singularity", "pyxis"] = "apptainer"
    """What runs the container; of apptainer and singularity, the one that is there."""
    engine_options: Words = ()
    """Further options of the engine's `exec` (with pyxis: of srun), as they are."""
    image: Place | None = None
    """The container's image."""
    binds: Places = ()
    """Folders that the container sees, as "outside:inside", or one path for both."""


class Launch(Table):
    style: Style = "fork"
    """What starts the ranks."""
    preload: Words = ()
    """Modules that the fork style imports once, before it forks the ranks."""
    nproc: Count | None = None
    """Ranks per node; else one per GPU."""
    mpirun_over: Literal["ranks", "torchrun"] = "ranks"
    """What mpirun starts: each rank, or one torchrun per node."""
    gpu_binding: Literal["all", "one"] = "all"
    """Which GPUs of its node a rank sees: all of them, or its own."""
    tee: Literal["0", "all", "none"] = "0"
    """Whose lines reach the console."""
    debug: bool = False
    """Turn on the debugging output of NCCL and torch.distributed."""
    check: bool = True
    """Look for problems before queueing and at the start of the job."""


class Runtime(Table):
    """`[runtime]`: what `paceline.session` goes by where the script says nothing."""

    backend: Line | None = None
    """The process group's backend; else the device's own."""
    cpu: bool = False
    """Leave GPUs alone."""
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    """What autocast computes in."""
    seed: int | None = None
    """The seed of everything."""
    deterministic: bool = False
    """Deterministic algorithms only."""
    profile: Annotated[str, AfterValidator(_window)] | None = None
    """Steps to profile, "first:end"."""
    max_steps: Count | None = None
    """End the training after so many steps."""
    timeout: Seconds | None = None
    """How long a collective may take."""
    on_nonfinite: Literal["stop", "skip", "ignore"] | None = None
    """What a loss that is not a number does."""
    start_from: Line | None = None
    """Another run's folder, or a checkpoint, to begin with."""
    system_metrics: Seconds = 15
    """How often each node's CPU, memory, GPUs and network are looked at; 0 means never."""


class Checkpoint(Table):
    every_steps: Count | None = None
    """Save after so many steps."""
    every_seconds: Seconds | None = None
    """Save when so much time has passed."""
    keep_last: Count | None = None
    """Keep the newest so many."""
    keep_every: Count | None = None
    """Keep those whose step is a multiple of this, for ever."""


class Resume(Table):
    requeue: bool = True
    """Go back into the queue when the time is up or the job was preempted."""
    grace: Seconds | None = None
    """How long before the time limit the ranks are asked to save and stop; else 2m, or a third of the time."""
    max_attempts: Count | None = None
    """Attempts that may fail before the run is given up; else 1 here and 3 on a cluster."""
    hang_timeout: Seconds | None = None
    """Silence of the ranks after which they count as hung; 0 means never."""


class Data(Table):
    stage: Words = ()
    """Files and folders that each node copies to its own disk first: below <scratch>/<project>, or in full."""
    collect: Words = ()
    """What comes back from the nodes when the run ends, however it does: patterns below `$PACELINE_DATA`."""
    keep: Seconds | None = None
    """Leave staged data on the node for so long after its last use, for the next job."""
    verify: Literal["size", "checksum"] = "size"
    """How copies are checked: by size, or by reading them again too."""
    folder: Line | None = None
    """Where on the node; else `$SLURM_TMPDIR`, `$TMPDIR` or /tmp."""


class Tracking(Table):
    """`[tracking]`: where the numbers of `run.log` go besides metrics.jsonl."""

    wandb: bool | None = None
    """Log to W&B; false keeps `paceline.wandb` silent too. Unset: when wandb_project is given."""
    wandb_project: Line | None = None
    """The W&B project; else the project's name."""
    wandb_group: Line | None = None
    """The W&B group; else the experiment's name."""
    wandb_entity: Line | None = None
    """The W&B user or team; else the key's own."""
    wandb_mode: Literal["online", "offline", "disabled"] | None = None
    """Send as it happens, or keep for `paceline sync`; else online where there are a key and a network."""
    wandb_sweep: Line | None = None
    """The W&B sweep of `paceline sweep`, ENTITY/PROJECT/ID; wins over --wandb-sweep."""
    wandb_all_processes: bool = False
    """Each rank logs its own numbers in a W&B run of its own, all in one group."""
    tensorboard: bool = False
    """Write TensorBoard's files, below the run folder."""
    trackers: Words = ()
    """Trackers of your own, as "package.module:Class"."""


class Tables(Table):
    """A whole file, or one layer of it: every key may be absent."""

    project: Project = Project()
    job: Resources = Resources()
    environment: Environment = Environment()
    launch: Launch = Launch()
    runtime: Runtime = Runtime()
    checkpoint: Checkpoint = Checkpoint()
    resume: Resume = Resume()
    data: Data = Data()
    tracking: Tracking = Tracking()
    params: dict[str, Any] = {}
    """The training script's own hyper-parameters, free in form."""
