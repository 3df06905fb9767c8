"""WebDataset pipelines, with the real package: every sample once, the same order again, ranks end together."""

from __future__ import annotations

import io
import multiprocessing
import tarfile
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from paceline.errors import UsageError
from paceline.runtime.data.batches import At
from paceline.runtime.data.evaluation import evaluate
from paceline.runtime.data.loader import make_loader
from paceline.runtime.data.streams import StreamLoader
from paceline.runtime.distributed.identity import read_identity
from tests.forked import Ranks

wds = pytest.importorskip("webdataset")
SIZES = (9, 4, 7, 12, 5, 8)  # samples of each shard: lanes come out uneven


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("shards")
    number = 0
    for shard, size in enumerate(SIZES):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for _ in range(size):
                about = tarfile.TarInfo(f"{number:03d}.txt")
                about.size = 3
                archive.addfile(about, io.BytesIO(b"%03d" % number))
                number += 1
    return [str(path) for path in sorted(folder.glob("*.tar"))]


def number_of(sample: dict[str, Any]) -> int:
    return int(sample["txt"])


def pipeline(urls: list[str], **options: Any) -> Any:
    """As users write them: shuffled twice, and nothing said about ranks."""
    return wds.WebDataset(urls, **{"shardshuffle": 100, **options}).shuffle(10).map(number_of)


def by_hand(urls: list[str]) -> Any:
    """Shuffled ahead of the cut, where all ranks must do so alike."""
    return wds.DataPipeline(
        wds.SimpleShardList(urls), wds.shuffle(100), wds.split_by_node, wds.split_by_worker,
        wds.tarfile_to_samples(), wds.detshuffle(10), wds.map(number_of),
    )  # fmt: skip


def read(loader: StreamLoader, epoch: int | None = None) -> list[list[int]]:
    found = [micro.data.tolist()[: micro.count] for micro in loader.micro_batches(epoch or loader.epoch)]
    loader.close()
    return found


