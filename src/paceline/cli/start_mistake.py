"""What to type instead, for a run that failed because of how it was started."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from paceline.contract.quote import quote
from paceline.spec import Job
from paceline.spec.settings import options_of
from paceline.watch.failure import is_usage_error

OWN_FLAGS = ("--resume", "--dry-run", "--config")  # of `paceline run`, beside those of the table


def explain_mistake(failure: Mapping[str, Any], job: Job) -> str:
    """Return why the command line made the script fail, and what to type; empty if something else did."""
    program = job.program
    lacks = re.match(r"No module named '([^'.]+)", str(failure.get("message", "")))
    if failure.get("type") == "ModuleNotFoundError" and lacks:
        module = program.module_with(lacks[1], job.cwd)
        return (
            f"{lacks[1]} is in {job.cwd}: use `paceline run -m {module}`, which finds it"
            if module
            else ""
        )
    if not is_usage_error(failure):
        return ""
    flags = {flag for _, option in options_of("run") for flag in option.all_flags} | {*OWN_FLAGS}
    complained = re.split(r"""[\s:'"=]+""", str(failure.get("last_line", "")))
    typed = dict.fromkeys(arg.partition("=")[0] for arg in program.args)
    ours = [flag for flag in typed if flag in flags and flag in complained]
    if not ours:
        return ""
    example = f"paceline run {ours[0]} ..."
    return f"the script got {', '.join(ours)}: options of Paceline go before the script, as in `{example}`"


def resume_otherwise(run_id: str, job: Job) -> str:
    """Return how to go on with a run whose script has rejected its arguments."""
    program = f"{'-m ' if job.program.is_module else ''}{quote(job.program.name)}"
    return f"paceline run --resume {run_id} {program} ARGUMENTS"
