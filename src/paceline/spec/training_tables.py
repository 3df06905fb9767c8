"""What a run does until it is done: the keys, each with its type, default and meaning."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from paceline.spec.option import LAUNCH, NONE, PROVABLE, RUNS, SWEEP, Option
from paceline.spec.values import (
    Command,
    Count,
    Events,
    ExitCode,
    FolderName,
    Grace,
    Line,
    Natural,
    Requeue,
    Seconds,
    StopSignal,
    Strings,
    Table,
    VariableName,
)


class Runtime(Table):
    """`[runtime]`: defaults of `paceline.session`."""

    cpu: Annotated[
        bool,
        Option(
            "--cpu", "Train on the CPU, even if there are GPUs.", PROVABLE | {"shell"}, group=LAUNCH
        ),
    ] = False
    backend: Annotated[
        Line | None,
        Option("--backend NAME", "Process group backend: nccl, gloo, ...", PROVABLE, group=LAUNCH),
    ] = None
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        Option("--precision TYPE", "Autocast precision: fp32, bf16 or fp16.", PROVABLE),
    ] = None
    seed: Annotated[
        int | None, Option("--seed N", "Seed for Python, NumPy and torch on all ranks.", PROVABLE)
    ] = None
    max_steps: Annotated[
        Count | None,
        Option("--max-steps N", "Stop after N training steps (scripts with paceline.session)."),
    ] = None
    start_from: Annotated[
        Line | None,
        Option(
            "--start-from --init-from RUN|FILE",
            "Start with the weights of a run, a checkpoint or a file (.safetensors, .pt).",
        ),
    ] = None
    start_continue: Annotated[
        bool,
        Option(
            "--continue",
            "With --start-from: also restore the step, the schedule and the optimizer.",
        ),
    ] = False
    start_strict: Annotated[
        bool,
        Option(
            "--strict",
            "With --start-from: require that all weights fit (default); --no-strict loads "
            "only those that do.",
        ),
    ] = True
    deterministic: Annotated[
        bool, Option("--deterministic", "Use deterministic algorithms only.", PROVABLE)
    ] = False
    on_nonfinite: Annotated[
        Literal["stop", "skip", "ignore"] | None,
        Option("--on-nonfinite ACTION", "On a NaN or infinite loss: stop, skip or ignore."),
    ] = None
    replica_check: Annotated[
        Natural | None,
        Option(
            "--replica-check N",
            "Compare replicas between ranks every N steps (default: 100; 0 turns it off).",
        ),
    ] = None
    timeout: Annotated[
        Seconds | None, Option("--timeout TIME", "Timeout of collectives, e.g. 10m.", PROVABLE)
    ] = None
    system_metrics: Annotated[
        Seconds,
        Option(
            "--system-metrics TIME",
            "Interval of CPU, memory, GPU and network metrics (default: 15s; 0s turns them off).",
        ),
    ] = 15


class Resume(Table):
    requeue: Annotated[
        Requeue,
        Option(
            "--requeue",
            "Requeue at the time limit or after preemption, and resume (default).",
            RUNS - {"run"},
        ),
        Option(
            "--requeue-always",
            "Like --requeue, for a script that resumes by itself, without paceline.session.",
            RUNS - {"run"},
            sets="always",
        ),
    ] = True
    requeues_per_day: Annotated[
        Count,
        Option(
            "--requeues-per-day N",
            "Requeue at most N times within a day (default: 50).",
            RUNS - {"run"},
        ),
    ] = 50
    max_attempts: Annotated[
        Count | None,
        Option(
            "--max-attempts N",
            "Failed attempts before giving up (default: 1 here, 3 on a cluster).",
        ),
        Option("--max-restarts N", "Restart failed ranks up to N times (N + 1 attempts).", plus=1),
    ] = None
    join_timeout: Annotated[
        Seconds | None,
        Option(
            "--join-timeout TIME",
            "How long a node may take to join the others, counted from the last one that has "
            "(default: 2m, and 0.5s more per agent).",
        ),
    ] = None
    hang_timeout: Annotated[
        Seconds | None,
        Option(
            "--hang-timeout TIME",
            "Treat ranks as hung after this long without a step (before the first step: "
            "without any activity); 0s: never.",
        ),
    ] = None
    exit_timeout: Annotated[
        Seconds,
        Option(
            "--exit-timeout TIME",
            "Once a rank has exited, end the others after this long without progress "
            "(default: 30s; 0s: never).",
        ),
    ] = 30
    grace: Annotated[
        Grace | None,
        Option(
            "--grace TIME",
            "Time to save and stop, before the time limit or after SIGTERM (default: 2m, "
            "or a third of the limit).",
        ),
    ] = None
    stop_signal: Annotated[
        StopSignal | None,
        Option(
            "--stop-signal SIGNAL",
            "Signal that tells a script without paceline.session to save and stop: "
            "SIGUSR1, SIGTERM, SIGINT or SIGHUP (default: its framework's, otherwise "
            "SIGUSR1).",
        ),
    ] = None
    saved_exit_code: Annotated[
        ExitCode,
        Option(
            "--saved-exit-code N",
            'Exit code with which a script without paceline.session says "saved, resume '
            'me", in addition to 75.',
        ),
    ] = os.EX_TEMPFAIL


class Checkpoint(Table):
    every_steps: Annotated[
        Count | None, Option("--save-every-steps N", "Save a checkpoint every N steps.")
    ] = None
    every_seconds: Annotated[
        Seconds | None,
        Option(
            "--save-every-seconds TIME",
            "Save a checkpoint whenever this much time has passed, e.g. 10m.",
        ),
    ] = None
    keep_last: Annotated[
        Count | None, Option("--keep-last N", "Keep the N newest checkpoints.")
    ] = None
    keep_every: Annotated[
        Count | None,
        Option("--keep-every N", "Also keep checkpoints whose step is a multiple of N."),
    ] = None


class Data(Table):
    stage: Annotated[
        Strings,
        Option(
            "--data PATH",
            "File or folder to copy to each node first: below <scratch>/<project>, or a full path.",
        ),
    ] = ()
    collect: Annotated[
        Strings,
        Option(
            "--collect PATTERN", "Files below $PACELINE_DATA to copy back however the run ends."
        ),
    ] = ()
    keep: Annotated[
        Seconds | None,
        Option("--keep-data TIME", "Keep staged data on the nodes for later jobs, e.g. 2d."),
    ] = None
    folder: Annotated[
        Line | None,
        Option(
            "--data-folder DIR", "Folder on the node (default: $SLURM_TMPDIR, $TMPDIR or /tmp)."
        ),
    ] = None


class Tracking(Table):
    """`[tracking]`: where `run.log` sends metrics besides metrics.jsonl."""

    wandb_sweep: Annotated[
        Line | None,
        Option(
            "--wandb-sweep ENTITY/PROJECT/ID",
            "W&B sweep (ENTITY/PROJECT/ID) that chooses the points: `parallel` agents run "
            "`count` each. A file overrides the flag.",
            {"sweep"},
            group=SWEEP,
        ),
    ] = None
    wandb: Annotated[
        bool | None, Option("--wandb", "Log to W&B; --no-wandb turns off `paceline.wandb` too.")
    ] = None
    wandb_project: Annotated[
        Line | None,
        Option(
            "--wandb-project NAME",
            "W&B project (default: the project's name).",
            implies=("tracking.wandb", True),
        ),
    ] = None
    wandb_group: Annotated[
        Line | None,
        Option(
            "--wandb-group NAME",
            "W&B group (default: the experiment's name).",
            implies=("tracking.wandb", True),
        ),
    ] = None
    wandb_entity: Annotated[
        Line | None, Option("--wandb-entity NAME", "W&B user or team (default: the key's owner).")
    ] = None
    wandb_mode: Annotated[
        Literal["online", "offline", "disabled"] | None,
        Option(
            "--wandb-mode MODE",
            "online, offline (send later with `paceline sync`) or disabled (default: "
            "online if possible).",
        ),
    ] = None
    wandb_all_processes: Annotated[
        bool,
        Option(
            "--wandb-all-processes",
            "Log each rank to its own W&B run, in one group.",
            implies=("tracking.wandb", True),
        ),
    ] = False
    tensorboard: Annotated[
        bool, Option("--tensorboard", "Write TensorBoard files to the run folder.")
    ] = False
    trackers: Annotated[Strings, Option("--tracker MODULE:CLASS", "Your own tracker class.")] = ()


class Notify(Table):
    """`[notify]`: whom to tell about what happens to a run."""

    webhook: Annotated[
        VariableName | None,
        Option(
            "--notify-webhook NAME",
            "Environment variable with the URL to send notifications to, e.g. SLACK_WEBHOOK.",
        ),
    ] = None
    command: Annotated[
        Command | None,
        Option(
            "--notify-command COMMAND",
            "Shell command to run on the first node for each notification, which it reads "
            "as JSON from standard input.",
        ),
    ] = None
    on: Annotated[
        Events,
        Option(
            "--notify-on EVENT",
            "Events to notify about: done, failed, requeued, stalled (default: these) or stopped.",
        ),
    ] = ("done", "failed", "requeued", "stalled")
    stalled_after: Annotated[
        Seconds,
        Option("--stalled-after TIME", "Notify after this long without a step (default: 30m)."),
    ] = 1800


class SweepTable(Table):
    """`[sweep]` of a sweep's file."""

    count: Annotated[
        Count | None, Option("--count N", "Number of points; for a grid, the maximum.", {"sweep"})
    ] = None
    parallel: Annotated[
        Count | None,
        Option(
            "--parallel K",
            "Trials that run at the same time (default: as many as resources allow; 4 for tpe).",
            {"sweep"},
        ),
    ] = None
    seeds: Annotated[
        Count, Option("--seeds S", "Runs per point, each with its own seed.", {"sweep"})
    ] = 1
    pack: Annotated[
        Count, Option("--pack N", "Trials per job, side by side on one node.", {"sweep"})
    ] = 1
    metric: Annotated[
        Line | None,
        Option(
            "--metric NAME",
            "Metric that ranks the trials, as named in `run.log` or `run.report`.",
            {"sweep"},
        ),
    ] = None
    script: Annotated[
        Line | None,
        Option(
            "--script FILE",
            "Script to run, relative to the sweep's file. A list (.txt) of arguments alone "
            "takes it as a flag.",
            {"sweep"},
        ),
    ] = None
    name: Annotated[
        FolderName | None,
        Option(
            "-J --name NAME", "Name of the sweep and its folder (default: the file's).", {"sweep"}
        ),
    ] = None
    module: Annotated[
        Line | None, Option("", "Module to run instead of a script, as in python -m.", NONE)
    ] = None
    args: Annotated[
        Strings,
        Option(
            "",
            "Arguments for the script; {key} is replaced with the point's value, {seed} "
            "with the seed.",
            NONE,
        ),
    ] = ()
    arguments: Annotated[
        Literal["options", "none"],
        Option(
            "",
            "Whether to pass keys that args doesn't name as --key value. `run.params` "
            "always has them.",
            NONE,
        ),
    ] = "options"
    sampler: Annotated[
        Literal["grid", "random", "tpe"],
        Option(
            "",
            "How to choose points: all combinations, random, or based on earlier trials (TPE).",
            NONE,
        ),
    ] = "grid"
    direction: Annotated[
        Literal["minimize", "maximize"],
        Option("", "Whether smaller or larger values of the metric are better.", NONE),
    ] = "minimize"
    seed: Annotated[int, Option("", "The sampler's seed.", NONE)] = 0
    prune: Annotated[
        Literal["none", "halving", "median"],
        Option(
            "",
            "How to prune trials early, based on their reports: successive halving, or the "
            "median rule.",
            NONE,
        ),
    ] = "none"
    prune_after: Annotated[
        Count, Option("", "Number of reports before a trial can be pruned.", NONE)
    ] = 1
    wandb_sweep: Line | None = None
