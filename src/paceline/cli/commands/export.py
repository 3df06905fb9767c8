"""`paceline export`: write a run's newest or best weights to one file."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import paceline
from paceline.cli import console, remote_output, runs, typer_options
from paceline.contract.checkpoint import (
    Marker,
    checkpoint_step,
    find_best,
    find_checkpoints,
    find_damage,
    is_complete,
    read_marker,
)
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder
from paceline.errors import CheckpointError, EnvironmentProblem, UsageError
from paceline.launch import weights
from paceline.spec.file_owner import is_own_folder

Output = Annotated[
    Path,
    typer.Option(
        "--output", "-o", help="File to write: .safetensors, or .pt, .pth or .bin for torch.load."
    ),
]
Step = Annotated[
    int | None,
    typer.Option("--step", help="Export this step; default: the newest intact checkpoint."),
]
Best = Annotated[
    bool,
    typer.Option("--best", help="Export the best checkpoint, by the metric of session(best=...)."),
]
Object = Annotated[
    str | None,
    typer.Option("--object", help="Object to export; default: `model`, or the only module."),
]

TORCH_SUFFIXES = (".pt", ".pth", ".bin")  # of files that `torch.save` writes
SUFFIXES = (".safetensors", *TORCH_SUFFIXES)

forwarded = remote_output.forwarded  # with --on


def command(
    run: runs.Run = "last",
    output: Output = Path("model.safetensors"),
    step: Step = None,
    *,
    best: Best = False,
    object_name: Object = None,
) -> int:
    """Export the weights of a run's newest intact checkpoint, under the model's own parameter names."""
    _check_output(output)
    source = _source(run)
    folder, marker = _find_intact(source, _best_step(source, step) if best else step)
    if step is None and not best:
        _name_better(source, marker.step)
    name = weights.choose_object(marker, object_name)
    names = weights.plain_names(weights.tensor_keys(folder, name))
    _export_with_torch(source, folder, name, names, output)


def _check_output(output: Path) -> None:
    if output.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"paceline export can't write {str(output)!r}: the name has to end in {', '.join(SUFFIXES[:-1])} or "
            f"{SUFFIXES[-1]}.",
            hint="Name a .safetensors file, or a .pt file for torch.load. For other formats, such as ONNX, load one of "
            "these into the model and convert it.",
        )
    typer_options.require_folder(output)


def _source(run: str) -> Path:
    """Return the path itself if it holds checkpoints, otherwise the folder of the run with that name."""
    return Path(run) if find_checkpoints(Path(run)) else runs.named(run).path


def _best_step(source: Path, step: int | None) -> int:
    """Return the step of the checkpoint that `session(best=...)` kept."""
    if step is not None:
        raise UsageError(
            "--best cannot be combined with --step: both choose a checkpoint.",
            hint="Use only one of them.",
        )
    if is_complete(source):
        raise UsageError(
            f"{source} is a single checkpoint.", hint="Leave out --best, or name the run."
        )
    found = find_best(find_checkpoints(source))
    if found is None:
        raise CheckpointError(
            f"No checkpoint in {source} has a metric value, so there is no best one.",
            hint='Pass best="val_loss:min" to paceline.session and log val_loss, or choose a checkpoint with --step.',
        )
    return found[0]


def _name_better(source: Path, step: int) -> None:
    """Say which checkpoint is the best one, if it is another than this."""
    found = None if is_complete(source) else find_best(find_checkpoints(source))
    if found is not None and found[0] != step:
        console.say_note(f"the best by {found[1].metric} is step {found[0]}: --best")


def _find_intact(source: Path, step: int | None) -> tuple[Path, Marker]:
    """Return the newest intact checkpoint, or that of `step`, and its marker."""
    found = find_checkpoints(source)
    if step is not None:
        found = [folder for folder in found if checkpoint_step(folder.name) == step]
    for folder in found:
        try:
            marker = read_marker(folder)
            problem = find_damage(folder, marker.files.items())
        except CheckpointError as error:
            problem = error.message.rstrip(".")
        if problem is None:
            return folder, marker
        console.say_note(f"skipping checkpoint {folder.name}: {problem}")
    raise CheckpointError(
        f"There is no complete checkpoint{f' of step {step}' if step is not None else ''} in {source}.",
        hint="See what the run has done with `paceline show`. Checkpoints need run.resume(...) in the script.",
    )


def _export_with_torch(
    source: Path, folder: Path, name: str, names: dict[str, str], output: Path
) -> NoReturn:
    """Continue in a Python that has torch: this one or the run's own."""
    python = sys.executable
    if importlib.util.find_spec("torch") is None:
        try:
            if not is_own_folder(source):
                raise ValueError("its Python may be any program")
            python = LaunchSpec.from_json(
                RunFolder(source).launch_spec.read_text(encoding="utf-8")
            ).python
        except (OSError, ValueError):
            raise EnvironmentProblem(
                "Export needs torch, which this Python does not have.",
                hint="Run `paceline export` where torch is installed, for example in the job's environment.",
            ) from None
    package = str(Path(paceline.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    module = "paceline.runtime.checkpoint.sharded.export"
    shown: list[str] = []  # as the laptop calls it, with --on
    remote_output.describe(output, "{path}", shown.append)
    argv = [python, "-m", module, str(folder), name, str(output), json.dumps(names), *shown]
    os.execvpe(python, argv, {**os.environ, "PYTHONPATH": path})
