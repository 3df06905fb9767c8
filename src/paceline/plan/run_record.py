"""`run.json`: the resolved spec, the code's identity and the command line, for people and for `paceline ps`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.plan.run_path import RunPath
from paceline.plan.shape import Shape
from paceline.spec import Job

_SECRET = re.compile(r"(?i)(key|token|secret|password|passwd|credential)")
# Behind a colon; or alone in front of a web server's name, as tokens often stand.
_PASSWORD_IN_ADDRESS = re.compile(
    r"://[^/@\s]*:[^/@\s]+@|(?:(?<=http)|(?<=https))://[^/?#@\s]+@", re.IGNORECASE
)
_SECRET_WORDS = {"password", "passwd", "passphrase", "secret", "credential", "credentials", "apikey"}
HIDDEN = "***"


def hide(name: str, value: str) -> str:
    """A variable's value, unless its name says that it is a secret, or it is an address with a password in it."""
    return HIDDEN if _SECRET.search(name) or has_password(value) else value


def has_password(text: str) -> bool:
    """Whether a text holds an address such as http://ann:password@proxy:3128 or https://token@git.example.org."""
    return _PASSWORD_IN_ADDRESS.search(text) is not None


def hide_in_words(words: Sequence[str]) -> list[str]:
    """A command line that shows no secret: in `--env API_KEY=X`, `--api-key X`, `--api-key=X` and `api_key=X`."""
    shown = []
    for before, word in zip(["", *words], words, strict=False):
        name, equals, value = word.removeprefix("--env=").partition("=")
        start = word[: len(word) - len(value)]
        if equals and (before == "--env" or word.startswith("--env=")):
            shown.append(start + hide(name, value))
        elif equals and _is_secret_option(name):
            shown.append(start + HIDDEN)
        elif before.startswith("-") and not word.startswith("-") and _is_secret_option(before):
            shown.append(HIDDEN)
        else:
            shown.append(_PASSWORD_IN_ADDRESS.sub(f"://{HIDDEN}@", word))
    return shown


def hide_in_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters, without the texts of those whose name says that they are secrets."""
    shown: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            shown[name] = hide_in_values(value)
        else:
            shown[name] = HIDDEN if isinstance(value, str) and _is_secret_option(name) else value
    return shown


def _is_secret_option(name: str) -> bool:
    """By whole words: a tokenizer and a number of tokens are none. A key alone may be any (`sort(key=...)`)."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower())
    if not words or "=" in name:
        return False
    return (
        not _SECRET_WORDS.isdisjoint(words) or words[-1] == "token" or (words[-1] == "key" and len(words) > 1)
    )


def run_json(
    job: Job,
    *,
    run_path: RunPath,
    shape: Shape,
    command: Sequence[str],
    created: float,
    facts: Mapping[str, Any],
    code: Mapping[str, Any],
) -> str:
    """The text. `facts` says who and where (host, user, python, version); `code` what the code was."""
    spec = job.tables.model_dump(mode="json", exclude_none=True)
    spec["environment"]["variables"] = {
        name: hide(name, value) for name, value in job.environment.variables.items()
    }
    spec["params"] = hide_in_values(job.params)
    value = {
        "run_id": run_path.run_id,
        "project": run_path.project,
        "experiment": run_path.experiment,
        "name": job.resources.name or "",
        "created": created,
        "program": job.program.name,
        "is_module": job.program.is_module,
        "args": hide_in_words(job.program.args),
        "command": hide_in_words(command),
        "cwd": str(job.cwd),
        "file": str(job.file) if job.file else None,
        "profile": job.profile,
        "nodes": shape.nodes,
        "nproc": shape.nproc,
        "world_size": shape.world_size,
        **facts,
        "code": dict(code),
        "spec": spec,
    }
    return json.dumps(value, indent=1) + "\n"
