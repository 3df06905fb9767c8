"""Loops resume into the batches that an uninterrupted run would get, whatever they iterate over, or refuse to."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
)
from tqdm import tqdm

import paceline
from paceline.agent.workers.bootstrap import report_error
from paceline.errors import CheckpointError, UsageError
from paceline.runtime.resumable_iterable import PlainLoader
from tests.forked_ranks import Ranks
from tests.runtime.data.datasets import Noisy, Numbers, Positioned

Seen = list[tuple[int, str, Any]]  # epoch, which loop, batch
Body = Callable[[Any, Seen], None]


def train(folder: Path, body: Body, max_steps: int | None = None) -> Seen:
    """Run a script's body in a session that saves at its end."""
    seen: Seen = []
    with paceline.session(
        seed=1, folder=folder, cpu=True, progress=False, report=False, max_steps=max_steps
    ) as run:
        body(run, seen)
    return seen


def check_exact(folder: Path, body: Body, *stops: int) -> Seen:
    """Check that a run that stops after these steps, and resumes, sees what an uninterrupted one does."""
    straight = train(folder / "straight", body)
    for stop in stops:
        before = train(folder / str(stop), body, stop)
        assert before == straight[:stop]
        after = train(folder / str(stop), body)
        assert before + after == straight, f"stopped after {stop} steps"
    return straight


def values(batch: Any) -> Any:
    return batch[0].tolist() if isinstance(batch, (list, tuple)) else batch.tolist()


def epochs_over(
    make: Callable[[Any], Any], *, resume_first: bool = False, peek: bool = False, **options: Any
) -> Body:
    """Three epochs over one loader, some of which end early."""

    def body(run: Any, seen: Seen) -> None:
        loader = None if resume_first else make(run)
        run.resume()
        loader = make(run) if loader is None else loader
        if peek:
            next(iter(loader))
        for epoch in run.epochs(3):
            for batch in run.steps(loader, **options):
                seen.append((epoch, "", values(batch)))

    return body


