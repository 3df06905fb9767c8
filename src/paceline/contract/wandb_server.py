"""Check within seconds whether W&B's server is reachable: compute nodes often have no internet.

Standard library only; wandb is not imported. An explicit `WANDB_MODE` is taken as it is.
"""

from __future__ import annotations

import configparser
import netrc
import os
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

PUBLIC = "https://api.wandb.ai"
CONNECT_TIMEOUT, TIMEOUT = 2.0, 3.0  # seconds: to connect, and in all, with name resolution
ONLINE, OFFLINE = "online", "offline"
KEY_HINT = "Set WANDB_API_KEY, or run `wandb login`."


def choose_mode(environ: Mapping[str, str], requested: str | None) -> tuple[str, str]:
    """Return the mode for `wandb.init`, and why it is offline."""
    mode = environ.get("WANDB_MODE") or requested
    if mode:
        return mode, ""
    problem = missing_key(environ) or unreachable(environ)
    return (OFFLINE, problem) if problem else (ONLINE, "")


def base_url(environ: Mapping[str, str]) -> str:
    """Return the server's address: from the environment, from `wandb login --host`, or the public
    one.
    """
    if environ.get("WANDB_BASE_URL"):
        return environ["WANDB_BASE_URL"]
    folder = environ.get("WANDB_CONFIG_DIR") or os.path.join(_home(environ), ".config", "wandb")
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(os.path.join(folder, "settings"), encoding="utf-8")
        return parser.get("default", "base_url", fallback=PUBLIC)
    except (OSError, configparser.Error, UnicodeDecodeError):
        return PUBLIC


def missing_key(environ: Mapping[str, str]) -> str:
    """Return why there is no key; empty if there is one."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return ""
    host = urlsplit(base_url(environ)).netloc
    home = Path(_home(environ))
    for path in filter(None, (environ.get("NETRC"), home / ".netrc", home / "_netrc")):
        try:
            if netrc.netrc(str(path)).authenticators(host):
                return ""
        except (OSError, netrc.NetrcParseError):
            continue
    return f"there is no API key for {host}"


def unreachable(environ: Mapping[str, str]) -> str:
    """Return why the server (or its proxy) is unreachable; empty if it accepts connections."""
    url = urlsplit(base_url(environ))
    proxy = _proxy(environ, url.scheme, url.hostname or "")
    target = urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy else url
    host, port = target.hostname or "", target.port or (443 if target.scheme == "https" else 80)
    answer: list[str] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=CONNECT_TIMEOUT).close()
            answer.append("")
        except OSError as error:
            answer.append(f"{host}:{port} cannot be reached ({error.strerror or error})")

    # In a thread: name resolution has no time limit, and takes minutes if name servers don't
    # answer.
    thread = threading.Thread(target=connect, name="paceline-connect", daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    return answer[0] if answer else f"{host}:{port} did not respond within {TIMEOUT:.0f} s"


def _proxy(environ: Mapping[str, str], scheme: str, host: str) -> str:
    without = [
        each.strip().lstrip(".") for each in _either(environ, "no_proxy").split(",") if each.strip()
    ]
    if "*" in without or any(host == each or host.endswith(f".{each}") for each in without):
        return ""
    return _either(environ, f"{scheme}_proxy") or _either(environ, "all_proxy")


def _either(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name) or environ.get(name.upper()) or ""


def _home(environ: Mapping[str, str]) -> str:
    return environ.get("HOME") or os.path.expanduser("~")
