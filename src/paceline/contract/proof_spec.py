"""What `paceline prove` asks the ranks of a run to record or to change, and where they do."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from paceline.contract.foreign_records import make, parse_object

DROPOUT, BATCHNORM = "dropout", "batchnorm"
# turn dropout off; compute the statistics of BatchNorm over all ranks
CHANGES = (DROPOUT, BATCHNORM)
OTHER_DRAWS = "other random numbers"  # a change, too: of what the forward pass draws
# what a model uses, besides dropout and BatchNorm: random numbers in the forward pass
DRAWS = "draws"

# an agent loads it by name in a rank: only the runtime imports torch
RECORDER = "paceline.runtime.proof.start"
# the kinds of records, in the order in which a rank writes them
START, STEP, END = "start", "step", "end"


@dataclass(frozen=True)
class ProofSpec:
    """The file that the variable PACELINE_PROOF names."""

    folder: str  # each rank writes `rank-K.jsonl` there
    steps: int  # a script that does not use the runtime ends after so many
    changes: list[str] = field(default_factory=list)
    weights: str = ""  # where rank 0 writes the final weights
    # files of final weights to compare with, by name
    references: dict[str, str] = field(default_factory=dict)
    stop_at: int = 0  # after this step, rank 0 asks for a stop

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> ProofSpec:
        """Read a spec. Raises OSError or ValueError."""
        return make(cls, parse_object(path.read_text(encoding="utf-8")))


def record_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.jsonl"
