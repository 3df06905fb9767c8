"""Ask a command on a cluster, and read its answer: one object of JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.cli.on_cluster.on_cluster import Forwarded, call
from paceline.contract.files.foreign_records import parse_object
from paceline.errors import EnvironmentProblem, PacelineError, UsageError

if TYPE_CHECKING:
    from paceline.ssh.connection import Connection

USAGE = 2  # exit code


def ask(asked: Forwarded, line: list[str]) -> tuple[Connection, Mapping[str, Any]]:
    """Run a command on the cluster that `--on` names; return its answer. Raises what it complains of."""
    connection, answer = call(Forwarded(asked.names, asked.key, line, asked.values))
    if answer.code == 0:
        try:
            return connection, parse_object(answer.output)
        except ValueError:
            raise connection.unclear() from None
    raise read_error(answer.errors, answer.code, asked.names[0])


def read_error(errors: str, code: int, cluster: str) -> PacelineError:
    """Return the error that a command printed."""
    _, _, text = errors.rpartition("paceline: error: ")
    message, *hints = text.strip().splitlines() or [f"The command ended with exit code {code}."]
    kind = UsageError if code == USAGE else EnvironmentProblem
    return kind(f"{cluster}: {message}", hint=" ".join(each.strip() for each in hints))
