"""All commands: the module of each, and what it does."""

from __future__ import annotations

ABOUT = (
    "Take a PyTorch script from your laptop to every GPU of a Slurm cluster,\n"
    "and keep it running until it is done."
)
EXAMPLES = """\
  paceline run train.py                     one rank per GPU, or two on the CPU
  paceline run --nproc 4 --cpu train.py --lr 0.1
  paceline submit --nodes 2 --gpus 8 train.py --lr 0.1
  paceline submit --on alps train.py        over SSH, after `paceline login`

Options of Paceline go before the script; everything after it is passed to the
script unchanged.
Run `paceline COMMAND --help` for the options of a command."""

# Each command: its module (with a `command`, or an `app` if it has subcommands), and what it does.
COMMANDS = {
    "run": ("paceline.cli.commands.run", "run a script here, on this machine's GPUs or CPU cores"),
    "submit": (
        "paceline.cli.commands.submit",
        "submit a script to Slurm; --dry-run prints the exact job script",
    ),
    "sweep": (
        "paceline.cli.commands.sweep",
        "start a sweep: grid, random, TPE or seeds; as job arrays or here",
    ),
    "ps": ("paceline.cli.commands.ps", "list runs and their status"),
    "top": ("paceline.cli.commands.top", "watch your runs full screen: loss, ranks, nodes, log"),
    "show": ("paceline.cli.commands.show", "show one run: curves, nodes, and where the time went"),
    "logs": ("paceline.cli.commands.logs", "print a run's output; -f follows it"),
    "wait": (
        "paceline.cli.commands.wait",
        "wait for runs to finish; the exit code says how they ended",
    ),
    "ui": ("paceline.cli.commands.ui", "view your runs in a browser"),
    "report": (
        "paceline.cli.commands.report",
        "write a run or a sweep to one HTML file, to share or archive",
    ),
    "cancel": ("paceline.cli.commands.cancel", "cancel a run permanently (it is not requeued)"),
    "export": ("paceline.cli.commands.export", "export a run's newest weights to one file"),
    "fetch": ("paceline.cli.commands.fetch", "copy a run from a cluster: records, logs, weights"),
    "sync": ("paceline.cli.commands.sync", "upload W&B data of offline runs"),
    "prove": (
        "paceline.cli.commands.prove",
        "check that a script trains the same on any number of ranks",
    ),
    "inspect": (
        "paceline.cli.commands.inspect",
        "show which samples each rank gets, and check full epochs",
    ),
    "doctor": (
        "paceline.cli.commands.doctor",
        "find out why a run hangs, is slow or died; check a machine or a job",
    ),
    "shell": ("paceline.cli.commands.shell", "open a shell on a node, with a job's environment"),
    "env": ("paceline.cli.commands.env", "build environments of runs"),
    "data": (
        "paceline.cli.commands.data",
        "send data to a cluster; inspect and pack the data that runs stage",
    ),
    "clean": (
        "paceline.cli.commands.clean",
        "list and remove leftover files on nodes; end the processes that `run --warm` keeps",
    ),
    "login": (
        "paceline.cli.commands.login",
        "log in to a cluster over SSH, once for all commands with --on",
    ),
    "new": (
        "paceline.cli.commands.new",
        "create a project that runs right away: script, settings, test",
    ),
    "adopt": (
        "paceline.cli.commands.adopt",
        "show what to change in a script so that it trains on several ranks",
    ),
    "init": ("paceline.cli.commands.init", "write a commented paceline.toml for your cluster"),
    "sandbox": (
        "paceline.cli.commands.sandbox",
        "run a real multi-node Slurm on this machine, for testing",
    ),
}

# Functions of a command's module that are subcommands, where the command also does something without one.
SUBCOMMANDS = ("sweep show", "sweep cancel")

# What a command with --on starts on the cluster; nobody types it.
SERVERS = {"view-server": "paceline.cli.cluster_views"}

# What carries out a command with --on that does more than run there.
FORWARDERS = {
    **dict.fromkeys(("ps", "show", "logs", "top", "ui", "report"), "paceline.cli.cluster_views"),
    **{
        key: f"paceline.cli.commands.{key.removesuffix('_push')}"
        for key in ("submit", "fetch", "data_push")
    },
}

# What people type for a command that has another name, and what to type instead.
OTHER_NAMES = {
    **dict.fromkeys(("resume", "continue"), "paceline submit --resume RUN"),
    **dict.fromkeys(("status", "list"), "paceline ps"),
    "logout": "paceline login --close",
    **dict.fromkeys(("stop", "kill"), "paceline cancel RUN"),
}
