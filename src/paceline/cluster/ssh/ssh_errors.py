"""What ssh's messages mean, and what to do about them."""

from __future__ import annotations

import re

from paceline.errors import ConnectionProblem

# Part of a message of ssh, what it means, and what to do. `{host}` and `{name}` are the cluster's.
_MEANINGS = (
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "The host key of {host} has changed, so ssh does not connect.",
        "Ask its administrators whether the key is new. If so: ssh-keygen -R {host}; then: paceline login {name}",
    ),
    (
        "Host key verification failed",
        "ssh does not know the host key of {host}.",
        "Compare the key with what the site publishes and accept it: paceline login {name}",
    ),
    (
        "Could not resolve hostname",
        "There is no host {host}.",
        "Check `host` of the cluster {name}, your network and your VPN.",
    ),
    ("Connection refused", "{host} refuses connections.", "Is it the right host and port? It may also be down."),
    (
        "timed out",
        "{host} does not answer.",
        "Check your network and your VPN; the login node may be down. Then: paceline login {name}",
    ),
    ("No route to host", "There is no route to {host}.", "Check your network and your VPN."),
    ("Network is unreachable", "There is no network to reach {host}.", "Check your network and your VPN."),
    ("Too many authentication failures", "{host} refused your keys.", "Set IdentityFile in ~/.ssh/config."),
    ("Permission denied", "{host} did not accept your login.", "Try `ssh {host}`: the same keys and codes work here."),
    ("Connection closed by", "{host} closed the connection.", "Try `ssh {host}` to see why."),
    ("kex_exchange_identification", "{host} closed the connection.", "Try again in a minute, or `ssh {host}`."),
    (
        "Bad configuration option",
        "ssh cannot read its configuration.",
        "Fix ~/.ssh/config; `ssh -G {host}` shows what is wrong.",
    ),
)  # fmt: skip


def explain(stderr: str, *, name: str, host: str) -> ConnectionProblem:
    """Return the error that ssh's messages stand for."""
    for part, message, hint in _MEANINGS:
        if part in stderr:
            return ConnectionProblem(message.format(host=host, name=name), hint=hint.format(host=host, name=name))
    lines = [line.strip() for line in re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", stderr).splitlines() if line.strip()]
    said = f": {lines[-1].rstrip('.')}" if lines else ""
    hint = f"Try `ssh {host}`, then: paceline login {name}"
    return ConnectionProblem(f"ssh cannot connect to {host}{said}.", hint=hint)
