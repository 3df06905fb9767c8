"""WebDataset pipelines as streams: shards are dealt out by rank and worker, and every shuffle is seeded.

Left to itself a pipeline refuses to run on several ranks, and shuffles by the clock. Here the loader's seed decides,
with the epoch: an epoch that is read again comes in the same order. The package is not imported: its stages are known
by their names.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from paceline.errors import UsageError
from paceline.runtime.data.batches import Place
from paceline.runtime.data.randomness import mix

BY_RANK = ("split_by_node", "single_node_only")
BY_WORKER = ("split_by_worker",)


def is_pipeline(dataset: Any) -> bool:
    return any(
        (each.__module__, each.__name__) == ("webdataset.pipeline", "DataPipeline")
        for each in type(dataset).__mro__
    )


def refuse_mix(dataset: Any) -> None:
    """A mixture reads its pipelines as they are, each cut by worker already: to cut it once more loses samples."""
    if type(dataset).__module__ == "webdataset.mix":
        raise UsageError(
            f"{type(dataset).__name__} mixes pipelines that cut themselves",
            hint="Say nodesplitter=webdataset.split_by_node in each, and sharded=True here. "
            "Its pipelines then shuffle with seeds of their own.",
        )


class Pipeline(IterableDataset[Any]):
    """A pipeline that is read as (seed, epoch, rank, worker) say, and left as it was given."""

    def __init__(self, pipeline: Any, *, place: Place, workers: int, say: Callable[[str], None]) -> None:
        self.pipeline, self.place = pipeline, place
        self.seed = self.epoch = 0
        self.stages: list[Any] = list(pipeline.pipeline)
        self.names = [_name(stage) for stage in self.stages]
        self._refuse_batches()
        self.resamples = "ResampledShards" in self.names
        lanes = place.world_size * max(1, workers)
        shards = getattr(self.stages[0], "urls", None)
        # Too few shards to go round: all read all of them, and each keeps its own items.
        self.splits = self.resamples or shards is None or len(shards) >= lanes
        if not self.splits:
            say(
                f"{len(shards or ())} shards are too few for {place.world_size} ranks with {max(1, workers)} workers "
                "each: every one of them reads them all, and keeps its share"
            )
        self._refuse_uncut(workers)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        splits = [at for at, name in enumerate(self.names) if name in BY_RANK + BY_WORKER]
        last = splits[-1] if splits else 0
        made = copy.copy(self.pipeline)
        made.pipeline = [self._stage(number, is_own=number > last) for number in range(len(self.stages))]
        return iter(made)

    def _stage(self, number: int, *, is_own: bool) -> Any:
        """One stage with its seed: the same everywhere ahead of the cut, another in each worker behind it."""
        stage, name = self.stages[number], self.names[number]
        info = get_worker_info()
        lane = (self.place.rank, info.id if info is not None else 0)
        own = self.splits and (is_own or self.resamples)
        seed = mix(self.seed, self.epoch, number, *(lane if own else ()))
        if name in BY_RANK:
            return self._by_rank
        if name in BY_WORKER:
            return stage if self.splits else _whole
        if name == "_shuffle":
            stage = copy.copy(stage)
            stage.kw = {**stage.kw, "seed": None, "rng": random.Random(seed)}
        elif name == "detshuffle":
            stage = copy.copy(stage)
            stage.seed, stage.epoch = seed, -1
        elif name == "ResampledShards":
            stage = copy.copy(stage)
            stage.seed, stage.epoch, stage.deterministic, stage.worker_seed = seed, -1, True, _nothing
        return stage

    def _by_rank(self, shards: Iterator[Any]) -> Iterator[Any]:
        if not self.splits or self.resamples:
            return shards
        dealt = list(shards)
        if self._shuffles_shards():
            # Ahead of the cut, so that what a rank has too much of is not the same in every epoch.
            random.Random(mix(self.seed, self.epoch)).shuffle(dealt)
        return iter(dealt[self.place.rank :: self.place.world_size])

    def _shuffles_shards(self) -> bool:
        """Whether the first stage behind the cuts shuffles: that is where shards are, and not yet samples."""
        behind = max(at for at, name in enumerate(self.names) if name in BY_RANK + BY_WORKER) + 1
        if self.names[behind : behind + 1] == ["detshuffle"]:
            return True
        if self.names[behind : behind + 1] != ["_shuffle"]:
            return False
        stage = self.stages[behind]
        return bool((stage.args or (stage.kw.get("bufsize", True),))[0])

    def _refuse_batches(self) -> None:
        if any(isinstance(stage, DataLoader) for stage in self.stages):
            raise UsageError(
                "a loader is made from a data set, and a WebLoader was given",
                hint="Give the pipeline itself: run.loader(dataset, batch_size=<global>, num_workers=...).",
            )
        if "_batched" in self.names:
            raise UsageError(
                "the pipeline makes batches itself (.batched), and so would the loader",
                hint="Leave .batched out: run.loader(dataset, batch_size=<global>) makes them.",
            )

    def _refuse_uncut(self, workers: int) -> None:
        wanted = [
            (self.place.world_size > 1, BY_RANK, "ranks", "nodesplitter=webdataset.split_by_node"),
            (workers > 1, BY_WORKER, "workers", "workersplitter=webdataset.split_by_worker"),
        ]
        for needed, known, whom, remedy in wanted:
            if needed and not self.resamples and not set(known) & set(self.names):
                raise UsageError(
                    f"nothing in the pipeline splits shards by {whom}: each would read every sample",
                    hint=f"Say {remedy}. If it cuts itself in its own way, wrap it in an IterableDataset "
                    "and say sharded=True.",
                )


def _name(stage: Any) -> str:
    """What a stage of the package is called; empty for any other."""
    inner = getattr(stage, "f", stage)
    kind = inner if hasattr(inner, "__name__") else type(inner)
    return kind.__name__ if kind.__module__.startswith("webdataset") else ""


def _whole(shards: Iterator[Any]) -> Iterator[Any]:
    return shards


def _nothing() -> int:
    return 0
