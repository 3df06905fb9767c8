"""W&B's service as a submission needs it: whether it can be reached from here, and a new sweep of it."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.contract import wandb_server
from paceline.errors import EnvironmentProblem, UsageError

ELSE = 'or let Paceline search, which needs no service: sampler = "tpe" in a sweep.toml'


def check_reachable(environ: Mapping[str, str]) -> None:
    """Refuse before anything is queued: agents with no network would wait in vain, one after the other."""
    url = wandb_server.base_url(environ)
    if environ.get("WANDB_MODE") in ("offline", "disabled"):
        raise EnvironmentProblem(
            f"points of a W&B sweep come from {url}, and WANDB_MODE is {environ['WANDB_MODE']!r}",
            hint=f"unset WANDB_MODE, {ELSE}",
        )
    if problem := wandb_server.unreachable(environ):
        raise EnvironmentProblem(
            f"points of a W&B sweep come from {url}: {problem}",
            hint=f"type this where there is a network, set WANDB_BASE_URL or https_proxy, {ELSE}",
        )
    if problem := wandb_server.missing_key(environ):
        raise EnvironmentProblem(
            f"points of a W&B sweep come from {url}: {problem}", hint=wandb_server.KEY_HINT
        )


def check_name(sweep: str) -> None:
    """A sweep's id, alone or with its project and entity."""
    if not re.fullmatch(r"([^/\s]+/){0,2}[^/\s]+", sweep):
        raise UsageError(
            f"a W&B sweep is named {sweep!r}", hint="write ENTITY/PROJECT/ID, as the sweep's page shows them"
        )


def create_sweep(config: dict[str, Any], secrets: Mapping[str, str]) -> str:
    """A new sweep of the service; its ENTITY/PROJECT/ID as far as the file says them."""
    try:
        import wandb
    except ImportError:
        raise EnvironmentProblem(
            "a W&B sweep needs wandb, which is not installed here",
            hint='install it: pip install "paceline[wandb]"',
        ) from None
    entity = config.get("entity") or os.environ.get("WANDB_ENTITY")
    project = config.get("project") or os.environ.get("WANDB_PROJECT")
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), _set(secrets):
            made = wandb.sweep(config, entity=entity, project=project)
    except Exception as problem:  # its errors have no common root that is public
        words = next((line for line in str(problem).splitlines() if line.strip()), type(problem).__name__)
        raise EnvironmentProblem(
            f"W&B made no sweep: {words}", hint="is WANDB_API_KEY set, or has `wandb login` been typed here?"
        ) from None
    return "/".join(part for part in (entity if project else None, project, str(made)) if part)


@contextlib.contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    """wandb is told its key by the environment only, unless it may write it down at home."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in variables.items() if name.startswith("WANDB_")})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
