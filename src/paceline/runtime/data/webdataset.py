"""Read WebDataset pipelines as streams: shards are split by rank and worker, and every shuffle is
seeded.

On its own a pipeline refuses to run on several ranks and seeds its shuffles from the clock. Here
the loader's seed and the epoch decide, so an epoch that is read again comes in the same order. The
package isn't imported: its stages are recognized by name.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from paceline.errors import UsageError
from paceline.runtime.distributed.identity import Identity
from paceline.runtime.randomness import derive_seed

RANK_SPLITTERS = ("split_by_node", "single_node_only")
WORKER_SPLITTERS = ("split_by_worker",)


def is_pipeline(dataset: Any) -> bool:
    return any(
        (base.__module__, base.__name__) == ("webdataset.pipeline", "DataPipeline")
        for base in type(dataset).__mro__
    )


def check_not_mixed(dataset: Any) -> None:
    """Reject a mixture: its pipelines are already split by worker, and splitting again would lose
    samples.
    """
    if type(dataset).__module__ == "webdataset.mix":
        raise UsageError(
            f"{type(dataset).__name__} mixes pipelines that split themselves, so the loader can't "
            "split it.",
            hint="Set nodesplitter=webdataset.split_by_node in each pipeline and pass "
            "sharded=True to the loader. "
            "The pipelines then shuffle with their own seeds.",
        )


class SeededPipeline(IterableDataset[Any]):
    """A pipeline read by (seed, epoch, rank, worker). The user's pipeline object isn't changed."""

    def __init__(
        self, pipeline: Any, *, identity: Identity, workers: int, notify: Callable[[str], None]
    ) -> None:
        self.pipeline, self.identity = pipeline, identity
        self.seed = self.epoch = 0
        self.stages: list[Any] = list(pipeline.pipeline)
        self.names = [_name(stage) for stage in self.stages]
        self._check_not_batched()
        self.resamples = "ResampledShards" in self.names
        readers = identity.world_size * max(1, workers)
        shards = getattr(self.stages[0], "urls", None)
        # With fewer shards than readers, every reader reads all shards and takes its own items.
        self.splits = self.resamples or shards is None or len(shards) >= readers
        if not self.splits:
            notify(
                f"{len(shards or ())} shards are too few for {identity.world_size} ranks with "
                f"{max(1, workers)} "
                "workers each: every worker reads all shards and skips the samples of the others"
            )
        self._check_splitters(workers)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        last = max(self._splitters(), default=0)
        seeded = copy.copy(self.pipeline)
        seeded.pipeline = [
            self._stage(index, after_split=index > last) for index in range(len(self.stages))
        ]
        return iter(seeded)

    def _splitters(self) -> list[int]:
        """Return the indices of the stages that split shards."""
        return [
            index
            for index, name in enumerate(self.names)
            if name in RANK_SPLITTERS + WORKER_SPLITTERS
        ]

    def _stage(self, index: int, *, after_split: bool) -> Any:
        """Return a stage with its seed: the same everywhere before the split, one per worker after
        it.
        """
        stage, name = self.stages[index], self.names[index]
        info = get_worker_info()
        reader = (self.identity.rank, info.id if info is not None else 0)
        per_reader = self.splits and (after_split or self.resamples)
        seed = derive_seed(self.seed, self.epoch, index, *(reader if per_reader else ()))
        if name in RANK_SPLITTERS:
            return self._split_by_rank
        if name in WORKER_SPLITTERS:
            return stage if self.splits else _all_shards
        if name == "_shuffle":
            stage = copy.copy(stage)
            stage.kw = {**stage.kw, "seed": None, "rng": random.Random(seed)}
        elif name == "detshuffle":
            stage = copy.copy(stage)
            stage.seed, stage.epoch = seed, -1
        elif name == "ResampledShards":
            stage = copy.copy(stage)
            stage.seed, stage.epoch, stage.deterministic, stage.worker_seed = seed, -1, True, _zero
        return stage

    def _split_by_rank(self, shards: Iterator[Any]) -> Iterator[Any]:
        if not self.splits or self.resamples:
            return shards
        order = list(shards)
        if self._shuffles_shards():
            # Before the split, so that the shards a rank has in excess change from epoch to epoch.
            random.Random(derive_seed(self.seed, self.epoch)).shuffle(order)
        return iter(order[self.identity.rank :: self.identity.world_size])

    def _shuffles_shards(self) -> bool:
        """Return whether the first stage after the splits, which still sees shards, shuffles
        them.
        """
        first = max(self._splitters()) + 1
        if self.names[first : first + 1] == ["detshuffle"]:
            return True
        if self.names[first : first + 1] != ["_shuffle"]:
            return False
        stage = self.stages[first]
        return bool((stage.args or (stage.kw.get("bufsize", True),))[0])

    def _check_not_batched(self) -> None:
        if any(isinstance(stage, DataLoader) for stage in self.stages):
            raise UsageError(
                "run.loader() takes a dataset, but got a WebLoader.",
                hint="Pass the pipeline itself: run.loader(dataset, batch_size=<global>, "
                "num_workers=...).",
            )
        if "_batched" in self.names:
            raise UsageError(
                "The pipeline already makes batches (.batched), which is the loader's job.",
                hint="Remove .batched and set the batch size in run.loader(dataset, "
                "batch_size=<global>).",
            )

    def _check_splitters(self, workers: int) -> None:
        checks = [
            (
                self.identity.world_size > 1,
                RANK_SPLITTERS,
                "ranks",
                "nodesplitter=webdataset.split_by_node",
            ),
            (workers > 1, WORKER_SPLITTERS, "workers", "workersplitter=webdataset.split_by_worker"),
        ]
        for needed, splitters, readers, option in checks:
            if needed and not self.resamples and not set(splitters) & set(self.names):
                raise UsageError(
                    f"The pipeline doesn't split shards by {readers}: each would read every "
                    "sample.",
                    hint=f"Set {option}. If the pipeline splits itself in another way, wrap it in "
                    "an "
                    "IterableDataset and pass sharded=True.",
                )


def _name(stage: Any) -> str:
    """Return the name of a WebDataset stage; empty for any other stage."""
    inner = getattr(stage, "f", stage)
    kind = inner if hasattr(inner, "__name__") else type(inner)
    return kind.__name__ if kind.__module__.startswith("webdataset") else ""


def _all_shards(shards: Iterator[Any]) -> Iterator[Any]:
    return shards


def _zero() -> int:
    return 0
