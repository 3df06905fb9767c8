"""Workers load the first batch while the script sets up, and the loop gets the same batches as without."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, RandomSampler

import paceline
from paceline.runtime.data import worker_lifetime
from paceline.runtime.data.loader_selection import make_loader
from paceline.runtime.distributed.identity import Identity
from paceline.runtime.run import Run
from tests.forked_ranks import Ranks
from tests.runtime.data.datasets import Endless
from tests.runtime.models import net
from tests.runtime.training.test_wrap import quiet


class Recorded(Dataset[Any]):
    """Items with random numbers. Each one that is computed leaves a line."""

    def __init__(self, samples: int, file: Path) -> None:
        self.samples, self.file = samples, file
        self.scale = 1.0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.file.open("a") as file:
            file.write(f"{index} {os.getpid()}\n")
        if index == 99:
            raise ValueError("item 99 is broken")
        return torch.tensor([index, self.scale, torch.rand(()).item()])


class Stream(IterableDataset[Any]):
    """A stream of numbers. Each one that is read leaves a line."""

    def __init__(self, samples: int, file: Path) -> None:
        self.samples, self.file = samples, file

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(self.samples):
            with self.file.open("a") as file:
                file.write(f"{index} {os.getpid()}\n")
            yield torch.tensor([index, 1.0, torch.rand(()).item()])


class EpochStream(Stream):
    """A stream that knows its epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def fetched(file: Path) -> list[int]:
    return [int(line.split()[0]) for line in file.read_text().splitlines()] if file.exists() else []


