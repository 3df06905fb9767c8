"""`build.sbatch`: bash that builds an environment, on a node or here.

A venv knows its own path, so it is built where it stays: in the folder of its build. It counts as built once the link
to it is there, which is made last. If two builds of the same environment run at once, the first link wins.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.redaction import has_password
from paceline.contract.run_folder import Entry
from paceline.errors import SpecError
from paceline.launch.environment.activation import engines
from paceline.slurm.sbatch_directives import Directive, file_pattern, render, require_plain_path
from paceline.spec.job import Job
from paceline.spec.quantities import slurm_size, slurm_time
from paceline.spec.shell_text import quote

MARKER = "paceline-built.json"  # in the folder of an environment: what it was built from
IMAGE = "image.sif"
SCRIPT_NAMES = {"build", "target", "link"}  # variables of the script
DEFAULT_TIME = 2 * 3600
DEFAULT_CPUS = 4

# Options that a build shares with the runs, so that it is built on nodes like theirs.
_SHARED_OPTIONS = (
    "partition",
    "account",
    "qos",
    "constraint",
    "reservation",
    "nodelist",
    "exclude",
)


@dataclass(frozen=True)
class BuildFolder:
    """`<store>/<key>.build-<id>`: the input of one build, its log, and the environment itself."""

    path: Path

    script = Entry("build.sbatch")
    # the build's variables, 0600; removed when the build ends
    environment = Entry("environment.sh")
    requirements = Entry("requirements.txt")
    constraints = Entry("constraints.txt")
    # what is installed first: torch, which other packages are compiled against
    first = Entry("first.txt")

    definition = Entry("image.def")
    marker = Entry("marker.json")  # copied to the environment
    log = Entry("log")
    job = Entry("job")  # the id of the Slurm job that builds; absent for a local build


@dataclass(frozen=True)
class BuildResources:
    """What a build asks for, independent of a run's own time and memory."""

    cpus: int = DEFAULT_CPUS
    gpus: int = 0
    memory: int | None = None  # MiB
    time: int = DEFAULT_TIME  # seconds


def build_directives(job: Job, folder: BuildFolder, size: BuildResources) -> list[Directive]:
    """Return the options of the job: one task in the runs' partition, with GPUs only on request."""
    require_plain_path(str(folder.path), "build folder")
    resources = job.resources
    found = [
        Directive("job-name", "env-build"),
        Directive("nodes", "1"),
        Directive("ntasks", "1"),
        Directive("cpus-per-task", str(size.cpus)),
    ]
    if size.gpus:
        kind = f"{resources.gpu_type}:" if resources.gpu_type else ""
        found.append(Directive("gres", f"gpu:{kind}{size.gpus}"))
    if size.memory is not None:
        found.append(Directive("mem", slurm_size(size.memory)))
    found.append(Directive("time", slurm_time(size.time)))
    for option in _SHARED_OPTIONS:
        if (value := getattr(resources, option)) is not None:
            found.append(Directive(option, value))
    return [
        *found,
        Directive("chdir", str(folder.path)),
        Directive("output", file_pattern(str(folder.log))),
        Directive("open-mode", "append"),
        Directive("no-requeue"),
        Directive("export", "ALL"),
    ]


