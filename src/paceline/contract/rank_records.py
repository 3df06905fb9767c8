"""What ranks record for `paceline prove` and for `paceline inspect data`, each in its own files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from paceline.contract import env
from paceline.contract.foreign_records import make, parse_object

# -- `paceline prove`: what ranks record or change, and where they do

DROPOUT, BATCHNORM = "dropout", "batchnorm"
# turn dropout off; let BatchNorm normalize each sample by itself
CHANGES = (DROPOUT, BATCHNORM)
# what a model uses, besides dropout and BatchNorm: random numbers in the forward pass
DRAWS = "draws"

# A rank loads one by name, if its variable is set: only the runtime imports torch.
RECORDERS = {
    env.PROOF: "paceline.runtime.proof.patches",
    env.SAMPLES: "paceline.runtime.data.inspection",
}
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

# the kinds of records: the loader, the first items of its dataset, the samples of one step, the end
# of an epoch, and that a step has had a backward pass
LOADER, ITEMS, BATCH, EPOCH_END, TRAINED = "loader", "items", "batch", "epoch_end", "trained"


@dataclass(frozen=True)
class LoaderFacts:
    """A loader, as one rank sees it."""

    rank: int
    world_size: int
    kind: str  # what the script uses, for people: "run.loader", "DataLoader"
    samples: int | None = None  # None for a stream
    # a stream that splits itself: only their contents tell its samples apart
    by_content: bool = False
    # as the script gave it: of all ranks for run.loader, of one rank for a DataLoader
    batch_size: int | None = None
    num_workers: int = 0
    shuffled: bool = True
    drop_last: bool = True
    dataset: str = ""
    sampler: str = ""


def record_path(folder: Path, rank: int, loader: int = 0) -> Path:
    return folder / (f"rank-{rank}.jsonl" if loader == 0 else f"rank-{rank}-loader-{loader}.jsonl")
