"""How a command enters a container: with options of srun for Pyxis, through a function of the script otherwise.

Whatever differs from node to node is decided on each node: which engine there is, which GPUs, which folders.
"""

from __future__ import annotations

import re

from paceline.errors import SpecError
from paceline.slurm.batch_script import ContainerEntry
from paceline.spec.job import Job
from paceline.spec.run_path import RunPath
from paceline.spec.shell_text import command_line, quote

FUNCTION = "paceline_inside"  # `paceline_inside COMMAND...` runs a command in the container
NO_ENGINE = 96  # its exit code where there is no engine


def container_entry(job: Job, run_path: RunPath, *, gpus: int) -> ContainerEntry:
    """Return how this job's commands enter its container; nothing for jobs without one."""
    environment = job.environment
    if environment.kind != "container":
        return ContainerEntry()
    shared = _shared_folders(job, run_path)
    for path in shared:
        if re.search("[:,]", path):
            raise SpecError(
                f"The container needs {path}, but container engines read a colon or a comma in a path as a separator.",
                hint="Move it to a path without them.",
            )
    if environment.engine == "pyxis":
        return ContainerEntry(srun_options=_pyxis_options(job, shared))
    # stop_and_requeue.sh writes `paceline_inside` to this file, where every node finds it.
    return ContainerEntry(
        prefix=["bash", '"$paceline_run/job-starts/$paceline_job_start/inside.sh"'],
        definition=_definition(job, run_path, shared, gpus=gpus),
    )


def image_path(job: Job) -> str:
    """Return the image: a relative file is the project's; one that is fetched is left as it is."""
    image = job.environment.image
    assert image is not None, "the spec requires one"
    if is_fetched(job):
        return image
    return str(job.folder / image)


def is_fetched(job: Job) -> bool:
    """Return whether the image is named by its source, not by a file."""
    image = job.environment.image or ""
    is_file = image.startswith(("/", "./")) or image.endswith((".sqsh", ".squashfs"))
    return "://" in image or (job.environment.engine == "pyxis" and not is_file)


def _shared_folders(job: Job, run_path: RunPath) -> list[str]:
    """Return the folders that the container needs at the same paths: runs, code, the project, data to be staged."""
    data = [path for path in job.tables.data.stage if path.startswith("/")]
    wanted = dict.fromkeys(
        [str(run_path.scratch / run_path.project), str(job.folder), str(job.cwd), *data]
    )
    return [path for path in wanted if not any(path.startswith(f"{other}/") for other in wanted)]


def _binds(job: Job) -> list[str]:
    """Return what the user adds: "outside:inside", or one path for both."""
    start = job.runtime.start_from
    binds = [*job.environment.binds, *([start] if start and start.startswith("/") else [])]
    return [bind if ":" in bind else f"{bind}:{bind}" for bind in binds]


def _pyxis_options(job: Job, shared: list[str]) -> list[str]:
    if job.launch.style == "mpirun":
        raise SpecError(
            f'{job.source("environment.engine")} is "pyxis", which is part of srun, but '
            f'{job.source("launch.style")} is "mpirun".',
            hint='Use another style, or engine = "apptainer".',
        )
    mounts = ",".join([*(f"{path}:{path}" for path in shared), *_binds(job)])
    options = [
        f"--container-image={image_path(job)}",
        f"--container-mounts={mounts}",
        *job.environment.engine_options,
    ]
    return [quote(option) for option in options]


def engines(engine: str) -> list[str]:
    """Apptainer and Singularity are one program under two names: look first for the one that was named."""
    return list(dict.fromkeys([engine, "apptainer", "singularity"]))


def _definition(job: Job, run_path: RunPath, shared: list[str], *, gpus: int) -> list[str]:
    """Return the function as lines of bash."""
    found = " || ".join(f"type -P {engine}" for engine in engines(job.environment.engine))
    data_folder = job.tables.data.folder
    fixed = [
        *job.environment.engine_options,
        *(arg for bind in _binds(job) for arg in ("--bind", bind)),
    ]
    return [
        "# How a node enters the container: it uses the engine and the GPUs that it has, and mounts those of the job's",
        "# folders that exist on it.",
        "# shellcheck disable=SC2317 # the nodes call it",
        f"{FUNCTION}() {{",
        "    local paceline_engine paceline_options=() paceline_folder",
        f"    paceline_engine=$({found}) || {{",
        '        echo "paceline: error: There is neither apptainer nor singularity on $HOSTNAME." >&2',
        f"        exit {NO_ENGINE}",
        "    }",
        *(_GPUS if gpus else []),
        *(_data_folder_lines(data_folder) if data_folder else []),
        "    for paceline_folder in \\",
        *(f"        {quote(path)} \\" for path in shared),
        *(['        "$paceline_folder" \\'] if data_folder else []),
        '        "${SLURM_TMPDIR:-}" "${TMPDIR:-}"; do',
        '        [ -d "$paceline_folder" ] && paceline_options+=(--bind "$paceline_folder:$paceline_folder")',
        "    done",
        "    export PYTHONNOUSERSITE=1 # use the image's packages, not those in the home folder",
        "    # Keep the engine from creating a folder in the home folder.",
        '    [ -e ~/.apptainer ] || export APPTAINER_CONFIGDIR="${PACELINE_RUN:-$HOME/.cache}/.apptainer-$UID"',
        *(_cache_lines(run_path) if is_fetched(job) else []),
        f'    exec "$paceline_engine" exec "${{paceline_options[@]}}" {command_line([*fixed, image_path(job)])} "$@"',
        "}",
    ]


_GPUS = [
    "    [ -e /dev/nvidiactl ] && paceline_options+=(--nv)",
    "    [ -e /dev/kfd ] && paceline_options+=(--rocm)",
]


def _data_folder_lines(folder: str) -> list[str]:
    """`[data] folder` may name variables of the node. If it does not exist yet, bind the nearest folder above it."""
    text = ""
    for part in re.split(r"(\$\{\w+\}|\$\w+)", re.sub(r"^~(?=/|$)", "$HOME", folder)):
        name = part.strip("${}")
        is_variable = part.startswith("$") and name.isidentifier()
        text += f'"${{{name}:?}}"' if is_variable else quote(part) if part else ""
    return [
        f"    paceline_folder={text}",
        '    until [ -d "$paceline_folder" ] || [ "$paceline_folder" = "${paceline_folder%/*}" ]; do',
        "        paceline_folder=${paceline_folder%/*}",
        "    done",
    ]


def _cache_lines(run_path: RunPath) -> list[str]:
    """Keep what the engine fetches out of the home folder, which is small."""
    return [
        f'    [ -n "${{APPTAINER_CACHEDIR:-}}" ] || APPTAINER_CACHEDIR={quote(str(run_path.scratch / ".containers"))}',
        '    export APPTAINER_CACHEDIR SINGULARITY_CACHEDIR="$APPTAINER_CACHEDIR"',
        '    mkdir -p "$APPTAINER_CACHEDIR"',
    ]
