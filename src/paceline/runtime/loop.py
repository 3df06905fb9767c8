"""The loops of a script: `epochs`, `steps` and `evaluate`. Between two batches is the step
boundary.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from paceline.contract import process
from paceline.contract.foreign_records import EventWriter
from paceline.errors import UsageError
from paceline.runtime import randomness
from paceline.runtime.console import note
from paceline.runtime.data.sample_assignment import MicroBatch
from paceline.runtime.resumable_iterable import PlainLoader
from paceline.runtime.step_boundary.boundary import Boundary
from paceline.runtime.step_boundary.stop_consensus import Completed, Stopped
from paceline.runtime.training.gradients import Gradients

# Set by `paceline inspect data`: takes the loader of the first loop, and ends the process.
inspector: Callable[[Any], None] | None = None

EMPTY_LOOP = "The run had already reached --max-steps, so this run.steps loop was empty."


class LoopBatches(Iterator[Any]):
    """The batches of one loop, to iterate over once. Progress bars show `len`, if there is one, as
    their total.
    """

    def __init__(
        self, batches: Generator[Any, None, None], count: Callable[[], int | None]
    ) -> None:
        self._batches, self._count = batches, count

    def __len__(self) -> int:
        length = self._count()
        if length is None:
            raise TypeError("The data of this loop has no length.")
        return length

    def __bool__(self) -> bool:
        return True  # as any iterator, also with nothing left

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches. A `break` ends the loop, even if the script keeps this object, as a
        progress bar does.
        """
        if self._batches.gi_frame is None:  # type: ignore[attr-defined]
            raise UsageError(
                "These batches of run.steps or run.evaluate have ended: with the first loop over "
                "them, also by a `break`.",
                hint="Call it again for each loop. To take batches in parts, use next().",
            )
        try:
            yield from self._batches
        finally:
            self._batches.close()

    def __next__(self) -> Any:
        return next(self._batches)

    def close(self) -> None:
        self._batches.close()


def count_batches(loader: Any, *, done: int, max_steps: int | None, accumulate: int) -> int | None:
    """Return how many batches are left after the steps that are done in a loop over a loader, or
    None if the loader has no length.
    """
    is_ours = hasattr(loader, "micro_batches")
    per_step = loader.accumulate if is_ours else accumulate
    try:
        batches = len(loader) * (per_step if is_ours else 1)
    except TypeError:
        return None
    if max_steps is not None:
        batches = min(batches, max_steps * per_step)
    return max(0, batches - done * per_step)


