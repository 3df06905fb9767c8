"""`run.json`: the resolved spec, the identity of the code and the command line, for people and for `paceline ps`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.contract.redaction import redact, redact_args, redact_text, redact_values
from paceline.plan.run_path import RunPath
from paceline.plan.shape import Shape
from paceline.spec import Job


def run_record(
    job: Job,
    *,
    run_path: RunPath,
    shape: Shape,
    command: Sequence[str],
    created: float,
    facts: Mapping[str, Any],
    code: Mapping[str, Any],
) -> str:
    """Return the text of run.json. `facts` has host, user, python and version; `code` identifies the code."""
    spec = job.tables.model_dump(mode="json", exclude_none=True)
    spec["environment"]["variables"] = {name: redact(name, value) for name, value in job.environment.variables.items()}
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
        "created": created,
        "program": job.program.name,
        "is_module": job.program.is_module,
        "args": redact_args(job.program.args),
        "command": redact_args(command),
        "cwd": str(job.cwd),
        "file": str(job.file) if job.file else None,
        "profile": job.profile,
        "nodes": shape.nodes,
        "nproc": shape.nproc,
        "world_size": shape.world_size,
        **facts,
        "code": dict(code),
        "spec": spec,
    }
    return json.dumps(value, indent=1) + "\n"
