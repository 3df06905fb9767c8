"""What `run.steps` and `run.evaluate` return: the batches of a loop, which also know how many they
are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any


class LoopBatches(Iterator[Any]):
    """The batches of one loop. `len` is how many it has when it begins: progress bars show it as
    their total.
    """

    def __init__(
        self, batches: Generator[Any, None, None], count: Callable[[], int | None]
    ) -> None:
        self._batches, self._count = batches, count
        self._length: int | None = None

    def __len__(self) -> int:
        if self._length is None:
            self._length = self._count()
        if self._length is None:
            raise TypeError("The data of this loop has no length.")
        return self._length

    def __bool__(self) -> bool:
        return True  # as any iterator, also with nothing left

    def __iter__(self) -> Generator[Any, None, None]:
        """Return the generator itself, so that a `for` loop calls nothing else, and ends it with
        `break`.
        """
        return self._batches

    def __next__(self) -> Any:
        return next(self._batches)

    def close(self) -> None:
        self._batches.close()
