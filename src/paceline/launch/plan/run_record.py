"""`run.json`: the resolved spec, the identity of the code and the command line, for people and for
`paceline ps`.

For a resumed run, it holds the newest command and what the run executes now; `earlier` lists its
previous starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.redaction import redact, redact_args, redact_text, redact_values
from paceline.contract.run_path import RunPath
from paceline.launch.plan.rank_counts import RankCounts
from paceline.spec import Job


def run_record(
    job: Job,
    *,
    run_path: RunPath,
    rank_counts: RankCounts,
    command: Sequence[str],
    time: float,
    facts: Mapping[str, Any],
    code: Mapping[str, Any],
    before: Mapping[str, Any] | None = None,
) -> str:
    """Return the text of run.json. `facts` has host, user, python and version; `code` identifies
    the code.

    `before` is the record so far of a run that goes on.
    """
    spec = job.tables.model_dump(mode="json", exclude_none=True)
    spec["environment"]["variables"] = {
        name: redact(name, value) for name, value in job.environment.variables.items()
    }
    if job.environment.setup:
        spec["environment"]["setup"] = [redact_text(line) for line in job.environment.setup]
    if job.resources.extra:
        spec["job"]["extra"] = [redact_text(argument) for argument in job.resources.extra]
    spec["params"] = redact_values(job.params)
    value = {
        "run_id": run_path.run_id,
        "project": run_path.project,
        "experiment": run_path.experiment,
        "name": job.resources.name or "",
        "created": time if before is None else before.get("created", time),
        "started": time,
        "program": job.program.name,
        "is_module": job.program.is_module,
        "args": redact_args(job.program.args),
        "command": redact_args(command),
        "cwd": str(job.cwd),
        "file": str(job.file) if job.file else None,
        "profile": job.profile,
        "nodes": rank_counts.nodes,
        "nproc": rank_counts.nproc,
        "world_size": rank_counts.world_size,
        **facts,
        "code": dict(code),
        "spec": spec,
    }
    if before is not None:
        value["earlier"] = _earlier(before)
    return json.dumps(value, indent=1) + "\n"


def resumed_record(
    before: Mapping[str, Any],
    job: Job,
    launch_spec: LaunchSpec,
    *,
    command: Sequence[str],
    time: float,
    new_program: bool,
) -> str:
    """Return the text of run.json of a run that goes on here, with the settings that it has and
    what was typed.
    """
    value = {
        **before,
        "started": time,
        "command": redact_args(command),
        "nodes": launch_spec.nodes,
        "nproc": launch_spec.nproc,
        "world_size": launch_spec.nodes * launch_spec.nproc,
        "style": launch_spec.style,
        "earlier": _earlier(before),
    }
    if job.is_typed("job.name"):
        value["name"] = job.resources.name or ""
    if new_program:
        program = job.program
        value |= {
            "program": program.name,
            "is_module": program.is_module,
            "args": redact_args(program.args),
        }
        value["cwd"] = str(job.cwd)
    return json.dumps(value, indent=1) + "\n"


def _earlier(record: Mapping[str, Any]) -> list[Any]:
    """Return what each start of a run has run so far, oldest first."""
    known = record.get("earlier")
    last = {key: record[key] for key in ("started", "command", "program", "args") if key in record}
    return [*(known if isinstance(known, list) else ()), last]
