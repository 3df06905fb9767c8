"""Whether a run repeats itself, and whether it starts where another one has ended."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.tools.prove.comparison import LossSource
from paceline.tools.prove.evidence.cause import Cause
from paceline.tools.prove.records import CaseRecords

EARLIER = "files of an earlier run"
SEED = "no fixed seed"
UNSTABLE = "equal runs that differ"
ON_GPUS = (
    "On GPUs, a script without the runtime also needs torch.use_deterministic_algorithms(True)."
)


def find_earlier_cause(records: CaseRecords, earlier: Sequence[CaseRecords]) -> Cause | None:
    """Return a cause if a run starts with weights that an earlier one had after some of its steps."""
    start = records.first.start.get("weights")
    for each in earlier:
        if each.first.start.get("weights") == start:
            return None  # it is where runs start anyway
    for each in earlier:
        for step, record in sorted(each.first.steps.items()):
            if start is not None and record.get("weights") == start:
                return Cause(
                    EARLIER,
                    f"{records.case.name} starts with the weights that {each.case.name} had after step {step}: the "
                    "script loads a file that an earlier run has written.",
                    "Write it to a relative path, because each run has its own working directory, or below {folder}, "
                    "which Paceline replaces in the arguments with a folder for that run. Remove checkpoints of "
                    "earlier runs.",
                )
    return None


def find_repeat_cause(one: CaseRecords, again: CaseRecords, source: LossSource) -> Cause | None:
    """Return a cause if two equal runs differ."""
    losses, others = source.curve(one), source.curve(again)
    start, start_again = one.first.start, again.first.start
    if start.get("weights") != start_again.get("weights"):
        what = "the initial weights already differ"
    elif losses != others:
        step = next(
            step
            for step in sorted(losses.keys() | others.keys())
            if losses.get(step) != others.get(step)
        )
        what = f"the losses differ from step {step} on"
    else:
        return None
    what = f"Two equal runs with {one.ranks_text} differ: {what}"
    if start.get("seed") != start_again.get("seed"):
        return Cause(
            SEED,
            f"{what}, and torch has a different seed.",
            f"Seed everything: paceline.session(seed=0), or --seed 0. {ON_GPUS}",
        )
    return Cause(
        UNSTABLE,
        f"{what}, although torch has the same seed. The cause is unknown.",
        "Look for other sources of randomness (NumPy, Python, the order of a set or of files), for files that the "
        f"script reads and writes, and for the time. {ON_GPUS}",
    )
