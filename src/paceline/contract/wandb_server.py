"""Whether W&B can be used from here, found out within seconds: compute nodes often have no internet.

Standard library only; no wandb is imported. What the user says (`WANDB_MODE`) is never doubted.
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
CONNECT, IN_ALL = 2.0, 3.0  # seconds: for one address, and with looking up its name
ONLINE, OFFLINE = "online", "offline"
KEY_HINT = "set WANDB_API_KEY, or type `wandb login`"


def choose_mode(environ: Mapping[str, str], asked: str | None) -> tuple[str, str]:
    """The mode for `wandb.init`, and why it is not the one that people hope for."""
    said = environ.get("WANDB_MODE") or asked
    if said:
        return said, ""
    problem = missing_key(environ) or unreachable(environ)
    return (OFFLINE, problem) if problem else (ONLINE, "")


def base_url(environ: Mapping[str, str]) -> str:
    """The service's address: said by the environment, by `wandb login --host`, or the public one."""
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
    """What is wrong with the key, in words; empty when there is one."""
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
    """What is in the way of the service, in words; empty when it (or the proxy before it) takes connections."""
    url = urlsplit(base_url(environ))
    proxy = _proxy(environ, url.scheme, url.hostname or "")
    there = urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy else url
    host, port = there.hostname or "", there.port or (443 if there.scheme == "https" else 80)
    answer: list[str] = []

    def knock() -> None:
        try:
            socket.create_connection((host, port), timeout=CONNECT).close()
            answer.append("")
        except OSError as error:
            answer.append(f"{host}:{port} cannot be reached ({error.strerror or error})")

    # In a thread: looking up a name has no time limit of its own, and takes minutes where name servers are silent.
    thread = threading.Thread(target=knock, name="paceline-knock", daemon=True)
    thread.start()
    thread.join(IN_ALL)
    return answer[0] if answer else f"{host}:{port} does not answer within {IN_ALL:.0f} s"


def _proxy(environ: Mapping[str, str], scheme: str, host: str) -> str:
    without = [each.strip().lstrip(".") for each in _either(environ, "no_proxy").split(",") if each.strip()]
    if "*" in without or any(host == each or host.endswith(f".{each}") for each in without):
        return ""
    return _either(environ, f"{scheme}_proxy") or _either(environ, "all_proxy")


def _either(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name) or environ.get(name.upper()) or ""


def _home(environ: Mapping[str, str]) -> str:
    return environ.get("HOME") or os.path.expanduser("~")