LOADERS: dict[str, Callable[[Any], Any]] = {
    "run.loader": lambda run: run.loader(Noisy(24), batch_size=2),
    "stream": lambda run: run.loader(Positioned(24), batch_size=2),
    "shuffled": lambda run: DataLoader(Noisy(24), batch_size=2, shuffle=True),
    "own generator": lambda run: DataLoader(
        Numbers(24), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "sampler": lambda run: DataLoader(
        Numbers(24),
        batch_size=2,
        sampler=RandomSampler(range(24), generator=torch.Generator().manual_seed(3)),
    ),
    "set_epoch": lambda run: DataLoader(
        Numbers(24), batch_size=2, sampler=DistributedSampler(range(24), 1, 0)
    ),
    "set_epoch in batches": lambda run: DataLoader(
        Numbers(24),
        batch_sampler=BatchSampler(DistributedSampler(range(24), 1, 0), 2, drop_last=False),
    ),
    "dataset with a generator": lambda run: DataLoader(OwnNoise(), batch_size=2),
}


def test_a_checkpoint_with_another_checksum_of_the_batches_resumes() -> None:
    """Older versions saved one under another name, which nothing can be compared with."""
    batches = [torch.tensor([float(number)]) for number in range(4)]

    def attach() -> PlainLoader:
        plain = PlainLoader(device=torch.device("cpu"), rank=0, world_size=1)
        plain.attach(batches, 0, epoch=0, accumulate=1, exact=True, saves_itself=False)
        return plain

    plain = attach()
    list(islice(plain.micro_batches(0), 2))
    state = plain.state_dict()
    state["first"] = 1234
    del state["checksum"]
    resumed = attach()
    resumed.load_state_dict(state)
    assert [micro.data.item() for micro in resumed.micro_batches(0)] == [2.0, 3.0]


class OwnNoise(Numbers):
    def __init__(self) -> None:
        super().__init__(24)
        self.rng = numpy.random.default_rng(5)

    def __getitem__(self, index: int) -> Any:
        return index + self.rng.random()


@pytest.mark.parametrize("max_steps", [None, 5])
@pytest.mark.parametrize("kind", LOADERS)
def test_epochs_resume_into_the_same_batches_and_end_where_they_would(
    tmp_path: Path, kind: str, max_steps: int | None
) -> None:
    per_epoch = 12 if max_steps is None else max_steps
    stops = (3, per_epoch, per_epoch + 4)  # within the first epoch, at its end, within the second
    seen = check_exact(tmp_path, epochs_over(LOADERS[kind], max_steps=max_steps), *stops)
    assert [epoch for epoch, _, _ in seen] == [0] * per_epoch + [1] * per_epoch + [2] * per_epoch
    assert kind == "stream" or seen[0][2] != seen[per_epoch][2]


def test_workers_of_a_plain_dataloader_resume_exactly(tmp_path: Path) -> None:
    def make(run: Any) -> Any:
        return DataLoader(
            Noisy(16), batch_size=4, shuffle=True, num_workers=1, multiprocessing_context="fork"
        )

    check_exact(tmp_path, epochs_over(make), 6)


def test_a_dataloader_that_keeps_its_workers_resumes_in_the_same_order(tmp_path: Path) -> None:
    """It draws their seed in the first epoch only."""

    def body(run: Any, seen: Seen) -> None:
        loader = DataLoader(
            Numbers(8),
            batch_size=4,
            shuffle=True,
            num_workers=1,
            persistent_workers=True,
            multiprocessing_context="fork",
        )
        run.resume()
        for epoch in run.epochs(3):
            for batch in run.steps(loader):
                seen.append((epoch, values(batch), torch.rand(()).item()))
        loader._iterator._shutdown_workers()  # type: ignore[union-attr]  # before another session forks

    check_exact(tmp_path, body, 2, 3)


@pytest.mark.parametrize("kind", ["run.loader", "late stream"])
def test_a_loader_made_after_the_resume_continues_where_it_was(tmp_path: Path, kind: str) -> None:
    makers = {**LOADERS, "late stream": lambda run: run.loader(Unsized(), batch_size=2)}
    check_exact(tmp_path, epochs_over(makers[kind], resume_first=True), 3, 17)


class Unsized(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(24))


def test_a_stream_with_a_position_must_be_made_before_the_resume(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"run.loader was called after run.resume.*\n  Create the loader before"
    ):
        train(tmp_path, epochs_over(LOADERS["stream"], resume_first=True))


@pytest.mark.parametrize("kind", ["run.loader", "stream"])
def test_a_look_at_the_first_batch_changes_nothing(tmp_path: Path, kind: str) -> None:
    plain = train(tmp_path / "plain", epochs_over(LOADERS[kind]))
    assert check_exact(tmp_path, epochs_over(LOADERS[kind], peek=True), 3, 12, 17) == plain


@pytest.mark.parametrize("kind", ["run.loader", "stream"])
def test_a_look_inside_the_loop_is_refused(tmp_path: Path, kind: str) -> None:
    def body(run: Any, seen: Seen) -> None:
        loader = LOADERS[kind](run)
        for _ in run.steps(loader):
            next(iter(loader))

    with pytest.raises(UsageError, match=r"while run\.steps is still iterating over it"):
        train(tmp_path, body)


@pytest.mark.parametrize("kind", ["run.loader", "plain"])
def test_progress_bars_know_how_many_batches_there_are(tmp_path: Path, kind: str) -> None:
    bars: list[Any] = []

    def body(run: Any, seen: Seen) -> None:
        ours = kind == "run.loader"
        loader = (
            run.loader(Numbers(24), batch_size=4, accumulate=2)
            if ours
            else DataLoader(Numbers(23), batch_size=2)
        )
        run.resume()
        for epoch in run.epochs(2):
            bars.append(
                tqdm(
                    run.steps(loader) if ours else run.steps(loader, accumulate=2),
                    file=io.StringIO(),
                )
            )
            for batch in bars[-1]:
                seen.append((epoch, "", values(batch)))

    train(tmp_path, body, 4)
    train(tmp_path, body)
    assert [(bar.total, bar.n) for bar in bars] == [(12, 8), (4, 4), (12, 12)]


def test_progress_bars_know_how_many_batches_are_evaluated(tmp_path: Path) -> None:
    with paceline.session(folder=tmp_path, cpu=True, progress=False, report=False) as run:
        for data, size in (
            (Numbers(23), 4),
            (DataLoader(Numbers(23), batch_size=4, shuffle=True), None),
        ):
            bar = tqdm(run.evaluate(data, batch_size=size), file=io.StringIO())
            assert (bar.total, sum(len(batch) for batch in bar), bar.n) == (6, 23, 6)


def test_the_length_of_a_loop(tmp_path: Path) -> None:
    with paceline.session(folder=tmp_path, cpu=True, progress=False, report=False) as run:
        steps = run.steps(range(3))
        assert (len(steps), next(steps), list(steps), len(steps)) == (3, 0, [1, 2], 3)
        assert (len(run.steps([])), bool(run.steps([]))) == (0, True)
        for endless in (iter([1, 2]), run.loader(Unsized(), batch_size=2)):
            with pytest.raises(TypeError, match="has no length"):
                len(run.steps(endless))
        with pytest.raises(TypeError, match="has no length"):
            len(run.evaluate(Unsized()))
        for loader in (range(3), range(4)):  # `break` ends a loop, so that the next one may begin
            for number in run.steps(loader):
                if number == 1:
                    break
        assert run.step == 7


def two_loops(run: Any, seen: Seen) -> None:
    """Plain loaders in two loops per epoch, and a pass over one of Paceline's in between."""
    first = DataLoader(
        Numbers(8), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3)
    )
    ours = run.loader(Numbers(8), batch_size=2)
    second = DataLoader(Numbers(6), batch_size=2, shuffle=True)
    run.resume()
    for epoch in run.epochs(3):
        for name, loader in (("first", first), ("ours", ours), ("again", ours), ("second", second)):
            for batch in run.steps(loader, max_steps=3):
                seen.append((epoch, name, values(batch)))


