"""How many steps the run will have in total, as far as its loops show: for the progress and the
time left.
"""

from __future__ import annotations

from paceline.contract.jsonl import EventWriter


class TotalSteps:
    """Writes the event `total_steps` at the beginning of a loop that changes the answer. Its
    `steps` may be null.
    """

    def __init__(self, events: EventWriter, max_steps: int | None) -> None:
        self._events = events
        self._max_steps = max_steps  # of the session
        self._written: int | None = None
        self._lengths: dict[int, int | None] = {}  # of the loops of an epoch, by their number
        self._loops = 0  # that began outside of `run.epochs`

    def begin_loop(
        self, *, number: int, step: int, left: int | None, length: int | None, more_epochs: int
    ) -> None:
        """Count a loop inside of `run.epochs`: the steps that are left in it, and the epochs that
        follow this one.

        The loops of an epoch that have not begun yet count as long as they were in the last one.
        """
        self._lengths[number] = length
        known = [each for each in self._lengths.values() if each is not None]
        if left is None or len(known) < len(self._lengths):
            self.write(None)
            return
        later = sum(each or 0 for key, each in self._lengths.items() if key > number)
        self.write(step + left + later + more_epochs * sum(known))

    def begin_single_loop(self, *, step: int, left: int | None) -> None:
        """Count a loop outside of `run.epochs`. A script with several of them has a loop of its
        own around them.
        """
        self._loops += 1
        self.write(step + left if left is not None and self._loops == 1 else None)

    def write(self, steps: int | None) -> None:
        if self._max_steps is not None:
            steps = self._max_steps if steps is None else min(steps, self._max_steps)
        if steps != self._written:
            self._written = steps
            self._events.write("total_steps", steps=steps)