def wait_for_items(file: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(fetched(file)) < count:
        assert time.monotonic() < deadline, "no worker has begun"
        time.sleep(0.01)


def has_workers(loader: Any) -> bool:
    pool = loader.source._workers if hasattr(loader, "source") else loader._workers
    return pool.iterator is not None


def expected(data: Any, epoch: int = 0, **options: Any) -> list[list[list[float]]]:
    """Return the batches of a loop whose workers begin in it."""
    loader = make_loader(data, batch_size=4, num_workers=2, seed=3, identity=Identity(), **options)
    found = [micro.data.tolist() for micro in loader.micro_batches(epoch)]
    loader.close()
    data.file.unlink(missing_ok=True)
    return found


def open_run(folder: Path, **settings: Any) -> Any:
    return quiet(seed=3, folder=folder, **settings)


def train(run: Run, loader: Any, count: int | None = None) -> list[list[list[float]]]:
    return [batch.tolist() for batch in run.steps(loader, max_steps=count)]


@pytest.mark.parametrize("kind", [Recorded, Stream, EpochStream])
def test_the_first_batch_is_loaded_before_the_loop(kind: Any, tmp_path: Path) -> None:
    data = kind(16, tmp_path / "items")
    wanted = expected(kind(16, tmp_path / "items"))
    with open_run(tmp_path / "run") as run:
        before = torch.get_rng_state()
        loader = run.loader(data, batch_size=4, num_workers=2, early=True)
        wait_for_items(data.file, 4)
        assert torch.equal(before, torch.get_rng_state())
        run.resume(model=run.wrap(net()), loader=loader)
        assert train(run, loader) == wanted
        assert loader.early.seconds > 0
        if kind is Recorded:
            assert sorted(fetched(data.file)) == list(range(16))  # none twice
            assert len({line.split()[1] for line in data.file.read_text().splitlines()}) == 2
        assert train(run, loader) == expected(data, 1)


@pytest.mark.parametrize("context", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("ranks")  # with the fork server of all tests
def test_workers_of_any_start_method_begin_early(context: str, tmp_path: Path) -> None:
    data = Recorded(16, tmp_path / "items")
    wanted = expected(data)
    with open_run(tmp_path / "run") as run:
        loader = run.loader(
            data, batch_size=4, num_workers=1, early=True, multiprocessing_context=context
        )
        wait_for_items(data.file, 4)
        run.resume(model=run.wrap(net()), loader=loader)
        assert train(run, loader) == wanted
        assert loader.early.seconds > 0
        assert sorted(fetched(data.file)) == list(range(16))  # none twice


@pytest.mark.parametrize("context", ["spawn", "fork"])
def test_nobody_waits_for_workers_whose_batches_are_not_used(
    context: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_lifetime, "SHUTDOWN_TIMEOUT", 3600.0)
    (tmp_path / "items").mkdir()
    with open_run(tmp_path / "run") as run:
        endless = Endless(16, str(tmp_path / "items"))
        loader = run.loader(
            endless, batch_size=4, num_workers=1, early=True, multiprocessing_context=context
        )
        assert has_workers(loader)
        deadline = time.monotonic() + 60
        # the other one imports torch meanwhile
        while context == "fork" and not any((tmp_path / "items").iterdir()):
            assert time.monotonic() < deadline, "no worker has begun"
            time.sleep(0.01)
    assert not has_workers(loader)


def test_without_being_asked_nothing_begins_before_the_loop(tmp_path: Path) -> None:
    data = Recorded(16, tmp_path / "items")
    with open_run(tmp_path / "run") as run:
        loader = run.loader(data, batch_size=4, num_workers=2)
        run.resume(model=run.wrap(net()), loader=loader)
        assert not has_workers(loader)
        train(run, loader)
    assert loader.early.seconds == 0


class Level:
    """A state that batches depend on, such as that of a curriculum."""

    def __init__(self) -> None:
        self.level = 1

    def state_dict(self) -> dict[str, int]:
        return {"level": self.level}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.level = state["level"]


def test_workers_begin_with_all_that_is_restored(tmp_path: Path) -> None:
    data, found = Recorded(24, tmp_path / "items"), []
    for most in (3, None):
        level = Level()
        with open_run(tmp_path / "run", max_steps=most) as run:
            loader = run.loader(
                data,
                batch_size=4,
                num_workers=2,
                early=True,
                shuffle=False,
                collate_fn=lambda items, level=level: torch.stack(items)[:, 0] * level.level,
            )
            run.resume(level=level, model=run.wrap(net()), loader=loader)
            for batch in run.steps(loader):
                found.append(batch.tolist())
                level.level = 2
    assert found[3] == [24, 26, 28, 30]
    assert loader.early.seconds > 0


def test_a_thread_that_ends_takes_no_workers_with_it(tmp_path: Path) -> None:
    data, made = Recorded(16, tmp_path / "items"), []
    with open_run(tmp_path / "run") as run:
        thread = threading.Thread(
            target=lambda: made.append(run.loader(data, batch_size=4, num_workers=2, early=True))
        )
        thread.start()
        thread.join()
        assert not has_workers(made[0])
        assert len(train(run, made[0])) == 4


@pytest.mark.parametrize("kind", [Recorded, Stream])
def test_a_resumed_loop_begins_where_it_was_saved(kind: Any, tmp_path: Path) -> None:
    data = kind(24, tmp_path / "items")
    wanted = expected(data)
    folder = tmp_path / "run"
    with open_run(folder, max_steps=3) as run:
        model = run.wrap(net())
        loader = run.loader(data, batch_size=4, num_workers=2)
        run.resume(model=model, loader=loader)
        for _ in run.epochs(1):
            assert train(run, loader) == wanted[:3]
    data.file.unlink()
    with open_run(folder) as run:
        loader = run.loader(data, batch_size=4, num_workers=2, early=True)
        model = run.wrap(net())
        assert not has_workers(loader)  # nobody knows where yet
        run.resume(model=model, loader=loader)
        wait_for_items(data.file, 4)
        found = []
        for epoch in run.epochs(2):
            found.append(train(run, loader))
            if epoch == 0 and kind is Recorded:
                assert len(fetched(data.file)) == 12
            assert epoch or loader.early.seconds > 0
    assert found == [wanted[3:], expected(data, 1)]


def test_a_position_that_moves_discards_what_has_begun(tmp_path: Path) -> None:
    data = Recorded(24, tmp_path / "items")
    wanted = expected(data)
    with open_run(tmp_path / "first", max_steps=3) as run:
        model, loader = run.wrap(net()), run.loader(data, batch_size=4, num_workers=2)
        run.resume(model=model, loader=loader)
        train(run, loader)
    with open_run(tmp_path / "second") as run:
        loader = run.loader(data, batch_size=4, num_workers=2, early=True)
        assert has_workers(loader)
        model = run.wrap(net())
        run.resume(model=model, loader=loader, folder=tmp_path / "first" / "checkpoints")
        assert train(run, loader) == wanted[3:]
    with open_run(tmp_path / "third") as run:
        loader = run.loader(data, batch_size=4, num_workers=2, early=True)
        loader.load_state_dict({**loader.state_dict(), "step": 2, "seed": 3})
        assert train(run, loader) == wanted[2:]
        assert loader.early.seconds == 0


def change_attribute(data: Recorded) -> None:
    data.scale = 2.0


def change_dtype(data: Recorded) -> None:
    torch.set_default_dtype(torch.float64)


@pytest.mark.parametrize("change", [change_attribute, change_dtype])
@pytest.mark.parametrize("persistent", [True, False])
def test_workers_see_what_the_script_changes_until_the_loop(
    change: Any, persistent: bool, tmp_path: Path
) -> None:
    data = Recorded(16, tmp_path / "items")
    with open_run(tmp_path / "run") as run:
        loader = run.loader(
            data, batch_size=4, num_workers=2, persistent_workers=persistent, early=True
        )
        run.resume(loader=loader)
        assert has_workers(loader)
        try:
            change(data)
            found = train(run, loader)
            assert found == expected(data)
        finally:
            torch.set_default_dtype(torch.float32)
    assert loader.early.seconds == 0


# torch's
@pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_errors_are_raised_in_the_loop(tmp_path: Path) -> None:
    data = Recorded(100, tmp_path / "items")
    with open_run(tmp_path / "run") as run:
        loader = run.loader(data, batch_size=50, shuffle=False, num_workers=2, early=True)
        run.resume(loader=loader)
        wait_for_items(data.file, 100)
        batches = iter(run.steps(loader))
        assert len(next(batches)) == 50
        with pytest.raises(ValueError, match="item 99 is broken"):
            next(batches)
    unpicklable = Recorded(8, tmp_path / "items")
    unpicklable.scale = lambda: 1.0  # type: ignore[assignment]
    with open_run(tmp_path / "other") as run:
        loader = run.loader(
            unpicklable, batch_size=4, num_workers=1, multiprocessing_context="spawn", early=True
        )
        run.resume(loader=loader)
        with pytest.raises(Exception, match="pickle"):
            train(run, loader)


def test_nothing_begins_where_it_could_differ(tmp_path: Path) -> None:
    data = Recorded(16, tmp_path / "items")
    with open_run(tmp_path / "run") as run:
        in_process = run.loader(data, batch_size=4, early=True)
        run.resume(loader=in_process)
        assert not has_workers(in_process)
    with open_run(tmp_path / "sampled") as run:
        sampled = run.loader(
            data, batch_size=4, num_workers=2, sampler=RandomSampler(data), early=True
        )
        run.resume(loader=sampled)
        assert not has_workers(sampled)
    with open_run(tmp_path / "grad") as run:
        with torch.no_grad():
            loader = run.loader(data, batch_size=4, num_workers=2, early=True)
            run.resume(loader=loader)
        assert not has_workers(loader)
    with open_run(tmp_path / "iterated") as run:  # by the script, which goes on with it
        loader = run.loader(data, batch_size=4, shuffle=False, num_workers=2, early=True)
        own = iter(loader)
        found = [next(own)]
        run.resume(loader=loader)
        found += list(own)
        assert torch.cat(found)[:, 0].tolist() == list(range(16))


def test_only_the_loader_that_trains_begins(tmp_path: Path) -> None:
    first, second = Recorded(16, tmp_path / "first"), Recorded(16, tmp_path / "second")
    with open_run(tmp_path / "run") as run:
        tests = run.loader(first, batch_size=4, shuffle=False, num_workers=2, early=True)
        run.wrap(torch.nn.Linear(1, 1))
        assert has_workers(tests)
        loader = run.loader(second, batch_size=4, num_workers=2, early=True)
        run.resume(loader=loader)
        assert (has_workers(tests), has_workers(loader)) == (False, True)
    with open_run(tmp_path / "other") as run:
        tests = run.loader(first, batch_size=4, shuffle=False, num_workers=2, early=True)
        run.resume(tests=tests)
        assert has_workers(tests)
        assert torch.cat(list(run.evaluate(tests)))[:, 0].tolist() == list(range(16))
        assert not has_workers(tests)


def train_on_two(folder: str) -> list[Any]:
    data = Recorded(16, Path(folder) / f"items-{os.environ['RANK']}")
    found = []
    for number, early in enumerate((True, False)):
        with paceline.session(
            seed=3, cpu=True, report=False, progress=False, folder=Path(folder) / str(number)
        ) as run:
            loader = run.loader(
                data, batch_size=8, num_workers=2, early=early, multiprocessing_context="fork"
            )
            model = run.wrap(net()) if early else net()
            if early:
                run.resume(model=model, loader=loader)
            found.append([batch.tolist() for batch in run.steps(loader)])
            assert (loader.early.seconds > 0) == early
    return found


def test_every_rank_gets_its_own_part(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(train_on_two, 2, str(tmp_path))
    assert [early for early, _ in found] == [late for _, late in found]
    assert sorted(row[0] for rank in found for batch in rank[0] for row in batch) == list(range(16))
