"""`paceline sandbox`: a real Slurm on this machine, to rehearse on before the cluster sees a job."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from paceline.errors import UsageError
from paceline.sandbox import NAMESPACES, PLAIN, Sandbox, Settings, packages
from paceline.sandbox.lifecycle import take_down
from paceline.sandbox.settings import SandboxPaths

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def overview(context: typer.Context) -> None:
    """A real multi-node Slurm on this machine, from your distribution's packages, to rehearse on.

    Begin with:  paceline sandbox up --nodes 4
    """
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


def default_folder() -> Path:
    """$PACELINE_SANDBOX, or a place for state in the home folder."""
    if told := os.environ.get("PACELINE_SANDBOX"):
        return Path(told)
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "paceline" / "sandbox"


Folder = Annotated[
    Path | None,
    typer.Option(
        "--dir", help="The sandbox's folder: $PACELINE_SANDBOX, or ~/.local/state/paceline/sandbox."
    ),
]
NodeName = Annotated[str, typer.Argument(help="node2, or just 2.")]


def found(folder: Path | None) -> Sandbox:
    return Sandbox(folder or default_folder())


@app.command()
def up(
    *,
    folder: Folder = None,
    nodes: Annotated[int, typer.Option(help="How many nodes.")] = 4,
    cpus: Annotated[int, typer.Option(help="CPUs per node; may be more than this machine has.")] = 8,
    memory: Annotated[int, typer.Option(help="Memory per node, in MB, as Slurm counts it.")] = 4000,
    gpus: Annotated[
        int, typer.Option(help="Fake GPUs per node: CUDA_VISIBLE_DEVICES is set as for real ones.")
    ] = 4,
    gpu_type: Annotated[
        str, typer.Option(help="What the GPUs call themselves, as in --gres=gpu:a100:2.")
    ] = "",
    network: Annotated[
        str,
        typer.Option(
            help=f"{NAMESPACES}: each node has its own network, processes and host name (root only). "
            f"{PLAIN}: all share this machine's. Unless said, the first that you may use.",
        ),
    ] = "",
    accounting: Annotated[
        bool, typer.Option("--accounting", help="sacct works too (MariaDB, slurmdbd).")
    ] = False,
    max_array_size: Annotated[int, typer.Option(help="MaxArraySize of the cluster.")] = 1001,
    slurm_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A line of slurm.conf, ahead of ours. May be repeated."),
    ] = None,
    install: Annotated[
        bool, typer.Option("--install", help="Install missing packages (as root, on Debian and Ubuntu).")
    ] = False,
) -> None:
    """Bring it up and wait until every node is idle."""
    network = network or (NAMESPACES if os.geteuid() == 0 else PLAIN)
    console = Console()
    options = dict(_pair(each) for each in slurm_option or [])
    if install and (got := packages.install(Settings(network=network, accounting=accounting))):
        console.print(f"installed: {' '.join(got)}", highlight=False)
    place = folder or default_folder()
    sandbox = Sandbox.up(
        place, nodes=nodes, cpus=cpus, memory=memory, gpus=gpus, gpu_type=gpu_type, network=network,
        accounting=accounting, max_array_size=max_array_size, options=options,
    )  # fmt: skip
    where = "" if place == default_folder() else f" --dir {shlex.quote(str(place))}"
    counted = f"{nodes} node{'s' if nodes > 1 else ''}"
    console.print(
        f"a Slurm of {counted} is up ({network}), in {sandbox.folder}", highlight=False, soft_wrap=True
    )
    console.print(f'  use it:   eval "$(paceline sandbox env{where})"', highlight=False, soft_wrap=True)
    console.print(f"  end it:   paceline sandbox down{where}", highlight=False, soft_wrap=True)


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--slurm-option is {text!r}", hint="KEY=VALUE, as in slurm.conf")
    return key.strip(), value.strip()


@app.command()
def down(folder: Folder = None) -> None:
    """Take it down: processes, namespaces and interfaces. Logs stay."""
    paths = SandboxPaths((folder or default_folder()).absolute())
    was_up = take_down(paths)
    print(
        f"the sandbox is down; logs: {paths.folder / 'log'}" if was_up else f"nothing is up in {paths.folder}"
    )


@app.command()
def status(folder: Folder = None) -> None:
    """Daemons, nodes and jobs."""
    sandbox = found(folder)
    settings = sandbox.record.settings
    console = Console()
    console.print(f"{sandbox.folder}  ({settings.network})", highlight=False, soft_wrap=True)
    daemons = [
        name for name in ("munged", "mariadbd", "slurmdbd", "slurmctld") if name in sandbox.record.processes
    ]
    for name in daemons:
        pid = sandbox.record.processes[name].pid
        told = f"[green]runs[/], process {pid}" if sandbox.is_running(name) else "[red]has ended[/]"
        console.print(f"  {name:<10} {told}", highlight=False)
    if not sandbox.controller_answers():
        console.print("[red]the controller does not answer[/]; paceline sandbox restart-controller")
        raise typer.Exit(1)
    table = Table(box=None, pad_edge=False)
    for title in ("node", "state", "cpus used", "gpus", "address", "reason"):
        table.add_column(title)
    for node in sandbox.states().values():
        used, _, _, total = node.cpus.split("/")
        state = node.state if node.running else f"{node.state}, [red]powered off[/]"
        state = f"{state}, [red]cut off[/]" if node.cut else state
        table.add_row(node.name, state, f"{used} of {total}", str(settings.gpus), node.address, node.reason)
    console.print(table)
    jobs = sandbox.run(["squeue", "-h", "-o", "%i %P %T %j %N %r"]).stdout.splitlines()
    console.print(f"{len(jobs)} job{'' if len(jobs) == 1 else 's'} in the queue", highlight=False)
    for job in jobs:
        console.print(f"  {job}", highlight=False, markup=False)


@app.command()
def env(folder: Folder = None) -> None:
    """Print what a shell needs: eval "$(paceline sandbox env)"."""
    for name, value in found(folder).environment.items():
        print(f"export {name}={shlex.quote(value)}")


@app.command(name="exec", context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def exec_(node: NodeName, command: Annotated[list[str], typer.Argument()], folder: Folder = None) -> None:
    """Run a command on a node: paceline sandbox exec 2 ip address."""
    argv = command[1:] if command[0] == "--" else command
    raise typer.Exit(found(folder).exec(node, argv, capture=False).returncode)


@app.command(name="kill-node")
def kill_node(
    node: NodeName,
    *,
    mark_down: Annotated[
        bool, typer.Option("--mark-down", help="Mark it down now; else Slurm finds out after 40 s.")
    ] = False,
    folder: Folder = None,
) -> None:
    """A power cut: all that the node runs is gone."""
    found(folder).kill_node(node, mark_down=mark_down)


@app.command(name="start-node")
def start_node(node: NodeName, folder: Folder = None) -> None:
    """Power on, and wait until it can take jobs."""
    found(folder).start_node(node)


@app.command()
def cut(node: NodeName, folder: Folder = None) -> None:
    """Pull the node's network cable (with namespaces)."""
    found(folder).cut(node)


@app.command()
def heal(node: NodeName, folder: Folder = None) -> None:
    """Plug the node's network cable in again."""
    found(folder).heal(node)


@app.command(name="restart-controller")
def restart_controller(
    *, kill: Annotated[bool, typer.Option("--kill", help="Crash it first.")] = False, folder: Folder = None
) -> None:
    """Stop the controller and start it again; jobs go on meanwhile."""
    found(folder).restart_controller(kill=kill)
