"""A command with `--on` runs on the login node as it was typed, and prints here.

`forward` carries it out; `call` and `ask` return what it wrote. What goes along is in `cluster_request`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.cli import console
from paceline.cli.cluster_request import make_request
from paceline.cli.forwarding import ALL, Forwarded, find_project
from paceline.contract import env
from paceline.contract.foreign_records import parse_object
from paceline.contract.verdict import USAGE_EXIT
from paceline.errors import EnvironmentProblem, NoSlurm, PacelineError, UsageError
from paceline.spec.clusters import explain_table, suggest_clusters
from paceline.spec.shell_text import quote
from paceline.ssh import remote_command
from paceline.ssh.connection import Answer, Connection


def forward(asked: Forwarded) -> int:
    """Carry out a command on a cluster and return its exit code."""
    if asked.has_several:
        return forward_to_each(asked, forward)
    script = str(asked.values.get("script_only") or "/")
    if not script.startswith("/"):  # nobody looks into the copy of the project there
        raise UsageError(
            f"{script} would be written on {asked.names[0]}, not here.",
            hint=f"Give it a full path on the cluster, e.g. /scratch/me/{Path(script).name}",
        )
    connection, command = make_request(asked, find_project(asked))
    submits = asked.key == "submit" and not asked.values.get("dry_run") and script == "/"
    carry_out = remote_command.submit if submits else remote_command.carry_out
    return carry_out(connection, command)


def forward_to_each(asked: Forwarded, carry_out: Callable[[Forwarded], int]) -> int:
    """List the runs of several clusters, one after the other. One that cannot be reached does not hide the others."""
    names, codes = cluster_names(asked), [0]
    if asked.key != "ps" or asked.values.get("json"):
        hint = f"Run it once for each of {', '.join(names)}."
        if asked.key == "submit":
            hint = "Add --first to train on the cluster that starts first, or submit to each."
        raise UsageError("This takes one cluster.", hint=hint)
    for name in names:
        print(f"{console.printable(name)}:", flush=True)
        try:
            codes.append(carry_out(Forwarded([name], asked.key, asked.line, asked.values)))
        except PacelineError as problem:
            console.say_error(problem)
            codes.append(problem.exit_code)
    return max(codes)


def cluster_names(asked: Forwarded) -> Sequence[str]:
    if asked.names[0] != ALL:
        return asked.names
    project = find_project(asked)
    if not (names := sorted(project.clusters())):
        raise UsageError("No cluster is configured.", hint=explain_table(project))
    return names


def call(asked: Forwarded) -> tuple[Connection, Answer]:
    """Run a command on the cluster that `--on` names; return what it wrote. Raises what it complains of."""
    if asked.has_several:
        raise UsageError(
            "This takes one cluster.", hint=f"Run it once for each of {', '.join(asked.names)}."
        )
    connection, command = make_request(asked, find_project(asked))
    answer = remote_command.capture(connection, command)
    if answer.code != 0:
        raise read_error(answer.errors, answer.code, asked.names[0])
    return connection, answer


def ask(asked: Forwarded, line: list[str]) -> tuple[Connection, Mapping[str, Any]]:
    """Do the same with a command whose answer is JSON."""
    connection, answer = call(Forwarded(asked.names, asked.key, line, asked.values))
    try:
        return connection, parse_object(answer.output)
    except ValueError:
        raise connection.unclear() from None


def read_error(errors: str, code: int, cluster: str) -> PacelineError:
    """Return the error that a command printed."""
    _, _, text = errors.rpartition("paceline: error: ")
    message, *hints = text.strip().splitlines() or [f"The command ended with exit code {code}."]
    kind = UsageError if code == USAGE_EXIT else EnvironmentProblem
    return kind(f"{cluster}: {message}", hint=" ".join(each.strip() for each in hints))


def point_to_cluster(problem: NoSlurm, command: str) -> NoSlurm:
    """Return the error with a hint how to reach a cluster, whose login node has Slurm."""
    if on := os.environ.get(env.ON_CLUSTER):
        hint = (
            f"If /etc/profile on {on} does not set up Slurm, load it in [profiles.{quote(on)}],"
            ' for example with setup = "module load slurm".'
        )
        return NoSlurm(problem.message, hint=hint)
    hint = suggest_clusters("jobs") or (
        "From a laptop, write the login node of your cluster into paceline.toml:\n"
        '    [profiles.alps]\n    host = "login.example.org"\n'
        f"  and type: paceline {command} --on alps ..."
    )
    otherwise = f"Otherwise, {problem.hint[:1].lower()}{problem.hint[1:]}" if problem.hint else ""
    return NoSlurm(problem.message, hint=f"{hint}\n  {otherwise}".rstrip(), earlier=problem.earlier)
