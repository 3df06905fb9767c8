"""`paceline sandbox`: a real Slurm cluster on this machine, to try jobs on before you submit them to yours."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.parser import GroupedCommand, make_group
from paceline.errors import ClusterError
from paceline.tools.sandbox import NAMESPACES, PLAIN, Sandbox, Settings, packages
from paceline.tools.sandbox.sandbox import stop_all
from paceline.tools.sandbox.settings import SandboxPaths, default_folder

app = make_group(
    "Run a real multi-node Slurm on this machine, from your distribution's packages.\n\n"
    "Start with:  paceline sandbox up --nodes 4"
)
Folder = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        help="Sandbox folder. Default: $PACELINE_SANDBOX, or ~/.local/state/paceline/sandbox.",
    ),
]
NodeName = Annotated[
    str, typer.Argument(metavar="NODE", help="Node name or number, e.g. node2 or 2.")
]
Command = Annotated[
    list[str], typer.Argument(metavar="COMMAND...", help="Command and its arguments.")
]


def open_sandbox(folder: Path | None) -> Sandbox:
    return Sandbox(folder or default_folder())


@app.command(cls=GroupedCommand)
def up(
    *,
    folder: Folder = None,
    nodes: Annotated[int, typer.Option(help="Number of nodes.")] = 4,
    cpus: Annotated[
        int, typer.Option(help="CPUs per node; may be more than this machine has.")
    ] = 8,
    memory: Annotated[
        int, typer.Option(help="Memory per node in MB; may be more than this machine has.")
    ] = 4000,
    gpus: Annotated[
        int,
        typer.Option(help="Fake GPUs per node. Slurm sets CUDA_VISIBLE_DEVICES as for real ones."),
    ] = 4,
    gpu_type: Annotated[str, typer.Option(help="GPU type, e.g. a100 for --gres=gpu:a100:2.")] = "",
    network: Annotated[
        str,
        typer.Option(
            help=f"{NAMESPACES}: each node has its own network, processes and host name (needs root). "
            f"{PLAIN}: nodes share this machine's. Default: {NAMESPACES} for root, otherwise {PLAIN}."
        ),
    ] = "",
    accounting: Annotated[
        bool, typer.Option("--accounting", help="Start slurmdbd and MariaDB, so that sacct works.")
    ] = False,
    max_array_size: Annotated[int, typer.Option(help="MaxArraySize of the cluster.")] = 1001,
    slurm_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Override a line of slurm.conf; repeatable."),
    ] = None,
    install: Annotated[
        bool,
        typer.Option("--install", help="Install missing packages (as root, on Debian and Ubuntu)."),
    ] = False,
) -> None:
    """Start the cluster and wait until every node is idle."""
    network = network or (NAMESPACES if os.geteuid() == 0 else PLAIN)
    pairs = (option.partition("=") for option in slurm_option or [])
    if install:
        installed = packages.install(Settings(network=network, accounting=accounting))
        print(f"installed: {' '.join(installed) or 'nothing, all is there'}")
    sandbox = Sandbox.up(
        folder or default_folder(),
        nodes=nodes,
        cpus=cpus,
        memory=memory,
        gpus=gpus,
        gpu_type=gpu_type,
        network=network,
        accounting=accounting,
        max_array_size=max_array_size,
        options={key.strip(): value.strip() for key, _, value in pairs},
    )
    flag = sandbox.paths.dir_flag
    size = f"{nodes} node{'s' if nodes > 1 else ''}"
    print(f"Slurm with {size} is up ({network}) in {sandbox.folder}")
    print(f'  use it:   eval "$(paceline sandbox env{flag})"')
    print(f"  stop it:  paceline sandbox down{flag}")


@app.command(cls=GroupedCommand)
def down(folder: Folder = None) -> None:
    """Stop the cluster and remove its network interfaces. Logs stay."""
    paths = SandboxPaths((folder or default_folder()).absolute())
    if stop_all(paths):
        print(f"the sandbox is down; its logs are in {paths.path / 'log'}")
        if os.environ.get("SLURM_CONF") == str(paths.slurm_conf):
            print("  this terminal still uses it; type:  unset SLURM_CONF")
    else:
        print(f"no sandbox is running in {paths.path}")


@app.command(cls=GroupedCommand)
def status(folder: Folder = None) -> None:
    """Show nodes and jobs."""
    sandbox = open_sandbox(folder)
    print(f"{sandbox.folder}  ({sandbox.record.settings.network})")
    if not sandbox.controller_responds():
        raise ClusterError(
            "The controller does not respond.",
            hint=f"Restart it: paceline sandbox restart-controller{sandbox.paths.dir_flag}",
        )
    for node in sandbox.states().values():
        notes = ("powered off" * (not node.running), "disconnected" * node.cut, node.reason)
        state = ", ".join(filter(None, (node.state, *notes)))
        print(f"  {node.name:<8} {node.address:<16} {state}")
    print(sandbox.run(["squeue", "-a"]).stdout, end="")


@app.command(cls=GroupedCommand)
def env(folder: Folder = None) -> None:
    """Print the environment variables for your shell.

    Use it as:  eval "$(paceline sandbox env)"
    """
    for name, value in open_sandbox(folder).environment.items():
        print(f"export {name}={shlex.quote(value)}")


@app.command(
    cls=GroupedCommand,
    name="exec",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)
def exec_(node: NodeName, command: Command, folder: Folder = None) -> None:
    """Run a command on a node.

    Example:  paceline sandbox exec 2 ip address
    """
    argv = command[1:] if command[0] == "--" else command
    raise typer.Exit(open_sandbox(folder).exec(node, argv, capture=False).returncode)


@app.command(cls=GroupedCommand, name="kill-node")
def kill_node(
    node: NodeName,
    *,
    mark_down: Annotated[
        bool,
        typer.Option(
            "--mark-down", help="Mark the node down now; otherwise Slurm notices after 40 s."
        ),
    ] = False,
    folder: Folder = None,
) -> None:
    """Power off a node: everything that runs on it is lost."""
    open_sandbox(folder).kill_node(node, mark_down=mark_down)


@app.command(cls=GroupedCommand, name="start-node")
def start_node(node: NodeName, folder: Folder = None) -> None:
    """Switch a node on, and wait until it accepts jobs."""
    open_sandbox(folder).start_node(node)


@app.command(cls=GroupedCommand)
def cut(node: NodeName, folder: Folder = None) -> None:
    """Disconnect a node from the network (namespaces only)."""
    open_sandbox(folder).cut(node)


@app.command(cls=GroupedCommand)
def heal(node: NodeName, folder: Folder = None) -> None:
    """Reconnect a node to the network."""
    open_sandbox(folder).heal(node)


@app.command(cls=GroupedCommand, name="restart-controller")
def restart_controller(
    *,
    kill: Annotated[bool, typer.Option("--kill", help="Crash it first (SIGKILL).")] = False,
    folder: Folder = None,
) -> None:
    """Restart the controller. Jobs keep running meanwhile."""
    open_sandbox(folder).restart_controller(kill=kill)
