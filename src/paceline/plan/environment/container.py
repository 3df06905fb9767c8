"""How a command is put into a container: words of srun for Pyxis, and a function of the batch script for the others.

Whatever differs from node to node is decided on each node: which engine there is, which GPUs, which folders.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.errors import SpecError
from paceline.plan.quote import command_line, quote
from paceline.plan.run_path import RunPath
from paceline.spec import Job

FUNCTION = "inside"  # `inside COMMAND...` runs a command in the container
_FILE = '"$run/job-starts/$job_start/inside.sh"'


@dataclass(frozen=True)
class Wrapping:
    """Options of srun, words ahead of the command (already quoted), and the lines that those words rely on."""

    srun: list[str]
    prefix: list[str]
    definition: list[str]  # what `inside` is
    hand_out: list[str]  # puts it where every node finds it


NO_WRAPPING = Wrapping([], [], [], [])


def wrapping(job: Job, run_path: RunPath, *, gpus: int) -> Wrapping:
    """Nothing outside containers."""
    environment = job.environment
    if environment.kind != "container":
        return NO_WRAPPING
    shared = _shared(job, run_path)
    for path in shared:
        if re.search("[:,]", path):
            raise SpecError(
                f"the container must see {path}, and a colon or a comma in its path would be taken for a separator",
                hint="move it to a path without them",
            )
    if environment.engine == "pyxis":
        return Wrapping(_pyxis(job, shared), [], [], [])
    return Wrapping(
        srun=[],
        prefix=["bash", _FILE],
        definition=_definition(job, run_path, shared, gpus=gpus),
        hand_out=[
            "# Every node finds its way into the container in a file.",
            f'{{ declare -f {FUNCTION} && echo \'{FUNCTION} "$@"\'; }} >{_FILE} || fail "cannot write to $run"',
        ],
    )


def image_path(job: Job) -> str:
    """The image: a relative file is the project's; what has to be fetched is left as it is."""
    image = job.environment.image
    assert image is not None, "the spec sees to it"
    if is_fetched(job):
        return image
    return str(job.folder / image)


def is_fetched(job: Job) -> bool:
    """Whether the image is named by where it comes from, not by a file."""
    image = job.environment.image or ""
    is_file = image.startswith(("/", "./")) or image.endswith((".sqsh", ".squashfs"))
    return "://" in image or (job.environment.engine == "pyxis" and not is_file)


def _shared(job: Job, run_path: RunPath) -> list[str]:
    """Folders that must be seen inside where they are: runs, copies of the code, the project, data to be staged."""
    data = [path for path in job.data.stage if path.startswith("/")]
    wanted = dict.fromkeys([str(run_path.scratch / run_path.project), str(job.folder), str(job.cwd), *data])
    return [path for path in wanted if not any(path.startswith(f"{other}/") for other in wanted)]


def _binds(job: Job) -> list[str]:
    """What the user adds: "outside:inside", or one path for both."""
    return [bind if ":" in bind else f"{bind}:{bind}" for bind in job.environment.binds]


def _pyxis(job: Job, shared: list[str]) -> list[str]:
    if job.launch.style == "mpirun":
        raise SpecError(
            f'{job.source("environment.engine")} is "pyxis", which is part of srun, but '
            f'{job.source("launch.style")} is "mpirun"',
            hint='use another style, or engine = "apptainer"',
        )
    mounts = ",".join([*(f"{path}:{path}" for path in shared), *_binds(job)])
    words = [
        f"--container-image={image_path(job)}", f"--container-mounts={mounts}", *job.environment.engine_options
    ]  # fmt: skip
    return [quote(word) for word in words]


def engines(job: Job) -> list[str]:
    """Apptainer and Singularity are one program under two names: the one that was named is looked for first."""
    return list(dict.fromkeys([job.environment.engine, "apptainer", "singularity"]))


def _definition(job: Job, run_path: RunPath, shared: list[str], *, gpus: int) -> list[str]:
    """The function, as lines of bash."""
    found = " || ".join(f"type -P {engine}" for engine in engines(job))
    of_data = job.data.folder
    fixed = [*job.environment.engine_options, *(word for bind in _binds(job) for word in ("--bind", bind))]
    return [
        "# A node's way into the container: by the engine that it has, with its GPUs, and with those folders that the",
        "# job needs, as far as they are there.",
        "# shellcheck disable=SC2317 # the nodes call it",
        f"{FUNCTION}() {{",
        "    local engine options=() folder",
        f"    engine=$({found}) || {{",
        '        echo "paceline: there is neither apptainer nor singularity on $HOSTNAME" >&2',
        "        exit 127",
        "    }",
        *(_GPUS if gpus else []),
        *(_folder_of_data(of_data) if of_data else []),
        "    for folder in \\",
        *(f"        {quote(path)} \\" for path in shared),
        *(['        "$folder" \\'] if of_data else []),
        '        "${SLURM_TMPDIR:-}" "${TMPDIR:-}"; do',
        '        [ -d "$folder" ] && options+=(--bind "$folder:$folder")',
        "    done",
        "    export PYTHONNOUSERSITE=1 # packages of the image, not those in the home folder",
        "    # An engine makes itself a folder in a home that has none yet: not for our sake.",
        '    [ -e ~/.apptainer ] || export APPTAINER_CONFIGDIR="${PACELINE_RUN:-/tmp}/.apptainer-$UID"',
        *(_cache(run_path) if is_fetched(job) else []),
        f'    exec "$engine" exec "${{options[@]}}" {command_line([*fixed, image_path(job)])} "$@"',
        "}",
    ]


_GPUS = [
    "    [ -e /dev/nvidiactl ] && options+=(--nv)",
    "    [ -e /dev/kfd ] && options+=(--rocm)",
]


def _folder_of_data(folder: str) -> list[str]:
    """`[data] folder`, in which variables of the node may stand. It need not be there yet: then what is above it."""
    text = ""
    for word in re.split(r"(\$\{\w+\}|\$\w+)", re.sub(r"^~(?=/|$)", "$HOME", folder)):
        name = word.strip("${}")
        is_variable = word.startswith("$") and name.isidentifier()
        text += f'"${{{name}:?}}"' if is_variable else quote(word) if word else ""
    return [
        f"    folder={text}",
        '    until [ -d "$folder" ] || [ "$folder" = "${folder%/*}" ]; do folder=${folder%/*}; done',
    ]


def _cache(run_path: RunPath) -> list[str]:
    """Where the engine keeps what it fetches: not in the home folder, which is small."""
    return [
        f'    [ -n "${{APPTAINER_CACHEDIR:-}}" ] || APPTAINER_CACHEDIR={quote(str(run_path.scratch / ".containers"))}',
        '    export APPTAINER_CACHEDIR SINGULARITY_CACHEDIR="$APPTAINER_CACHEDIR"',
        '    mkdir -p "$APPTAINER_CACHEDIR"',
    ]
