"""Start a zygote before anything else, so that torch is imported while the command line parses its options.

The options of the zygote are guessed from the arguments. A wrong guess costs a little work and nothing else: the agent
discards the zygote and starts its own. If the command ends early, the zygote ends with it.
"""

from __future__ import annotations

import os
import sys

from paceline.agent.workers.zygote.start import FORKING_STYLES, THREADS, ZygoteOptions, parse_thread_count, start_zygote
from paceline.contract.gpus import visible_devices

# Options of `paceline run` that take no value, besides --no-...; all others are followed by one. A test compares them
# with the table of options, which takes too long to import here.
FLAGS = (
    "-m", "--module", "--check", "--continue", "--cpu", "--debug", "--deterministic", "--fitness", "--snapshot",
    "--strict", "--tensorboard", "--wandb", "--wandb-all-processes",
)  # fmt: skip
SHORT = {"-N": "--nodes", "-J": "--name"}  # with a value, which may be attached: -N2
NO_PRESTART = ("--dry-run", "--help", "-h", "--resume")  # nothing starts, or a program that is not in the arguments

_descriptor: int | None = None


def descriptor() -> int | None:
    """Return the socket of the zygote that waits for its agent, or None."""
    return _descriptor


def start(argv: list[str]) -> None:
    """Start a zygote for this command line if it needs one. Never raises: the run just starts a little later."""
    global _descriptor
    if len(argv) < 3 or argv[1] != "run" or sys.platform != "linux":
        return
    try:
        options = guess(argv[2:], cores=len(os.sched_getaffinity(0)), environ=dict(os.environ))
        if options is not None:
            ours, _ = start_zygote(sys.executable, options, dict(os.environ))
            _descriptor = ours.detach()
    except (OSError, ValueError):
        return


def guess(args: list[str], *, cores: int, environ: dict[str, str]) -> ZygoteOptions | None:
    """Return the zygote options that fit these arguments of `paceline run`; None if no zygote is needed."""
    options, is_module, program = _split(args)
    if program is None or options is None:
        return None
    if not is_module and (not os.path.isfile(program) or _sets_variables(program)):
        return None
    if options.get("--style", ["fork"])[-1] not in FORKING_STYLES or options.get("--nodes", ["1"])[-1] != "1":
        return None
    if any(text.startswith(("OMP_", "MKL_", "TORCH_", "PYTORCH_", "CUDA_")) for text in options.get("--env", [])):
        return None
    nproc = int(options["--nproc"][-1]) if "--nproc" in options else _default_nproc("--cpu" in options, environ)
    if nproc < 1:
        return None
    threads = parse_thread_count(environ.get(THREADS, "")) or max(1, cores // nproc)
    return ZygoteOptions(program, is_module=is_module, threads=threads, preload=options.get("--preload", []))


def _split(args: list[str]) -> tuple[dict[str, list[str]] | None, bool, str | None]:
    """Return the options with their values, whether the program is a module, and the program."""
    options: dict[str, list[str]] = {}
    rest = iter(args)
    for arg in rest:
        name, equals, value = arg.partition("=")
        if arg[:2] in SHORT:
            options.setdefault(SHORT[arg[:2]], []).append(arg[2:] or next(rest, ""))
            continue
        if not arg.startswith("-"):
            return options, "-m" in options or "--module" in options, arg
        if name in NO_PRESTART:
            return None, False, None
        takes_none = name in FLAGS or name.startswith("--no-")
        text = value if equals else "" if takes_none else next(rest, "")
        options.setdefault(name, []).append(text)
    return options, False, None


def _sets_variables(program: str) -> bool:
    """Whether the script sets variables before it imports torch; the agent decides whether they matter."""
    with open(program, "rb") as file:
        head = file.read(65536)
    before_torch = head.partition(b"import torch")[0]
    return b"environ" in before_torch or b"putenv" in before_torch


def _default_nproc(on_cpu: bool, environ: dict[str, str]) -> int:
    """Return the number of ranks that the plan chooses: one per visible GPU, else two."""
    gpus = sum(1 for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit())
    visible = visible_devices(environ)
    if visible is not None:
        gpus = min(gpus, len(visible))
    return 2 if on_cpu or not gpus else gpus