def render_build(
    *,
    title: str,
    folder: BuildFolder,
    link: Path,
    cwd: Path,
    directives: Sequence[Directive] = (),
    modules: Sequence[str] = (),
    setup: Sequence[str] = (),
    steps: Sequence[str] = (),
) -> str:
    """Return the whole script: it builds in `folder`, and jobs find the environment at `link`.

    Paths in requirements are relative to `cwd`; `steps` are lines of bash that fill the target.
    """
    setup = ["# `setup` in paceline.toml:", *setup] if setup else []
    sections = [
        [
            "#!/bin/bash",
            f"# {title}",
            "# Written by Paceline. To build on a node: sbatch build.sbatch. To build here: bash build.sbatch",
            "#",
            *render(directives),
        ],
        [
            f"build={quote(str(folder.path))} # the input of this build, its log, and the environment",
            'target="$build/env"',
            f"link={quote(str(link))} # what jobs use; it is made when the environment is complete",
            "readonly build target link # these name what is removed: nothing below may change them",
            _START,
        ],
        [
            "# The environment, with the modules of the runs.",
            "{ set +x; } 2>/dev/null",
            'source "$build/environment.sh" || paceline_fail "Cannot read $build/environment.sh."',
            *modules,
            *setup,
            f"cd {quote(str(cwd))} || paceline_fail {quote(f'Cannot enter {cwd}.')}",
        ],
        steps,
        [_END],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


_START = f"""\

say() {{ echo "paceline: $*"; }}
paceline_fail() {{
    echo "paceline: error: $*" >&2
    exit 1
}}

# On any exit, remove the variables, and an environment that nothing links to.
clean_up() {{
    code=$?
    [ "$link" -ef "$target" ] || rm -rf "$target"
    rm -rf "$build/environment.sh" "$build/tmp"
    exit "$code"
}}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

[ -w "$build" ] || paceline_fail "Cannot write to $build from $HOSTNAME. It must be on a shared file system."
if [ -e "$link/{MARKER}" ]; then
    say "already built: $link"
    exit 0
fi"""

_END = f"""\
# The environment counts as built from here on. If another build was faster, its environment is used.
cp "$build/marker.json" "$target/{MARKER}" || paceline_fail "Cannot write to $target."
[ -e "$link" ] || rm -f "$link"
ln -sT "${{build##*/}}/env" "$link" 2>/dev/null
[ -e "$link/{MARKER}" ] || paceline_fail "Cannot link $link to $target."
say "built $link\""""


HOROVOD = "0.28.1"


# Options in requirements that uv reads as pip does. A build with others uses pip.
_UV_OPTIONS = (
    "-e ",
    "--editable",
    "--index-url",
    "--extra-index-url",
    "--find-links",
    "--no-index",
)


def venv_steps(
    *,
    python: str,
    version: str,
    lines: Sequence[str] = (),
    system_packages: bool = False,
    first: bool = False,
    horovod: bool = False,
) -> list[str]:
    """Return the lines. `version` is that of the Python here: a node with another one has a
    different Python.
    """
    system = " --system-site-packages" if system_packages else ""
    pip = [
        f'"$python" -m venv{system} "$target" ||',
        '    paceline_fail "$python cannot create a venv. On Debian, install python3-venv."',
        "export PIP_PROGRESS_BAR=off PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1",
        'packages() { "$target/bin/python" -m pip "$@"; }',
    ]
    uv = [
        f'"$uv" venv --quiet --python "$python"{system} "$target" || paceline_fail "uv cannot create a venv."',
        "export UV_INDEX_STRATEGY=unsafe-best-match UV_NO_PROGRESS=1 # choose versions as pip does",
        'packages() { "$uv" pip "$1" --python "$target/bin/python" "${@:2}"; }',
    ]
    options = [line for line in lines if line.startswith("-")]
    if not horovod and all(line.startswith(_UV_OPTIONS) for line in options):
        pip = [
            "# uv is faster than pip, but does not read the settings of pip, such as a mirror.",
            'if [ -z "$("$python" -m pip config list 2>/dev/null)" ] && uv=$(type -P uv); then',
            *(f"    {line}" for line in uv),
            "else",
            *(f"    {line}" for line in pip),
            "fi",
        ]
    found = [
        f"python={quote(python)}",
        """found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ||""",
        '    paceline_fail "Cannot run $python on $HOSTNAME."',
        f'[ "$found" = {version} ] ||',
        f'    paceline_fail "$python is $found on $HOSTNAME, but {version} where you submitted."',
        'say "creating a venv with $python ($found) on $HOSTNAME"',
        *pip,
        "# Keep downloads next to the environments: a home folder is small.",
        'export PIP_CACHE_DIR="${PIP_CACHE_DIR:-${link%/*}/cache/pip}" UV_CACHE_DIR="${link%/*}/cache/uv"',
        'install=(install --constraint "$build/constraints.txt")',
    ]
    if first:
        found += [
            "# torch first: packages that are compiled against it, or depend on any version, then find the right one.",
            'packages "${install[@]}" --requirement "$build/first.txt" || paceline_fail "Cannot install torch."',
        ]
    return [
        *found,
        'packages "${install[@]}" --requirement "$build/requirements.txt" ||',
        '    paceline_fail "Cannot install the requirements."',
        *(_horovod() if horovod else []),
        'packages check || say "note: some packages are in conflict (above)"',
        'packages freeze >"$target/packages.txt" || paceline_fail "Cannot list what was installed."',
    ]


def _horovod() -> Sequence[str]:
    """Return the lines that compile Horovod. Its source asks for an older C++ than torch's headers need."""
    return f"""\
# Compile Horovod against the torch that was just installed and the MPI of this node.
"$target/bin/python" -c 'import torch' || paceline_fail "Horovod needs torch. Add it to the requirements."
command -v mpicxx >/dev/null ||
    paceline_fail "Horovod needs mpicxx, which is not on $HOSTNAME. Load a module that has it."
packages "${{install[@]}}" 'setuptools<81' wheel packaging cloudpickle psutil pyyaml 'cmake<4' ||
    paceline_fail "pip could not install the build dependencies of Horovod."
mkdir -p "$build/tmp"
packages download --no-deps --no-binary horovod \\
    --no-build-isolation --dest "$build/tmp" horovod=={HOROVOD} ||
    paceline_fail "pip could not download the source of Horovod."
tar -xf "$build/tmp/horovod-{HOROVOD}.tar.gz" -C "$build/tmp" || paceline_fail "Cannot unpack the source of Horovod."
sed -i 's/CMAKE_CXX_STANDARD 1[14])/CMAKE_CXX_STANDARD 17)/' "$build/tmp/horovod-{HOROVOD}/CMakeLists.txt" \\
    "$build/tmp/horovod-{HOROVOD}/horovod/torch/CMakeLists.txt" || paceline_fail "Cannot prepare the source of Horovod."
# For GPUs, if torch is built for CUDA and nvcc is here; a variable that is set wins.
if [ -z "${{HOROVOD_GPU_OPERATIONS:-}}" ] && command -v nvcc >/dev/null &&
    "$target/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then
    export HOROVOD_GPU_OPERATIONS=NCCL
fi
say "compiling Horovod {HOROVOD}, which takes a few minutes"
PATH="$target/bin:$PATH" HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \\
    HOROVOD_WITH_MPI="${{HOROVOD_WITH_MPI:-1}}" HOROVOD_WITHOUT_GLOO="${{HOROVOD_WITHOUT_GLOO:-1}}" \\
    packages "${{install[@]}}" --no-build-isolation "$build/tmp/horovod-{HOROVOD}" ||
    paceline_fail "Could not compile Horovod (see above)."
"$target/bin/python" -c 'import horovod.torch' ||
    paceline_fail "Horovod was compiled but cannot be imported.\"""".splitlines()


def is_remote(image: str) -> bool:
    return "://" in image


def definition(
    *, base: str, origin: str, lines: Sequence[str], constraints: Sequence[str] = ()
) -> str:
    """Return the definition file. `origin` names the files that the requirements come from."""
    _check_lines([*lines, *constraints])
    kind, _, name = base.rpartition("://")
    text = [
        f"# Written by Paceline: {base} with the packages of {origin}.",
        "# By hand: apptainer build image.sif image.def",
        f"Bootstrap: {kind or 'localimage'}",
        f"From: {name}",
        "",
        "%post",
        "    set -e",
        "    mkdir -p /opt/paceline",
        "    cat >/opt/paceline/requirements.txt <<'END-OF-REQUIREMENTS'",
        *lines,
        "END-OF-REQUIREMENTS",
        "    cat >/opt/paceline/constraints.txt <<'END-OF-CONSTRAINTS'",
        *constraints,
        "END-OF-CONSTRAINTS",
        "    export PIP_BREAK_SYSTEM_PACKAGES=1 # a container is an environment of its own",
        "    python3 -m pip install --no-input --no-cache-dir --disable-pip-version-check --progress-bar=off \\",
        "        --requirement /opt/paceline/requirements.txt --constraint /opt/paceline/constraints.txt",
        "    rm -r /opt/paceline",
        "",
        "%labels",
        f"    paceline.base {base}",
        f"    paceline.requirements {origin}",
    ]
    return "\n".join(text) + "\n"


def _check_lines(lines: Sequence[str]) -> None:
    """Reject what must not be in an image, and what is not there inside one."""
    for line in lines:
        if has_password(line):
            address = re.sub(r"://[^@]*@", "://***@", line)
            raise SpecError(
                f"The requirement {address!r} would put a password into the image.",
                hint="Remove the address, and add it to pip's own settings inside the base image.",
            )
        if re.match(r"(-e|--editable)\b|\.{0,2}/|file:|[\w.\[\],-]+\s*@\s*file:", line):
            raise SpecError(
                f"The requirement {line!r} is a path outside of the image.",
                hint="Remove it: the project's own code travels with each run.",
            )


def image_steps(*, engine: str, base: str, installs: bool) -> list[str]:
    """Return the lines that build from the definition, or fetch the base as it is if there is nothing to install."""
    failed = '|| paceline_fail "$engine could not build the image."'
    if installs:
        make = f'"$engine" build ${{fakeroot:+"$fakeroot"}} "$target/{IMAGE}" "$build/image.def" {failed}'
    elif is_remote(base):
        make = f'"$engine" pull "$target/{IMAGE}" {quote(base)} || paceline_fail {quote(f"Cannot fetch {base}.")}'
    else:
        make = f'"$engine" build "$target/{IMAGE}" {quote(base)} {failed}'
    lines = f"""\
engine=''
for name in {" ".join(engines(engine))}; do
    if [ -z "$engine" ] && command -v "$name" >/dev/null; then engine=$name; fi
done
[ -n "$engine" ] || paceline_fail "There is neither apptainer nor singularity on $HOSTNAME."
# Keep layers and temporary files on scratch: a home folder is small, and a node's /tmp may be memory.
cache="${{link%/*}}/cache/$engine"
mkdir -p "$target" "$cache" "$build/tmp" || paceline_fail "Cannot write to ${{link%/*}}."
export APPTAINER_CACHEDIR="$cache" SINGULARITY_CACHEDIR="$cache"
export APPTAINER_TMPDIR="$build/tmp" SINGULARITY_TMPDIR="$build/tmp"
""".splitlines()
    if installs:
        lines += [
            "# Apptainer detects what it may do; Singularity needs an option if you are not root.",
            "fakeroot=''",
            '[ "$engine" = singularity ] && [ "$(id -u)" != 0 ] && fakeroot=--fakeroot',
        ]
    return [*lines, 'say "building the image with $engine on $HOSTNAME"', make]
