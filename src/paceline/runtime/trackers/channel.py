"""Words from rank 0 to all ranks, also outside of a session: through the store in which ranks find each other."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from paceline.errors import RunError
from paceline.runtime.distributed.identity import read_identity
from paceline.runtime.trackers.wandb.agent import Point

_store: Any = None
_words = 0  # told or heard so far: equally many on all ranks


def same_on_all(make: Callable[[], str]) -> str:
    """What rank 0 makes, on all ranks. All ranks call it."""
    identity = read_identity()
    if not identity.is_distributed:
        return make()
    if identity.rank:
        return hear()
    word = "failed"
    try:
        word = f"made {make()}"
    finally:
        _set(word)
    return word.removeprefix("made ")


def tell(word: str) -> None:
    """Rank 0 only."""
    _set(f"made {word}")


def wait_until_heard() -> None:
    """Rank 0 only: the store dies with it, and words that nobody has fetched yet die with the store."""
    expected = (read_identity().world_size - 1) * _words
    while _place().add("heard", 0) < expected:
        time.sleep(0.02)


def hear() -> str:
    """The next word of rank 0's, however long it takes."""
    global _words
    from paceline.runtime.distributed.process_group import wait_for_key

    _words += 1
    word = wait_for_key(_place(), f"word/{_words}")
    if word is None or word == "failed":
        raise RunError("rank 0 failed while the others waited for its word", hint="Its own error says why.")
    _place().add("heard", 1)
    return word.removeprefix("made ")


def _set(word: str) -> None:
    global _words
    _words += 1
    _place().set(f"word/{_words}", word)


def _place() -> Any:
    global _store
    if _store is None:
        import torch.distributed as dist

        from paceline.runtime.distributed import process_group

        if dist.is_initialized():  # the script's own: its address is taken
            _store = dist.distributed_c10d.PrefixStore(
                "paceline/words", dist.distributed_c10d._get_default_store()
            )
        else:
            _store = process_group.open_store(read_identity(), timeout=None)
    return _store


def encode(point: Point) -> str:
    return json.dumps(asdict(point))


def decode(text: str) -> Point:
    return Point(**json.loads(text))