class Loop:
    """The current step, epoch and micro-step."""

    def __init__(
        self,
        boundary: Boundary,
        gradients: Gradients,
        *,
        plain: PlainLoader,
        rank: int,
        max_steps: int | None,
    ) -> None:
        self.step = 0  # the number of steps done, over all epochs and attempts
        self.epoch = 0
        self.begun = False
        # whether the script has entered a loop, whether or not there was a step left
        self.entered = False
        self.micro: MicroBatch | None = None  # set while the loop's body runs
        self.weighted = False  # whether the loader counts the samples of each slice
        # whether `step` includes one that the script left by `break` or an error
        self.left_inside = False
        self.counted = False  # whether a loop of `steps` has counted the steps up to here
        # the iterable of the current loop, if it does not come from `run.loader`
        self.plain = plain
        # called with the first batch of each loop
        self.check_first: Callable[[Any], None] | None = None
        self._boundary = boundary
        self._gradients = gradients
        self._rank = rank
        self._max_steps = sys.maxsize if max_steps is None else max_steps
        self.total_steps = TotalSteps(boundary.events, max_steps)
        self.in_epochs = False
        self._epoch_count = 0  # that `epochs` was called with
        self._epoch_is_whole = True
        self._passes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._loops = 0  # loops of `steps` that this epoch has begun
        self._is_open = False  # whether the script is in one
        self._has_passed = False  # an empty loop after `max_steps`
        self._first_step = 0  # the number of steps that this process began with
        self._loader: Any = None  # of the current loop
        # loaders made after the resume, which saves no others
        self._late: weakref.WeakSet[Any] = weakref.WeakSet()
        self._saved: frozenset[int] = frozenset()  # ids of the objects that checkpoints include
        self._resumed: Mapping[str, Any] | None = None  # where to continue, until the loop is there
        self._reached = False  # whether the loop has been there
        # as the checkpoint had them, until the loop is there
        self._generators: dict[str, Any] | None = None
        self._is_left = False  # whether the script has left the last loop by `break`
        boundary.loop_position = self.position

    # -- the position

    def register(self, objects: Mapping[str, Any]) -> None:
        """Take note of the objects that checkpoints include."""
        self._saved = frozenset(map(id, objects.values()))

    def adopt(self, loader: Any) -> None:
        """Resume a loader that was made after `run.resume`, in the loop that it is used in.

        Raises UsageError if its state differs between ranks: only objects known to `run.resume` are
        saved per rank.
        """
        if loader.saves_positions:
            raise UsageError(
                "run.loader was called after run.resume, so the position in this stream would not "
                "be saved.",
                hint="Create the loader before run.resume.",
            )
        self._late.add(loader)

    def resume(self, *, step: int, epoch: int, position: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.step, self.epoch, self._first_step = step, epoch, step
        self._resumed = {"loop": 0, "loader": None, "left": False, **position}
        self._generators = randomness.capture()

    def position(self) -> dict[str, Any]:
        """Return which loop of the epoch this is, and where it is if its loader has no state of
        its own.
        """
        if self._resumed is not None:  # not there yet
            return dict(self._resumed)
        # a loop that was left is finished: continue with the next one
        if self._is_left and self.in_epochs:
            return {"loop": self._loops, "loader": None, "left": True}
        state = self._loader.state_dict() if self._loader in self._late else None
        return {"loop": max(0, self._loops - 1), "loader": state, "left": False}

    def count_done(self, loader: Any) -> int:
        """Return how many steps of the next loop are done: some may be after a resume."""
        if self._resumed is None or self._resumed["left"]:
            return 0
        if not hasattr(loader, "micro_batches"):
            return self.plain.first_step(self.epoch, self._loops * self.in_epochs)
        return int(loader.first_step(self._next_epoch(loader)))

    # -- the first step

    def begin(self) -> None:
        """Prepare for the first step of this process."""
        self.begun = True
        self._boundary.epoch = self.epoch
        self._boundary.before_first(self.step)

    @property
    def is_after_loop(self) -> bool:
        """Whether the body of an epoch is past its loop of `steps`, and won't enter another one
        for this epoch.
        """
        return self.in_epochs and self._boundary.epoch == self.epoch and self.counted

    @property
    def epoch_is_whole(self) -> bool:
        """Whether the epoch in progress ends with its body; not if `max_steps` ended its loop
        early.
        """
        return self._epoch_is_whole

    @property
    def is_complete(self) -> bool:
        """Whether the session's `max_steps` are done."""
        return self.step >= self._max_steps

    @property
    def current(self) -> int:
        """The step in progress, or the one in which the loop was left."""
        return self.step if self.left_inside else self.step + 1

    def epochs(self, count: int) -> Iterator[int]:
        self.in_epochs, self._loops, self.entered = True, 0, True
        self._epoch_count = count
        try:
            while self.epoch < count and self.step < self._max_steps:
                self._epoch_is_whole = True
                yield self.epoch
                if not self._epoch_is_whole:
                    return  # max_steps ended it early: a longer run would continue in this epoch
                self._boundary.end_epoch(self.step, epoch=self.epoch + 1)
                self.epoch += 1
                self._loops, self._loader, self._resumed, self._is_left = 0, None, None, False
        finally:
            self.in_epochs = False

    def steps(
        self, loader: Any, *, max_steps: int | None, accumulate: int, exact: bool
    ) -> Generator[Any, None, None]:
        if self._is_open:
            raise UsageError(
                "run.steps was called inside another loop of run.steps.",
                hint="Let one loop count the steps: `for a, b in zip(run.steps(loader_a), "
                "loader_b):`.",
            )
        self.entered = True
        if self.is_complete:
            self._epoch_is_whole = False
            self._pass_empty()
            return
        source, number, self._loops = loader, self._loops, self._loops + 1
        self.weighted = hasattr(loader, "micro_batches")
        if self.weighted and inspector is not None:
            inspector(loader)
        if not self.weighted:
            saves_itself = id(loader) in self._saved
            index = number if self.in_epochs else 0
            self.plain.attach(
                loader,
                index,
                epoch=self.epoch if self.in_epochs else None,
                accumulate=accumulate,
                exact=exact,
                saves_itself=saves_itself,
            )
            loader = self.plain
        epoch = self._epoch_of(loader)
        is_past = self._reach(loader, number)
        total, done = loader.steps_per_epoch, 0 if is_past else loader.first_step(epoch)
        if not is_past:
            self._restore_generators(done)
        if max_steps is not None:
            total = max_steps if total is None else min(total, max_steps)
        if self._rank == 0 and (is_past or (done and total is not None and done >= total)):
            note(
                f"epoch {self.epoch} was saved after the last step of this loop: only the code "
                "after the loop runs "
                "again"
            )
        limit = (
            self._max_steps
            if max_steps is None
            else min(self._max_steps, self.step + max(0, max_steps - done))
        )
        is_counted = self.in_epochs or max_steps is not None or isinstance(source, range)
        self._count(number, total if is_counted else None, done=total if is_past else done)
        yield from self._run(
            loader, epoch, done=done, total=total, limit=self.step if is_past else limit
        )
        if self.step >= self._max_steps and max_steps is None and loader is self.plain:
            self.plain.exhaust()

    def _count(self, number: int, total: int | None, *, done: int | None) -> None:
        """Tell how many steps the run will have. Without `run.epochs`, nobody knows how often a
        loader is passed.
        """
        left = None if total is None or done is None else max(0, total - done)
        if not self.in_epochs:
            self.total_steps.begin_single_loop(step=self.step, left=left)
            return
        more_epochs = max(0, self._epoch_count - 1 - self.epoch)
        self.total_steps.begin_loop(
            number=number, step=self.step, left=left, length=total, more_epochs=more_epochs
        )

    def _pass_empty(self) -> None:
        """Run the boundary of a loop that `max_steps` leaves no steps for.

        Outside of `run.epochs`, it ends a script that has made the last step itself: nothing after
        this loop expects it to be empty. A script that was resumed after the last step goes on
        once, since what follows its loop may still have to run.
        """
        self._boundary.consensus.begin_loop()
        if self._boundary.poll(self.step, may_save=False):
            raise Stopped
        again, self._has_passed = self._has_passed, True
        if (again or self.step > self._first_step) and not self.in_epochs:
            if self._rank == 0:
                note(
                    f"max_steps={self._max_steps} is reached, but the script starts another "
                    "run.steps loop: the script "
                    "ends here, and the code after that loop does not run. A run.epochs loop ends "
                    "at max_steps "
                    "automatically"
                )
            raise Completed
        process.failure_context = EMPTY_LOOP

    def _reach(self, loader: Any, number: int) -> bool:
        """Return whether a resumed epoch is past this loop. If it is in this one, give a late
        loader its position.

        Loops after that one begin anew: a position that their loader still has is that of an
        earlier loop.
        """
        resumed = self._resumed
        if resumed is None:
            if self._reached and self.in_epochs and self.weighted:
                loader.forget_position()
            return False
        if self.in_epochs and number < resumed["loop"]:
            return True
        self._resumed, self._reached = None, True
        if resumed["left"] and self.weighted:
            loader.forget_position()
        elif resumed["loader"] is not None and loader in self._late:
            loader.load_state_dict(resumed["loader"])
        return False

    def _restore_generators(self, done: int) -> None:
        """Continue in the middle of a loop with the random state that was saved there.

        The script has drawn from it again since the resume, if only by `iter(DataLoader)`.
        """
        generators, self._generators = self._generators, None
        if done and generators is not None:
            randomness.restore(generators)

    def _run(
        self, loader: Any, epoch: int, *, done: int, total: int | None, limit: int
    ) -> Iterator[Any]:
        boundary = self._boundary
        self._is_open, self._is_left, self.left_inside = True, False, False
        if self._resumed is None:
            self._loader = loader
        try:
            boundary.begin_loop(epoch=self.epoch, done=done, total=total)
            if self.step < limit:
                uniform = not self.weighted and loader.accumulate == 1
                micros = loader.micro_batches(epoch)
                if self.check_first is not None:
                    micros = self._checked(micros, self.check_first)
                yield from self._iterate(micros, limit, uniform)
            elif done and loader is self.plain:
                loader.finish()
            whole = total is not None and boundary.epoch_step >= total
            self._epoch_is_whole = whole or self.step < self._max_steps
            boundary.checkpoint_schedule.take_snapshot()
        except GeneratorExit:
            # The script left the loop by `break`: the step that it was in counts as done.
            self._is_left = True
            if self.micro is not None and self.micro.last:
                self.step += 1
                boundary.epoch_step += 1
                self.left_inside = True
            boundary.checkpoint_schedule.take_snapshot()
            raise
        finally:
            self.micro, self.counted, self._is_open = None, True, False
            self._gradients.reset()
            boundary.end_loop()

    def evaluate(self, loader: Any) -> Generator[Any, None, None]:
        self._boundary.begin_evaluation()
        try:
            for batch in loader:
                yield batch
                self._boundary.after_forward(self.step, in_a_step=self.micro is not None)
        finally:
            loader.close()

    def _iterate(self, micros: Iterator[MicroBatch], limit: int, uniform: bool) -> Iterator[Any]:
        gradients, boundary, weighted = self._gradients, self._boundary, self.weighted
        begin, after_step = gradients.begin, boundary.after_step
        throughput, now = boundary.metrics.throughput, time.perf_counter
        while True:
            asked = now()
            micro = next(micros, None)
            throughput.waited += now() - asked
            if micro is None:
                return
            if boundary.awaits_batch:
                boundary.note_first_batch(self.step)
            self.micro = micro
            last = micro.last
            if weighted:
                throughput.samples += micro.count
                begin(
                    micro.mean_scale,
                    micro.global_count,
                    micro.count,
                    first=micro.index == 0,
                    last=last,
                )
            elif not uniform:
                begin(micro.mean_scale, first=micro.index == 0, last=last)
            yield micro.data
            self.micro = None
            if last:
                throughput.steps += 1
                if gradients.ends_steps:
                    gradients.end_step()
                self.step = step = self.step + 1
                boundary.epoch_step += 1
                after_step(step)
                if step >= limit:
                    return

    @staticmethod
    def _checked(
        micros: Iterator[MicroBatch], check: Callable[[Any], None]
    ) -> Iterator[MicroBatch]:
        first = next(micros, None)
        if first is not None:
            check(first.data)
            yield first
            yield from micros

    def _epoch_of(self, loader: Any) -> int:
        """Return the epoch that the pass over a loader is which begins now."""
        epoch = self._next_epoch(loader)
        if not self.in_epochs and loader is not self.plain:
            self._passes[loader] = epoch
        return epoch

    def _next_epoch(self, loader: Any) -> int:
        """Return the epoch that the next pass over a loader is. Without `run.epochs`, each pass is
        its next one.
        """
        if self.in_epochs or loader is self.plain:
            return self.epoch
        return self._passes[loader] + 1 if loader in self._passes else int(loader.epoch)


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
