"""The zygote that a run on this machine starts with, and the warm processes that stay for the next
run.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from paceline.agent.workers.warm import ask_all, reason_to_start_cold
from paceline.agent.workers.zygote import prestart
from paceline.agent.workers.zygote.start import FORKING_STYLES, ZygoteOptions
from paceline.contract.launch_spec import LaunchSpec
from paceline.launch.local_plan import LocalPlan


def find_zygote(plan: LocalPlan, *, warm: int) -> tuple[prestart.Prestarted | None, list[str]]:
    """Return the run's zygote, or None if its agent is to start one; and notes for the user.

    `warm` is for how many seconds a warm process stays; 0 for none.
    """
    spec = plan.launch_spec
    notes = describe_cold(spec, warm=warm)
    warm = 0 if notes else warm
    started = prestart.prestarted
    if started is not None and (
        started.options.warm != warm or (warm and not _fits(started, spec))
    ):
        started.discard()
        started = None
    if started is None and warm:
        started = _start(spec, warm)
    if started is not None and started.replaced:
        notes.append(f"starting cold, because {started.replaced}")
    return started, notes


def describe_cold(spec: LaunchSpec, *, warm: int) -> list[str]:
    """Return a note for the user if a run cannot have the warm process that it asks for."""
    cold = _why_cold(spec) if warm else None
    return [f"starting cold, because {cold}: --warm has no effect"] if cold else []


def _why_cold(spec: LaunchSpec) -> str | None:
    if spec.style not in FORKING_STYLES:
        return f"the {spec.style} style does not fork ranks"
    if spec.nodes > 1:
        return "each simulated node imports torch itself"
    return reason_to_start_cold(os.environ)


def _fits(started: prestart.Prestarted, spec: LaunchSpec) -> bool:
    """Whether the agent will accept the zygote that was started before the options were parsed."""
    from paceline.agent.workers.forked_ranks import zygote_options

    options = zygote_options(spec, os.environ)
    variables = _variables(spec, options)
    return (
        started.python == spec.python
        and (started.options.threads, started.options.preload) == (options.threads, options.preload)
        and all(started.environ.get(name) == value for name, value in variables.items())
    )


def _start(spec: LaunchSpec, warm: int) -> prestart.Prestarted | None:
    from paceline.agent.workers.forked_ranks import zygote_options

    options = zygote_options(spec, os.environ, warm=warm)
    try:
        environ = {**os.environ, **_variables(spec, options)}
        return prestart.Prestarted(spec.python, options, environ)
    except OSError:  # the agent will try it again, and say what is wrong
        return None


def _variables(spec: LaunchSpec, options: ZygoteOptions) -> dict[str, str]:
    from paceline.agent.workers.zygote.start import import_variables

    return import_variables(spec.variables, only_known=not options.preload)


def read_status() -> list[dict[str, Any]]:
    """Return the status of each warm process of this user."""
    return ask_all("status")


def stop(pids: Collection[int] | None = None) -> list[dict[str, Any]]:
    """End these warm processes of this user, or all, and return their last status. Running runs go
    on.
    """
    return ask_all("stop", pids)