def test_a_resumed_epoch_continues_in_the_loop_that_it_was_in(tmp_path: Path) -> None:
    seen = check_exact(tmp_path, two_loops, 2, 3, 5, 7, 9, 10, 12, 20)
    assert [name for _, name, _ in seen[:12]] == ["first"] * 3 + ["ours"] * 3 + ["again"] * 3 + [
        "second"
    ] * 3


def one_iterator(run: Any, seen: Seen) -> None:
    """One iterator for all epochs."""
    run.resume()
    numbers = (torch.tensor([number]) for number in range(100))
    for epoch in run.epochs(3):
        for batch in run.steps(numbers, max_steps=4):
            seen.append((epoch, "", values(batch)))


def test_an_iterator_of_several_epochs_continues(tmp_path: Path) -> None:
    seen = check_exact(tmp_path, one_iterator, 2, 4, 6, 10)
    assert [batch for _, _, batch in seen] == [[number] for number in range(12)]


def test_iterators_of_one_epoch_each_start_anew(tmp_path: Path) -> None:
    def body(run: Any, seen: Seen) -> None:
        run.resume()
        for epoch in run.epochs(3):
            for batch in run.steps(islice((torch.tensor([number]) for number in range(100)), 4)):
                seen.append((epoch, "", values(batch)))

    assert [batch for _, _, batch in check_exact(tmp_path, body, 2, 4, 6)] == [
        [0],
        [1],
        [2],
        [3],
    ] * 3


def test_other_batches_than_before_are_refused(tmp_path: Path) -> None:
    def body(offset: int, batches: int = 6, **options: Any) -> Body:
        def script(run: Any, seen: Seen) -> None:
            run.resume()
            for batch in run.steps(
                [torch.tensor([number + offset]) for number in range(batches)], **options
            ):
                seen.append((0, "", values(batch)))

        return script

    assert len(train(tmp_path, body(0), 4)) == 4
    with pytest.raises(
        CheckpointError,
        match=r"yields different batches than before.\n  Let the order depend only on",
    ):
        train(tmp_path, body(1))
    with pytest.raises(CheckpointError, match="ends after 2 batches, but 4 were trained on"):
        train(tmp_path, body(0, batches=2))
    assert train(tmp_path, body(1, exact=False)) == [(0, "", [5]), (0, "", [6])]


