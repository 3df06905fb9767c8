"""What ranks record for `paceline prove` and for `paceline inspect data`, each in its own files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from paceline.contract.foreign_records import make, parse_object

# -- `paceline prove`: what ranks record or change, and where they do

DROPOUT, BATCHNORM = "dropout", "batchnorm"
# turn dropout off; compute the statistics of BatchNorm over all ranks
CHANGES = (DROPOUT, BATCHNORM)
# what a model uses, besides dropout and BatchNorm: random numbers in the forward pass
DRAWS = "draws"

# an agent loads it by name in a rank: only the runtime imports torch
RECORDER = "paceline.runtime.proof.patches"
# the kinds of records, in the order in which a rank writes them
START, STEP, END = "start", "step", "end"


@dataclass(frozen=True)
class ProofSpec:
    """The file that the variable PACELINE_PROOF names."""

    folder: str  # each rank writes `rank-K.jsonl` there, and rank 0 the final weights
    steps: int  # a script that does not use the runtime ends after so many
    changes: list[str] = field(default_factory=list)
    reference: str = ""  # the folder of another run, to compare its final weights with
    stop_at: int = 0  # after this step, rank 0 asks for a stop

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> ProofSpec:
        """Read a spec. Raises OSError or ValueError."""
        return make(cls, parse_object(path.read_text(encoding="utf-8")))


def weights_path(folder: Path) -> Path:
    return folder / "weights.pt"


# -- `paceline inspect data`: which samples a rank gets, in a file for each loader
#
# The first line describes the loader. Every batch follows as it comes, so the records of a run that
# fails are readable.

INDEX, POSITION, CONTENT = "index", "position", "content"  # how samples are told apart


@dataclass(frozen=True)
class LoaderFacts:
    """A loader, as one rank sees it."""

    rank: int
    world_size: int
    kind: str  # what the script uses, for people: "run.loader", "DataLoader"
    # INDEX of a map-style dataset; POSITION in a stream; CONTENT if a stream splits itself
    keys: str
    samples: int | None = None  # None if unknown
    # as the script gave it: of all ranks for run.loader, of one rank for a DataLoader
    batch_size: int | None = None
    accumulate: int = 1
    num_workers: int = 0
    shuffled: bool | None = None  # None if a sampler or the stream decides
    drop_last: bool = True
    dataset: str = ""
    sampler: str = ""
    # digests of the first items that this rank reads of a stream
    beginning: list[str] = field(default_factory=list)
    number: int = 0  # of the loader: a script may have several


@dataclass(frozen=True)
class Batch:
    """One rank's samples in one micro-step."""

    epoch: int
    step: int
    micro: int
    worker: int | None
    keys: list[int | str]
    digests: list[str] = field(default_factory=list)  # of the items of a stream


@dataclass(frozen=True)
class EpochStart:
    """Says that an epoch begins. If it has begun before, the script has only had a look at it,
    which doesn't count.
    """

    epoch: int


@dataclass(frozen=True)
class EpochEnd:
    """Says that a rank has seen all batches of an epoch, rather than the first ones."""

    epoch: int


@dataclass(frozen=True)
class Trained:
    """Says that batches of the loader reach a backward pass."""


@dataclass(frozen=True)
class Items:
    """Digests of the first items of this rank's dataset; None for one that is another one each
    time it is read.
    """

    digests: list[str | None]


Record = LoaderFacts | EpochStart | Batch | EpochEnd | Trained | Items
_KINDS: dict[str, type[Record]] = {
    kind.__name__: kind for kind in (LoaderFacts, EpochStart, Batch, EpochEnd, Trained, Items)
}


def record_path(folder: Path, rank: int, loader: int = 0) -> Path:
    return folder / (f"rank-{rank}.jsonl" if loader == 0 else f"rank-{rank}-loader-{loader}.jsonl")


def write_record(file: IO[str], record: Record) -> None:
    file.write(json.dumps({"record": type(record).__name__, **asdict(record)}) + "\n")
    file.flush()


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a file. A last line that was not finished is left out."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                fields = json.loads(line)
                yield _KINDS[fields.pop("record")](**fields)
