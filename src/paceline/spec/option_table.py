"""The table of options: each key of `paceline.toml`, its flag, its help, and the commands that take
it.

This is the only place where a setting is described; `types_and_defaults.py` has the rest. It
imports nothing heavy, so that `--help` is fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from keyword import iskeyword
from typing import Any

# Groups, in the order in which `--help` shows them.
SWEEP, RESOURCES, LAUNCH, ENVIRONMENT = "Sweep", "Resources", "Launch", "Environment"
TRAINING, UNTIL_DONE, DATA, TRACKERS = "Training", "Restarts and checkpoints", "Data", "Trackers"
NOTIFICATIONS = "Notifications"
PROJECT, OUTPUT = "Project", "Output"

# Commands that take a group of options.
QUEUE = frozenset({"submit", "sweep", "doctor", "shell"})
RUNS = frozenset({"run", "submit", "sweep", "doctor"})
BATCH = QUEUE - {"shell"}  # what an interactive job cannot do: requeue itself, send mail
ANY = RUNS | QUEUE
PROVABLE = RUNS | {"prove"}  # what also applies to all runs of a proof
BUILD = ANY | {"env"}

TEXT, NUMBER, SWITCH, LIST, VARIABLES = "text", "number", "switch", "list", "variables"
# typed relative to the current folder; the latter if that exists
PATH, NAME_OR_PATH = "path", "name or path"
# The same, but made absolute, as jobs start in their run folder: a program (a bare name stays), the
# outside of a bind, a folder.
PROGRAM, BIND, FOLDER = "program", "bind", "folder"


@dataclass(frozen=True)
class Option:
    """One setting. `usage` is its flags and the metavar: "-N --nodes N"."""

    key: str
    usage: str
    help: str
    kind: str = TEXT
    commands: frozenset[str] = RUNS
    path: str = ""
    implies: tuple[str, object] | None = None  # another key, and what setting this one makes it
    plus: int = 0  # what is added to a number that is typed: N restarts are N + 1 attempts
    # what a switch makes its key; only one that makes it true can be turned off
    sets: object = True
    # command -> a flag that only this command has
    alias: Mapping[str, str] = field(default_factory=dict)
    # command -> what it says instead of `help`
    help_of: Mapping[str, str] = field(default_factory=dict)

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(part for part in self.usage.split() if part.startswith("-"))

    @property
    def name(self) -> str:
        """The flag that messages name; empty if only the file has this key."""
        return next((flag for flag in self.flags if flag.startswith("--")), "")

    @property
    def negative(self) -> str:
        """The flag that turns a switch off."""
        return f"--no-{self.name.removeprefix('--').removeprefix('with-')}"

    @property
    def all_flags(self) -> tuple[str, ...]:
        return (
            (*self.flags, self.negative)
            if self.kind == SWITCH and self.sets is True
            else self.flags
        )

    @property
    def parameter(self) -> str:
        name = self.name.removeprefix("--").replace("-", "_")
        return f"{name}_" if iskeyword(name) else name

    @property
    def metavar(self) -> str | None:
        return next((part for part in self.usage.split() if not part.startswith("-")), None)


def _number(key: str, usage: str, text: str, **more: Any) -> Option:
    return Option(key, usage, text, NUMBER, **more)


def _switch(key: str, usage: str, text: str, **more: Any) -> Option:
    return Option(key, usage, text, SWITCH, **more)


def _list(key: str, usage: str, text: str, **more: Any) -> Option:
    return Option(key, usage, f"{text}; repeatable.", LIST, **more)


def _file_only(key: str, text: str) -> Option:
    return Option(key, "", text, commands=frozenset())


def _queue(key: str, usage: str, text: str, kind: str = TEXT) -> Option:
    return Option(key, usage, text, kind, QUEUE)


_SWEEP_ONLY: Mapping[str, Any] = {"commands": frozenset({"sweep"})}
_PROVABLE: Mapping[str, Any] = {"commands": PROVABLE}
_BUILD_ONLY: Mapping[str, Any] = {"commands": frozenset({"env"})}
_ANY: Mapping[str, Any] = {"commands": ANY}
_BUILD: Mapping[str, Any] = {"commands": BUILD}
_JOB: Mapping[str, Any] = {"commands": QUEUE}  # `paceline run` has no modules, containers or setup
_JOB_OR_BUILD: Mapping[str, Any] = {"commands": QUEUE | {"env"}}
_WANDB: Mapping[str, Any] = {"implies": ("tracking.wandb", True)}
_CONTAINER: Mapping[str, Any] = {"implies": ("environment.kind", "container"), "path": NAME_OR_PATH}

TABLE: Mapping[str, tuple[Option, ...]] = {
    SWEEP: (
        _number(
            "sweep.count", "--count N", "Number of points; for a grid, the maximum.", **_SWEEP_ONLY
        ),
        _number(
            "sweep.parallel",
            "--parallel K",
            "Trials that run at the same time (default: as many as resources allow; 4 for tpe).",
            **_SWEEP_ONLY,
        ),
        _number(
            "sweep.seeds", "--seeds S", "Runs per point, each with its own seed.", **_SWEEP_ONLY
        ),
        _number(
            "sweep.pack", "--pack N", "Trials per job, side by side on one node.", **_SWEEP_ONLY
        ),
        Option(
            "sweep.metric",
            "--metric NAME",
            "Metric that ranks the trials, as named in `run.log` or `run.report`.",
            **_SWEEP_ONLY,
        ),
        Option(
            "sweep.script",
            "--script FILE",
            "Script to run, relative to the sweep's file. A list (.txt) of arguments alone takes "
            "it as a flag.",
            **_SWEEP_ONLY,
        ),
        Option(
            "sweep.name",
            "-J --name NAME",
            "Name of the sweep and its folder (default: the file's).",
            **_SWEEP_ONLY,
        ),
        Option(
            "tracking.wandb_sweep",
            "--wandb-sweep ENTITY/PROJECT/ID",
            "W&B sweep (ENTITY/PROJECT/ID) that chooses the points: `parallel` agents run `count` "
            "each. A file"
            " overrides the flag.",
            **_SWEEP_ONLY,
        ),
        _file_only("sweep.module", "Module to run instead of a script, as in python -m."),
        _file_only(
            "sweep.args",
            "Arguments for the script; {key} is replaced with the point's value, {seed} with the "
            "seed.",
        ),
        _file_only(
            "sweep.arguments",
            "Whether to pass keys that args doesn't name as --key value. `run.params` always has "
            "them.",
        ),
        _file_only(
            "sweep.sampler",
            "How to choose points: all combinations, random, or based on earlier trials (TPE).",
        ),
        _file_only("sweep.direction", "Whether smaller or larger values of the metric are better."),
        _file_only("sweep.seed", "The sampler's seed."),
        _file_only(
            "sweep.prune",
            "How to prune trials early, based on their reports: successive halving, or the median "
            "rule.",
        ),
        _file_only("sweep.prune_after", "Number of reports before a trial can be pruned."),
    ),
    RESOURCES: (
        _number(
            "job.nodes",
            "-N --nodes N",
            "Number of nodes.",
            help_of={"run": "Number of nodes to simulate on this machine."},
            **_ANY,
        ),
        Option(
            "job.gpus_per_node",
            "--gpus --gpus-per-node N",
            "GPUs per node (not in total, as sbatch's --gpus); one rank runs on each.",
            NUMBER,
            QUEUE | {"env"},
        ),
        Option(
            "job.time",
            "-t --time TIME",
            "Time limit: 90m, 2h30m, or Slurm's own forms: 30 (minutes), 2:30:00, 1-12 "
            "(days-hours).",
            commands=QUEUE | {"env"},
        ),
        Option(
            "job.partition",
            "-p --partition NAME",
            "Partition, or several separated by commas.",
            commands=QUEUE | {"env"},
        ),
        Option("job.account", "-A --account NAME", "Account to charge.", commands=QUEUE | {"env"}),
        Option(
            "job.name",
            "-J --name NAME",
            "Name of the run and its job (default: the script's).",
            commands=RUNS - {"sweep"},
        ),
        _queue("job.gpu_type", "--gpu-type NAME", "GPU type, as your cluster names it."),
        _queue(
            "job.cpus_per_gpu",
            "--cpus-per-gpu N",
            "CPU cores per GPU, or per rank without GPUs (default: a fair share).",
            NUMBER,
        ),
        _queue(
            "job.mem_per_gpu",
            "--mem-per-gpu SIZE",
            "Memory per GPU, or per rank without GPUs, e.g. 32G.",
        ),
        _queue("job.mem_per_node", "--mem-per-node SIZE", "Memory per node, e.g. 256G."),
        _number("job.cpus_per_gpu", "--cpus N", "CPU cores of the build job.", **_BUILD_ONLY),
        Option(
            "job.mem_per_node", "--mem SIZE", "Memory of the build job, e.g. 16G.", **_BUILD_ONLY
        ),
        _queue("job.qos", "--qos NAME", "Quality of service."),
        _queue("job.constraint", "--constraint FEATURES", "Features that the nodes must have."),
        _queue("job.reservation", "--reservation NAME", "Reservation to use."),
        _queue("job.nodelist", "--nodelist NODES", "Nodes to use, e.g. node[1-4]."),
        _queue("job.exclude", "--exclude NODES", "Nodes to avoid, e.g. node[1-4]."),
        _queue("job.exclusive", "--exclusive", "Request exclusive nodes.", SWITCH),
        _queue("job.dependency", "--dependency SPEC", "Slurm dependency, e.g. afterok:1234."),
        _queue("job.comment", "--comment TEXT", "Comment for Slurm's accounting."),
        Option(
            "job.mail",
            "--mail ADDRESS",
            "Email address to notify when the run ends or fails.",
            commands=BATCH,
        ),
        _queue(
            "job.extra",
            "--sbatch-arg ARG",
            "Extra sbatch argument, e.g. --switches=1; repeatable.",
            LIST,
        ),
    ),
    LAUNCH: (
        _number("launch.nproc", "--nproc N", "Ranks per node (default: one per GPU)."),
        Option(
            "launch.style",
            "--style STYLE",
            "What starts the ranks: fork (default), srun, torchrun, spawn, mpirun, lightning or "
            "accelerate.",
        ),
        _switch(
            "runtime.cpu",
            "--cpu",
            "Train on the CPU, even if there are GPUs.",
            commands=PROVABLE | {"shell"},
        ),
        Option(
            "runtime.backend",
            "--backend NAME",
            "Process group backend: nccl, gloo, ...",
            **_PROVABLE,
        ),
        _list(
            "launch.preload",
            "--preload MODULE",
            "Module to import once per node before ranks are forked",
            **_PROVABLE,
        ),
        Option(
            "launch.gpu_binding",
            "--gpu-binding all|one",
            "GPUs that each rank sees: all GPUs of its node (default), or only its own.",
            commands=RUNS - {"run"},
        ),
        Option(
            "launch.mpirun_over",
            "--mpirun-over ranks|torchrun",
            "What mpirun starts: each rank (default), or one torchrun per node.",
            commands=RUNS - {"run"},
        ),
        _switch(
            "launch.warm",
            "--warm",
            "Keep a process with torch imported for your next runs; it ends after 10m without use "
            "(warm in"
            " [launch]).",
            commands=frozenset({"run"}),
        ),
        _switch(
            "launch.check",
            "--check",
            "Check the job before it is queued and when it starts (default).",
        ),
        _switch(
            "launch.fitness",
            "--fitness",
            "First measure GPUs, cores and links of all nodes (up to 30 s), and exclude slow "
            "nodes.",
        ),
        _switch("launch.debug", "--debug", "Enable debug output of NCCL and torch.distributed."),
    ),
    ENVIRONMENT: (
        _list(
            "environment.modules",
            "--load-module NAME",
            "Environment module to load",
            **_JOB_OR_BUILD,
        ),
        Option(
            "environment.path",
            "--venv PATH",
            "Use the venv in this folder.",
            path=PATH,
            implies=("environment.kind", "venv"),
            commands=ANY | PROVABLE,
        ),
        Option(
            "environment.path",
            "--conda ENV",
            "Use this conda environment (name or folder).",
            path=NAME_OR_PATH,
            implies=("environment.kind", "conda"),
            **_JOB,
        ),
        Option(
            "environment.image", "--image IMAGE", "Use this container image.", **_JOB, **_CONTAINER
        ),
        Option(
            "environment.kind",
            "--environment KIND",
            "Kind of environment: current (default: this Python), venv, conda or container.",
            **_BUILD,
        ),
        Option(
            "environment.variables",
            "--env K=V",
            "Environment variable for the ranks; repeatable.",
            VARIABLES,
            ANY | PROVABLE,
        ),
        _list(
            "environment.secrets",
            "--secret NAME",
            "Variable to take from your shell; never written to scripts or logs",
            **_ANY,
        ),
        _list(
            "environment.secret_files",
            "--secret-file FILE",
            "File of secrets (default: .env, ~/.config/paceline/secrets.env, ~/.netrc, ...)",
            path=PATH,
            **_ANY,
        ),
        _list(
            "environment.binds",
            "--bind OUTSIDE:INSIDE",
            "Folder to mount in the container",
            path=BIND,
            **_JOB,
        ),
        Option(
            "environment.engine",
            "--engine NAME",
            "Container engine: apptainer (default), singularity or pyxis.",
            **_JOB_OR_BUILD,
        ),
        _list(
            "environment.engine_options",
            "--engine-option OPTION",
            "Extra option for the engine's `exec`, or for srun with pyxis",
            **_JOB,
        ),
        Option(
            "environment.python",
            "--python PATH",
            "Python interpreter, if not the environment's own.",
            path=PROGRAM,
            commands=ANY | PROVABLE,
        ),
        _list(
            "environment.module_paths",
            "--module-path DIR",
            "Extra module folder, as for `module use`",
            path=FOLDER,
            **_JOB_OR_BUILD,
        ),
        _switch(
            "environment.purge",
            "--purge-modules",
            "Unload all modules first (default, if you load any).",
            **_JOB_OR_BUILD,
        ),
        _list(
            "environment.setup",
            "--setup COMMAND",
            "Shell command to run in the job before the launch",
            **_JOB,
        ),
        _switch(
            "environment.proxies",
            "--proxies",
            "Pass on http_proxy, https_proxy and no_proxy.",
            **_JOB,
        ),
        _list(
            "environment.requirements",
            "--requirements FILE",
            "Requirements file: requirements.txt, pyproject.toml[extra], Pipfile or a lock file",
            path=PATH,
            **_JOB,
        ),
        Option(
            "environment.constraints",
            "--constraints FILE",
            "Version constraints (default: constraints.txt next to the requirements).",
            path=PATH,
            **_JOB_OR_BUILD,
        ),
        Option(
            "environment.base_python",
            "--base-python PATH",
            "Python to build a venv with (default: python3 of the modules, or this one).",
            path=NAME_OR_PATH,
            alias={"env": "--python"},
            **_JOB_OR_BUILD,
        ),
        Option(
            "environment.base",
            "--base-image IMAGE",
            "Image to build the container from, e.g. docker://python:3.12.",
            **_JOB_OR_BUILD,
            **_CONTAINER,
        ),
        _switch(
            "environment.system_packages",
            "--system-packages",
            "Let a venv see the packages of its base Python.",
            **_JOB_OR_BUILD,
        ),
        _switch(
            "environment.horovod",
            "--with-horovod",
            "Compile Horovod for the venv's torch.",
            **_JOB_OR_BUILD,
        ),
    ),
    TRAINING: (
        Option(
            "params",
            "--param K=V",
            "Hyperparameter: run.params.K in the script; repeatable.",
            LIST,
            PROVABLE,
        ),
        Option(
            "runtime.precision",
            "--precision TYPE",
            "Autocast precision: fp32, bf16 or fp16.",
            **_PROVABLE,
        ),
        _number(
            "runtime.seed",
            "--seed N",
            "Seed for Python, NumPy and torch on all ranks.",
            **_PROVABLE,
        ),
        _number(
            "runtime.max_steps",
            "--max-steps N",
            "Stop after N training steps (scripts with paceline.session).",
        ),
        Option(
            "runtime.start_from",
            "--start-from --init-from RUN|FILE",
            "Start with the weights of a run, a checkpoint or a file (.safetensors, .pt).",
        ),
        _switch(
            "runtime.start_continue",
            "--continue",
            "With --start-from: also restore the step, the schedule and the optimizer.",
        ),
        _switch(
            "runtime.start_strict",
            "--strict",
            "With --start-from: require that all weights fit (default); --no-strict loads only "
            "those that do.",
        ),
        _switch(
            "runtime.deterministic",
            "--deterministic",
            "Use deterministic algorithms only.",
            **_PROVABLE,
        ),
        Option(
            "runtime.on_nonfinite",
            "--on-nonfinite ACTION",
            "On a NaN or infinite loss: stop, skip or ignore.",
        ),
        _number(
            "runtime.replica_check",
            "--replica-check N",
            "Compare replicas between ranks every N steps (default: 100; 0 turns it off).",
        ),
        Option(
            "runtime.profile",
            "--profile A:B",
            "Profile steps A to B - 1; the trace goes to the run folder.",
        ),
        Option(
            "runtime.timeout", "--timeout TIME", "Timeout of collectives, e.g. 10m.", **_PROVABLE
        ),
        Option(
            "runtime.system_metrics",
            "--system-metrics TIME",
            "Interval of CPU, memory, GPU and network metrics (default: 15s; 0s turns them off).",
        ),
    ),
    UNTIL_DONE: (
        _switch(
            "resume.requeue",
            "--requeue",
            "Requeue at the time limit or after preemption, and resume (default).",
            commands=BATCH,
        ),
        Option(
            "resume.requeue",
            "--requeue-always",
            "Like --requeue, for a script that resumes by itself, without paceline.session.",
            SWITCH,
            BATCH,
            sets="always",
        ),
        Option(
            "resume.requeues_per_day",
            "--requeues-per-day N",
            "Requeue at most N times within a day (default: 50).",
            NUMBER,
            BATCH,
        ),
        _number(
            "resume.max_attempts",
            "--max-attempts N",
            "Failed attempts before giving up (default: 1 here, 3 on a cluster).",
        ),
        _number(
            "resume.max_attempts",
            "--max-restarts N",
            "Restart failed ranks up to N times (N + 1 attempts).",
            plus=1,
        ),
        Option(
            "resume.hang_timeout",
            "--hang-timeout TIME",
            "Treat ranks as hung after this long without a step (before the first step: without "
            "any activity);"
            " 0s: never.",
        ),
        Option(
            "resume.exit_timeout",
            "--exit-timeout TIME",
            "Once a rank has exited, end the others after this long without progress (default: "
            "30s; 0s: never).",
        ),
        Option(
            "resume.grace",
            "--grace TIME",
            "Time to save and stop, before the time limit or after SIGTERM (default: 2m, or a "
            "third of the limit).",
        ),
        Option(
            "resume.stop_signal",
            "--stop-signal SIGNAL",
            "Signal that tells a script without paceline.session to save and stop: SIGUSR1, "
            "SIGTERM, SIGINT or"
            " SIGHUP (default: its framework's, otherwise SIGUSR1).",
        ),
        _number(
            "resume.saved_exit_code",
            "--saved-exit-code N",
            'Exit code with which a script without paceline.session says "saved, resume me", in '
            "addition to 75.",
        ),
        _number(
            "checkpoint.every_steps", "--save-every-steps N", "Save a checkpoint every N steps."
        ),
        Option(
            "checkpoint.every_seconds",
            "--save-every-seconds TIME",
            "Save a checkpoint whenever this much time has passed, e.g. 10m.",
        ),
        _number("checkpoint.keep_last", "--keep-last N", "Keep the N newest checkpoints."),
        _number(
            "checkpoint.keep_every",
            "--keep-every N",
            "Also keep checkpoints whose step is a multiple of N.",
        ),
    ),
    DATA: (
        _list(
            "data.stage",
            "--data PATH",
            "File or folder to copy to each node first: below <scratch>/<project>, or a full path",
        ),
        _list(
            "data.collect",
            "--collect PATTERN",
            "Files below $PACELINE_DATA to copy back however the run ends",
        ),
        Option(
            "data.keep",
            "--keep-data TIME",
            "Keep staged data on the nodes for later jobs, e.g. 2d.",
        ),
        Option(
            "data.verify",
            "--verify size|checksum",
            "Check copies by size (default) or by checksum.",
        ),
        Option(
            "data.folder",
            "--data-folder DIR",
            "Folder on the node (default: $SLURM_TMPDIR, $TMPDIR or /tmp).",
        ),
    ),
    TRACKERS: (
        _switch(
            "tracking.wandb", "--wandb", "Log to W&B; --no-wandb turns off `paceline.wandb` too."
        ),
        Option(
            "tracking.wandb_project",
            "--wandb-project NAME",
            "W&B project (default: the project's name).",
            **_WANDB,
        ),
        Option(
            "tracking.wandb_group",
            "--wandb-group NAME",
            "W&B group (default: the experiment's name).",
            **_WANDB,
        ),
        Option(
            "tracking.wandb_entity",
            "--wandb-entity NAME",
            "W&B user or team (default: the key's owner).",
        ),
        Option(
            "tracking.wandb_mode",
            "--wandb-mode MODE",
            "online, offline (send later with `paceline sync`) or disabled (default: online if "
            "possible).",
        ),
        _switch(
            "tracking.wandb_all_processes",
            "--wandb-all-processes",
            "Log each rank to its own W&B run, in one group.",
            **_WANDB,
        ),
        _switch(
            "tracking.tensorboard", "--tensorboard", "Write TensorBoard files to the run folder."
        ),
        _list("tracking.trackers", "--tracker MODULE:CLASS", "Your own tracker class"),
    ),
    NOTIFICATIONS: (
        Option(
            "notify.webhook",
            "--notify-webhook NAME",
            "Environment variable with the URL to send notifications to, e.g. SLACK_WEBHOOK.",
        ),
        Option(
            "notify.command",
            "--notify-command COMMAND",
            "Shell command to run on the first node for each notification, which it reads as JSON "
            "from standard"
            " input.",
        ),
        _list(
            "notify.on",
            "--notify-on EVENT",
            "Events to notify about: done, failed, requeued, stalled, gpu_idle (default: these) "
            "or stopped",
        ),
        Option(
            "notify.stalled_after",
            "--stalled-after TIME",
            "Notify after this long without a step or a busy GPU (default: 30m).",
        ),
    ),
    PROJECT: (
        Option(
            "project.experiment", "--experiment NAME", "Experiment name; runs are grouped by it."
        ),
        Option(
            "project.name",
            "--project NAME",
            "Project name (default: the folder's).",
            commands=BUILD | PROVABLE,
        ),
        _file_only(
            "project.script",
            "Default script, or a list of the script and its arguments; relative to the project "
            "folder.",
        ),
        Option(
            "project.scratch",
            "--scratch DIR",
            "Folder for run folders (default: $PACELINE_SCRATCH, or `runs` in the project).",
            path=PATH,
            commands=BUILD | PROVABLE,
        ),
        Option(
            "project.on",
            "--on CLUSTER",
            "Cluster to use over SSH: a profile with a host (default: $PACELINE_ON); `here` means "
            "this machine.",
            commands=frozenset(),
        ),
        _switch(
            "project.snapshot",
            "--snapshot",
            "Run a copy of the code, taken when you submit (default).",
        ),
        Option(
            "project.snapshot_limit",
            "--snapshot-limit SIZE",
            "Maximum size of the code snapshot (default: 200M).",
        ),
        _list(
            "project.exclude",
            "--snapshot-exclude PATTERN",
            "Files to leave out of the code snapshot, besides those git ignores",
        ),
        Option(
            "project.workdir",
            "--workdir snapshot|project",
            "Where relative paths start: in the run's copy of the project (default), or in the "
            "project itself.",
            commands=RUNS - {"run"},
        ),
    ),
    OUTPUT: (
        Option(
            "launch.tee",
            "--tee 0|all|none",
            "Print output of rank 0 (default), all ranks, or none.",
        ),
    ),
}


def options_of(command: str) -> Iterator[tuple[str, Option]]:
    """Yield the options that a command takes, each with its group."""
    for group, options in TABLE.items():
        for option in options:
            if command in option.commands:
                alias = option.alias.get(command)
                yield group, replace(option, usage=f"{alias} {option.usage}") if alias else option