class Stateful:
    """An iterable that knows its position, like torchdata's StatefulDataLoader."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position < 6:
            self.position += 1
            yield torch.tensor([self.position])
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_an_iterable_that_saves_its_position_is_not_skipped_as_well(tmp_path: Path) -> None:
    def body(run: Any, seen: Seen) -> None:
        loader = Stateful()
        run.resume(loader=loader)
        for epoch in run.epochs(2):
            for batch in run.steps(loader, max_steps=6):
                seen.append((epoch, "", values(batch)))

    check_exact(tmp_path, body, 2, 8)


def test_the_last_group_of_batches_is_weighted_by_how_many_there_are(tmp_path: Path) -> None:
    gradients = []
    with paceline.session(folder=tmp_path, cpu=True, progress=False, report=False) as run:
        model = run.wrap(nn.Linear(1, 1, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for batch in run.steps(
            (torch.full((1, 1), float(number)) for number in range(8)), accumulate=3
        ):
            run.backward(model(batch).mean())
            gradients.append(model.weight.grad.item())
            run.update(optimizer)
        assert run.step == 3
    assert [gradients[step] for step in (2, 5, 7)] == pytest.approx([1.0, 4.0, 6.5])


def test_a_dataloader_without_a_length_is_an_iterable_like_others(tmp_path: Path) -> None:
    seen = check_exact(tmp_path, epochs_over(lambda run: DataLoader(Unsized(), batch_size=2)), 5)
    assert len(seen) == 36


def test_what_follows_a_finished_loop_runs_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    counts: list[int] = []

    def body(run: Any, seen: Seen) -> None:
        loader = run.loader(Numbers(4), batch_size=2, shuffle=False)
        run.resume()
        for _ in run.epochs(2):
            counts.append(0)
            for _ in run.steps(loader):
                counts[-1] += 1
            if len(counts) == 1:
                run.save(wait=True)
                raise RuntimeError("failed in the evaluation")

    with pytest.raises(RuntimeError, match="failed in the evaluation"):
        train(tmp_path, body)
    train(tmp_path, body)
    assert counts == [2, 0, 2]
    assert (
        "epoch 0 was saved after the last step of this loop: only the code after the loop runs again"
        in (capfd.readouterr().err)
    )


def test_the_sums_in_the_guide_survive_a_resume(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    guide = (Path(__file__).parents[2] / "docs/runtime.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(class Totals.*?)^```", guide, re.M | re.S)

    def body(run: Any, seen: Seen) -> None:
        loader = run.loader([(1.0, 2.0)] * 8, batch_size=2)
        model = run.wrap(nn.Linear(1, 1))
        names = {"run": run, "loader": loader, "model": model, "loss": torch.tensor(1.0)}
        names["opt"] = torch.optim.SGD(model.parameters(), lr=0.1)
        exec(block.replace("loss.item()", "run.step"), names)

    train(tmp_path, body, 6)
    train(tmp_path, body)
    means = [float(line) for line in capfd.readouterr().out.splitlines()]
    assert means[0] == 1.5
    assert means[-9:] == [5.5 + 4 * epoch for epoch in range(9)]


def endless(run: Any, seen: Seen) -> None:
    """A loop by hand around the passes, which asks for more steps than `max_steps`."""
    loader = run.loader(Numbers(8), batch_size=2)
    run.resume()
    for _ in range(20):
        for batch in run.steps(loader):
            seen.append((0, "", values(batch)))
        if run.step >= 10:
            return
    raise AssertionError("the passes went on without steps")


def test_a_script_that_goes_on_after_max_steps_ends(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # from the start, and resumed at its end
        with pytest.raises(SystemExit) as ended:
            train(tmp_path, endless, 3)
        assert ended.value.code == 0
        assert (
            "max_steps=3 is reached, but the script starts another run.steps loop"
            in capfd.readouterr().err
        )
    # the end of the first pass, the second and the third
    assert len(train(tmp_path, endless, 11)) == 8


def test_a_script_that_begins_a_loop_after_max_steps_ends_before_its_mean(tmp_path: Path) -> None:
    printed = []

    def body(run: Any, seen: Seen) -> None:
        run.resume()
        for _ in range(3):
            loader, total = [torch.tensor([number]) for number in range(4)], 0
            for batch in run.steps(loader):  # another list in each epoch
                total += 1
                seen.append((0, "", values(batch)))
            printed.append(run.step / total)

    for max_steps in (3, 4):  # within the first loop, and at its end
        with pytest.raises(SystemExit) as ended:
            train(tmp_path / str(max_steps), body, max_steps)
        assert ended.value.code == 0
        assert [
            each.name for each in (tmp_path / str(max_steps) / "checkpoints").glob("step-*")
        ] == [f"step-{max_steps:08}"]
    assert printed == [1, 1]


def test_what_follows_the_loop_runs_if_all_steps_were_done_before(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def body(run: Any, seen: Seen) -> None:
        loader = run.loader(Numbers(8), batch_size=2)
        run.resume()
        for batch in run.steps(loader):
            seen.append((0, "", values(batch)))
        seen.append((0, "after", None))

    def failing(run: Any, seen: Seen) -> None:
        body(run, seen)
        assert len(seen) > 1, "this fails"

    assert len(train(tmp_path, body, 3)) == 4
    assert train(tmp_path, body, 3) == [(0, "after", None)]
    text = "The run had already reached --max-steps, so this run.steps loop was empty."
    assert text not in capfd.readouterr().err
    with pytest.raises(AssertionError, match="this fails"):
        train(tmp_path, failing, 3)
    assert text in capfd.readouterr().err
    error = tmp_path / "error.json"
    report_error(error, ZeroDivisionError("division by zero"), rank=0, step=3)
    assert json.loads(error.read_text())["message"] == f"division by zero. {text}"
    train(tmp_path, body, 4)
    report_error(error, ZeroDivisionError("division by zero"), rank=0, step=3)
    assert json.loads(error.read_text())["message"] == "division by zero"


def test_a_loop_after_max_steps_notices_a_stop(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def body(run: Any, seen: Seen) -> None:
        loader = run.loader(Numbers(8), batch_size=2)
        for name in ("first", "second"):
            for batch in run.steps(loader, max_steps=3):
                seen.append((0, name, values(batch)))
            os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the second loop went on")

    with pytest.raises(SystemExit):
        train(tmp_path, body, 3)
    assert "max_steps=3 is reached" not in capfd.readouterr().err


def test_a_break_ends_a_loop_that_the_script_keeps(tmp_path: Path) -> None:
    with paceline.session(folder=tmp_path, cpu=True, progress=False, report=False) as run:
        for loop in (run.steps(range(4)), tqdm(run.steps(range(4)), file=io.StringIO())):
            for number in loop:
                if number == 2:
                    break
        assert run.step == 6
        parts = run.steps(range(4))
        assert list(itertools.islice(parts, 2)) == [0, 1]
        with pytest.raises(UsageError, match=r"These batches of .* have ended"):
            list(parts)


def test_two_loops_at_once_are_refused(tmp_path: Path) -> None:
    def body(run: Any, seen: Seen) -> None:
        first, second = (run.loader(Numbers(8), batch_size=2) for _ in range(2))
        for _ in zip(run.steps(first), second, strict=True):
            pass
        for _ in run.steps(first):
            break  # a loop that was left is not open
        for _ in zip(run.steps(first), run.steps(second), strict=True):
            pass

    with pytest.raises(UsageError, match=r"run.steps was called inside another loop of run.steps"):
        train(tmp_path, body)


def test_a_loader_of_two_loops_begins_the_second_one_anew(tmp_path: Path) -> None:
    def body(run: Any, seen: Seen) -> None:
        both, between = run.loader(Numbers(8), batch_size=2), run.loader(Numbers(6), batch_size=2)
        stream = run.loader(Positioned(8), batch_size=2)
        run.resume()
        for epoch in run.epochs(2):
            for name, loader in (
                ("a", both),
                ("b", stream),
                ("c", between),
                ("d", both),
                ("e", stream),
            ):
                for batch in run.steps(loader):
                    seen.append((epoch, name, values(batch)))

    seen = check_exact(tmp_path, body, 2, 10, 13, 17)
    assert [name for _, name, _ in seen[:19]] == [*"aaaabbbbcccddddeeee"]


@pytest.mark.parametrize("kind", ["run.loader", "shuffled"])
def test_a_loop_that_was_left_by_break_is_finished(tmp_path: Path, kind: str) -> None:
    def body(run: Any, seen: Seen) -> None:
        loader = LOADERS[kind](run)
        run.resume()
        for epoch in run.epochs(3):
            for name in ("first", "second"):
                for batch in run.steps(loader):
                    seen.append((epoch, name, values(batch)))
                    if run.step % 4 == 3:
                        break
                run.save(wait=True)
                if run.step == fail_at:
                    raise RuntimeError("failed after the loop")

    fail_at = 0  # read by the body
    straight = train(tmp_path / "straight", body)
    assert len(straight) == 24
    for step in (4, 8, 12):
        fail_at = step
        with pytest.raises(RuntimeError, match="failed after the loop"):
            train(tmp_path / str(step), body)
        fail_at = 0
        assert straight[:step] + train(tmp_path / str(step), body) == straight


ITERATORS: dict[str, Callable[[Any], Any]] = {
    "enumerate": lambda loader: ((batch,) for _, batch in enumerate(loader)),
    "zip": lambda loader: zip(loader, loader, strict=True),
    "iter": iter,
    "expression": lambda loader: (batch for batch in loader),
}


@pytest.mark.parametrize("kind", ITERATORS)
def test_an_iterator_of_a_dataloader_resumes_with_the_same_random_state(
    tmp_path: Path, kind: str
) -> None:
    def body(run: Any, seen: Seen) -> None:
        loader = DataLoader(Numbers(8), batch_size=2, shuffle=True)
        run.resume()
        for epoch in run.epochs(3):
            for batch in run.steps(ITERATORS[kind](loader)):
                seen.append((epoch, values(batch), torch.rand(()).item()))

    check_exact(tmp_path, body, 2, 5)


def warned_of_same_batches() -> list[int]:
    """How often this rank says that all ranks got the same first batch, for each kind of loader."""
    said = []
    numbers = torch.arange(8.0)
    for make in (
        lambda run: DataLoader(numbers, batch_size=2),
        lambda run: DataLoader(
            numbers, batch_size=2, sampler=DistributedSampler(numbers, run.world_size, run.rank)
        ),
        lambda run: [numbers] * (1 + run.rank),  # ranks that do not have equally many
        # the same at its beginning
        lambda run: [torch.cat([torch.zeros(1000), torch.ones(10) * run.rank])],
        lambda run: range(3),  # numbers of steps, not samples
        lambda run: [],
        lambda run: run.loader(numbers, batch_size=4),
    ):
        err = io.StringIO()
        with (
            contextlib.redirect_stderr(err),
            paceline.session(cpu=True, progress=False, report=False) as run,
        ):
            loader = make(run)
            for _ in run.epochs(2):
                for _ in run.steps(loader, max_steps=1):
                    pass
        said.append(err.getvalue().count("all ranks got the same first batch"))
    return said


def test_ranks_that_get_the_same_batches_are_warned_once(ranks: Ranks) -> None:
    assert ranks(warned_of_same_batches, 2) == [[1, 0, 1, 0, 0, 0, 0], [0] * 7]
    assert warned_of_same_batches()[0] == 0


def test_a_sampler_gets_each_epoch_that_it_is_used_in(tmp_path: Path) -> None:
    sampler, seen = DistributedSampler(range(8), 1, 0), []
    with paceline.session(folder=tmp_path, cpu=True, progress=False, report=False) as run:
        for epoch in run.epochs(7):
            list(run.steps(DataLoader(Numbers(8), sampler=sampler if epoch % 2 else None)))
            seen.append(sampler.epoch)
    assert seen == [0, 1, 1, 3, 3, 5, 5]


def test_an_epoch_that_the_script_has_set_stays(tmp_path: Path) -> None:
    seen: Seen = []
    with paceline.session(folder=tmp_path, cpu=True, progress=False, report=False) as run:
        own, ours = (DistributedSampler(range(8), 1, 0) for _ in range(2))
        for epoch in run.epochs(3):
            own.set_epoch(epoch + 1)
            for sampler in (own, ours):
                list(run.steps(DataLoader(Numbers(8), sampler=sampler)))
            seen.append((epoch, "", (own.epoch, ours.epoch)))
    assert [epochs for _, _, epochs in seen] == [(1, 0), (2, 1), (3, 2)]


def test_an_epoch_that_the_script_has_set_stays_outside_of_run_epochs(tmp_path: Path) -> None:
    sampler = DistributedSampler(range(8), 1, 0)

    def body(run: Any, seen: Seen) -> None:
        for epoch in (3, 4):
            sampler.set_epoch(epoch)
            for _ in run.steps(DataLoader(Numbers(8), sampler=sampler)):
                seen.append((sampler.epoch, "", None))

    assert [epoch for epoch, _, _ in train(tmp_path, body)] == [3] * 8 + [4] * 8
