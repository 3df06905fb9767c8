"""From a Job to the launch spec that its agents carry out, and to its record in `run.json`."""

from __future__ import annotations

import getpass
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paceline
from paceline.contract import env
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.redaction import redact, redact_args, redact_text, redact_values
from paceline.spec.job import Job
from paceline.spec.run_path import RunPath
from paceline.staging.request import StagingRequest, make_request

LOCAL, SLURM = "local", "slurm"  # backends

# The runtime's settings, and the keys that set them.
RUNTIME_KEYS = {
    "backend": "runtime.backend",
    "cpu": "runtime.cpu",
    "precision": "runtime.precision",
    "seed": "runtime.seed",
    "deterministic": "runtime.deterministic",
    "max_steps": "runtime.max_steps",
    "timeout": "runtime.timeout",
    "on_nonfinite": "runtime.on_nonfinite",
    "replica_check": "runtime.replica_check",
    "start_from": "runtime.start_from",
    "start_continue": "runtime.start_continue",
    "start_strict": "runtime.start_strict",
    "save_every_steps": "checkpoint.every_steps",
    "save_every_seconds": "checkpoint.every_seconds",
    "keep_last": "checkpoint.keep_last",
    "keep_every": "checkpoint.keep_every",
    "debug": "launch.debug",
}


@dataclass(frozen=True)
class RankCounts:
    """The numbers of nodes and ranks, and what each rank gets."""

    nodes: int
    nproc: int  # ranks per node
    gpus: int  # GPUs per node
    threads: int  # per rank

    @property
    def world_size(self) -> int:
        return self.nodes * self.nproc

    def __str__(self) -> str:
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        where = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{ranks}{where}, {self.threads} thread{'s' if self.threads > 1 else ''} each"


def runtime_settings(job: Job) -> dict[str, Any]:
    """Return the settings of `paceline.session` that are set."""
    settings = {}
    for name, key in RUNTIME_KEYS.items():
        table, field = key.split(".")
        values = getattr(job.tables, table)
        value = getattr(values, field)
        if value is not None and value != type(values).model_fields[field].default:
            settings[name] = value
    return settings


def data_settings(job: Job) -> dict[str, Any]:
    """Return `[data]` as agents read it; empty if nothing is staged or collected."""
    data = job.tables.data
    if not data.stage and not data.collect:
        return {}
    limit = job.site.limits.stage_size
    return {
        "stage": list(data.stage),
        "collect": list(data.collect),
        "keep": data.keep or 0,
        "folder": data.folder or "",
        **({"limit": limit * 2**20} if limit else {}),
    }


def staging_request(job: Job, *, scratch: Path, environ: Mapping[str, str]) -> StagingRequest:
    """Return the request as the agents of a job would read it."""
    return make_request(data_settings(job), base=scratch / job.project_name, environ=environ)


