"""What is free on the cluster, from one answer of `sinfo` that all Paceline processes of a user on
a machine share.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.contract.files.shared_folders import open_own_file
from paceline.errors import ClusterError, NoSlurm
from paceline.slurm.answer_cache import AnswerCache
from paceline.slurm.node_use import PartitionUse, ask_node_use, parse_node_use
from paceline.watch.scheduler.poll_interval import DEFAULT, poll_interval

MAX_BYTES = 16 << 20


def query_node_use() -> list[PartitionUse]:
    """Return the partitions and what is free in them, at most a poll interval old (and never asked
    more often).
    """
    file = AnswerCache.here()
    if file is None:
        return parse_node_use(ask_node_use())
    path = file.path.with_suffix(".nodes")
    if (answer := _read(path)) is None:
        with file.lock():
            if (answer := _read(path)) is None:
                answer = _ask()
                _write(path, answer)
    if answer["problem"]:
        raise ClusterError(answer["problem"], hint=answer["hint"])
    return parse_node_use(answer["text"])


def _ask() -> dict[str, Any]:
    answer = {"asked": time.time(), "text": "", "problem": "", "hint": ""}
    try:
        answer["text"] = ask_node_use()
    except NoSlurm:
        raise  # nobody was asked
    except ClusterError as error:
        answer.update(problem=error.message, hint=error.hint)
    return answer


def _read(path: Path) -> dict[str, Any] | None:
    """Return the last answer; None if there is none, or an old one."""
    try:
        with os.fdopen(open_own_file(path), "rb") as file:
            answer = json.loads(file.read(MAX_BYTES))
        age = time.time() - answer["asked"]
        fresh = 0 <= age < max(poll_interval(), DEFAULT)
        return answer if fresh and {"text", "problem", "hint"} <= answer.keys() else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _write(path: Path, answer: dict[str, Any]) -> None:
    new = path.with_suffix(f".nodes-{os.getpid()}")
    try:
        with os.fdopen(
            open_own_file(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w", encoding="utf-8"
        ) as file:
            file.write(json.dumps(answer))
        os.replace(new, path)
    except OSError:  # a full disk is no reason to fail
        with suppress(OSError):
            new.unlink()
