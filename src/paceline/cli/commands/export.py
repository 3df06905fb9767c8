"""`paceline export`: write a run's newest or best weights to one file."""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import paceline
from paceline.cli import console, runs, typer_options
from paceline.contract.checkpoint import (
    Marker,
    checkpoint_step,
    find_best,
    find_checkpoints,
    find_damage,
    read_marker,
)
from paceline.contract.run_folder import RunFolder
from paceline.errors import CheckpointError, EnvironmentProblem, UsageError
from paceline.launch.resume import read_launch_spec
from paceline.spec.user_files import is_own_folder


def command(
    run: runs.Run = "last",
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="File to write: .safetensors, or .pt, .pth or .bin for torch.load.",
        ),
    ] = Path("model.safetensors"),
    step: Annotated[
        int | None,
        typer.Option("--step", help="Export this step; default: the newest intact checkpoint."),
    ] = None,
    *,
    best: Annotated[
        bool,
        typer.Option(
            "--best", help="Export the best checkpoint, by the metric of session(best=...)."
        ),
    ] = False,
    object_name: Annotated[
        str | None,
        typer.Option("--object", help="Object to export; default: `model`, or the only module."),
    ] = None,
) -> NoReturn:
    """Export the weights of a run's newest intact checkpoint, under the model's own parameter names."""
    if output.suffix.lower() not in (".safetensors", ".pt", ".pth", ".bin"):
        raise UsageError(
            f"paceline export can't write {str(output)!r}: the name has to end in .safetensors, .pt, .pth or .bin.",
            hint="For other formats, such as ONNX, load one of these into the model and convert it.",
        )
    typer_options.require_folder(output)
    # the path itself, if it holds checkpoints
    source = Path(run) if find_checkpoints(Path(run)) else runs.named(run).path
    found = find_best(find_checkpoints(source))
    if best and (found is None or step is not None):
        raise CheckpointError(
            f"There is no best checkpoint in {source}, or you chose another one with --step.",
            hint='Pass best="val_loss:min" to paceline.session and log val_loss.',
        )
    folder, marker = _find_intact(source, found[0] if best and found else step)
    if found is not None and step is None and found[0] != marker.step:
        console.say_note(f"the best by {found[1].metric} is step {found[0]}: --best")
    name = choose_object(marker, object_name)
    _export_with_torch(source, [str(folder), name, str(output)])


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


def _export_with_torch(source: Path, words: list[str]) -> NoReturn:
    """Continue in a Python that has torch: this one or the run's own, unless the run is another user's."""
    python = sys.executable
    if importlib.util.find_spec("torch") is None:
        python = ""
        with suppress(EnvironmentProblem):
            python = read_launch_spec(RunFolder(source)).python if is_own_folder(source) else ""
    if not python:
        raise EnvironmentProblem(
            "Export needs torch, which this Python does not have.",
            hint="Run `paceline export` where torch is installed, for example in the job's environment.",
        )
    package = str(Path(paceline.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    module = "paceline.runtime.checkpoint.export"
    os.execvpe(python, [python, "-m", module, *words], {**os.environ, "PYTHONPATH": path})


def choose_object(marker: Marker, name: str | None) -> str:
    """Return the object to export: the requested one, `model`, or the only module."""
    modules = [module for module, kind in marker.objects.items() if kind == "module"]
    if name is not None:
        if marker.objects.get(name) == "rank":
            raise UsageError(
                f"{name!r} has separate state on each rank, so it cannot be exported to one file.",
                hint=f"Choose one of {', '.join(modules) or 'none'}.",
            )
        if name in marker.objects:
            return name
        raise UsageError(
            f"The checkpoint has no object {name!r}.",
            hint=f"Use one of {', '.join(marker.objects)}.",
        )
    if "model" in modules:
        return "model"
    if len(modules) == 1:
        return modules[0]
    raise UsageError(
        f"The checkpoint has {len(modules)} modules: {', '.join(modules) or 'none'}.",
        hint="Choose one with --object NAME.",
    )