def make_launch_spec(
    job: Job,
    *,
    run_path: RunPath,
    rank_counts: RankCounts,
    python: str,
    style: str | None = None,
    path_in_job: Callable[[Path], Path] = lambda path: path,
    variables: dict[str, str] | None = None,
    max_restarts: int = 0,
) -> LaunchSpec:
    """Return the launch spec. `path_in_job` maps a path of the project to where the ranks find
    it.
    """
    script = job.cwd / job.program.name
    # By way of all tables, which pydantic has prepared already: for this one alone it would look
    # for plugins.
    tracking = job.tables.model_dump(mode="json", exclude_defaults=True, include={"tracking"})
    is_module = job.program.is_module
    notify, notified = job.tables.notify, dict[str, Any]()
    if notify.command or notify.webhook:
        notified = {
            "command": notify.command or "",
            "webhook": notify.webhook or "",
            "on": list(notify.on),
            "stalled_after": notify.stalled_after,
        }
    return LaunchSpec(
        run_id=run_path.run_id,
        program=job.program.name if is_module else str(path_in_job(script)),
        args=list(job.program.args),
        is_module=is_module,
        import_path=[str(path_in_job(job.cwd))] if is_module else [],
        cwd=str(job.cwd if job.project.workdir == "project" else path_in_job(job.cwd)),
        python=python,
        style=style or job.launch.style,
        nodes=rank_counts.nodes,
        nproc=rank_counts.nproc,
        gpus=rank_counts.gpus,
        one_gpu_per_rank=job.launch.gpu_binding == "one",
        preload=list(job.launch.preload),
        variables=dict(job.environment.variables) if variables is None else variables,
        setup=list(job.environment.setup),
        threads=rank_counts.threads,
        tee=job.launch.tee,
        project=run_path.project,
        experiment=run_path.experiment,
        scratch=str(run_path.scratch),
        source=str(path_in_job(job.folder)),
        params=job.tables.params,
        runtime=runtime_settings(job),
        max_restarts=max_restarts,
        join_timeout=float(job.resume.join_timeout or 0),
        hang_timeout=float(job.resume.hang_timeout or 0),
        requeue=bool(job.resume.requeue),
        requeue_always=job.resume.requeue == "always",
        requeues_per_day=job.resume.requeues_per_day,
        exit_timeout=float(job.resume.exit_timeout),
        stop_timeout=float(job.grace),
        stop_signal=job.resume.stop_signal or "",
        saved_exit_code=job.resume.saved_exit_code,
        fixed_nodes=job.resources.nodelist is not None,
        check=job.launch.check,
        fitness=job.launch.fitness,
        data=data_settings(job),
        system_metrics=float(job.runtime.system_metrics),
        tracking=tracking.get("tracking", {}),
        notify=notified,
    )


# -- run.json
# ----------------------------------------------------------------------------------------


def run_record(
    job: Job,
    *,
    run_path: RunPath,
    launch_spec: LaunchSpec,
    command: Sequence[str],
    backend: str,
    code: Mapping[str, Any],
    before: Mapping[str, Any] | None = None,
) -> str:
    """Return the text of run.json: where and by whom the run was started, the resolved settings,
    the code and the command line, for people and for `paceline ps`.

    `code` identifies the code; `before` is the record so far of a run that goes on.
    """
    spec = job.tables.model_dump(mode="json", exclude_none=True)
    spec["environment"]["variables"] = {
        name: redact(name, value) for name, value in job.environment.variables.items()
    }
    if job.environment.setup:
        spec["environment"]["setup"] = [redact_text(line) for line in job.environment.setup]
    if job.resources.extra:
        spec["job"]["extra"] = [redact_text(argument) for argument in job.resources.extra]
    spec["params"] = redact_values(job.tables.params)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no account
        user = str(os.getuid())
    now = time.time()
    value = {
        "run_id": run_path.run_id,
        "project": run_path.project,
        "experiment": run_path.experiment,
        "name": job.resources.name or "",
        "created": now,
        "started": now,
        "program": job.program.name,
        "is_module": job.program.is_module,
        "args": redact_args(job.program.args),
        "command": redact_args(command),
        "cwd": str(job.cwd),
        "file": str(job.file) if job.file else None,
        "profile": job.profile,
        "nodes": launch_spec.nodes,
        "nproc": launch_spec.nproc,
        "world_size": launch_spec.world_size,
        "host": socket.gethostname(),
        "user": user,
        "python": sys.executable,
        "python_version": platform.python_version(),
        "paceline_version": paceline.__version__,
        "backend": backend,
        "style": launch_spec.style,
        "code": dict(code),
        "spec": spec,
    }
    kept = ["created", "sweep", "trial"]
    if backend == SLURM:
        value["slurm_conf"] = os.environ.get("SLURM_CONF", "")  # for shells that lack it
    else:  # a job that goes on here can go back into the queue as it was
        kept += ["backend", "slurm_conf"]
    if request := os.environ.get(env.REQUEST):
        value["request"] = request
    if before is not None:
        value |= {key: before[key] for key in kept if key in before}
        known = before.get("earlier")
        last = {
            key: before[key] for key in ("started", "command", "program", "args") if key in before
        }
        # what each start of the run has run so far, oldest first
        value["earlier"] = [*(known if isinstance(known, list) else ()), last]
    return json.dumps(value, indent=1) + "\n"
