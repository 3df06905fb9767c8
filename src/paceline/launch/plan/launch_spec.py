"""From a Job to the launch spec that its agents carry out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_path import RunPath
from paceline.launch.plan.rank_counts import RankCounts
from paceline.spec import Job

# The runtime's settings, and the keys that set them.
RUNTIME_KEYS = {
    "backend": "runtime.backend",
    "cpu": "runtime.cpu",
    "precision": "runtime.precision",
    "seed": "runtime.seed",
    "deterministic": "runtime.deterministic",
    "profile": "runtime.profile",
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

# Fields of a launch spec, and the keys that set them: a resumed run keeps what was not typed again.
_SET_BY = {
    "style": ("launch.style",),
    "nodes": ("job.nodes",),
    "nproc": ("launch.nproc",),
    "gpus": ("launch.nproc", "runtime.cpu", "job.gpus_per_node"),
    "one_gpu_per_rank": ("launch.gpu_binding",),
    "preload": ("launch.preload",),
    "tee": ("launch.tee",),
    "max_restarts": ("resume.max_attempts",),
    "hang_timeout": ("resume.hang_timeout",),
    "requeue": ("resume.requeue",),
    "requeue_always": ("resume.requeue",),
    "requeues_per_day": ("resume.requeues_per_day",),
    "exit_timeout": ("resume.exit_timeout",),
    "stop_timeout": ("resume.grace",),
    "stop_signal": ("resume.stop_signal",),
    "saved_exit_code": ("resume.saved_exit_code",),
    "fixed_nodes": ("job.nodelist",),
    "fitness": ("launch.fitness",),
    "threads": ("launch.nproc", "job.nodes"),
    "data": ("data.stage",),
    "notify": ("notify.command", "notify.webhook", "notify.on", "notify.stalled_after"),
}


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
    data = job.data
    if not data.stage and not data.collect:
        return {}
    limit = job.site.limits.stage_size
    return {
        "stage": list(data.stage),
        "collect": list(data.collect),
        "keep": data.keep or 0,
        "verify": data.verify,
        "folder": data.folder or "",
        **({"limit": limit * 2**20} if limit else {}),
    }


def tracking_settings(job: Job) -> dict[str, Any]:
    """Return `[tracking]` as ranks read it: the keys that are set."""
    # By way of all tables, which pydantic has prepared already: for this one alone it would look
    # for plugins.
    settings = job.tables.model_dump(mode="json", exclude_defaults=True, include={"tracking"})
    tracking: dict[str, Any] = settings.get("tracking", {})
    return tracking


def notify_settings(job: Job) -> dict[str, Any]:
    """Return `[notify]` as the head agent reads it; empty if nobody is to be told."""
    notify = job.notify
    if not notify.command and not notify.webhook:
        return {}
    return {
        "command": notify.command or "",
        "webhook": notify.webhook or "",
        "on": list(notify.on),
        "stalled_after": notify.stalled_after,
    }


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
    is_module = job.program.is_module
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
        threads=rank_counts.threads,
        tee=job.launch.tee,
        project=run_path.project,
        experiment=run_path.experiment,
        scratch=str(run_path.scratch),
        source=str(path_in_job(job.folder)),
        params=job.params,
        runtime=runtime_settings(job),
        max_restarts=max_restarts,
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
        tracking=tracking_settings(job),
        notify=notify_settings(job),
    )


def carry_over(old: LaunchSpec, new: LaunchSpec, job: Job) -> LaunchSpec:
    """Return the launch spec of a resumed run: the old one, with what was typed this time."""
    typed = {key for key, source in job.sources.items() if source.startswith("--")}
    changes: dict[str, Any] = {
        name: getattr(new, name) for name, keys in _SET_BY.items() if typed.intersection(keys)
    }
    runtime = dict(old.runtime)
    for name, key in RUNTIME_KEYS.items():
        if key in typed:
            runtime.pop(name, None)
            if name in new.runtime:
                runtime[name] = new.runtime[name]
    tracking = dict(old.tracking)
    for name in type(job.tracking).model_fields:
        if f"tracking.{name}" in typed:
            tracking[name] = getattr(job.tracking, name)
    params = (
        _merge(old.params, new.params)
        if any(key.startswith("params.") for key in typed)
        else old.params
    )
    variables = (
        {**old.variables, **new.variables} if "environment.variables" in typed else old.variables
    )
    return replace(
        old, **changes, runtime=runtime, tracking=tracking, params=params, variables=variables
    )


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = (
            _merge(old, value) if isinstance(value, dict) and isinstance(old, dict) else value
        )
    return merged
