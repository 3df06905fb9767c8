"""`paceline clean`: what runs have left on nodes."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from paceline.agent.staging import cleanup
from paceline.agent.staging.cleanup import Leftover
from paceline.agent.staging.folders import choose_base
from paceline.cli import console
from paceline.cluster.checks.data import on_node, staging_request
from paceline.cluster.runs.folder import resolve_scratch
from paceline.errors import UsageError
from paceline.spec import Program, load_job


def command(
    *,
    node: Annotated[
        list[str] | None, typer.Option("--node", metavar="NAME", help="Look there instead (again for more).")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Where the node's data is; else as paceline.toml says.")
    ] = None,
    kept: Annotated[
        bool, typer.Option("--kept", help="Also what is kept for later jobs, if nobody uses it.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
) -> int:
    """Remove what runs have left on a node's own disk. Shows first what it would remove.

    \b
    paceline clean                       this machine: show, then ask
    paceline clean --node n1 --node n2   two nodes of the cluster: show
    paceline clean --node n1 --yes       remove

    Only what is yours goes, and only where its job or process is known to be over. Results that a run was to
    bring back are brought back first.
    """
    if node:
        return _elsewhere(node, folder=folder, kept=kept, yes=yes)
    found: list[Leftover] = []
    for base in [folder] if folder is not None else _bases():
        private = base / f"paceline-{os.geteuid()}"
        found += cleanup.find_leftovers(private, os.environ, every_kept=kept)
    if not found:
        print("nothing is left behind")
        return 0
    for each in found:
        print(f"{each.path}  ({each.why})")
    if not yes and not (sys.stdin.isatty() and typer.confirm(f"remove these {len(found)}?")):
        console.say_note("nothing was removed; --yes removes them")
        return 0
    removed = cleanup.remove(found)
    print(f"removed {len(removed)} of {len(found)}")
    return 0 if len(removed) == len(found) else 1


def _bases() -> list[Path]:
    """Where runs that were started from here put their data, on this machine."""
    job = load_job(Program(""))
    wish = staging_request(job, scratch=resolve_scratch(job, os.environ), environ=os.environ)
    places = [Path(os.environ.get("TMPDIR") or "/tmp"), Path("/tmp")]
    with suppress(UsageError):  # a folder whose name only a job knows
        places.insert(0, choose_base(wish, os.environ))
    return list(dict.fromkeys(places))


def _elsewhere(nodes: list[str], *, folder: Path | None, kept: bool, yes: bool) -> int:
    words = ["clean", *(["--kept"] if kept else []), *(["--yes"] if yes else [])]
    if folder is not None:
        words += ["--folder", str(folder)]
    worst = 0
    for each in nodes:
        print(f"{each}:", flush=True)
        worst = max(worst, on_node(each, words))
    return worst
