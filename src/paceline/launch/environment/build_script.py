"""`build.sbatch`: bash that builds an environment, on a node or here.

A venv knows its own path, so it is built where it will be used. It counts as built once a marker file is there, which
is written last; a builder that was killed leaves a folder without one, which the next builder removes. Builders of the
same environment take turns with a lock, which can be taken over from a builder that is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.files.folder_entry import Entry
from paceline.contract.quote import quote
from paceline.slurm.sbatch_directives import Directive, file_pattern, render, require_plain_path
from paceline.spec import Job
from paceline.spec.quantities import slurm_size, slurm_time

MARKER = "paceline-built.json"  # in the folder of an environment, written last
IMAGE = "image.sif"
SCRIPT_NAMES = {"build", "target", "lock", "me"}  # variables of the script
LOCK = ".lock"  # appended to the folder's name
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
    """`<store>/<key>.build-<id>`: the input of one build, and its log."""

    path: Path

    script = Entry("build.sbatch")
    # the build's variables, 0600; removed when the build ends
    environment = Entry("environment.sh")
    requirements = Entry("requirements.txt")
    constraints = Entry("constraints.txt")
    # what is installed first: torch, which other packages are compiled against
    first = Entry("first.txt")

    definition = Entry("image.def")
    marker = Entry("marker.json")  # the marker, until it is moved to the environment
    log = Entry("log")
    job = Entry("job")  # the id of the Slurm job that builds; absent for a local build


@dataclass(frozen=True)
class BuildResources:
    """What a build asks for, independent of a run's own time and memory."""

    cpus: int = DEFAULT_CPUS
    gpus: int = 0
    memory: int | None = None  # MiB
    time: int = DEFAULT_TIME  # seconds


@dataclass(frozen=True)
class BuildScript:
    """Everything that the script's text depends on."""

    title: str
    folder: BuildFolder
    target: Path  # the environment
    cwd: Path  # paths in requirements are relative to it
    directives: Sequence[Directive] = ()
    modules: Sequence[str] = ()  # lines of bash
    setup: Sequence[str] = ()
    steps: Sequence[str] = ()  # lines of bash that fill the target


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


def render_build(build: BuildScript) -> str:
    """Return the whole script."""
    head = [
        "#!/bin/bash",
        f"# {build.title}",
        "# Written by Paceline. To build on a node: sbatch build.sbatch. To build here: bash build.sbatch",
        "#",
        *render(build.directives),
    ]
    sections = [head, _functions(build), _turn(), _environment(build), list(build.steps), _end()]
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def _functions(build: BuildScript) -> list[str]:
    return f"""\
build={quote(str(build.folder.path))} # the input of this build, and its log
target={quote(str(build.target))}
lock="$target{LOCK}"

say() {{ echo "paceline: $*"; }}
paceline_fail() {{
    echo "paceline: error: $*" >&2
    exit 1
}}

# The environment is complete when this file exists, because it is written last.
is_built() {{ [ -e "$target/{MARKER}" ]; }}

# A builder is a job, or a process on a host.
me="process-$HOSTNAME-$$"
[ -n "${{SLURM_JOB_ID:-}}" ] && me="job-$SLURM_JOB_ID"
readonly build target lock me # these name what a failed build removes: nothing below may change them
interval=${{PACELINE_POLL_INTERVAL:-60}} # seconds between questions to Slurm
case $interval in *[!0-9]*) interval=60 ;; esac
asked=-$interval
is_alive() {{
    case $1 in
        job-*)
            [ $((SECONDS - asked)) -ge "$interval" ] || return 0
            asked=$SECONDS
            state=$(unset "${{!SQUEUE_@}}"; squeue --all --noheader --jobs="${{1#job-}}" --format=%T 2>&1)
            [ -n "$state" ] && [ "${{state#*Invalid job id}}" = "$state" ]
            ;;
        process-"$HOSTNAME"-*) kill -0 "${{1##*-}}" 2>/dev/null ;;
        *) true ;; # on another host: unknown here
    esac
}}

# One builder at a time. The lock is a folder with a file that is named after the builder, renamed into place whole.
# To take over the lock of a builder that is gone, rename that file: only one builder succeeds.
take_lock() {{
    mkdir -p "$build/lock" && : >"$build/lock/$me"
    [ -e "$build/lock/$me" ] ||
        paceline_fail "Cannot write to $build from $HOSTNAME. It must be on a shared file system."
    mv -T "$build/lock" "$lock" 2>/dev/null && return
    for other in "$lock"/*; do
        other=${{other##*/}}
        [ "$other" = "$me" ] && return
        if [ -e "$lock/$other" ] && ! is_alive "$other"; then
            mv "$lock/$other" "$lock/$me" 2>/dev/null && return
        fi
    done
    return 1
}}""".splitlines()


def _turn() -> list[str]:
    """Wait until the environment is built, or until it is this builder's turn."""
    return """\
# On any exit, even while waiting, remove an incomplete environment, the lock and the variables.
clean_up() {
    code=$?
    if [ -e "$lock/$me" ]; then
        is_built || rm -rf "$target"
        rm -f "$lock/$me"
        rmdir "$lock" 2>/dev/null
    fi
    rm -rf "$build/lock" "$build/environment.sh" "$build/tmp"
    exit "$code"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

waiting=''
until is_built || take_lock; do
    if [ -z "$waiting" ] && [ -e "$lock/$other" ]; then
        waiting=1
        say "waiting for $other, which is building it (if that builder no longer exists: rm -r $lock)"
    fi
    sleep 2
done
if is_built; then
    say "already built: $target"
    exit 0
fi
rm -rf "$target" # left by a builder that was killed\
""".splitlines()


def _environment(build: BuildScript) -> list[str]:
    lines = [
        "# The environment, with the modules of the runs.",
        "{ set +x; } 2>/dev/null",
        'source "$build/environment.sh" || paceline_fail "Cannot read $build/environment.sh."',
        *build.modules,
    ]
    if build.setup:
        lines += ["# `setup` in paceline.toml:", *build.setup]
    return [
        *lines,
        f"cd {quote(str(build.cwd))} || paceline_fail {quote(f'Cannot enter {build.cwd}.')}",
    ]


def _end() -> list[str]:
    return [
        "# The environment counts as built from here on.",
        f'cp "$build/marker.json" "$target/{MARKER}.partial" && mv "$target/{MARKER}.partial" "$target/{MARKER}"',
        'is_built || paceline_fail "Cannot write to $target."',
        'say "built $target"',
    ]
