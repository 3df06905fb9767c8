"""WebDataset pipelines, with the real package: every sample once, repeatable order, ranks end together."""

from __future__ import annotations

import io
import tarfile
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from paceline.errors import UsageError
from paceline.runtime.data.evaluation import make_evaluation_loader
from paceline.runtime.data.loader import make_loader
from paceline.runtime.data.sharded_iterable import Example
from paceline.runtime.data.stream_loader import StreamLoader
from paceline.runtime.distributed.identity import Identity, read_identity
from tests.forked_ranks import Ranks

wds = pytest.importorskip("webdataset")
SIZES = (9, 4, 7, 12, 5, 8)  # samples per shard, so that workers get different numbers


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
    """A pipeline as users write it: shuffled twice, with no mention of ranks."""
    return wds.WebDataset(urls, **{"shardshuffle": 100, **options}).shuffle(10).map(number_of)


def by_hand(urls: list[str]) -> Any:
    """A pipeline that shuffles before the split, where all ranks must shuffle alike."""
    return wds.DataPipeline(
        wds.SimpleShardList(urls),
        wds.shuffle(100),
        wds.split_by_node,
        wds.split_by_worker,
        wds.tarfile_to_samples(),
        wds.detshuffle(10),
        wds.map(number_of),
    )


def read(loader: StreamLoader, epoch: int | None = None) -> list[list[int]]:
    found = [
        micro.data.tolist()[: micro.count] for micro in loader.micro_batches(epoch or loader.epoch)
    ]
    loader.close()
    return found


def rank_reads(
    urls: list[str], workers: int, make: Callable[[list[str]], Any], drop_last: bool
) -> Any:
    """Read three epochs, then interrupt and resume the second after several steps."""
    identity = read_identity()
    if identity.world_size > 1:
        dist.init_process_group("gloo")

    def loader() -> StreamLoader:
        made = make_loader(
            make(urls),
            batch_size=4,
            num_workers=workers,
            drop_last=drop_last,
            seed=3,
            identity=identity,
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
    if identity.world_size > 1:
        dist.destroy_process_group()
    return epochs, resumed


@pytest.mark.parametrize("make", [pipeline, by_hand])
@pytest.mark.parametrize(
    ("world_size", "workers"),
    [(1, 0), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 2), (2, 0))), (2, 2)],
)
def test_every_sample_appears_once_and_an_interrupted_epoch_resumes_exactly(
    ranks: Ranks, shards: list[str], world_size: int, workers: int, make: Callable[[list[str]], Any]
) -> None:
    results = ranks(rank_reads, world_size, shards, workers, make, False)
    for epoch in range(3):
        seen = Counter(
            number for epochs, _ in results for batch in epochs[epoch] for number in batch
        )
        assert seen == Counter(range(sum(SIZES)))
    assert all(len(epochs[1]) == len(results[0][0][1]) for epochs, _ in results)
    assert all(resumed == [True] * 3 for _, resumed in results)
    epochs = results[0][0]
    assert epochs[0] != epochs[1] != epochs[2]


def test_drop_last_ends_all_ranks_together_and_loses_only_the_excess_of_one(
    ranks: Ranks, shards: list[str]
) -> None:
    results = ranks(rank_reads, 2, shards, 2, pipeline, True)
    for epoch in range(3):
        first, second = (epochs[epoch] for epochs, _ in results)
        assert len(first) == len(second) > 0
        assert all(len(batch) == 2 for batch in first + second)
        seen = [number for batch in first + second for number in batch]
        assert len(set(seen)) == len(seen)
    assert all(resumed == [True] * 3 for _, resumed in results)
    lost = [
        set(range(sum(SIZES))) - {n for epochs, _ in results for b in epochs[e] for n in b}
        for e in range(3)
    ]
    assert len(set(map(frozenset, lost))) > 1  # not the same ones in every epoch


def test_one_worker_ending_early_does_not_end_the_rank(shards: list[str]) -> None:
    loader = make_loader(
        pipeline(shards[:2], shardshuffle=False), batch_size=4, num_workers=2, identity=Identity()
    )
    assert isinstance(loader, StreamLoader)
    # 9 and 4 samples: two full batches and one; with drop_last the ninth sample is dropped.
    assert [len(batch) for batch in read(loader, 0)] == [4, 4, 4]


def test_too_few_shards_are_read_by_all_workers(shards: list[str]) -> None:
    notes: list[str] = []
    seen: list[int] = []
    for rank in range(2):
        # There is no process group here, so this test only reads.
        loader = StreamLoader(
            pipeline(shards[:3]),
            batch_size=4,
            num_workers=2,
            identity=Identity(rank, 2),
            notify=notes.append,
        )
        batches = [each for each in loader._start_pass() if not isinstance(each, Example)]
        seen += [n for each in batches for n in each[1].tolist()]
        loader.close()
    assert sorted(seen) == list(range(sum(SIZES[:3])))
    assert notes[0].startswith("3 shards are too few for 2 ranks with 2 workers each")


def test_resampled_shards_resume_exactly(shards: list[str]) -> None:
    def loader() -> StreamLoader:
        return StreamLoader(
            pipeline(shards, resampled=True, shardshuffle=False).with_epoch(20),
            batch_size=4,
            num_workers=2,
            identity=Identity(),
            notify=lambda text: None,
        )

    whole = read(loader(), 1)
    assert len(whole) == 10  # 20 samples of each worker
    resumed = loader()
    resumed.load_state_dict({**resumed.state_dict(), "epoch": 1, "step": 3})
    assert read(resumed) == whole[3:]


def test_a_resume_with_another_number_of_ranks_prints_a_note(shards: list[str]) -> None:
    notes: list[str] = []
    loader = StreamLoader(pipeline(shards), batch_size=4, identity=Identity(), notify=notes.append)
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "step": 2, "world_size": 2})
    assert len(read(loader)) == sum(SIZES) // 4 - 2
    assert "appear twice or not at all" in notes[0]


def evaluates(urls: list[str]) -> list[int]:
    dist.init_process_group("gloo")
    seen = [
        n
        for batch in make_evaluation_loader(pipeline(urls), batch_size=8, num_workers=1)
        for n in batch.tolist()
    ]
    dist.destroy_process_group()
    return seen


def test_evaluation_counts_every_sample_once(ranks: Ranks, shards: list[str]) -> None:
    for some in (shards, shards[:1]):
        first, second = ranks(evaluates, 2, some)
        assert sorted(first + second) == list(range(sum(SIZES[: len(some)])))


def test_unsupported_pipelines_are_rejected(shards: list[str]) -> None:
    for dataset, text in (
        (pipeline(shards).batched(4), "already makes batches"),
        (wds.WebLoader(pipeline(shards), batch_size=4), "got a WebLoader"),
        (wds.RandomMix([pipeline(shards[:3]), pipeline(shards[3:])]), "mixes pipelines"),
    ):
        with pytest.raises(UsageError, match=text):
            make_loader(dataset, batch_size=4, identity=Identity())
    with pytest.raises(UsageError, match="split shards by ranks"):
        make_loader(pipeline(shards, nodesplitter=None), batch_size=4, identity=Identity(0, 2))
    with pytest.raises(UsageError, match="split shards by workers"):
        make_loader(
            pipeline(shards, workersplitter=None), batch_size=4, num_workers=2, identity=Identity()
        )
