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
from contextlib import suppress
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
    folder = environ.get("WANDB_CONFIG_DIR") or os.path.join(_home(environ), ".config", "wandb")
    parser = configparser.ConfigParser(interpolation=None)
    # a file that wandb can't read either doesn't count
    with suppress(OSError, configparser.Error, UnicodeDecodeError):
        parser.read(os.path.join(folder, "settings"), encoding="utf-8")
    known = parser.get("default", "base_url", fallback=PUBLIC)
    return environ.get("WANDB_BASE_URL") or known


def missing_key(environ: Mapping[str, str]) -> str:
    """Return why there is no key; empty if there is one."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return ""
    host, home = urlsplit(base_url(environ)).netloc, _home(environ)
    for path in filter(None, (environ.get("NETRC"), f"{home}/.netrc", f"{home}/_netrc")):
        with suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(path).authenticators(host):
                return ""
    return f"there is no API key for {host}"


def unreachable(environ: Mapping[str, str]) -> str:
    """Return why the server (or its proxy) is unreachable; empty if it accepts connections."""
    url = urlsplit(base_url(environ))
    proxy = _proxy(environ, url.scheme, url.hostname or "")
    target = urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy else url
    host, port = target.hostname or "", target.port or (443 if target.scheme == "https" else 80)
    problems = [f"{host}:{port} did not respond within {TIMEOUT:.0f} s"]

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=CONNECT_TIMEOUT).close()
            problems.append("")
        except OSError as error:
            problems.append(f"{host}:{port} cannot be reached ({error.strerror or error})")

    # In a thread: name resolution has no time limit, and takes minutes if name servers don't
    # answer.
    thread = threading.Thread(target=connect, name="paceline-connect", daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    return problems[-1]


def _proxy(environ: Mapping[str, str], scheme: str, host: str) -> str:
    known = {name.lower(): value for name, value in environ.items() if value}
    without = [name.strip().lstrip(".") for name in known.get("no_proxy", "").split(",")]
    if any(name and f".{host}".endswith(f".{name}") for name in without) or "*" in without:
        return ""
    return known.get(f"{scheme}_proxy") or known.get("all_proxy", "")


def _home(environ: Mapping[str, str]) -> str:
    return environ.get("HOME") or os.path.expanduser("~")
