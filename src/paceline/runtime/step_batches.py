"""What `run.steps` returns: the batches of a loop, which also know how many they are."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any


class StepBatches(Iterator[Any]):
    """The batches of one loop. `len` is how many it has left when it begins: progress bars show it as their total."""

    def __init__(self, batches: Generator[Any, None, None], left: int | None) -> None:
        self._batches, self._left = batches, left

    def __len__(self) -> int:
        if self._left is None:
            raise TypeError("The loader of this loop has no length.")
        return self._left

    def __bool__(self) -> bool:
        return True  # as any iterator, also with nothing left

    def __iter__(self) -> Generator[Any, None, None]:
        """Return the generator itself, so that a `for` loop calls nothing else, and ends it with `break`."""
        return self._batches

    def __next__(self) -> Any:
        return next(self._batches)

    def close(self) -> None:
        self._batches.close()
