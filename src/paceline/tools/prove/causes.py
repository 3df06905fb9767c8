"""What can break a proof, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from paceline.contract.rank_records import BATCHNORM, DROPOUT

SAMPLER = "a wrong sampler"
VALUES = "samples whose values depend on the ranks"
EITHER = "different samples or different values"
BATCH = "the batch size"
INITIAL = "initial weights"
NOT_AVERAGED = "gradients that are not averaged"
DRAWN = "random numbers in the forward pass"
SUM = "an unscaled sum"
TIMES_RANKS = "a loss that is multiplied by the number of ranks"
SUMMED = "gradients that are summed over the ranks"
DIVIDED = "gradients that are divided twice"
SCALE = "the scale of the gradients"
SPLIT = "a loss that depends on the split of the batch"
RATE = "the learning rate"
RESUME = "the resume"
SEED = "no fixed seed"
UNSTABLE = "equal runs that differ"
UNKNOWN = "unknown"

MODEL_CAUSES = {DROPOUT: "dropout", BATCHNORM: "BatchNorm"}

_LOADER = (
    "Use run.loader, which splits each global batch. With a DataLoader of your own, use "
    "DistributedSampler, with the same seed on all ranks."
)
_KEYED = (
    "In most scripts, this is an augmentation: let each sample's random numbers depend on the "
    "sample, not on the rank or on what was drawn before. run.loader seeds each item from (seed, "
    "epoch, index), for torch's, NumPy's and Python's global generators in the dataset. What the "
    "loop draws or computes for a whole batch, such as its mean, differs between ranks."
)
_ON_GPUS = (
    "On GPUs, a script without the runtime also needs torch.use_deterministic_algorithms(True)."
)
FIXES = {
    SAMPLER: _LOADER,
    VALUES: _KEYED,
    EITHER: f"{_LOADER} {_KEYED}",
    BATCH: "Use run.loader, whose batch size counts all ranks. For a script that takes the batch "
    "size per rank, name its option: --batch-arg --batch-size.",
    INITIAL: "Build the model with the same seed on all ranks and at every number of them: do not "
    "add the rank, and do not draw random numbers for the data before it. Wrap it in "
    "DistributedDataParallel or run.wrap, which copy the weights of rank 0 to the others.",
    NOT_AVERAGED: "Wrap the model in DistributedDataParallel or run.wrap, and build the optimizer "
    "from its parameters.",
    MODEL_CAUSES[DROPOUT]: "This is expected: each rank draws its own dropout. To prove the rest, "
    "add --without dropout.",
    MODEL_CAUSES[BATCHNORM]: "Convert the model with torch.nn.SyncBatchNorm.convert_sync_batchnorm "
    "(on GPUs), or use GroupNorm or LayerNorm. To prove the rest, add --without batchnorm.",
    DRAWN: "This is expected with noise, sampling and stochastic depth. To prove the rest, turn it "
    "off with an option of the script.",
    SUM: "DDP averages gradients over ranks, so each rank's loss has to be the mean over its own "
    'samples: use reduction="mean", or run.backward(loss_sum, weight=n), which divides by the '
    "global count.",
    TIMES_RANKS: "DDP averages gradients over ranks: the loss needs no factor.",
    SUMMED: "Divide them by the number of ranks, or let DDP do it.",
    DIVIDED: "DDP divides them by the number of ranks already: do not divide them again.",
    SCALE: "Look for a factor of the gradients, or of the loss, that depends on the number of "
    "ranks.",
    SPLIT: "If the loss is a mean over tokens, or over anything else that ranks have different "
    "numbers of, pass its sum and the count: run.backward(loss_sum, weight=n). A loss that "
    "compares the samples of a batch sees only those of its own rank. So do statistics of a batch, "
    "and random numbers from a generator of its own.",
    RATE: "At an equal global batch the learning rate stays the same: scale it by the global "
    "batch, as run.scale_lr(opt, batch=..., reference=...) does, and count steps of the schedule "
    "as steps of the optimizer.",
    RESUME: "Pass everything that changes during training to run.resume: schedulers, averages of "
    "weights, generators, your own counters. Let run.loader read the data.",
    SEED: f"Seed everything: paceline.session(seed=0), or --seed 0. {_ON_GPUS}",
    UNSTABLE: "Look for other sources of randomness (NumPy, Python, the order of a set or of "
    "files), for files that the script reads and writes, for the time, and for what it reads from "
    f"its environment: variables, the working directory, numbers of threads. {_ON_GPUS}",
    UNKNOWN: "If the difference grows slowly from a tiny one, it is rounding: try a lower learning "
    "rate, fewer steps, float64, or --tolerance. If the first gradients differ, look for what acts "
    "before the first step: the samples, what the model computes, and what changes gradients. "
    "Otherwise look for what changes during training, or differs between ranks: a schedule, a "
    "condition, an average of weights, a step that some ranks skip.",
}


@dataclass(frozen=True)
class Cause:
    """A cause of a failed proof: its name, and what shows it."""

    name: str
    evidence: str

    @property
    def fix(self) -> str:
        return FIXES[self.name]

    def as_json(self) -> dict[str, str]:
        return {**asdict(self), "fix": self.fix}
