"""Deliver a notification: POST it to a webhook, or pass it to a command. No part of the address is
ever printed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from paceline.contract import env

WEBHOOK_TIMEOUT = 5.0  # seconds
COMMAND_TIMEOUT = 10.0


class NotDelivered(Exception):
    """Why a notification could not be sent."""


def post(address: str, payload: Mapping[str, Any], *, timeout: float = WEBHOOK_TIMEOUT) -> None:
    """Send a notification as JSON. Raises NotDelivered, also if a server sends its answer too
    slowly.

    A time limit of a socket is one of each read, and there is no limit for the search of an
    address. So another thread waits for the answer, which ends with this process at the latest.
    """
    outcome: list[NotDelivered | None] = []

    def work() -> None:
        try:
            _post(address, payload, timeout)
        except NotDelivered as problem:
            outcome.append(problem)
        else:
            outcome.append(None)

    thread = threading.Thread(target=work, name="notify-webhook", daemon=True)
    thread.start()
    thread.join(timeout)
    problem = outcome[0] if outcome else NotDelivered(f"it did not respond within {timeout:g} s")
    if problem is not None:
        raise problem


def _post(address: str, payload: Mapping[str, Any], timeout: float) -> None:
    from http.client import HTTPException  # not at the top: most runs need none of it
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    if not address.lower().startswith(("http://", "https://")):
        raise NotDelivered("its value is not an address that begins with https:// or http://")
    body = json.dumps(payload).encode()
    try:
        request = Request(
            address,
            data=body,
            headers={"Content-Type": "application/json", "User-Agent": "paceline"},
        )
        with urlopen(request, timeout=timeout) as answer:
            answer.read(1000)
    except HTTPError as error:
        error.close()
        raise NotDelivered(f"the server answered {error.code}") from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        text = reason.strerror if isinstance(reason, OSError) else None
        raise NotDelivered(text or type(reason).__name__) from None
    except (ValueError, HTTPException) as error:  # their texts may quote the address
        raise NotDelivered(type(error).__name__) from None


def run_command(command: str, payload: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Run a shell command with the notification as JSON on its standard input. Raises
    NotDelivered.
    """
    variables = {
        f"{env.NOTIFY}{name.upper()}": str(payload[name]).replace("\0", "")
        for name in ("event", "run_id", "status")
    }
    # for a subject
    variables[f"{env.NOTIFY}TEXT"] = " ".join(str(payload["text"]).replace("\0", "").split())
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            env={**environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise NotDelivered(getattr(error, "strerror", None) or type(error).__name__) from None
    try:
        process.communicate(json.dumps(payload).encode() + b"\n", timeout=COMMAND_TIMEOUT)
    except subprocess.TimeoutExpired:
        with suppress(OSError):  # it has just ended
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise NotDelivered(f"it did not finish within {COMMAND_TIMEOUT:g} s") from None
    if process.returncode:
        raise NotDelivered(f"it exited with {process.returncode}")
