"""`paceline export`: a run's newest weights as one plain safetensors file. Needs no torch."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import paceline
from paceline.cli import console, runs
from paceline.cluster.runs import weights
from paceline.contract.checkpoint import marker as markers
from paceline.contract.checkpoint.marker import Marker
from paceline.contract.checkpoint.names import checkpoint_step
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder
from paceline.errors import CheckpointError, EnvironmentProblem, UsageError

Output = Annotated[Path, typer.Option("--output", "-o", help="The file to write.")]
Step = Annotated[int | None, typer.Option("--step", help="This checkpoint; else the newest sound one.")]
Object = Annotated[
    str | None, typer.Option("--object", help="Whose weights; else `model`, or the only module.")
]


def command(
    run: runs.Run = "last",
    output: Output = Path("model.safetensors"),
    step: Step = None,
    which: Object = None,
) -> int:
    """Write the weights of a run's newest sound checkpoint, under the names the model itself gives them."""
    where = _folder(run)
    folder, marker = _sound_one(where, step)
    name = weights.choose_object(marker, which)
    refs = weights.references(folder, name)
    names = weights.plain_names(list(refs))
    if not output.parent.is_dir():
        raise UsageError(f"there is no folder {output.parent}", hint="make it first, or give another -o")
    if any("$sharded" in each for each in refs.values()):
        _gather_with_torch(where, folder, name, names, output)
    tables = weights.read_tables(folder, marker)
    tensors = {names[key]: tables[each["$tensor"]] for key, each in refs.items()}
    size = weights.write(output, tensors, metadata={"step": str(marker.step), "object": name})
    console.say_note(f"{output}: {len(tensors)} tensors, {size / 1e6:.1f} MB, step {marker.step}")
    return 0


def _folder(run: str) -> Path:
    """A folder that holds checkpoints, or the run of that name."""
    return Path(run) if markers.checkpoints_at(Path(run)) else runs.named(run).path


def _sound_one(where: Path, step: int | None) -> tuple[Path, Marker]:
    found = markers.checkpoints_at(where)
    if step is not None:
        found = [each for each in found if checkpoint_step(each.name) == step]
    for folder in found:
        try:
            marker = markers.read(folder)
            problem = markers.damage(folder, marker.files.items())
        except CheckpointError as error:
            problem = error.message
        if problem is None:
            return folder, marker
        console.say_note(f"checkpoint {folder.name} is skipped: {problem}")
    raise CheckpointError(
        f"there is no complete checkpoint{f' of step {step}' if step is not None else ''} in {where}",
        hint="`paceline show` tells what the run has done; a checkpoint is written by run.resume(...) and its saves",
    )


def _gather_with_torch(where: Path, folder: Path, name: str, names: dict[str, str], output: Path) -> NoReturn:
    """Sharded state is in torch's own format: go on as the Python that has torch."""
    python = sys.executable
    if importlib.util.find_spec("torch") is None:
        try:
            python = LaunchSpec.from_json(RunFolder(where).launch_spec.read_text(encoding="utf-8")).python
        except (OSError, ValueError):
            raise EnvironmentProblem(
                f"{folder.name} was saved sharded (FSDP2), and this Python has no torch to put it together",
                hint="run `paceline export` where torch is installed, for instance in the job's environment",
            ) from None
    home = str(Path(paceline.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH", "")]))
    words = [
        python,
        "-m",
        "paceline.runtime.checkpoint.gather",
        str(folder),
        name,
        str(output),
        json.dumps(names),
    ]
    try:
        os.execvpe(python, words, {**os.environ, "PYTHONPATH": path})
    except OSError as error:
        raise EnvironmentProblem(
            f"{python} cannot be started: {error.strerror}",
            hint="run `paceline export` where torch is installed",
        ) from None
