"""Run scripts of frameworks on forked ranks, and stop them in the middle as Paceline does."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import signal
import types
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.examples.ranks import import_from


def run_framework(
    example: str,
    script: str,
    runs: list[list[str]],
    stop_at: int | None = None,
    number: int = signal.SIGUSR1,
) -> list[tuple[Any, str]]:
    """Return what each run of `main` returned, or its exit code, and what it printed.

    With `stop_at`, ranks get a signal after that step: all of them if the framework handles it, as Paceline sends it
    after a common step; otherwise only the last one, and the others must learn of it.
    """
    steps = itertools.count(1)
    is_last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)

    def stop(*_: Any) -> None:
        if next(steps) == stop_at and (is_last or number == signal.SIGTERM):
            signal.raise_signal(number)

    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as in every rank
    register_optimizer_step_post_hook(stop)
    train = import_from(example, script)
    found = []
    for args in runs:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                returned = train.main(args)
            except SystemExit as leaving:
                returned = leaving.code
        found.append((returned, printed.getvalue()))
    return found


class NoDelay:
    """A timer that calls its function at once."""

    def __init__(self, _: float, function: Any) -> None:
        self.start = function


def run_hf_trainer(runs: list[list[str]], stop_at: int | None = None) -> list[tuple[Any, str]]:
    """As `run_framework`, but the just-in-time checkpoint does not wait for three seconds."""
    from transformers import trainer_jit_checkpoint

    trainer_jit_checkpoint.threading = types.SimpleNamespace(Timer=NoDelay)
    return run_framework("hf_trainer", "train", runs, stop_at, signal.SIGTERM)
