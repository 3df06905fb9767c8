"""W&B's service as a submission needs it: whether it can be reached from here, and a new sweep of it."""

from __future__ import annotations

import configparser
import contextlib
import io
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from paceline.errors import EnvironmentProblem, UsageError

USUAL = "https://api.wandb.ai"
PATIENCE = 3.0  # seconds for a connection


def base_url(environ: Mapping[str, str]) -> str:
    """Where the service is: as $WANDB_BASE_URL or wandb's own settings say."""
    if environ.get("WANDB_BASE_URL"):
        return environ["WANDB_BASE_URL"]
    home = environ.get("WANDB_CONFIG_DIR") or str(Path(environ.get("HOME", "/")) / ".config" / "wandb")
    settings = configparser.ConfigParser(interpolation=None)
    with contextlib.suppress(OSError, configparser.Error):
        settings.read(Path(home) / "settings", encoding="utf-8")
    return settings.get("default", "base_url", fallback=USUAL)


def check_reachable(environ: Mapping[str, str]) -> None:
    """Refuse before anything is queued: agents with no network would wait in vain, one after the other."""
    url = base_url(environ)
    if environ.get("WANDB_MODE") in ("offline", "disabled"):
        raise EnvironmentProblem(
            f"points of a W&B sweep come from {url}, and WANDB_MODE is {environ['WANDB_MODE']!r}",
            hint='unset WANDB_MODE, or let Paceline search: sampler = "tpe" in a sweep.toml',
        )
    through = _proxy(url, environ) or url
    parts = urlsplit(through if "://" in through else f"http://{through}")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=PATIENCE).close()
    except OSError as problem:
        way = f" through {parts.hostname}:{port}" if through != url else ""
        raise EnvironmentProblem(
            f"{url} cannot be reached from here{way}: {problem.strerror or problem}",
            hint="agents need the network to ask for points: type this where there is one, set WANDB_BASE_URL or "
            'HTTPS_PROXY, or let Paceline search without: sampler = "tpe" in a sweep.toml',
        ) from None


def _proxy(url: str, environ: Mapping[str, str]) -> str | None:
    parts = urlsplit(url)
    if any(
        parts.hostname == host or (parts.hostname or "").endswith(f".{host.lstrip('.')}")
        for host in _direct(environ)
    ):
        return None
    name = f"{parts.scheme}_proxy"
    return environ.get(name.upper()) or environ.get(name) or None


def _direct(environ: Mapping[str, str]) -> list[str]:
    told = environ.get("NO_PROXY") or environ.get("no_proxy") or ""
    return [host.strip() for host in told.split(",") if host.strip()]


def check_name(sweep: str, said: str) -> str:
    """A sweep's id, alone or with its project and entity."""
    if not re.fullmatch(r"([^/\s]+/){0,2}[^/\s]+", sweep):
        raise UsageError(
            f"{said} is {sweep!r}", hint="write ENTITY/PROJECT/ID, as the sweep's page shows them"
        )
    return sweep


def create_sweep(config: dict[str, Any]) -> str:
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
        with contextlib.redirect_stdout(said):
            made = wandb.sweep(config, entity=entity, project=project)
    except Exception as problem:  # its errors have no common root that is public
        words = next((line for line in str(problem).splitlines() if line.strip()), type(problem).__name__)
        raise EnvironmentProblem(
            f"W&B made no sweep: {words}", hint="is WANDB_API_KEY set, or has `wandb login` been typed here?"
        ) from None
    return "/".join(part for part in (entity if project else None, project, str(made)) if part)
