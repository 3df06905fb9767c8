"""The example of FSDP2: sharded ranks learn, resume exactly, and export a model that plain torch loads."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from tests.examples.ranks import import_from, learn_and_resume
from tests.forked_ranks import Ranks


def evaluate_export(checkpoint: str, target: str) -> float:
    """Run `paceline export`, and evaluate what it wrote in plain torch."""
    from paceline.__main__ import main
    from paceline.runtime.checkpoint import export

    def go_on(_: str, argv: list[str], __: dict[str, str]) -> None:
        sys.exit(export.main(argv[3:]))

    os.execvpe = go_on  # type: ignore[assignment]  # the command continues in a new Python: stay in this one
    sys.argv = ["paceline", "export", checkpoint, "-o", target]
    with contextlib.suppress(SystemExit):
        main()
    accuracy: float = import_from("fsdp", "train").main(["--weights", target])
    return accuracy


def test_two_ranks_learn_resume_exactly_and_export(ranks: Ranks, tmp_path: Path) -> None:
    args = ["--samples", "640", "--epochs", "4"]
    accuracy, printed = learn_and_resume(ranks, "fsdp", args, tmp_path, stop_at=14, last=38)
    assert accuracy > 0.9
    assert printed.startswith("rank 0 holds 12,738 of 25,443 parameters\n"), printed
    newest = max((tmp_path / "parts" / "checkpoints").glob("step-*"))
    assert (
        ranks(evaluate_export, 1, str(newest), str(tmp_path / "model.safetensors"))[0] == accuracy
    )