def rank_reads(urls: list[str], workers: int, make: Callable[[list[str]], Any], drop_last: bool) -> Any:
    """Three epochs, of which the second is then interrupted after each of its steps and resumed."""
    multiprocessing.set_start_method("fork", force=True)  # as it is on Linux; the harness has its own
    place = read_identity()
    if place.world_size > 1:
        dist.init_process_group("gloo")

    def loader() -> StreamLoader:
        made = make_loader(
            make(urls), batch_size=4, num_workers=workers, drop_last=drop_last, seed=3, identity=place
        )
        assert isinstance(made, StreamLoader)
        return made

    epochs = [read(loader(), epoch) for epoch in range(3)]
    resumed = []
    for step in (1, len(epochs[1]) // 2, len(epochs[1]) - 1):
        interrupted = loader()
        batches = interrupted.micro_batches(1)
        for _ in range(step):
            next(batches)
        state = interrupted.state_dict()
        interrupted.close()
        again = loader()
        again.load_state_dict(state)
        resumed.append(read(again) == epochs[1][step:])
    if place.world_size > 1:
        dist.destroy_process_group()
    return epochs, resumed


@pytest.mark.parametrize("make", [pipeline, by_hand])
@pytest.mark.parametrize(("world", "workers"), [(1, 0), (1, 2), (2, 0), (2, 2)])
def test_every_sample_comes_once_and_an_interrupted_epoch_goes_on_exactly(
    ranks: Ranks, shards: list[str], world: int, workers: int, make: Callable[[list[str]], Any]
) -> None:
    told = ranks(rank_reads, world, shards, workers, make, False)
    for epoch in range(3):
        seen = Counter(number for epochs, _ in told for batch in epochs[epoch] for number in batch)
        assert seen == Counter(range(sum(SIZES)))
    assert all(len(epochs[1]) == len(told[0][0][1]) for epochs, _ in told)
    assert all(resumed == [True] * 3 for _, resumed in told)
    epochs = told[0][0]
    assert epochs[0] != epochs[1] != epochs[2]


def test_dropping_the_last_ends_all_ranks_together_and_loses_only_what_one_has_more(
    ranks: Ranks, shards: list[str]
) -> None:
    told = ranks(rank_reads, 2, shards, 2, pipeline, True)
    for epoch in range(3):
        first, second = (epochs[epoch] for epochs, _ in told)
        assert len(first) == len(second) > 0
        assert all(len(batch) == 2 for batch in first + second)
        seen = [number for batch in first + second for number in batch]
        assert len(set(seen)) == len(seen)
    assert all(resumed == [True] * 3 for _, resumed in told)
    lost = [
        set(range(sum(SIZES))) - {n for epochs, _ in told for b in epochs[e] for n in b} for e in range(3)
    ]
    assert len(set(map(frozenset, lost))) > 1  # not the same ones in every epoch


def test_one_worker_ending_early_does_not_end_the_rank(shards: list[str]) -> None:
    loader = make_loader(pipeline(shards[:2], shardshuffle=False), batch_size=4, num_workers=2, identity=At())
    assert isinstance(loader, StreamLoader)
    # 9 and 4 samples: two full batches and one, and then what is left of the first.
    assert [len(batch) for batch in read(loader, 0)] == [4, 4, 4]


def test_too_few_shards_are_read_by_all(shards: list[str]) -> None:
    said: list[str] = []
    seen: list[int] = []
    for rank in range(2):
        # In one process there is no group to agree in: the reading side alone.
        loader = StreamLoader(
            pipeline(shards[:3]), batch_size=4, num_workers=2, identity=At(rank, 2), say=said.append
        )
        seen += [n for each in loader._open() for n in each[1].tolist()]
        loader.close()
    assert sorted(seen) == list(range(sum(SIZES[:3])))
    assert said[0].startswith("3 shards are too few for 2 ranks with 2 workers each")


def test_resampled_shards_go_on_exactly_too(shards: list[str]) -> None:
    def loader() -> StreamLoader:
        return StreamLoader(
            pipeline(shards, resampled=True, shardshuffle=False).with_epoch(20), batch_size=4, num_workers=2,
            identity=At(), say=lambda text: None,
        )  # fmt: skip

    whole = read(loader(), 1)
    assert len(whole) == 10  # 20 samples of each worker
    resumed = loader()
    resumed.load_state_dict({**resumed.state_dict(), "epoch": 1, "step": 3})
    assert read(resumed) == whole[3:]


def test_another_number_of_ranks_is_said(shards: list[str]) -> None:
    said: list[str] = []
    loader = StreamLoader(pipeline(shards), batch_size=4, identity=At(), say=said.append)
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "step": 2, "world_size": 2})
    assert len(read(loader)) == sum(SIZES) // 4 - 2
    assert "come twice or not at all" in said[0]


def evaluates(urls: list[str]) -> list[int]:
    multiprocessing.set_start_method("fork", force=True)
    dist.init_process_group("gloo")
    seen = [n for batch in evaluate(pipeline(urls), batch_size=8, num_workers=1) for n in batch.tolist()]
    dist.destroy_process_group()
    return seen


def test_evaluation_counts_every_sample_once(ranks: Ranks, shards: list[str]) -> None:
    for some in (shards, shards[:1]):
        first, second = ranks(evaluates, 2, some)
        assert sorted(first + second) == list(range(sum(SIZES[: len(some)])))


def test_what_cannot_be_meant_is_refused(shards: list[str]) -> None:
    for dataset, words in (
        (pipeline(shards).batched(4), "makes batches itself"),
        (wds.WebLoader(pipeline(shards), batch_size=4), "a WebLoader was given"),
        (wds.RandomMix([pipeline(shards[:3]), pipeline(shards[3:])]), "mixes pipelines"),
    ):
        with pytest.raises(UsageError, match=words):
            make_loader(dataset, batch_size=4, identity=At())
    with pytest.raises(UsageError, match="splits shards by ranks"):
        make_loader(pipeline(shards, nodesplitter=None), batch_size=4, identity=At(0, 2))
    with pytest.raises(UsageError, match="splits shards by workers"):
        make_loader(pipeline(shards, workersplitter=None), batch_size=4, num_workers=2, identity=At())
