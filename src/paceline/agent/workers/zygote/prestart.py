"""A zygote that is started ahead of everything: it imports torch while the command line still reads its options.

What the run will need is guessed from the words that were typed. A wrong guess costs nothing but a little work: the
agent sends the zygote away and starts its own. If the command ends early, the zygote ends with it.
"""

from __future__ import annotations

import os
import sys

from paceline.agent.workers.zygote.start import FORKING_STYLES, THREADS, Opening, count_of, open_zygote
from paceline.contract.gpus import visible_devices

# Options of `paceline run` that stand alone; all others are followed by a value.
ALONE = (
    "-m", "--module", "--cpu", "--debug", "--no-snapshot", "--wandb", "--no-wandb", "--wandb-all-processes",
    "--tensorboard",
)  # fmt: skip
ENDS = ("--dry-run", "--help", "-h", "--resume")  # nothing is started, or not what is typed

_descriptor: int | None = None


def descriptor() -> int | None:
    """The socket of the zygote that waits for its agent, None when there is none."""
    return _descriptor


def begin(words: list[str]) -> None:
    """`words` as in sys.argv. Never raises: without a head start the run begins a little later."""
    global _descriptor
    if len(words) < 3 or words[1] != "run" or sys.platform != "linux":
        return
    try:
        opening = guess(words[2:], cores=len(os.sched_getaffinity(0)), environ=dict(os.environ))
        if opening is not None:
            ours, _ = open_zygote(sys.executable, opening, dict(os.environ))
            _descriptor = ours.detach()
    except (OSError, ValueError):
        return


def guess(words: list[str], *, cores: int, environ: dict[str, str]) -> Opening | None:
    """What a zygote for this command would be told; None when none will be needed."""
    options, is_module, program = _split(words)
    if program is None or options is None:
        return None
    if not is_module and (not os.path.isfile(program) or _may_not_fork(program)):
        return None
    if options.get("--style", ["fork"])[-1] not in FORKING_STYLES or options.get("--nodes", ["1"])[-1] != "1":
        return None
    if any(
        text.startswith(("OMP_", "MKL_", "TORCH_", "PYTORCH_", "CUDA_")) for text in options.get("--env", [])
    ):
        return None
    nproc = int(options["--nproc"][-1]) if "--nproc" in options else _usual_ranks("--cpu" in options, environ)
    if nproc < 1:
        return None
    threads = count_of(environ.get(THREADS, "")) or max(1, cores // nproc)
    return Opening(program, is_module=is_module, threads=threads, preload=options.get("--preload", []))


def _split(words: list[str]) -> tuple[dict[str, list[str]] | None, bool, str | None]:
    """Options with their values, and the program."""
    options: dict[str, list[str]] = {}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            return options, "-m" in options or "--module" in options, word
        if name in ENDS:
            return None, False, None
        given = value if equals else "" if name in ALONE else next(rest, "")
        options.setdefault(name, []).append(given)
    return options, False, None


def _may_not_fork(program: str) -> bool:
    """Whether the script sets variables in its first lines; whether these matter is for the agent to say."""
    with open(program, "rb") as file:
        head = file.read(65536)
    before_torch = head.partition(b"import torch")[0]
    return b"environ" in before_torch or b"putenv" in before_torch


def _usual_ranks(on_cpu: bool, environ: dict[str, str]) -> int:
    """As the plan has it: one per visible GPU, else two."""
    gpus = sum(1 for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit())
    visible = visible_devices(environ)
    if visible is not None:
        gpus = min(gpus, len(visible))
    return 2 if on_cpu or not gpus else gpus
