"""`paceline clean`: files that runs have left on nodes, and secrets in the folders of runs that are over."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console, typer_options
from paceline.cli.ended_secrets import EndedSecrets, find_ended_secrets
from paceline.cli.json_output import print_json
from paceline.errors import UsageError
from paceline.launch.local.staging import Leftover, data_folders, find_leftovers, staging_request
from paceline.launch.run_folder import resolve_scratch
from paceline.slurm.node_command import run_on_node
from paceline.spec import Program, load_job


def command(
    *,
    node: Annotated[
        list[str] | None,
        typer.Option("--node", metavar="NAME", help="Clean this node instead; repeatable."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", help="The node's data folder [default: from paceline.toml]."),
    ] = None,
    cached: Annotated[
        bool,
        typer.Option(
            "--cached", help="Also remove data cached for later jobs, unless it is in use."
        ),
    ] = False,
    yes: typer_options.Yes = False,
    as_json: typer_options.AsJson = False,
) -> int:
    """List and remove leftover files on a node's own disk, and secrets in the folders of runs that are over.

    \b
      paceline clean                       this machine: list, then ask
      paceline clean --node n1 --node n2   two nodes of the cluster: list
      paceline clean --node n1 --yes       remove
      paceline clean --json                list as JSON, and ask nothing

    Only your own files are removed, and only if their job or process is known to be over. Results listed in
    collect are copied back first. A run folder keeps its environment.sh without the values of secrets.
    """
    if node and as_json:
        raise UsageError(
            "--json cannot be combined with --node.",
            hint="Run `paceline clean --json` on the node.",
        )
    if node:
        return _clean_nodes(node, folder=folder, cached=cached, yes=yes)
    job = load_job(Program(""), cluster=typer_options.this_cluster())
    scratch = resolve_scratch(job, os.environ)
    request = staging_request(job, scratch=scratch, environ=os.environ)
    leftovers: list[Leftover | EndedSecrets] = [
        leftover
        for each in ([folder] if folder is not None else data_folders(request, os.environ))
        for leftover in find_leftovers(each, os.environ, all_cached=cached)
    ]
    # `--node` looks at the node's own disk alone
    if folder is None and "SLURM_JOB_ID" not in os.environ:
        leftovers += find_ended_secrets(scratch)
    if as_json:
        return _print_json(leftovers, yes=yes)
    if not leftovers:
        print("nothing to clean up")
        return 0
    for leftover in leftovers:
        print(f"{leftover.path}  ({leftover.reason})")
    if not yes and not (sys.stdin.isatty() and typer.confirm(f"Remove these {len(leftovers)}?")):
        console.say_note("nothing was removed; use --yes to remove them")
        return 0
    removed = sum(leftover.remove() for leftover in leftovers)
    print(f"removed {removed} of {len(leftovers)}")
    return 0 if removed == len(leftovers) else 1


def _print_json(leftovers: list[Leftover | EndedSecrets], *, yes: bool) -> int:
    listed = [
        {
            "path": str(each.path),
            "reason": each.reason,
            "removed": bool(each.remove()) if yes else False,
        }
        for each in leftovers
    ]
    print_json(leftovers=listed)
    return 1 if yes and not all(each["removed"] for each in listed) else 0


def _clean_nodes(nodes: list[str], *, folder: Path | None, cached: bool, yes: bool) -> int:
    args = ["clean", *(["--cached"] if cached else []), *(["--yes"] if yes else [])]
    if folder is not None:
        args += ["--folder", str(folder)]
    exit_code = 0
    for node in nodes:
        print(f"{node}:", flush=True)
        exit_code = max(exit_code, run_on_node(node, args))
    return exit_code
