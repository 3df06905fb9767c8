"""What to type instead on a machine without Slurm, such as a laptop: the cluster is behind a login node."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from paceline.cli.on_cluster.misplaced_on import insert_on, takes_on
from paceline.contract.env import ON_CLUSTER
from paceline.contract.quote import quote
from paceline.errors import NoSlurm, PacelineError


def point_to_cluster(problem: NoSlurm, words: Sequence[str], module: str) -> NoSlurm:
    """Return the error with a hint how to reach a cluster; `words` are the command that was typed."""
    if on := os.environ.get(ON_CLUSTER):
        return NoSlurm(
            problem.message,
            hint=f"If /etc/profile on {on} does not set up Slurm, load it in [profiles.{quote(on)}], for example with"
            f' setup = "module load slurm".',
        )
    if not takes_on(module):
        return problem
    names: list[str] = []
    with suppress(PacelineError, OSError):  # what is wrong there is no part of this error
        from paceline.spec.clusters import ProjectFile

        names = sorted(ProjectFile.find(Path.cwd()).clusters())
    if names:
        others = f" (you have {', '.join(names)})" if len(names) > 1 else ""
        hint = f"To use your cluster over SSH, type: {insert_on(words, module, names[0])}{others}"
    else:
        hint = (
            "From a laptop, write the login node of your cluster into paceline.toml:\n"
            '    [profiles.alps]\n    host = "login.example.org"\n'
            f'  and type: {insert_on(words, module, "alps")} (more in the documentation: "From your laptop")'
        )
    otherwise = f"Otherwise, {problem.hint[:1].lower()}{problem.hint[1:]}" if problem.hint else ""
    return NoSlurm(problem.message, hint=f"{hint}\n  {otherwise}".rstrip(), earlier=problem.earlier)
