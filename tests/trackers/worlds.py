"""What the tests of trackers share: an environment that is away from home and from the internet, and readers."""

from __future__ import annotations

from pathlib import Path

from tests.trackers.wandb_server import KEY, Service


def away(folder: Path) -> dict[str, str]:
    """No home, no key, and no service: wandb is left with this folder."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    return {
        "HOME": str(home), "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", "NETRC": str(home / "netrc"),
        "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_CACHE_DIR": str(home / "cache"),
    }  # fmt: skip


def reachable(service: Service, folder: Path) -> dict[str, str]:
    """The stand-in, and a key for it."""
    return {**away(folder), "WANDB_BASE_URL": service.url, "WANDB_API_KEY": KEY, "WANDB_DIR": str(folder)}


def impatient_agent() -> None:
    """wandb's agent asks every five seconds; a test has no time for that."""
    from wandb.agents.pyagent import Agent

    Agent.HEARTBEAT_SLEEP_SECONDS = 0.1
